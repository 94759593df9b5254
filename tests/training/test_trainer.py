"""Elastic epochs (the semantics of ``adaptdl.torch.epoch``), alone and against real checkpoints."""

from __future__ import annotations

import json
import logging
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from dglkge.checkpoint import part_files as row_stream
from dglkge.checkpoint.reader import open_checkpoint
from dglkge.config import load_config
from dglkge.distributed.preemption import Preempted
from dglkge.distributed.runtime import Cluster
from dglkge.distributed.world import World
from dglkge.errors import CheckpointError, InputError
from dglkge.formats.bigraph_files import read_stats
from dglkge.sampling.edge_batches import EdgeBatches
from dglkge.training import trainer
from dglkge.training.elastic import _settings_of
from dglkge.training.script import ElasticEpochs
from tests.training.toy_trainer import BATCH_SIZE, NUM_BATCHES, NUM_TRIPLES, ToyRun

VALIDATED = ("evaluation.valid_every_epochs=1", "checkpoint.keep_best=true")


def each_triple_once(*lives: ToyRun, epoch: int) -> bool:
    """Tell whether some lives of a run together trained each triple of an epoch once."""
    batches = [ids for life in lives for trained_epoch, ids in life.trained if trained_epoch == epoch]
    return sorted(sum(batches, [])) == list(range(NUM_TRIPLES))


def validated(folder: Path) -> list[int]:
    """Return the epoch of the kept version, and that of the last validation."""
    paths = (folder / "checkpoint" / "best", folder / "validation.json")
    return [json.loads(path.read_text())["finished_epochs"] if path.exists() else 0 for path in paths]


@pytest.mark.parametrize(
    ("index", "number"), [(0, signal.SIGTERM), (2, signal.SIGINT), (NUM_BATCHES - 1, signal.SIGTERM)]
)
@pytest.mark.usefixtures("in_foreground")
def test_a_signal_commits_after_the_batch_and_the_next_life_goes_on_there(tmp_path, index, number):
    first = ToyRun(tmp_path)
    assert first.stop(1, index, number) == 143
    assert first.committed() == (1, index + 1)
    first.cluster.leave()
    second = ToyRun(tmp_path)
    assert (second.epochs.finished, second.epochs.current) == (1, None)
    assert second.num_trained == first.num_trained == sum(len(ids) for _, ids in first.trained)
    second.train(3)
    assert len(first.trained) + len(second.trained) == 3 * NUM_BATCHES
    assert all(each_triple_once(first, second, epoch=epoch) for epoch in range(3))
    assert second.committed() == (3, 0) and second.num_trained == 3 * NUM_TRIPLES


def test_a_signal_before_the_first_batch_trains_nothing(tmp_path: Path) -> None:
    life = ToyRun(tmp_path)
    with life.cluster.stop.listening():
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Preempted):
            life.train(2)
    assert (life.trained, life.committed()) == ([], (0, 0))


def test_a_signal_while_a_trainer_is_built_leaves_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, reached = Cluster(World(), None), []

    def long_work(config: Any, cluster: Cluster) -> None:
        reached.append("begun")
        signal.raise_signal(signal.SIGTERM)
        reached.append("done")

    monkeypatch.setattr(trainer.checks, "check_config", long_work)
    with cluster.stop.listening():
        for _ in range(2):
            with pytest.raises(Preempted) as caught:
                trainer.build_trainer(load_config(None, ["dataset=x"]), cluster)
            assert caught.value.code == 143
    assert reached == ["begun"]


def test_a_checkpoint_inside_the_body_holds_the_epoch_as_open(tmp_path: Path) -> None:
    """Row 6: a restart repeats the epoch from where its batches stood."""
    first = ToyRun(tmp_path)
    first.train(1)
    for _ in first.epochs.remaining_until(2):
        for batch in first.trainer.batches():
            first.trainer.step(batch)
            if batch.index == 3:
                first.trainer.commit()  # the batch that is open is not done
        assert first.committed() == (1, 3)
        first.trainer.commit()
        assert first.committed() == (1, NUM_BATCHES)
    first.cluster.leave()
    second = ToyRun(tmp_path)
    assert second.committed() == (2, 0)  # the loop came to its end, and the last commit follows it
    assert list(second.epochs.remaining_until(2)) == []


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_what_is_left_by_an_exception_counts_in_memory_and_not_in_the_checkpoint(tmp_path, error):
    """Rows 5 and 11: after a restart finished is what was stored, and loops that were done are skipped."""
    first = ToyRun(tmp_path, "checkpoint.every_batches=2", "checkpoint.background=false")

    def fail() -> None:
        raise error

    with pytest.raises(error):
        first.train(2, {(1, 3): fail})
    assert (first.epochs.finished, first.epochs.current) == (2, None)
    assert first.committed() == (1, 2)
    second = ToyRun(tmp_path)
    assert (second.epochs.finished, second.epochs.current) == (1, None)
    assert second.num_trained == NUM_TRIPLES + 2 * BATCH_SIZE
    assert list(second.epochs.remaining_until(1)) == []
    second.train(2)
    assert [ids for _, ids in second.trained[:2]] == [ids for _, ids in first.trained[-2:]]
    first.trained = first.trained[:-2]  # what came after the commit does not count
    assert each_triple_once(first, second, epoch=1) and second.committed() == (2, 0)


