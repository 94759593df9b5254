"""Triple classification: a threshold for each relation decides what is true (Socher et al. 2013).

False triples are drawn for true ones: one end is replaced by an entity that makes no known triple.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dglkge.data.dataset import Dataset
from dglkge.data.known_triples import KnownTriples
from dglkge.errors import InputError
from dglkge.evaluation.metrics import places_by_id
from dglkge.kernels.hashing import column_bits, in_range, row_keys, stream_key
from dglkge.typing import Side


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
    shared : float
        For relations without triples to fit on.
    """

    by_relation: Mapping[int, float]
    shared: float

    def margins(self, relation_ids: np.ndarray, scores: np.ndarray) -> np.ndarray:
        """Return how far each score is above its relation's threshold; 0 or more means true."""
        ids, place = np.unique(relation_ids, return_inverse=True)
        values = np.array([self.by_relation.get(id_, self.shared) for id_ in ids.tolist()])
        return scores - values[place]


def fit_thresholds(relation_ids: np.ndarray, scores: np.ndarray, labels: np.ndarray) -> Thresholds:
    """Fit a threshold for each relation, and one for all, to scores (n,) of true and false triples."""
    if not labels.any() or labels.all():
        missing = "false" if labels.any() else "true"
        raise InputError(
            f"thresholds need true and false triples of the valid split; there are no {missing} ones"
        )
    groups = places_by_id(relation_ids).items()
    by_relation = {id_: best_threshold(scores[places], labels[places]) for id_, places in groups}
    return Thresholds(by_relation, best_threshold(scores, labels))


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
        """Compute the metrics of at least one triple; with a margin of 0 or more it is called true."""
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


def roc_auc(scores: np.ndarray, labels: np.ndarray) -> float:
    """Return the area under the ROC curve; needs triples of both kinds."""
    # Ranks from 1, the mean rank for equal scores: the Mann-Whitney U statistic over its maximum.
    _, place, count = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(count) - (count - 1) / 2)[place]
    num_true, num_false = int(labels.sum()), int((~labels).sum())
    return float((ranks[labels].sum() - num_true * (num_true + 1) / 2) / (num_true * num_false))


def average_precision(scores: np.ndarray, labels: np.ndarray) -> float:
    """Return the sum over the distinct scores, descending, of precision times the gain of recall."""
    _, place = np.unique(-scores, return_inverse=True)
    hits = np.bincount(place, weights=labels)
    precision = np.cumsum(hits) / np.cumsum(np.bincount(place))
    return float((precision * hits).sum() / hits.sum())


@dataclass(frozen=True)
class ClassificationResult:
    """Decisions on triples under fitted thresholds.

    Attributes
    ----------
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
        groups = sorted(places_by_id(self.relation_ids).items(), key=lambda group: -len(group[1]))
        return {
            self.relation_labels[id_]: ClassificationMetrics.of(self.margins[places], self.labels[places])
            for id_, places in groups
        }

    def to_dict(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        per_relation = {label: {**vars(metrics)} for label, metrics in self.per_relation().items()}
        for id_, threshold in self.thresholds.by_relation.items():
            if self.relation_labels[id_] in per_relation:
                per_relation[self.relation_labels[id_]]["threshold"] = threshold
        return {
            "negatives": self.negatives,
            "thresholds": "one for each relation, fitted on the valid split",
            "shared_threshold": self.thresholds.shared,
            **vars(self.overall),
            "per_relation": per_relation,
        }


Pools = Mapping[tuple[int, Side], np.ndarray]
"""By relation id and side: the entities that may take the place, ascending ids."""

Stream = Sequence[int | str]


def seen_entities(triples: np.ndarray) -> Pools:
    """Return the entities that occur on each side of each relation of triples (n, 3).

    As wrong answers these are harder than entities that no triple of the relation has (Socher et al. 2013,
    section 4.2).
    """
    pools = {}
    for side in Side:
        pairs = np.unique(triples[:, [1, side.column]], axis=0)
        for id_, places in places_by_id(pairs[:, 0]).items():
            pools[id_, side] = pairs[places, 1]
    return pools


def draw_sides(num_triples: int, stream: Stream) -> np.ndarray:
    """Draw which triples are corrupted on the side of the tail, (n,) bool."""
    keys = row_keys(stream_key("corrupted side", *stream), np.arange(num_triples))
    return (keys >> np.uint64(63)).astype(bool)


def draw_corruptions(
    triples: np.ndarray,
    side: Side,
    num_each: int,
    dataset: Dataset,
    known: KnownTriples,
    stream: Stream,
    pools: Pools | None = None,
) -> np.ndarray:
    """Draw false triples with another entity on one side, uniformly among those that make no known triple.

    The draws depend only on the stream, the side and the triple's place.

    Parameters
    ----------
    triples : (n, 3) int64 array
        True triples; each one's own answer is excluded too.
    num_each : int
        Draws for each triple, with replacement.
    stream : sequence of int or str
        Key of the random numbers: the seed, and words that tell uses apart.
    pools : mapping, optional
        Entities to draw from; all of the type where there are none, or where the pool has none to draw.

    Returns
    -------
    (m, 3) int64 array
        In the order of the true ones; none for a triple where every entity of the type makes a known triple.
    """
    query, answers = known.answers(side, triples[:, side.anchor_column], triples[:, 1])
    ends = np.searchsorted(query, np.arange(len(triples) + 1))
    keys = row_keys(stream_key("corruptions", *stream, side.value), np.arange(len(triples)))
    bits = column_bits(keys, num_each)
    drawn = np.full((len(triples), num_each), -1, dtype=np.int64)
    for place, (relation_id, true_id) in enumerate(triples[:, [1, side.column]].tolist()):
        excluded = np.union1d(answers[ends[place] : ends[place + 1]], true_id)
        pool = None if pools is None else pools.get((relation_id, side))
        if pool is not None:
            allowed = pool[np.isin(pool, excluded, assume_unique=True, invert=True)]
            if len(allowed):
                drawn[place] = allowed[in_range(bits[place], len(allowed))]
                continue
        type_ = dataset.relations[relation_id].candidate_type(side)
        num_allowed = dataset.num_entities(type_) - len(excluded)
        if num_allowed > 0:
            # Number u of those left is u plus the excluded numbers below it: the j-th excluded one has
            # excluded[j] - j numbers left before it.
            numbers = in_range(bits[place], num_allowed)
            num_below = np.searchsorted(excluded - np.arange(len(excluded)), numbers, side="right")
            drawn[place] = numbers + num_below
    source, column = np.nonzero(drawn >= 0)
    false = triples[source]
    false[:, side.column] = drawn[source, column]
    return false
