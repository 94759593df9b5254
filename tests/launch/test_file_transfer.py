"""Files to a machine and back, over a node program: each in one step, unchanged ones not again."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from dglkge.checkpoint.layout import temporary_file
from dglkge.distributed.lease import LAUNCHER, Lease, LeaseTaker, new_nonce
from dglkge.errors import InputError
from dglkge.launch.background import wait
from dglkge.launch.process_plan import TRAINER
from dglkge.launch.remote import file_transfer
from dglkge.launch.remote.connection import Events, NodeConnection
from dglkge.launch.remote.protocol import Call, Reply
from dglkge.launch.remote.run_store import RunFolder
from tests.launch.conftest import TIMEOUT_SECONDS, node_program, outcome, planned_process

ODD_NAMES = ("a b", "it's", "$x; `id`", "-C", "deep/er/file", "new\nline", "é", "@file")


@pytest.fixture(scope="module")
def session() -> Iterator[NodeConnection]:
    with node_program() as opened:
        yield opened


@pytest.fixture
def here(tmp_path: Path) -> Path:
    folder = tmp_path / "he re"
    for name in ODD_NAMES:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return folder


def send(session: NodeConnection, here: Path, there: Path, *names: str) -> int:
    names = names or tuple(contents(here))
    return wait(file_transfer.copy_files(session, str(here), str(there), names))


def fetch(session: NodeConnection, there: Path, here: Path) -> int:
    return wait(file_transfer.copy_files(session, str(here), str(there)))


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in file_transfer.file_names(str(folder))}


def test_machines_are_copied_from_side_by_side(session: NodeConnection, tmp_path: Path) -> None:
    """Also files of one name: the last one stays, whole."""
    for machine in "ab":
        (tmp_path / machine).mkdir()
        (tmp_path / machine / f"{machine}.log").write_text(machine)
        (tmp_path / machine / "both.log").write_bytes(machine.encode() * 3_000_000)

    async def both() -> None:
        folders = [str(tmp_path / name) for name in ("a", "b")]
        copies = (file_transfer.copy_files(session, str(tmp_path / "back"), folder) for folder in folders)
        await asyncio.gather(*copies)

    wait(both())
    copied = contents(tmp_path / "back")
    assert sorted(copied) == ["a.log", "b.log", "both.log"]
    assert copied["both.log"] in (b"a" * 3_000_000, b"b" * 3_000_000)


def test_there_and_back(session: NodeConnection, here: Path, tmp_path: Path) -> None:
    there, back = tmp_path / "there", tmp_path / "back"
    for name, size in {"empty": 0, "blocks": (9 << 20) + 5, "one block": 4 << 20}.items():
        (here / name).write_bytes(os.urandom(size))
    (here / "blocks").chmod(0o750)
    os.utime(here / "blocks", (1_000_000_000, 1_000_000_000))
    assert send(session, here, there) == len(ODD_NAMES) + 3
    assert contents(there) == contents(here)
    assert send(session, here, there) == 0
    (here / "a b").write_text("longer")
    assert send(session, here, there) == 1

    assert fetch(session, there, back) == len(ODD_NAMES) + 3
    assert contents(back) == contents(here)
    status = (back / "blocks").stat()
    assert (status.st_mode & 0o777, status.st_mtime) == (0o750, 1_000_000_000)
    assert fetch(session, there, back) == 0
    assert send(session, here, Path(f"{here}/../{here.name}")) == fetch(session, here, here) == 0
    assert not list(tmp_path.rglob("*.tmp"))


def test_links_pipes_and_unfinished_files(session: NodeConnection, tmp_path: Path) -> None:
    there, back, again = (tmp_path / name for name in ("there", "back", "again"))
    (there / "deep.tmp").mkdir(parents=True)
    for name in ("trackers.json", "trackers.json.106.tmp", "deep.tmp/whole", "deep.tmp/part.h5.tmp"):
        (there / name).write_text(name)
    (there / "link").symlink_to("trackers.json")
    (there / "folder").symlink_to("deep.tmp")
    os.mkfifo(there / "pipe")
    assert fetch(session, there, back) == 2
    assert sorted(contents(back)) == ["deep.tmp/whole", "trackers.json"]
    names = list(file_transfer.file_names(str(there), follow_links=True))
    assert {"folder/whole", "link"} <= set(names)
    assert send(session, there, again, "folder/whole") == 1
    assert contents(again) == {"folder/whole": b"deep.tmp/whole"}


def test_records_of_one_second_and_size_are_sent(session: NodeConnection, tmp_path: Path) -> None:
    """Two versions of metrics.json may differ in a digit only."""
    there, back, again = (tmp_path / name for name in ("there", "back", "again"))
    there.mkdir()
    for mrr in ("0.25", "0.31"):
        (there / "metrics.json").write_text(mrr)
        os.utime(there / "metrics.json", (1_000_000_000, 1_000_000_000))
        assert fetch(session, there, back) == send(session, there, again) == 1
        assert (back / "metrics.json").read_text() == (again / "metrics.json").read_text() == mrr
        assert fetch(session, there, back) == 0


def test_unfinished_files_of_a_broken_copy_go(session: NodeConnection, here: Path, tmp_path: Path) -> None:
    there, old = tmp_path / "there", time.time() - file_transfer.ABANDONED_SECONDS - 1
    there.mkdir()
    names = [temporary_file("x", new_nonce()), temporary_file("y", new_nonce()), "z.tmp"]
    for name in names:
        (there / name).touch()
    for name in (names[0], names[2]):
        os.utime(there / name, (old, old))
    send(session, here, there)
    assert {path.name for path in there.glob("*.tmp")} == set(names[1:])


def test_what_cannot_be_copied(session: NodeConnection, here: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot send .*absent: there is no such file"):
        send(session, here, tmp_path, "absent")
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"cannot write .*file/there/a b: Not a directory"):
        send(session, here, tmp_path / "file" / "there", "a b")
    back = tmp_path / "back"
    back.mkdir()
    (back / "deep").write_text("in the way")
    with pytest.raises(InputError, match=rf"^cannot write {back}/deep/er/file: (File exi|Not a dir)"):
        fetch(session, here, back)
    assert not list(back.rglob("*.tmp"))


@pytest.mark.parametrize("stuck", ["send_block", "take_block"])
def test_a_blocked_disk_does_not_hold_the_launcher(session, tmp_path, monkeypatch, stuck) -> None:
    blocked = threading.Event().wait
    monkeypatch.setattr(file_transfer, "STALL_SECONDS", 1.0)
    monkeypatch.setitem(file_transfer.TASKS, stuck, lambda *_, **__: blocked(TIMEOUT_SECONDS))
    (tmp_path / "large").write_bytes(b"x" * 3_000_000)
    with pytest.raises(InputError, match=r"copied from or to here: nothing moved for 1 s; is a disk blocked"):
        (send if stuck == "send_block" else fetch)(session, tmp_path, tmp_path / "there")
    assert not list((tmp_path / "there").glob("large"))


def test_a_machine_that_names_a_file_elsewhere(session: NodeConnection, here: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "back").mkdir()
    (tmp_path / "back" / "deep").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="leads out of"):
        fetch(session, here, tmp_path / "back")
    assert not list((tmp_path / "elsewhere").iterdir())


VARIABLES = {"DGLKGE_OWN_DISKS": "1", "LOCAL_RANK": "0"}
HEAD = """
import errno, os, sys
from pathlib import Path
from dglkge.errors import DglkgeError
from dglkge.launch.remote import run_store
from dglkge.launch.remote.run_store import LauncherStore
run_store.BLOCK_BYTES = 1000
here = Path(sys.argv[1])
store = LauncherStore(here)

