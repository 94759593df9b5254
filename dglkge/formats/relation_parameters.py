"""Conversion between relation rows and PyTorch-BigGraph's operator parameters, exact to the bit."""

from __future__ import annotations

import itertools
import math
import shlex
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from dglkge.errors import CheckpointError, unknown_name
from dglkge.formats.operators import PARAMETERS, Operator
from dglkge.formats.operators import operator_of as declared_operator
from dglkge.model.functions.bigraph_operators import NUMBERS, OPERATORS
from dglkge.model.score_functions import SCORE_FUNCTIONS
from dglkge.registry import recorded_imports
from dglkge.typing import Relation

if TYPE_CHECKING:
    from dglkge.checkpoint.manifest import CheckpointMeta

MODEL_GROUP = "model"
RECIPROCAL_GROUP = "reciprocal"
"""Holds the tail side's operators of static relations, where PyTorch-BigGraph does not look."""


def global_vector_path(entity_type: str) -> str:
    """Return PyTorch-BigGraph's dataset of the vector (D,) that is added to all rows of an entity type."""
    return f"{MODEL_GROUP}/entities/{entity_type}/global_embedding"


def global_vector_key(entity_type: str) -> str:
    """Return its ``state_dict_key``."""
    return f"global_embs.emb_{entity_type}"


def registered_score_function(meta: CheckpointMeta) -> str:
    """Return the name of a checkpoint's score function; CheckpointError if it is not registered.

    The modules that its run was trained with are named and not imported: whoever wrote the files chose them.
    """
    name = meta.score_function
    if name in SCORE_FUNCTIONS:
        return name
    if not name:
        raise CheckpointError(
            "the checkpoint has tables and no model of links; dglkge.open_checkpoint reads its rows"
        )
    modules = recorded_imports(meta.config)
    if modules:
        flags = " ".join(f"--import {shlex.quote(module)}" for module in modules)
        raise CheckpointError(
            f"the checkpoint has the score function {name!r}, trained with {', '.join(modules)}; a recorded "
            f"module runs as Python only if you name it: {flags}, or open_run(..., imports={modules})"
        )
    raise CheckpointError(
        f"the checkpoint has the {unknown_name('score function', name, SCORE_FUNCTIONS)}; if a module of "
        "yours registers it, give that with --import MODULE"
    )


def operator_of(meta: CheckpointMeta) -> Operator:
    """Return the operator of a checkpoint's score function; CheckpointError if that is not registered."""
    return declared_operator(meta.score_function and registered_score_function(meta))


def is_dynamic(meta: CheckpointMeta) -> bool:
    """Return whether the relations are stored stacked, which PyTorch-BigGraph calls dynamic relations.

    It needs an operator for each side (reciprocal rows), one pair of entity types, and equal operators.
    """
    return meta.reciprocal and not meta.operators and len(meta.relation_pairs) == 1


Cut: TypeAlias = tuple[str, tuple[int, ...], int]
"""Name, shape and sign of a parameter."""


class Parameter(NamedTuple):
    """A parameter of PyTorch-BigGraph's operators, as a view of relation rows.

    Attributes
    ----------
    view : float32 array
        (R, ...) for dynamic relations, (...) for static ones: (w,), or a matrix.
    dataset : str
        Its path in the HDF5 file.
    key : str or None
        PyTorch-BigGraph's ``state_dict_key``; None outside of its group.
    sign : int
        -1 where the file has the negative.
    """

    view: np.ndarray
    dataset: str
    key: str | None
    sign: int


def used_numbers(meta: CheckpointMeta, width: int) -> np.ndarray:
    """Return which numbers of relation rows (R, W) are parameters, bool.

    Between rows of fewer numbers than ``meta.dim`` a matrix is a block of the relation's.
    """
    every_dataset: Mapping[str, float] = defaultdict(lambda: 1.0)
    return from_parameters(every_dataset, meta, width) != 0


def to_parameters(rows: np.ndarray, meta: CheckpointMeta) -> Iterator[tuple[str, str | None, np.ndarray]]:
    """Cut relation rows (R, W) into the dataset, key and values of each :class:`Parameter`.

    The rows are in the order of ids, the tail side's half first where they are reciprocal.
    """
    for parameter in _parameters(_turned(rows, meta), meta):
        # Negation only flips the sign bit, so the way back gives the same bits.
        values = np.negative(parameter.view) if parameter.sign < 0 else parameter.view
        yield parameter.dataset, parameter.key, values


def from_parameters(datasets: Mapping[str, Any], meta: CheckpointMeta, width: int) -> np.ndarray:
    """Put the datasets of :func:`to_parameters` together to rows (R, W) again; KeyError if one is missing."""
    # Zeros, as the operator "none" has no parameters.
    rows = np.zeros((len(meta.relations), width), dtype=np.float32)
    for view, dataset, _, sign in _parameters(rows, meta):
        view[...] = datasets[dataset]
        if sign < 0:
            np.negative(view, out=view)
    if meta.operators:
        for half in np.split(rows, 2, axis=1) if meta.reciprocal else [rows]:
            half[:, -1] = [NUMBERS[name] for name in meta.operators]
    return _turned(rows, meta)


