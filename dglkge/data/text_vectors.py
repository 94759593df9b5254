"""Vectors of texts, as features of entities or their initial rows: by TF-IDF, or by a sentence encoder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dglkge.data.dataset_files import replacing
from dglkge.errors import InputError, import_extra, write_error
from dglkge.registry import deferred

if TYPE_CHECKING:
    import pandas as pd
else:
    pd = deferred("pandas")

MAX_WORDS = 1 << 18
"""Words and pairs of words that TF-IDF counts, those of most texts."""


def text_vectors(texts: Mapping[str, str], dimension: int = 256, encoder: str = "") -> np.ndarray:
    """Return a vector of length 1 for each text, (n, D) float32; 0 for a text without words.

    Parameters
    ----------
    texts : mapping of str to str
        By the name of the entity.
    dimension : int
        Without an encoder: width of the vectors at most, as TF-IDF of words and pairs of words is reduced by
        a truncated singular value decomposition (Deerwester et al. 1990).
    encoder : str
        A model of ``sentence-transformers``, by its name on the Hugging Face hub or its folder.

    Raises
    ------
    InputError
        If a package is missing, the encoder cannot be loaded, or the texts have fewer than 2 words in all.
    """
    if encoder:
        encoders = import_extra("--encoder", "sentence_transformers", "text", "sentence-transformers")
        try:
            loaded = encoders.SentenceTransformer(encoder)
        except (OSError, ValueError) as error:
            raise InputError(f"cannot load the encoder {encoder}: {' '.join(str(error).split())}") from None
        return np.asarray(loaded.encode([*texts.values()], normalize_embeddings=True), np.float32)
    import_extra("vectors of texts", "sklearn", "report", "scikit-learn")
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.preprocessing import normalize

    try:
        words = TfidfVectorizer(
            sublinear_tf=True, ngram_range=(1, 2), max_features=MAX_WORDS, dtype=np.float32
        )
        counts = words.fit_transform(texts.values())
    except ValueError:
        raise InputError("the texts have no words") from None
    if min(counts.shape) < 2:
        raise InputError(
            f"{counts.shape[0]} texts with {counts.shape[1]} words; at least 2 of each are needed"
        )
    width = min(dimension, min(counts.shape) - 1)
    reduced = TruncatedSVD(width, random_state=0).fit_transform(counts)
    return np.asarray(normalize(reduced), np.float32)


def read_texts(path: Path) -> dict[str, str]:
    """Return the texts of a table by the name in its first column; further columns are joined.

    The file is ``.tsv`` (without a header), ``.csv`` (with one) or ``.parquet``. Raises InputError if it
    cannot be read, has fewer than two columns, or a name twice.
    """
    readers: dict[str, Any] = {
        ".tsv": lambda: pd.read_csv(path, sep="\t", header=None, dtype=str, quoting=3, keep_default_na=False),
        ".csv": lambda: pd.read_csv(path, dtype=str, keep_default_na=False),
        ".parquet": lambda: pd.read_parquet(path),
    }
    if path.suffix not in readers:
        raise InputError(f"{path}: texts are read from {', '.join(readers)}")
    try:
        frame = readers[path.suffix]()
    except (OSError, ValueError) as error:  # pandas' and pyarrow's errors are among them
        raise InputError(f"cannot read {path}: {' '.join(str(error).split())}") from None
    if frame.shape[1] < 2:
        raise InputError(f"{path} has {frame.shape[1]} columns; the first is a name, and texts follow")
    names, texts = frame.iloc[:, 0].astype(str), frame.iloc[:, 1:].fillna("").astype(str)
    if (again := names[names.duplicated()]).size:
        raise InputError(f"{path} has the name {again.iloc[0]!r} twice")
    return dict(zip(names, texts.agg(". ".join, axis=1)))


def write_parquet(path: Path, columns: Mapping[str, Any]) -> None:
    """Write columns to a Parquet file, which is there when it is complete."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            pq.write_table(pa.table(dict(columns)), file)
    except OSError as error:
        raise write_error(f"cannot write {path}", error) from None


def write_vectors(path: Path, names: list[str], vectors: np.ndarray) -> None:
    """Write a Parquet file with the columns name and embedding, as ``features.files`` reads it."""
    import pyarrow as pa

    column = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), vectors.shape[1])
    write_parquet(path, {"name": names, "embedding": column})
