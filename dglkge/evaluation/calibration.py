"""Probabilities of scores: Platt's scaling and isotonic regression, weighted, in float64; and their file.

Equal scores of two relations, or of two sides, are not equally probable. Curves by relation are sigmoids:
few triples determine two numbers and no more. They are shrunk to the common curve, which counts as a number
of scores beside those of the relation; the number is chosen by cross-validation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from dglkge.errors import InputError
from dglkge.evaluation.metrics import places_by_id
from dglkge.typing import Side

MAX_NEWTON_STEPS = 100
SMALLEST_STEP = 1e-10
RIDGE = 1e-12
"""Of Lin, Lin and Weng 2007, algorithm 1: limit of iterations, shortest step, and addition to the Hessian's
diagonal."""

CORRUPTIONS_EACH = 10
"""Default number of false triples drawn for each side of a true one to fit probabilities."""

PRIOR_SCORES = (10, 30, 100, 300, 1000)
"""Numbers of scores that the common curve may count as in a relation's own."""

FOLDS = 3
MOST_VALIDATED = 200
"""Curves that the number is chosen on."""

NUM_BINS = 10
"""Bins of the expected calibration error."""

SMALLEST_PROBABILITY = 1e-15
"""Limit of probabilities in the log loss, which is infinite at 0."""


@dataclass(frozen=True)
class Platt:
    """Probability 1 / (1 + exp(-(slope * score + offset))) (Platt 1999, with the signs turned)."""

    slope: float
    offset: float

    def __call__(self, scores: np.ndarray) -> np.ndarray:
        """Return the probability of each score, float64."""
        return _sigmoid(self.slope * np.asarray(scores, dtype=np.float64) + self.offset)

    @classmethod
    def fit(cls, scores: np.ndarray, labels: np.ndarray, weights: np.ndarray) -> Platt:
        """Fit by Newton's method with backtracking (Lin, Lin and Weng 2007, algorithm 1); weights > 0.

        The targets are Platt's: (N+ + 1) / (N+ + 2) and 1 / (N- + 2), with N the sums of the weights.
        """
        num_true, num_false = weights[labels].sum(), weights[~labels].sum()
        targets = np.where(labels, (num_true + 1) / (num_true + 2), 1 / (num_false + 2))
        return cls._nearest(scores, targets, weights, np.log((num_true + 1) / (num_false + 1)))

    @classmethod
    def shrunk(cls, scores: np.ndarray, labels: np.ndarray, prior: np.ndarray, prior_scores: float) -> Platt:
        """Fit to scores of which half of the weight is true, and to a prior; the slope is not negative.

        Parameters
        ----------
        prior : (n,) array
            Probability of each score before its label is seen.
        prior_scores : float
            Number of scores that the prior counts as.
        """
        balanced, added = balanced_weights(labels, 0.5), prior_scores / len(scores)
        weights = balanced + added
        targets = (balanced * labels + added * prior) / weights
        curve = cls._nearest(scores, targets, weights, 0.0)
        return curve if curve.slope >= 0 else cls._nearest(np.zeros_like(scores), targets, weights, 0.0)

    def at_rate(self, positive_rate: float) -> Platt:
        """Return the curve for another share of true triples than one half (Bayes' theorem)."""
        return Platt(self.slope, self.offset + float(np.log(positive_rate / (1 - positive_rate))))

    @classmethod
    def _nearest(cls, scores: np.ndarray, targets: np.ndarray, weights: np.ndarray, offset: float) -> Platt:
        """Minimize the cross entropy to targets in [0, 1], from a constant curve."""
        # With mean 0 and deviation 1 the two parameters hardly depend on each other.
        center, scale = scores.mean(), scores.std() or 1.0
        x = (scores - center) / scale
        parameters = np.array([0.0, offset])
        loss = _cross_entropy(parameters, x, targets, weights)
        for _ in range(MAX_NEWTON_STEPS):
            p = _sigmoid(parameters[0] * x + parameters[1])
            error, curvature = weights * (p - targets), weights * p * (1 - p)
            gradient = np.array([(error * x).sum(), error.sum()])
            if np.abs(gradient).max() < 1e-10 * weights.sum():
                break
            mixed = (curvature * x).sum()
            hessian = np.array([[(curvature * x * x).sum() + RIDGE, mixed], [mixed, curvature.sum() + RIDGE]])
            direction = -np.linalg.solve(hessian, gradient)
            step = 1.0
            while step >= SMALLEST_STEP:
                new = parameters + step * direction
                new_loss = _cross_entropy(new, x, targets, weights)
                if new_loss < loss + 1e-4 * step * float(gradient @ direction):
                    break
                step /= 2
            else:
                break  # no step is an improvement: the loss is flat to rounding
            parameters, loss = new, new_loss
        slope = float(parameters[0] / scale)
        return cls(slope, float(parameters[1] - slope * center))


