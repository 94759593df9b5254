"""``dglkge evaluate`` and ``calibrate``: protocols, files, classification, probabilities."""

from __future__ import annotations

import errno
import json
import os
import shutil

import numpy as np
import pandas as pd
import pytest

import dglkge
from dglkge.checkpoint.layout import RUN_CALIBRATION_FILE
from dglkge.checkpoint.reader import open_checkpoint
from dglkge.data.dataset import Dataset
from dglkge.data.known_triples import KnownTriples
from dglkge.errors import InputError
from dglkge.evaluation.calibration import METHODS, PRIOR_SCORES, Calibration, balanced_weights
from dglkge.evaluation.classification import ClassificationMetrics, fit_thresholds
from dglkge.evaluation.evaluator import RankingEvaluator
from dglkge.evaluation.metrics import Protocol, relation_categories
from dglkge.inference.run import open_run
from dglkge.inference.truth import calibrate, labelled_scores
from dglkge.model.kge_model import build_model
from dglkge.typing import Side
from tests.checkpoint.toy_checkpoint import save_toy_run
from tests.inference.link_scores import all_scores, names_of


def write_triples(dataset, triples, path):
    lines = ["\t".join(names_of(dataset, triple)) + "\n" for triple in triples]
    path.write_text("".join(lines), encoding="utf-8")
    return path


def test_a_split_by_relation_category_and_side(shown, run, dataset):
    words = ["--split", "valid", "--batch-size", "5", "--per-relation", "--by", "category", "--by", "side"]
    out = shown("evaluate", run, *words)
    assert out.startswith("valid split, filtered, all candidates, realistic ties")
    assert "near (town → town)" in out
    written = json.loads((run / "metrics-valid.json").read_text())
    checkpoint, relations = open_checkpoint(run), dataset.relations.relations
    evaluator = RankingEvaluator(build_model("complex", 6, True), relations, Protocol(split="valid"))
    known = KnownTriples([dataset.split(split) for split in ("train", "valid", "test")], 5)
    shards = {name: checkpoint.shards(name) for name in dataset.entity_types}
    expected = evaluator.evaluate(dataset.split("valid"), known, checkpoint, shards).to_dict()
    assert {name: written[name] for name in expected} == json.loads(json.dumps(expected))
    assert written["num_triples"] == 14 and written["version"] == 1 and written["dataset"] == dataset.name
    categories = relation_categories(dataset.split("train"), dataset.num_relations)
    used = {categories.names[id_] for id_ in np.unique(dataset.split("valid")[:, 1])}
    assert set(written["per_category"]) == used and len(used) > 1
    for name in used:
        assert f"\n  {name}, head  " in out and f"\n{name}  " in out
    assert "\nboth, pessimistic ties  " in out
    assert written["ties"]["realistic"]["both"] == written["both"]
    labels = list(dataset.relations.labels.names)
    assert written["relation_categories"] == categories.to_dict(labels)


def test_buckets(shown, run):
    opened = dglkge.open_run(run)
    out = shown("evaluate", run, "--buckets", "2")
    written = json.loads((run / "metrics-test.json").read_text())
    assert written["both"] == opened.evaluate("test").both.to_dict() and "lhs_partition" in out
    parts = [part for part in opened.evaluate_buckets("test", num_ranges=2) if part.bucket is not None]
    columns = ("lhs_partition", "rhs_partition", "mrr", "num_queries")
    assert [tuple(bucket[column] for column in columns) for bucket in written["buckets"]] == [
        (*part.bucket, part.result.both.mrr, part.result.both.num_queries) for part in parts
    ]
    assert len(parts) > 1


def test_a_file_of_triples(shown, report, run, dataset, tmp_path):
    """That of a split has the metrics of the split; answers that only a file has are no wrong candidates."""
    path = write_triples(dataset, dataset.split("valid"), tmp_path / "mine.tsv")
    out = shown("evaluate", run, "--triples", path)
    assert out.startswith(f"triples of {path}, filtered, all candidates, realistic ties")
    assert f"written to {run}/metrics-triples-mine.json" in out
    written = json.loads((run / "metrics-triples-mine.json").read_text())
    expected = report("evaluate", run, "--split", "valid")
    splits = [metrics.pop("protocol")["split"] for metrics in (written, expected)]
    assert splits == [str(path), "valid"] and written == expected
    path.write_text("".join(f"town{j}\tlies_in\tcountry{i}\n" for j in range(10) for i in range(3)))
    result = report("evaluate", run, "--triples", path, "--limit", "3")
    assert result["num_triples"] == 3
    assert result["tail"]["mr"] == 1.0 and result["tail"]["num_queries"] == 3


