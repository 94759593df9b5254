"""A configuration from a YAML file and ``key=value`` overrides, checked; and back to JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dglkge.checkpoint.layout import RUN_CONFIG_FILE
from dglkge.config.component import TAG, UNKNOWN_COMPONENT
from dglkge.config.schema import DATASET, Config, fields
from dglkge.config.tree import read_tree
from dglkge.errors import InputErrors, unknown_name
from dglkge.registry import import_modules, recorded_imports
from dglkge.settings import Items, Scalar, Tree, expected

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
    **{f"features.{name}": f"features.mlp.{name}" for name in ("hidden", "activation")},
    "training.early_stopping_patience": "training.early_stopping.patience",
    "training.early_stopping_min_gain": "training.early_stopping.min_gain",
    "evaluation.eval_fraction": "evaluation.held_out.fraction",
    "evaluation.eval_num_batch_negs": "evaluation.held_out.batch_negatives",
    "evaluation.eval_num_uniform_negs": "evaluation.held_out.uniform_negatives",
    **{f"model.{name}": f"model.score_function.{name}" for name in ("p", "q", "relation_dimension")},
    **{f"model.{name}": f"model.score_function.{name}" for name in ("channels", "layers", "heads")},
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
    problems = []
    config = Config()
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
    try:
        saved = json.loads((Path(start.output) / RUN_CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        saved = {}
    added = [*imports, *(recorded_imports(saved) if isinstance(saved, dict) else [])]
    import_modules([*start.imports, *added])
    return added


def save_config(config: Config, path: str | os.PathLike[str]) -> None:
    """Write a configuration as JSON, atomically; :func:`load_config` reads it back."""
    target = Path(path)
    # Written aside and renamed, which POSIX does atomically: a reader finds the old file or the new one.
    temporary = target.with_name(target.name + ".tmp")
    temporary.write_text(json.dumps(config.to_dict(), indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, target)


def _problems(error: ValidationError, tree: Tree) -> list[str]:
    """Return a line for each mistake, with its place in the file."""
    known = {field.key: field.owners for field in fields()}
    lines = []
    for problem in error.errors(include_url=False):
        key = ".".join(map(str, problem["loc"]))
        value, where = problem["input"], _place(tree, problem["loc"])
        if problem["type"] in ("extra_forbidden", "model_type"):
            # A mapping under an unknown name: the keys in it may be near to known ones.
            lines += [f"{where_}: {_unknown_key(full, known)}" for full, where_ in _leaves(key, value, where)]
        elif problem["type"] == "missing":
            lines.append(f"{where}: {key} is not given")
        elif problem["type"] == UNKNOWN_COMPONENT:
            tag = value.get(TAG, value) if isinstance(value, Tree) else value
            lines.append(f"{getattr(tag, 'where', where)}: {problem['msg']}")
        else:
            lines.append(f"{where}: {key} is {_shown(value)!r}; {expected(problem, value)}")
    return lines


def _unknown_key(key: str, known: Mapping[str, tuple[str, ...]]) -> str:
    """Return the message about a key that is no field's, or only one of other components; values: these."""
    if key in FORMER:
        return f"{key} is now called {FORMER[key]}"
    if known.get(key):
        return f"{key} has no effect here; it is an option of {', '.join(known[key])}"
    return str(unknown_name("key", key, known))


def _leaves(key: str, value: Any, where: str) -> list[tuple[str, str]]:
    """Return (dotted key, place) of each value in a mapping, or of the value itself."""
    if not isinstance(value, Tree) or not value:
        return [(key, where)]
    return [leaf for name, one in value.items() for leaf in _leaves(f"{key}.{name}", one, one.where)]


def _place(tree: Any, keys: Sequence[str | int]) -> str:
    """Return where a value was written: its own place, or that of the mapping in which it is missing."""
    where = ""
    for key in keys:
        try:
            tree = tree[key]
        except (KeyError, IndexError, TypeError):
            break
        where = tree.where
    return where


def _shown(value: Any) -> Any:
    """Return a value as messages have it."""
    return value.shown() if isinstance(value, (Scalar, Items, Tree)) else value
