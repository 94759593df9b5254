"""The run's copy at a URL: order of writes, resuming elsewhere, reading, damage and lost connections."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
import time
import urllib.request
import uuid
from pathlib import Path
from unittest import mock

import pytest
import torch

from dglkge.checkpoint import mirror as mirror_module
from dglkge.checkpoint.layout import LOCK_FILE
from dglkge.checkpoint.manager import CheckpointManager
from dglkge.checkpoint.manifest import check_same_run
from dglkge.checkpoint.mirror import Mirror, local_path
from dglkge.checkpoint.reader import open_checkpoint
from dglkge.checkpoint.storage import CheckpointStorage
from dglkge.checkpoint.stores import STORES, FileStore, PatientStore, is_url, open_store
from dglkge.cli.main import main
from dglkge.errors import CheckpointError, InputError, StorageError
from dglkge.file_lock import try_lock
from tests.checkpoint.toy_checkpoint import META, flip, same, save_seed, toy_meta, toy_tables
from tests.training.toy_trainer import ToyRun


@pytest.fixture
def run(tmp_path):
    return tmp_path / "a"


@pytest.fixture
def url(tmp_path):
    """The URL of a folder that is not there yet."""
    return f"file://{tmp_path}/bucket/run"


@pytest.fixture(params=["file", "memory"])
def any_url(request, url):
    """A URL with nothing behind it yet, of each store that needs no server."""
    if request.param == "file":
        yield url
    else:
        fsspec = pytest.importorskip("fsspec")
        yield f"memory://{uuid.uuid4().hex}/run"
        fsspec.filesystem("memory").store.clear()


@pytest.fixture(autouse=True)
def home_and_no_pauses(tmp_path, monkeypatch):
    """A home folder of the test's own, for the cache of downloads; few attempts without waiting."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    monkeypatch.setattr("dglkge.checkpoint.stores.FIRST_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr("dglkge.checkpoint.stores.RETRY_SECONDS", 0.05)


