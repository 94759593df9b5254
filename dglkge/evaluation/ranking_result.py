"""The ranks of a split and the figures drawn from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dglkge.evaluation.metrics import RankingMetrics
from dglkge.evaluation.protocol import Protocol
from dglkge.typing import Side

SIDES = ("both", "head", "tail")


@dataclass(frozen=True)
class RankingResult:
    """Ranks of both sides of every triple.

    Attributes
    ----------
    protocol : Protocol
    relation_labels : sequence of str
        What people call each relation, by relation id.
    relation_ids : (n,) int64 array
        Relation of each triple.
    ranks : mapping of Side to (n,) float64 array
        Rank of each triple's true head and of its true tail.
    num_negatives : mapping of Side to (n,) int64 array
        How many other candidates each was ranked among.
    """

    protocol: Protocol
    relation_labels: Sequence[str]
    relation_ids: np.ndarray
    ranks: Mapping[Side, np.ndarray]
    num_negatives: Mapping[Side, np.ndarray]

    @property
    def both(self) -> RankingMetrics:
        """Figures over the queries of both sides."""
        return self.metrics("both")

    @property
    def head(self) -> RankingMetrics:
        """Figures over the queries (?, r, t)."""
        return self.metrics("head")

    @property
    def tail(self) -> RankingMetrics:
        """Figures over the queries (h, r, ?)."""
        return self.metrics("tail")

    def metrics(self, sides: str, places: slice | np.ndarray = slice(None)) -> RankingMetrics:
        """Compute the figures of ``"both"`` sides or one, over the triples at some places."""
        chosen = list(Side) if sides == "both" else [Side(sides)]
        ranks = np.concatenate([self.ranks[side][places] for side in chosen])
        num_negatives = np.concatenate([self.num_negatives[side][places] for side in chosen])
        return RankingMetrics.of(ranks, num_negatives)

    def per_relation(self) -> dict[str, dict[str, RankingMetrics]]:
        """Compute the figures of each relation that occurs: label -> both, head, tail -> figures."""
        order = np.argsort(self.relation_ids, kind="stable")
        ids, first = np.unique(self.relation_ids[order], return_index=True)
        groups = np.split(order, first[1:])
        return {
            self.relation_labels[int(id_)]: {sides: self.metrics(sides, places) for sides in SIDES}
            for id_, places in zip(ids, groups)
        }

    def to_dict(self) -> dict[str, Any]:
        """Return protocol and figures, ready for JSON."""
        return {
            "protocol": self.protocol.to_dict(),
            **{sides: self.metrics(sides).to_dict() for sides in SIDES},
            "per_relation": {
                label: {sides: metrics.to_dict() for sides, metrics in by_side.items()}
                for label, by_side in self.per_relation().items()
            },
        }
