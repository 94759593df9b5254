"""``dglkge evaluate``: protocols, files of triples and of candidates, tables, and files of metrics."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import dglkge
from dglkge.checkpoint import open_checkpoint
from dglkge.data.dataset import Dataset
from dglkge.data.known_triples import KnownTriples
from dglkge.errors import InputError
from dglkge.evaluation.evaluator import RankingEvaluator
from dglkge.evaluation.metrics import Protocol, relation_categories
from dglkge.model.kge_model import build_model
from tests.checkpoint.toy_checkpoint import save_toy_run


def write_triples(dataset, triples, path):
    lines = []
    for head, relation_id, tail in triples.tolist():
        relation = dataset.relations[relation_id]
        names = dataset.vocabulary(relation.lhs)[head], dataset.vocabulary(relation.rhs)[tail]
        lines.append(f"{names[0]}\t{relation.name}\t{names[1]}\n")
    path.write_text("".join(lines), encoding="utf-8")
    return path


def test_a_split(shown, run, dataset):
    out = shown("evaluate", run, "--split", "valid", "--per-relation", "--batch-size", "5")
    assert out.startswith("valid split, filtered, all candidates, realistic ties")
    assert "near (town → town)" in out
    written = json.loads((run / "metrics-valid.json").read_text())
    checkpoint = open_checkpoint(run)
    protocol = Protocol(split="valid")
    evaluator = RankingEvaluator(build_model("complex", 6, True), dataset.relations.relations, protocol)
    known = KnownTriples([dataset.split(split) for split in ("train", "valid", "test")], 5)
    shards = {name: checkpoint.shards(name) for name in dataset.entity_types}
    expected = evaluator.evaluate(dataset.split("valid"), known, checkpoint, shards).to_dict()
    assert {name: written[name] for name in expected} == json.loads(json.dumps(expected))
    assert written["num_triples"] == 14 and written["version"] == 1 and written["dataset"] == dataset.name


def test_buckets(shown, run, dataset):
    """Each with the ranks of its own triples, and all together those without buckets."""
    whole = dglkge.open_run(run).evaluate("test")
    out = shown("evaluate", run, "--buckets", "2")
    written = json.loads((run / "metrics-test.json").read_text())
    assert written["both"] == whole.both.to_dict() and "lhs_partition" in out
    expected = {}
    for place, (head, relation_id, tail) in enumerate(dataset.split("test").tolist()):
        types = dataset.relations[relation_id].lhs, dataset.relations[relation_id].rhs
        halves = tuple(int(id_ >= dataset.num_entities(name) // 2) for id_, name in zip((head, tail), types))
        expected.setdefault(halves, []).extend(ranks[place] for ranks in whole.ranks.values())
    assert len(written["buckets"]) == len(expected) > 1
    for bucket in written["buckets"]:
        ranks = np.array(expected[bucket["lhs_partition"], bucket["rhs_partition"]])
        assert bucket["mrr"] == pytest.approx((1 / ranks).mean()) and bucket["num_queries"] == len(ranks)


def test_another_protocol(report, run, tmp_path):
    target = tmp_path / "mine.json"
    options = ["--raw", "--candidates", "4", "--ties", "pessimistic", "--limit", "3", "--output", target]
    result = report("evaluate", run, *options)
    assert result == json.loads(target.read_text()) and result["num_triples"] == 3
    protocol = {"split": "test", "filtering": "raw", "candidates": "sampled 4", "ties": "pessimistic"}
    assert result["protocol"] == {**protocol, "seed": 0} and not (run / "metrics-test.json").exists()


def test_by_category_and_side(shown, run, dataset):
    out = shown("evaluate", run, "--split", "valid", "--by", "category", "--by", "side")
    categories = relation_categories(dataset.split("train"), dataset.num_relations)
    used = {categories.names[id_] for id_ in np.unique(dataset.split("valid")[:, 1])}
    written = json.loads((run / "metrics-valid.json").read_text())
    assert set(written["per_category"]) == used and len(used) > 1
    for name in used:
        assert f"\n  {name}, head  " in out and f"\n{name}  " in out
    assert "\nboth, pessimistic ties  " in out
    assert written["ties"]["realistic"]["both"] == written["both"]
    labels = list(dglkge.open_run(run).tables.relations.labels.names)
    assert written["relation_categories"] == categories.to_dict(labels)


def test_a_file_of_a_split_has_the_metrics_of_the_split(shown, report, run, dataset, tmp_path):
    path = write_triples(dataset, dataset.split("valid"), tmp_path / "mine.tsv")
    out = shown("evaluate", run, "--triples", path)
    assert out.startswith(f"triples of {path}, filtered, all candidates, realistic ties")
    assert f"written to {run}/metrics-triples-mine.json" in out
    written = json.loads((run / "metrics-triples-mine.json").read_text())
    expected = report("evaluate", run, "--split", "valid")
    splits = [metrics.pop("protocol")["split"] for metrics in (written, expected)]
    assert splits == [str(path), "valid"] and written == expected


def test_triples_of_a_file_are_known(report, run, tmp_path):
    """Answers that only the file has are left out of the candidates of its other queries."""
    path = tmp_path / "mine.tsv"
    path.write_text("".join(f"town{j}\tlies_in\tcountry{i}\n" for j in range(10) for i in range(3)))
    result = report("evaluate", run, "--triples", path, "--limit", "3")
    assert result["num_triples"] == 3
    assert result["tail"]["mr"] == 1.0 and result["tail"]["num_queries"] == 3


@pytest.fixture
def with_candidates(tmp_path, dataset):
    """A run on a copy of the data set with two candidates for each test triple: the true one and another."""
    shutil.copytree(dataset.path, tmp_path / "data")
    test = dataset.split("test")
    # Country has three entities, the fewest of a type.
    candidates = np.stack([np.stack([test[:, side], (test[:, side] + 1) % 3], axis=1) for side in (0, 2)])
    np.save(tmp_path / "data" / "candidates_test.npy", candidates.astype(np.int32))
    return save_toy_run(tmp_path / "run", Dataset.open(tmp_path / "data"))


def test_candidates_that_came_with_the_data_set(report, with_candidates, dataset):
    words = ["evaluate", with_candidates, "--candidates", "given"]
    printed = report(*words)
    assert printed["protocol"]["candidates"] == "given" and printed["protocol"]["filtering"] == "raw"
    assert (with_candidates / "metrics-test-given.json").is_file()
    opened, protocol = dglkge.open_run(with_candidates), Protocol(filtered=False, given=True)
    result = opened.evaluate(protocol)
    assert result.both.mrr == printed["both"]["mrr"]
    # Each is ranked against one other; where that is itself, against none.
    for side, negatives in result.num_negatives.items():
        test = dataset.split("test")[:, side.column]
        assert negatives.tolist() == [int(true != (true + 1) % 3) for true in test]
    assert report(*words, "--limit", "3")["num_triples"] == 3
    with pytest.raises(InputError, match="given candidates belong to the triples of a split, in their order"):
        opened.evaluate(protocol, dataset.split("test")[::-1])


def test_data_sets_without_candidates(refusal, with_candidates, run):
    words = "came without candidates, which OGB's have"
    assert words in refusal("evaluate", run, "--candidates", "given")
    line = refusal("evaluate", with_candidates, "--candidates", "given", "--split", "valid")
    assert "the valid triples of " in line and "came without candidates" in line


def test_ranks_on_a_device_are_those_of_the_cpu(report, refusal, run):
    for candidates in ("all", "5"):
        words = ["evaluate", run, "--candidates", candidates, "--device"]
        assert report(*words, "cpu") == report(*words, "cpu_staged")
    if not torch.cuda.is_available():
        line = refusal("evaluate", run, "--device", "cuda")
        assert line.startswith("--device is cuda and torch ")
        assert line.endswith("; allowed here: cpu, auto or cpu_staged")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--candidates many", "--candidates must be all or a number of at least 1, got 'many'"),
        ("--candidates 0", "--candidates must be all or a number of at least 1, got '0'"),
        ("--limit 0", "--limit must be at least 1, got 0"),
        ("--dataset /nowhere", "/nowhere is no dataset folder: there is no such folder"),
        ("--triples BAD", "bad.tsv:2: unknown entity 'person99'; did you mean"),
        ("--triples /nowhere.tsv", "/nowhere.tsv: there is no such file"),
        ("--triples BAD --split valid", "give either --split or --triples, not both"),
        ("--columns htr", "--columns goes with --triples"),
        ("--delimiter tab", "--delimiter goes with --triples"),
        ("--triples BAD --columns hht", "does not give head, relation and tail once each"),
    ],
)
def test_mistakes(refusal, run, tmp_path, arguments, words):
    bad = tmp_path / "bad.tsv"
    bad.write_text("person1\tknows\tperson2\nperson1\tknows\tperson99\n")
    assert words in refusal("evaluate", run, *[bad if word == "BAD" else word for word in arguments.split()])
    assert not list(run.glob("metrics*"))


def test_another_data_set_is_refused(refusal, run, dataset, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    for path in dataset.path.iterdir():
        (other / path.name).symlink_to(path)
    (other / "dataset.json").unlink()
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

    def full(path, *arguments, **options):
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
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


def test_rules_beside_the_model(report, refusal, run):
    both = dglkge.open_run(run).with_rules()
    assert report("evaluate", run, "--rules")["both"] == both.evaluate("test").both.to_dict()
    assert report("evaluate", run, "--rules", "--buckets", "2")["both"]["mrr"] == pytest.approx(
        both.evaluate("test").both.mrr
    )
    words = ["predict", run, "--head", "person1", "--relation", "knows", "--rules"]
    frame = both.predict_tails("person1", "knows")
    assert [answer["name"] for answer in report(*words)["answers"]] == frame["entity"].tolist()
    assert [answer["score"] for answer in report(*words)["answers"]] == frame["score"].tolist()
    assert "probabilities are fitted to scores of the model alone" in refusal(*words, "--probability")


@pytest.mark.parametrize("content", ["{", "[1]"])
def test_a_damaged_metrics_file_is_named(run, content):
    (run / "metrics-test.json").write_text(content)
    with pytest.raises(InputError, match="metrics-test.json (is cut off|holds list)"):
        assert dglkge.open_run(run).results