def test_code_between_the_batch_loops_runs_again_and_code_after_them_does_not(tmp_path: Path) -> None:
    """The contract with the script, stopped at the very end of an epoch's batches."""
    ran: list[str] = []

    def script(life: ToyRun, stops: bool) -> None:
        for epoch in life.epochs.remaining_until(2):
            ran.append(f"before {epoch}")
            for batch in life.trainer.batches():
                life.trainer.step(batch)
                if stops and batch.index == NUM_BATCHES - 1:
                    signal.raise_signal(signal.SIGTERM)
            ran.append(f"after {epoch}")

    first = ToyRun(tmp_path)
    with first.cluster.stop.listening(), pytest.raises(Preempted):
        script(first, stops=True)
    first.cluster.leave()
    second = ToyRun(tmp_path)
    script(second, stops=False)
    assert ran == ["before 0", "before 0", "after 0", "before 1", "after 1"]
    assert [epoch for epoch, _ in first.trained + second.trained] == [0] * NUM_BATCHES + [1] * NUM_BATCHES


def test_an_epoch_that_is_left_by_break_is_done_and_the_next_has_all_its_batches(tmp_path: Path) -> None:
    """Row 4, and row 7 with ``close()``: wherever an epoch is left, the next begins at its first batch."""
    life = ToyRun(tmp_path)
    life.leave_by_break(0, 2)
    life.trainer.commit()
    assert life.committed() == (1, 0)
    held = life.epochs.remaining_until(9)
    next(held)
    next(iter(life.trainer.batches()))
    held.close()  # type: ignore[attr-defined]
    life.train(4)
    assert [epoch for epoch, _ in life.trained[3:]] == [2] * NUM_BATCHES + [3] * NUM_BATCHES
    assert each_triple_once(life, epoch=2) and each_triple_once(life, epoch=3)


@pytest.mark.parametrize("ending", ["leave", "evaluate", "train", "stop"])
def test_an_epoch_that_is_left_by_break_is_committed_and_validated(tmp_path: Path, ending: str) -> None:
    """At the next place where all trainers are together; nothing has to follow but the end of the script."""
    settings = (*VALIDATED, "checkpoint.keep_every_epochs=2")
    life, num_epochs = ToyRun(tmp_path, *settings, mrr=[0.1, 0.2, 0.05]), 3 if ending == "train" else 2
    life.leave_by_break(1, 2)
    assert life.committed() == (1, 0) and validated(tmp_path) == [1, 1]
    if ending == "stop":
        with life.cluster.stop.listening(), pytest.raises(Preempted):
            signal.raise_signal(signal.SIGTERM)
            life.trainer.stop_if_asked()
        assert life.committed() == (2, 0) and validated(tmp_path) == [1, 1]
        life = ToyRun(tmp_path, *settings, mrr=[0.2])
    if ending == "leave":
        life.cluster.leave()
    elif ending == "train":
        life.train(3)
    else:
        life.trainer.evaluate("test")
        assert life.evaluator.ranked[-2:] == ["valid", "test"]
    assert life.committed() == (num_epochs, 0) and validated(tmp_path) == [2, num_epochs]
    kept = open_checkpoint(tmp_path / "checkpoint" / "epoch_2").progress
    assert (kept["finished_epochs"], kept["batches_done"]) == (2, 0)


def test_the_last_epoch_is_committed_when_the_script_leaves_it_by_break(tmp_path: Path) -> None:
    life = ToyRun(tmp_path, "checkpoint.every_epochs=0")
    life.leave_by_break(1, 2)
    assert life.committed() is None
    life.cluster.leave()
    assert life.committed() == (2, 0) and ToyRun(tmp_path).epochs.finished == 2


