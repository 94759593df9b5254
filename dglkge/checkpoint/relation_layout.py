"""Conversion between relation rows and PyTorch-BigGraph's operator parameters, exact to the bit."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from dglkge.checkpoint.manifest import CheckpointMeta
from dglkge.errors import CheckpointError, unknown_name
from dglkge.formats import PARAMETERS, Operator
from dglkge.formats import operator_of as declared_operator
from dglkge.model.functions.bigraph_operators import NUMBERS, OPERATORS
from dglkge.model.score_functions import SCORE_FUNCTIONS
from dglkge.registry import recorded_imports

MODEL_GROUP = "model"
RECIPROCAL_GROUP = "reciprocal"
"""Holds the tail side's operators of static relations, where PyTorch-BigGraph does not look."""

GLOBAL_SUMS_GROUP = "global_sums"
"""Holds Adagrad's sums of the global vectors, where PyTorch-BigGraph does not look."""

DENSE_GROUP = "dense"
"""Holds the dense parameters of a score function's module and their optimizer's state; PyTorch-BigGraph does
not look there."""


def dense_path(kind: str, *names: str) -> str:
    """Return the dataset of a dense parameter (kind ``parameters``), or of a tensor of its optimizer."""
    return "/".join([DENSE_GROUP, kind, *names])


def dense_parameters(file: Any) -> dict[str, torch.Tensor]:
    """Return the dense parameters of an open model file, by name; none where the model has none."""
    group = file.get(dense_path("parameters"), {})
    return {name: torch.from_numpy(np.asarray(group[name][()])) for name in group}


def global_vector_path(entity_type: str) -> str:
    """Return PyTorch-BigGraph's dataset of the vector (D,) that is added to all rows of an entity type."""
    return f"{MODEL_GROUP}/entities/{entity_type}/global_embedding"


def global_vector_key(entity_type: str) -> str:
    """Return its ``state_dict_key``."""
    return f"global_embs.emb_{entity_type}"


def global_sums_path(entity_type: str) -> str:
    """Return the dataset of Adagrad's sums (D,) of that vector."""
    return f"{GLOBAL_SUMS_GROUP}/{entity_type}"


def check_registered(meta: CheckpointMeta) -> None:
    """Refuse a checkpoint whose score function is not registered.

    The modules that its run was trained with are named and not imported: whoever wrote the files chose them.

    Raises
    ------
    CheckpointError
        If it is not registered.
    """
    name = meta.score_function
    if name in SCORE_FUNCTIONS:
        return
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
    """Return the operator of a checkpoint's score function.

    Raises
    ------
    CheckpointError
        If the score function is not registered.
    """
    if meta.score_function:
        check_registered(meta)
    return declared_operator(meta.score_function)


def is_dynamic(meta: CheckpointMeta) -> bool:
    """Return whether the relations are stored stacked, which PyTorch-BigGraph calls dynamic relations.

    It needs an operator for each side (reciprocal rows), one pair of entity types, and equal operators.
    """
    return meta.reciprocal and not meta.operators and len(meta.relation_pairs) == 1


def to_parameters(rows: np.ndarray, meta: CheckpointMeta) -> Iterator[tuple[str, str | None, np.ndarray]]:
    """Cut relation rows into parameters.

    Parameters
    ----------
    rows : (R, W) float32
        In the order of relation ids; W holds the tail side's half first where rows are reciprocal.
    meta : CheckpointMeta

    Yields
    ------
    path : str
        Of the dataset in the HDF5 file.
    key : str or None
        PyTorch-BigGraph's ``state_dict_key``; None outside of its group.
    values : float32 array
        (R, ...) for dynamic relations, (...) for static ones: (w,), or a matrix.
    """
    for values, index, name, side in _own_pieces(rows, meta):
        path = _parameter_path(index, side, name)
        yield _static_dataset(path, side), _static_key(index, side, name), values
    if meta.operators:
        return
    operator = operator_of(meta)
    for piece, name, sign, side in _pieces(_turned(rows, meta), meta, operator):
        # Negation only flips the sign bit, so the way back gives the same bits.
        values = np.negative(piece) if sign < 0 else piece
        if is_dynamic(meta):
            yield f"{MODEL_GROUP}/{_parameter_path(0, side, name)}", f"{side}_operators.0.{name}", values
            continue
        for index in range(len(values)):
            path = _parameter_path(index, side, name)
            yield _static_dataset(path, side), _static_key(index, side, name), values[index]


