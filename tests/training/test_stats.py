"""Statistics of a run: sums, phases and processes."""

from __future__ import annotations

import logging
import os
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
from dglkge.training import cadence
from dglkge.training.callbacks import Trackers
from dglkge.training.statistics import stats
from dglkge.training.statistics.stats import ProcessUsage, Statistics
from tests.toy_kg import toy_dataset
from tests.training.live import opened, stats_lines, train


@pytest.fixture(autouse=True)
def reports_of_each_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small graphs have reports after each batch here too."""
    monkeypatch.setattr(cadence, "TRIPLES_A_REPORT", 1)


class TwoTrainers(Cluster):
    """A cluster whose other trainer has lost 10 on 5 triples and sent 100 bytes in every interval."""

    def sum(self, values: np.ndarray) -> np.ndarray:
        if values.shape == (1,):
            return values + 10
        # behind the sums: memory, shared memory and bytes of each trainer, and flags
        return values + np.array([10.0, 5.0, 100.0, *(0, 0, 0, 0), *(0, 0, 0), *(5e9, 4e9, 77), 1])


class ToyBatches(list):
    def place(self, epoch: int, batches_done: int) -> dict[str, Any]:
        return {}


def statistics_of(cluster: Cluster, folder: Path, epoch: int, num_batches: int) -> Statistics:
    config = load_config(None, ["dataset=x", "training.num_epochs=8", "training.progress=never"])
    position: Any = SimpleNamespace(batches_done=0, now=(epoch, 0), steps_done=epoch * num_batches)
    job: Any = SimpleNamespace(
        config=config, cluster=cluster, world=cluster.world, output=folder, dense=None, optimizer=None,
        clock=Computation().clock, is_lagged=False,
    )  # fmt: skip
    batches: Any = ToyBatches(range(num_batches))
    records = LeasedFolder(folder)
    statistics = Statistics(job, batches, position, records, Trackers((), {}, records))
    statistics.begin(epoch)
    return statistics


def step(loss: float) -> StepResult:
    return StepResult(loss, np.zeros(0), sent_bytes=7, is_skipped=False, flag_sum=0)


def one_process(folder: Path) -> Statistics:
    """Count the two batches of an epoch of one process: of 3 triples and of one."""
    statistics = statistics_of(Cluster(World(), graph=None), folder, 0, 2)
    statistics.count(1, step(6.0), 3, 0)
    statistics.count(2, step(2.0), 1, 0)
    return statistics


def test_lines_have_means_over_the_triples_of_all_trainers_and_the_memory_of_each(tmp_path: Path) -> None:
    for rank in (1, 0):
        assert not (tmp_path / "stats.jsonl").exists()  # other ranks write nothing
        statistics = statistics_of(TwoTrainers(World(rank, 2, rank, 2), graph=None), tmp_path, 3, 40)
        counted = (statistics.count(n + 1, step(float(n)), 10, (n // 20) << 32) for n in range(40))
        flags = list(counted)
        statistics.close()
    # Those of the batch of a report, and the other trainer's 1.
    assert flags == 10 * [None, 1] + 10 * [None, (1 << 32) + 1]
    records = stats_lines(tmp_path)
    assert [record["batches_done"] for record in records] == list(range(2, 41, 2))
    assert {record["epoch"] for record in records} == {3}
    for index, record in enumerate(records):
        assert record["loss"] == pytest.approx((4 * index + 1 + 10) / 25)
    assert records[-1]["epoch_loss"] == pytest.approx((sum(range(40)) + 10 * 20) / (20 * 25))
    assert all(record["edges_per_second"] > 0 for record in records)
    assert [record["bytes_sent"] for record in records] == [114 * n for n in range(1, 21)]
    *earlier, last = records
    assert not [line for line in earlier if "num_trainers" in line or "trainer_memory_bytes" in line]
    assert last["num_trainers"] == 2
    # The other trainer of this cluster adds 10. This process has at least the interpreter and torch.
    assert 50 * 2**20 < last["trainer_memory_bytes"] < 100 * 2**30
    for number, record in enumerate(records, 1):
        this, other = record["processes"]["trainer 0"], record["processes"]["trainer 1"]
        assert list(record["processes"]) == ["trainer 0", "trainer 1"] and this["bytes_sent"] == 14 * number
        assert list(other.values()) == [0, 5 * 10**9, 4 * 10**9, 77]
        assert 0 < this["shared_bytes"] < this["memory_bytes"]
    assert this["memory_bytes"] == pytest.approx(psutil.Process().memory_info().rss, rel=0.3)


def test_one_process_alone_reports_its_own_sums(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    one_process(tmp_path)
    assert [record["loss"] for record in stats_lines(tmp_path)] == [2.0, 2.0]
    assert "epoch 1/8: loss 2.0000, " in caplog.text


def test_rank_0_shows_a_bar_where_a_person_watches() -> None:
    alone, watched = World(), World(0, 2, 0, 2, launched=True, shows_progress=True)
    other = World(1, 2, 1, 2, launched=True, shows_progress=True)
    assert alone.wants_bar("always") and watched.wants_bar("auto")
    assert not watched.wants_bar("never") and not other.wants_bar("always") and not other.wants_bar("auto")
    assert not alone.wants_bar("auto")


def test_a_full_disk_warns_once_and_training_goes_on(tmp_path, caplog):
    (tmp_path / "stats.jsonl").symlink_to("/dev/full")
    statistics = one_process(tmp_path)
    statistics.add_validation(1, {"mrr": 0.5})
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    text = f"cannot write {tmp_path / 'stats.jsonl'}: No space left on device; training goes on"
    assert warnings == [text]
    statistics._position.batches_done = 2
    assert statistics.sums()[:3].tolist() == [8.0, 4.0, 14.0]


@pytest.mark.parametrize("is_on", [True, False])
def test_seconds_belong_to_the_phase_that_runs(is_on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(stats.time, "perf_counter", lambda: now[0])
    clock = PhaseClock(is_on=is_on)
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
    used = {"gather": 5.0, "score": 2.0, "update": 0.5} if is_on else {}
    assert seconds == {**dict.fromkeys(PHASES, 0.0), **used}
    assert not clock.take().any()


@pytest.mark.parametrize("profile", ["true", "false"])
def test_the_last_record_of_an_epoch_says_where_the_time_went(tmp_path: Path, profile: str) -> None:
    sets = ["model.dimension=8", "training.batch_size=50", "training.num_epochs=2", "negatives.num_uniform=9"]
    sets += [f"dataset={toy_dataset()}", f"output={tmp_path / 'run'}", f"training.profile={profile}"]
    with opened(load_config(None, sets)) as trainer:
        train(trainer, 2)
    records = stats_lines(tmp_path / "run")
    last = [record for record in records if record["batches_done"] == record["num_batches"]]
    profiled = [record for record in records if "phase_seconds" in record]
    assert len(last) == 2 and profiled == (last if profile == "true" else [])
    for record in profiled:
        seconds = record["phase_seconds"]
        assert list(seconds) == list(PHASES)
        used = ("order", "edges", "negatives", "gather", "score", "backward", "merge", "update")
        assert all(seconds[phase] > 0 for phase in used) and np.isfinite(list(seconds.values())).all()
        assert sum(seconds.values()) <= record["epoch_seconds"] + 1e-3


PAGE = os.sysconf("SC_PAGE_SIZE")


def add(proc: Path, pid: int, resident: int, shared: int, started: int = 5, **variables: str) -> None:
    folder = proc / str(pid)
    folder.mkdir(parents=True)
    (folder / "statm").write_text(f"999 {resident} {shared} 1 0 7 0\n")
    (folder / "stat").write_text(
        f"{pid} (a ) b) S " + " ".join(["1"] * 18) + f" {started}" + 30 * " 1" + "\n"
    )
    (proc / "stat").write_text("btime 1\n")
    (folder / "environ").write_text("".join(f"{key}={value}\0" for key, value in variables.items()))


def server(number: int, job: str = "j") -> dict[str, str]:
    return {"DGL_ROLE": "server", "DGL_SERVER_ID": str(number), "DGLKGE_JOB": job, "A": "b=c"}


def test_servers_of_the_job_and_their_memory_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    add(tmp_path, 10, 7, 3, **server(0))
    add(tmp_path, 9, 1, 1, 8, **server(0))  # its child, after the numbers began anew
    add(tmp_path, 11, 1, 1, **server(1))
    add(tmp_path, 12, 1, 1, **server(2, "other"))
    add(tmp_path, 13, 1, 1, **{**server(3), "DGL_ROLE": "client"})
    (tmp_path / "14").mkdir()
    assert find_servers("j") == {0: 10, 1: 11}
    assert find_servers("") == {}
    assert memory_of(10) == (7 * PAGE, 3 * PAGE)
    assert memory_of(14) == (0, 0)  # it has ended


def test_the_sum_over_trainers_of_two_machines_has_every_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two machines with two trainers and a server each; every machine has a /proc of its own."""
    total = np.zeros((6, 3))
    for rank in range(4):
        proc = tmp_path / str(rank)
        monkeypatch.setattr(psutil, "PROCFS_PATH", str(proc))
        add(proc, os.getpid(), 100 + rank, 50)
        add(proc, 70000000, 20 + rank, 10, **server(rank // 2))
        usage = ProcessUsage(World(rank, 4, rank % 2, 2, launched=True, job="j"), 1)
        total += usage.measure(1000 + rank)
    names = ("machine", "memory_bytes", "shared_bytes", "bytes_sent")
    expected = {f"trainer {n}": (n // 2, (100 + n) * PAGE, 50 * PAGE, 1000 + n) for n in range(4)}
    expected |= {f"server {n}": (n, (20 + 2 * n) * PAGE, 10 * PAGE) for n in range(2)}
    assert usage.describe(total) == {name: dict(zip(names, numbers)) for name, numbers in expected.items()}
