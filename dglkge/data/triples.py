"""Reads triples from text and Parquet files and from data frames, a chunk at a time.

Arrow parses; names stay in its arrays. A file is read block by block in order, while any thread may parse
a block. A chunk of :meth:`TripleFile.frames` is a data frame of categorical columns, so only the distinct
names of a chunk become Python strings.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from dglkge.data import text_format
from dglkge.data.text_format import ROLES, TIME, WEIGHT, Columns, RowRules, open_stream, read_errors
from dglkge.errors import InputError, os_errors

# Bytes of text, and rows of other sources, for each chunk: bounds memory whatever the size of the file.
BLOCK_BYTES = 16 << 20
CHUNK_ROWS = 1 << 18
_BYTE_ORDER_MARK = "\ufeff".encode()


def string_buffers(names: pa.StringArray | pa.LargeStringArray) -> tuple[np.ndarray, np.ndarray]:
    """Return offsets (n + 1,) and bytes of an array of strings without nulls, as views."""
    dtype = np.int64 if pa.types.is_large_string(names.type) else np.int32
    _, offsets, data = names.buffers()
    if len(names) == 0 or offsets is None:
        return np.zeros(1, dtype), np.zeros(0, np.uint8)
    ends = np.frombuffer(offsets, dtype)[names.offset : names.offset + len(names) + 1]
    return ends, np.zeros(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)


@dataclass(frozen=True)
class _TextFile:
    """A text file, its fields, and the name of each role's field."""

    text: text_format.TextFormat
    field_names: list[str]
    has_header: bool
    names: dict[str, str]


@dataclass(frozen=True)
class Block:
    """A part of a file: whole lines, or columns and their first row; the file's bytes read with it."""

    content: bytes | dict[str, pa.Array]
    position: int
    first_row: int = 0


