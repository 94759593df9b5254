"""The launcher's folder as a store: through a real node program, and what it refuses."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dglkge.distributed.lease import LAUNCHER, Lease, LeaseTaker, new_nonce
from dglkge.launch.background import wait
from dglkge.launch.process_plan import TRAINER
from dglkge.launch.remote import file_transfer
from dglkge.launch.remote.connection import Events, NodeConnection
from dglkge.launch.remote.protocol import Call
from dglkge.launch.remote.run_store import RunFolder
from tests.launch.conftest import outcome, planned_process

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


def run_trainer(
    session: NodeConnection, folder: Path, script: str, environment=VARIABLES, head: str = HEAD
) -> str:
    """Run a script as the writer of a machine; return what it printed once it has ended well."""
    events = Events()
    code = f"import sys; sys.argv.append({str(folder)!r})\n{head}{script}"
    planned = planned_process(TRAINER, 0, "here", code, environment)
    (process,) = wait(session.start([planned], str(folder), events))
    output = outcome(process, events).decode()
    assert process.status == 0, output
    return output


def test_files_go_to_the_launcher_and_back_whole(session, lease, tmp_path):
    run, machine = tmp_path / "a run", tmp_path / "machine"
    machine.mkdir()
    content = os.urandom(5500)
    (machine / "part.h5").write_bytes(content)
    (machine / "empty").write_bytes(b"")
    session.store = RunFolder(run, lease).answer
    out = run_trainer(
        session,
        machine,
        """
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
""",
    )
    lines = out.splitlines()
    assert "('checkpoint/v1/empty', 0), ('checkpoint/v1/names.json', 6000)" in lines[0]
    assert "('checkpoint/v1/part.h5', 5500)" in lines[0] and lines[0].endswith(f":{run}")
    assert lines[1:] == [f"FileNotFoundError: [Errno 2] {os.strerror(errno.ENOENT)}"] * 3
    assert (run / "checkpoint" / "v1" / "part.h5").read_bytes() == content
    assert (machine / "again.h5").read_bytes() == content
    assert (run / "checkpoint" / "latest").resolve() == run / "checkpoint" / "v1"
    assert not (run / "checkpoint" / "v2").exists() and not list(run.rglob("*.tmp"))


def test_a_machine_that_has_the_launchers_folder_sends_nothing(session, lease, tmp_path):
    run = tmp_path / "a run"
    (run / "checkpoint").mkdir()
    (run / "checkpoint" / "part.h5").write_bytes(b"rows")
    session.store = RunFolder(run, lease).answer
    out = run_trainer(
        session,
        run,
        """
store.upload(here / "checkpoint" / "part.h5", "checkpoint/part.h5")
store.copy("checkpoint/part.h5", "checkpoint/part.h5")
print(store.num_bytes, store.read("checkpoint/part.h5"))
""",
    )
    assert out == "0 b'rows'\n"


@pytest.mark.parametrize("name", ["../x", "/etc/x", "lease.json", "out/x", "a/../../x"])
def test_a_machine_writes_nowhere_else(lease, tmp_path, name):
    (tmp_path / "a run" / "out").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    before = (tmp_path / "a run" / "lease.json").read_bytes()
    answer = RunFolder(tmp_path / "a run", lease).answer
    arguments = {"name": name, "token": new_nonce(), "start": 0, "is_last": True}
    reply = answer(Call("put", arguments, b"x"))
    assert reply.error is not None and reply.is_input and repr(name) in reply.error
    assert not list((tmp_path / "elsewhere").iterdir()) and not (tmp_path / "x").exists()
    assert (tmp_path / "a run" / "lease.json").read_bytes() == before


def test_what_is_no_request_is_answered(lease, tmp_path):
    for task, arguments in (("format", {}), ("get", {"name": "x"}), ("sizes", {"folder": 3})):
        reply = RunFolder(tmp_path / "a run", lease).answer(Call(task, arguments))
        assert reply.error.startswith(f"{task} failed: ")


def test_a_launcher_that_has_lost_its_lease_writes_nothing(lease, tmp_path):
    run = tmp_path / "a run"
    folder = RunFolder(run, lease)
    arguments = {"name": "stats.jsonl", "token": new_nonce(), "start": 0, "is_last": True}
    assert folder.answer(Call("put", arguments, b"mine")).error is None
    (run / "lease.json").unlink()
    other = LeaseTaker(run, new_nonce(), "other job", LAUNCHER).take()
    for task, more in (("put", arguments), ("remove", {"name": "stats.jsonl"})):
        reply = folder.answer(Call(task, more, b"theirs" if task == "put" else b""))
        assert "this job has lost its lease" in reply.error
    assert (run / "stats.jsonl").read_bytes() == b"mine"
    other.release()


def test_a_full_disk_is_reported_with_its_number(lease, tmp_path, monkeypatch):
    """The trainer takes it for what its own disk would have said."""

    def full(path, mode):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(file_transfer, "open", full, raising=False)
    arguments = {"name": "x", "token": new_nonce(), "start": 0, "is_last": False}
    reply = RunFolder(tmp_path / "a run", lease).answer(Call("put", arguments, b"x"))
    assert (reply.value, reply.error) == (errno.ENOSPC, os.strerror(errno.ENOSPC))


NO_STORE = HEAD.replace("store = LauncherStore", "# LauncherStore")
OPEN = "print(error_of(LauncherStore, here))"


def test_processes_that_have_no_store(session, tmp_path):
    """Only the trainer that writes its machine's parts has a socket, and the launcher may hold no store."""
    out = run_trainer(session, tmp_path, OPEN, head=NO_STORE)
    assert out == "CheckpointError: this job's launcher holds no store\n"
    out = run_trainer(session, tmp_path, OPEN, {**VARIABLES, "LOCAL_RANK": "1"}, NO_STORE)
    assert out.startswith("InputError: DGLKGE_OWN_DISKS is set, but dglkge-launch --sync did not start this")