def from_parameters(datasets: Mapping[str, Any], meta: CheckpointMeta, width: int) -> np.ndarray:
    """Put parameters together again.

    Parameters
    ----------
    datasets : mapping of str to array
        The datasets of :func:`to_parameters` by path; an opened HDF5 file will do.
    meta : CheckpointMeta
    width : int
        W, the width of a relation's row.

    Returns
    -------
    (R, W) float32

    Raises
    ------
    KeyError
        If a dataset is missing.
    """
    # Zeros, as the operator "none" has no parameters.
    rows = np.zeros((len(meta.relations), width), dtype=np.float32)
    if meta.operators:
        for piece, index, name, side in _own_pieces(rows, meta):
            piece[...] = datasets[_static_dataset(_parameter_path(index, side, name), side)]
        for half in np.split(rows, 2, axis=1) if meta.reciprocal else [rows]:
            half[:, -1] = [NUMBERS[name] for name in meta.operators]
        return rows
    for piece, name, sign, side in _pieces(rows, meta, operator_of(meta)):
        if is_dynamic(meta):
            piece[:] = datasets[f"{MODEL_GROUP}/{_parameter_path(0, side, name)}"]
        else:
            for index in range(len(rows)):
                # One small dataset for each relation: HDF5 reads them one by one. Dynamic relations are one
                # dataset.
                piece[index] = datasets[_static_dataset(_parameter_path(index, side, name), side)]
        if sign < 0:
            np.negative(piece, out=piece)
    return _turned(rows, meta)


def bigraph_row_sums(state: Mapping[int, Mapping[str, Any]], meta: CheckpointMeta) -> np.ndarray:
    """Return row-wise Adagrad's sums out of PyTorch-BigGraph's Adagrad state of its operators.

    Its sums are of squared gradients, one for each number; row-wise Adagrad's are of their mean over the
    row, so the mean of the sums is what it would have come to with the same gradients.

    Parameters
    ----------
    state : mapping of int to mapping
        By number of the parameter: all of ``lhs_operators``, then all of ``rhs_operators``.
    meta : CheckpointMeta

    Returns
    -------
    (R,) float32; where operators differ (R, W), PyTorch-BigGraph's own sums

    Raises
    ------
    KeyError, ValueError
        If the state is not that of the operators.
    """
    if meta.operators:
        own_sums = np.zeros((len(meta.relations), mixed_width(meta)), dtype=np.float32)
        pieces = [piece for piece, _, _, side in _own_pieces(own_sums, meta) if side == "rhs"]
        for number, piece in enumerate(pieces):
            piece[...] = np.asarray(state[number]["sum"])
        return own_sums
    count, operator = len(meta.relations), operator_of(meta)
    if not operator.static:
        return np.zeros(count, dtype=np.float32)
    if is_dynamic(meta):
        # Two sides, each with the parameters of the operator, in the order in which PyTorch-BigGraph
        # registers them.
        pieces = [
            np.asarray(state[index]["sum"]).reshape(count, -1) for index in range(2 * len(operator.dynamic))
        ]
        return np.concatenate(pieces, axis=1).mean(axis=1).reshape(count)
    num_pieces = len(operator.static)
    numbers = range(count * num_pieces)
    sums = np.array([np.asarray(state[index]["sum"]).mean() for index in numbers], dtype=np.float32)
    sizes = [np.asarray(state[index]["sum"]).size for index in range(num_pieces)]
    return np.average(sums.reshape(count, num_pieces), axis=1, weights=sizes).astype(np.float32)


def to_bigraph_sums(sums: np.ndarray, width: int, meta: CheckpointMeta) -> list[np.ndarray]:
    """Return Adagrad's sums as PyTorch-BigGraph has them, which :func:`bigraph_row_sums` reads.

    Parameters
    ----------
    sums : (R,) or (R, W) float32
        In the order of relation ids. Row-wise Adagrad's, which stand for each number of the row, or
        element-wise Adagrad's, which are PyTorch-BigGraph's own.
    width : int
        W, the width of a relation's row.
    meta : CheckpointMeta

    Returns
    -------
    list of float32 arrays
        Of the shapes of PyTorch-BigGraph's parameters, in their order.
    """
    rows = sums.astype(np.float32)
    if rows.ndim == 1:
        rows = np.repeat(rows[:, None], width, axis=1)
    if meta.operators:
        return [piece for piece, _, _, side in _own_pieces(rows, meta) if side == "rhs"]
    pieces = [(piece, side) for piece, _, _, side in _pieces(_turned(rows, meta), meta, operator_of(meta))]
    if is_dynamic(meta):
        return [piece for piece, _ in pieces]
    of_rhs = [piece for piece, side in pieces if side == "rhs"]
    # By relation first, then by parameter: the order of PyTorch-BigGraph's list of operators.
    return [piece[index] for index in range(len(rows)) for piece in of_rhs]


