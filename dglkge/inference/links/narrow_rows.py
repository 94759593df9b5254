"""Rows of large entity types in bfloat16, which take half the time to read: likely candidates of few queries.

A product in bfloat16 has a known bound of its rounding. A candidate that is farther than that below the limit
is skipped; the few that remain are scored in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from dglkge.inference.links.missing_links import CANDIDATE_PANEL, NARROW_SLACK, QUERY_TILE, at_least
from dglkge.inference.search import BLOCK_BYTES, candidate_blocks
from dglkge.inference.whole_tables import Tables
from dglkge.kernels.full_scores import score_answers
from dglkge.model.device import BFLOAT16, faster_type
from dglkge.model.kge_model import KgeModel
from dglkge.optim.workspace import split
from dglkge.typing import RowShard

LEAST_ROWS, MOST_BYTES = 100_000, 1 << 30
"""Rows from which a copy of a type is worth its time, and its most bytes."""

SCREENED = 64
"""One candidate of so many may remain; of more, all are scored in float32."""

LEAST_QUERIES = 16
"""A product with fewer is slower."""


def has_fast_bfloat16(model: KgeModel) -> bool:
    """Return whether a model's products are clearly faster in bfloat16 here."""
    if not model.score_function.is_product:
        return False
    # One thread: several wait for each other on a busy machine, which says nothing about the type.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return faster_type((QUERY_TILE, CANDIDATE_PANEL, model.query_dim)) == BFLOAT16
    finally:
        torch.set_num_threads(before)


class LikelyCandidates:
    """Candidates of queries whose scores are not below a limit.

    Rows in bfloat16 are made at the first search of a type and kept.

    Parameters
    ----------
    max_norm : callable
        Returns the greatest Euclidean norm of a row of a type.
    """

    def __init__(self, model: KgeModel, tables: Tables, max_norm: Callable[[str], float]) -> None:
        self._model, self._tables, self._max_norm = model, tables, max_norm
        self.is_narrow = has_fast_bfloat16(model)
        self._narrow: dict[str, list[Tensor]] = {}

    def search(
        self, entity_type: str, query: Tensor, low: float
    ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yield query, original id and float32 score of candidates of queries (b, Dq), by block and query."""
        shards, model = self._tables.shards(entity_type), self._model
        limits = torch.full((len(query),), low)
        for shard, narrow in zip(shards, self._narrow_rows(entity_type, shards)):
            likely = None if narrow is None else self._screened(entity_type, query, low, narrow)
            if likely is not None:
                row, column = likely
                rows = shard.rows.numpy()
                # Rows may be narrower than queries: they have zeros at their end.
                scores = _products(query[:, : rows.shape[1]].contiguous().numpy(), rows, row, column)
                kept = scores >= low
                yield row[kept], shard.original_ids.numpy()[column[kept]], scores[kept]
                continue
            for start, stop in candidate_blocks(len(query), shard):
                compared = model.compare(query, shard.rows[start:stop].float())
                places = at_least(compared, limits)
                ids = shard.original_ids[start + places[1]]
                yield places[0].numpy(), ids.numpy(), compared[places].numpy()

    def _narrow_rows(self, entity_type: str, shards: Sequence[RowShard]) -> Sequence[Tensor | None]:
        """Return the rows of the shards in bfloat16; None where that would not pay."""
        num_rows, width = sum(len(shard.rows) for shard in shards), self._tables.meta.dim
        if (
            not self.is_narrow
            or num_rows < LEAST_ROWS
            or shards[0].rows.dtype != torch.float32
            or 2 * num_rows * width > MOST_BYTES
        ):
            return [None] * len(shards)
        if entity_type not in self._narrow:
            self._narrow[entity_type] = [shard.rows.bfloat16() for shard in shards]
        return self._narrow[entity_type]

    def _screened(
        self, entity_type: str, query: Tensor, low: float, narrow: Tensor
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Return row and column of what may reach the limit, by row; None if that is too much."""
        slack = NARROW_SLACK * query.norm(dim=1) * self._max_norm(entity_type)
        # The limit is rounded as well.
        limits, num_queries = (low - slack - 2.0**-8 * abs(low)).bfloat16(), len(query)
        queries = narrow.new_zeros(max(LEAST_QUERIES, num_queries), narrow.shape[1])
        queries[:num_queries] = query[:, : narrow.shape[1]]
        step = max(1, min(len(narrow), BLOCK_BYTES // (4 * len(queries))))
        scores, flags = narrow.new_empty(step, len(queries)), torch.empty(step, num_queries, dtype=torch.bool)
        remaining, passing = len(narrow) * num_queries // SCREENED, [np.empty(0, np.int64)]
        # Positive numbers and their bits have one order, and integers are compared several times as fast.
        kind = torch.int16 if bool((limits > 0).all()) else torch.bfloat16
        for start in range(0, len(narrow), step):
            rows = narrow[start : start + step]
            torch.mm(rows, queries.T, out=scores[: len(rows)])
            query_scores = scores[: len(rows), :num_queries]
            torch.ge(query_scores.view(kind), limits.view(kind), out=flags[: len(rows)])
            places = _true_places(flags[: len(rows)])
            remaining -= len(places)
            if remaining < 0:
                return None
            passing.append(places + start * num_queries)
        column, row = np.divmod(np.concatenate(passing), num_queries)
        order = np.argsort(row, kind="stable")
        return row[order], column[order]


def _products(query: np.ndarray, rows: np.ndarray, row: np.ndarray, column: np.ndarray) -> np.ndarray:
    """Return the float32 inner products (m,) of pairs by query."""
    scores = np.empty(len(row), np.float32)

    def score(part: slice) -> None:
        starts = np.searchsorted(row[part], np.arange(len(query) + 1))
        score_answers(query, rows, starts, column[part], scores[part])

    split(len(row), query.shape[1], score)
    return scores


def _true_places(flags: Tensor) -> np.ndarray:
    """Return the flat places of the few that are true, ascending."""
    flat = flags.numpy().reshape(-1)
    whole = len(flat) // 8 * 8
    # Eight at a time: nearly all are false.
    near = np.flatnonzero(flat[:whole].view(np.int64))
    places = (8 * near[:, None] + np.arange(8)).reshape(-1)
    return np.concatenate([places[flat[places]], whole + np.flatnonzero(flat[whole:])])
