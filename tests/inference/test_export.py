"""Exported files hold the same float32 numbers, and appear only when they are whole."""

from __future__ import annotations

import numpy as np
import pytest

from dglkge.checkpoint import open_checkpoint
from dglkge.data.vocabulary import Vocabulary
from dglkge.errors import InputError, StorageError
from dglkge.inference.exports import export, import_tables
from dglkge.inference.exports import files as export_files
from dglkge.inference.exports.export import export_tables
from dglkge.typing import RELATION
from tests.checkpoint.toy_checkpoint import TWO_PAIRS, save_toy, toy_meta, toy_tables

TABLES = ["person", "film", RELATION]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A checkpoint of three parts, exported a few rows at a time."""
    monkeypatch.setattr(export_files, "ROWS_AT_A_TIME", 3)
    meta = toy_meta(relations=TWO_PAIRS)
    tables = toy_tables(meta)
    save_toy(tmp_path / "run", meta, tables, 3)
    return open_checkpoint(tmp_path / "run"), tables


@pytest.mark.parametrize("file_format", ["npy", "parquet", "safetensors", "tsv", "word2vec"])
def test_every_format_of_rows_is_read_back(run, tmp_path, file_format):
    checkpoint, tables = run
    export_tables(checkpoint, TABLES, file_format, tmp_path / "out", overwrite=False)
    for table in TABLES:
        names, rows = import_tables.READERS[file_format](tmp_path / "out", table)
        assert len(names) == len(rows)
        # NaN and minus zero keep their meaning in text, not their bits.
        assert np.array_equal(rows, tables[table].rows.numpy(), equal_nan=True)


def test_npy(run, tmp_path):
    checkpoint, tables = run
    written = export_tables(checkpoint, TABLES, "npy", tmp_path, overwrite=False)
    names = [f"{table}.{end}" for table in TABLES for end in ("npy", "names.txt")]
    assert [path.name for path in written] == names
    for table in TABLES:
        assert np.load(tmp_path / f"{table}.npy").tobytes() == tables[table].rows.numpy().tobytes()
    assert (tmp_path / "film.names.txt").read_text().splitlines() == [f"film-{id_}" for id_ in range(5)]
    relations = (tmp_path / "relation.names.txt").read_text(encoding="utf-8").splitlines()
    assert relations == ["likes (person → person)", "made", "likes (person → film)"]


@pytest.mark.parametrize(
    ("file_format", "file", "separator", "label"),
    [
        ("tsv", "{}.tsv", "\t", "likes (person → person)"),
        ("word2vec", "{}.vec", " ", "likes_(person_→_person)"),
    ],
)
def test_texts(run, tmp_path, file_format, file, separator, label):
    checkpoint, tables = run
    export_tables(checkpoint, ["film", RELATION], file_format, tmp_path, overwrite=False)
    *head, _, _, row, _, _ = (tmp_path / file.format("film")).read_text().splitlines()
    assert head == (["5 6"] if file_format == "word2vec" else [])
    name, *numbers = row.split(separator)
    assert name == "film-2"
    assert np.array_equal(np.array(numbers, np.float64).astype(np.float32), tables["film"].rows[2].numpy())
    lines = (tmp_path / file.format(RELATION)).read_text(encoding="utf-8").splitlines()
    assert lines[-3].split(separator)[0] == label


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


def named(tmp_path, names, **changes):
    meta = toy_meta(num_people=len(names), **changes)
    vocabularies = {"person": Vocabulary(names, "entity")}
    save_toy(tmp_path / "run", meta, toy_tables(meta), 1, vocabularies)
    return open_checkpoint(tmp_path / "run")


@pytest.mark.parametrize(
    ("file_format", "name", "words"),
    [
        ("tsv", "a\tb", r"name 'a\\tb' of table 'person' has a tab, .* in the format tsv; parquet"),
        ("projector", "a\tb", "has a tab, which separates fields or lines in the format projector"),
        ("dglke", "a\tb", "has a tab, .* in the format dglke"),
        ("npy", "a\rb", "has a carriage return, which separates fields or lines in the format npy"),
        ("faiss", "a\rb", "has a carriage return"),
        ("huggingface", "a\rb", "has a carriage return"),
        ("word2vec", "x y", "'x y' of table 'person' becomes 'x_y' in the format word2vec, as another"),
        ("np", "b", "unknown format 'np'; did you mean 'npy'"),
    ],
)
def test_what_could_not_be_read_back_is_refused(tmp_path, file_format, name, words):
    checkpoint = named(tmp_path, ["x_y", name, "c"], score_function="distmult", reciprocal=False)
    with pytest.raises(InputError, match=words):
        export_tables(checkpoint, ["person", RELATION], file_format, tmp_path / "out", overwrite=False)
    assert not (tmp_path / "out").exists()


def test_any_name_comes_back_from_parquet(tmp_path):
    names = ["a\tb", "x y", 'say "no"']
    export_tables(named(tmp_path, names), ["person"], "parquet", tmp_path / "out", overwrite=False)
    assert import_tables.READERS["parquet"](tmp_path / "out", "person")[0] == names


def test_damaged_tsv(tmp_path):
    path = tmp_path / "film.tsv"
    for content, words in [
        ("a\t1\t2\nb\t1\tx\n", "film.tsv:2: 'x' is no number"),
        ("a\t1\t2\nb\t1\n", "tsv:2: a name and 1 numbers, expected 2"),
    ]:
        path.write_text(content)
        with pytest.raises(InputError, match=words):
            import_tables.READERS["tsv"](tmp_path, "film")