def test_a_script_that_goes_on_after_a_stop_does_not_count_the_open_epoch(tmp_path: Path) -> None:
    life = ToyRun(tmp_path)
    life.stop(1, 2)
    with pytest.raises(Preempted):
        life.train(3)
    life.trainer.commit()
    life.cluster.leave()
    assert life.committed() == (1, 3)


@pytest.mark.parametrize("num_epochs", [1, 2])
def test_a_stop_in_the_validation_is_followed_by_it(tmp_path: Path, num_epochs: int) -> None:
    first, numbers = ToyRun(tmp_path, *VALIDATED), []

    def before(number: int) -> None:
        numbers.append(number)
        if number == 1:
            signal.raise_signal(signal.SIGTERM)

    first.evaluator.before = before
    with first.cluster.stop.listening(), pytest.raises(Preempted):
        first.train(num_epochs)
    # It stops between two batches of queries.
    assert numbers == [0, 1] and not (tmp_path / "metrics.json").exists()
    assert first.committed() == (1, 0) and validated(tmp_path) == [0, 0]
    (tmp_path / "metrics.json").write_text("{torn")
    second = ToyRun(tmp_path, *VALIDATED, mrr=[0.9, 0.1]).finish(num_epochs)
    assert second.evaluator.ranked == ["valid"] * num_epochs
    assert validated(tmp_path) == [1, num_epochs] and second.committed() == (num_epochs, 0)
    third = ToyRun(tmp_path, *VALIDATED).finish(num_epochs)
    assert third.evaluator.ranked == []  # nothing is left to do


def test_batches_that_are_asked_for_twice_in_an_epoch_count_once(tmp_path: Path) -> None:
    life = ToyRun(tmp_path)
    for _ in life.epochs.remaining_until(1):
        for index in (1, 2, NUM_BATCHES):
            for batch in life.trainer.batches():
                life.trainer.step(batch)
                if batch.index == index:
                    break
    assert len(life.trained) == NUM_BATCHES + 2  # a batch that is left by break is trained again
    assert life.committed() == (1, 0)
    (record,) = read_stats(tmp_path / "checkpoint" / "latest")
    assert record["stats"]["count"] == NUM_TRIPLES


def test_a_finished_run_is_not_another_and_may_be_continued(tmp_path: Path) -> None:
    """Its checkpoint holds the configuration; what may change is recorded in the next version."""
    once, free = "training.num_epochs=1", ("evaluation.split=valid", "training.progress=always")
    ToyRun(tmp_path, once, own_config=True).finish(1)
    for setting, words in (
        # Another optimizer has options of its own: with their defaults they differ too.
        ("optimizer.name=sparse_adam", "is 'sparse_adam'; optimizer.eps was 1e-10, is 1e-08"),
        ("training.batch_size=10", "other settings: training.batch_size was 5, is 10"),
        ("checkpoint.init_path=elsewhere", "other settings: checkpoint.init_path was '', is 'elsewhere'"),
    ):
        with pytest.raises(CheckpointError, match=f"{words}; take another output"):
            ToyRun(tmp_path, once, setting, own_config=True)
    assert ToyRun(tmp_path, once, *free, own_config=True).epochs.finished == 1
    ToyRun(tmp_path, "training.num_epochs=2", *free, "training.batch_size=1", own_config=True).finish(2)
    saved = open_checkpoint(tmp_path)
    assert saved.progress["finished_epochs"] == saved.config["training"]["num_epochs"] == 2
    assert saved.config["evaluation"]["split"] == "valid"


@pytest.mark.parametrize(("mark", "others", "words"), [
    (7, (0, 8), r"order of its machines, .*\(checksum 7, here {}\): finish the epoch on the partitions"),
    # Begun on one machine, or by a version that had no other order.
    (0, (5,), "order of the whole graph, .*; allowed: sampling.order global, at least until the epoch's"),
])  # fmt: skip
def test_an_epoch_continues_in_its_order_only(tmp_path, monkeypatch, mark, others, words):
    def life(mark: int, *settings: str) -> ToyRun:
        monkeypatch.setattr(EdgeBatches, "order_mark", mark)
        return ToyRun(tmp_path, *settings)

    first = life(mark, "checkpoint.every_batches=2", "checkpoint.background=false")
    first.break_off(3)
    first.checkpoints.finish()
    progress = open_checkpoint(tmp_path).meta.progress
    assert (progress["batches_done"], progress.get("order_mark", 0)) == (2, mark)
    for other in others:
        with pytest.raises(InputError, match=f"stands 10 triples into an epoch in the {words.format(other)}"):
            life(other)
    again = life(mark).finish(1)
    assert again.committed() == (1, 0) and [epoch for epoch, _ in again.trained] == [0] * 3
    assert "order_mark" not in open_checkpoint(tmp_path).meta.progress
    life(8).train(2)  # after the end of an epoch any partitions do