def test_candidates_that_came_with_the_data_set(report, refusal, dataset, tmp_path):
    """Two for each test triple: the true one and another."""
    shutil.copytree(dataset.path, tmp_path / "data")
    test = dataset.split("test")
    # Country has three entities, the fewest of a type.
    candidates = np.stack([np.stack([test[:, side], (test[:, side] + 1) % 3], axis=1) for side in (0, 2)])
    np.save(tmp_path / "data" / "candidates_test.npy", candidates.astype(np.int32))
    run = save_toy_run(tmp_path / "run", Dataset.open(tmp_path / "data"))
    words = ["evaluate", run, "--candidates", "given"]
    printed = report(*words)
    assert printed["protocol"]["candidates"] == "given" and printed["protocol"]["filtering"] == "raw"
    assert (run / "metrics-test-given.json").is_file()
    opened, protocol = dglkge.open_run(run), Protocol(filtered=False, given=True)
    result = opened.evaluate(protocol)
    assert result.both.mrr == printed["both"]["mrr"]
    # Each is ranked against one other; where that is itself, against none.
    for side, negatives in result.num_negatives.items():
        assert negatives.tolist() == [int(true != (true + 1) % 3) for true in test[:, side.column]]
    assert report(*words, "--limit", "3")["num_triples"] == 3
    with pytest.raises(InputError, match="given candidates belong to the triples of a split, in their order"):
        opened.evaluate(protocol, test[::-1])
    line = refusal(*words, "--split", "valid")
    assert "the valid triples of " in line and "came without candidates, which OGB's have" in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("evaluate --candidates many", "--candidates must be all or a number of at least 1, got 'many'"),
        ("evaluate --limit 0", "--limit must be at least 1, got 0"),
        ("evaluate --dataset /nowhere", "/nowhere is no dataset folder: there is no such folder"),
        ("evaluate --triples BAD", "bad.tsv:3: unknown entity 'person99'; did you mean"),
        ("evaluate --triples BAD --split valid", "give either --split or --triples, not both"),
        ("evaluate --columns htr", "--columns goes with --triples"),
        ("evaluate --classify --negatives GOOD BAD", "bad.tsv:3: unknown entity 'person99'"),
        ("evaluate --negatives a b", "--negatives goes with --classify"),
        ("evaluate --classify --split valid", "fits on the valid split, so it cannot be judged by it"),
        ("calibrate --corruptions=0", "--corruptions must be at least 1, got 0"),
        ("calibrate --positive-rate=nan", "the share of true triples must be between 0 and 1, got nan"),
    ],
)
def test_mistakes(refusal, run, tmp_path, arguments, words):
    files = {"GOOD": tmp_path / "good.tsv", "BAD": tmp_path / "bad.tsv"}
    files["GOOD"].write_text("person1\tknows\tperson2\n")
    files["BAD"].write_text("person1\tknows\tperson2\n\nperson1\tknows\tperson99\n")
    command, *options = [files.get(word, word) for word in arguments.split()]
    assert words in refusal(command, run, *options)
    assert not list(run.glob("metrics*")) and not (run / RUN_CALIBRATION_FILE).exists()


def test_another_data_set_is_refused(refusal, run, dataset, tmp_path):
    other = shutil.copytree(dataset.path, tmp_path / "other")
    description = {**dataset.description, "fingerprint": "0123456789abcdef"}
    (other / "dataset.json").write_text(json.dumps(description))
    line = refusal("evaluate", run, "--dataset", other)
    words = f"is not the dataset of this run ({dataset.name}): its fingerprint is 0123456789ab, expected "
    assert words in line


def test_metrics_that_cannot_be_written(call, report, refusal, run, caplog, monkeypatch):
    """In the run's folder they cost a warning; --output is an order, and a full disk an error."""
    (run / "metrics-test.json").mkdir()  # as a read-only disk, also for root: the rename fails
    assert report("evaluate", run)["both"]["num_queries"] > 0 and len(caplog.records) == 1
    line = refusal("evaluate", run, "--output", run / "metrics-test.json")
    assert line.startswith("cannot write")
    assert "No such file or directory" in refusal("evaluate", run, "--output", "/nowhere/metrics.json")

    def full(_file):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    status, out, err = call("evaluate", run, "--json", "--limit", "1")
    assert (status, out) == (1, "")
    assert err == f"dglkge: error: cannot write {run}/metrics-test-first1.json: No space left on device\n"
    assert not list(run.glob("metrics-test-first*"))