def _sigmoid(x: np.ndarray) -> np.ndarray:
    # exp only of numbers below 0: it cannot overflow.
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0, small) / (1.0 + small)


def _cross_entropy(parameters: np.ndarray, x: np.ndarray, targets: np.ndarray, weights: np.ndarray) -> float:
    """Return the loss that Platt's scaling minimizes, without overflow."""
    logits = parameters[0] * x + parameters[1]
    return float((weights * (np.logaddexp(0.0, logits) - targets * logits)).sum())


@dataclass(frozen=True)
class Isotonic:
    """A probability that never falls with the score: constant in blocks, linear between them.

    Attributes
    ----------
    scores, values : (k,) float64 array
        Corners of the curve, ascending scores; constant before the first and after the last.
    """

    scores: np.ndarray
    values: np.ndarray

    def __call__(self, scores: np.ndarray) -> np.ndarray:
        """Return the probability of each score, float64."""
        return np.interp(np.asarray(scores, dtype=np.float64), self.scores, self.values)

    @classmethod
    def fit(cls, scores: np.ndarray, labels: np.ndarray, weights: np.ndarray) -> Isotonic:
        """Fit the least squares curve by pooling adjacent violators (Best and Chakravarti 1990)."""
        # Equal scores are one point: they must have one probability.
        distinct, place = np.unique(scores, return_inverse=True)
        total = np.bincount(place, weights=weights)
        mean = np.bincount(place, weights=weights * labels) / total
        blocks: list[tuple[int, float, float]] = []  # first point, value and weight
        for start, (value, weight) in enumerate(zip(mean.tolist(), total.tolist())):
            # A block that is not above its left neighbour is pooled with it, and again with the next.
            while blocks and blocks[-1][1] >= value:
                start, lower, lower_weight = blocks.pop()
                value = (lower * lower_weight + value * weight) / (lower_weight + weight)
                weight += lower_weight
            blocks.append((start, value, weight))
        starts, values, _ = map(np.array, zip(*blocks))
        # The two ends of each block; one corner where they are the same.
        corners = np.unique([starts, np.append(starts[1:], len(distinct)) - 1])
        block = np.searchsorted(starts, corners, side="right") - 1
        return cls(distinct[corners], values[block])


Curve = Platt | Isotonic
METHODS: Mapping[str, type[Curve]] = {"isotonic": Isotonic, "platt": Platt}
"""Ways of fitting probabilities."""


def balanced_weights(labels: np.ndarray, positive_rate: float) -> np.ndarray:
    """Return weights (n,) under which a share in (0, 1) of triples with labels (n,) is true, with mean 1.

    Drawn false triples are as many as were drawn; the share of true ones is an assumption (Tabacof and
    Costabello 2020, section 3.2).
    """
    num_true = int(labels.sum())
    if num_true in (0, len(labels)):
        missing = "false" if num_true else "true"
        raise InputError(f"probabilities need true and false triples; there are no {missing} ones")
    true_weight = positive_rate * len(labels) / num_true
    false_weight = (1 - positive_rate) * len(labels) / (len(labels) - num_true)
    return np.where(labels, true_weight, false_weight)


