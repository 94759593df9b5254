"""Probabilities of scores: Platt's scaling and isotonic regression, weighted, in float64; and their file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dglkge.errors import InputError

MAX_NEWTON_STEPS = 100
SMALLEST_STEP = 1e-10
RIDGE = 1e-12
"""Of Lin, Lin and Weng 2007, algorithm 1: limit of iterations, shortest step, and addition to the Hessian's
diagonal."""

CORRUPTIONS_EACH = 10
"""Default number of false triples drawn for each side of a true one to fit probabilities."""

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
        # With mean 0 and deviation 1 the two parameters hardly depend on each other.
        center, scale = scores.mean(), scores.std() or 1.0
        x = (scores - center) / scale
        parameters = np.array([0.0, np.log((num_true + 1) / (num_false + 1))])
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
        place = place.reshape(-1)
        total = np.bincount(place, weights=weights)
        mean = np.bincount(place, weights=weights * labels) / total
        values: list[float] = []
        block_weights: list[float] = []
        starts: list[int] = []
        for start, (value, weight) in enumerate(zip(mean.tolist(), total.tolist())):
            # A block that is not above its left neighbour is pooled with it, and again with the next.
            while values and values[-1] >= value:
                left, left_weight = values.pop(), block_weights.pop()
                start = starts.pop()
                value = (left * left_weight + value * weight) / (left_weight + weight)
                weight += left_weight
            values.append(value)
            block_weights.append(weight)
            starts.append(start)
        ends = [*(start - 1 for start in starts[1:]), len(distinct) - 1]
        # The two ends of each block; one corner where they are the same.
        corners = np.unique(np.stack([starts, ends], axis=1).reshape(-1))
        block = np.searchsorted(starts, corners, side="right") - 1
        return cls(distinct[corners], np.array(values)[block])


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
    of_true = positive_rate * len(labels) / num_true
    of_false = (1 - positive_rate) * len(labels) / (len(labels) - num_true)
    return np.where(labels, of_true, of_false)


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

    def to_dict(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        curve = {name: np.asarray(numbers).tolist() for name, numbers in vars(self.curve).items()}
        return {**vars(self), "curve": curve}

    @classmethod
    def load(cls, path: Path) -> Calibration:
        """Read a file with the JSON of :meth:`to_dict`."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            fields = {name: content[name] for name in cls.__dataclass_fields__}
            curve: dict[str, Any] = {
                name: np.array(numbers, np.float64)[()] for name, numbers in fields["curve"].items()
            }
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
