"""Which copy of a run counts: by where it came from, never by its number alone."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from dglkge.checkpoint import CheckpointManager, open_checkpoint
from dglkge.checkpoint.lineage import RunCopy, copy_from_dict, copy_to_dict
from dglkge.checkpoint.storage import read_copy
from dglkge.distributed.lease import LEASE_FILE, hold
from dglkge.errors import InputError
from dglkge.launch.remote import run_copies
from dglkge.launch.remote.run_copies import (
    ORIGIN_FILE,
    Candidate,
    choose_copy,
    describe_copy,
    drop_hold,
    hold_version,
    note_origin,
)
from dglkge.typing import RELATION
from tests.checkpoint.toy_checkpoint import cut, toy_meta, toy_names, toy_tables

META = toy_meta()


@pytest.fixture(autouse=True)
def no_wait_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def job(run: Path, num_versions: int, seed: int = 1, keep: str = "") -> RunCopy:
    """Add versions to a run, as one job."""
    manager = CheckpointManager(run / "checkpoint", 0, True, lambda: None, toy_names(META))
    for number in range(num_versions):
        tables = toy_tables(META, seed + number)
        parts = [cut("person", tables["person"], 1)[0]]
        manager.save(parts, cut(RELATION, tables[RELATION], 1)[0], META, {keep: {}} if keep else None)
    return read_copy(run)


def copied(run: Path, name: str) -> Path:
    """Copy a run's folder."""
    target = run.with_name(name)
    shutil.copytree(run, target, symlinks=True)
    return target


def candidates(launcher: Path, *machines: Path, brought: bool = False):
    there = {f"10.0.0.{number}": run for number, run in enumerate(machines, 1)}
    return (
        Candidate("here", read_copy(launcher)),
        {address: Candidate(f"{address}:RUN", read_copy(run), brought) for address, run in there.items()},
    )


def test_a_run_keeps_its_name_and_its_jobs(tmp_path):
    run = tmp_path / "run"
    first, second = job(run, 3), job(run, 2)
    assert (second.version, second.run_id) == (5, first.run_id) and second.problem == ""
    assert [(one.first, one.last) for one in second.lineage] == [(1, 3), (4, 5)]
    assert second.continues(first) and not first.continues(second) and first.continues(RunCopy())
    assert copy_from_dict(copy_to_dict(second)) == second
    assert job(tmp_path / "other", 1).run_id != first.run_id
    assert "version 5 of run" in second.describe() and "1 to 3 by job" in second.describe()


def test_the_newest_copy_of_one_history_counts_wherever_it_is(tmp_path):
    """Another machine was the first before, and the launcher was killed early."""
    run = tmp_path / "run"
    job(run, 2)
    old = copied(run, "old")
    job(run, 28)
    assert choose_copy(*candidates(old, old, run)) == "10.0.0.2"
    assert choose_copy(*candidates(old, run, old)) == "10.0.0.1"
    assert choose_copy(*candidates(run, old, old)) is None
    assert choose_copy(*candidates(run, run, run)) is None
    nothing = tmp_path / "nothing"
    assert choose_copy(*candidates(nothing, nothing, nothing)) is None
    assert choose_copy(*candidates(nothing, nothing, run)) == "10.0.0.2"


def test_different_histories_are_refused_and_both_are_shown(tmp_path):
    run = tmp_path / "run"
    job(run, 2)
    other = copied(run, "other")
    mine, theirs = job(run, 5, seed=3), job(other, 2, seed=20)
    foreign = tmp_path / "foreign"
    job(foreign, 30)
    for place in (other, foreign):
        with pytest.raises(InputError) as refused:
            choose_copy(*candidates(run, run, place))
        text = str(refused.value)
        assert "the copies of the run have different histories, and neither goes on from the other" in text
        assert mine.describe() in text and read_copy(place).describe() in text and "10.0.0.2:RUN" in text
        assert "\n" not in text
    assert theirs.version == 4


def test_a_copy_of_a_later_version_of_the_same_job_is_no_ancestor(tmp_path):
    """Version 7 of a job that was given up, and version 7 of the one that went on from version 6."""
    run = tmp_path / "run"
    job(run, 1)
    manager = CheckpointManager(run / "checkpoint", 0, True, lambda: None, toy_names(META))
    tables = toy_tables(META, 9)
    parts = ([cut("person", tables["person"], 1)[0]], cut(RELATION, tables[RELATION], 1)[0], META)
    manager.save(*parts)
    before = copied(run, "before")
    manager.save(*parts)
    given_up = copied(run, "given_up")
    went_on = job(before, 2)
    assert not went_on.continues(read_copy(given_up))
    with pytest.raises(InputError, match="different histories"):
        choose_copy(*candidates(before, given_up))


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (
            lambda folder: (folder / "checkpoint_version.txt").write_text(""),
            "checkpoint_version.txt is empty",
        ),
        (lambda folder: (folder / "checkpoint_version.txt").write_text("9" * 5000), "reads '9999"),
        (lambda folder: (folder / "checkpoint_version.txt").unlink(), "checkpoint_version.txt is missing"),
        (lambda folder: (folder / "v2" / "manifest.json").unlink(), "v2/manifest.json is missing"),
        (lambda folder: os.truncate(folder / "v2" / "manifest.json", 100), "manifest.json: not a manifest"),
        (lambda folder: os.truncate(folder / "v2" / "model.v2.h5", 9), "is damaged: it has 9 bytes"),
        (lambda folder: (folder / "v2" / "model.v2.h5").unlink(), "model.v2.h5 is missing"),
    ],
)
def test_a_damaged_copy_is_an_error_whatever_the_others_hold(tmp_path, damage, named):
    run = tmp_path / "run"
    job(run, 1)
    old = copied(run, "old")
    job(run, 1)
    damage(run / "checkpoint")
    for places in ((old, run), (run, old)):
        with pytest.raises(InputError, match=rf"is damaged: .*{named}") as refused:
            choose_copy(*candidates(*places))
        assert "nothing was changed. Whole copies: " in str(refused.value)
        assert "version 1 of run" in str(refused.value)