def fit_by_relation(
    scores: np.ndarray, labels: np.ndarray, queries: np.ndarray, common: Curve
) -> tuple[int, dict[tuple[int, Side], Platt]]:
    """Fit a curve for each relation and side that has true and false scores, shrunk to the common one.

    Parameters
    ----------
    queries : (n, 3) int64 array
        Entity given, relation and side (its place in :class:`Side`) of the query of each score. A query's
        scores are in one fold.
    common : Curve
        For as many true triples as false ones, as the result.

    Returns
    -------
    prior_scores : int
        Of :meth:`Platt.shrunk`: the one with the least mean log loss of relations in folds left out.
    curves : dict
        By relation id and side.
    """
    groups = places_by_id(queries[:, 1] * len(Side) + queries[:, 2])
    groups = {number: places for number, places in groups.items() if _has_both(labels[places])}
    parts, prior = list(groups.values()), common(scores)
    _, query = np.unique(queries, axis=0, return_inverse=True)
    draws = np.random.default_rng(0)
    fold_of = draws.permutation(int(query.max()) + 1)[query.reshape(-1)] % FOLDS

    def loss(prior_scores: int) -> float:
        total = 0.0
        for part in validated:
            for fold in range(FOLDS):
                rest, held_out = part[fold_of[part] != fold], part[fold_of[part] == fold]
                if _has_both(labels[rest]) and _has_both(labels[held_out]):
                    curve = Platt.shrunk(scores[rest], labels[rest], prior[rest], prior_scores)
                    weights = balanced_weights(labels[held_out], 0.5)
                    quality = calibration_metrics(curve(scores[held_out]), labels[held_out], weights)
                    total += len(held_out) * quality["log_loss"]
        return total

    validated = [parts[place] for place in draws.permutation(len(parts))[:MOST_VALIDATED]]
    # The first of equal ones is the largest: where no fold can be left out, relations tell little.
    prior_scores = min(reversed(PRIOR_SCORES), key=loss)
    curves = {}
    for number, part in groups.items():
        relation_id, side = divmod(number, len(Side))
        curve = Platt.shrunk(scores[part], labels[part], prior[part], prior_scores)
        curves[relation_id, list(Side)[side]] = curve
    return prior_scores, curves


def _has_both(labels: np.ndarray) -> bool:
    return 0 < labels.sum() < len(labels)


def calibration_metrics(
    probabilities: np.ndarray, labels: np.ndarray, weights: np.ndarray
) -> dict[str, float]:
    """Return measures of probabilities (n,), all weighted; 0 is the best.

    ``brier_score`` is the mean squared error (Brier 1950); ``log_loss`` the mean cross entropy in nats;
    ``expected_calibration_error``, over 10 bins of equal width, the mean distance between the bin's mean
    probability and its share of true triples (Naeini et al. 2015).
    """
    total = weights.sum()
    sure = np.clip(probabilities, SMALLEST_PROBABILITY, 1 - SMALLEST_PROBABILITY)
    log_loss = -(weights * np.where(labels, np.log(sure), np.log1p(-sure))).sum() / total
    bins = np.minimum((probabilities * NUM_BINS).astype(int), NUM_BINS - 1)
    excess = np.bincount(bins, weights=weights * (probabilities - labels), minlength=NUM_BINS)
    return {
        "brier_score": float((weights * (probabilities - labels) ** 2).sum() / total),
        "log_loss": float(log_loss),
        "expected_calibration_error": float(np.abs(excess).sum() / total),
    }


CURVES = ("by_relation", "for_questions")
"""Attributes of :class:`Calibration` that have curves by relation and side."""


