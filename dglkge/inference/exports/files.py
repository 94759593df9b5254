"""Files of an export: rows and names in blocks, names that fit, files that appear when all are complete."""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from dglkge.errors import InputError, write_error
from dglkge.inference.whole_tables import Tables
from dglkge.typing import RELATION

ROWS_AT_A_TIME = 8192
"""Rows read and written at a time: the memory of an export does not grow with the table."""

PROGRESS_FROM_ROWS = 200_000

Ids = range | np.ndarray
Block = tuple[Sequence[str], np.ndarray]

LINE_ENDS = "\n\r"
"""Characters that end a line for common readers, so that no name of a list of names may have them."""

_SHOWN = {"\t": "a tab", "\n": "a line end", "\r": "a carriage return"}


@dataclass(frozen=True)
class ExportedTable:
    """Rows and names of an entity type, or labels of the ``relation``, in the order of original ids."""

    source: Tables
    name: str
    names: Sequence[str]
    shape: tuple[int, int]

    @classmethod
    def of(cls, source: Tables, name: str) -> ExportedTable:
        """Open a table; InputError if there is none."""
        shape = source[name].shape
        names = source.relations.labels if name == RELATION else source.vocabulary(name)
        return cls(source, name, names.names, shape)

    def blocks(
        self, columns: slice = slice(None), scale: float = 1, ids: Ids | None = None
    ) -> Iterator[Block]:
        """Yield (names, rows) of ascending ids, by default all, with a progress bar for large tables.

        Only some columns, and all numbers times a scale.
        """
        ids = range(self.shape[0]) if ids is None else ids
        is_small = len(ids) < PROGRESS_FROM_ROWS
        with tqdm(total=len(ids), desc=self.name, unit="row", disable=is_small or None) as bar:
            for start in range(0, len(ids), ROWS_AT_A_TIME):
                block = np.asarray(ids[start : start + ROWS_AT_A_TIME])
                # Shards hold rows in their own order; gather gives the order of ids, a block at a time.
                rows = self.source.gather(self.name, torch.from_numpy(block)).numpy()[:, columns]
                if scale != 1.0:
                    # In float64, as the import divides: there and back costs one rounding.
                    rows = (rows.astype(np.float64) * scale).astype(np.float32)
                yield [self.names[id_] for id_ in block], rows
                bar.update(len(block))


@dataclass(frozen=True)
class Export:
    """All that a format needs to plan its files.

    Attributes
    ----------
    max_rows : int or None
        Most rows of a table, for formats that show a part.
    metric : str or None
        Metric of an index; None: that of the score function.
    metrics : mapping
        Ranking results of the run by file and split, for a model card.
    """

    source: Tables
    tables: Sequence[ExportedTable]
    max_rows: int | None = None
    metric: str | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)


class Output(NamedTuple):
    """A file or folder that an export writes, by a function that takes the path."""

    name: str
    write: Callable[[Path], object]


Planner = Callable[[Export], Iterable[Output]]
TableWriter = Callable[[ExportedTable, BinaryIO], object]


def file_output(name: str, write: Callable[[BinaryIO], object]) -> Output:
    """Return the output of a function that writes an open file."""

    def write_file(path: Path) -> None:
        with open(path, "wb") as file:
            write(file)

    return Output(name, write_file)


def text_output(name: str, text: str) -> Output:
    """Return a file with some content."""
    return Output(name, lambda path: path.write_bytes(text.encode()))


def names_file(table: str) -> str:
    """Return the file of a table's names."""
    return f"{table}.names.txt"


def names_output(table: ExportedTable) -> Output:
    """Return a file with the name of each row on a line of its own."""
    lines = (f"{name}\n".encode() for name in table.names)
    return file_output(names_file(table.name), lambda file: file.writelines(lines))


def each_table(suffix: str, write: TableWriter, with_names: bool = False) -> Planner:
    """Return the planner of a format with one file for each table, and maybe one of names."""

    def plan(export: Export) -> Iterator[Output]:
        for table in export.tables:
            yield file_output(f"{table.name}{suffix}", partial(write, table))
            if with_names:
                yield names_output(table)

    return plan


def write_rows(file: BinaryIO, blocks: Iterable[Block]) -> None:
    """Write rows as little-endian float32, one after the other."""
    for _, rows in blocks:
        file.write(np.ascontiguousarray(rows, dtype="<f4").tobytes())


def write_safetensors(file: BinaryIO, tensors: Mapping[str, ExportedTable | np.ndarray]) -> None:
    """Write tables, and arrays of any shape, as tensors of one safetensors file.

    By hand, because the package needs all tensors in memory. The format:
    https://huggingface.co/docs/safetensors.
    """
    # The hub's viewers ask for this field; "pt" says that a tensor's layout is torch's.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, tensor in tensors.items():
        stop = start + 4 * math.prod(tensor.shape)
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8 bytes
    file.write(struct.pack("<Q", len(text)) + text)
    for tensor in tensors.values():
        write_rows(file, tensor.blocks() if isinstance(tensor, ExportedTable) else [((), tensor)])


def check_names(tables: Collection[ExportedTable], forbidden: str, file_format: str) -> None:
    """Refuse names that a text format cannot hold, before anything is written."""
    for table in tables if forbidden else ():
        for name, sign in ((name, sign) for name in table.names for sign in forbidden if sign in name):
            raise InputError(
                f"the name {name!r} of table {table.name!r} has {_SHOWN[sign]}, which separates fields or "
                f"lines in the format {file_format}; parquet, lancedb and qdrant hold any name"
            )


def write_outputs(outputs: Sequence[Output], folder: Path, overwrite: bool) -> list[Path]:
    """Write all files to a hidden folder, then rename them.

    A failure while they are written leaves what was there before, and no temporary file.
    """
    # Names of entity types and data sets are part of file names, and may come from a stranger's folder.
    for name, _ in outputs:
        if Path(name).name != name:
            raise InputError(f"the export would write {name!r}, which is no file name in {folder}")
    paths = [folder / name for name, _ in outputs]
    for path in paths:
        if path.exists() and not overwrite:
            raise InputError(f"{path} exists; give --overwrite to replace it, or take another folder")
    # In the same file system, as renaming is atomic there. An export that was killed may have left one.
    hidden = folder / f".{paths[0].name}.tmp"
    try:
        shutil.rmtree(hidden, ignore_errors=True)
        hidden.mkdir(parents=True)
        for output in outputs:
            output.write(hidden / output.name)
        for path in paths:
            _replace(hidden / path.name, path)
    except OSError as error:
        # In the way: another export writes there now, or another user's was killed.
        problem = (
            f"cannot make {hidden}" if isinstance(error, FileExistsError) else f"cannot write to {folder}"
        )
        raise write_error(problem, error) from error
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
    return paths


def _replace(source: Path, target: Path) -> None:
    """Rename a file or a folder to a name that may be taken."""
    # A folder in the place of a file is not ours: the rename fails.
    if not (source.is_dir() and target.is_dir()):
        os.replace(source, target)
        return
    # A folder cannot be renamed to one that has files: the old one is put aside first, where only the success
    # of the new one removes it, and comes back if that cannot take its place.
    aside = target.with_name(f"{target.name}.old")
    _remove(aside)
    os.replace(target, aside)
    try:
        os.replace(source, target)
    except OSError:
        os.replace(aside, target)
        raise
    _remove(aside)


def _remove(path: Path) -> None:
    """Remove a folder or a link to one, if it is there."""
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)