def test_a_run_that_was_removed_here_does_not_come_back(tmp_path):
    """A machine notes that the launcher had it; a launcher that never had it takes it."""
    run = tmp_path / "run"
    job(run, 3)
    note_origin(str(run), "host:/runs/one")
    note_origin(str(run), "host:/runs/one")
    found = describe_copy(str(run), "host:/runs/one", "job")
    assert found["was_fetched"] and copy_from_dict(found["copy"]) == read_copy(run)
    assert not describe_copy(str(run), "host:/runs/two", "job")["was_fetched"]
    nothing = tmp_path / "nothing"
    with pytest.raises(
        InputError, match="the run was removed from here, and is still on machines"
    ) as refused:
        choose_copy(*candidates(nothing, nothing, run, brought=True))
    assert "10.0.0.2:RUN has version 3 of run" in str(refused.value)
    shutil.rmtree(run / "checkpoint")
    job(run, 1)
    assert not describe_copy(str(run), "host:/runs/one", "job")["was_fetched"]  # another run


def test_a_folder_that_is_written_to_is_no_copy(tmp_path):
    with hold(tmp_path, "trainer"):
        with pytest.raises(InputError, match=r"is in use: another job writes there, trainer \(pid"):
            describe_copy(str(tmp_path), "here", "job")
    assert describe_copy(str(tmp_path), "here", "job")["copy"]["version"] == 0


def test_a_version_is_held_while_the_job_goes_on(tmp_path):
    run = tmp_path / "run"
    first = job(run, 2, keep="epoch_1")
    (run / "stats.jsonl").write_text("one\n")
    (run / LEASE_FILE).write_text("{}")
    (run / ORIGIN_FILE).write_text("{}")
    (run / "checkpoint" / "v3").mkdir()
    (run / "checkpoint" / "v3" / "model.v3.h5").write_text("not complete yet")
    (run / "checkpoint" / "config.json.0123456789abcdef.tmp").write_text("half")
    hold_folder = hold_version(str(run), known="")
    shutil.rmtree(run / "checkpoint" / "v3")
    job(run, 1)
    held = Path(hold_folder)
    assert read_copy(held) == first
    open_checkpoint(held).verify()
    open_checkpoint(held / "checkpoint" / "epoch_1").verify()
    assert sorted(path.name for path in held.iterdir()) == ["checkpoint", "stats.jsonl"]
    names = {path.name for path in (held / "checkpoint").iterdir()}
    assert "epoch_1" in names and "v3" not in names and not [name for name in names if name.endswith(".tmp")]
    assert hold_version(str(run), known=read_copy(run).checksum) is None
    drop_hold(hold_folder)
    assert not held.exists()


def test_a_version_that_is_dropped_while_it_is_held_is_tried_again(tmp_path, monkeypatch):
    run = tmp_path / "run"
    job(run, 1)
    real, calls = run_copies._link_version, []

    def link(folder, target, version, deadline):
        calls.append(version)
        if len(calls) < 3:
            job(run, 1)
        real(folder, target, version, deadline)

    monkeypatch.setattr(run_copies, "_link_version", link)
    held = hold_version(str(run), known="")
    assert calls == [1, 2, 3] and read_copy(Path(held)).version == 3


def test_a_hold_without_hard_links_is_copied_in_slices(tmp_path, monkeypatch):
    """Each call ends in bounded time and the next goes on, also within a file."""
    run = tmp_path / "run"
    first = job(run, 2, keep="epoch_1")
    (run / "stats.jsonl").write_text("one\n")

    def no_links(source, target):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    monkeypatch.setattr(run_copies, "COPY_BLOCK_BYTES", 4096)
    sizes = []
    while isinstance(found := hold_version(str(run), known="", seconds=0.0), dict):
        sizes.append(found["copied_bytes"])
        assert read_copy(Path(run, run_copies.HOLD_FOLDER)).version == 0  # nothing counts before all is there
    assert len(sizes) > 3 and sizes == sorted(set(sizes))
    assert read_copy(Path(found)) == first
    open_checkpoint(found).verify()
    assert not list(Path(found).rglob("*.tmp"))


def test_a_hold_in_slices_begins_anew_for_a_newer_version(tmp_path, monkeypatch):
    run = tmp_path / "run"
    job(run, 1)

    def no_links(source, target):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    assert isinstance(hold_version(str(run), known="", seconds=0.0), dict)
    newest = job(run, 1)
    found = hold_version(str(run), known="")
    assert read_copy(Path(found)) == newest
    assert not [name for name in os.listdir(Path(found) / "checkpoint") if ".v1." in name]