def test_results_of_other_protocols_have_files_of_their_own(report, run):
    """None of them replaces another; those of a training job, in the older layout too, stand beside them."""
    old = {"test": {"protocol": {"split": "test"}, "both": {"mrr": 0.5}}}
    (run / "metrics.json").write_text(json.dumps(old))
    files = {
        "metrics-test.json": [],
        "metrics-test-raw.json": ["--raw"],
        "metrics-test-first5.json": ["--limit", "5"],
        "metrics-test-sampled4-seed0.json": ["--candidates", "4"],
        "metrics-test-raw-sampled4-seed3.json": ["--candidates", "4", "--seed", "3", "--raw"],
        "metrics-valid-pessimistic.json": ["--ties", "pessimistic", "--split", "valid"],
        "metrics-test-with-rules.json": ["--rules"],
    }
    reports = {name: report("evaluate", run, *options) for name, options in files.items()}
    assert {path.name for path in run.glob("metrics*")} == {*files, "metrics.json"}
    opened = dglkge.open_run(run)
    assert opened.results == {**reports, "metrics.json: test": old["test"]} and opened.metrics == old
    assert [metrics["num_triples"] for metrics in reports.values()] == [14, 14, 5, 14, 14, 14, 14]
    assert report("evaluate", run, "--device", "cpu_staged") == reports["metrics-test.json"]
    sampled = {"split": "test", "filtering": "raw", "candidates": "sampled 4", "ties": "realistic", "seed": 3}
    assert reports["metrics-test-raw-sampled4-seed3.json"]["protocol"] == sampled
    assert reports["metrics-valid-pessimistic.json"]["protocol"]["ties"] == "pessimistic"
    for content, words in (("{", "is cut off"), ("[1]", "holds list")):
        (run / "metrics-test.json").write_text(content)
        with pytest.raises(InputError, match=f"metrics-test.json {words}"):
            assert dglkge.open_run(run).results


def test_rules_beside_the_model(report, refusal, run):
    both = dglkge.open_run(run).with_rules()
    assert report("evaluate", run, "--rules")["both"] == both.evaluate("test").both.to_dict()
    words = ["predict", run, "--head", "person1", "--relation", "knows", "--rules"]
    frame, answers = both.predict_tails("person1", "knows"), report(*words)["answers"]
    assert [answer["name"] for answer in answers] == frame["entity"].tolist()
    assert [answer["score"] for answer in answers] == frame["score"].tolist()
    assert "probabilities are fitted to scores of the model alone" in refusal(*words, "--probability")


def side_scores(run, triples):
    """Scores of triples on each side, computed one at a time in float64."""
    scores = all_scores(open_run(run))
    return [np.array([scores[r, side][h, t] for h, r, t in triples.tolist()]) for side in Side]


def test_given_negatives(shown, report, run, dataset, tmp_path):
    random = np.random.default_rng(0)
    files, sides = [], []
    for split in ("valid", "test"):
        false = dataset.split(split).copy()
        tail_types = [dataset.relations[relation_id].rhs for relation_id in false[:, 1].tolist()]
        false[:, 2] = [random.integers(dataset.num_entities(type_)) for type_ in tail_types]
        files.append(write_triples(dataset, false, tmp_path / f"{split}.tsv"))
        both = np.concatenate([dataset.split(split), false])
        scores = np.mean(side_scores(run, both), axis=0)
        sides.append((both[:, 1], scores, np.arange(len(both)) < len(false)))
    words = ["evaluate", run, "--classify", "--negatives", *files]
    classification = report(*words)["classification"]
    (relation_ids, scores, labels), thresholds = sides[1], fit_thresholds(*sides[0])
    expected = vars(ClassificationMetrics.of(thresholds.margins(relation_ids, scores), labels))
    assert {name: classification[name] for name in expected} == pytest.approx(expected)
    assert (classification["negatives"], classification["num_false"]) == ("given", len(dataset.split("test")))
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
    opened, valid = open_run(run), dataset.split("valid")
    scores, labels, _ = labelled_scores(opened, valid, opened.known_triples(), 3, (0, "valid"))
    # Reciprocal relations have a score for each side; each is fitted as predictions have it.
    assert scores[labels].tolist() == pytest.approx(np.concatenate(side_scores(run, valid)).tolist())
    curve = METHODS[method].fit(scores, labels, balanced_weights(labels, 0.25))
    answers = report(*predict, "--probability")["answers"]
    assert len(answers) == 10
    for answer in answers:
        assert answer["probability"] == pytest.approx(float(curve(answer["score"])), abs=1e-6)
    lines = shown(*predict, "--probability").splitlines()
    assert lines[1].split() == ["rank", "score", "probability", "tail"]
    assert lines[2].split()[2] == f"{answers[0]['probability']:.4f}"
    assert report(*predict)["answers"] == answers  # shown since it was fitted


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
        expected = fitted.by_relation[id_, side](side_answers["score"].to_numpy())
        assert side_answers["probability"].tolist() == pytest.approx(expected.tolist())
    (whole,) = opened.score(answers.head(1)).to_dict("records")
    related = opened.predict_relations(whole["head"], whole["tail"], k=9).set_index("relation")
    assert related["probability"]["knows"] == pytest.approx(whole["probability"], abs=1e-12)
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
    path = run / RUN_CALIBRATION_FILE
    words = ["predict", run, "--head", "person1", "--relation", "knows", "--probability"]
    path.write_text(json.dumps({**fitted.to_dict(), "version": 7}))
    assert "is of version 7 of its run, the checkpoint has version 1: fit" in refusal(*words)
    path.write_text(json.dumps(fitted.to_dict())[:-9])
    assert f"{path} is damaged" in refusal(*words)
    path.write_text(json.dumps(fitted.to_dict()))
    assert Calibration.load(path) == fitted and shown(*words)
