"""True and false triples of a trained model: classification, and calibrated probabilities."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dglkge.data.dataset_files import TRAIN, VALID
from dglkge.data.known_triples import KnownTriples
from dglkge.errors import InputError
from dglkge.evaluation import calibration as curves
from dglkge.evaluation import classification
from dglkge.evaluation.calibration import METHODS, Calibration, Platt, balanced_weights
from dglkge.evaluation.classification import ClassificationResult, draw_corruptions
from dglkge.inference.links.adapter import fit_adapter
from dglkge.inference.run import Run
from dglkge.inference.trained_model import Arrays
from dglkge.typing import Side


def classify(
    run: Run, triples: np.ndarray, known: KnownTriples, seed: int = 0, false_triples: Arrays | None = None
) -> ClassificationResult:
    """Classify true and false triples, with thresholds fitted on the valid split (Socher et al. 2013).

    A triple's score is the mean of its scores from both sides; they differ only with reciprocal relations.

    Parameters
    ----------
    triples : (n, 3) int64 array
        True triples.
    known : KnownTriples
        All known triples: no false one is drawn from them.
    seed : int
        Seed of the drawn false triples.
    false_triples : two (m, 3) int64 arrays, optional
        False triples for the valid split and for ``triples``. By default one is drawn for each true triple: a
        random side, replaced by an entity that the training split has on that side of the relation.
    """
    dataset = run.dataset
    true = {"valid": dataset.split(VALID), "tested": triples}
    pools = classification.seen_entities(dataset.split(TRAIN)) if false_triples is None else {}
    scored = {}
    false = dict(zip(true, false_triples or ()))
    for name, true_triples in true.items():
        if false_triples is None:
            with_tail = classification.draw_sides(len(true_triples), (seed, name))
            sides = ((Side.HEAD, true_triples[~with_tail]), (Side.TAIL, true_triples[with_tail]))
            drawn = [draw_corruptions(part, s, 1, dataset, known, (seed, name), pools) for s, part in sides]
            false[name] = np.concatenate(drawn)
        both, labels = _together(true_triples, false[name])
        by_side = run.scores(both)
        scored[name] = both[:, 1], (by_side[Side.HEAD] + by_side[Side.TAIL]) / 2, labels
    thresholds = classification.fit_thresholds(*scored["valid"])
    relation_ids, scores, labels = scored["tested"]
    negatives = "given" if false_triples else f"drawn, seed {seed}"
    margins, names = thresholds.margins(relation_ids, scores), run.tables.relations.labels.names
    return ClassificationResult(thresholds, names, relation_ids, margins, labels, negatives)


def calibrate(
    run: Run,
    known: KnownTriples,
    method: str = "isotonic",
    positive_rate: float = 0.5,
    corruptions: int = curves.CORRUPTIONS_EACH,
    seed: int = 0,
    by_relation: bool = False,
    num_questions: int = 0,
) -> Calibration:
    """Fit probabilities of scores on the valid split and corruptions of it (Tabacof and Costabello 2020).

    Each side of a triple is one true score, as an answer to that query, and so are its corruptions: these are
    the scores that predictions have.

    Parameters
    ----------
    known : KnownTriples
        All known triples: no corruption is one.
    method : str
        ``"isotonic"`` or ``"platt"``.
    positive_rate : float
        Share of true triples among those that will be judged.
    corruptions : int
        Drawn for each side of a triple, uniformly among the entities of the type.
    by_relation : bool
        Fit a curve for each relation and side, too (:func:`dglkge.evaluation.calibration.fit_by_relation`).
        The share of true triples is the same in each.
    num_questions : int
        Questions of several hops that curves for their links are fitted on; 0 for none.
    """
    if corruptions < 1:
        raise InputError(f"the number of corruptions must be at least 1, got {corruptions}")
    if not 0 < positive_rate < 1:
        raise InputError(f"the share of true triples must be between 0 and 1, got {positive_rate}")
    valid = run.dataset.split(VALID)
    scores, labels, queries = labelled_scores(run, valid, known, corruptions, (seed, "valid"))
    even = balanced_weights(labels, 0.5)
    prior_scores, by_id, adapted = None, dict[tuple[int, Side], Platt](), {}
    if num_questions:
        sigmoid = Platt.fit(scores, labels, even).at_rate(positive_rate)
        adapted = fit_adapter(run, sigmoid, num_questions, seed)
    if by_relation:
        common = METHODS[method].fit(scores, labels, even)
        prior_scores, by_id = curves.fit_by_relation(scores, labels, queries, common)
    return Calibration(
        method=method,
        curve=METHODS[method].fit(scores, labels, balanced_weights(labels, positive_rate)),
        positive_rate=positive_rate,
        corruptions=corruptions,
        seed=seed,
        num_true=int(labels.sum()),
        num_false=int((~labels).sum()),
        run_id=run.checkpoint.manifest.run_id,
        version=run.checkpoint.version,
        prior_scores=prior_scores,
        by_relation={key: curve.at_rate(positive_rate) for key, curve in by_id.items()},
        for_questions=adapted,
    )


def calibration_quality(
    run: Run, calibration: Calibration, triples: np.ndarray, known: KnownTriples
) -> dict[str, float]:
    """Return Brier score, log loss and calibration error on triples and corruptions of them.

    The corruptions are drawn, and the kinds weighted, as for the fit.
    """
    stream = (calibration.seed, "tested")
    scores, labels, queries = labelled_scores(run, triples, known, calibration.corruptions, stream)
    probabilities = np.empty(len(scores))
    for place, side in enumerate(Side):
        is_side = queries[:, 2] == place
        probabilities[is_side] = calibration.probabilities(scores[is_side], queries[is_side, 1], side)
    weights = balanced_weights(labels, calibration.positive_rate)
    return curves.calibration_metrics(probabilities, labels, weights)


def labelled_scores(
    run: Run, triples: np.ndarray, known: KnownTriples, num_each: int, stream: Sequence[int | str]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Score both sides of true triples and of corruptions of that side.

    Returns
    -------
    scores : (m,) float64 array
    labels : (m,) bool array
        Which scores are those of true triples.
    queries : (m, 3) int64 array
        Entity given, relation and side (its place in ``Side``) of each query.
    """
    parts = []
    for place, side in enumerate(Side):
        false = draw_corruptions(triples, side, num_each, run.dataset, known, stream)
        both, are_true = _together(triples, false)
        queries = np.column_stack([both[:, [side.anchor_column, 1]], np.full(len(both), place)])
        parts.append((run.scores(both)[side], are_true, queries))
    scores, labels, queries = map(np.concatenate, zip(*parts))
    return scores, labels, queries


def _together(true: np.ndarray, false: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return true and false triples in one array, and which are true."""
    return np.concatenate([true, false]), np.arange(len(true) + len(false)) < len(true)
