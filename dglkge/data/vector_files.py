"""Files of named vectors: npy with a file of names, Parquet, text as of word2vec; and vectors made of texts.

A file is read in blocks, and the numbers of wanted rows only: memory does not grow with the file. Vectors of
texts, as features of entities or their initial rows, come by TF-IDF or from a sentence encoder.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from dglkge.data.dataset_files import replacing
from dglkge.data.partition_layout import map_npy
from dglkge.data.text_format import bare_path, is_number, numbered_lines
from dglkge.data.vocabulary import Vocabulary
from dglkge.errors import InputError, import_extra, os_errors, unknown_name, write_errors
from dglkge.registry import deferred
from dglkge.typing import Doubles, Ids

if TYPE_CHECKING:
    import pandas as pd
else:
    pd = deferred("pandas")

ROWS_AT_A_TIME = 4096
"""Vectors read at a time."""

NAMES_SUFFIX = ".names.txt"
"""Ending of the file of names that lies beside an npy file."""

Block = tuple[Ids, Doubles]


class VectorFile(Protocol):
    """Vectors with names, by their number in the file, from 0; `count` is 1 where only reading tells it."""

    path: Path
    count: int
    width: int

    def names(self) -> Iterator[str]:
        """Yield the name of every vector."""

    def rows(self, numbers: Ids) -> Iterator[Block]:
        """Yield vectors of ascending numbers (n,) in blocks: their numbers (b,) and float64 (b, width)."""

    def place(self, number: int) -> str:
        """Return the file and the place of a vector in it, for messages."""

    def key(self, name: str) -> str:
        """Return what two equal names have in common: formats may have changed them."""
        return name


def open_vectors(
    path: Path, names: str = "", name_column: str = "name", column: str = "embedding"
) -> VectorFile:
    """Open a file of named vectors; its format is that of its suffix.

    Parameters
    ----------
    path : Path
        ``.npy``, ``.parquet`` or ``.pq``, ``.vec`` or ``.txt`` (fields separated by spaces), ``.tsv`` (by
        tabs); a text may also end in ``.gz``.
    names : str
        File with a name on each line, of an npy file; empty: that beside it, ``x.names.txt`` of ``x.npy``.
    name_column, column : str
        Columns of a Parquet file.
    """
    kind, text_kind = path.suffix.lower(), bare_path(path).suffix.lower()
    if not path.is_file():
        raise InputError(f"cannot read {path}: there is no such file")
    if kind == ".npy":
        file: VectorFile = _Npy(path, Path(names) if names else path.with_suffix(NAMES_SUFFIX))
    elif names:
        raise InputError(f"{path}: a file of names goes with an npy file only, got {names}")
    elif kind in (".parquet", ".pq"):
        file = _Parquet(path, name_column, column)
    elif text_kind in (".vec", ".txt", ".tsv"):
        file = _Text(path, "\t" if text_kind == ".tsv" else " ")
    else:
        known = ".npy, .parquet, .pq, .vec, .txt, .tsv, and .vec.gz, .txt.gz, .tsv.gz"
        raise InputError(f"{path}: the suffix says no format of vectors; allowed: {known}")
    if file.count < 1 or file.width < 1:
        raise InputError(f"{path} has no vectors: {file.count} rows of {file.width} numbers")
    return file


def word2vec_name(name: str) -> str:
    """Return a name without white space, which separates the fields of word2vec's text format."""
    return "_".join(name.split())


class _Npy(VectorFile):
    """A matrix in an npy file, and the names of its rows in a text file."""

    def __init__(self, path: Path, names: Path) -> None:
        self.path = path
        self._names = names
        matrix = self._matrix = map_npy(path)
        if matrix.ndim != 2 or matrix.dtype.kind not in "fiu":
            got = f"{matrix.dtype} of shape {matrix.shape}"
            raise InputError(f"{path}: expected a matrix of numbers, one row a vector, got {got}")
        self.count, self.width = matrix.shape

    def names(self) -> Iterator[str]:
        count = 0
        for _, line in numbered_lines(self._names):
            yield line
            count += 1
        if count != self.count:
            names = f"{self._names} has {count} names"
            raise InputError(f"{names}, {self.path} has {self.count} rows; allowed: as many")

    def rows(self, numbers: Ids) -> Iterator[Block]:
        for block in _blocks(numbers):
            yield block, np.asarray(self._matrix[block], dtype=np.float64)

    def place(self, number: int) -> str:
        return f"{self._names}:{number + 1}"