def error_of(work, *arguments):
    try:
        work(*arguments)
    except (DglkgeError, OSError) as error:
        return f"{type(error).__name__}: {error}"
"""


@pytest.fixture
def lease(tmp_path: Path) -> Iterator[Lease]:
    taken = LeaseTaker(tmp_path / "a run", new_nonce(), "job", LAUNCHER).take()
    yield taken
    taken.release()


def run_trainer(session: NodeConnection, folder: Path, script: str, environment=VARIABLES, head=HEAD) -> str:
    """Run a script as the writer of a machine; return what it printed once it has ended well."""
    events = Events()
    code = f"import sys; sys.argv.append({str(folder)!r})\n{head}{script}"
    planned = planned_process(TRAINER, 0, "here", code, environment)
    (process,) = wait(session.start([planned], str(folder), events))
    output = outcome(process, events).decode()
    assert process.status == 0, output
    return output


def test_files_go_to_the_launcher_and_back_whole(session, lease, tmp_path, monkeypatch):
    run, machine = tmp_path / "a run", tmp_path / "machine"
    machine.mkdir()
    content = os.urandom(5500)
    (machine / "part.h5").write_bytes(content)
    (machine / "empty").touch()
    monkeypatch.setattr(session, "store", RunFolder(run, lease).answer)
    script = """
