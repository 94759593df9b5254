"""Files of named vectors: every format gives the same vectors, bad files one line; vectors of texts."""

from __future__ import annotations

import gzip
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dglkge.cli.main import main
from dglkge.data import vector_files
from dglkge.data.vector_files import open_encoder, open_vectors, read_texts, text_vectors, write_vectors
from dglkge.errors import CheckpointError, InputError, exit_status_of

NAMES = ["Ada Lovelace", "Bern", "Čáp", "d", "e"]
ROWS = np.arange(15, dtype=np.float32).reshape(5, 3) / 4 - 1
WANTED = np.array([0, 2, 3])


def text(separator: str, head: str = "", end: str = "\n") -> str:
    return head + "".join(
        separator.join([name, *map(str, row)]) + end for name, row in zip(NAMES, ROWS.tolist())
    )


def write(folder: Path, kind: str) -> Path:
    path = folder / f"v.{kind}"
    if kind == "npy":
        np.save(path, ROWS)
        (folder / "v.names.txt").write_text("".join(f"{name}\n" for name in NAMES), encoding="utf-8")
    elif kind in ("parquet", "pq"):
        lists = pa.array(ROWS.tolist(), pa.list_(pa.float32(), 3) if kind == "pq" else pa.list_(pa.float64()))
        names = pa.array(NAMES).dictionary_encode() if kind == "pq" else pa.array(NAMES)
        pq.write_table(pa.table({"name": names, "embedding": lists}), path, row_group_size=2)
    elif kind == "vec.gz":
        path.write_bytes(gzip.compress(text(" ", "5 3\n").encode()))
    else:
        # word2vec's own program ends lines with a space
        content = {"vec": text(" ", "5 3\n", " \n"), "txt": text(" "), "tsv": text("\t")}[kind]
        path.write_text(content, encoding="utf-8")
    return path


def read(file: vector_files.VectorFile, numbers: np.ndarray) -> tuple[list[int], np.ndarray]:
    numbers_read, rows = zip(*file.rows(numbers))
    return np.concatenate(numbers_read).tolist(), np.concatenate(rows)


def fault(path: Path) -> str:
    """Return the message of a file that cannot be read, with FILE in place of its path."""
    with pytest.raises(InputError) as caught:
        file = open_vectors(path)
        read(file, np.arange(len(list(file.names()))))
    return str(caught.value).replace(str(path), "FILE")


def test_every_format_gives_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vector_files, "ROWS_AT_A_TIME", 2)
    for kind in ("npy", "parquet", "pq", "vec", "vec.gz", "txt", "tsv"):
        file = open_vectors(write(tmp_path, kind))
        assert (file.width, list(file.names())) == (3, NAMES)
        for expected in (WANTED, np.arange(5), np.array([4])):
            numbers, rows = read(file, expected)
            assert numbers == expected.tolist() and rows.dtype == np.float64
            assert np.array_equal(rows, ROWS[expected])
        assert list(file.rows(np.arange(0))) == []


def test_names_and_columns(tmp_path: Path) -> None:
    """Names of text with spaces are as word2vec writes them; columns and files may have other names."""
    file = open_vectors(write(tmp_path, "vec"))
    assert file.key("Ada Lovelace") == file.key("Ada_Lovelace")
    assert open_vectors(write(tmp_path, "tsv")).key("Ada Lovelace") == "Ada Lovelace"
    pq.write_table(pa.table({"id": [7, 8], "v": [[1, 2], [3, 4]]}), tmp_path / "v.parquet")
    file = open_vectors(tmp_path / "v.parquet", name_column="id", column="v")
    assert list(file.names()) == ["7", "8"] and read(file, np.array([1]))[1].tolist() == [[3, 4]]
    np.save(tmp_path / "m.npy", np.ones((2, 2), np.float16))
    (tmp_path / "n").write_text("a\nb\n")
    assert list(open_vectors(tmp_path / "m.npy", str(tmp_path / "n")).names()) == ["a", "b"]


ROW = "FILE: row 1 (from 0): the column "


def table(**columns: object) -> pa.Table:
    return pa.table({"name": ["a", "b"], "embedding": [[1.0, 2.0], [3.0, 4.0]], **columns})


