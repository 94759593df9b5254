"""Metrics of ranks: MR, MRR, Hits@k and AUC by side and relation, as numbers, JSON and a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dglkge.evaluation.protocol import Protocol
from dglkge.typing import Side

HITS_AT = (1, 3, 10, 50)


@dataclass(frozen=True)
class RankingMetrics:
    """Mean rank, mean reciprocal rank, Hits@k and AUC of a set of queries.

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
        Area under the ROC curve: mean over the queries of 1 - (rank - 1) / num_negatives, the share of the
        negatives that score below the true answer. A query without negatives counts 1.
    """

    num_queries: int
    mr: float
    mrr: float
    hits: dict[int, float]
    auc: float

    @classmethod
    def of(cls, ranks: np.ndarray, num_negatives: np.ndarray) -> RankingMetrics:
        """Compute the metrics of at least one rank.

        Parameters
        ----------
        ranks : (n,) float64 array
        num_negatives : (n,) int64 array
            Candidates that each true answer was ranked among, without itself.
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
        """Return the metrics by name: mr, mrr, hits@1 ..., auc, num_queries."""
        hits = {f"hits@{k}": share for k, share in self.hits.items()}
        return {"mr": self.mr, "mrr": self.mrr, **hits, "auc": self.auc, "num_queries": self.num_queries}


SIDES = ("both", "head", "tail")


@dataclass(frozen=True)
class RankingResult:
    """Ranks of both sides of every triple.

    Attributes
    ----------
    protocol : Protocol
    relation_labels : sequence of str
        Label of each relation, by relation id.
    relation_ids : (n,) int64 array
        Relation of each triple.
    ranks : mapping of Side to (n,) float64 array
        Rank of each triple's true head and of its true tail.
    num_negatives : mapping of Side to (n,) int64 array
        Number of other candidates that each was ranked among.
    """

    protocol: Protocol
    relation_labels: Sequence[str]
    relation_ids: np.ndarray
    ranks: Mapping[Side, np.ndarray]
    num_negatives: Mapping[Side, np.ndarray]

    @property
    def both(self) -> RankingMetrics:
        """Metrics over the queries of both sides."""
        return self.metrics("both")

    @property
    def head(self) -> RankingMetrics:
        """Metrics over the queries (?, r, t)."""
        return self.metrics("head")

    @property
    def tail(self) -> RankingMetrics:
        """Metrics over the queries (h, r, ?)."""
        return self.metrics("tail")

    def metrics(self, sides: str, places: slice | np.ndarray = slice(None)) -> RankingMetrics:
        """Compute the metrics of ``"both"`` sides, ``"head"`` or ``"tail"`` over some of the triples."""
        chosen = list(Side) if sides == "both" else [Side(sides)]
        ranks = np.concatenate([self.ranks[side][places] for side in chosen])
        num_negatives = np.concatenate([self.num_negatives[side][places] for side in chosen])
        return RankingMetrics.of(ranks, num_negatives)

    def per_relation(self) -> dict[str, dict[str, RankingMetrics]]:
        """Compute the metrics of each relation that occurs: label -> both, head, tail -> metrics."""
        order = np.argsort(self.relation_ids, kind="stable")
        ids, first = np.unique(self.relation_ids[order], return_index=True)
        groups = np.split(order, first[1:])
        return {
            self.relation_labels[int(id_)]: {sides: self.metrics(sides, places) for sides in SIDES}
            for id_, places in zip(ids, groups)
        }

    def to_dict(self) -> dict[str, Any]:
        """Return protocol and metrics, ready for JSON."""
        return {
            "protocol": self.protocol.to_dict(),
            **{sides: self.metrics(sides).to_dict() for sides in SIDES},
            "per_relation": {
                label: {sides: metrics.to_dict() for sides, metrics in by_side.items()}
                for label, by_side in self.per_relation().items()
            },
        }


DECIMALS = {"mr": 1, "num_queries": 0}
DEFAULT_DECIMALS = 4


def format_table(result: RankingResult, per_relation: bool = False) -> str:
    """Format the metrics as aligned columns under a line with the protocol.

    Parameters
    ----------
    result : RankingResult
    per_relation : bool
        Add one line for each relation (both sides), the most frequent first.

    Returns
    -------
    str
        Several lines without a final line end.
    """
    lines = [(f"{sides} sides" if sides == "both" else sides, result.metrics(sides)) for sides in SIDES]
    if per_relation:
        by_relation = [(label, by_side["both"]) for label, by_side in result.per_relation().items()]
        lines += sorted(by_relation, key=lambda line: -line[1].num_queries)
    return "\n".join([result.protocol.describe(), *_aligned(lines)])


def _aligned(lines: list[tuple[str, RankingMetrics]]) -> list[str]:
    """Return a header and one text line for each labelled set of metrics."""
    names = list(lines[0][1].to_dict())
    cells = [["", *names]]
    for label, metrics in lines:
        figures = [
            f"{value:.{DECIMALS.get(name, DEFAULT_DECIMALS)}f}" for name, value in metrics.to_dict().items()
        ]
        cells.append([label, *figures])
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    return [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))])
        for row in cells
    ]