def _turned(rows: np.ndarray, meta: CheckpointMeta) -> np.ndarray:
    """Return rows with the matrices of operators that act forwards transposed, see ``Operator.turns``."""
    if not (meta.reciprocal and operator_of(meta).turns):
        return rows
    matrices = rows.reshape(len(rows), 2, meta.dim, meta.dim)
    # Its own inverse.
    return np.ascontiguousarray(matrices.transpose(0, 1, 3, 2)).reshape(rows.shape)


def _parameter_path(index: int, side: str, name: str) -> str:
    """Return PyTorch-BigGraph's public name of a parameter."""
    return f"relations/{index}/operator/{side}/{name}"


def mixed_width(meta: CheckpointMeta) -> int:
    """Return the width of a relation's row where operators differ."""
    one_side: int = SCORE_FUNCTIONS.get(meta.score_function)().relation_dim(meta.dim)
    return one_side * (2 if meta.reciprocal else 1)


def _static_dataset(path: str, side: str) -> str:
    """Return the dataset of a parameter of one relation."""
    return f"{MODEL_GROUP if side == 'rhs' else RECIPROCAL_GROUP}/{path}"


def _static_key(index: int, side: str, name: str) -> str | None:
    """Return PyTorch-BigGraph's key of it."""
    return f"rhs_operators.{index}.{name}" if side == "rhs" else None


def _own_pieces(rows: np.ndarray, meta: CheckpointMeta) -> Iterator[tuple[np.ndarray, int, str, str]]:
    """Yield (view of a row, relation, parameter name, side) for each parameter, where operators differ.

    By side, then by relation: the order of PyTorch-BigGraph's list of operators.
    """
    halves = np.split(rows, 2, axis=1) if meta.reciprocal else [rows]
    for half, side in zip(halves, ("lhs", "rhs") if meta.reciprocal else ("rhs",)):
        for index, operator in enumerate(meta.operators):
            start = 0
            for shape, name in zip(OPERATORS[operator].shapes(meta.dim), PARAMETERS[operator][0]):
                end = start + math.prod(shape)
                yield half[index, start:end].reshape(shape), index, name, side
                start = end


def _pieces(
    rows: np.ndarray, meta: CheckpointMeta, operator: Operator
) -> Iterator[tuple[np.ndarray, str, int, str]]:
    """Yield (view of the rows, parameter name, sign, side) for each parameter.

    The side is the one that the operator acts on: tails are predicted by acting on the head (lhs).
    """
    if meta.reciprocal:
        # A reciprocal row is [operator on the head | operator on the tail]; neither half needs an adjoint.
        halves = zip(np.split(rows, 2, axis=1), ("lhs", "rhs"))
        signs: tuple[int, ...] = (1,) * len(operator.static)
    else:
        halves = zip([rows], ("rhs",))
        # PyTorch-BigGraph applies the operator to the tail, ours acts on the head: the adjoint gives equal
        # scores.
        signs = operator.adjoint_signs
    names = operator.dynamic if is_dynamic(meta) else operator.static
    if not names:
        return
    for half, side in halves:
        width = half.shape[1] // len(names)
        shapes = operator.shapes(meta.dim) if operator.shapes else ((width,),) * len(names)
        ends = np.cumsum([math.prod(shape) for shape in shapes])
        if ends[-1] != half.shape[1]:
            raise ValueError(f"{half.shape[1]} numbers, expected {ends[-1]}")
        for piece, shape, name, sign in zip(np.split(half, ends[:-1], axis=1), shapes, names, signs):
            # Still a view: only the last axis, which is contiguous, is cut.
            yield piece.reshape(len(piece), *shape), name, sign, side