class _Parquet(VectorFile):
    """A column of names and one of lists of numbers."""

    def __init__(self, path: Path, name_column: str, column: str) -> None:
        # Imported here: only those who give Parquet wait for it.
        import pyarrow as pa
        import pyarrow.parquet as pq

        self.path = path
        self._name_column, self._column = name_column, column
        with os_errors(InputError, f"{path} is damaged or not Parquet", pa.ArrowException):
            self._file = pq.ParquetFile(path)
        schema = self._file.schema_arrow
        for name in (name_column, column):
            if schema.get_field_index(name) < 0:
                known = ", ".join(schema.names)
                raise InputError(f"{path} has no column {name!r} (or several); its columns: {known}")
        kind, name_type = schema.field(column).type, schema.field(name_column).type
        types = pa.types
        is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
        if not is_list or not (types.is_floating(kind.value_type) or types.is_integer(kind.value_type)):
            raise InputError(f"{path}: column {column!r} is {kind}; allowed: lists of numbers")
        name_type = name_type.value_type if types.is_dictionary(name_type) else name_type
        if not any(fits(name_type) for fits in (types.is_string, types.is_large_string, types.is_integer)):
            raise InputError(
                f"{path}: column {name_column!r} is {name_type}; allowed: texts or whole numbers"
            )
        groups = range(self._file.num_row_groups)
        self._starts = np.cumsum([0, *(self._file.metadata.row_group(group).num_rows for group in groups)])
        self.count = int(self._starts[-1])
        first = next(self._file.iter_batches(1, columns=[column])) if self.count else None
        self.width = len(first.column(0)[0].as_py() or ()) if first else 0

    def names(self) -> Iterator[str]:
        batches = self._file.iter_batches(ROWS_AT_A_TIME, columns=[self._name_column])
        for number, name in enumerate(name for batch in batches for name in batch.column(0).to_pylist()):
            if name is None:
                raise InputError(f"{self.place(number)}: the column {self._name_column!r} has no value")
            yield str(name)

    def rows(self, numbers: Ids) -> Iterator[Block]:
        # Row groups without one of these vectors are not read.
        for group in np.unique(np.searchsorted(self._starts, numbers, side="right") - 1).tolist():
            start = int(self._starts[group])
            for batch in self._file.iter_batches(ROWS_AT_A_TIME, row_groups=[group], columns=[self._column]):
                block = numbers[slice(*np.searchsorted(numbers, [start, start + len(batch)]))]
                if len(block):
                    yield block, self._vectors(batch.column(0).take(block - start), block)
                start += len(batch)

    def _vectors(self, lists: Any, numbers: Ids) -> Doubles:
        """Return the numbers of lists as a matrix."""
        lengths = lists.value_lengths().fill_null(-1).to_numpy(zero_copy_only=False)
        # A list of fixed length that is null has that length all the same.
        lengths = np.where(lists.is_null().to_numpy(zero_copy_only=False), -1, lengths)
        wrong = np.flatnonzero(lengths != self.width)
        if len(wrong):
            row = int(wrong[0])
            got = "no value" if lengths[row] < 0 else f"{lengths[row]} numbers"
            text = f"the column {self._column!r} has {got}, expected {self.width} as in row 0"
            raise InputError(f"{self.place(int(numbers[row]))}: {text}")
        values = lists.flatten().to_numpy(zero_copy_only=False).astype(np.float64)
        return values.reshape(len(numbers), self.width)

    def place(self, number: int) -> str:
        return f"{self.path}: row {number} (from 0)"


class _Text(VectorFile):
    """A name and its numbers on each line; the first line may have the numbers of vectors and of columns."""

    def __init__(self, path: Path, separator: str) -> None:
        self.path = path
        self._separator = separator
        fields = next(numbered_lines(path))[1].rstrip().split(separator)
        self._has_head = len(fields) == 2 and all(field.isascii() and field.isdigit() for field in fields)
        if self._has_head:
            self.count, self.width = int(fields[0]), int(fields[1])
        else:
            # GloVe has no head. A name may have spaces, so numbers are counted from the right.
            self.count, self.width = 1, len([*takewhile(is_number, reversed(fields[1:]))])

    def names(self) -> Iterator[str]:
        count = 0
        for fields in self._fields():
            yield fields[0]
            count += 1
        if self._has_head and self.count != count:
            counts = f"the first line says {self.count} vectors, the file has {count}"
            raise InputError(f"{self.path}:1: {counts}: it is cut off or damaged")

    def rows(self, numbers: Ids) -> Iterator[Block]:
        lines = enumerate(self._fields())
        for block in _blocks(numbers):
            rows = np.empty((len(block), self.width))
            for row, number in enumerate(block.tolist()):
                texts = next(fields[1:] for line, fields in lines if line == number)
                try:
                    rows[row] = texts
                except ValueError:
                    wrong = next(text for text in texts if not is_number(text))
                    raise InputError(f"{self.place(number)}: {wrong!r} is no number") from None
            yield block, rows

    def _fields(self) -> Iterator[list[str]]:
        """Yield the name and the texts of the numbers of each line."""
        lines = numbered_lines(self.path)
        if self._has_head:
            next(lines)
        for number, (_, line) in enumerate(lines):
            # word2vec's own program ends each line with a space.
            fields = line.rstrip(" \t").rsplit(self._separator, self.width)
            if len(fields) != self.width + 1:
                got = f"a name and {len(fields) - 1} numbers"
                raise InputError(f"{self.place(number)}: {got}, expected {self.width} numbers")
            yield fields

    def place(self, number: int) -> str:
        return f"{self.path}:{number + 1 + self._has_head}"

    def key(self, name: str) -> str:
        return word2vec_name(name) if self._separator == " " else name


