"""``dglkge evaluate --classify``, ``dglkge calibrate`` and ``dglkge predict --probability``."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest

from dglkge.checkpoint import layout
from dglkge.checkpoint.layout import RUN_CALIBRATION_FILE
from dglkge.evaluation.calibration import METHODS, PRIOR_SCORES, Calibration, balanced_weights
from dglkge.evaluation.classification import ClassificationMetrics, fit_thresholds
from dglkge.inference.run import open_run
from dglkge.inference.truth import calibrate, labelled_scores
from dglkge.typing import RELATION, Side
from tests.cli.test_evaluate import write_triples


def plain_scores(run, triples):
    """Score triples one at a time: the mean of both sides in float64."""
    opened = open_run(run)
    relations, tables, model = opened.tables.meta.relations, opened.tables, opened.model
    scores = []
    for head, relation_id, tail in triples.tolist():
        relation = relations[relation_id]
        rows = tables[relation.lhs][[head]].double(), tables[relation.rhs][[tail]].double()
        row = tables[RELATION][[relation_id]].double()
        scores.append(np.mean([float(model.score(rows[0], row, rows[1], side)) for side in Side]))
    return np.array(scores)


def test_given_negatives(shown, report, run, dataset, tmp_path):
    """Thresholds and figures from scores computed one at a time."""
    random = np.random.default_rng(0)
    false = {}
    for split in ("valid", "test"):
        triples = dataset.split(split).copy()
        triples[:, 2] = [
            random.integers(dataset.num_entities(dataset.relations[r].rhs)) for r in triples[:, 1].tolist()
        ]
        false[split] = triples
        write_triples(dataset, triples, tmp_path / f"{split}.tsv")
    files = tmp_path / "valid.tsv", tmp_path / "test.tsv"
    words = ["evaluate", run, "--classify", "--negatives", *files]
    classification = report(*words)["classification"]
    sides = {}
    for split in ("valid", "test"):
        both = np.concatenate([dataset.split(split), false[split]])
        sides[split] = both[:, 1], plain_scores(run, both), np.arange(len(both)) < len(dataset.split(split))
    thresholds = fit_thresholds(*sides["valid"])
    relation_ids, scores, labels = sides["test"]
    expected = vars(ClassificationMetrics.of(thresholds.margins(relation_ids, scores), labels))
    assert {name: classification[name] for name in expected} == pytest.approx(expected)
    assert classification["negatives"] == "given" and classification["num_false"] == len(false["test"])
    out = shown(*words, "--by", "relation")
    assert "classification: one for each relation, fitted on the valid split; negatives given" in out
    assert f"{expected['accuracy']:.4f}  {expected['f1']:.4f}" in out


def test_drawn_negatives_are_repeatable_and_not_known(shown, report, run):
    words = ["evaluate", run, "--classify"]
    drawn = [report(*words, "--seed", seed, "--limit", "9")["classification"] for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] and drawn[2]["negatives"] == "drawn, seed 1"
    assert 0 < drawn[0]["num_false"] <= drawn[0]["num_true"] == 9
    out = shown(*words)
    assert "negatives drawn, seed 0" in out and "\nall  " in out


@pytest.mark.parametrize("method", sorted(METHODS))
def test_probabilities_of_predictions(shown, report, refusal, run, dataset, method):
    predict = ["predict", run, "--head", "person1", "--relation", "knows"]
    line = refusal(*predict, "--probability")
    assert f"{run}/calibration.json does not exist: fit probabilities first" in line
    words = ["calibrate", run, "--method", method, "--corruptions", "3", "--positive-rate", "0.25"]
    out = shown(*words)
    assert f"calibration: {method}, 25 % true triples assumed, fitted on 28 true and " in out
    quality = report(*words)
    assert quality["path"] == str(run / RUN_CALIBRATION_FILE) and quality["num_true"] == 28
    assert 0 <= quality["brier_score"] <= 1 and quality["log_loss"] > 0
    opened = open_run(run)
    scores, labels, _ = labelled_scores(
        opened, dataset.split("valid"), opened.known_triples(), 3, (0, "valid")
    )
    curve = METHODS[method].fit(scores, labels, balanced_weights(labels, 0.25))
    answers = report(*predict, "--probability")["answers"]
    assert len(answers) == 10
    for answer in answers:
        assert answer["probability"] == pytest.approx(float(curve(answer["score"])), abs=1e-6)
    lines = shown(*predict, "--probability").splitlines()
    assert lines[1].split() == ["rank", "score", "probability", "tail"]
    assert lines[2].split()[2] == f"{answers[0]['probability']:.4f}"
    assert report(*predict)["answers"] == answers  # shown since it was fitted


def test_true_scores_are_those_of_each_side(run, dataset):
    """Reciprocal relations have a score for each side; each is fitted as predictions have it."""
    opened = open_run(run)
    triples = dataset.split("valid")[:4]
    scores, labels, _ = labelled_scores(opened, triples, opened.known_triples(), 2, (0, "valid"))
    expected = []
    for side in Side:
        for head, relation_id, tail in triples.tolist():
            relation = dataset.relations[relation_id]
            rows = opened.tables[relation.lhs][[head]], opened.tables[relation.rhs][[tail]]
            row = opened.tables[RELATION][[relation_id]]
            expected.append(float(opened.model.score(rows[0].double(), row.double(), rows[1].double(), side)))
    assert scores[labels].tolist() == pytest.approx(expected)


def test_probabilities_by_relation(report, shown, run):
    """Each side of a relation has a curve of its own, in every command that shows probabilities."""
    words = ["calibrate", run, "--by-relation", "--positive-rate", "0.2"]
    assert report(*words)["prior_scores"] in PRIOR_SCORES
    assert "curves of a relation and a side" in shown(*words)
    opened = open_run(run)
    fitted, id_ = opened.calibration, opened.tables.relations.labels.id("knows")
    queries = pd.DataFrame({"head": ["person1", None], "relation": "knows", "tail": [None, "person1"]})
    answers = opened.predict(queries, k=3)
    for side in Side:
        side_answers = answers[answers["missing"] == side.value]
        curve = fitted.by_relation[id_, side]
        assert side_answers["probability"].tolist() == pytest.approx(
            curve(side_answers["score"].to_numpy()).tolist()
        )
    (whole,) = opened.score(answers.head(1)).to_dict("records")
    names = opened.tables.vocabulary("person")
    scores = opened.scores(np.array([[names.id("person1"), id_, names.id(whole["tail"])]]))
    by_side = [float(fitted.by_relation[id_, side](scores[side])[0]) for side in Side]
    assert whole["probability"] == pytest.approx(np.mean(by_side))
    (best, *_) = opened.predict_relations("person1", whole["tail"])["probability"]
    assert 0 <= best <= 1
    assert opened.predict(queries.assign(relation="knew"))["probability"].isna().all()


def test_probabilities_of_another_version_are_refused(shown, refusal, run):
    opened = open_run(run)
    fitted = calibrate(opened, opened.known_triples(), "platt")
    path = run / layout.RUN_CALIBRATION_FILE
    words = ["predict", run, "--head", "person1", "--relation", "knows", "--probability"]
    path.write_text(json.dumps({**fitted.to_dict(), "version": 7}))
    assert "is of version 7 of its run, the checkpoint has version 1: fit" in refusal(*words)
    path.write_text(json.dumps(fitted.to_dict())[:-9])
    assert f"{path} is damaged" in refusal(*words)
    path.write_text(json.dumps(fitted.to_dict()))
    assert Calibration.load(path) == fitted and shown(*words)


def test_a_bad_line_of_negatives_is_found_before_the_ranking(refusal, run, tmp_path):
    good, bad = tmp_path / "good.tsv", tmp_path / "bad.tsv"
    good.write_text("person1\tknows\tperson2\n")
    bad.write_text("person1\tknows\tperson2\n\nperson1\tknow\tperson2\n")
    line = refusal("evaluate", run, "--classify", "--negatives", good, bad)
    assert f"{bad}:3: unknown relation 'know'" in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--negatives a b", "--negatives goes with --classify"),
        ("--classify --negatives /no/a /no/b", "/no/a: there is no such file"),
        ("--classify --split valid", "--classify fits on the valid split, so it cannot be judged by it"),
    ],
)
def test_mistakes(refusal, run, arguments, words):
    assert words in refusal("evaluate", run, *arguments.split())
    assert not list(run.glob("metrics*"))


def test_calibrations_that_cannot_be(refusal, run):
    assert "--corruptions must be at least 1, got 0" in refusal("calibrate", run, "--corruptions=0")
    for rate in ("0.0", "1.0", "nan"):
        line = refusal("calibrate", run, f"--positive-rate={rate}")
        assert line == f"the share of true triples must be between 0 and 1, got {rate}"
    assert not (run / RUN_CALIBRATION_FILE).exists()