def test_files_that_are_refused(tmp_path: Path) -> None:
    for content, message in (
        ("a 1 2\nb 1 x\n", "FILE:2: 'x' is no number"),
        ("a 1 2\nb 1\n", "FILE:2: a name and 1 numbers, expected 2 numbers"),
        ("2 2\na 1 2\nb 1 1e\n", "FILE:3: '1e' is no number"),
        ("3 1\na 1\nb 1\n", "FILE:1: the first line says 3 vectors, the file has 2: it is cut off"),
        ("", "FILE: the file is empty"),
        ("a b\n", "FILE has no vectors: 1 rows of 0 numbers"),
        ("a 1 2\n\udcff 1 2\n", "FILE:2: byte 1 of the line is not UTF-8"),
        (table(embedding=[[1.0, 2.0], [3.0]]), f"{ROW}'embedding' has 1 numbers, expected 2 as in row 0"),
        (table(embedding=[[1.0, 2.0], None]), f"{ROW}'embedding' has no value, expected 2 as in row 0"),
        (table(embedding=pa.array([[1.0, 2.0], None], pa.list_(pa.float32(), 2))),
         f"{ROW}'embedding' has no value, expected 2 as in row 0"),
        (table(name=["a", None]), f"{ROW}'name' has no value"),
        (table(name=[0.5, 1.5]), "FILE: column 'name' is double; allowed: texts or whole numbers"),
        (table(embedding=["a", "b"]), "FILE: column 'embedding' is string; allowed: lists of numbers"),
        (pa.table({"id": ["a"]}), "FILE has no column 'name' (or several); its columns: id"),
        (table().slice(0, 0), "FILE has no vectors: 0 rows of 0 numbers"),
    ):  # fmt: skip
        path = tmp_path / ("v.vec" if isinstance(content, str) else "v.parquet")
        if isinstance(content, str):
            path.write_bytes(content.encode(errors="surrogateescape"))
        else:
            pq.write_table(content, path)
        assert fault(path).startswith(message)
    path = write(tmp_path, "npy")
    (tmp_path / "v.names.txt").write_text("a\nb\n")
    assert "v.names.txt has 2 names, FILE has 5 rows; allowed: as many" in fault(path)
    np.save(path, np.ones(3))
    assert "expected a matrix of numbers, " in fault(path) and "got float64 of shape (3,)" in fault(path)
    np.save(path, np.array([["a"]], dtype=object), allow_pickle=True)
    assert "as an npy file of numbers" in fault(path)
    assert fault(tmp_path / "none.vec").startswith("cannot read FILE: there is no such file")
    for name, content, words in (
        ("v.bin", b"", "says no format of vectors; allowed: .npy, .parquet, .pq, .vec"),
        ("v.parquet", b"PAR1", "FILE is damaged or not Parquet"),
        ("w.vec.gz", b"no gzip", "FILE: cannot be read: Not a gzipped file"),
    ):
        (tmp_path / name).write_bytes(content)
        assert words in fault(tmp_path / name)
    with pytest.raises(InputError, match="a file of names goes with an npy file only, got n"):
        open_vectors(write(tmp_path, "vec"), "n")


pytest.importorskip("sklearn")

TEXTS = {
    "ada": "wrote the first program for the engine",
    "charles": "designed the engine",
    "grace": "wrote the first compiler",
    "mute": "",
    "ann": "raised the red deer",
    "bea": "raised the deer of the north",
}


def cosines_by_definition(texts):
    """Return the cosines of 1 + log counts of words and pairs of words, times log((1 + n) / (1 + df)) + 1."""
    words_of = [text.split() for text in texts]
    terms = [[*words, *map(" ".join, zip(words, words[1:]))] for words in words_of]
    counts = pd.DataFrame([Counter(row) for row in terms]).fillna(0).to_numpy()
    idf = np.log((1 + len(counts)) / (1 + (counts > 0).sum(0))) + 1
    vectors = np.where(counts > 0, 1 + np.log(np.maximum(counts, 1)), 0) * idf
    vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-30)
    return vectors @ vectors.T


def test_as_many_dimensions_as_texts_keep_all_cosines_and_few_join_those_of_one_subject(tmp_path):
    vectors = text_vectors(TEXTS, 100)
    assert vectors.shape == (6, 5) and vectors.dtype == np.float32 and not vectors[3].any()
    np.testing.assert_allclose(vectors @ vectors.T, cosines_by_definition(TEXTS.values()), atol=1e-5)
    few = text_vectors(TEXTS, 2)
    cosines = few @ few.T
    assert few.shape == (6, 2) and cosines[4, 5] > 0.9 > 0.5 > cosines[0, 4]
    assert np.array_equal(few, text_vectors(TEXTS, 2))
    # What is written is what training reads.
    write_vectors(tmp_path / "v.parquet", TEXTS, few, 2)
    file = open_vectors(tmp_path / "v.parquet")
    assert list(file.names()) == list(TEXTS) and file.width == 2
    numbers, rows = read(file, np.arange(6))
    assert numbers == list(range(6)) and np.array_equal(rows, few)
    path = tmp_path / "w.parquet"
    path.mkdir()
    with pytest.raises(CheckpointError, match=f"^cannot write {path}: ") as caught:
        write_vectors(path, {"a": "x"}, np.ones((1, 2), np.float32))
    assert exit_status_of(caught.value) == 2 and sorted(tmp_path.iterdir()) == [tmp_path / "v.parquet", path]


