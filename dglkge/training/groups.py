"""A group of edges with everything that its loss needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dglkge.sampling.edge_batches import EdgeBatch
from dglkge.sampling.mixed_negatives import MixedNegatives
from dglkge.training.row_request import NodeIds, RowPlaces, RowRequest
from dglkge.typing import RELATION, Side


@dataclass(frozen=True)
class Negatives:
    """Negatives of a chunk: node ids (N,) and their rows."""

    ids: NodeIds
    rows: RowPlaces


@dataclass(frozen=True)
class Group:
    """Edges of a batch that join the same pair of entity types and share their negatives.

    Attributes
    ----------
    lhs, rhs : str
        Entity types.
    head_ids, tail_ids : (B,) int64
        Node ids.
    weights : (B,) float32 or None
    heads, relations, tails : RowPlaces
    negatives : mapping of Side to Negatives
        The same object for both sides where the entity types are the same.
    """

    lhs: str
    rhs: str
    head_ids: NodeIds
    tail_ids: NodeIds
    weights: npt.NDArray[np.float32] | None
    heads: RowPlaces
    relations: RowPlaces
    tails: RowPlaces
    negatives: Mapping[Side, Negatives]

    def __len__(self) -> int:
        return len(self.head_ids)


def ask_for_rows(
    batch: EdgeBatch,
    pairs: Sequence[tuple[str, str]],
    sampler: MixedNegatives,
    requests: Mapping[str, RowRequest],
) -> list[Group]:
    """Make the groups of a batch, drawing negatives and asking for all rows.

    Groups of one chunk share negatives by entity type.

    Parameters
    ----------
    batch : EdgeBatch
    pairs : sequence of (str, str)
        Entity types of the heads and tails of each edge type.
    sampler : MixedNegatives
    requests : mapping of str to RowRequest
        By table.
    """
    drawn: dict[tuple[int, str], Negatives] = {}

    def negatives(entity_type: str, chunk: int) -> Negatives:
        if (chunk, entity_type) not in drawn:
            ids = sampler.sample(entity_type, batch, chunk)
            drawn[chunk, entity_type] = Negatives(ids, requests[entity_type].add(ids))
        return drawn[chunk, entity_type]

    groups = []
    for found in batch.groups:
        run = slice(found.start, found.end)
        lhs, rhs = pairs[found.pair]
        heads, relations, tails = batch.heads[run], batch.relations[run], batch.tails[run]
        groups.append(
            Group(
                lhs,
                rhs,
                heads,
                tails,
                None if batch.weights is None else batch.weights[run],
                requests[lhs].add(heads),
                requests[RELATION].add(relations),
                requests[rhs].add(tails),
                {Side.HEAD: negatives(lhs, found.chunk), Side.TAIL: negatives(rhs, found.chunk)},
            )
        )
    return groups
