"""Convert the standard library of the running interpreter to a knowledge graph.

    python benchmarks/stdlib_kg.py --output demo/stdlib-triples

Every source file of the library is parsed, never imported. Modules, classes, functions, names of methods
and names of arguments become typed entities; definitions, imports, calls and the like become triples. Names
are resolved through imports, re-exports, star imports and plain aliases to their definition; a name that
cannot be resolved is dropped. The output is train.tsv, valid.tsv and test.tsv (head, relation, tail),
entity_types.tsv (entity, type) and summary.json. The same interpreter gives the same files every time.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import hashlib
import inspect
import json
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from stdlib_source import Module, read_module

Triple = tuple[str, str, str]

CALLABLES = ("function", "class", "method")
SCHEMA: dict[str, list[tuple[str, str]]] = {
    "submodule_of": [("module", "module")],
    "imports": [("module", "module")],
    "defined_in": [("class", "module"), ("function", "module")],
    "inherits_from": [("class", "class")],
    "has_method": [("class", "method")],
    "takes_argument": [("function", "argument"), ("method", "argument")],
    "calls": [*(("function", callee) for callee in CALLABLES), *(("class", callee) for callee in CALLABLES)],
    "raises": [("function", "class"), ("class", "class")],
    "uses_decorator": [("function", "function"), ("method", "function"), ("method", "class")],
}
"""Relation to its pairs of entity types; a triple with any other pair is dropped."""

SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo"}


@dataclass
class Graph:
    """Resolved triples, the type of each entity, and the modules by name."""

    types: dict[str, str]
    modules: dict[str, Module]
    triples: set[Triple] = field(default_factory=set)

    def add(self, head: str, head_type: str, relation: str, tail: str, tail_type: str) -> None:
        """Add a triple, unless an end has another type already or the schema lacks the pair of types."""
        # The first type of an entity counts: a data set gives each entity one type.
        known = (self.types.get(head, head_type), self.types.get(tail, tail_type))
        if known == (head_type, tail_type) and known in SCHEMA[relation] and head != tail:
            self.types[head], self.types[tail] = known
            self.triples.add((head, relation, tail))


def extract_triples(root: Path) -> tuple[list[Triple], dict[str, str]]:
    """Extract the triples of all source files below a folder.

    Parameters
    ----------
    root : Path
        A folder on Python's import path, e.g. that of the standard library.

    Returns
    -------
    triples : list of (head, relation, tail)
        Sorted, without duplicates.
    types : dict
        Type of each entity of a triple.
    """
    modules = {module.name: module for module in read_modules(root)}
    graph = Graph(types=dict.fromkeys(modules, "module"), modules=modules)
    add_builtins(graph)
    # All definitions first: a name can only be resolved to an entity whose type is known.
    for module in graph.modules.values():
        for definition_triple in module.definitions:
            graph.add(*definition_triple)
    for module in graph.modules.values():
        add_references(module, graph)
    ends = {end for head, _, tail in graph.triples for end in (head, tail)}
    return sorted(graph.triples), {name: kind for name, kind in sorted(graph.types.items()) if name in ends}


def read_modules(root: Path) -> Iterator[Module]:
    """Read the source files below a folder, except tests and files with syntax errors."""
    for name, is_package, tree in parsed_files(root):
        yield read_module(name, is_package, tree)


def parsed_files(root: Path) -> Iterator[tuple[str, bool, ast.Module]]:
    """Yield the name of each module below a folder, whether it is a package, and its parsed source."""
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        parts = parts[:-1] if is_package else parts
        # A file whose name is no identifier cannot be imported, so it is no module.
        if not parts or SKIPPED_FOLDERS.intersection(parts) or not all(part.isidentifier() for part in parts):
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue
        yield ".".join(parts), is_package, tree


def add_builtins(graph: Graph) -> None:
    """Add the built-in functions and classes, which have no Python source, under their public names."""
    for name, value in sorted(vars(builtins).items()):
        if isinstance(value, type) and value.__name__ == name:
            graph.add(name, "class", "defined_in", "builtins", "module")
            for base in value.__bases__:
                graph.add(name, "class", "inherits_from", base.__name__, "class")
            for method in vars(value):
                if not method.startswith("_") and callable(getattr(value, method)):
                    graph.add(name, "class", "has_method", f"method:{method}", "method")
        elif inspect.isbuiltin(value):
            graph.add(name, "function", "defined_in", "builtins", "module")


def add_references(module: Module, graph: Graph) -> None:
    """Resolve the names that a module refers to, and add the triples whose tail is a known entity."""
    parent = module.name.rpartition(".")[0]
    if parent in graph.modules:
        graph.add(module.name, "module", "submodule_of", parent, "module")
    target: str | None
    for head, head_type, relation, path in module.references:
        if relation == "imports":
            target = imported_module(path, graph)
        else:
            target = definition(path, module, graph)
            # The class of an object is unknown without running the code; the method's name alone is kept.
            owner, _, attribute = path.rpartition(".")
            if target is None and relation == "calls" and attribute != path and owner not in module.names:
                target = f"method:{attribute}"
        if target in graph.types:
            graph.add(head, head_type, relation, target, graph.types[target])


def imported_module(statement: str, graph: Graph) -> str:
    """Return the module that ``import a.b`` or ``from a b`` loads, including modules written in C."""
    _, source, *names = statement.split(" ")
    target = ".".join([source, *names])
    target = target if target in graph.modules else source
    if target in getattr(sys, "stdlib_module_names", sys.builtin_module_names):
        graph.types.setdefault(target, "module")
    return target


def definition(path: str, module: Module, graph: Graph, depth: int = 8) -> str | None:
    """Resolve a dotted path in a module to the full name of a class or function.

    Returns
    -------
    str or None
        None if the path leads to code that was not read. `depth` ends circular re-exports.
    """
    first, _, rest = path.partition(".")
    if not first or depth == 0:
        return None
    if first not in module.names:
        for star in module.stars:
            target = (
                definition(path, graph.modules[star], graph, depth - 1) if star in graph.modules else None
            )
            if target:
                return target
        return path if path in graph.types and not rest else None
    path = ".".join([module.names[first], *([rest] if rest else [])])
    if graph.types.get(path) in ("class", "function"):
        return path
    prefix, attributes = path, ""
    while prefix and prefix not in graph.modules:
        prefix, _, last = prefix.rpartition(".")
        attributes = ".".join([last, *([attributes] if attributes else [])])
    if prefix and attributes:
        return definition(attributes, graph.modules[prefix], graph, depth - 1)
    return definition(path, module, graph, depth - 1) if path.partition(".")[0] != first else None


def split_triples(triples: Iterable[Triple], types: dict[str, str]) -> dict[str, list[Triple]]:
    """Split triples 90/5/5 by a hash of their line: adding a triple moves no other.

    A valid or test triple whose head, tail, or relation between its two types has no training triple goes to
    the training split, since the model would have no trained row for it.
    """
    splits: dict[str, list[Triple]] = {"train": [], "valid": [], "test": []}
    held_out: list[tuple[str, Triple]] = []
    seen: set[str] = set()

    def train(triple: Triple) -> None:
        splits["train"].append(triple)
        seen.update(parts(triple))

    def parts(triple: Triple) -> tuple[str, str, str]:
        head, relation, tail = triple
        return head, tail, f"{relation} {types[head]} {types[tail]}"

    for triple in triples:
        digest = hashlib.blake2b("\t".join(triple).encode(), digest_size=8).digest()
        # Of a hash and not of Python's hash(): that differs between processes for strings.
        percent = int.from_bytes(digest, "big") % 100
        if percent < 10:
            held_out.append(("test" if percent < 5 else "valid", triple))
        else:
            train(triple)
    # After all training triples: whether a row is trained is known only now.
    for name, triple in held_out:
        if seen.issuperset(parts(triple)):
            splits[name].append(triple)
        else:
            train(triple)
    return splits


def summarise(splits: dict[str, list[Triple]], types: dict[str, str]) -> dict[str, object]:
    """Count triples by split and by relation with its types, and entities by type."""
    triples = [triple for split in splits.values() for triple in split]
    relations = Counter(f"{relation} ({types[head]} → {types[tail]})" for head, relation, tail in triples)
    return {
        "python": sys.version.split()[0],
        "entities": dict(sorted(Counter(types.values()).items())),
        "relations": dict(sorted(relations.items())),
        "splits": {name: len(split) for name, split in splits.items()},
    }


def write_graph(output: Path, splits: dict[str, list[Triple]], types: dict[str, str]) -> None:
    """Write the split triples, the entities' types and the summary into a folder."""
    output.mkdir(parents=True, exist_ok=True)
    files: dict[str, Iterable[tuple[str, ...]]] = {**splits, "entity_types": types.items()}
    for name, rows in files.items():
        text = "".join("\t".join(row) + "\n" for row in rows)
        (output / f"{name}.tsv").write_text(text, encoding="utf-8")
    text = json.dumps(summarise(splits, types), indent=2, ensure_ascii=False) + "\n"
    (output / "summary.json").write_text(text, encoding="utf-8")


def print_summary(summary: dict[str, object], output: Path) -> None:
    """Print the counts as one table."""
    print(f"the standard library of Python {summary['python']} as a knowledge graph, in {output}")
    for noun in ("entities", "relations", "splits"):
        counts = summary[noun]
        if isinstance(counts, dict):
            print(f"\n  {noun:<40}{sum(counts.values()):>9,}")
            for name, count in counts.items():
                print(f"    {name:<38}{count:>9,}")


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        description="Convert Python's standard library to a knowledge graph.",
        epilog="example: python benchmarks/stdlib_kg.py --output demo/stdlib-triples",
    )
    parser.add_argument("--output", type=Path, required=True, help="folder to write the files to")
    library = Path(sysconfig.get_path("stdlib"))
    parser.add_argument("--source", type=Path, default=library, help="library to read (default: %(default)s)")
    options = parser.parse_args(arguments)
    if not options.source.is_dir():
        parser.error(f"no such folder: {options.source}")
    triples, types = extract_triples(options.source)
    splits = split_triples(triples, types)
    write_graph(options.output, splits, types)
    print_summary(summarise(splits, types), options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
