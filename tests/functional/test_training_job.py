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


@pytest.fixture(scope="module")
def ring() -> Path:
    return toy_dataset()


def settings(dataset: Path, output: Path, *more: str) -> tuple[str, ...]:
    return (f"dataset={dataset}", f"output={output}", *SETTINGS, *more)


def assert_same(left: Path, right: Path) -> None:
    """Hold the tables of two runs equal within the order of float32 sums."""
    assert_near(tables(left), tables(right), 2e-3, 2e-5)


@pytest.fixture(scope="module")
def launched(ring: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of one server and two trainers."""
    folder = tmp_path_factory.mktemp("launched")
    commands.train(folder, 2, *settings(ring, folder / "run"))
    return folder / "run"


def test_a_job_trains_evaluates_and_commits(launched: Path) -> None:
    """And the files rank as the live tables did."""
    names = {path.name for path in launched.iterdir()}
    assert names >= {"config.json", "stats.jsonl", "metrics.json", "checkpoint"}
    assert losses(launched)[-1] < losses(launched)[0]
    assert progress(launched) == (4, 0)
    live = metrics(launched)
    from_files = json.loads(commands.dglkge("evaluate", str(launched), "--json").stdout)
    assert 0 < live["both"]["mrr"] <= 1
    for side in ("both", "head", "tail"):
        # The job has the loss as well.
        side_metrics = {name: live[side][name] for name in from_files[side]}
        assert from_files[side] == pytest.approx(side_metrics, abs=1e-6)
    assert live["both"].keys() - from_files["both"].keys() == {"loss"}


def test_two_servers_and_three_trainers_train_the_same_tables(ring, launched, tmp_path):
    commands.train(tmp_path, 3, *settings(ring, tmp_path / "run"), num_servers=2)
    assert_same(tmp_path / "run", launched)


def test_trainers_that_do_not_wait_for_one_another_learn_and_resume(ring: Path, tmp_path: Path) -> None:
    more = ("training.synchronous=false", "checkpoint.every_batches=3", "evaluation.split=none")
    done = commands.train(tmp_path, 2, *settings(ring, tmp_path / "run", *more))
    reported = losses(tmp_path / "run")
    assert reported[-1] < reported[0]
    done = commands.train_alone(*settings(ring, tmp_path / "run", *more, "training.num_epochs=6"))
    assert "resumed: 4 epochs and 0 batches done" in done.stderr
    counts = [record["stats"]["count"] for record in records(tmp_path / "run")]
    assert len(counts) == 6 and len(set(counts)) == 1  # every triple in every epoch, whoever trained it


def test_a_mistake_under_the_launcher_ends_every_process(ring: Path, tmp_path: Path) -> None:
    done = commands.train(tmp_path, 2, *settings(ring, tmp_path / "run", "loss.name=softmx"), status=2)
    assert "unknown loss 'softmx'; did you mean 'softmax'?" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


# The plainest query, and one that holds matrices and relations of one direction.
LEARN = {"complex": (), "transr_l1": ("model.reciprocal_relations=false",)}


@pytest.mark.parametrize("score_function", LEARN)
def test_typed_entities_are_learnt_ranked_predicted_exported_and_resumed(score_function, tmp_path):
    run, more = tmp_path / "run", (f"model.score_function={score_function}", "model.dimension=24")
    words = settings(toy_dataset(typed=True), run, *more, "regularizer={name: none}", *LEARN[score_function])
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
    assert score_function in commands.dglkge("inspect", str(run)).stdout
    # One process goes on from the files of two.
    done = commands.train_alone(*words, "training.num_epochs=31", "evaluation.split=none")
    assert "resumed: 30 epochs and 0 batches done" in done.stderr
