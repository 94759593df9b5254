"""Entities whose rows point the same way."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import normalize

from dglkge.errors import InputError
from dglkge.inference.link_prediction import Answer, TopAnswers, candidate_blocks
from dglkge.typing import RowShard, RowSource


def most_similar(
    rows: RowSource, shards: Sequence[RowShard], table: str, ids: torch.Tensor, topk: int = 10
) -> list[list[Answer]]:
    """Return the entities of a type that are nearest to given ones by cosine.

    Parameters
    ----------
    rows : RowSource
        Looks up the given entities.
    shards : sequence of RowShard
        All rows of the type.
    table : str
        The entity type.
    ids : (Q,) int64 tensor
        The given entities.
    topk : int

    Returns
    -------
    list of list of Answer
        One list for each given entity, the nearest first, itself left out. The score is the cosine, and
        0 where a row is all zeros.

    Raises
    ------
    InputError
        If ``topk`` is less than 1.
    """
    if topk < 1:
        raise InputError(f"the number of answers must be at least 1, got {topk}")
    best = TopAnswers(len(ids), topk)
    with torch.no_grad():
        given = normalize(rows.gather(table, ids))
        for shard in shards:
            for start, stop in candidate_blocks(len(ids), shard):
                cosines = given @ normalize(shard.rows[start:stop]).T
                candidate_ids = shard.original_ids[start:stop]
                cosines[ids[:, None] == candidate_ids] = -torch.inf
                best.add(cosines, candidate_ids)
    scores, found = best.result()
    return [
        [Answer(id_, score) for id_, score in zip(row_ids, row_scores) if score != -torch.inf]
        for row_ids, row_scores in zip(found.tolist(), scores.tolist())
    ]