def commit(folder: Path, mirror: Mirror | None, seed: int = 0, *kept: str) -> torch.Tensor:
    """Save one more version, as the job that has the URL if there is one; return the rows of people."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    save_seed(folder / "checkpoint", seed, *kept, num_parts=2, mirror=mirror)
    return toy_tables(META, seed)["person"].rows


def same_run(saved) -> None:
    """Refuse another run, as a trainer does."""
    check_same_run(saved, META)


def started(folder: Path, url: str, **options: bool) -> Mirror:
    """Start a job that takes a URL, and bring the folder to its version."""
    mirror = Mirror(open_store(url), folder, **options)
    mirror.fill(mirror.take(same_run), may_upload=True)
    return mirror


def pushed(folder: Path, url: str, seed: int = 0, *kept: str) -> Mirror:
    mirror = started(folder, url)
    commit(folder, mirror, seed, *kept)
    return mirror


def rows_of(path) -> torch.Tensor:
    return open_checkpoint(path, verify=True)["person"][:]


def names_at(url: str) -> set[str]:
    return set(open_store(url).sizes(""))


def test_a_fresh_machine_goes_on_from_the_url(tmp_path, run, any_url):
    first = commit(run, None)  # without a URL
    storage = CheckpointStorage(run / "checkpoint")
    storage.keep(storage.stored(1), "best", {"score": 0.5})
    second = commit(run, None, 2)
    started(run, any_url)
    for at_url in (f"{any_url}/checkpoint/best", f"{any_url}/checkpoint/v1"):
        assert same(rows_of(at_url), first)
    assert same(open_checkpoint(any_url, version=1)["person"][:], first)
    with pytest.raises(CheckpointError, match=r"v7/manifest.json is missing"):
        open_checkpoint(any_url, version=7)
    with pytest.raises(CheckpointError, match="has no kept version 'epoch_7'"):
        open_checkpoint(f"{any_url}/checkpoint/epoch_7")
    other = started(tmp_path / "b", any_url)
    assert same(rows_of(tmp_path / "b"), second)
    other.bring("best")
    assert same(rows_of(tmp_path / "b" / "checkpoint" / "best"), first)
    assert (tmp_path / "b" / "config.json").read_text() == "{}"
    # It is a whole run: the next version is saved on top of it, and published at the URL.
    newer = commit(tmp_path / "b", other, 1)
    assert CheckpointStorage(tmp_path / "b" / "checkpoint").named_version() == 3
    assert same(rows_of(local_path(any_url)), newer)
    assert {name.split("/")[1] for name in names_at(any_url) if "/v" in name} == {"v1", "v3"}


def test_reading_by_url_downloads_a_version_once(tmp_path, run):
    """Also of a run in a folder that begins with checkpoint, from whatever folder of it is named."""
    url = f"file://{tmp_path}/checkpoints/mine"
    pushed(run, url)
    assert same(rows_of(url), rows_of(run))
    real = FileStore.download
    with mock.patch.object(FileStore, "download", autospec=True, side_effect=real) as download:
        assert same(rows_of(url + "/checkpoint"), rows_of(run))
    names = {call.args[1] for call in download.call_args_list}
    assert names == {"config.json", "checkpoint/v1/training_stats.json"}  # which may have changed
    for place in (url + "/checkpoint/v1", url + "/"):
        assert same(rows_of(place), rows_of(run))


def test_killed_during_any_write_the_version_before_counts(tmp_path, monkeypatch):
    """The store ends in the middle of each object in turn, and does not write atomically."""
    writes = []

    class Killed(BaseException):
        """Stands for SIGKILL."""

    def torn(real):
        def write(self, source, target):
            name, content = (target, source.read_bytes()) if isinstance(source, Path) else (source, target)
            writes.append(name)
            if len(writes) == stop_at:
                path = folder / "bucket" / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content[: len(content) // 2])
                raise Killed
            return real(self, source, target)

        return write

    for stop_at in range(1, 100):
        folder = tmp_path / str(stop_at)
        url = f"file://{folder}/bucket"
        mirror = pushed(folder / "a", url)
        first, second = rows_of(folder / "a"), toy_tables(META, 1)["person"].rows
        writes.clear()
        with monkeypatch.context() as patch:
            patch.setattr(FileStore, "upload", torn(FileStore.upload))
            patch.setattr(FileStore, "write", torn(FileStore.write))
            with contextlib.suppress(Killed):
                commit(folder / "a", mirror, 1)
        read, is_whole = rows_of(url), len(writes) < stop_at
        assert same(read, second) or (same(read, first) and not is_whole)
        # The next job of the same machine goes on from there.
        again = started(folder / "a", url)
        assert same(rows_of(folder / "a"), read)
        commit(folder / "a", again, 1)
        assert same(rows_of(url), second)
        if is_whole:
            break
    # Parts, then the manifest, then the pointer.
    parts = [number for number, name in enumerate(writes) if name.endswith(".h5")]
    assert len(parts) == 3 and max(parts) < writes.index("checkpoint/v2/manifest.json")
    assert writes[-1] == "checkpoint/checkpoint_version.txt" and len(writes) > 10


def test_the_best_is_at_the_url_at_once(run, url):
    """Were the job killed then, the next one would not rank that version again."""
    manager = CheckpointManager(run / "checkpoint", mirror=pushed(run, url))
    assert manager.keep_best(0.5, {})
    assert open_checkpoint(url + "/checkpoint/best").version == 1


def test_a_damaged_run_is_not_uploaded(run, url):
    commit(run, None)
    flip(run / "checkpoint" / "v1" / "embeddings_person_0.v1.h5", 2500)
    words = "no version of this run; .*_0.v1.h5 is damaged: its checksum.* anew"
    with pytest.raises(CheckpointError, match=words):
        started(run, url)
    assert "checkpoint/checkpoint_version.txt" not in names_at(url)


def test_two_histories_are_refused(tmp_path, run, url):
    pushed(run, url)
    commit(tmp_path / "b", None, 1)
    words = f"^{tmp_path}/b on .* has version 1 of run .*, which does not go on from it: move"
    with pytest.raises(CheckpointError, match=words):
        started(tmp_path / "b", url)
    assert same(rows_of(url), rows_of(run))


def test_a_job_that_is_replaced_publishes_nothing(tmp_path, run, url, monkeypatch):
    """Also if it happens during an upload."""
    mirror = pushed(run, url)
    rows, real = rows_of(url), FileStore.upload

    def upload(self, path, name):
        real(self, path, name)
        if name.endswith("model.v2.h5"):
            Mirror(open_store(url), tmp_path / "b").take(same_run)

    monkeypatch.setattr(FileStore, "upload", upload)
    with pytest.raises(CheckpointError, match="was taken over by job [0-9a-f]{8} on .*no longer writes"):
        commit(run, mirror, 1)
    assert same(rows_of(url), rows)
    with pytest.raises(CheckpointError, match="was taken over by job"):
        commit(run, mirror, 1)
    assert "checkpoint/v2/manifest.json" not in names_at(url)


def test_a_damaged_folder_is_filled_again(run, url):
    pushed(run, url)
    rows, folder = rows_of(run), run / "checkpoint"
    (folder / "v1" / "model.v1.h5").write_bytes(b"cut off")
    flip(folder / "v1" / "embeddings_person_0.v1.h5", 2500)
    mirror = started(run, url)
    assert same(rows_of(run), rows)
    commit(run, mirror, 1)
    flip(folder / "v2" / "manifest.json")
    with pytest.raises(CheckpointError, match="manifest.json: .*damaged.*; move .* away"):
        started(run, url)


def test_a_damaged_object_is_named(tmp_path, run, url):
    pushed(run, url)
    path = tmp_path / "bucket" / "run" / "checkpoint" / "v1" / "model.v1.h5"
    for damage, words in [
        (flip, "model.v1.h5 is damaged: its checksum is not the one in the"),
        (Path.unlink, "model.v1.h5 is missing"),
        (lambda path: shutil.rmtree(tmp_path / "bucket"), "holds no checkpoint: no version of it was ever"),
    ]:
        damage(path)
        with pytest.raises(CheckpointError, match=words):
            open_checkpoint(url)


def test_attempts_are_bounded(monkeypatch):
    """The clock moves with the pauses."""
    monkeypatch.setattr("dglkge.checkpoint.stores.FIRST_PAUSE_SECONDS", 1.0)
    now, pauses = [100.0], []
    monkeypatch.setattr("dglkge.checkpoint.stores.time.monotonic", lambda: now[0])

    def pause(seconds):
        pauses.append(seconds)
        now[0] += seconds

    monkeypatch.setattr("dglkge.checkpoint.stores.time.sleep", pause)
    store = PatientStore(FileStore("file:///run"), 80)
    for error, kind, words in [
        (ConnectionResetError("hung up"), StorageError, "^cannot read file:///run/x for 80 s: hung up$"),
        (PermissionError("not yours"), CheckpointError, "cannot read file:///run/x: not yours"),
    ]:
        monkeypatch.setattr(FileStore, "read", mock.Mock(side_effect=error))
        with pytest.raises(kind, match=words), store.committing():
            store.read("x")
        assert pauses == [1, 2, 4, 8, 16, 30, 19]  # the last attempt is at the limit


def test_a_commit_waits_for_a_store_that_is_out_of_reach(run, url, monkeypatch, caplog):
    """Each request fails for a while, far longer than a reader's may; at the limit the job ends."""
    mirror = pushed(run, url)
    mirror._store.commit_seconds = 30.0
    real, failed_at, outage_seconds = FileStore.upload, {}, 0.1

    def upload(self, path, name):
        if time.monotonic() < failed_at.setdefault(name, time.monotonic()) + outage_seconds:
            time.sleep(0.01)
            raise ConnectionError("no route to host")
        real(self, path, name)

    monkeypatch.setattr(FileStore, "upload", upload)
    before = mirror.progress
    newer = commit(run, mirror, 1)
    assert same(rows_of(url), newer) and mirror.progress > before
    assert "v2.h5: no route to host; it is tried again for 30 s" in caplog.text
    mirror._store.commit_seconds, outage_seconds = 0.05, 3600.0
    with pytest.raises(StorageError, match="cannot write file:.*for 0.05 s: no route to host"):
        commit(run, mirror, 2)
    assert same(rows_of(url), newer)


