"""One contract for every place of versions: the run's folder, a URL, the launcher's folder over a stream."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dglkge.checkpoint.layout import receipt_file, version_folder
from dglkge.checkpoint.manifest import FileEntry
from dglkge.checkpoint.mirror import Mirror
from dglkge.checkpoint.storage import CheckpointStorage, VersionStore
from dglkge.checkpoint.stores import Store, open_store
from dglkge.distributed.lease import LAUNCHER, LeaseTaker, new_nonce
from dglkge.launch.background import in_thread, wait
from dglkge.launch.remote.protocol import STORE_VARIABLE, Call, Peer, Reply
from dglkge.launch.remote.run_store import LauncherStore, RunFolder
from tests.checkpoint.toy_checkpoint import save_seed


def serve(name: str, answer: Callable[[Call], Reply]) -> None:
    """Answer the requests of trainers, as a node program and the launcher behind it do."""

    async def answer_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await Peer((reader, writer)).serve(lambda call: in_thread(answer, call), {})
        writer.close()

    wait(asyncio.start_unix_server(answer_one, path=f"\0{name}"))


@pytest.fixture(params=["folder", "file", "memory", "launcher"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch) -> Iterator[VersionStore]:
    """Each place in turn, with nothing in it yet; the run's folder on this machine is ``run``."""
    run, away = tmp_path / "run", tmp_path / "away"
    run.mkdir()
    if request.param == "folder":
        yield CheckpointStorage(run / "checkpoint")
        return
    lease, store = None, None
    if request.param == "launcher":
        lease = LeaseTaker(away, new_nonce(), "job", LAUNCHER).take()
        name = new_nonce()
        serve(name, RunFolder(away, lease).answer)
        monkeypatch.setenv(STORE_VARIABLE, name)
        store: Store = LauncherStore(run)
    elif request.param == "memory":
        pytest.importorskip("fsspec")
        store = open_store(f"memory://{uuid.uuid4().hex}/run")
    else:
        store = open_store(f"file://{away}")
    mirror = Mirror(store, run)
    mirror.fill(mirror.take(lambda meta: None))
    yield mirror
    if lease is not None:
        lease.release()


def save(place: VersionStore, run: Path, seed: int, *kept: str) -> None:
    """Save a version of two parts, kept under some names."""
    mirror = place if isinstance(place, Mirror) else None
    save_seed(run / "checkpoint", seed, *kept, num_parts=2, mirror=mirror)


def test_versions_stay_that_a_pointer_names(place, tmp_path, caplog):
    """Pointers are there with their version; while one is damaged nothing is removed."""
    for seed in range(4):
        save(place, tmp_path / "run", seed, *(["epoch_1"] if seed == 1 else []))
        assert "epoch_1" in place.pointers() or seed < 1
    assert place.versions() == [2, 4]
    assert place.read_pointer("epoch_1") == {"version": 2, "checksum": place.stored(2).checksum}
    assert [name.replace(".v2.", ".v4.") for name in place.names("v2")] == place.names("v4")
    place.write_json("best", {"version": 2})
    save(place, tmp_path / "run", 4)
    assert place.versions() == [2, 4, 5] and "a pointer to one is damaged" in caplog.text
    place.write_json("best", {"version": 4, "checksum": place.stored(4).checksum})
    save(place, tmp_path / "run", 5, "epoch_1")
    assert place.read_pointer("epoch_1")["version"] == 6
    assert place.versions() == [4, 6]


def test_receipts_of_this_job_count(place, tmp_path):
    """Not those of another job, nor one that is not there whole."""
    folder = CheckpointStorage(tmp_path / "run" / "checkpoint").folder(1)
    folder.make()
    entries = [FileEntry(f"part_{number}.h5", "person", number, 3, 4, 5, 6, {}) for number in range(3)]
    for entry in entries:
        (folder.path / entry.name).write_bytes(b"rows")
    names = [entry.name for entry in entries]
    assert place.read_receipts(1, names) == {}
    for entry in entries:
        place.add_part(1, entry)
    assert place.read_receipts(1, names) == {entry.name: entry for entry in entries}
    place.write_json(f"{version_folder(1)}/{receipt_file(names[0])}", {"nonce": new_nonce()})
    torn = f"{version_folder(1)}/{receipt_file(names[1])}"
    place.write(torn, place.read(torn)[:-9])
    assert list(place.read_receipts(1, names)) == names[2:]
