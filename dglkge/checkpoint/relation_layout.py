"""How rows of relations become PyTorch-BigGraph's operator parameters, and back, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dglkge.checkpoint.manifest import CheckpointMeta

MODEL_GROUP = "model"
RECIPROCAL_GROUP = "reciprocal"
"""Holds the tail side's operators of static relations, where PyTorch-BigGraph does not look."""


@dataclass(frozen=True)
class Operator:
    """How one score function's relation row is cut into parameters.

    Attributes
    ----------
    name : str
        PyTorch-BigGraph's operator, or our name where it has none.
    comparator : str
        PyTorch-BigGraph's comparator, or our name where it has none (it then refuses the config).
    static, dynamic : tuple of str
        Names of the equal pieces of a row, for one relation and for all relations stacked.
    adjoint_signs : tuple of int
        Sign of each piece in the operator that acts on the tail instead of the head:
        <h r, t> = <h, conj(r) t> and ||h + r - t|| = ||h - (t - r)||.
    """

    name: str
    comparator: str
    static: tuple[str, ...]
    dynamic: tuple[str, ...]
    adjoint_signs: tuple[int, ...]


OPERATORS = {
    "distmult": Operator("diagonal", "dot", ("diagonal",), ("diagonals",), (1,)),
    "complex": Operator("complex_diagonal", "dot", ("real", "imag"), ("real", "imag"), (1, -1)),
    "transe_l1": Operator("translation", "l1", ("translation",), ("translations",), (-1,)),
    "transe_l2": Operator("translation", "l2", ("translation",), ("translations",), (-1,)),
    "rotate": Operator("rotation", "complex_modulus", ("phases",), ("phases",), (-1,)),
}
"""The known score functions. l1, rotation and complex_modulus are not PyTorch-BigGraph's."""


def operator_of(score_function: str) -> Operator:
    """Return the operator of a score function; an unknown one keeps its rows whole and unsigned."""
    whole = Operator(score_function, score_function, ("row",), ("rows",), (1,))
    return OPERATORS.get(score_function, whole)


def is_dynamic(meta: CheckpointMeta) -> bool:
    """Whether the relations are stored stacked, which PyTorch-BigGraph calls dynamic relations.

    It needs an operator for each side (reciprocal rows) and one pair of entity types for all.
    """
    return meta.reciprocal and len(meta.relation_pairs) == 1


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
        (R, w) for dynamic relations, (w,) for static ones.
    """
    operator = operator_of(meta.score_function)
    for piece, name, sign, side in _pieces(rows, meta, operator):
        values = np.negative(piece) if sign < 0 else piece
        if is_dynamic(meta):
            yield f"{MODEL_GROUP}/{_parameter_path(0, side, name)}", f"{side}_operators.0.{name}", values
            continue
        for index in range(len(values)):
            path = _parameter_path(index, side, name)
            if side == "rhs":
                yield f"{MODEL_GROUP}/{path}", f"rhs_operators.{index}.{name}", values[index]
            else:
                yield f"{RECIPROCAL_GROUP}/{path}", None, values[index]


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
    rows = np.empty((len(meta.relations), width), dtype=np.float32)
    for piece, name, sign, side in _pieces(rows, meta, operator_of(meta.score_function)):
        if is_dynamic(meta):
            piece[:] = datasets[f"{MODEL_GROUP}/{_parameter_path(0, side, name)}"]
        else:
            group = MODEL_GROUP if side == "rhs" else RECIPROCAL_GROUP
            for index in range(len(rows)):
                piece[index] = datasets[f"{group}/{_parameter_path(index, side, name)}"]
        if sign < 0:
            np.negative(piece, out=piece)
    return rows


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
    (R,) float32

    Raises
    ------
    KeyError, ValueError
        If the state is not that of the operators.
    """
    count, operator = len(meta.relations), operator_of(meta.score_function)
    if is_dynamic(meta):
        pieces = [np.asarray(state[index]["sum"]) for index in range(2 * len(operator.dynamic))]
        return np.concatenate(pieces, axis=1).mean(axis=1).reshape(count)
    num_pieces = len(operator.static)
    numbers = range(count * num_pieces)
    sums = np.array([np.asarray(state[index]["sum"]).mean() for index in numbers], dtype=np.float32)
    return sums.reshape(count, num_pieces).mean(axis=1)


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
    pieces = [(piece, side) for piece, _, _, side in _pieces(rows, meta, operator_of(meta.score_function))]
    if is_dynamic(meta):
        return [piece for piece, _ in pieces]
    of_rhs = [piece for piece, side in pieces if side == "rhs"]
    return [piece[index] for index in range(len(rows)) for piece in of_rhs]


def _parameter_path(index: int, side: str, name: str) -> str:
    """Return PyTorch-BigGraph's public name of a parameter."""
    return f"relations/{index}/operator/{side}/{name}"


def _pieces(
    rows: np.ndarray, meta: CheckpointMeta, operator: Operator
) -> Iterator[tuple[np.ndarray, str, int, str]]:
    """Yield (view of the rows, parameter name, sign, side) for each parameter.

    The side is the one that the operator acts on: the tail is asked for by acting on the head (lhs).
    """
    if meta.reciprocal:
        halves = zip(np.split(rows, 2, axis=1), ("lhs", "rhs"))
        signs: tuple[int, ...] = (1,) * len(operator.static)
    else:
        halves = zip([rows], ("rhs",))
        signs = operator.adjoint_signs
    names = operator.dynamic if is_dynamic(meta) else operator.static
    for half, side in halves:
        for piece, name, sign in zip(np.split(half, len(names), axis=1), names, signs):
            yield piece, name, sign, side
