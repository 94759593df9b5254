"""A batch of queries with everything needed to rank its true answers against any rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Optional

import numpy as np
import torch

from dglkge.data.known_triples import KnownTriples
from dglkge.evaluation.exact_scores import exact_scores
from dglkge.evaluation.query_plan import QueryBatch
from dglkge.model.kge_model import KgeModel
from dglkge.typing import RELATION, RowSource


@dataclass(frozen=True)
class ScoredQueries:
    """Queries and true scores as tensors on the device of the rows they meet.

    Attributes
    ----------
    query : (U, D) float64 tensor
    query_of : (K,) int64 tensor
        The query of each true answer, ascending.
    true_ids : (K,) int64 tensor
    true_scores : (K,) float64 tensor
    known_query, known_ids : (M,) int64 tensor
        Known answers of the queries that do not compete: pairs in ascending order. None in raw ranking.
    """

    query: torch.Tensor
    query_of: torch.Tensor
    true_ids: torch.Tensor
    true_scores: torch.Tensor
    known_query: torch.Tensor
    known_ids: torch.Tensor

    def known_among(self, queries: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Say of pairs of a query and an entity whether the entity is one of its known answers: bool."""
        if not len(self.known_ids):
            return torch.zeros_like(ids, dtype=torch.bool)
        base = int(max(self.known_ids.max(), ids.max())) + 1 if len(ids) else 1
        known, asked = self.known_query * base + self.known_ids, queries * base + ids
        place = torch.searchsorted(known, asked).clamp_max(len(known) - 1)
        return known[place] == asked


def score_queries(
    model: KgeModel, batch: QueryBatch, rows: RowSource, known: Optional[KnownTriples], device: torch.device
) -> ScoredQueries:
    """Look up the rows of a batch and score its true answers.

    Parameters
    ----------
    model : KgeModel
    batch : QueryBatch
    rows : RowSource
    known : KnownTriples, optional
        None for raw ranking.
    device : torch.device
        Where the candidates' rows are: scores compare exactly only where one device computed them.
    """
    anchors = _gather(rows, batch.anchor_type, batch.anchor_ids, device)
    relations = _gather(rows, RELATION, batch.relation_ids, device)
    query = model.query(anchors.double(), relations.double(), batch.side)
    query_of = torch.from_numpy(batch.query_of).to(device)
    unique_ids, place = np.unique(batch.true_ids, return_inverse=True)
    answers = _gather(rows, batch.candidate_type, unique_ids, device)
    known_query, known_ids = np.zeros((2, 0), np.int64)
    if known is not None:
        known_query, known_ids = known.answers(batch.side, batch.anchor_ids, batch.relation_ids)
    return ScoredQueries(
        query=query,
        query_of=query_of,
        true_ids=torch.from_numpy(batch.true_ids).to(device),
        true_scores=exact_scores(model, query, query_of, answers, torch.from_numpy(place).to(device)),
        known_query=torch.from_numpy(known_query).to(device),
        known_ids=torch.from_numpy(known_ids).to(device),
    )


def _gather(rows: RowSource, table: str, ids: np.ndarray, device: torch.device) -> torch.Tensor:
    """Look up each distinct row once: (n,) ids -> (n, D) rows."""
    unique_ids, place = np.unique(ids, return_inverse=True)
    found = rows.gather(table, torch.from_numpy(unique_ids)).to(device)
    return found[torch.from_numpy(place).to(device)]


@contextmanager
def full_float32_products() -> Iterator[None]:
    """Forbid products in bfloat16 or TF32, which training may have allowed: the bounds are float32's."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
