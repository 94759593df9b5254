"""Statistics of a run: sums, phases and processes."""

from __future__ import annotations

import json
import logging
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

from dglkge.config import load_config
from dglkge.distributed.jobs import find_servers, memory_of
from dglkge.distributed.leased_folder import LeasedFolder
from dglkge.distributed.runtime import Cluster
from dglkge.distributed.world import World
from dglkge.step.contracts import PHASES, Computation, PhaseClock, StepResult
from dglkge.training.callbacks import Trackers
from dglkge.training.statistics import stats
from dglkge.training.statistics.stats import ProcessUsage, Statistics, memory_bytes
from tests.toy_kg import toy_dataset
from tests.training.live import opened, train


class TwoTrainers(Cluster):
    """A cluster whose other trainer has lost 10 on 5 triples and sent 100 bytes in every interval."""

    def sum(self, values: np.ndarray) -> np.ndarray:
        if values.shape == (1,):
            return values + 10
        # behind the sums: memory, shared memory and bytes of each trainer, and flags
        return values + np.array([10.0, 5.0, 100.0, *(0, 0, 0, 0), *(0, 0, 0), *(5e9, 4e9, 77), 1])


class ToyBatches:
    def __init__(self, num_batches: int) -> None:
        self._num_batches = num_batches

    def __len__(self) -> int:
        return self._num_batches

    def place(self, epoch: int, batches_done: int) -> dict[str, Any]:
        return {}


class Report:
    """The statistics of one epoch in a folder, and its lines."""

    def __init__(
        self, cluster: Cluster, folder: Path, epoch: int, first_batch: int, num_batches: int
    ) -> None:
        config = load_config(
            None, ["dataset=x", f"output={folder}", "training.num_epochs=8", "training.progress=never"]
        )
        self.position = SimpleNamespace(
            batches_done=first_batch, now=(epoch, first_batch), steps_done=epoch * num_batches + first_batch
        )
        job: Any = SimpleNamespace(
            config=config, cluster=cluster, world=cluster.world, output=folder, dense=None,
            optimizer=None, clock=Computation().clock,
        )  # fmt: skip
        batches: Any = ToyBatches(num_batches)
        position: Any = self.position
        records = LeasedFolder(folder)
        self.statistics = Statistics(job, batches, position, records, Trackers((), {}, records))
        self.statistics.begin(epoch)

    def count(
        self, batches_done: int, loss: float, num_triples: int, num_bytes: int = 0, flags: int = 0
    ) -> int | None:
        result = StepResult(loss, np.zeros(0), num_bytes, False, 0)
        return self.statistics.count(batches_done, result, num_triples, flags)


def report(folder: Path, rank: int, first_batch: int = 0) -> Report:
    """Return the report of an epoch of 40 batches."""
    cluster = TwoTrainers(World(rank, 2, rank, 2), graph=None)
    return Report(cluster, folder, 3, first_batch, 40)


