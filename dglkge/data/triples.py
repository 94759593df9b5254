"""Reads triples from text and Parquet files and from data frames, a chunk at a time.

Only the distinct names of a chunk ever become Python strings: Arrow parses the text and encodes each column
as a dictionary, and a chunk is a data frame of categorical columns.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from dglkge.data.text_format import (
    EXTENSIONS,
    ROLES,
    WEIGHT,
    Columns,
    RowRules,
    TextFormat,
    codec,
    edge_list_header,
    extension,
    first_bad_line,
    open_binary,
    text_format,
)
from dglkge.errors import InputError

# Bytes of text, and rows of other sources, for each chunk: bounds memory whatever the size of the file.
BLOCK_BYTES = 16 << 20
CHUNK_ROWS = 1 << 18
# Arrow keeps each distinct name of a block once, and the rows as 32-bit codes.
_NAME = pa.dictionary(pa.int32(), pa.string())
_READ_ERRORS = (OSError, EOFError, zlib.error, pa.ArrowException)


@dataclass(frozen=True)
class _TextFile:
    """A text file, its fields, and the name of each role's field."""

    path: Path
    text: TextFormat
    field_names: list[str]
    has_header: bool
    names: dict[str, str]


def read_chunks(
    path: Path,
    columns: Columns | None = None,
    delimiter: str | None = None,
    rules: RowRules | None = None,
    on_bytes: Callable[[int], None] | None = None,
    block_bytes: int = BLOCK_BYTES,
    kind: str | None = None,
    skip_first: bool = False,
) -> Iterator[pd.DataFrame]:
    """Read triples from a file.

    Parameters
    ----------
    path : Path
        A ``.tsv``, ``.txt`` or ``.csv`` file, each also with ``.gz`` or ``.bz2``, or a ``.parquet`` file.
    columns : Columns, optional
        Columns of the parts of a triple; head, relation, tail by default.
    delimiter : str, optional
        Instead of the comma of CSV and the tab of the others.
    rules : RowRules, optional
        Whether fields are names (default) or integer ids, and of which range.
    on_bytes : callable, optional
        Called after each chunk with the number of bytes of the file read so far.
    block_bytes : int
        Bytes of text parsed at a time; no line may be longer.
    kind : str, optional
        ``"tsv"``, ``"csv"`` or ``"parquet"``, instead of what the file's extension says.
    skip_first : bool
        Whether the first line of text is neither a triple nor a header.

    Yields
    ------
    DataFrame
        Columns head, relation, tail (categorical, or int64 with integer ids) and, if wanted, weight
        (float32).

    Raises
    ------
    InputError
        If the file is missing, empty or damaged, or has a bad line: the message begins with ``file:line``.
    """
    columns, rules, report = columns or Columns(), rules or RowRules(), on_bytes or (lambda _: None)
    if not path.is_file():
        raise InputError(f"{path}: there is no such file")
    if path.stat().st_size == 0:
        raise InputError(f"{path}: the file is empty")
    suffix = f".{kind}" if kind else extension(path)
    if suffix not in EXTENSIONS:
        raise InputError(
            f"{path}: unknown kind of file; known are {', '.join(EXTENSIONS)}, "
            "the text ones also with .gz or .bz2"
        )
    if suffix == ".parquet":
        chunks = _read_parquet(path, columns, rules, report)
    else:
        text = text_format(path, delimiter, suffix)
        chunks = _read_text(path, columns, text, rules, report, block_bytes, skip_first)
    num_rows = 0
    for chunk in chunks:
        num_rows += len(chunk)
        yield chunk
    if num_rows == 0:
        raise InputError(f"{path}: the file is empty: it has no triples")


def frame_chunks(frame: pd.DataFrame, columns: Columns, rules: RowRules, name: str) -> Iterator[pd.DataFrame]:
    """Read triples from a data frame, in the same form as :func:`read_chunks` for a file.

    Raises
    ------
    InputError
        If a column is missing or a row is bad: the message names the split and the row.
    """
    names = columns.names_or_roles
    for column in names.values():
        if column not in frame.columns:
            raise InputError(f"{name}: no column {column!r}; there are {', '.join(map(str, frame.columns))}")
    if len(frame) == 0:
        raise InputError(f"{name}: the data frame is empty")
    for start in range(0, len(frame), CHUNK_ROWS):
        part = frame.iloc[start : start + CHUNK_ROWS]
        try:
            arrays = {role: pa.array(part[column], from_pandas=True) for role, column in names.items()}
        except pa.ArrowException as error:
            raise InputError(f"{name}: a column mixes several types: {error}") from error
        yield _checked_frame(arrays, rules, name, start)


