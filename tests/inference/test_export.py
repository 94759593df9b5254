"""Exported files hold the same float32 numbers, and appear only when they are whole."""

from __future__ import annotations

import numpy as np
import pytest

from dglkge.checkpoint import open_checkpoint
from dglkge.errors import InputError, StorageError
from dglkge.inference import export
from dglkge.inference.export import export_tables
from dglkge.typing import RELATION
from tests.checkpoint.toy_checkpoint import TWO_PAIRS, save_toy, toy_meta, toy_tables

TABLES = ["person", "film", RELATION]


@pytest.fixture(params=[3, 1000])
def run(tmp_path, monkeypatch, request):
    """A checkpoint of three parts, exported a few rows at a time or all at once."""
    monkeypatch.setattr(export, "ROWS_AT_A_TIME", request.param)
    meta = toy_meta(relations=TWO_PAIRS)
    tables = toy_tables(meta)
    save_toy(tmp_path / "run", meta, tables, 3)
    return open_checkpoint(tmp_path / "run"), tables


def same_bits(got, wanted):
    return got.astype(np.float32).tobytes() == wanted.numpy().tobytes()


def read_lines(path, separator, skip):
    lines = path.read_text(encoding="utf-8").splitlines()[skip:]
    fields = [line.split(separator) for line in lines]
    return [row[0] for row in fields], np.array([row[1:] for row in fields], dtype=np.float64)


def test_npy(run, tmp_path):
    checkpoint, tables = run
    written = export_tables(checkpoint, TABLES, "npy", tmp_path / "out", overwrite=False)
    assert [path.name for path in written] == [
        "person.npy",
        "person.names.txt",
        "film.npy",
        "film.names.txt",
        "relation.npy",
        "relation.names.txt",
    ]
    for table in TABLES:
        assert same_bits(np.load(tmp_path / "out" / f"{table}.npy"), tables[table].rows)
    assert (tmp_path / "out/film.names.txt").read_text().splitlines() == [f"film-{id_}" for id_ in range(5)]
    relations = (tmp_path / "out/relation.names.txt").read_text(encoding="utf-8").splitlines()
    assert relations == ["likes (person → person)", "made", "likes (person → film)"]


def test_tsv(run, tmp_path):
    checkpoint, tables = run
    export_tables(checkpoint, TABLES, "tsv", tmp_path, overwrite=False)
    names, rows = read_lines(tmp_path / "person.tsv", "\t", 0)
    assert names == [f"person-{id_}" for id_ in range(23)]
    finite = np.isfinite(tables["person"].rows.numpy())
    assert np.array_equal(rows.astype(np.float32)[finite], tables["person"].rows.numpy()[finite])
    names, rows = read_lines(tmp_path / "relation.tsv", "\t", 0)
    assert names[0] == "likes (person → person)" and rows.shape == (3, 12)


def test_word2vec(run, tmp_path):
    checkpoint, tables = run
    export_tables(checkpoint, ["film", RELATION], "word2vec", tmp_path, overwrite=False)
    assert (tmp_path / "film.vec").read_text().splitlines()[0] == "5 6"
    names, rows = read_lines(tmp_path / "film.vec", " ", 1)
    assert names == [f"film-{id_}" for id_ in range(5)]
    assert np.array_equal(rows[1:4].astype(np.float32), tables["film"].rows[1:4].numpy())
    names, _ = read_lines(tmp_path / "relation.vec", " ", 1)
    assert names == ["likes_(person_→_person)", "made", "likes_(person_→_film)"]


def test_what_exists_is_not_replaced_unasked(run, tmp_path):
    checkpoint, _ = run
    out = tmp_path / "out"
    out.mkdir()
    (out / "film.npy").write_text("mine")
    with pytest.raises(InputError, match="film.npy exists; allow it to be replaced, or take another folder"):
        export_tables(checkpoint, TABLES, "npy", out, overwrite=False)
    assert [path.name for path in out.iterdir()] == ["film.npy"]
    export_tables(checkpoint, ["film"], "npy", out, overwrite=True)
    assert np.load(out / "film.npy").shape == (5, 6)


def test_a_failure_leaves_no_file(run, tmp_path, monkeypatch):
    checkpoint, _ = run

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, "_write_lines", full)
    with pytest.raises(StorageError, match="cannot write to .*out: No space left on device"):
        export_tables(checkpoint, ["film"], "tsv", tmp_path / "out", overwrite=False)
    assert list((tmp_path / "out").iterdir()) == []


def test_unknown_words(run, tmp_path):
    checkpoint, _ = run
    with pytest.raises(InputError, match="unknown format 'np'; did you mean 'npy'"):
        export_tables(checkpoint, ["film"], "np", tmp_path, overwrite=False)
    with pytest.raises(InputError, match="unknown table 'films'; did you mean 'film'"):
        export_tables(checkpoint, ["films"], "npy", tmp_path, overwrite=False)
