"""One job at a time writes to a run's folder, however the one before has ended."""

from __future__ import annotations

import dataclasses
import errno
import multiprocessing
import os
import signal
import time
import zlib
from pathlib import Path
from unittest.mock import Mock

import pytest

from dglkge.distributed import lease as leases
from dglkge.distributed.lease import LEASE_FILE, Holder, LeaseTaker, hold, new_nonce
from dglkge.distributed.runtime import Cluster
from dglkge.distributed.world import World
from dglkge.errors import CheckpointError, NotReadyError, StorageError
from dglkge.training.state import hold_run

FORK = multiprocessing.get_context("fork")
LIMIT_SECONDS = 60


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("GRACE", 0.2), ("EXPIRY", 1.0), ("RENEW", 0.1), ("POLL", 0.01)):
        monkeypatch.setattr(leases, f"{name}_SECONDS", seconds)


def taker(folder: Path, **options: str) -> LeaseTaker:
    return LeaseTaker(folder, new_nonce(), **options)


def write_holder(folder: Path, **changes: object) -> Holder:
    holder = dataclasses.replace(Holder.this_process(new_nonce(), "", "trainer"), **changes)
    (folder / LEASE_FILE).write_bytes(holder.to_bytes())
    return holder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_second_job_is_refused_in_one_line_and_may_come_later(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "one"
    first = taker(folder).take()
    words = rf"^{folder} is in use: another job writes there, trainer \(pid {os.getpid()}\) on .* since 20.*"
    with pytest.raises(CheckpointError, match=f"{words}wait for it, end it, or take another output folder"):
        taker(folder).take()
    assert names(folder) == [LEASE_FILE]
    before, deadline = (folder / LEASE_FILE).read_bytes(), time.monotonic() + LIMIT_SECONDS
    while (folder / LEASE_FILE).read_bytes() == before:  # it is renewed
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert len((folder / LEASE_FILE).read_bytes()) == len(before)
    first.check()
    first.release()
    assert names(folder) == []
    taker(folder).take().release()


def take_and_sleep(folder: Path, ready) -> None:
    taker(folder).take()
    ready.set()
    time.sleep(LIMIT_SECONDS)


def test_the_lease_of_a_killed_process_is_taken_over_and_that_of_a_stopped_one_is_not(tmp_path: Path) -> None:
    ready = FORK.Event()
    process = FORK.Process(target=take_and_sleep, args=(tmp_path, ready))
    process.start()
    try:
        assert ready.wait(LIMIT_SECONDS)
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(CheckpointError, match=rf"trainer \(pid {process.pid}\)"):
            taker(tmp_path).take()
    finally:
        process.kill()
        process.join()
    mine = taker(tmp_path).attempt(0.0)  # at once
    assert mine is not None and names(tmp_path) == [LEASE_FILE]
    mine.release()


def test_neither_a_reused_pid_nor_an_earlier_attempt_of_the_same_launcher_is_waited_for(tmp_path):
    for changes, job in (({"start_time": 1}, ""), ({"host": "elsewhere", "job": "a"}, "a")):
        write_holder(tmp_path, **changes)
        mine = taker(tmp_path, job=job).attempt(0.0)
        assert mine is not None
        mine.release()


def test_the_lease_of_another_host_expires_unless_it_is_renewed(tmp_path: Path, caplog) -> None:
    """Its pid means nothing here, its clock is not looked at, and it may be unreadable between two steps."""
    for content in (b'{"nonce"', write_holder(tmp_path, host="elsewhere", renewed_ns=2**62).to_bytes()):
        (tmp_path / LEASE_FILE).write_bytes(content)
        waiting = taker(tmp_path)
        assert waiting.attempt(0.1) is None
        mine = waiting.take()
        assert mine.is_holder
        mine.release()
    assert "is held by trainer (pid " in caplog.text and "on elsewhere" in caplog.text
    holder = write_holder(tmp_path, host="elsewhere")
    waiting = taker(tmp_path)
    assert waiting.attempt(0.05) is None
    renewed = dataclasses.replace(holder, renewed_ns=holder.renewed_ns + 1)
    (tmp_path / LEASE_FILE).write_bytes(renewed.to_bytes())
    with pytest.raises(CheckpointError, match="is in use: another job writes there, .* on elsewhere since"):
        waiting.take()


def test_a_job_that_lost_its_lease_may_not_publish(tmp_path: Path) -> None:
    mine = taker(tmp_path).take()
    other = write_holder(tmp_path, host="elsewhere", pid=77)
    with pytest.raises(CheckpointError, match=r"has lost its lease on .*: it is held by trainer \(pid 77\)"):
        mine.check()
    mine.release()
    assert Holder.from_bytes((tmp_path / LEASE_FILE).read_bytes()) == other
    (tmp_path / LEASE_FILE).unlink()
    with pytest.raises(CheckpointError, match="has lost its lease on .*: it is gone"):
        mine.check()


def test_a_job_shares_its_lease(tmp_path: Path) -> None:
    nonce = new_nonce()
    first, second = (LeaseTaker(tmp_path, nonce).take() for _ in range(2))
    assert (first.is_holder, second.is_holder) == (True, False)
    for lease in (second, first):
        lease.check()
        lease.release()
    assert names(tmp_path) == []
    launcher = taker(tmp_path, job="a", role="launcher").take()
    shared = taker(tmp_path, job="a").take()
    assert not shared.is_holder and shared.nonce != launcher.nonce
    shared.check()
    with pytest.raises(CheckpointError, match="is in use: another job writes there, launcher"):
        taker(tmp_path, job="b").take()
    launcher.release()


def race(folder: Path, start, winners) -> None:
    waiting = taker(folder)
    start.wait(LIMIT_SECONDS)
    try:
        lease = waiting.take()
        lease.check()
        winners.put(os.getpid())
        time.sleep(1.0)
        lease.check()
    except CheckpointError:
        return


@pytest.mark.parametrize("is_stale", [False, True])
def test_of_several_takers_one_wins(tmp_path: Path, is_stale: bool) -> None:
    if is_stale:
        write_holder(tmp_path, start_time=1)
    start, winners = FORK.Event(), FORK.Queue()
    processes = [FORK.Process(target=race, args=(tmp_path, start, winners)) for _ in range(8)]
    for process in processes:
        process.start()
    start.set()
    for process in processes:
        process.join(LIMIT_SECONDS)
    assert [process.exitcode for process in processes] == [0] * 8
    winners.get(timeout=LIMIT_SECONDS)
    assert winners.empty() and names(tmp_path) == [LEASE_FILE]


def test_a_process_that_died_while_it_broke_a_lease_is_no_obstacle(tmp_path: Path) -> None:
    write_holder(tmp_path, start_time=1)
    dead = (tmp_path / LEASE_FILE).read_bytes()
    died = dataclasses.replace(Holder.this_process(new_nonce(), "", "trainer"), start_time=2)
    (tmp_path / f"{LEASE_FILE}.{zlib.crc32(dead):08x}.broken").write_bytes(died.to_bytes())
    assert taker(tmp_path).take().is_holder
    assert names(tmp_path) == [LEASE_FILE]


def test_without_hard_links_the_lease_is_created_alone(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(os, "link", Mock(side_effect=PermissionError(1, "Operation not permitted")))
    first = taker(tmp_path).take()
    with pytest.raises(CheckpointError, match="is in use"):
        taker(tmp_path).take()
    first.release()


@pytest.mark.parametrize("number, kind", [(errno.ENOSPC, StorageError), (errno.EROFS, CheckpointError)])
def test_a_full_disk_is_no_bad_input(tmp_path: Path, monkeypatch, number: int, kind: type) -> None:
    """With status 2 a restart that meets a full disk would be the last."""
    monkeypatch.setattr(Path, "write_bytes", Mock(side_effect=OSError(number, os.strerror(number))))
    message = f"^cannot write to {tmp_path}: {os.strerror(number)}$"
    with pytest.raises(kind, match=message):
        taker(tmp_path).attempt(0)
    with pytest.raises(NotReadyError if kind is StorageError else CheckpointError, match=message):
        taker(tmp_path).take()
    with pytest.raises(kind, match=message):
        hold_run(tmp_path, Cluster(World(), graph=None))


def test_a_lease_is_kept_while_a_version_is_written(tmp_path: Path) -> None:
    """An exception ends the main thread; the version that is being written still counts."""
    mine, is_busy = taker(tmp_path).take(), Mock(return_value=True)
    mine.keep_while(is_busy)
    mine.release()
    mine.check()
    is_busy.return_value = False
    mine.release()
    assert names(tmp_path) == []


def test_some_work_holds_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot write to .*file/run: Not a directory"):
        taker(tmp_path / "file" / "run").take()
    (tmp_path / "file").unlink()
    with hold(tmp_path, "a conversion"):
        with pytest.raises(CheckpointError, match="a conversion"):
            taker(tmp_path).take()
    assert names(tmp_path) == []