def test_unknown_schemes_and_absent_packages_are_named(monkeypatch):
    assert {"file", "memory", "s3", "gs", "az", "abfs", "hdfs", "sftp"} == set(STORES)
    assert not is_url("runs/demo") and not is_url(Path("s3://x"))
    with pytest.raises(InputError, match="unknown scheme of a URL 's4'; known: 'abfs', 'az', .*'sftp'"):
        open_store("s4://bucket/run")
    with pytest.raises(InputError, match="is no URL; expected scheme://"):
        open_store("file:run/x")
    for package in ("s3fs", "fsspec"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InputError, match=r"s3:// needs s3fs: pip install 'dglkge\[storage\]'"):
        open_store("s3://bucket/run")


def test_registered_schemes_are_used(tmp_path, run):
    class Vault(FileStore):
        def __init__(self, url):
            super().__init__("file:" + url.partition(":")[2])
            self.url = url

    STORES.register("vault")(Vault)
    try:
        pushed(run, f"vault://{tmp_path}/bucket/run")
        assert same(rows_of(tmp_path / "bucket" / "run"), rows_of(run))
    finally:
        del STORES._members["vault"]


def test_another_process_that_downloads_is_waited_for(run, url, monkeypatch):
    pushed(run, url)
    monkeypatch.setattr(mirror_module, "LOCK_SECONDS", 0.0)
    with open(Path(local_path(url)) / LOCK_FILE, "w") as lock:
        assert try_lock(lock)
        with pytest.raises(StorageError, match="another process has been downloading"):
            local_path(url)