def place_of_row(path: Path, row: int, columns: Columns | None = None, delimiter: str | None = None) -> str:
    """Return where a triple of a file is, for messages: ``file:line``, or ``file: row n`` of Parquet.

    Parameters
    ----------
    path : Path
        A file that :func:`read_chunks` reads with the same options.
    row : int
        Index of the triple in the order of :func:`read_chunks`, from 0.
    """
    return places_of_rows(path, [row], columns, delimiter)[row]


def places_of_rows(
    path: Path, rows: Collection[int], columns: Columns | None = None, delimiter: str | None = None
) -> dict[int, str]:
    """Return where triples of a file are, as :func:`place_of_row`; the file is read once."""
    places = {row: f"{path}: row {row + 1}" for row in rows}
    if extension(path) == ".parquet" or not places:
        return places
    file = _look_at(path, columns or Columns(), text_format(path, delimiter))
    last = max(places)
    with open(path, "rb") as raw:
        # Arrow skips empty lines, so a row's number is not that of its line.
        row = -1 - int(file.has_header)
        for number, line in enumerate(open_binary(raw, path), start=1):
            if line.rstrip(b"\n") in (b"", b"\r"):
                continue
            row += 1
            if row in places:
                places[row] = f"{path}:{number}"
            if row >= last:
                break
    return places