def test_further_texts_are_encoded_as_those_of_a_file(tmp_path, capsys):
    """An old text has its vector; a new one is near old ones that share its words."""
    lines = "".join(f"{name}\t{text}\n" for name, text in TEXTS.items())
    (tmp_path / "t.tsv").write_text(lines)
    (tmp_path / "new.tsv").write_text(f"zoe\twrote the engine unseen\nada\t{TEXTS['ada']}\n")
    written, further = tmp_path / "v.parquet", tmp_path / "n.parquet"
    for words in (f"t.tsv -o {written} --dimension 100", f"new.tsv -o {further} --like {written}"):
        assert main(f"data vectors {tmp_path}/{words}".split()) == 0
    vectors = np.stack(pd.read_parquet(further)["embedding"])
    old = text_vectors(TEXTS, 100)
    assert np.allclose(vectors[1], old[0], atol=1e-6)
    # Its known words are those of Ada and Charles; "unseen" is none, and Ann has no word of it but "the".
    cosines = vectors[0] @ old.T
    assert min(cosines[:2]) > 0.3 > 0.1 > cosines[4] and cosines[3] == 0
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(1, abs=1e-6)
    refused = f"data vectors {tmp_path}/new.tsv -o {tmp_path}/x.parquet --like {written} --encoder e"
    assert main(refused.split()) == 2
    assert not (tmp_path / "x.parquet").exists() and "leave out --encoder" in capsys.readouterr().err
    assert open_encoder(written)(["!"]).tolist() == [[0.0] * 5]
    for file, words in ((further, "has no encoder of further texts"), (tmp_path / "t.tsv", "cannot read")):
        with pytest.raises(InputError, match=words):
            open_encoder(file)
    # A damaged record of an encoder is one line.
    path, columns = tmp_path / "v.parquet", {"name": list(TEXTS), "text": list(TEXTS.values())}
    for record in ('{"encoder": ""}', "[]", "3", "null", "{", '{"encoder": "", "dimension": null}'):
        vector_files.write_parquet(path, columns, {vector_files.RECORD: record})
        with pytest.raises(InputError, match=f"^{path} is damaged: it names its encoder as .*$"):
            open_encoder(path)


def test_tables_of_texts(tmp_path):
    frame = pd.DataFrame({"name": ["a", "b"], "label": ["A", None], "text": ["x, y", "z"]})
    expected = {"a": "A. x, y", "b": ". z"}
    frame.to_csv(tmp_path / "t.csv", index=False)
    frame.to_csv(tmp_path / "t.tsv", index=False, header=False, sep="\t")
    frame.to_parquet(tmp_path / "t.parquet")
    assert [read_texts(tmp_path / f"t.{kind}") for kind in ("csv", "tsv", "parquet")] == [expected] * 3
    for name, content, words in (
        ("t.docx", b"", "texts are read from .tsv, .csv, .parquet"),
        ("t.tsv", b"a\n", "has 1 columns"),
        ("t.tsv", b"a\tx\na\ty\n", "has the name 'a' twice"),
        ("t.parquet", b"a", "cannot read"),
        ("none.csv", None, "cannot read"),
    ):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match=words):
            read_texts(tmp_path / name)
    for texts, words in (({"a": "", "b": "!"}, "no words"), ({"a": "one word"}, "1 texts with 3 words")):
        with pytest.raises(InputError, match=words):
            text_vectors(texts)


def test_an_encoder(monkeypatch, tmp_path):
    def encode(texts, normalize_embeddings):
        assert normalize_embeddings
        return np.array([[len(text), 0.0] for text in texts])

    def load(name):
        if name != "small":
            raise OSError(f"{name} is not a local folder\nand is not a model")
        return SimpleNamespace(encode=encode)

    monkeypatch.setitem(sys.modules, "sentence_transformers", SimpleNamespace(SentenceTransformer=load))
    vectors = text_vectors(TEXTS, encoder="small")
    assert vectors.dtype == np.float32 and vectors[:, 0].tolist() == [len(text) for text in TEXTS.values()]
    write_vectors(tmp_path / "v.parquet", TEXTS, vectors, encoder="small")
    assert list(pd.read_parquet(tmp_path / "v.parquet")) == ["name", "embedding"]
    assert open_encoder(tmp_path / "v.parquet")(["four"]).tolist() == [[4.0, 0.0]]
    with pytest.raises(InputError, match="cannot load the encoder large: large is not a local folder and"):
        text_vectors(TEXTS, encoder="large")
