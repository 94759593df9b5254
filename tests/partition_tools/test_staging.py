"""A dataset appears complete or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import json

import pytest

from dglkge.data.dataset_files import PENDING_DESCRIPTION
from dglkge.errors import InputError
from dglkge.partition.dataset_writer import staged
from tests.data.toy_folder import write_toy_folder


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def fill(folder, *files):
    """Write what a block writes: some files and, last, the description."""
    for name in (*files, PENDING_DESCRIPTION):
        (folder / name).write_text("{}")


@pytest.mark.parametrize("is_there", [False, True])
def test_folder_appears_at_the_end(tmp_path, is_there):
    output = tmp_path / "deep" / "out"
    if is_there:
        output.mkdir(parents=True)
    with staged(output, overwrite=False) as folder:
        fill(folder, "a")
        assert output.exists() == is_there and folder.parent == output.parent
    assert names(output) == ["a", "dataset.json"] and names(output.parent) == ["out"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_nothing_stays_after_an_exception(tmp_path, error):
    with pytest.raises(error), staged(tmp_path / "out", overwrite=False) as folder:
        (folder / "part0").mkdir()
        (folder / "part0" / "a").write_text("x")
        raise error
    assert names(tmp_path) == []


@pytest.mark.parametrize("error", [None, RuntimeError])
def test_overwrite_replaces_a_dataset_if_the_block_succeeds(tmp_path, error):
    output = write_toy_folder(tmp_path / "out")
    before = names(output)
    with contextlib.suppress(RuntimeError), staged(output, overwrite=True) as folder:
        fill(folder, "new")
        assert (output / "train.npy").exists()
        if error:
            raise error
    assert names(output) == (before if error else ["dataset.json", "new"]) and names(tmp_path) == ["out"]


def dataset(output):
    write_toy_folder(output)


def foreign(output, content=None):
    output.mkdir()
    (output / "precious.txt").write_text("x")
    if content:
        (output / "dataset.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("prepare", "place", "overwrite", "message"),
    [
        (dataset, "out", False, "exists; choose another, or give --overwrite"),
        (foreign, "out", True, "--overwrite replaces only a dataset"),
        (lambda out: foreign(out, {"a": 1}), "out", True, "--overwrite replaces only a dataset"),
        (lambda out: foreign(out, {"format_version": 99}), "out", True, "--overwrite replaces only"),
        (lambda out: out.write_text("x"), "out", True, "exists and is no folder"),
        (lambda out: out.write_text("x"), "out/in", True, "cannot be made"),
    ],
)
def test_what_is_there_stays(tmp_path, prepare, place, overwrite, message):
    prepare(tmp_path / "out")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(InputError, match=message), staged(tmp_path / place, overwrite):
        pytest.fail("the block must not run")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_output_that_appeared_meanwhile_stays(tmp_path):
    output = tmp_path / "out"
    with pytest.raises(InputError, match="exists"), staged(output, overwrite=False):
        output.mkdir()
        (output / "a").touch()
    assert names(output) == ["a"] and names(tmp_path) == ["out"]


def test_remains_of_a_killed_run_are_removed(tmp_path):
    remains = tmp_path / ".out.partial"
    (remains / "partitions").mkdir(parents=True)
    (remains / "train.npy").touch()
    (remains / ".lock").touch()
    with staged(tmp_path / "out", overwrite=False) as folder:
        assert names(folder) == [".lock"]
        fill(folder)
    assert names(tmp_path) == ["out"] and names(tmp_path / "out") == ["dataset.json"]


def test_two_runs_for_one_output(tmp_path):
    with staged(tmp_path / "out", overwrite=False) as folder, open(folder / ".lock") as lock:
        fill(folder, "a")
        with pytest.raises(
            BlockingIOError
        ):  # held by the operating system, and so no longer than the process
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with (
            pytest.raises(InputError, match="another run is writing"),
            staged(tmp_path / "out", overwrite=False),
        ):
            pytest.fail("the block must not run")
        assert (folder / "a").exists()
    assert names(tmp_path / "out") == ["a", "dataset.json"]


def test_a_dataset_that_was_being_replaced_is_given_back(tmp_path) -> None:
    """The run before was killed when the old one had lost its name and the new one had none yet."""
    output = tmp_path / "data"
    write_toy_folder(output)
    expected = {path.name: path.read_bytes() for path in output.iterdir() if path.is_file()}
    for overwrite, error in ((False, InputError), (True, KeyboardInterrupt)):
        output.rename(tmp_path / ".data.replaced")
        with pytest.raises(error), staged(output, overwrite=overwrite):
            raise KeyboardInterrupt
        assert {path.name: path.read_bytes() for path in output.iterdir() if path.is_file()} == expected
    assert names(tmp_path) == ["data"]
