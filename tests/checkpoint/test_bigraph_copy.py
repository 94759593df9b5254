"""A copy of a version for PyTorch-BigGraph: the number of passes as its version, rows and records."""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import pytest

from dglkge.checkpoint import open_checkpoint
from dglkge.checkpoint.conversion import copy_for_bigraph
from dglkge.errors import CheckpointError, InputError
from dglkge.formats.bigraph_files import PassCount
from dglkge.typing import RELATION
from tests.checkpoint.toy_checkpoint import flip, same, save_toy, toy_meta, toy_tables


def save(folder: Path, training: dict, finished: int, passes: int = 0, versions: int = 1) -> Path:
    """Save a run at some point of its training, after so many commits."""
    progress = {"finished_epochs": finished, "batches_done": 17, "global_batch_size": 100}
    if passes:
        progress["passes_done"] = passes
    meta = toy_meta(config={"training": training}, progress=progress, optimizer="row_adagrad")
    for _ in range(versions):
        save_toy(folder / "checkpoint", meta, toy_tables(meta), num_parts=2)
    return folder


def resumed_place(folder: Path) -> tuple[int, int, int]:
    """Return epoch, edge path and chunk that PyTorch-BigGraph resumes with: the arithmetic of its trainer."""
    version = int((folder / "checkpoint_version.txt").read_text())
    chunks = json.loads((folder / "config.json").read_text())["num_edge_chunks"]
    with h5py.File(folder / f"model.v{version}.h5") as file:
        paths = int(file.attrs["iteration/num_edge_paths"])
    return version // chunks // paths, version // chunks % paths, version % chunks


@pytest.mark.parametrize(
    ("versions", "training", "finished", "passes", "place", "trained"),
    [
        (5, {}, 3, 0, (3, 0, 0), (2, 0, 0)),
        (3, {"num_epochs": 9}, 1, 0, (1, 0, 0), (0, 0, 0)),
        (1, {"edge_chunks": 4}, 2, 3, (2, 0, 3), (2, 0, 2)),
        (2, {"edge_chunks": 2, "edge_sets": ["train", "news"]}, 2, 3, (2, 1, 1), (2, 1, 0)),
        (1, {"edge_sets": ["train", "news"]}, 0, 1, (0, 1, 0), (0, 0, 0)),
    ],
)
def test_it_resumes_at_the_pass_whatever_the_cadence_was(
    tmp_path, versions, training, finished, passes, place, trained
):
    run = save(tmp_path / "run", training, finished, passes, versions)
    assert open_checkpoint(run).version == versions
    version = copy_for_bigraph(open_checkpoint(run), tmp_path / "copy")
    assert resumed_place(tmp_path / "copy") == place
    with h5py.File(tmp_path / "copy" / f"embeddings_person_1.v{version}.h5") as file:
        names = ("epoch_idx", "edge_path_idx", "edge_chunk_idx")
        assert tuple(int(file.attrs[f"iteration/{name}"]) for name in names) == trained


def test_rows_and_state_by_name(tmp_path):
    run = save(tmp_path / "run", {}, 2)
    copy_for_bigraph(open_checkpoint(run), tmp_path / "copy")
    original, copy = open_checkpoint(run), open_checkpoint(tmp_path / "copy")
    assert copy.version == 2 and copy.meta.progress["finished_epochs"] == 2
    names = list(original.vocabulary("person").names)
    assert list(copy.vocabulary("person").names) != names  # part after part, by row
    assert same(copy["person"][names], original["person"][names])
    assert same(copy[RELATION][:], original[RELATION][:])
    for part in (0, 1):
        with (
            h5py.File(run / "checkpoint" / "v1" / f"embeddings_person_{part}.v1.h5") as old,
            h5py.File(tmp_path / "copy" / f"embeddings_person_{part}.v2.h5") as new,
        ):
            assert sorted(new) == ["embeddings", "optimizer"] and list(new["optimizer"]) == ["state_dict"]
            state = [file["optimizer/state_dict"][...].tobytes() for file in (old, new)]
            assert state[0] == state[1]
            assert json.loads(new.attrs["config/json"])["checkpoint_path"] == str(tmp_path / "copy")
        for name in (f"entity_count_person_{part}.txt", f"entity_names_person_{part}.json"):
            text = (run / "checkpoint" / "latest" / name).read_text()
            assert (tmp_path / "copy" / name).read_text() == text
    assert not list(tmp_path.glob(".copy*"))


def test_records_of_passes_that_the_version_does_not_have_are_left_out(tmp_path):
    run = save(tmp_path / "run", {"edge_chunks": 2}, 1, 1)
    records = [
        {
            "epoch_idx": epoch,
            "edge_path_idx": 0,
            "edge_chunk_idx": chunk,
            "stats": {"count": 1, "metrics": {}},
        }
        for epoch in range(3)
        for chunk in range(2)
    ]
    text = "".join(json.dumps(record) + "\n" for record in records)
    (run / "checkpoint" / "latest" / "training_stats.json").write_text(text)
    assert copy_for_bigraph(open_checkpoint(run), tmp_path / "copy") == 3
    lines = (tmp_path / "copy" / "training_stats.json").read_text().splitlines()
    assert [json.loads(line) for line in lines] == records[:3]


def test_refusals_leave_nothing(tmp_path):
    run = save(tmp_path / "run", {}, 0)
    with pytest.raises(CheckpointError, match="has no finished pass"):
        copy_for_bigraph(open_checkpoint(run), tmp_path / "copy")
    run = save(tmp_path / "again", {}, 1)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(InputError, match=r"full exists and is no empty folder"):
        copy_for_bigraph(open_checkpoint(run), tmp_path / "full")
    copy_for_bigraph(open_checkpoint(run), tmp_path / "theirs")
    with pytest.raises(InputError, match="was written by PyTorch-BigGraph"):
        copy_for_bigraph(open_checkpoint(tmp_path / "theirs"), tmp_path / "copy")
    flip(run / "checkpoint" / "v1" / "embeddings_person_0.v1.h5")
    with pytest.raises(CheckpointError, match=r"embeddings_person_0.v1.h5 is damaged"):
        copy_for_bigraph(open_checkpoint(run), tmp_path / "copy")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "full", "run", "theirs"]


def test_passes_of_a_run_without_edge_sets():
    meta = toy_meta()
    assert PassCount.of(meta) == PassCount(("train",), 1, 2)
    assert PassCount.of(meta).attributes()["iteration/edge_path"] == "train"