def _read_parquet(
    path: Path, columns: Columns, rules: RowRules, report: Callable[[int], None]
) -> Iterator[pd.DataFrame]:
    names = columns.names_or_roles
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for column in names.values():
                if column not in file.schema_arrow.names:
                    known = ", ".join(file.schema_arrow.names)
                    raise InputError(f"{path}: no column {column!r}; the file has {known} (see --columns)")
            num_rows = 0
            # Parquet has no byte position of a row, so progress is estimated from the number of rows.
            for batch in file.iter_batches(CHUNK_ROWS, columns=list(names.values())):
                arrays = {role: batch.column(column) for role, column in names.items()}
                yield _checked_frame(arrays, rules, str(path), num_rows)
                num_rows += len(batch)
                report(path.stat().st_size * num_rows // max(file.metadata.num_rows, 1))
    except _READ_ERRORS as error:
        raise InputError(f"{path}: cannot be read as Parquet: {error}") from error


def _checked_frame(arrays: dict[str, pa.Array], rules: RowRules, place: str, first_row: int) -> pd.DataFrame:
    """Turn typed columns into a chunk; the rows of a bad one are counted from 1."""
    data = {}
    for role, array in arrays.items():
        # A cast of floats to strings would turn an id 1 into the name "1.0", for instance in columns with
        # gaps.
        if pa.types.is_floating(array.type) and role != WEIGHT:
            raise InputError(f"{place}: the {role} column holds {array.type}, expected names or integers")
        try:
            wanted = pa.float64() if role == WEIGHT else pa.int64() if rules.integer_ids else pa.string()
            array = array.cast(wanted)
        except pa.ArrowException as error:
            raise InputError(
                f"{place}: the {role} column holds {array.type}, expected {wanted}: {error}"
            ) from error
        if array.null_count:
            row = first_row + int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
            raise InputError(f"{place}: row {row + 1}: the {role} is empty")
        data[role] = array if role == WEIGHT or rules.integer_ids else array.dictionary_encode()
    frame = _frame(data)
    bad = _bad_rows(frame, rules)
    if len(bad):
        row = frame.iloc[int(bad[0])]
        faults = [rules.fault(role, str(row[role])) for role in frame.columns]
        raise InputError(
            f"{place}: row {first_row + int(bad[0]) + 1}: {next(fault for fault in faults if fault)}"
        )
    return frame


def _frame(columns: dict[str, pa.Array]) -> pd.DataFrame:
    return pd.DataFrame({role: array.to_pandas() for role, array in columns.items()})


def _bad_rows(frame: pd.DataFrame, rules: RowRules) -> np.ndarray:
    """Return the rows of a chunk that break a rule (not the exact one: the caller finds out which)."""
    bad = np.zeros(len(frame), dtype=bool)
    for role in ROLES:
        if rules.integer_ids:
            ids = frame[role].to_numpy()
            bad |= (ids < 0) | (ids >= rules.limits[role])
        # Categories are few: the rows are only compared if an empty name occurs at all.
        elif "" in frame[role].cat.categories:
            bad |= (frame[role] == "").to_numpy()
    if WEIGHT in frame:
        weights = frame[WEIGHT].to_numpy()
        bad |= ~(np.isfinite(weights) & (weights >= 0))
    return np.flatnonzero(bad)


def _look_at(path: Path, columns: Columns, text: TextFormat, skip_first: bool = False) -> _TextFile:
    """Read the first line: find out whether it is a header, and the column of each part."""
    with open(path, "rb") as raw:
        # Errors in the encoding are replaced here; the parser reports them with a line number.
        line = open_binary(raw, path).readline().decode("utf-8-sig", errors="replace").rstrip("\r\n")
    try:
        fields = text.split(line)
    except ValueError as error:
        raise InputError(f"{path}:1: {error}") from error
    by_place = {role: role for role in columns.order}
    if skip_first:
        return _TextFile(path, text, list(columns.order), True, by_place)
    names = columns.names_or_roles if columns.names else _header_names(fields, columns, text)
    if not names:
        return _TextFile(path, text, list(columns.order), False, by_place)
    for column in names.values():
        if fields.count(column) != 1:
            found = "no" if column not in fields else "more than one"
            raise InputError(
                f"{path}:1: {found} column {column!r}; the header has {', '.join(fields)} (see --columns)"
            )
    return _TextFile(path, text, fields, True, names)


def _header_names(fields: list[str], columns: Columns, text: TextFormat) -> dict[str, str]:
    """Return the column of each role if the first line is a header, else an empty dict."""
    # A file without quotes (TSV) has a header only if the user names columns: "head" may be an entity's name.
    if not text.quoted:
        return {}
    if set(columns.order) <= set(fields):
        return columns.names_or_roles
    return edge_list_header(fields) if columns == Columns() else {}


def header_of(path: Path, columns: Columns, delimiter: str | None, kind: str) -> dict[str, str]:
    """Return the column of each role that the header of a CSV file was found to have, empty without one.

    Raises
    ------
    InputError
        If the file cannot be read.
    """
    try:
        file = _look_at(path, columns, text_format(path, delimiter, f".{kind}"))
    except _READ_ERRORS as error:
        raise InputError(f"{path}: cannot be read: {error}") from error
    return file.names if file.has_header else {}


def _read_text(
    path: Path,
    columns: Columns,
    text: TextFormat,
    rules: RowRules,
    report: Callable[[int], None],
    block_bytes: int,
    skip_first: bool,
) -> Iterator[pd.DataFrame]:
    try:
        file = _look_at(path, columns, text, skip_first)
    except _READ_ERRORS as error:
        raise InputError(f"{path}: cannot be read: {error}") from error
    names = file.names
    try:
        # Arrow's own file objects: its read-ahead thread would call a Python one during exit, and abort.
        raw = pa.OSFile(str(path))
        stream = pa.CompressedInputStream(raw, codec(path)) if codec(path) else raw
        for batch in _open_csv(file, stream, names, rules, block_bytes):
            chunk = _frame({role: batch.column(name) for role, name in names.items()})
            # The block is parsed but has no line numbers: a second, slow pass finds the line.
            if len(_bad_rows(chunk, rules)):
                raise _bad_line(file, names, rules, "a line breaks the rules")
            yield chunk
            report(raw.tell())
    except pa.ArrowInvalid as error:
        raise _bad_line(file, names, rules, str(error)) from error
    except _READ_ERRORS as error:
        raise InputError(f"{path}: cannot be read: {error}") from error


def _open_csv(
    file: _TextFile, stream: object, names: dict[str, str], rules: RowRules, block_bytes: int
) -> pa.csv.CSVStreamingReader:
    types = {name: pa.int64() if rules.integer_ids else _NAME for name in names.values()}
    if WEIGHT in names:
        types[names[WEIGHT]] = pa.float32()
    return pa.csv.open_csv(
        stream,
        pa.csv.ReadOptions(
            use_threads=False,
            block_size=block_bytes,
            column_names=file.field_names,
            skip_rows=int(file.has_header),
        ),
        pa.csv.ParseOptions(delimiter=file.text.delimiter, quote_char='"' if file.text.quoted else False),
        # Nothing is null: a name may well be "NA" or "null".
        pa.csv.ConvertOptions(
            column_types=types,
            include_columns=list(names.values()),
            null_values=[],
            strings_can_be_null=False,
        ),
    )


def _bad_line(file: _TextFile, names: dict[str, str], rules: RowRules, otherwise: str) -> InputError:
    places = {role: file.field_names.index(name) for role, name in names.items()}
    try:
        with open(file.path, "rb") as raw:
            lines = open_binary(raw, file.path)
            found = first_bad_line(lines, file.text, places, len(file.field_names), file.has_header, rules)
    except _READ_ERRORS as error:
        return InputError(f"{file.path}: cannot be read: {error}")
    if found is None:
        return InputError(f"{file.path}: cannot be read: {otherwise}")
    return InputError(f"{file.path}:{found[0]}: {found[1]}")
