"""The whole path with the real commands: partition, launch, train, evaluate, resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.functional import job as commands
from tests.functional.results import assert_near, losses, metrics, progress, records, tables
from tests.toy_kg import toy_dataset

SETTINGS = (
    *("model.dimension=16", "negatives.num_uniform=20", "negatives.chunk_size=16", "training.batch_size=48"),
    *("training.num_epochs=4", "regularizer.name=n3", "regularizer.weight=0.001"),
)


def settings(dataset: Path, output: Path, *more: str) -> tuple[str, ...]:
    return (f"dataset={dataset}", f"output={output}", *SETTINGS, *more)


def test_one_server_or_two_train_evaluate_and_commit(tmp_path: Path) -> None:
    """Two trainers or three have the same tables, and the files rank as the live tables did."""
    run, other = tmp_path / "run", tmp_path / "other"
    commands.train(tmp_path, 2, *settings(toy_dataset(), run))
    commands.train(tmp_path, 3, *settings(toy_dataset(), other, "evaluation.split=none"), num_servers=2)
    assert_near(tables(other), tables(run), 2e-3, 2e-5)
    assert {path.name for path in run.iterdir()} >= {"config.json", "stats.jsonl", "checkpoint"}
    assert losses(run)[-1] < losses(run)[0]
    assert progress(run) == (4, 0)
    live = metrics(run)
    from_files = json.loads(commands.dglkge("evaluate", str(run), "--json").stdout)
    assert 0 < live["both"]["mrr"] <= 1
    for side in ("both", "head", "tail"):
        expected = {name: live[side][name] for name in from_files[side]}
        assert from_files[side] == pytest.approx(expected, abs=1e-6)
    assert live["both"].keys() - from_files["both"].keys() == {"loss"}


def test_trainers_that_do_not_wait_for_one_another_learn_and_resume(tmp_path: Path) -> None:
    more = ("training.synchronous=false", "checkpoint.every_batches=3", "evaluation.split=none")
    words = settings(toy_dataset(), tmp_path / "run", *more)
    commands.train(tmp_path, 2, *words)
    reported = losses(tmp_path / "run")
    assert reported[-1] < reported[0]
    done = commands.train_alone(*words, "training.num_epochs=6")
    assert "resumed: 4 epochs and 0 batches done" in done.stderr
    counts = [record["stats"]["count"] for record in records(tmp_path / "run")]
    assert len(counts) == 6 and len(set(counts)) == 1  # every triple in every epoch, whoever trained it


def test_a_mistake_under_the_launcher_ends_every_process(tmp_path: Path) -> None:
    words = settings(toy_dataset(), tmp_path / "run", "loss.name=softmx")
    done = commands.train(tmp_path, 2, *words, status=2)
    assert "unknown loss 'softmx'; did you mean 'softmax'?" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_typed_entities_are_learnt_ranked_predicted_exported_and_resumed(tmp_path: Path) -> None:
    """With a query that holds matrices, and relations of one direction."""
    run, more = tmp_path / "run", ("model.score_function=transr_l1", "model.reciprocal_relations=false")
    words = settings(toy_dataset(typed=True), run, *more, "model.dimension=24", "regularizer={name: none}")
    commands.train(tmp_path, 2, *words, "training.num_epochs=30", "evaluation.split=train")
    # Rows that nothing was trained on rank the training triples with .13 to .18.
    live = metrics(run, "train")["both"]["mrr"]
    assert live > 0.6
    done = commands.dglkge("evaluate", str(run), "--split", "train", "--json")
    assert json.loads(done.stdout)["both"]["mrr"] == pytest.approx(live, abs=1e-6)
    query = ("--head", "town4", "--relation", "lies_in", "--topk", "2", "--known", "mark", "--json")
    done = commands.dglkge("predict", str(run), *query)
    assert "country1" in done.stdout and "person" not in done.stdout
    assert len(json.loads(done.stdout)["answers"]) == 2
    commands.dglkge("export", str(run), "--format", "tsv", "--output", str(tmp_path / "tsv"))
    assert any((tmp_path / "tsv").iterdir())
    assert "transr_l1" in commands.dglkge("inspect", str(run)).stdout
    # One process goes on from the files of two.
    done = commands.train_alone(*words, "training.num_epochs=31", "evaluation.split=none")
    assert "resumed: 30 epochs and 0 batches done" in done.stderr