def alone(folder: Path) -> Report:
    """Return the report of an epoch of 2 batches, of one process."""
    return Report(Cluster(World(), graph=None), folder, 0, 0, 2)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_losses_are_means_over_the_triples_of_all_trainers(tmp_path: Path) -> None:
    path = tmp_path / "stats.jsonl"
    epoch = report(tmp_path, rank=0)
    flags = [
        epoch.count(batch + 1, loss=float(batch), num_triples=10, num_bytes=7, flags=(batch // 20) << 32)
        for batch in range(40)
    ]
    epoch.statistics.close()
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
    epoch = report(tmp_path, rank=0, first_batch=36)
    for batch in range(36, 40):
        epoch.count(batch + 1, 1.0, 10)
    *earlier, last = lines(tmp_path / "stats.jsonl")
    assert not [line for line in earlier if "num_trainers" in line or "trainer_memory_bytes" in line]
    assert last["num_trainers"] == 2
    # The other trainer of this cluster adds 10. This process has at least the interpreter and torch.
    assert 50 * 2**20 < last["trainer_memory_bytes"] < 100 * 2**30


def test_every_line_has_memory_and_bytes_of_each_process(tmp_path: Path) -> None:
    epoch = report(tmp_path, rank=0)
    for batch in range(4):
        epoch.count(batch + 1, 1.0, 10, num_bytes=7)
    first, second = (line["processes"] for line in lines(tmp_path / "stats.jsonl"))
    assert list(first) == ["trainer 0", "trainer 1"]
    other = {"machine": 0, "memory_bytes": 5 * 10**9, "shared_bytes": 4 * 10**9, "bytes_sent": 77}
    assert first["trainer 1"] == second["trainer 1"] == other
    assert [line["trainer 0"]["bytes_sent"] for line in (first, second)] == [14, 28]
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
    assert [stats.memory_bytes_in(second) for second in (-3, -3, -2)] == [5, 5, 6]


def test_a_ranking_of_the_valid_split_is_a_line_of_its_own(tmp_path: Path) -> None:
    statistics = alone(tmp_path).statistics
    statistics.add_validation(1, {"mrr": 0.5})
    statistics.add_validation(3, {"mrr": 0.75})
    records = lines(tmp_path / "stats.jsonl")
    times = [line.pop("time") for line in records]
    assert records == [{"epoch": 0, "valid": {"mrr": 0.5}}, {"epoch": 2, "valid": {"mrr": 0.75}}]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", time) for time in times)
    assert statistics.is_validated(3) and not statistics.is_validated(1)


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    path = tmp_path / "stats.jsonl"
    epoch = report(tmp_path, rank=1, first_batch=38)
    epoch.count(39, 1.0, 10)
    epoch.count(40, 1.0, 10)
    assert not path.exists()


def test_one_process_alone_reports_its_own_sums(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    path = tmp_path / "stats.jsonl"
    epoch = alone(tmp_path)
    epoch.count(1, 6.0, 3)
    epoch.count(2, 2.0, 1)
    assert [record["loss"] for record in lines(path)] == [2.0, 2.0]
    assert "epoch 1/8: loss 2.0000, " in caplog.text


def test_rank_0_shows_a_bar_where_a_person_watches() -> None:
    alone, watched = World(), World(0, 2, 0, 2, launched=True, shows_progress=True)
    other = World(1, 2, 1, 2, launched=True, shows_progress=True)
    assert alone.wants_bar("always") and watched.wants_bar("auto")
    assert not watched.wants_bar("never") and not other.wants_bar("always") and not other.wants_bar("auto")
    assert not alone.wants_bar("auto")


def test_a_full_disk_warns_once_and_training_goes_on(tmp_path, caplog):
    (tmp_path / "stats.jsonl").symlink_to("/dev/full")
    epoch = alone(tmp_path)
    epoch.count(1, 6.0, 3)
    epoch.count(2, 2.0, 1)
    epoch.statistics.add_validation(1, {"mrr": 0.5})
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    text = f"cannot write {tmp_path / 'stats.jsonl'}: No space left on device; training goes on"
    assert warnings == [text]
    epoch.position.batches_done = 2
    assert epoch.statistics.sums()[:3].tolist() == [8.0, 4.0, 0.0]


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    time = [100.0]
    monkeypatch.setattr(stats.time, "perf_counter", lambda: time[0])
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
    seconds = dict(zip(PHASES, clock.take().tolist(), strict=True))
    assert seconds == {**dict.fromkeys(PHASES, 0.0), "gather": 5.0, "score": 2.0, "update": 0.5}
    assert not clock.take().any()


def test_a_clock_that_is_off_takes_no_note(now: list[float]) -> None:
    clock = PhaseClock()
    clock.enter("gather")
    now[0] += 1.0
    clock.stop()
    assert not clock.take().any()


@pytest.mark.parametrize("profile", ["true", "false"])
def test_the_last_record_of_an_epoch_says_where_the_time_went(tmp_path: Path, profile: str) -> None:
    sets = ["model.dimension=8", "training.batch_size=50", "training.num_epochs=2", "negatives.num_uniform=9"]
    sets += [f"dataset={toy_dataset()}", f"output={tmp_path / 'run'}", f"training.profile={profile}"]
    with opened(load_config(None, sets)) as trainer:
        train(trainer, 2)
    records = lines(tmp_path / "run" / "stats.jsonl")
    last = [record for record in records if record["batches_done"] == record["num_batches"]]
    earlier = [record for record in records if record not in last]
    assert len(last) == 2 and all("phase_seconds" not in record for record in earlier)
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


PAGE = os.sysconf("SC_PAGE_SIZE")


def add(proc: Path, pid: int, resident: int, shared: int, started: int = 5, **variables: str) -> None:
    folder = proc / str(pid)
    folder.mkdir(parents=True)
    (folder / "statm").write_text(f"999 {resident} {shared} 1 0 7 0\n")
    (folder / "stat").write_text(f"{pid} (a ) b) S " + " ".join(["1"] * 18) + f" {started} 1 1\n")
    (folder / "environ").write_bytes(
        b"".join(f"{key}={value}\0".encode() for key, value in variables.items())
    )


def server(number: int, job: str = "j") -> dict[str, str]:
    return {"DGL_ROLE": "server", "DGL_SERVER_ID": str(number), "DGLKGE_JOB": job, "A": "b=c"}


def test_servers_of_the_job_are_found_and_not_their_children(tmp_path: Path) -> None:
    add(tmp_path, 10, 1, 1, **server(0))
    add(tmp_path, 9, 1, 1, 8, **server(0))  # its child, after the numbers began anew
    add(tmp_path, 11, 1, 1, **server(1))
    add(tmp_path, 12, 1, 1, **server(2, "other"))
    add(tmp_path, 13, 1, 1, **{**server(3), "DGL_ROLE": "client"})
    (tmp_path / "14").mkdir()
    (tmp_path / "meminfo").touch()
    assert find_servers("j", tmp_path) == {0: 10, 1: 11}
    assert find_servers("", tmp_path) == {}


def test_memory_of_a_process_that_has_ended_is_unknown(tmp_path: Path) -> None:
    add(tmp_path, 10, 7, 3)
    assert memory_of(10, tmp_path) == (7 * PAGE, 3 * PAGE)
    assert memory_of(11, tmp_path) == (0, 0)
    (tmp_path / "10" / "statm").write_text("")
    assert memory_of(10, tmp_path) == (0, 0)


def test_the_sum_over_trainers_of_two_machines_has_every_process(tmp_path: Path) -> None:
    """Two machines with two trainers and a server each; every machine has a /proc of its own."""
    total = np.zeros((6, 3))
    for rank in range(4):
        proc = tmp_path / str(rank)
        add(proc, os.getpid(), 100 + rank, 50)
        add(proc, 70000000, 20 + rank, 10, **server(rank // 2))
        world = World(rank, 4, rank % 2, 2, launched=True, job="j")
        usage = ProcessUsage(world, 1, proc)
        total += usage.measure(1000 + rank)
    described = usage.describe(total)
    assert described == {
        **{
            f"trainer {rank}": {
                "machine": rank // 2,
                "memory_bytes": (100 + rank) * PAGE,
                "shared_bytes": 50 * PAGE,
                "bytes_sent": 1000 + rank,
            }
            for rank in range(4)
        },
        "server 0": {"machine": 0, "memory_bytes": 20 * PAGE, "shared_bytes": 10 * PAGE},
        "server 1": {"machine": 1, "memory_bytes": 22 * PAGE, "shared_bytes": 10 * PAGE},
    }
