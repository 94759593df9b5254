"""Scores of given triples, from each of their sides."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from dglkge.errors import InputError
from dglkge.evaluation.queries import plan_queries, score_queries
from dglkge.model.kge_model import KgeModel
from dglkge.typing import Relation, RowSource, Side


def score_triples(
    model: KgeModel,
    triples: np.ndarray,
    relations: Sequence[Relation],
    rows: RowSource,
    batch_size: int = 8192,
) -> dict[Side, np.ndarray]:
    """Score triples in float64 as answers to (h, r, ?) and to (?, r, t).

    The two differ only with reciprocal relations, which have a row for each direction.

    Parameters
    ----------
    model : KgeModel
    triples : (n, 3) int64 array
        Head, relation and tail, original ids.
    relations : sequence of Relation
        By relation id.
    rows : RowSource
    batch_size : int
        Affects memory, not the result.

    Returns
    -------
    dict of Side to (n,) float64 array

    Raises
    ------
    InputError
        If a score is not finite.
    """
    scores = {side: np.empty(len(triples)) for side in Side}
    if not len(triples):
        return scores
    with torch.no_grad():
        for batch in plan_queries(triples, relations, batch_size):
            scored = score_queries(model, batch, rows, None, torch.device("cpu"))
            scores[batch.side][batch.places] = scored.true_scores.numpy()
    if not all(np.isfinite(values).all() for values in scores.values()):
        raise InputError("a score is not finite; the training diverged, or the rows are not this model's")
    return scores
