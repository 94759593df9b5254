"""What can go wrong with a checkpoint, and what the next start does: the table in docs/checkpoints.md."""

from __future__ import annotations

import errno
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path
from unittest import mock

import pytest

from dglkge.checkpoint import part_files
from dglkge.checkpoint import storage as storage_module
from dglkge.checkpoint.manager import CheckpointManager, TrainerGroup, fall_back
from dglkge.checkpoint.reader import open_checkpoint
from dglkge.checkpoint.storage import CheckpointStorage
from dglkge.cli.main import main
from dglkge.errors import CheckpointError, StorageError
from dglkge.typing import RELATION
from tests.checkpoint import toy_checkpoint as toy
from tests.checkpoint.toy_checkpoint import META
from tests.toy_kg import REPOSITORY

DOCUMENT = REPOSITORY / "docs" / "checkpoints.md"
EMBEDDINGS = "v2/embeddings_person_0.v2.h5"
TABLES = {seed: toy.toy_tables(META, seed) for seed in (1, 2, 3, 4)}
FORK = multiprocessing.get_context("fork")
LIMIT_SECONDS = 60


def run(target, *arguments):
    process = FORK.Process(target=target, args=arguments)
    process.start()
    process.join(LIMIT_SECONDS)
    if process.is_alive():
        process.kill()
        process.join()
        pytest.fail("a save hung")
    return process.exitcode


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A checkpoint at version 2, of which version 1 is kept."""
    path = tmp_path_factory.mktemp("start") / "checkpoint"
    toy.save_seed(path, 1, "epoch_1")
    toy.save_seed(path, 2)
    return path


def next_start(path: Path) -> str:
    """Do what a run does when it starts, without and with the fallback; say what happened."""
    before = sorted(path.glob("*"))
    try:
        if CheckpointManager(path).latest() is None:
            return "starts anew"
        parts = toy.whole_part(TABLES[4], "person"), toy.whole_part(TABLES[4], RELATION)
        CheckpointManager(path).restore(parts)
        return f"goes on from version {toy.holds(path, TABLES)}"
    except CheckpointError as error:
        named = re.search(rf"{path}/(?:v\d+/)?([\w.]+)", str(error))[1]
        assert "newest good version" in str(error) or "its checksum is not" in str(error)
        assert sorted(path.glob("*")) == before
    good = fall_back(CheckpointStorage(path), toy.toy_names(META))
    toy.holds(path, TABLES)
    assert toy.save_seed(path, 3) == good + 1
    toy.holds(path, {good + 1: TABLES[3]})
    return f"error that names {named}; with the fallback goes on from version {good}"


FOREIGN = ("notes.txt", "mine.tmp", "vocabulary/file", "v7.old/file")


def foreign(path: Path) -> None:
    for name in FOREIGN:
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).touch()


def exchange_lines(path: Path) -> None:
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[1], lines[0], *lines[2:]]))


def write_version(content: bytes):
    return lambda path: (path / "checkpoint_version.txt").write_bytes(content)


DAMAGES = {
    "version file empty": write_version(b""),
    "version file garbled": write_version(b"\xff\x00"),
    "version file gone": lambda path: (path / "checkpoint_version.txt").unlink(),
    "version file names a version that is not there": write_version(b"9\n"),
    "rows cut off": lambda path: os.truncate(path / EMBEDDINGS, 2000),
    "rows gone": lambda path: (path / EMBEDDINGS).unlink(),
    "one bit of the rows flipped": lambda path: toy.flip(path / EMBEDDINGS, 2500),
    "one bit of the relations flipped": lambda path: toy.flip(path / "v2" / "model.v2.h5", 2500),
    "one bit of the manifest flipped": lambda path: toy.flip(path / "v2" / "manifest.json", 200),
    "manifest gone": lambda path: (path / "v2" / "manifest.json").unlink(),
    "one bit of config.json flipped": lambda path: toy.flip(path / "v2" / "config.json", 200),
    "two lines of a vocabulary exchanged": lambda path: exchange_lines(path / "v2" / "vocabulary_person.txt"),
    "names of entities gone": lambda path: (path / "v2" / "entity_names_person_0.json").unlink(),
    "files of another project beside it": foreign,
}


def documented(fault: str) -> str:
    rows = [line.strip("| \n").split(" | ") for line in DOCUMENT.read_text(encoding="utf-8").splitlines()]
    return next((row[1].strip() for row in rows if len(row) == 2 and row[0].strip() == fault), "nothing")


def hold(fault: str, outcome: str) -> None:
    print(f"| {fault} | {outcome} |")
    assert documented(fault) == outcome


@pytest.mark.parametrize("fault", DAMAGES)
def test_damage(start, tmp_path, fault):
    path = tmp_path / "checkpoint"
    shutil.copytree(start, path, symlinks=True)
    DAMAGES[fault](path)
    hold(fault, next_start(path))


def test_a_folder_of_another_project(tmp_path):
    foreign(tmp_path)
    hold("a folder of another project, no checkpoint", next_start(tmp_path))
    assert [toy.save_seed(tmp_path, seed) for seed in (1, 2)] == [1, 2]
    assert sorted(path.name for path in tmp_path.glob("v*[0-9]")) == ["v2"]
    assert all((tmp_path / name).is_file() for name in FOREIGN)


def save_and_die(path, version, step):
    """Save a version, kept by its number, and end by SIGKILL before the step of that number."""
    done = 0

    def deadly(function):
        def wrapped(*arguments, **options):
            nonlocal done
            done += 1
            if done == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return wrapped

    for name in ("pwrite", "replace", "fsync", "mkdir", "symlink", "link", "unlink", "rmdir"):
        setattr(os, name, deadly(getattr(os, name)))
    part_files.fill_rows = deadly(part_files.fill_rows)
    toy.save_seed(path, version, f"epoch_{version}", num_parts=2, cut_seed=version)


@pytest.mark.parametrize("saved", [1, 3])
def test_kill_at_every_step(start, tmp_path, saved):
    """Of the first save before every other step. Of a later one, where one part becomes two: before each."""
    versions = []
    for step in range(1, 1000, 1 if saved == 3 else 2):
        path = tmp_path / "checkpoint"
        shutil.rmtree(path, ignore_errors=True)
        if saved == 3:
            shutil.copytree(start, path, symlinks=True)
        exit_code = run(save_and_die, path, saved, step)
        outcome = next_start(path)
        version = 0 if outcome == "starts anew" and saved == 1 else int(outcome.split()[-1])
        assert not version or outcome == f"goes on from version {version}"
        if version:
            toy.names_are_right(open_checkpoint(path).folder)
        if exit_code == 0:
            break
        assert exit_code == -signal.SIGKILL
        versions.append(version)
        assert toy.save_seed(path, 4, "epoch_4") == version + 1
        toy.holds(path, {version + 1: TABLES[4]})
        toy.names_are_right(path / "latest")
        if saved == 3:
            toy.holds(path / "epoch_1", TABLES)
            toy.names_are_right(open_checkpoint(path / "epoch_1").folder)
        assert version < saved or open_checkpoint(path / f"epoch_{saved}").version == saved
        assert not list(path.rglob("*.tmp")) and not list(path.rglob("*.receipt.json"))
    assert len(versions) > (40 if saved == 3 else 10)
    assert versions == sorted(versions) and set(versions) == {saved - 1, saved}
    fault = "kill -9 before each step of saving version 3"
    assert saved == 1 or documented(fault) == "goes on from version 2 or 3, whichever is whole"


def save_as_one_of_two(path, rank, barrier, fatal_barrier):
    """Save as one of two machines; die at the given barrier instead of entering it."""
    entered = 0

    def wait():
        nonlocal entered
        entered += 1
        if entered == fatal_barrier:
            os.kill(os.getpid(), signal.SIGKILL)
        barrier.wait(LIMIT_SECONDS)

    manager = CheckpointManager(path, TrainerGroup(rank, barrier=wait), toy.toy_names(META), num_parts=2)
    parts = [toy.cut("person", TABLES[2]["person"], 2)[rank]]
    manager.save(parts, toy.whole_part(TABLES[2], RELATION) if rank == 0 else None, META)


@pytest.mark.parametrize("fatal_rank", [0, 1])
@pytest.mark.parametrize("fatal_barrier", [1, 2, 3, 4])
def test_kill_one_of_two_machines(tmp_path, fatal_rank, fatal_barrier):
    toy.save_seed(tmp_path, 1, num_parts=2)
    barrier = FORK.Barrier(2)
    machines = []
    for rank in (0, 1):
        arguments = (tmp_path, rank, barrier, fatal_barrier if rank == fatal_rank else 0)
        machines.append(FORK.Process(target=save_as_one_of_two, args=arguments))
        machines[rank].start()
    machines[fatal_rank].join(LIMIT_SECONDS)
    barrier.abort()  # what the launcher does when it sees the death
    machines[1 - fatal_rank].join(LIMIT_SECONDS)
    try:
        assert machines[fatal_rank].exitcode == -signal.SIGKILL
        assert machines[1 - fatal_rank].exitcode == 1
    finally:
        for machine in machines:
            machine.kill()
            machine.join()
    # Rank 0 publishes before it enters the fourth barrier; with fewer passed, nothing counts yet.
    version = toy.holds(tmp_path, TABLES)
    assert version == (2 if fatal_barrier == 4 else 1)
    assert toy.save_seed(tmp_path, 2, num_parts=3) == version + 1


def save_and_say(path, seed):
    """Save; end with 9 where the disk is full."""
    try:
        toy.save_seed(path, seed)
    except StorageError as error:
        os._exit(9 if "No space left" in str(error) or "cannot write" in str(error) else 1)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small tmpfs")
def test_a_full_disk(start, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(disk)]
    mounted = subprocess.run(mount, capture_output=True)
    if mounted.returncode:
        pytest.skip(f"this container may not mount a tmpfs: {mounted.stderr.decode().strip()}")
    try:
        path, filler = disk / "checkpoint", disk / "filler"
        shutil.copytree(start, path, symlinks=True)
        failed = 0
        for pages_left in range(12):
            free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
            filler.write_bytes(b"x" * max(0, free - 4096 * pages_left))
            exit_code = run(save_and_say, path, 3)
            assert exit_code in (0, 9)
            failed += exit_code == 9
            version = toy.holds(path, {2: TABLES[2], 3: TABLES[3]})
            filler.unlink()
            if exit_code == 0:
                break
            assert version == 2
        assert failed > 1
        assert toy.save_seed(path, 3) == version + 1
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)  # files of it are still mapped here
    hold("disk full", "the save fails with an error that names the file; goes on from version 2")


ADVICE = "the newest good version is 3: set checkpoint.fallback=true to go on from it"
TEXTS = [
    "checkpoint_version.txt", "config.json", "dynamic_rel_count.txt", "dynamic_rel_names.json",
    "entity_count_person_0.txt", "entity_count_person_1.txt", "entity_names_person_0.json",
    "entity_names_person_1.json", "vocabulary_person.txt",
]  # fmt: skip


def refused(path, text):
    """Check that reading, resuming and saving all refuse, with the same words."""
    manager = CheckpointManager(path)
    before = sorted(os.listdir(path))
    read, save = (lambda: open_checkpoint(path)), (lambda: toy.save_seed(path, 0))
    for action in (read, manager.latest, lambda: manager.restore([]), save):
        with pytest.raises(CheckpointError, match=re.escape(text)):
            action()
    assert sorted(os.listdir(path)) == before


@pytest.mark.parametrize(("content", "words"), [
    (b"9" * 5000, f"checkpoint_version.txt reads '{'9' * 40}'; expected one number; {ADVICE}"),
    # Nothing may be started anew over a version that is whole.
    (b"0\n", f"reads '0', but a newer version lies beside it; {ADVICE}"),
    (b"1\n", f"reads '1', but a newer version lies beside it; {ADVICE}"),
    (b"4\n", "v4/manifest.json is damaged: it describes version 3"),
], ids=["many digits", "before the first", "older", "renamed"])  # fmt: skip
def test_version_files_that_name_no_version(tmp_path, content, words):
    for seed in (1, 2, 3):
        toy.save_seed(tmp_path, seed, num_parts=2)
    (tmp_path / "checkpoint_version.txt").write_bytes(content)
    if content == b"4\n":
        (tmp_path / "v3").rename(tmp_path / "v4")
    refused(tmp_path, words)


def test_paths_that_are_no_folder(tmp_path):
    (tmp_path / "file").write_text("")
    for work, words in [
        (lambda: open_checkpoint(tmp_path / "nowhere"), "nowhere does not exist; expected the folder of a"),
        (lambda: open_checkpoint(tmp_path / "file"), "file is not a folder; expected the folder of a run"),
        (CheckpointManager(tmp_path / "file").latest, "file is not a folder"),
        (lambda: open_checkpoint(tmp_path), "holds no checkpoint: no version of it was ever completed"),
        (lambda: toy.save_seed(tmp_path / "file" / "x", 0), "cannot write to .*file/x: Not a directory"),
    ]:
        with pytest.raises(CheckpointError, match=words):
            work()
    assert CheckpointManager(tmp_path / "new").latest() is None


def test_a_disk_that_fails_to_read_is_damage_like_any_other(tmp_path, monkeypatch):
    """The error of the system ended the fallback, though an older version was whole."""
    for version in (1, 2):
        assert toy.save_seed(tmp_path, version, f"epoch_{version}") == version
    bad = tmp_path / EMBEDDINGS
    bad_place, real = os.stat(bad), storage_module.file_crc32

    def failing(file, *where):
        place = os.stat(file) if isinstance(file, os.PathLike) else os.fstat(file.fileno())
        if os.path.samestat(place, bad_place):
            raise OSError(errno.EIO, "Input/output error")
        return real(file, *where)

    monkeypatch.setattr(storage_module, "file_crc32", failing)
    with pytest.raises(CheckpointError, match=f"cannot read {re.escape(str(bad))}: Input/output error"):
        open_checkpoint(tmp_path).verify()
    CheckpointManager(tmp_path).fall_back()
    assert open_checkpoint(tmp_path).version == 1


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "checkpoint"
    toy.save_seed(path, 1, num_parts=2)
    return path


@pytest.fixture
def path(whole, tmp_path):
    """A copy of a checkpoint at version 1, of two parts."""
    return shutil.copytree(whole, tmp_path / "checkpoint")


def test_flips_are_refused(path, tmp_path, capsys):
    """In rows nothing but a checksum can find them: the numbers are other numbers."""
    similar = ["similar", str(path), "--entity"]
    of_texts = (["inspect", str(path), "--verify"], [*similar, "person-1"])
    predict = ["predict", str(path), "--head", "person-1", "--relation", "likes", "--known", "keep"]
    of_rows = (predict, ["export", str(path), "--format", "npy", "--output", str(tmp_path / "out")])
    places = [(name, place, of_texts) for name in TEXTS for place in (0, -1)]
    for name in ("embeddings_person_0", "embeddings_person_1", "model"):
        places.append((f"{name}.v1.h5", 3000, of_rows))
    for name, place, commands in places:
        toy.flip(path / "v1" / name, place)
        for command in commands:
            assert main(command) == 2
            error = capsys.readouterr().err
            assert error.count("\n") == 1 and f"{name} is damaged: its checksum is not the one" in error
        if name in TEXTS:
            with pytest.raises(CheckpointError, match=f"{name} is damaged: its checksum"):
                CheckpointManager(path).restore([])
        if name == "vocabulary_person.txt" and place == 0:
            assert main([*similar, "person-3", "--no-verify"]) == 0
        toy.flip(path / "v1" / name, place)
    assert main(of_texts[0]) == 0


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_that_is_gone_is_refused_and_the_fallback_writes_it_anew(path, name):
    text = path / "v1" / name
    content = text.read_bytes()
    text.unlink()
    advice = "the newest good version is 1: set checkpoint.fallback=true"
    with pytest.raises(CheckpointError, match=f"{name} is missing; {advice}"):
        open_checkpoint(path)
    text.write_bytes(b"x" * len(content))
    assert fall_back(CheckpointStorage(path), toy.toy_names(META)) == 1
    assert text.read_bytes() == content
    assert (path / "damaged_v1" / name).read_bytes() == b"x" * len(content)
    open_checkpoint(path).verify()


def inodes(folder):
    return {name: (folder / "latest" / name).stat().st_ino for name in TEXTS}


def test_texts_that_stay_the_same_are_not_written_again(tmp_path):
    numbers = []
    for cut_seed in (1, 1, 2):
        toy.save_seed(tmp_path, 0, num_parts=2, cut_seed=cut_seed)
        numbers.append(inodes(tmp_path))
    changed = [{name for name in TEXTS if old[name] != new[name]} for old, new in zip(numbers, numbers[1:])]
    # PyTorch-BigGraph writes into these two.
    assert changed[0] == {"checkpoint_version.txt", "config.json"}
    assert changed[1] == changed[0] | {name for name in TEXTS if name.startswith("entity_")}


def test_texts_are_copied_where_a_disk_has_no_hard_links(tmp_path, monkeypatch):
    toy.save_seed(tmp_path, 0, "epoch_1", num_parts=2)
    error = OSError(errno.EPERM, "Operation not permitted")
    monkeypatch.setattr(os, "link", mock.Mock(side_effect=error))
    before = inodes(tmp_path)
    toy.save_seed(tmp_path, 0, num_parts=2)
    assert not set(inodes(tmp_path).values()) & set(before.values())
    toy.names_are_right(tmp_path / "latest")
    for path in (tmp_path, tmp_path / "epoch_1"):
        open_checkpoint(path).verify()


@pytest.mark.parametrize("name", ["config.json", "entity_count_person_1.txt", "vocabulary_person.txt"])
def test_a_text_that_is_removed_while_a_run_trains_is_written_with_the_next_version(path, name):
    """Hours of training do not end for want of a file that the next version writes anyway."""
    content = (path / "v1" / name).read_bytes()
    (path / "v1" / name).unlink()
    assert toy.save_seed(path, 1, num_parts=2) == 2
    if name != "config.json":
        assert (path / "v2" / name).read_bytes() == content
    open_checkpoint(path).verify()