def _blocks(numbers: Ids) -> Iterator[Ids]:
    for start in range(0, len(numbers), ROWS_AT_A_TIME):
        yield numbers[start : start + ROWS_AT_A_TIME]


@dataclass(frozen=True)
class FeatureFile:
    """A file of vectors, and the entity types whose names are looked up in it."""

    path: Path
    entity_types: list[str]


def feature_files(texts: Sequence[str], entity_types: Sequence[str], field: str) -> list[FeatureFile]:
    """Return the files that texts ``FILE`` or ``TYPE=FILE`` name; ``FILE`` alone is of all entity types.

    Nothing is read. Raises InputError, with the field, if a type is unknown or has two files.
    """
    files = []
    taken: dict[str, str] = {}
    for text in texts:
        name, separator, path = text.partition("=")
        is_typed = bool(separator) and "/" not in name
        if is_typed and name not in entity_types:
            raise InputError(f"{field} has {text!r}: {unknown_name('entity type', name, list(entity_types))}")
        types = [name] if is_typed else list(entity_types)
        for type_ in types:
            if type_ in taken:
                two = f"{taken[type_]!r} and {text!r}"
                raise InputError(f"{field} has {two} for the entity type {type_!r}; allowed: one")
            taken[type_] = text
        files.append(FeatureFile(Path(path if is_typed else text), types))
    return files


def read_new_vectors(
    path: Path, known: Vocabulary, names: str = "", name_column: str = "name", column: str = "embedding"
) -> tuple[list[str], np.ndarray]:
    """Read names that a vocabulary lacks, in the order of the file, and their vectors (n, F) float32.

    ``names`` and the columns are as of :func:`open_vectors`.

    Raises
    ------
    InputError
        If the file cannot be read, or a name stands in it twice.
    """
    file = open_vectors(path, names, name_column, column)
    old = {file.key(name) for name in known.names}
    places: dict[str, int] = {}
    for number, name in enumerate(file.names()):
        if file.key(name) in old:
            continue
        if name in places:
            raise InputError(
                f"{file.place(number)}: the name {name!r} stands at {file.place(places[name])} already; "
                "allowed is once"
            )
        places[name] = number
    new = np.array(list(places.values()), np.int64)
    vectors = np.empty((len(new), file.width), np.float32)
    for numbers, rows in file.rows(new):
        vectors[np.searchsorted(new, numbers)] = rows
    return list(places), vectors


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
        with os_errors(InputError, f"cannot load the encoder {encoder}", ValueError):
            loaded = encoders.SentenceTransformer(encoder)
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
        num_texts, num_words = counts.shape
        raise InputError(f"{num_texts} texts with {num_words} words; at least 2 of each are needed")
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
        if not record:
            raise InputError(f"{path} has no encoder of further texts, as dglkge data vectors writes it")
        fields = json.loads(record)
        dimension, encoder = int(fields["dimension"]), str(fields["encoder"])
        texts = [] if encoder else list(map(str, pq.read_table(path, columns=["text"])["text"].to_pylist()))
    except (KeyError, TypeError, json.JSONDecodeError):
        raise InputError(f"{path} is damaged: it names its encoder as {record!r}") from None
    except (OSError, ValueError, pa.ArrowException) as error:
        raise InputError(f"cannot read {path}: {' '.join(str(error).split())}") from None
    return text_encoder(texts, dimension, encoder)


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
    # Errors of pandas and pyarrow are among these.
    with os_errors(InputError, f"cannot read {path}", ValueError):
        frame = readers[path.suffix]()
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

    with write_errors(f"cannot write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            pq.write_table(pa.table(dict(columns), metadata=metadata), file)


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
