"""Files of named vectors: every format gives the same vectors, and bad files one line with the place."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dglkge.data import vector_files
from dglkge.data.vector_files import VectorFile, open_vectors
from dglkge.errors import InputError

NAMES = ["Ada Lovelace", "Bern", "Čáp", "d", "e"]
ROWS = np.arange(15, dtype=np.float32).reshape(5, 3) / 4 - 1
WANTED = np.array([0, 2, 3])


def text(separator: str, head: str = "", end: str = "\n") -> str:
    lines = [separator.join([name, *map(str, row)]) for name, row in zip(NAMES, ROWS.tolist())]
    return head + "".join(line + end for line in lines)


def write(folder: Path, kind: str) -> Path:
    path = folder / f"v.{kind}"
    if kind == "npy":
        np.save(path, ROWS)
        (folder / "v.names.txt").write_text("".join(f"{name}\n" for name in NAMES), encoding="utf-8")
    elif kind in ("parquet", "pq"):
        lists = pa.array(ROWS.tolist(), pa.list_(pa.float32(), 3) if kind == "pq" else pa.list_(pa.float64()))
        names = pa.array(NAMES).dictionary_encode() if kind == "pq" else pa.array(NAMES)
        pq.write_table(pa.table({"name": names, "embedding": lists}), path, row_group_size=2)
    elif kind == "vec":
        path.write_text(text(" ", "5 3\n", " \n"), encoding="utf-8")  # word2vec's own program ends lines so
    elif kind == "vec.gz":
        path.write_bytes(gzip.compress(text(" ", "5 3\n").encode()))
    elif kind == "txt":
        path.write_text(text(" "), encoding="utf-8")
    else:
        path.write_text(text("\t"), encoding="utf-8")
    return path


def read(file: VectorFile, wanted: np.ndarray) -> tuple[list[int], np.ndarray]:
    blocks = list(file.rows(wanted))
    return [number for numbers, _ in blocks for number in numbers], np.concatenate(
        [rows for _, rows in blocks]
    )


@pytest.mark.parametrize("kind", ["npy", "parquet", "pq", "vec", "vec.gz", "txt", "tsv"])
def test_every_format_gives_the_same(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vector_files, "ROWS_AT_A_TIME", 2)
    file = open_vectors(write(tmp_path, kind))
    assert (file.width, list(file.names())) == (3, NAMES)
    for wanted in (WANTED, np.arange(5), np.array([4])):
        numbers, rows = read(file, wanted)
        assert numbers == wanted.tolist() and rows.dtype == np.float64
        assert np.array_equal(rows, ROWS[wanted])
    assert list(file.rows(np.arange(0))) == []


def test_text_with_spaces_has_names_as_word2vec_writes_them(tmp_path: Path) -> None:
    file = open_vectors(write(tmp_path, "vec"))
    assert file.key("Ada Lovelace") == file.key("Ada_Lovelace")
    assert open_vectors(write(tmp_path, "tsv")).key("Ada Lovelace") == "Ada Lovelace"


def test_columns_and_names_may_have_other_names(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": [7, 8], "v": [[1, 2], [3, 4]]}), tmp_path / "v.parquet")
    file = open_vectors(tmp_path / "v.parquet", name_column="id", column="v")
    assert list(file.names()) == ["7", "8"] and read(file, np.array([1]))[1].tolist() == [[3, 4]]
    np.save(tmp_path / "m.npy", np.ones((2, 2), np.float16))
    (tmp_path / "n").write_text("a\nb\n")
    assert list(open_vectors(tmp_path / "m.npy", str(tmp_path / "n")).names()) == ["a", "b"]


def table(**columns: object) -> pa.Table:
    return pa.table({"name": ["a", "b"], "embedding": [[1.0, 2.0], [3.0, 4.0]], **columns})


@pytest.mark.parametrize(
    "content, message",
    [
        ("a 1 2\nb 1 x\n", "FILE:2: 'x' is no number"),
        ("a 1 2\nb 1\n", "FILE:2: a name and 1 numbers, expected 2 numbers"),
        ("2 2\na 1 2\nb 1 1e\n", "FILE:3: '1e' is no number"),
        (
            "3 1\na 1\nb 1\n",
            "FILE:1: the first line says 3 vectors, the file has 2: it is cut off or damaged",
        ),
        ("a 1 2\n\nb 1 2\n", "FILE:2: a name and 0 numbers, expected 2 numbers"),
        ("", "FILE: the file is empty"),
        ("a b\n", "FILE has no vectors: 1 rows of 0 numbers"),
        (b"a 1 2\n\xff 1 2\n", "FILE:2: byte 1 of the line is not UTF-8"),
    ],
)
def test_bad_text(tmp_path: Path, content: str | bytes, message: str) -> None:
    path = tmp_path / "v.vec"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError) as caught:
        file = open_vectors(path)
        read(file, np.arange(len(list(file.names()))))
    assert str(caught.value) == message.replace("FILE", str(path))


@pytest.mark.parametrize(
    "content, message",
    [
        (table(embedding=[[1.0, 2.0], [3.0]]), "FILE: row 1 (from 0): the column 'embedding' has 1 numbers, "
         "expected 2 as in row 0"),
        (table(embedding=[[1.0, 2.0], None]), "FILE: row 1 (from 0): the column 'embedding' has no value, "
         "expected 2 as in row 0"),
        (table(embedding=pa.array([[1.0, 2.0], None], pa.list_(pa.float32(), 2))), "FILE: row 1 (from 0): "
         "the column 'embedding' has no value, expected 2 as in row 0"),
        (table(name=["a", None]), "FILE: row 1 (from 0): the column 'name' has no value"),
        (table(name=[0.5, 1.5]), "FILE: column 'name' is double; allowed: texts or whole numbers"),
        (table(embedding=["a", "b"]), "FILE: column 'embedding' is string; allowed: lists of numbers"),
        (pa.table({"id": ["a"], "embedding": [[1.0]]}), "FILE has no column 'name' (or several); its "
         "columns: id, embedding"),
        (table().slice(0, 0), "FILE has no vectors: 0 rows of 0 numbers"),
    ],
)  # fmt: skip
def test_bad_parquet(tmp_path: Path, content: pa.Table, message: str) -> None:
    path = tmp_path / "v.parquet"
    pq.write_table(content, path)
    with pytest.raises(InputError) as caught:
        file = open_vectors(path)
        read(file, np.arange(len(list(file.names()))))
    assert str(caught.value) == message.replace("FILE", str(path))


def test_bad_npy(tmp_path: Path) -> None:
    path = write(tmp_path, "npy")
    (tmp_path / "v.names.txt").write_text("a\nb\n")
    with pytest.raises(InputError, match=r"v.names.txt has 2 names, .*v.npy has 5 rows; allowed: as many"):
        list(open_vectors(path).names())
    np.save(path, np.ones(3))
    with pytest.raises(InputError, match=r"expected a matrix of numbers, .* got float64 of shape \(3,\)"):
        open_vectors(path)
    np.save(path, np.array([["a"]], dtype=object), allow_pickle=True)
    with pytest.raises(InputError, match="is damaged or not an npy file of numbers"):
        open_vectors(path)


def test_what_is_no_format(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read .*v.vec: there is no such file"):
        open_vectors(tmp_path / "v.vec")
    (tmp_path / "v.bin").write_bytes(b"")
    with pytest.raises(InputError, match=r"says no format of vectors; allowed: .npy, .parquet, .pq, .vec"):
        open_vectors(tmp_path / "v.bin")
    with pytest.raises(InputError, match="a file of names goes with an npy file only, got n"):
        open_vectors(write(tmp_path, "vec"), "n")
    (tmp_path / "v.parquet").write_bytes(b"PAR1")
    with pytest.raises(InputError, match="v.parquet is damaged or not Parquet"):
        open_vectors(tmp_path / "v.parquet")
    (tmp_path / "w.vec.gz").write_bytes(b"no gzip")
    with pytest.raises(InputError, match="w.vec.gz: cannot be read: Not a gzipped file"):
        open_vectors(tmp_path / "w.vec.gz")
