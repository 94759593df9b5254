"""Seconds of a batch by phase: they add up, and cost nothing where they are not wanted."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import dglkge
from dglkge.config import load_config
from dglkge.step.computation import PHASES, PhaseClock, as_array
from dglkge.training import stats as phase_clock
from dglkge.training.epochs import JOB
from tests.toy_kg import toy_dataset


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that clocks see."""
    time = [100.0]
    monkeypatch.setattr(phase_clock.time, "perf_counter", lambda: time[0])
    return time


def test_seconds_belong_to_the_phase_that_runs(now: list[float]) -> None:
    clock = PhaseClock(is_on=True)
    for phase, seconds in (("gather", 1.0), ("score", 2.0), ("gather", 4.0)):
        clock.enter(phase)
        now[0] += seconds
    clock.stop()
    now[0] += 50.0
    clock.enter("update")
    now[0] += 0.5
    clock.stop()
    clock.stop()
    seconds = clock.take()
    assert seconds == {**dict.fromkeys(PHASES, 0.0), "gather": 5.0, "score": 2.0, "update": 0.5}
    assert as_array(seconds).tolist() == [seconds[phase] for phase in PHASES]
    assert set(clock.take().values()) == {0.0}


def test_a_clock_that_is_off_takes_no_note(now: list[float]) -> None:
    clock = PhaseClock()
    clock.enter("gather")
    now[0] += 1.0
    clock.stop()
    assert not as_array(clock.take()).any()


@pytest.mark.parametrize("profile", ["true", "false"])
def test_the_last_record_of_an_epoch_says_where_the_time_went(tmp_path: Path, profile: str) -> None:
    sets = ["model.dimension=8", "training.batch_size=50", "training.num_epochs=2", "negatives.num_uniform=9"]
    sets += [f"dataset={toy_dataset()}", f"output={tmp_path / 'run'}", f"training.profile={profile}"]
    with dglkge.join_cluster(load_config(None, sets)) as cluster:
        trainer = dglkge.build_trainer(load_config(None, sets), cluster)
        for _ in dglkge.remaining_epochs_until(2):
            for batch in trainer.batches():
                trainer.step(batch)
    JOB.restore(0)
    records = [json.loads(line) for line in (tmp_path / "run" / "stats.jsonl").read_text().splitlines()]
    last = [record for record in records if record["batches_done"] == record["num_batches"]]
    others = [record for record in records if record not in last]
    assert len(last) == 2 and all("phase_seconds" not in record for record in others)
    for record in last:
        assert ("phase_seconds" in record) == (profile == "true")
    if profile == "true":
        for record in last:
            seconds = record["phase_seconds"]
            assert list(seconds) == list(PHASES)
            used = ("order", "edges", "negatives", "gather", "score", "backward", "merge", "update")
            assert all(seconds[phase] > 0 for phase in used)
            assert np.isfinite(list(seconds.values())).all()
            assert sum(seconds.values()) <= record["epoch_seconds"] + 1e-3
