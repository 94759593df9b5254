"""Triple classification: a threshold for each relation decides what is true (Socher et al. 2013)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dglkge.errors import InputError


def best_threshold(scores: np.ndarray, labels: np.ndarray) -> float:
    """Return the threshold with the most correct decisions "true if score >= threshold".

    It is in the middle between two neighbouring scores; of several equally good ones it is the lowest.

    Parameters
    ----------
    scores : (n,) float64 array
        At least one, all finite.
    labels : (n,) bool array
        Which triples are true.
    """
    order = np.argsort(scores, kind="stable")
    scores, labels = scores[order], labels[order]
    # Decisions at cut i: the first i are called false, the others true.
    false_below = np.concatenate([[0], np.cumsum(~labels)])
    true_above = labels.sum() - np.concatenate([[0], np.cumsum(labels)])
    # A cut between equal scores cannot be made.
    possible = np.concatenate([[True], scores[1:] > scores[:-1], [True]])
    cut = int(np.argmax(np.where(possible, false_below + true_above, -1)))
    if cut == 0:
        return float(scores[0])
    if cut == len(scores):
        return float(np.nextafter(scores[-1], np.inf))
    below, above = float(scores[cut - 1]), float(scores[cut])
    middle = below + (above - below) / 2
    return middle if below < middle <= above else above


@dataclass(frozen=True)
class Thresholds:
    """Thresholds of the relations.

    Attributes
    ----------
    of_relation : mapping of int to float
    shared : float
        For relations without triples to fit on.
    """

    of_relation: Mapping[int, float]
    shared: float

    def margins(self, relation_ids: np.ndarray, scores: np.ndarray) -> np.ndarray:
        """Return how far each score is above its relation's threshold; 0 or more means true."""
        ids, place = np.unique(relation_ids, return_inverse=True)
        values = np.array([self.of_relation.get(id_, self.shared) for id_ in ids.tolist()])
        return scores - values[place.reshape(-1)]


def fit_thresholds(relation_ids: np.ndarray, scores: np.ndarray, labels: np.ndarray) -> Thresholds:
    """Fit a threshold for each relation, and one for all.

    Parameters
    ----------
    relation_ids : (n,) int64 array
    scores : (n,) float64 array
    labels : (n,) bool array

    Raises
    ------
    InputError
        If there are no true or no false triples.
    """
    if not labels.any() or labels.all():
        missing = "false" if labels.any() else "true"
        raise InputError(
            f"thresholds need true and false triples of the valid split; there are no {missing} ones"
        )
    order = np.argsort(relation_ids, kind="stable")
    ids, first = np.unique(relation_ids[order], return_index=True)
    groups = zip(ids.tolist(), np.split(order, first[1:]))
    of_relation = {id_: best_threshold(scores[places], labels[places]) for id_, places in groups}
    return Thresholds(of_relation, best_threshold(scores, labels))


@dataclass(frozen=True)
class ClassificationMetrics:
    """Quality of decisions.

    Attributes
    ----------
    num_true, num_false : int
        Triples of each kind.
    accuracy, precision, recall, f1 : float
        Of the decisions; precision, recall and F1 of the true triples, 0 where nothing is true or called so.
    roc_auc, average_precision : float or None
        Of the order by margin: the probability that a true triple is above a false one, equal ones half (Mann
        and Whitney 1947), and the mean precision at each true triple (area under the steps of the
        precision-recall curve). None without triples of both kinds.
    """

    num_true: int
    num_false: int
    accuracy: float
    precision: float
    recall: float
    f1: float
    roc_auc: float | None
    average_precision: float | None

    @classmethod
    def of(cls, margins: np.ndarray, labels: np.ndarray) -> ClassificationMetrics:
        """Compute the metrics of at least one triple.

        Parameters
        ----------
        margins : (n,) float64 array
            0 or more means that the triple is called true.
        labels : (n,) bool array
            Whether it is.
        """
        called = margins >= 0
        num_true, num_false = int(labels.sum()), int((~labels).sum())
        hits, num_called = int((called & labels).sum()), int(called.sum())
        both_kinds = num_true > 0 and num_false > 0
        return cls(
            num_true=num_true,
            num_false=num_false,
            accuracy=float((called == labels).mean()),
            precision=hits / num_called if num_called else 0.0,
            recall=hits / num_true if num_true else 0.0,
            f1=2 * hits / (num_called + num_true) if num_called + num_true else 0.0,
            roc_auc=roc_auc(margins, labels) if both_kinds else None,
            average_precision=average_precision(margins, labels) if both_kinds else None,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the metrics by name, ready for JSON."""
        return dict(vars(self))


def roc_auc(scores: np.ndarray, labels: np.ndarray) -> float:
    """Return the area under the ROC curve; needs triples of both kinds."""
    # Ranks from 1, the mean rank for equal scores: the Mann-Whitney U statistic over its maximum.
    _, place, count = np.unique(scores, return_inverse=True, return_counts=True)
    last = np.cumsum(count)
    ranks = (last - (count - 1) / 2)[place.reshape(-1)]
    num_true, num_false = int(labels.sum()), int((~labels).sum())
    return float((ranks[labels].sum() - num_true * (num_true + 1) / 2) / (num_true * num_false))


def average_precision(scores: np.ndarray, labels: np.ndarray) -> float:
    """Return the sum over the distinct scores, descending, of precision times the gain of recall."""
    _, place = np.unique(-scores, return_inverse=True)
    hits = np.bincount(place.reshape(-1), weights=labels)
    total = np.bincount(place.reshape(-1))
    precision = np.cumsum(hits) / np.cumsum(total)
    return float((precision * hits).sum() / hits.sum())


@dataclass(frozen=True)
class ClassificationResult:
    """Decisions on triples under fitted thresholds.

    Attributes
    ----------
    thresholds : Thresholds
    relation_labels : sequence of str
        By relation id.
    relation_ids : (n,) int64 array
    margins : (n,) float64 array
        Score minus the relation's threshold.
    labels : (n,) bool array
        Which triples are true.
    negatives : str
        Where the false triples come from.
    """

    thresholds: Thresholds
    relation_labels: Sequence[str]
    relation_ids: np.ndarray
    margins: np.ndarray
    labels: np.ndarray
    negatives: str

    @property
    def overall(self) -> ClassificationMetrics:
        """Metrics over all triples."""
        return ClassificationMetrics.of(self.margins, self.labels)

    def per_relation(self) -> dict[str, ClassificationMetrics]:
        """Compute the metrics of each relation that occurs, the most frequent first."""
        order = np.argsort(self.relation_ids, kind="stable")
        ids, first, count = np.unique(self.relation_ids[order], return_index=True, return_counts=True)
        groups = np.split(order, first[1:])
        return {
            self.relation_labels[int(ids[i])]: ClassificationMetrics.of(
                self.margins[groups[i]], self.labels[groups[i]]
            )
            for i in np.argsort(-count, kind="stable").tolist()
        }

    def to_dict(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        per_relation = {label: metrics.to_dict() for label, metrics in self.per_relation().items()}
        for id_, threshold in self.thresholds.of_relation.items():
            if self.relation_labels[id_] in per_relation:
                per_relation[self.relation_labels[id_]]["threshold"] = threshold
        return {
            "negatives": self.negatives,
            "thresholds": "one for each relation, fitted on the valid split",
            "shared_threshold": self.thresholds.shared,
            **self.overall.to_dict(),
            "per_relation": per_relation,
        }