def test_a_run_may_have_its_rows_at_the_url_only(tmp_path, any_url):
    def trained(name, epochs):
        mirror = started(tmp_path / name, any_url, keeps_files=False) if name != "c" else None
        run = ToyRun(tmp_path / name, f"training.num_epochs={epochs}", mirror=mirror)
        run.train(epochs)
        run.cluster.leave()
        return run

    trained("a", 2)
    assert not list((tmp_path / "a").rglob("*.h5"))
    trained("a", 3)
    last = trained("b", 4)  # another machine, whose folder is empty
    assert {epoch for epoch, _ in last.trained} == {3}
    assert not list(tmp_path.glob("[ab]/**/*.h5"))
    assert same(trained("c", 4).tables["person"].rows, last.tables["person"].rows)
    assert open_checkpoint(any_url, verify=True).meta.progress["finished_epochs"] == 4


@pytest.fixture
def s3_url(monkeypatch):
    """A URL of an S3 server on loopback, with the bucket ``kge``."""
    for package in ("s3fs", "flask"):
        pytest.importorskip(package)
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        endpoint = "http://{}:{}".format(*server.get_host_and_port())
        urllib.request.urlopen(urllib.request.Request(f"{endpoint}/kge", method="PUT"), timeout=60).close()
        for name, value in {"ACCESS_KEY_ID": "x", "SECRET_ACCESS_KEY": "y", "ENDPOINT_URL": endpoint}.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        yield f"s3://kge/{uuid.uuid4().hex}"
    finally:
        server.stop()


