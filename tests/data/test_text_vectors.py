"""Vectors of texts: TF-IDF by its definition, the files that are read and written, an encoder."""

from __future__ import annotations

import math
import sys
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from dglkge.data.vector_files import open_vectors, read_texts, text_vectors, write_vectors
from dglkge.errors import CheckpointError, InputError, exit_status_of

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
    counts = []
    for text in texts:
        words = text.split()
        counts.append(Counter([*words, *zip(words, words[1:])]))
    in_texts = Counter(word for one in counts for word in one)
    vectors = np.zeros((len(counts), len(in_texts)))
    for row, one in zip(vectors, counts):
        for place, word in enumerate(in_texts):
            if one[word]:
                idf = math.log((1 + len(counts)) / (1 + in_texts[word])) + 1
                row[place] = (1 + math.log(one[word])) * idf
    vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-30)
    return vectors @ vectors.T


def test_as_many_dimensions_as_texts_keep_all_cosines():
    vectors = text_vectors(TEXTS, 100)
    assert vectors.shape == (6, 5) and vectors.dtype == np.float32
    np.testing.assert_allclose(vectors @ vectors.T, cosines_by_definition(TEXTS.values()), atol=1e-5)
    assert not vectors[3].any()


def test_few_dimensions_join_texts_of_one_subject():
    vectors = text_vectors(TEXTS, 2)
    cosines = vectors @ vectors.T
    assert vectors.shape == (6, 2) and cosines[4, 5] > 0.9 > 0.5 > cosines[0, 4]
    assert np.array_equal(vectors, text_vectors(TEXTS, 2))


def test_what_is_written_is_what_training_reads(tmp_path):
    vectors = text_vectors(TEXTS, 3)
    write_vectors(tmp_path / "v.parquet", list(TEXTS), vectors)
    file = open_vectors(tmp_path / "v.parquet")
    assert list(file.names()) == list(TEXTS) and file.width == 3
    ((numbers, rows),) = file.rows(np.arange(6))
    assert np.array_equal(numbers, np.arange(6)) and np.array_equal(rows, vectors)


def test_a_file_that_cannot_be_written(tmp_path):
    path = tmp_path / "v.parquet"
    path.mkdir()
    with pytest.raises(CheckpointError, match=f"^cannot write {path}: ") as caught:
        write_vectors(path, ["a"], np.ones((1, 2), np.float32))
    assert exit_status_of(caught.value) == 2 and [*tmp_path.iterdir()] == [path]


def test_tables_of_texts(tmp_path):
    frame = pd.DataFrame({"name": ["a", "b"], "label": ["A", None], "text": ["x, y", "z"]})
    expected = {"a": "A. x, y", "b": ". z"}
    frame.to_csv(tmp_path / "t.csv", index=False)
    frame.to_csv(tmp_path / "t.tsv", index=False, header=False, sep="\t")
    frame.to_parquet(tmp_path / "t.parquet")
    assert [read_texts(tmp_path / f"t.{kind}") for kind in ("csv", "tsv", "parquet")] == [expected] * 3


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("t.docx", b"", "texts are read from .tsv, .csv, .parquet"),
        ("t.tsv", b"a\n", "has 1 columns"),
        ("t.tsv", b"a\tx\na\ty\n", "has the name 'a' twice"),
        ("t.parquet", b"a", "cannot read"),
        ("t.csv", None, "cannot read"),
    ],
)
def test_tables_that_are_refused(tmp_path, name, content, words):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=words):
        read_texts(tmp_path / name)


def test_texts_without_words():
    for texts, words in (({"a": "", "b": "!"}, "no words"), ({"a": "one word"}, "1 texts with 3 words")):
        with pytest.raises(InputError, match=words):
            text_vectors(texts)


def test_an_encoder(monkeypatch):
    """A stand-in for the package: which calls it gets, and what it refuses."""

    class Encoder:
        def __init__(self, name):
            if name != "small":
                raise OSError(f"{name} is not a local folder\nand is not a model")

        def encode(self, texts, normalize_embeddings):
            assert normalize_embeddings
            return np.array([[len(text), 0.0] for text in texts])

    monkeypatch.setitem(sys.modules, "sentence_transformers", SimpleNamespace(SentenceTransformer=Encoder))
    vectors = text_vectors(TEXTS, encoder="small")
    assert vectors.dtype == np.float32 and vectors[:, 0].tolist() == [len(text) for text in TEXTS.values()]
    with pytest.raises(InputError, match="cannot load the encoder large: large is not a local folder and"):
        text_vectors(TEXTS, encoder="large")