@dataclass(frozen=True)
class Calibration:
    """Probabilities of a run's scores.

    Attributes
    ----------
    method : str
        A key of :data:`dglkge.evaluation.calibration.METHODS`.
    curve : Platt or Isotonic
        Returns the probability of a score.
    positive_rate : float
        Share of true triples that was assumed.
    corruptions : int
        False triples drawn for each side of a true one.
    seed : int
        Of these draws.
    num_true, num_false : int
        Scores that it was fitted on.
    run_id, version
        The checkpoint whose scores these are.
    prior_scores : int, optional
        Scores that the common curve counts as in a curve of :attr:`by_relation`, see :func:`fit_by_relation`.
    by_relation : mapping
        Curves of relations, by id and side; of all others :attr:`curve` counts.
    for_questions : mapping
        The same for links of questions of several hops, see :mod:`dglkge.inference.links.adapter`.
    """

    method: str
    curve: Curve
    positive_rate: float
    corruptions: int
    seed: int
    num_true: int
    num_false: int
    run_id: str
    version: int
    prior_scores: int | None = None
    by_relation: Mapping[tuple[int, Side], Platt] = field(default_factory=dict)
    for_questions: Mapping[tuple[int, Side], Platt] = field(default_factory=dict)

    def adapted(self) -> Calibration:
        """Return the probabilities of links of questions."""
        return replace(self, by_relation={**self.by_relation, **self.for_questions})

    def curve_of(self, relation_id: int, side: Side) -> Curve:
        """Return the curve of the answers to a relation's queries of one side."""
        return self.by_relation.get((relation_id, side), self.curve)

    def probabilities(self, scores: np.ndarray, relation_ids: np.ndarray, side: Side) -> np.ndarray:
        """Return the probability (n,) of each score as an answer of one side, float64."""
        probabilities = self.curve(scores)
        for id_, places in places_by_id(relation_ids).items():
            if (id_, side) in self.by_relation:
                probabilities[places] = self.by_relation[id_, side](scores[places])
        return probabilities

    def triple_probabilities(self, scores: Mapping[Side, np.ndarray], triples: np.ndarray) -> np.ndarray:
        """Return the probability of each triple (n, 3): the mean of those of its score (n,) on each side."""
        # Curves are fitted on the scores of single queries, so each side has a probability of its own.
        head, tail = (self.probabilities(scores[side], triples[:, 1], side) for side in Side)
        return (head + tail) / 2

    def to_dict(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        curve = {name: np.asarray(numbers).tolist() for name, numbers in vars(self.curve).items()}
        rows = {name: _as_rows(getattr(self, name)) for name in CURVES}
        return {**vars(self), "curve": curve, **rows}

    @classmethod
    def load(cls, path: Path) -> Calibration:
        """Read a file with the JSON of :meth:`to_dict`."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            fields = {name: content[name] for name in cls.__dataclass_fields__}
            curve: dict[str, Any] = {
                name: np.array(numbers, np.float64)[()] for name, numbers in fields["curve"].items()
            }
            fields |= {name: _from_rows(fields[name]) for name in CURVES}
            return cls(**{**fields, "curve": METHODS[fields["method"]](**curve)})
        except FileNotFoundError:
            raise InputError(
                f"{path} does not exist: fit probabilities first, with dglkge calibrate {path.parent}"
            ) from None
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(
                f"{path} is damaged ({error!r}); fit probabilities again, with dglkge calibrate"
            ) from None


def _as_rows(curves: Mapping[tuple[int, Side], Platt]) -> list[list[Any]]:
    """Return relation id, side, slope and offset of each curve."""
    return [[id_, side.value, curve.slope, curve.offset] for (id_, side), curve in curves.items()]


def _from_rows(rows: list[list[Any]]) -> dict[tuple[int, Side], Platt]:
    return {(id_, Side(side)): Platt(slope, offset) for id_, side, slope, offset in rows}