def bigraph_row_sums(state: Mapping[int, Mapping[str, Any]], meta: CheckpointMeta, width: int) -> np.ndarray:
    """Return row-wise Adagrad's sums (R,) out of PyTorch-BigGraph's Adagrad state of its operators.

    Its sums are of squared gradients, one for each number; row-wise Adagrad's are of their mean over the
    row, so the mean of the sums is what it would have come to with the same gradients. Where operators
    or widths differ, the sums (R, W) are PyTorch-BigGraph's own. The state is by number of the parameter,
    all of ``lhs_operators`` first; KeyError or ValueError if it is not that of the operators.
    """
    sums = np.zeros((len(meta.relations), width), dtype=np.float32)
    for number, view in enumerate(_bigraph_views(sums, meta)):
        view[...] = np.asarray(state[number]["sum"]).reshape(view.shape)
    if meta.operators or meta.dims:
        return sums
    # Of static relations PyTorch-BigGraph has one side.
    kept = sums if is_dynamic(meta) or not meta.reciprocal else np.split(sums, 2, axis=1)[1]
    return kept.mean(axis=1)


def to_bigraph_sums(sums: np.ndarray, width: int, meta: CheckpointMeta) -> list[np.ndarray]:
    """Return Adagrad's sums as PyTorch-BigGraph has them, which :func:`bigraph_row_sums` reads.

    Row-wise Adagrad's (R,) stand for each number of the row; element-wise Adagrad's (R, W) are its own.
    """
    rows = sums.astype(np.float32)
    if rows.ndim == 1:
        rows = np.repeat(rows[:, None], width, axis=1)
    return _bigraph_views(_turned(rows, meta), meta)


def _turned(rows: np.ndarray, meta: CheckpointMeta) -> np.ndarray:
    """Return rows with the matrices of operators that act forwards transposed, see ``Operator.turns``."""
    if not (meta.reciprocal and operator_of(meta).turns):
        return rows
    matrices = rows.reshape(len(rows), 2, meta.dim, meta.dim)
    # Its own inverse.
    return np.ascontiguousarray(matrices.transpose(0, 1, 3, 2)).reshape(rows.shape)


def _bigraph_views(rows: np.ndarray, meta: CheckpointMeta) -> list[np.ndarray]:
    """Return the parameters that PyTorch-BigGraph has, in the order of their numbers in its optimizer."""
    return [parameter.view for parameter in _parameters(rows, meta) if parameter.key is not None]


def _parameters(rows: np.ndarray, meta: CheckpointMeta) -> Iterator[Parameter]:
    """Yield all parameters, by side, then by relation: the order of PyTorch-BigGraph's list of operators.

    The side is the one that the operator acts on: tails are predicted by acting on the head (lhs). A
    reciprocal row is [operator on the head | operator on the tail].
    """
    sides = ("lhs", "rhs") if meta.reciprocal else ("rhs",)
    is_stacked = is_dynamic(meta)
    width = rows.shape[1] // len(sides)
    cuts = [
        list(zip(PARAMETERS[operator][0], OPERATORS[operator].shapes(meta.dim), itertools.repeat(1)))
        for operator in meta.operators
    ] or [_common_cuts(meta, width)] * len(rows)
    for half, side in zip(np.split(rows, len(sides), axis=1), sides):
        is_theirs = side == "rhs" or is_stacked
        group = MODEL_GROUP if is_theirs else RECIPROCAL_GROUP
        for index, values in enumerate([half] if is_stacked else half):
            block = _block(meta, meta.relations[index], side)
            start = 0
            for name, shape, sign in cuts[index]:
                end = start + math.prod(shape)
                # Still a view: only the last axis, which is contiguous, is cut.
                view = values[..., start:end].reshape(*values.shape[:-1], *shape)
                view = view[(..., *block[: len(shape)])]
                key = f"{side}_operators.{index}.{name}" if is_theirs else None
                yield Parameter(view, f"{group}/relations/{index}/operator/{side}/{name}", key, sign)
                start = end


def _block(meta: CheckpointMeta, relation: Relation, side: str) -> tuple[slice, ...]:
    """Return the numbers of what an operator on a side gives, and of what it takes; () where all have one
    width.
    """
    if not meta.dims:
        return ()
    head, tail = (slice(meta.entity_dim(name)) for name in (relation.lhs, relation.rhs))
    return (tail, head) if side == "lhs" else (head, tail)


def _common_cuts(meta: CheckpointMeta, width: int) -> list[Cut]:
    """Return the parameters of one side of a row, where all relations have one operator."""
    operator = operator_of(meta)
    names = operator.dynamic if is_dynamic(meta) else operator.static
    if not names:
        return []
    shapes = operator.shapes(meta.dim) if operator.shapes else ((width // len(names),),) * len(names)
    if (total := sum(map(math.prod, shapes))) != width:
        raise ValueError(f"{width} numbers, expected {total}")
    # PyTorch-BigGraph applies the operator to the tail, ours acts on the head: the adjoint gives equal
    # scores. With an operator for each side none is needed.
    signs = (1,) * len(names) if meta.reciprocal else operator.adjoint_signs
    return list(zip(names, shapes, signs))
