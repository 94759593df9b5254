"""A disk that is full, and outputs that cannot be written: one line, and nothing is left."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

import faults
from dglkge.data.dataset import Dataset
from dglkge.partition import make_dataset
from tests.partition_tools.conftest import run_script

NUM_TRIPLES = 20_000
SPLIT_KIB = NUM_TRIPLES * 24 // 1024


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """Triples of 4,000 entities: 469 KiB as a split, 1.3 MiB as a partitioned graph."""
    rng = np.random.default_rng(0)
    heads, tails = rng.integers(4000, size=(2, NUM_TRIPLES))
    relations = rng.integers(20, size=NUM_TRIPLES)
    path = tmp_path_factory.mktemp("source") / "train.tsv"
    path.write_text("".join(f"e{h}\tr{r}\te{t}\n" for h, r, t in zip(heads, relations, tails)))
    return path


@pytest.fixture
def small_disk(tmp_path):
    with contextlib.ExitStack() as disks:

        def mount(kib: int) -> Path:
            disk = disks.enter_context(faults.small_disk(tmp_path / f"disk-{kib}", kib * 1024))
            if not disk.is_mount():
                pytest.skip("only root can mount a small tmpfs, and not in every container")
            return disk

        yield mount


def run(*arguments, **options):
    return run_script(*arguments, "--split", "1", **options)


@pytest.mark.parametrize("kib", [40, SPLIT_KIB * 3 // 4, 850, 1100])
def test_full_disk(kib, source, small_disk):
    """Temporary ids, vocabularies, splits, DGL's files and the edge tables: wherever it happens."""
    disk = small_disk(kib)
    done = run("--input", source, "--output", disk / "out", "--num-parts", "2", "--method", "random")
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    target = f"a temporary file in {disk / '.out.partial'}" if kib == 40 else disk / "out"
    assert done.stderr == f"partition.py: error: cannot write {target}: No space left on device\n"
    assert list(disk.iterdir()) == []


def test_full_disk_keeps_the_dataset_that_was_to_be_replaced(source, small_disk):
    disk = small_disk(6000)
    arguments = ["--input", source, "--output", disk / "out", "--overwrite", "--method", "random"]
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    free = os.statvfs(disk)
    (disk / "filler").write_bytes(bytes(free.f_bavail * free.f_bsize - 300 * 1024))
    done = run(*arguments)
    assert done.returncode == 1
    assert done.stderr == f"partition.py: error: cannot write {disk / 'out'}: No space left on device\n"
    assert sorted(path.name for path in disk.iterdir()) == ["filler", "out"]
    assert len(Dataset.open(disk / "out").split("train")) == NUM_TRIPLES


def test_a_file_system_that_takes_no_files(source, small_disk):
    disk = small_disk(4096)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    done = run("--input", source, "--output", disk / "out")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"partition.py: error: the parent folder of {disk / 'out'} is not writable\n"


def test_a_full_console_after_the_dataset_is_whole(source, tmp_path):
    with open("/dev/full", "w") as full:
        arguments = ["--input", source, "--output", tmp_path / "out", "--json", "--method", "random"]
        done = run(*arguments, stdout=full)
    assert done.returncode == 1
    assert done.stderr == (
        f"partition.py: error: the dataset lies in {tmp_path / 'out'}, but its figures are lost: "
        "cannot write the output: No space left on device\n"
    )
    assert len(Dataset.open(tmp_path / "out").split("train")) == NUM_TRIPLES


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("x" * 300, "cannot be used: File name too long"),
        ("file/out", "cannot be made: File exists"),
        ("taken", "cannot be used: another file is there; remove it, or choose another output"),
    ],
)
def test_outputs_that_cannot_be(output, words, source, tmp_path, call):
    (tmp_path / "file").write_text("")
    (tmp_path / ".taken.partial").write_text("")
    status, out, err = call(source, "--output", tmp_path / output)
    assert (status, out) == (2, "")
    assert err.startswith("partition.py: error: ") and err.count("\n") == 1 and words in err
    assert sorted(path.name for path in tmp_path.iterdir()) == [".taken.partial", "file"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everywhere")
def test_a_folder_that_may_not_be_read(source, tmp_path, call):
    (tmp_path / "out").mkdir(mode=0)
    status, _, err = call(source)
    assert status == 2 and "cannot be used: Permission denied" in err


def test_the_old_dataset_comes_back_where_the_new_one_cannot_take_its_place(
    source, tmp_path, build_here, monkeypatch, call
):
    assert call(source)[0] == 0
    before = json.loads((tmp_path / "out" / "dataset.json").read_text())
    rename = Path.rename

    def fail(path, target):
        if path.name == ".out.partial":
            raise OSError(5, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    status, _, err = call(source, "--overwrite", "--seed", "9")
    assert status == 1 and err.endswith(f": error: cannot write {tmp_path / 'out'}: Input/output error\n")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert json.loads((tmp_path / "out" / "dataset.json").read_text()) == before


def test_the_split_is_not_written_through_a_map(source, tmp_path, build_here, monkeypatch):
    """A page of a mapped file that finds no room on the disk is a bus error, which ends the process."""

    open_memmap = np.lib.format.open_memmap

    def reading_only(*arguments, mode, **options):
        assert mode == "r", "a file was mapped for writing"
        return open_memmap(*arguments, mode=mode, **options)

    monkeypatch.setattr(np.lib.format, "open_memmap", reading_only)
    make_dataset.partition_triples([source], tmp_path / "out", make_dataset.Options(method="random"))
    assert len(Dataset.open(tmp_path / "out").split("train")) == NUM_TRIPLES
