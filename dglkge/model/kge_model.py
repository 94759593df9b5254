"""A score function at a dimension, with one or two sets of relation rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from dglkge.errors import InputError
from dglkge.model.dense_modules import load_parameters
from dglkge.model.device import ModulePrecision
from dglkge.model.initializers import normal_rows, uniform_rows
from dglkge.model.score_functions import PHASE, SCORE_FUNCTIONS, ScoreFunction, changed_copy
from dglkge.settings import settings_of
from dglkge.typing import RELATION, Side


class KgeModel:
    """A score function without its rows: those live in tables that the caller looks up.

    Parameters
    ----------
    score_function : ScoreFunction
    dim : int
        Width of an entity's row. Where ``maps_widths`` of the score function is true, every method takes
        narrower rows of entities as well, which stand for rows with zeros at their end.
    reciprocal : bool
        Whether a relation has one row for each direction (Lacroix et al. 2018; Kazemi and Poole 2018).
        The table's row then holds both: its first half answers (h, r, ?), its second half (?, r, t), each
        by the forward operation on the entity given. These are PyTorch-BigGraph's dynamic relations:
        the first half is its ``lhs`` operator, which works on heads, and the second its ``rhs`` operator.
    seed : int
        Of the initial dense parameters, where the score function owns a module.

    Raises
    ------
    InputError
        If the score function has no rows of that dimension, or needs reciprocal relations.

    Examples
    --------
    >>> model = build_model("complex", dim=4, reciprocal=True)
    >>> model.relation_width
    8
    """

    def __init__(self, score_function: ScoreFunction, dim: int, reciprocal: bool, seed: int = 0) -> None:
        if allowed := score_function.other_dims(dim):
            raise InputError(f"the dimension must be {allowed}, got {dim}")
        if score_function.needs_reciprocal and not reciprocal:
            function = f"the score function {type(score_function).__name__} computes queries from heads only"
            raise InputError(f"model.reciprocal_relations is false and {function}; allowed: true")
        self.score_function = (score_function if reciprocal else score_function.static()).bound(dim, seed)
        self.dim = dim
        self.reciprocal = reciprocal

    @property
    def module(self) -> torch.nn.Module | None:
        """The module with the dense parameters; None where there are none."""
        return self.score_function.module if self.score_function.has_module else None

    def load_module(self, values: Mapping[str, Tensor], where: str) -> None:
        """Take trained dense parameters by name, which get no gradients from then on.

        An InputError that says ``where`` if a parameter is missing, has another shape, or is none of the
        module's.
        """
        if self.module is not None:
            load_parameters(self.module, values, where)
            self.module.requires_grad_(False)

    def on_device(self, device: torch.device) -> KgeModel:
        """Return this model if its module is on a device or it has none; otherwise with a copy there."""
        if self.module is None or all(values.device == device for values in self.module.parameters()):
            return self
        return changed_copy(self, score_function=self.score_function.on_device(device))

    def in_precision(self, precision: ModulePrecision) -> KgeModel:
        """Return this model, with the same module, as it computes in training."""
        return changed_copy(self, score_function=self.score_function.in_precision(precision))

    @property
    def relation_width(self) -> int:
        """Width of a row of the relation table."""
        return self.score_function.relation_dim(self.dim) * (2 if self.reciprocal else 1)

    def table_width(self, table: str) -> int:
        """Return the width of the rows of a table: an entity type's, or the relations'."""
        return self.relation_width if table == RELATION else self.dim

    def set_times(self, relation_rows: Tensor, times: Tensor) -> Tensor:
        """Write the numbers of times (n,) into relation rows (n, relation_width), where they have a place."""
        if self.score_function.has_times:
            sides = relation_rows.unflatten(-1, (2 if self.reciprocal else 1, -1))
            sides[..., -1] = times.to(relation_rows.device, relation_rows.dtype)[:, None]
        return relation_rows

    def direction(self, relation_row: Tensor, side: Side) -> Tensor:
        """Return the part of relation rows (..., relation_width) that serves a side, (..., Dr)."""
        if not self.reciprocal:
            return relation_row
        forward, backward = relation_row.chunk(2, dim=-1)
        return forward if side is Side.TAIL else backward

    @property
    def query_dim(self) -> int:
        """Width of queries, which is that of an entity's row for most score functions."""
        return self.score_function.query_dim(self.dim)

    def query(
        self,
        entity: Tensor,
        relation_row: Tensor,
        side: Side,
        relation_ids: Tensor | None = None,
        places: Tensor | None = None,
    ) -> Tensor:
        """Return the query (..., query_dim) that candidates for a side are compared with.

        Parameters
        ----------
        entity : (..., D) tensor
            The entity given: the head for ``Side.TAIL``, the tail for ``Side.HEAD``.
        relation_row : (..., relation_width) tensor
        side : Side
            The side of the missing entity.
        relation_ids : (...) int64 tensor, optional
            Equal for equal relations; see ``ScoreFunction.acts_on_candidates``.
        places : (B,) int64 tensor, optional
            Where relations have one row each, (U, relation_width): the place of each entity's.
        """
        entity, relation = self._widened(entity), self.direction(relation_row, side)
        # Reciprocal rows are trained for their own direction, so both sides use the forward operation; only a
        # shared row needs the adjoint.
        query_side = Side.TAIL if self.reciprocal else side
        if places is not None:
            return self.score_function.shared_query(entity, relation, places, query_side)
        more = (relation_ids,) if self.score_function.acts_on_candidates else ()
        return self.score_function.query(entity, relation, query_side, *more)

    def _widened(self, rows: Tensor) -> Tensor:
        """Return rows of entities at the dimension, with zeros at their end: (..., D') -> (..., D)."""
        lacking = self.dim - rows.shape[-1]
        return pad(rows, (0, lacking)) if lacking else rows

    def reverse_query(self, answer: Tensor, relation_row: Tensor, side: Side) -> Tensor:
        """Return the answer operated on by the relation read backwards, (B, D).

        Compared with the entity given it has the score of :meth:`query` compared with the answer.
        """
        forward = Side.TAIL if self.reciprocal else side
        relation = self.direction(relation_row, side)
        return self.score_function.query(self._widened(answer), relation, forward.other)

    def entity_product(self, anchor: Tensor, answer: Tensor, side: Side) -> Tensor:
        """Return rows (B, Dr) whose inner products with relations are scores; see ``relation_product``."""
        head, tail = (anchor, answer) if self.reciprocal or side is Side.TAIL else (answer, anchor)
        return self.score_function.relation_product(head, tail)

    def relation_query(self, anchor: Tensor, answer: Tensor, times: Tensor | None = None) -> Tensor:
        """Return the queries (h, ?, t) of pairs of entities, see ``ScoreFunction.relation_query``.

        ``times`` (B,) are numbers of times, or of relations at them, for a function that has times.
        """
        function = self.score_function
        if times is None or not function.has_times:
            return function.relation_query(self._widened(anchor), self._widened(answer))
        numbers = (times % function.settings.num_times).to(anchor)
        return function.relation_query(anchor, answer, numbers[:, None])

    def compare(self, query: Tensor, candidates: Tensor) -> Tensor:
        """Score every query against every candidate: (B, query_dim), (N, D) -> (B, N)."""
        return self.score_function.compare(query, self._widened(candidates))

    def compare_plainly(self, query: Tensor, candidates: Tensor) -> Tensor:
        """Score every query against every candidate by the definition, without compiled loops."""
        return self.score_function.compare_plainly(query, self._widened(candidates))

    def compare_fused(self, query: Tensor, candidates: Tensor) -> Tensor:
        """Score every query against every candidate in the form that ``torch.compile`` takes."""
        return self.score_function.compare_fused(query, self._widened(candidates))

    def compare_pairs(self, query: Tensor, candidates: Tensor) -> Tensor:
        """Score query i against candidate i: (B, query_dim), (B, D) -> (B,)."""
        return self.score_function.compare_pairs(query, self._widened(candidates))

    def score(self, head: Tensor, relation_row: Tensor, tail: Tensor, side: Side = Side.TAIL) -> Tensor:
        """Score triples: (B, D), (B, relation_width), (B, D) -> (B,).

        The side matters only to reciprocal relations, which have a row, and so a score, for each.
        """
        anchor, answer = (head, tail) if side is Side.TAIL else (tail, head)
        return self.compare_pairs(self.query(anchor, relation_row, side), answer)

    def initial_rows(self, table: str, ids: Tensor, seed: int, scale: float) -> Tensor:
        """Return the float32 rows (n, table_width) that a table starts with.

        Parameters
        ----------
        table : str
            An entity type, or ``"relation"``.
        ids : (n,) int64 tensor
            Original ids; an id's row is the same however the table is partitioned.
        seed : int
        scale : float
            Standard deviation; ignored for phases.
        """
        draw = normal_rows
        # Phases must cover the circle: near 0 all relations would start as the identity.
        if table == RELATION and self.score_function.relation_init == PHASE:
            draw, scale = uniform_rows, math.pi
        rows = torch.from_numpy(draw(ids.numpy(), self.table_width(table), seed, table, scale))
        if table != RELATION:
            return rows
        # Each direction of a reciprocal row is a relation of its own.
        one_side = rows.view(-1, self.score_function.relation_dim(self.dim))
        return self.score_function.initial_relations(one_side, self.dim).view_as(rows)

    def operator_rows(self, operators: Sequence[str]) -> Tensor:
        """Return the rows that relations start with, by the name of each one's operator: (n, relation_width).

        For score functions with several operators.
        """
        rows: Tensor = self.score_function.acts.rows_of(operators, self.dim)  # type: ignore[attr-defined]
        return rows.repeat(1, 2) if self.reciprocal else rows


def build_model(
    score_function: str, dim: int, reciprocal: bool, options: Mapping[str, Any] | None = None, seed: int = 0
) -> KgeModel:
    """Build a model from a score function's name.

    Parameters
    ----------
    score_function : str
        A member of :data:`dglkge.model.score_functions.SCORE_FUNCTIONS`.
    dim : int
        Width of an entity's row.
    reciprocal : bool
        See :class:`KgeModel`.
    options : mapping of str to object, optional
        Settings of the score function.
    seed : int
        See :class:`KgeModel`.

    Raises
    ------
    InputError
        If the name is not registered, it has no such option, or it has no rows of that dimension.
    """
    kind = SCORE_FUNCTIONS.get(score_function)
    settings = settings_of("score function", kind.Settings, {**(options or {}), "name": score_function})
    return KgeModel(kind(settings), dim, reciprocal, seed)