store.upload(here / "part.h5", "checkpoint/v1/part.h5")
store.upload(here / "empty", "checkpoint/v1/empty")
store.write("checkpoint/v1/names.json", b"[1]" * 2000)
store.write("checkpoint/checkpoint_version.txt", b"1\\n")
store.copy("checkpoint/v1/names.json", "checkpoint/v2/names.json")
store.download("checkpoint/v1/part.h5", here / "again.h5")
assert store.read("checkpoint/v1/names.json") == b"[1]" * 2000 and store.read("checkpoint/v1/empty") == b""
print(sorted(store.sizes("checkpoint").items()), store.num_bytes, store.url)
store.remove("checkpoint/v2/names.json")
for work, name in ((store.read, "none"), (store.remove, "none"), (lambda n: store.copy(n, "x"), "none")):
    print(error_of(work, name))
"""
    lines = run_trainer(session, machine, script).splitlines()
    assert "('checkpoint/v1/empty', 0), ('checkpoint/v1/names.json', 6000)" in lines[0]
    assert "('checkpoint/v1/part.h5', 5500)" in lines[0] and lines[0].endswith(f":{run}")
    assert lines[1:] == [f"FileNotFoundError: [Errno 2] {os.strerror(errno.ENOENT)}"] * 3
    assert (run / "checkpoint" / "v1" / "part.h5").read_bytes() == content
    assert (machine / "again.h5").read_bytes() == content
    assert (run / "checkpoint" / "latest").resolve() == run / "checkpoint" / "v1"
    assert not (run / "checkpoint" / "v2").exists() and not list(run.rglob("*.tmp"))


def test_a_machine_that_has_the_launchers_folder_sends_nothing(session, lease, tmp_path, monkeypatch):
    run = tmp_path / "a run"
    (run / "checkpoint").mkdir()
    (run / "checkpoint" / "part.h5").write_bytes(b"rows")
    monkeypatch.setattr(session, "store", RunFolder(run, lease).answer)
    script = """
store.upload(here / "checkpoint" / "part.h5", "checkpoint/part.h5")
store.copy("checkpoint/part.h5", "checkpoint/part.h5")
print(store.num_bytes, store.read("checkpoint/part.h5"))
"""
    assert run_trainer(session, run, script) == "0 b'rows'\n"


@pytest.fixture
def put(lease: Lease, tmp_path: Path) -> Callable[..., Reply]:
    """Ask the store of the run's folder to write a file in one piece."""
    folder = RunFolder(tmp_path / "a run", lease)
    arguments = {"token": new_nonce(), "start": 0, "is_last": True}
    return lambda name: folder.answer(Call("put", {"name": name, **arguments}, b"x"))


@pytest.mark.parametrize("name", ["../x", "/etc/x", "lease.json", "out/x", "a/../../x"])
def test_a_machine_writes_nowhere_else(put, tmp_path, name):
    (tmp_path / "a run" / "out").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    before = (tmp_path / "a run" / "lease.json").read_bytes()
    reply = put(name)
    assert reply.error is not None and reply.is_input and repr(name) in reply.error
    assert not list((tmp_path / "elsewhere").iterdir()) and not (tmp_path / "x").exists()
    assert (tmp_path / "a run" / "lease.json").read_bytes() == before


def test_a_launcher_that_has_lost_its_lease_writes_nothing(put, lease, tmp_path):
    run = tmp_path / "a run"
    assert put("stats.jsonl").error is None
    (run / "lease.json").unlink()
    other = LeaseTaker(run, new_nonce(), "other job", LAUNCHER).take()
    remove = RunFolder(run, lease).answer(Call("remove", {"name": "stats.jsonl"}))
    for reply in (put("other.jsonl"), remove):
        assert "this job has lost its lease" in reply.error
    assert (run / "stats.jsonl").exists() and not (run / "other.jsonl").exists()
    other.release()


def test_a_full_disk_is_reported_with_its_number(put, monkeypatch):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(file_transfer, "open", Mock(side_effect=full), raising=False)
    reply = put("x")
    assert (reply.value, reply.error) == (errno.ENOSPC, f"put failed: {os.strerror(errno.ENOSPC)}")


NO_STORE = HEAD.replace("store = LauncherStore", "# LauncherStore")
OPEN = "print(error_of(LauncherStore, here))"


def test_processes_that_have_no_store(session, tmp_path):
    """Only the trainer that writes its machine's parts has a socket, and the launcher may hold no store."""
    out = run_trainer(session, tmp_path, OPEN, head=NO_STORE)
    assert out == "CheckpointError: this job's launcher holds no store\n"
    out = run_trainer(session, tmp_path, OPEN, {**VARIABLES, "LOCAL_RANK": "1"}, NO_STORE)
    assert out.startswith("InputError: DGLKGE_OWN_DISKS is set, but dglkge-launch --sync did not start this")
