"""Files to a machine and back, over a node program: each in one step, unchanged ones not again."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path

import pytest

from dglkge.checkpoint.layout import temporary_file
from dglkge.distributed.lease import new_nonce
from dglkge.errors import InputError
from dglkge.launch.background import wait
from dglkge.launch.remote import file_transfer
from dglkge.launch.remote.connection import NodeConnection
from tests.launch.conftest import TIMEOUT_SECONDS

ODD_NAMES = ("a b", "it's", "$x; `id`", "-C", "deep/er/file", "new\nline", "é", "@file")


@pytest.fixture
def session(shared_session: NodeConnection) -> NodeConnection:
    return shared_session


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


def test_there_and_back(session: NodeConnection, here: Path, tmp_path: Path) -> None:
    """Every name, byte, mode and time arrives; what has not changed is not sent again."""
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
    """A machine keeps what a writer renames, links, and a pipe, on which a reader would wait for ever.

    Of the launcher's links the content is sent: the machine may not have what they lead to.
    """
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
    """The next copy removes those to which nothing was written for long, and no other's."""
    there, old = tmp_path / "there", time.time() - file_transfer.ABANDONED_SECONDS - 1
    there.mkdir()
    names = [temporary_file("x", new_nonce()), temporary_file("y", new_nonce()), "z.tmp"]
    for name in names:
        (there / name).touch()
    for name in (names[0], names[2]):
        os.utime(there / name, (old, old))
    send(session, here, there)
    assert {path.name for path in there.glob("*.tmp")} == set(names[1:])


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


def test_what_cannot_be_copied(session: NodeConnection, here: Path, tmp_path: Path) -> None:
    """A missing file and a folder that cannot be made: named, and nothing is left."""
    with pytest.raises(InputError, match="cannot send .*absent: there is no such file"):
        send(session, here, tmp_path, "absent")
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"cannot write .*file/there/a b: Not a directory"):
        send(session, here, tmp_path / "file" / "there", "a b")
    back = tmp_path / "back"
    back.mkdir()
    (back / "deep").write_text("in the way")
    with pytest.raises(
        InputError, match=rf"^cannot write {back}/deep/er/file: (File exists|Not a directory)$"
    ):
        fetch(session, here, back)
    assert not list(back.rglob("*.tmp"))


@pytest.mark.parametrize("stuck", ["send_block", "take_block"])
def test_a_blocked_disk_does_not_hold_the_launcher(session, tmp_path, monkeypatch, stuck) -> None:
    """A block that does not move is given up, whether it is read here or written."""
    blocked = threading.Event().wait
    monkeypatch.setattr(file_transfer, "STALL_SECONDS", 1.0)
    monkeypatch.setitem(file_transfer.TASKS, stuck, lambda *_, **__: blocked(TIMEOUT_SECONDS))
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "large").write_bytes(b"x" * 3_000_000)
    with pytest.raises(InputError, match=r"copied from or to here: nothing moved for 1 s; is a disk blocked"):
        (send if stuck == "send_block" else fetch)(session, tmp_path / "here", tmp_path / "there")
    assert not list((tmp_path / "there").glob("large"))


def test_a_machine_that_names_a_file_elsewhere(session: NodeConnection, here: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "back").mkdir()
    (tmp_path / "back" / "deep").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="leads out of"):
        fetch(session, here, tmp_path / "back")
    assert not list((tmp_path / "elsewhere").iterdir())
