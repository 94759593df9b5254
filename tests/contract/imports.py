"""Who may import whom: the table of the house, and what breaks it.

The rooms are the folders and files of ``dglkge/``, and ``partition_tools/``. A room imports rooms of lower
floors; inside a room everything goes that is no circle.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

FLOORS = {
    8: {"train_job", "__main__", "partition_tools"},
    7: {"cli"},
    6: {"report", "serving"},
    5: {"training", "inference", "tuning"},
    4: {"step", "train_arguments"},
    3: {"sampling", "embeddings", "checkpoint", "evaluation", "launch", "planning", "partition"},
    2.5: {"formats"},
    2: {"data", "model", "distributed", "config"},
    1: {"typing", "registry", "errors", "settings", "file_lock", "optim", "kernels"},
}
FLOOR = {room: floor for floor, rooms in FLOORS.items() for room in rooms}

FILES_ALONE = ["dgl", "torch.distributed"]
NEVER = {
    "dglkge": ["partition_tools", "tests", "examples", "benchmarks"],
    "dglkge.optim": ["dglkge"],
    "dglkge.kernels": ["dglkge", "torch", "dgl"],
    "dglkge.model": ["dgl", "h5py"],
    "dglkge.config": ["torch"],
    "dglkge.data": ["dgl"],
    "dglkge.formats": ["dgl"],
    "dglkge.checkpoint.layout": FILES_ALONE,
    "dglkge.checkpoint.hdf5_format": FILES_ALONE,
    "dglkge.checkpoint.storage": FILES_ALONE,
    "dglkge.checkpoint.reader": FILES_ALONE,
    "dglkge.evaluation": ["dgl"],
    "dglkge.inference": ["dgl"],
    "dglkge.report": ["dgl"],
    "dglkge.serving": ["dgl"],
    "dglkge.launch": ["dglkge.training"],
}
"""What a room or file never imports, whatever the floors say."""

NAMES_ONLY = ("dglkge.checkpoint.layout", "dglkge.checkpoint.lineage")
"""Modules that any room may import: they import the standard library and one another only."""

OUTSIDE = {"dglkge", "dgl", "h5py", "numba", "numpy", "pandas", "pyarrow", "pydantic", "rich", "torch"}
OUTSIDE |= {"tqdm", "yaml"}
OUTSIDE |= {"faiss", "fastapi", "jinja2", "plotly", "pyoxigraph", "sklearn", "uvicorn"}
"""First words of names that are not the standard library's."""

ONLY_IN = {"numba": "dglkge.kernels.jit"}
"""Outside packages that one file imports and hands on to all others."""

ALLOWED = (
    ("dglkge.optim", "dglkge.kernels"),
    ("dglkge.launch", "dglkge.planning"),
    # A launcher holds the run of machines that share no disk.
    ("dglkge.launch", "dglkge.checkpoint.storage"),
    ("dglkge.launch", "dglkge.checkpoint.durable"),
    ("dglkge.config", "dglkge.model"),
)
"""What a room imports although the lists above forbid it."""

CONFIG_MAY_IMPORT = {"typing", "registry", "errors", "settings", "config"}
"""Besides, the configuration reads the settings that the components of the model declare."""


def imported(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of each import, wherever in a file; ``from a import b`` is ``a.b``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                up = node.level - 1 if is_package else node.level
                base = module.split(".")
                source = ".".join([*base[: len(base) - up], *([source] if source else [])])
            for alias in node.names:
                yield node.lineno, f"{source}.{alias.name}"


def room(module: str) -> str:
    """Return the room of a module: ``data`` for ``dglkge.data.triples``, empty for the front door."""
    package, _, rest = module.partition(".")
    return package if package == "partition_tools" else rest.partition(".")[0]


def inside(name: str, stem: str) -> bool:
    """Tell whether a dotted name is a package or module, or lies in it."""
    return name == stem or name.startswith(stem + ".")


def breaks(module: str, target: str) -> str:
    """Say why a module may not import a name; an empty string where it may."""
    for package, door in ONLY_IN.items():
        if inside(target, package) and module != door:
            return f"only {door} imports {package}"
    mine, other = room(module), room(target)
    if any(inside(module, importer) and inside(target, stem) for importer, stem in ALLOWED):
        return ""
    for importer, forbidden in NEVER.items():
        for stem in forbidden if inside(module, importer) else []:
            if inside(target, stem) and not inside(target, importer):
                return f"{importer} never imports {stem}"
    if any(inside(target, name) for name in NAMES_ONLY):
        return ""
    if module in NAMES_ONLY and target.partition(".")[0] in OUTSIDE:
        return f"{module} imports the standard library only"
    if not inside(target, "dglkge") and not inside(target, "partition_tools"):
        return ""
    if module == "dglkge" or target == "dglkge.__version__":
        return ""
    if target == "dglkge":
        return "the front door leads everywhere: import the module meant, or dglkge.__version__ by name"
    for name in (mine, other):
        if name not in FLOOR:
            return f"the table has no room {name!r}"
    if mine == other:
        return ""
    if mine == "config" and other not in CONFIG_MAY_IMPORT:
        return "config imports no component"
    ground = FLOOR[mine] == FLOOR[other] == 1 and "optim" not in (mine, other)
    if FLOOR[other] >= FLOOR[mine] and not ground:
        return f"{other} (floor {FLOOR[other]}) is not below {mine} (floor {FLOOR[mine]})"
    return ""


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """Return the modules of one circle of imports, an empty list where there is none."""
    done: set[str] = set()

    def follow(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        for target in sorted(graph.get(module, ())):
            found = follow(target, [*path, module])
            if found:
                return found
        done.add(module)
        return []

    for module in sorted(graph):
        found = follow(module, [])
        if found:
            return found
    return []
