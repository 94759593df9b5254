"""What training reports: sums over trainers, JSON lines, and a progress bar where one is wanted."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from dglkge.distributed.runtime import Cluster
from dglkge.distributed.world import World
from dglkge.training import stats
from dglkge.training.stats import EpochReport, append_validation, memory_bytes, wants_bar


class TwoTrainers(Cluster):
    """A cluster whose other trainer has lost 10 on 5 triples and sent 100 bytes in every interval."""

    def sum(self, values: np.ndarray) -> np.ndarray:
        if values.shape == (1,):
            return values + 10
        # behind the sums: memory, shared memory and bytes of each trainer, and flags
        return values + np.array([10.0, 5.0, 100.0, *(0, 0, 0), *(5e9, 4e9, 77), 1])


def report(path: Path, rank: int, first_batch: int = 0) -> EpochReport:
    """Return the report of an epoch of 40 batches."""
    cluster = TwoTrainers(World(rank, 2, rank, 2, launched=True), graph=None)
    return EpochReport(cluster, path, 3, 8, first_batch, 40, bar=False)


def lines(path: Path) -> list[dict[str, Any]]:
    """Read what was written."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_losses_are_means_over_the_triples_of_all_trainers(tmp_path: Path) -> None:
    path = tmp_path / "stats.jsonl"
    epoch = report(path, rank=0)
    flags = [
        epoch.count(batch + 1, loss=float(batch), num_triples=10, num_bytes=7, flags=(batch // 20) << 32)
        for batch in range(40)
    ]
    epoch.close()
    # Those of the batch of a report, and the other trainer's 1.
    assert flags == 10 * [None, 1] + 10 * [None, (1 << 32) + 1]
    records = lines(path)
    assert [record["batches_done"] for record in records] == list(range(2, 41, 2))
    assert {record["epoch"] for record in records} == {3}
    for index, record in enumerate(records):
        assert record["loss"] == pytest.approx((4 * index + 1 + 10) / 25)
    total = sum(range(40)) + 10 * 20
    assert records[-1]["epoch_loss"] == pytest.approx(total / (20 * 25))
    assert all(record["edges_per_second"] > 0 for record in records)
    assert [record["bytes_sent"] for record in records] == [114 * n for n in range(1, 21)]


def test_the_last_line_of_an_epoch_has_the_trainers_and_their_memory(tmp_path: Path) -> None:
    epoch = report(tmp_path / "stats.jsonl", rank=0, first_batch=36)
    for batch in range(36, 40):
        epoch.count(batch + 1, 1.0, 10)
    *others, last = lines(tmp_path / "stats.jsonl")
    assert not [line for line in others if "num_trainers" in line or "trainer_memory_bytes" in line]
    assert last["num_trainers"] == 2
    # The other trainer of this cluster adds 10. This process has at least the interpreter and torch.
    assert 50 * 2**20 < last["trainer_memory_bytes"] < 100 * 2**30


def test_every_line_has_memory_and_bytes_of_each_process(tmp_path: Path) -> None:
    epoch = report(tmp_path / "stats.jsonl", rank=0)
    for batch in range(4):
        epoch.count(batch + 1, 1.0, 10, num_bytes=7)
    first, second = (line["processes"] for line in lines(tmp_path / "stats.jsonl"))
    assert list(first) == ["trainer 0", "trainer 1"]
    other = {"machine": 0, "memory_bytes": 5 * 10**9, "shared_bytes": 4 * 10**9, "bytes_sent": 77}
    assert first["trainer 1"] == second["trainer 1"] == other
    assert [one["trainer 0"]["bytes_sent"] for one in (first, second)] == [14, 28]
    memory = psutil.Process().memory_info()
    assert first["trainer 0"]["memory_bytes"] == pytest.approx(memory.rss, rel=0.3)
    assert 0 < first["trainer 0"]["shared_bytes"] < first["trainer 0"]["memory_bytes"]


def test_memory_grows_with_what_is_allocated() -> None:
    before = memory_bytes()
    block = np.ones(64 * 2**20, dtype=np.uint8)
    assert memory_bytes() - before == pytest.approx(block.nbytes, rel=0.2)


def test_short_epochs_share_a_measurement_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    told = iter([5, 6])
    monkeypatch.setattr(stats, "memory_bytes", lambda: next(told))
    patient = stats.MemoryMeter(pause_seconds=60)
    assert [patient.measure(), patient.measure()] == [5, 5]
    assert stats.MemoryMeter(pause_seconds=0).measure() == 6


def test_a_ranking_of_the_valid_split_is_a_line_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "stats.jsonl"
    append_validation(path, 1, {"mrr": 0.5})
    append_validation(path, 3, {"mrr": 0.75})
    found = lines(path)
    times = [line.pop("time") for line in found]
    assert found == [{"epoch": 0, "valid": {"mrr": 0.5}}, {"epoch": 2, "valid": {"mrr": 0.75}}]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", time) for time in times)


def test_a_full_disk_does_not_end_training_after_a_ranking(caplog: pytest.LogCaptureFixture) -> None:
    append_validation(Path("/dev/full"), 1, {"mrr": 0.5})
    assert "cannot write /dev/full: No space left on device; training goes on" in caplog.text


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    path = tmp_path / "stats.jsonl"
    epoch = report(path, rank=1, first_batch=38)
    epoch.count(39, 1.0, 10)
    epoch.count(40, 1.0, 10)
    assert not path.exists()


def test_one_process_alone_reports_its_own_sums(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    path = tmp_path / "stats.jsonl"
    epoch = EpochReport(Cluster(World(), graph=None), path, 0, 1, 0, 2, bar=False)
    epoch.count(1, 6.0, 3)
    epoch.count(2, 2.0, 1)
    assert [record["loss"] for record in lines(path)] == [2.0, 2.0]
    assert "epoch 1/1: loss 2.0000, " in caplog.text


def test_rank_0_shows_a_bar_where_a_person_watches() -> None:
    alone, watched = World(), World(0, 2, 0, 2, launched=True, shows_progress=True)
    other = World(1, 2, 1, 2, launched=True, shows_progress=True)
    assert wants_bar("always", alone) and wants_bar("auto", watched)
    assert not wants_bar("never", watched) and not wants_bar("always", other) and not wants_bar("auto", other)
    assert not wants_bar("auto", alone)


def test_a_full_disk_warns_once_and_training_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    epoch = EpochReport(Cluster(World(), graph=None), Path("/dev/full"), 0, 1, 0, 2, bar=False)
    epoch.count(1, 6.0, 3)
    epoch.count(2, 2.0, 1)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == ["cannot write /dev/full: No space left on device; training goes on"]
    assert epoch.so_far(2).total.tolist() == [8.0, 4.0, 0.0]
