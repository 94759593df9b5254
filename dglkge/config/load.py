"""A configuration from a YAML file and ``key=value`` overrides, checked; the recipes that ship.

A file and its overrides are merged key by key to a tree, in which each value has its place.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from dglkge.checkpoint.layout import RUN_CONFIG_FILE, parse_object
from dglkge.config.schema import DATASET, Config, fields
from dglkge.errors import InputError, InputErrors, require_known, unknown_name
from dglkge.registry import import_modules, recorded_imports
from dglkge.settings import NULL, TAG, UNKNOWN_COMPONENT, Items, Tree, Written, expected

RECIPES = Path(__file__).resolve().parent / "recipes"
SCHEMA = Path(__file__).resolve().with_name("schema.json")
"""JSON Schema of a configuration, which recipes name for editors: ``dglkge config schema`` prints it."""
NAMED_SCHEMA = "../../schema.json"
"""Its path in the first line of a recipe."""


FORMER = {
    "training.label_smoothing": "training.objective.label_smoothing",
    "negatives.sampler": "negatives.name",
    "negatives.all_entities": "negatives.name: all_entities",
    "optimizer.schedule_every": "optimizer.schedule.every",
    "dense.schedule_every": "dense.schedule.every",
    "optimizer.schedule_options": "optimizer.schedule, a map: {name: CosineAnnealingLR, T_max: 20}",
    "dense.schedule_options": "dense.schedule, a map: {name: CosineAnnealingLR, T_max: 20}",
    "dense.options": "dense.optimizer, a map: {name: AdamW, weight_decay: 0.01}",
    "optimizer.relation_name": "optimizer.relations.name",
    "optimizer.relation_lr": "optimizer.relations.lr",
    "optimizer.beta1": "optimizer.betas, a list",
    "optimizer.beta2": "optimizer.betas, a list",
    "training.products": "training.matmul_dtype",
    "features.projection": "features.mlp, a map: {hidden: [512]}; null: linear",
    "evaluation.eval_fraction": "evaluation.held_out.fraction",
    "evaluation.eval_num_batch_negs": "evaluation.held_out.batch_negatives",
    "evaluation.eval_num_uniform_negs": "evaluation.held_out.uniform_negatives",
    **{f"features.{name}": f"features.mlp.{name}" for name in ("hidden", "activation")},
    **{
        f"training.early_stopping_{name}": f"training.early_stopping.{name}"
        for name in ("patience", "min_gain")
    },
    **{
        f"model.{name}": f"model.score_function.{name}"
        for name in ("p", "q", "relation_dimension", "channels", "layers", "heads")
    },
}
"""Former names of fields: the error of a file that has one names the present one."""


def load_config(
    path: str | os.PathLike[str] | None, overrides: Sequence[str] = (), imports: Sequence[str] = ()
) -> Config:
    """Read a YAML (or JSON) file, apply overrides and check every field.

    Parameters
    ----------
    path : path or None
        None takes the defaults.
    overrides : sequence of str
        ``"model.dimension=200"`` and the like; each wins over the file and over those before it.
    imports : sequence of str
        Added to the field ``imports``: modules or .py files that register components. They are imported, and
        so are those with which the run in the output folder was started: a resume needs no ``imports``.

    Returns
    -------
    Config

    Raises
    ------
    InputError
        For a file that cannot be read, and for all unknown keys (with the nearest known one), former names,
        and values of the wrong type or out of range at once; with file and line for those of the file.
    """
    tree = read_tree(path, overrides)
    added = _import_components(tree, imports)
    problems, config = [], Config()
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        problems = _problems(error, tree)
    if "dataset" not in tree:
        problems.append(f"dataset is not given; expected {DATASET}")
    if problems:
        raise InputErrors(problems)
    # dict.fromkeys removes repetitions and keeps the order, which is the order of registration.
    return config.changed(imports=tuple(dict.fromkeys([*config.imports, *added])))


def _import_components(tree: Tree, imports: Sequence[str]) -> list[str]:
    """Import the user's modules, which register components; return those that the tree does not name."""
    # Read before anything else: which options are allowed depends on what is registered.
    try:
        start = Config.model_validate({key: tree[key] for key in ("imports", "output") if key in tree})
    except ValidationError:
        return list(imports)
    added = [*imports]
    with contextlib.suppress(OSError):
        added += recorded_imports(parse_object((Path(start.output) / RUN_CONFIG_FILE).read_bytes()))
    import_modules([*start.imports, *added])
    return added


def _problems(error: ValidationError, tree: Tree) -> list[str]:
    """Return a line for each mistake, with its place in the file."""
    known = {field.key: field.owners for field in fields()}
    lines = []
    for problem in error.errors(include_url=False):
        key = ".".join(map(str, problem["loc"]))
        value = problem["input"]
        where = getattr(value, "where", tree.where)
        if problem["type"] in ("extra_forbidden", "model_type"):
            # A mapping under an unknown name: the keys in it may be near to known ones.
            lines += [f"{where_}: {_unknown_key(full, known)}" for full, where_ in _leaves(key, value, where)]
        elif problem["type"] == "missing":
            lines.append(f"{where}: {key} is not given")
        elif problem["type"] == UNKNOWN_COMPONENT:
            tag = value.get(TAG, value) if isinstance(value, Tree) else value
            lines.append(f"{getattr(tag, 'where', where)}: {problem['msg']}")
        else:
            lines.append(f"{where}: {key} is {value!r}; {expected(problem, value)}")
    return lines