@dataclass(eq=False)
class TripleFile:
    """A file of triples: its blocks are read in order, and any thread may parse one.

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
    kind : str, optional
        ``"tsv"``, ``"csv"`` or ``"parquet"``, instead of what the file's extension says.
    skip_first : bool
        Whether the first line of text is neither a triple nor a header.
    read_bytes : int
        Bytes of text that are read at a time, up to :data:`BLOCK_BYTES`; no line may be longer than these.
    """

    path: Path
    columns: Columns = Columns()
    delimiter: str | None = None
    rules: RowRules = RowRules()
    _: KW_ONLY
    kind: str | None = None
    skip_first: bool = False
    read_bytes: int | None = None

    @property
    def _suffix(self) -> str:
        return f".{self.kind}" if self.kind else text_format.extension(self.path)

    def frames(self) -> Iterator[pd.DataFrame]:
        """Read the file in chunks.

        Yields
        ------
        DataFrame
            Columns head, relation, tail (categorical, or int64 with integer ids) and, if wanted, weight
            (float32) and time (categorical).

        Raises
        ------
        InputError
            If the file is missing, empty or damaged, or has a bad line: the message begins with
            ``file:line``.
        """
        for block in self.blocks():
            yield pa.table(self.arrays(block)).to_pandas(strings_to_categorical=True)

    def blocks(self) -> Iterator[Block]:
        """Read the file; raises InputError if it is missing, empty or damaged."""
        path = self.path
        if not path.is_file():
            raise InputError(f"{path}: there is no such file")
        if path.stat().st_size == 0:
            raise InputError(f"{path}: the file is empty")
        if self._suffix not in text_format.EXTENSIONS:
            known = f"{', '.join(text_format.EXTENSIONS)}, the text ones also with .gz or .bz2"
            raise InputError(f"{path}: unknown kind of file; known are {known}")
        is_empty = True
        for block in self._parquet_blocks() if self._suffix == ".parquet" else self._text_blocks():
            is_empty = False
            yield block
        if is_empty:
            raise InputError(f"{path}: the file is empty: it has no triples")

    @property
    def header(self) -> dict[str, str]:
        """The column of each role that the first line of a text file has; empty without a header."""
        return self._text.names if self._suffix != ".parquet" and self._text.has_header else {}

    def places(self, rows: Collection[int]) -> dict[int, str]:
        """Return where some rows, from 0, are, for messages: ``file:line``, or ``file: row n`` of Parquet."""
        places = {row: f"{self.path}: row {row + 1}" for row in rows}
        if self._suffix == ".parquet" or not rows:
            return places
        # Arrow also ends lines at a lone carriage return: such a row has no line of its own.
        numbered = enumerate(itertools.islice(self._lines(), max(rows) + 1))
        return places | {row: f"{self.path}:{number}" for row, (number, _) in numbered if row in places}

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield number and content of each line but the header, and the empty ones, which Arrow skips."""
        skips = self._text.has_header
        with read_errors(self.path), open_stream(self.path) as (_, lines):
            for number, line in enumerate(lines, start=1):
                # Only one carriage return belongs to the end of a line.
                content = line.removesuffix(b"\n").removesuffix(b"\r")
                if content and not skips:
                    yield number, content
                skips = skips and not content

    @cached_property
    def _text(self) -> _TextFile:
        """The first line that is not empty: whether it is a header, and the column of each part."""
        path, columns = self.path, self.columns
        text = text_format.text_format(path, self.delimiter, self._suffix)
        with read_errors(path), open_stream(path) as (_, stream):
            # Errors in the encoding are replaced here; the parser reports them with a line number.
            texts = (line.decode("utf-8-sig", errors="replace").rstrip("\r\n") for line in stream)
            line, second, *_ = *itertools.islice(filter(None, texts), 2), "", ""
        try:
            fields = text.split(line)
        except ValueError as error:
            raise InputError(f"{path}:1: {error}") from error
        by_place = {role: role for role in columns.order}
        names = columns.names
        if not names and not self.skip_first:
            names = text_format.columns_of_header(fields, columns)
            # In a file without quotes these words may be names, too: a relation's name is likely to stand
            # again. Of a second line of CSV nothing is asked; its quotes may go on in the third.
            if names and not text.quoted:
                relation = fields.index(names["relation"])
                is_triple = not second or fields[relation] in text.split(second)[relation : relation + 1]
                names = {} if is_triple else names
        if not names or self.skip_first:
            return _TextFile(text, list(columns.order), self.skip_first, by_place)
        for column in names.values():
            if fields.count(column) != 1:
                count = "no" if column not in fields else "more than one"
                known = f"the header has {', '.join(fields)} (see --columns)"
                raise InputError(f"{path}:1: {count} column {column!r}; {known}")
        return _TextFile(text, fields, True, names)

    def arrays(self, block: Block) -> dict[str, pa.Array]:
        """Parse a block; raises InputError, with ``file:line``, if it has a bad line.

        Columns are strings (int64 with integer ids) and, if wanted, floats of weight and strings of time.
        """
        if isinstance(block.content, bytes):
            return self._parsed(block.content)
        return _checked(block.content, self.rules, str(self.path), block.first_row)

    def _parquet_blocks(self) -> Iterator[Block]:
        path = self.path
        with (
            read_errors(path, pa.ArrowException, action="cannot be read as Parquet"),
            pyarrow.parquet.ParquetFile(path) as file,
        ):
            known = file.schema_arrow.names
            header = {} if self.columns.names else text_format.columns_of_header(known, self.columns)
            names = header or self.columns.names_or_roles
            for column in names.values():
                if column not in known:
                    there = f"the file has {', '.join(known)} (see --columns)"
                    raise InputError(f"{path}: no column {column!r}; {there}")
            num_rows = 0
            # Parquet has no byte position of a row, so progress is estimated from the number of rows.
            for batch in file.iter_batches(CHUNK_ROWS, columns=list(names.values())):
                first, num_rows = num_rows, num_rows + len(batch)
                position = path.stat().st_size * num_rows // max(file.metadata.num_rows, 1)
                if len(batch):
                    columns = {role: batch.column(column) for role, column in names.items()}
                    yield Block(columns, position, first)

    def _text_blocks(self) -> Iterator[Block]:
        path = self.path
        codec, is_first = text_format.compression(path), not self._text.has_header
        try:
            with read_errors(path), pa.OSFile(str(path)) as raw:
                for content in self._whole_lines(pa.CompressedInputStream(raw, codec) if codec else raw):
                    # In a block that is not the file's first, Arrow is to take nothing for a byte order mark.
                    has_mark = content.startswith(_BYTE_ORDER_MARK) and not is_first
                    is_first = False
                    # Arrow calls nothing but empty lines an error.
                    if content.strip(b"\r\n"):
                        yield Block(b"\n" * has_mark + content, raw.tell())
        except pa.ArrowException as error:
            raise self._bad_line(str(error)) from error

    def _whole_lines(self, stream: pa.NativeFile) -> Iterator[bytes]:
        """Yield the content behind the header, cut behind ends of lines."""
        skips, rest = self._text.has_header, b""
        while read := stream.read(min(self.read_bytes or BLOCK_BYTES, BLOCK_BYTES)):
            content = rest + read
            # A lone carriage return ends a line for Arrow. Of "\r\n" cut in two, it skips the empty line.
            cut = 1 + max(content.rfind(b"\n"), content.rfind(b"\r"))
            if cut == 0 and len(content) > BLOCK_BYTES:
                fault = f"a line is longer than a block of {BLOCK_BYTES} bytes"
                raise InputError(f"{self.path}: cannot be read: {fault}")
            content, rest = content[:cut], content[cut:]
            if not content:
                continue
            if skips:
                header = re.match(rb"[\r\n]*[^\r\n]+", content)
                content, skips = content[header.end() if header else len(content) :], header is None
            yield content
        if rest and not skips:
            yield rest

    def _parsed(self, content: bytes) -> dict[str, pa.Array]:
        file = self._text
        try:
            table = _parse_csv(file, content, self.rules)
        except pa.ArrowInvalid as error:
            raise self._bad_line(str(error)) from error
        arrays = {role: _one_array(table.column(name)) for role, name in file.names.items()}
        # The block is parsed but has no line numbers: a second, slow pass finds the line.
        if len(_bad_rows(arrays, self.rules)):
            raise self._bad_line("a line breaks the rules")
        return arrays

    def _bad_line(self, otherwise: str) -> InputError:
        """Return the error of the first bad line: blocks have no line numbers, so the file is read again."""
        try:
            for number, line in self._lines():
                if fault := self._line_fault(number, line):
                    return InputError(f"{self.path}:{number}: {fault}")
        except InputError as error:
            return error
        return InputError(f"{self.path}: cannot be read: {otherwise}")

    def _line_fault(self, number: int, content: bytes) -> str | None:
        file, delimiter = self._text, self._text.text.delimiter
        try:
            # A byte order mark is allowed at the start of the file only.
            line = content.decode("utf-8-sig" if number == 1 else "utf-8")
            if "\r" in line:
                return "there is a carriage return inside the line"
            fields = file.text.split(line)
        except UnicodeDecodeError as error:
            return f"byte {error.start + 1} of the line is not UTF-8"
        except ValueError as error:
            return str(error)
        if len(fields) != len(file.field_names):
            separator = {"\t": "tabs", ",": "commas"}.get(delimiter, repr(delimiter))
            hint = "; see --delimiter" if len(fields) == 1 else ""
            got = f"got {len(fields)} columns separated by {separator}"
            return f"{got}, expected {len(file.field_names)}: {line[:80]!r}{hint}"
        by_name = dict(zip(file.field_names, fields))
        return self.rules.first_fault((role, by_name[name]) for role, name in file.names.items())


def _one_array(column: pa.ChunkedArray) -> pa.Array:
    # Arrow would copy a single chunk.
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)


def frame_chunks(
    frame: pd.DataFrame | pa.Table, columns: Columns, rules: RowRules, name: str
) -> Iterator[dict[str, pa.Array]]:
    """Read triples from a data frame: for each role strings, int64 with integer ids, or floats of weight.

    Raises InputError, with the split and the row, if a column is missing or a row is bad.
    """
    names = columns.names_or_roles
    is_arrow = isinstance(frame, pa.Table)
    known = list(frame.column_names if is_arrow else frame.columns)
    for column in names.values():
        if (count := known.count(column)) != 1:
            fault = f"{'more than one' if count else 'no'} column {column!r}"
            raise InputError(f"{name}: {fault}; there are {', '.join(map(str, known))}")
    if len(frame) == 0:
        raise InputError(f"{name}: the data frame is empty")
    for start in range(0, len(frame), CHUNK_ROWS):
        part = frame.slice(start, CHUNK_ROWS) if is_arrow else frame.iloc[start : start + CHUNK_ROWS]
        faults = (pa.ArrowException, UnicodeEncodeError)
        with os_errors(InputError, f"{name}: a column mixes several types, or is not text", *faults):
            arrays = {
                role: part[column] if is_arrow else _from_pandas(part[column])
                for role, column in names.items()
            }
        yield _checked(arrays, rules, name, start)


def _from_pandas(column: pd.Series) -> pa.Array:
    """Return a column; dates and periods as Python writes them, as in queries of a data frame."""
    array = pa.array(column, from_pandas=True)
    if pa.types.is_temporal(array.type) or isinstance(array.type, pa.BaseExtensionType):
        array = pa.array(column.map(str, na_action="ignore"), pa.string(), from_pandas=True)
    return array


def _checked(arrays: dict[str, pa.Array], rules: RowRules, place: str, first_row: int) -> dict[str, pa.Array]:
    """Cast and check typed columns; the rows of a bad one are counted from 1."""
    data = {}
    for role, array in arrays.items():
        # A cast of floats to strings would turn an id 1 into the name "1.0", for instance in columns with
        # gaps.
        if pa.types.is_floating(array.type) and role != WEIGHT:
            raise InputError(f"{place}: the {role} column holds {array.type}, expected names or integers")
        expected = pa.float64() if role == WEIGHT else _type_of(role, rules)
        text = f"{place}: the {role} column holds {array.type}, expected {expected}"
        with os_errors(InputError, text, pa.ArrowException):
            array = array.cast(expected)
        if array.null_count:
            row = first_row + int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
            raise InputError(f"{place}: row {row + 1}: the {role} is empty")
        data[role] = _one_array(array) if isinstance(array, pa.ChunkedArray) else array
    bad = _bad_rows(data, rules)
    if len(bad):
        row = int(bad[0])
        fault = rules.first_fault((role, str(array[row].as_py())) for role, array in data.items())
        raise InputError(f"{place}: row {first_row + row + 1}: {fault}")
    return data


def _bad_rows(columns: dict[str, pa.Array], rules: RowRules) -> np.ndarray:
    """Return the rows of a chunk that break a rule (not the exact one: the caller finds out which)."""
    bad = np.zeros(len(columns[ROLES[0]]), dtype=bool)
    for role in [*ROLES, TIME] if TIME in columns else ROLES:
        if rules.limits and role != TIME:
            ids = columns[role].to_numpy()
            bad |= (ids < 0) | (ids >= rules.limits[role])
        else:
            offsets, _ = string_buffers(columns[role])
            bad |= offsets[1:] == offsets[:-1]
    if WEIGHT in columns:
        weights = columns[WEIGHT].to_numpy()
        bad |= ~(np.isfinite(weights) & (weights >= 0))
    return np.flatnonzero(bad)


def _type_of(role: str, rules: RowRules) -> pa.DataType:
    """Return the type of a role's column, of text the narrower one of weights."""
    if role == WEIGHT:
        return pa.float32()
    return pa.int64() if rules.limits and role != TIME else pa.string()


def _parse_csv(file: _TextFile, content: bytes, rules: RowRules) -> pa.Table:
    types = {name: _type_of(role, rules) for role, name in file.names.items()}
    return pa.csv.read_csv(
        pa.BufferReader(content),
        # One block: the threads parse different ones.
        pa.csv.ReadOptions(use_threads=False, block_size=len(content) + 1, column_names=file.field_names),
        pa.csv.ParseOptions(delimiter=file.text.delimiter, quote_char='"' if file.text.quoted else False),
        # Nothing is null: a name may well be "NA" or "null".
        pa.csv.ConvertOptions(column_types=types, include_columns=list(types), null_values=[]),
    )
