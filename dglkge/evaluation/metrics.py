"""Figures that sum up a set of ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

HITS_AT = (1, 3, 10, 50)


@dataclass(frozen=True)
class RankingMetrics:
    """Mean rank, mean reciprocal rank, Hits@k and AUC of some queries.

    Attributes
    ----------
    num_queries : int
    mr : float
        Mean rank.
    mrr : float
        Mean reciprocal rank.
    hits : dict of int to float
        For each k of :data:`HITS_AT`, the share of queries whose rank is at most k.
    auc : float
        Mean share of a query's negatives that the true answer beats, 1 - (rank - 1) / num_negatives: the area
        under the ROC curve. A query without negatives counts 1.
    """

    num_queries: int
    mr: float
    mrr: float
    hits: dict[int, float]
    auc: float

    @classmethod
    def of(cls, ranks: np.ndarray, num_negatives: np.ndarray) -> RankingMetrics:
        """Compute the figures of at least one rank.

        Parameters
        ----------
        ranks : (n,) float64 array
        num_negatives : (n,) int64 array
            Candidates that each true answer was ranked among, itself not counted.
        """
        beaten_by = (ranks - 1.0) / np.maximum(num_negatives, 1)
        return cls(
            num_queries=len(ranks),
            mr=float(ranks.mean()),
            mrr=float((1.0 / ranks).mean()),
            hits={k: float((ranks <= k).mean()) for k in HITS_AT},
            auc=float(1.0 - beaten_by.mean()),
        )

    def to_dict(self) -> dict[str, float]:
        """Return the figures by name: mr, mrr, hits@1 ..., auc, num_queries."""
        hits = {f"hits@{k}": share for k, share in self.hits.items()}
        return {"mr": self.mr, "mrr": self.mrr, **hits, "auc": self.auc, "num_queries": self.num_queries}
