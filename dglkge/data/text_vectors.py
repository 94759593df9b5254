"""Vectors of texts, as features of entities or their initial rows: by TF-IDF, or by a sentence encoder."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
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


Encode = Callable[[Iterable[str]], np.ndarray]
"""Returns a vector of length 1 for each text, (n, D) float32; 0 for a text without words."""

RECORD = b"dglkge.text_vectors"
"""Metadata of a file of vectors: the encoder that made them, and their dimension."""


def text_encoder(texts: Collection[str], dimension: int = 256, encoder: str = "") -> Encode:
    """Return an encoder of texts.

    Parameters
    ----------
    texts : collection of str
        What TF-IDF counts words in; a sentence encoder does not read them.
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
        return lambda some: np.asarray(loaded.encode([*some], normalize_embeddings=True), np.float32)
    import_extra("vectors of texts", "sklearn", "report", "scikit-learn")
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.preprocessing import normalize

    try:
        words = TfidfVectorizer(
            sublinear_tf=True, ngram_range=(1, 2), max_features=MAX_WORDS, dtype=np.float32
        )
        counts = words.fit_transform(texts)
    except ValueError:
        raise InputError("the texts have no words") from None
    if min(counts.shape) < 2:
        raise InputError(
            f"{counts.shape[0]} texts with {counts.shape[1]} words; at least 2 of each are needed"
        )
    reduction = TruncatedSVD(min(dimension, min(counts.shape) - 1), random_state=0).fit(counts)
    return lambda some: np.asarray(normalize(reduction.transform(words.transform(some))), np.float32)


def text_vectors(texts: Mapping[str, str], dimension: int = 256, encoder: str = "") -> np.ndarray:
    """Return the vector of each text, by the name of the entity, (n, D) float32; see :func:`text_encoder`."""
    return text_encoder(texts.values(), dimension, encoder)(texts.values())


def open_encoder(path: Path) -> Encode:
    """Return the encoder that made a file of :func:`write_vectors`; TF-IDF is fitted anew to its texts.

    Raises
    ------
    InputError
        If the file cannot be read or has no encoder; and as :func:`text_encoder`.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        record = (pq.read_schema(path).metadata or {}).get(RECORD)
        made = json.loads(record) if record else {}
        is_fitted = made.get("encoder") == ""
        texts = pq.read_table(path, columns=["text"])["text"].to_pylist() if is_fitted else []
    except (OSError, ValueError, pa.ArrowException) as error:
        raise InputError(f"cannot read {path}: {' '.join(str(error).split())}") from None
    if not made:
        raise InputError(
            f"{path} has no encoder of further texts; dglkge data vectors writes files that have"
        )
    return text_encoder(texts, made["dimension"], made["encoder"])


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


def write_parquet(
    path: Path, columns: Mapping[str, Any], metadata: Mapping[bytes, str] | None = None
) -> None:
    """Write columns to a Parquet file, which is there when it is complete."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            pq.write_table(pa.table(dict(columns), metadata=metadata), file)
    except OSError as error:
        raise write_error(f"cannot write {path}", error) from None


def write_vectors(
    path: Path, texts: Mapping[str, str], vectors: np.ndarray, dimension: int = 256, encoder: str | None = ""
) -> None:
    """Write vectors of texts, by name, and what :func:`open_encoder` needs to make more, if not None.

    A Parquet file with the columns name and embedding, as ``features.files`` reads it; and the texts, where
    TF-IDF was fitted to them.
    """
    import pyarrow as pa

    column = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), vectors.shape[1])
    columns: dict[str, Any] = {"name": list(texts), "embedding": column}
    if encoder == "":
        columns["text"] = list(texts.values())
    record = {"encoder": encoder, "dimension": dimension}
    write_parquet(path, columns, None if encoder is None else {RECORD: json.dumps(record)})