def test_s3(tmp_path, run, s3_url, monkeypatch, capsys):
    newer = commit(run, pushed(run, s3_url), 1)
    assert same(rows_of(s3_url), newer)
    assert not [name for name in names_at(s3_url) if "/v1/" in name]
    started(tmp_path / "b", s3_url)
    assert same(rows_of(tmp_path / "b"), newer)
    assert main(["inspect", s3_url, "--json"]) == 0
    assert '"version": 2' in capsys.readouterr().out
    with pytest.raises(CheckpointError, match="cannot write s3://no-such-bucket-here/run/writer.json"):
        pushed(run, "s3://no-such-bucket-here/run")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    pytest.importorskip("s3fs").S3FileSystem.clear_instance_cache()
    assert main(["inspect", s3_url]) == 1
    assert "for 0.05 s: Could not connect" in capsys.readouterr().err


def test_a_manifest_that_cannot_be_read_is_no_empty_url(tmp_path, run, url):
    """The next job began at epoch 0 and removed the run."""
    pushed(run, url)
    flip(tmp_path / "bucket" / "run" / "checkpoint" / "v1" / "manifest.json")
    bucket = tmp_path / "bucket"
    before = {path: path.read_bytes() for path in bucket.rglob("*") if path.is_file()}
    with pytest.raises(CheckpointError, match="v1/manifest.json"):
        Mirror(open_store(url), tmp_path / "b").take(same_run)
    assert {path: path.read_bytes() for path in bucket.rglob("*") if path.is_file()} == before


def test_a_refused_start_takes_nothing(tmp_path, run, url):
    """A start with another dimension ended the job that trained."""
    mirror = pushed(run, url)
    with pytest.raises(CheckpointError, match="has dim 6, this run has 7"):
        Mirror(open_store(url), tmp_path / "b").take(lambda saved: check_same_run(saved, toy_meta(dim=7)))
    newer = commit(run, mirror, 1)
    assert same(rows_of(url), newer)


def test_a_version_that_is_committed_during_a_takeover_stays(tmp_path, run, url):
    """It is what the new job goes on from; before, the job removed it."""
    mirror = pushed(run, url)
    other = Mirror(open_store(url), tmp_path / "b")
    # After the first look, before the URL is taken.
    other.fill(other.take(lambda meta: commit(run, mirror, 1)))
    newer = toy_tables(META, 1)["person"].rows
    assert same(rows_of(tmp_path / "b"), newer) and same(rows_of(url), newer)


def test_versions_that_were_not_read_are_not_removed(tmp_path, run, url):
    """Of another run, or with a manifest that cannot be read."""
    mirror = pushed(run, url)
    folder = tmp_path / "bucket" / "run" / "checkpoint"
    shutil.copytree(folder / "v1", folder / "v0")
    flip(folder / "v0" / "manifest.json")
    commit(run, mirror, 1)
    assert {path.name for path in folder.glob("v*")} >= {"v0", "v2"}
    assert same(rows_of(url), rows_of(run))


def test_a_listing_that_fails_once_removes_no_kept_version(run, url, monkeypatch):
    """A folder that cannot be read is not an empty one, whichever listing of a commit fails."""
    mirror = pushed(run, url, 0, "epoch_1")
    real, bucket, listings = os.scandir, url.removeprefix("file://"), []

    def scandir(path="."):
        if str(path).startswith(bucket):
            listings.append(path)
            if len(listings) == failing:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    for failing in range(1, 20):
        listings.clear()
        commit(run, mirror, failing)
        assert mirror.versions() == [1, failing + 1] and mirror.read_pointer("epoch_1")["version"] == 1
    assert len(listings) < failing  # each was the one that failed


def test_the_cache_of_a_url_repairs_itself(run, url):
    """After a flipped bit in the cache, and after another run has taken the place at the URL."""
    mirror = pushed(run, url)
    for seed in (1, 2, 3):
        commit(run, mirror, seed)
    rows = rows_of(url)
    for path in (Path(local_path(url)) / "checkpoint" / "v4").glob("*[!s].[jh]*"):
        flip(path)
        assert same(rows_of(url), rows)
    for name in names_at(url):
        open_store(url).remove(name)
    shutil.rmtree(run)
    pushed(run, url, seed=5)
    assert same(rows_of(url), rows_of(run)) and not same(rows_of(url), rows)