def test_training_does_not_wait_for_the_version_before(tmp_path, monkeypatch):
    """The version after batch 2 is written until batch 5; what is due after batch 4 comes after batch 5."""
    disk, real = threading.Event(), row_stream.fill_rows

    def wait_and_fill(*arguments: Any) -> int:
        assert disk.wait(60)
        return real(*arguments)

    def finish_writing() -> None:
        assert life.checkpoints.is_writing
        disk.set()
        seen.append(life.committed())

    seen: list[Any] = []
    life = ToyRun(tmp_path, "checkpoint.every_batches=2", "checkpoint.every_epochs=0")
    life.checkpoints.finish()
    monkeypatch.setattr(row_stream, "fill_rows", wait_and_fill)
    life.train(2, {(1, 0): finish_writing, (1, 1): lambda: seen.append(life.committed())})
    assert seen == [(0, 2), (1, 1)]


def test_batches_outside_of_an_epoch_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="must run inside 'for epoch in remaining_epochs_until"):
        next(ToyRun(tmp_path).trainer.batches())


def test_the_state_of_the_epochs_is_one_integer(caplog: pytest.LogCaptureFixture) -> None:
    """Rows 1 to 3 and 8 to 11: nothing happens before the first next, and a second loop harms nothing."""
    caplog.set_level(logging.INFO)
    epochs = ElasticEpochs()
    loop = epochs.remaining_until(3)
    assert epochs.current is None and epochs.finished == 0
    for epoch in loop:
        assert epochs.current == epochs.finished == epoch
        with pytest.raises(RuntimeError, match="overlapping epoch loops detected"):
            next(epochs.remaining_until(9))
        assert epochs.current == epochs.finished == epoch
    assert epochs.current is None and epochs.finished == 3
    restarted = ElasticEpochs(4)
    assert restarted.current is None
    assert list(epochs.remaining_until(6)) == [3, 4, 5] and list(restarted.remaining_until(6)) == [4, 5]
    for until in (6, -3):
        assert list(restarted.remaining_until(until)) == []
        assert f"epochs until {until} are finished already" in caplog.text


def test_a_held_generator_keeps_its_epoch_open_until_it_is_closed() -> None:
    """Row 7: ``next()``, ``close()`` and collection each end the epoch."""
    epochs = ElasticEpochs()
    loop = epochs.remaining_until(5)
    for epoch in range(2):
        next(loop)
        assert epochs.current == epochs.finished == epoch
    loop.close()  # type: ignore[attr-defined]
    assert epochs.current is None and epochs.finished == 2
    held = epochs.remaining_until(5)
    next(held)
    del held
    assert epochs.current is None and epochs.finished == 3


def test_a_loop_of_an_earlier_training_that_is_closed_late_counts_nothing() -> None:
    """A notebook keeps the last traceback, and with it the open loop, until something else fails."""
    epochs = ElasticEpochs()
    called: list[str] = []
    epochs.when_finished(lambda: called.append("first"))
    left_open = epochs.remaining_until(5)
    next(left_open)
    epochs.forget()
    assert epochs.current is None and epochs.finished == 0
    epochs.when_finished(lambda: called.append("second"))
    for epoch in epochs.remaining_until(2):
        left_open.close()
        assert epochs.current == epoch
    assert epochs.finished == 2 and called == ["second", "second"]


def test_units_of_the_cadence() -> None:
    settings = _settings_of({"batches": 3, "minutes": 0.5})
    assert (settings.every_epochs, settings.every_batches, settings.every_minutes) == (0, 3, 0.5)
    for intervals, message in (
        ({"batches": 1.5}, "elastic: every batches is 1.5; expected a finite number of at least 0"),
        ({"minutes": float("inf")}, "elastic: every minutes is inf; expected"),
        ({"steps": 1}, "unknown unit in every 'steps'"),
    ):
        with pytest.raises(InputError, match=message):
            _settings_of(intervals)