def _unknown_key(key: str, known: Mapping[str, tuple[str, ...]]) -> str:
    """Return the message about a key that is no field's, or only one of other components, by key."""
    if key in FORMER:
        return f"{key} is now called {FORMER[key]}"
    if known.get(key):
        return f"{key} has no effect here; it is an option of {', '.join(known[key])}"
    return str(unknown_name("key", key, known))


def _leaves(key: str, value: Any, where: str) -> list[tuple[str, str]]:
    """Return (dotted key, place) of each value in a mapping, or of the value itself."""
    if not isinstance(value, Tree) or not value:
        return [(key, where)]
    return [leaf for name, inner in value.items() for leaf in _leaves(f"{key}.{name}", inner, inner.where)]


def read_tree(path: str | os.PathLike[str] | None, overrides: Sequence[str]) -> Tree:
    """Read a YAML (or JSON) file, and apply overrides: each wins over the file and over those before it."""
    tree = Tree() if path is None else _read_file(Path(path))
    for text in overrides:
        key, separator, value = text.partition("=")
        if not separator or not key.strip():
            raise InputError(f"override {text!r} is not of the form key=value, e.g. model.dimension=200")
        _override(tree, key.strip().split("."), _read_override(value.strip(), f"override {text!r}"))
    return tree


def _read_file(path: Path) -> Tree:
    """Read a file; keys of its outermost level may be dotted."""
    try:
        # compose() instead of load(): nodes keep line numbers and the text as it was written.
        node = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the configuration {path}: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise InputError(f"{where}: not valid YAML: {getattr(error, 'problem', error)}") from None
    if node is None:
        return Tree(str(path))
    if not isinstance(node, yaml.MappingNode):
        raise InputError(f"{path}:{node.start_mark.line + 1}: expected 'key: value' lines")
    tree = Tree(str(path))
    for key, value in _read_node(node, str(path), str(path)).items():
        _merge(tree, key.split("."), value, "")
    return tree


def _read_node(node: yaml.Node, where: str, path: str = "", prefix: str = "", text: str | None = None) -> Any:
    """Return a node; with the path of its file, what is inside it has lines of its own."""
    if isinstance(node, yaml.ScalarNode):
        return Written.of(node.value, "" if node.style else node.tag, where)
    if isinstance(node, yaml.SequenceNode):
        items = Items(where, text)
        items.extend(_read_node(item, where, path) for item in node.value)
        return items
    tree = Tree(where, text)
    # SafeLoader makes no other nodes than these three.
    for key, value in node.value:
        name = str(key.value)
        place = f"{path}:{key.start_mark.line + 1}" if path else where
        # YAML's own loader takes the last of two equal keys without a word.
        if name in tree:
            first = tree[name].where.rpartition(":")[2]
            raise InputError(
                f"{place}: the key {prefix}{name} stands in line {first} already; allowed is once"
            )
        tree[name] = _read_node(value, place, path, f"{prefix}{name}.")
    return tree


def _read_override(text: str, where: str) -> Any:
    """Return the value of an override; only quotes around the whole of it mean something."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        # Kept as text: the value of a text field need not be YAML, e.g. `[x`.
        return Written.of(text, "", where)
    if node is None:
        return Written.of(text, "" if text else NULL, where)
    if isinstance(node, yaml.ScalarNode) and not node.style:
        return Written.of(text, node.tag, where)
    return _read_node(node, where, text=text)


def _merge(tree: Tree, keys: Sequence[str], value: Any, prefix: str) -> None:
    """Put a value of a file below a dotted key: model.dimension may also stand as dimension below model."""
    name, key = keys[0], f"{prefix}{keys[0]}"
    if len(keys) > 1:
        below = Tree(value.where)
        _merge(below, keys[1:], value, f"{key}.")
        value = below
    there = tree.get(name)
    if isinstance(there, Tree) and isinstance(value, Tree):
        for key_, inner_value in value.items():
            _merge(there, [key_], inner_value, f"{key}.")
    elif there is not None:
        raise InputError(f"{value.where}: the key {key} is given at {there.where} already; allowed is once")
    else:
        tree[name] = value


def _override(tree: Tree, keys: Sequence[str], value: Any) -> None:
    """Put the value of an override in place of what is there."""
    for name in keys[:-1]:
        there = tree.get(name)
        if not isinstance(there, Tree):
            below = Tree(value.where)
            if isinstance(there, Written) and there.tag != NULL:
                below[TAG] = there
            tree[name] = below
        tree = tree[name]
    tree[keys[-1]] = value


def recipe_files() -> dict[str, Path]:
    """Return the files of all recipes by name, sorted."""
    return {f"{path.parent.name}/{path.stem}": path for path in sorted(RECIPES.glob("*/*.yaml"))}


def recipe_file(name: str) -> Path:
    """Return the file of a recipe."""
    recipes = recipe_files()
    require_known("recipe", name, recipes)
    return recipes[name]
