"""Exported files hold the same float32 numbers, and appear only when they are whole."""

from __future__ import annotations

import numpy as np
import pytest

from dglkge.checkpoint import open_checkpoint
from dglkge.data.vocabulary import Vocabulary
from dglkge.errors import InputError, StorageError
from dglkge.inference import export, import_tables
from dglkge.inference import export_files as export_files
from dglkge.inference.export import export_tables
from dglkge.typing import RELATION
from tests.checkpoint.toy_checkpoint import TWO_PAIRS, save_toy, save_toy_named, toy_meta, toy_tables

TABLES = ["person", "film", RELATION]


@pytest.fixture(params=[3, 1000])
def run(tmp_path, monkeypatch, request):
    """A checkpoint of three parts, exported a few rows at a time or all at once."""
    monkeypatch.setattr(export_files, "ROWS_AT_A_TIME", request.param)
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
    with pytest.raises(InputError, match="film.npy exists; give --overwrite to replace it, or take"):
        export_tables(checkpoint, TABLES, "npy", out, overwrite=False)
    assert [path.name for path in out.iterdir()] == ["film.npy"]
    export_tables(checkpoint, ["film"], "npy", out, overwrite=True)
    assert np.load(out / "film.npy").shape == (5, 6)


def test_a_failure_leaves_no_file(run, tmp_path, monkeypatch):
    checkpoint, _ = run

    def full(*arguments):
        raise OSError(28, "No space left on device")

    export_tables(checkpoint, ["person"], "tsv", tmp_path / "out", overwrite=False)
    before = (tmp_path / "out/person.tsv").read_bytes()
    written = export._write_tsv

    def full_at_the_film(table, file):
        written(table, file) if table.name == "person" else full()

    monkeypatch.setitem(export.FORMATS, "tsv", (export.each_table(".tsv", full_at_the_film), ""))
    with pytest.raises(StorageError, match="cannot write to .*out: No space left on device"):
        export_tables(checkpoint, ["person", "film"], "tsv", tmp_path / "out", overwrite=True)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["person.tsv"]
    assert (tmp_path / "out/person.tsv").read_bytes() == before


def test_unknown_words(run, tmp_path):
    checkpoint, _ = run
    with pytest.raises(InputError, match="unknown format 'np'; did you mean 'npy'"):
        export_tables(checkpoint, ["film"], "np", tmp_path, overwrite=False)
    with pytest.raises(InputError, match="unknown table 'films'; did you mean 'film'"):
        export_tables(checkpoint, ["films"], "npy", tmp_path, overwrite=False)


def named(tmp_path, names):
    """Save a checkpoint whose people have some names."""
    meta = toy_meta(num_people=len(names))
    vocabularies = {"person": Vocabulary(names, "entity")}
    save_toy_named(tmp_path / "run", meta, toy_tables(meta), vocabularies, 1)
    return open_checkpoint(tmp_path / "run")


@pytest.mark.parametrize(
    ("file_format", "name", "words"),
    [
        ("tsv", "a\tb", r"name 'a\\tb' of table 'person' has a tab, .* in the format tsv; parquet"),
        ("projector", "a\tb", "has a tab, which separates fields or lines in the format projector"),
        ("tsv", "a\rb", "has a carriage return"),
        ("npy", "a\rb", "has a carriage return, which separates fields or lines in the format npy"),
        ("faiss", "a\rb", "has a carriage return"),
        ("huggingface", "a\rb", "has a carriage return"),
        ("word2vec", "x y", "'x y' of table 'person' becomes 'x_y' in the format word2vec, as another"),
    ],
)
def test_names_that_could_not_be_read_back_are_refused(tmp_path, file_format, name, words):
    checkpoint = named(tmp_path, ["x_y", name, "c"])
    with pytest.raises(InputError, match=words):
        export_tables(checkpoint, ["person", RELATION], file_format, tmp_path / "out", overwrite=False)
    assert not (tmp_path / "out").exists()


def test_a_tab_in_a_name_of_dglke_is_refused(tmp_path):
    meta = toy_meta("distmult", reciprocal=False, num_people=3)
    vocabularies = {"person": Vocabulary(["a", "b\tc", "d"], "entity")}
    save_toy_named(tmp_path / "run", meta, toy_tables(meta), vocabularies, 1)
    with pytest.raises(InputError, match="has a tab, .* in the format dglke"):
        export_tables(open_checkpoint(tmp_path / "run"), ["person"], "dglke", tmp_path / "out", False)
    assert not (tmp_path / "out").exists()


def test_any_name_comes_back_from_parquet(tmp_path):
    names = ["a\tb", "x y", 'say "no"']
    export_tables(named(tmp_path, names), ["person"], "parquet", tmp_path / "out", overwrite=False)
    assert import_tables.READERS["parquet"](tmp_path / "out", "person")[0] == names


@pytest.mark.parametrize("file_format", ["npy", "parquet", "safetensors", "tsv", "word2vec"])
def test_every_format_of_rows_is_read_back(run, tmp_path, file_format):
    checkpoint, tables = run
    export_tables(checkpoint, TABLES, file_format, tmp_path / "out", overwrite=False)
    for table in TABLES:
        names, rows = import_tables.READERS[file_format](tmp_path / "out", table)
        assert len(names) == len(rows)
        # NaN and minus zero keep their meaning in text, not their bits.
        assert np.array_equal(rows, tables[table].rows.numpy(), equal_nan=True)


def test_damaged_tsv(tmp_path):
    path = tmp_path / "film.tsv"
    for content, words in [
        ("a\t1\t2\nb\t1\tx\n", "film.tsv:2: 'x' is no number"),
        ("a\t1\t2\nb\t1\n", "tsv:2: a name and 1 numbers, expected 2"),
    ]:
        path.write_text(content)
        with pytest.raises(InputError, match=words):
            import_tables.READERS["tsv"](tmp_path, "film")
