"""Fills live tables from the files of a version, however it was partitioned, and verifies the checksums."""

from __future__ import annotations

import io
import logging
import math
import os
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import h5py
import numpy as np
import torch

from dglkge.checkpoint import hdf5_format
from dglkge.checkpoint.hdf5_format import put_rows
from dglkge.checkpoint.manifest import CheckpointMeta, Manifest
from dglkge.checkpoint.relation_layout import bigraph_row_sums, from_parameters, is_dynamic
from dglkge.checkpoint.storage import check_crc32, check_file
from dglkge.errors import CheckpointError
from dglkge.typing import RELATION, TablePart

logger = logging.getLogger(__name__)

NUM_BLOCKS_AHEAD = 4
"""Blocks that are read ahead while an earlier one is copied to its rows."""

Rows: TypeAlias = h5py.Dataset | np.ndarray


@dataclass(frozen=True)
class Piece:
    """Range of a file's bytes: rows of a dataset, or bytes between two datasets.

    Attributes
    ----------
    start, stop : int
        Bytes of the file.
    name : str or None
        The dataset.
    first_row : int
        Its first row in the piece.
    """

    start: int
    stop: int
    name: str | None = None
    first_row: int = 0


@dataclass(frozen=True)
class Span:
    """Place of a dataset in a file: ``num_rows`` times ``row_bytes`` from ``offset`` on."""

    name: str
    offset: int
    num_rows: int
    row_bytes: int

    @property
    def stop(self) -> int:
        """The byte behind the last row."""
        return self.offset + self.num_rows * self.row_bytes


def plan_pieces(num_bytes: int, spans: Sequence[Span]) -> list[Piece]:
    """Cut a file into pieces, in order, that hold whole rows of one dataset or none.

    Datasets that lie outside of the file or overlap, which no undamaged file has, are treated like bytes
    between datasets.
    """
    pieces: list[Piece] = []
    place = 0
    for span in sorted(spans, key=lambda span: span.offset):
        # The shapes come from the file itself and may be damaged. The checksum, which is compared later,
        # still needs every byte.
        if span.offset < place or span.stop > num_bytes:
            continue
        pieces += _between(place, span.offset)
        # An item size of 1, because row_bytes is in bytes already.
        for first, last in hdf5_format.row_blocks((span.num_rows, span.row_bytes), 1):
            start, stop = (span.offset + row * span.row_bytes for row in (first, last))
            pieces.append(Piece(start, stop, span.name, first))
        place = span.stop
    return pieces + _between(place, num_bytes)


def _between(start: int, stop: int) -> list[Piece]:
    step = hdf5_format.BLOCK_BYTES
    return [Piece(place, min(stop, place + step)) for place in range(start, stop, step)]


class RowReader:
    """Yields ``(name, first row, rows)`` of a file's datasets, by blocks; a block is valid until the next.

    Contiguous datasets come first, in the order of the file, from a thread that reads ahead; others, for
    instance compressed ones, come after them. One pass over the file gives both the rows and the checksum.

    Parameters
    ----------
    path : Path
    datasets : mapping of str to array or h5py.Dataset
        Of the file, which is open, or in memory.

    Attributes
    ----------
    crc32 : int
        Of the whole file, once all has been yielded.
    """

    def __init__(self, path: Path, datasets: Mapping[str, Rows]) -> None:
        self.crc32 = 0
        self._path = path
        self._datasets = datasets
        spans = [span for name, rows in datasets.items() if (span := _span_of(name, rows)) is not None]
        self._pieces = plan_pieces(path.stat().st_size, spans)

    def __iter__(self) -> Iterator[tuple[str, int, np.ndarray]]:
        coming = iter(self._pieces)
        waiting: deque[tuple[Piece, bytearray, Future[None]]] = deque()
        largest = max((piece.stop - piece.start for piece in self._pieces), default=0)
        with (
            open(self._path, "rb", buffering=0) as raw,
            ThreadPoolExecutor(max_workers=1, thread_name_prefix="dglkge-checkpoint-reader") as thread,
        ):
            # Allocated once and reused: fresh memory for each block would cost a page fault for each page.
            free = [bytearray(largest) for _ in range(NUM_BLOCKS_AHEAD)]
            while True:
                while free and (piece := next(coming, None)) is not None:
                    memory = free.pop()
                    waiting.append((piece, memory, thread.submit(self._read, raw, piece, memory)))
                if not waiting:
                    break
                piece, memory, reading = waiting.popleft()
                reading.result()
                if piece.name is not None:
                    yield piece.name, piece.first_row, self._rows(piece, memory)
                # After the yield: the consumer has copied the block by then.
                free.append(memory)
        yield from self._others()

    def _read(self, raw: io.FileIO, piece: Piece, memory: bytearray) -> None:
        """Read the next piece; the thread takes them in order, as the checksum needs."""
        view = memoryview(memory)[: piece.stop - piece.start]
        done = 0
        while done < len(view):
            count = os.preadv(raw.fileno(), [view[done:]], piece.start + done)
            if count == 0:
                raise OSError(f"{self._path} ends at byte {piece.start + done}, expected {piece.stop}")
            done += count
        # In the thread that reads, while the consumer copies the block before.
        self.crc32 = zlib.crc32(view, self.crc32)

    def _rows(self, piece: Piece, memory: bytearray) -> np.ndarray:
        dataset = self._datasets[piece.name or ""]
        num_items = (piece.stop - piece.start) // dataset.dtype.itemsize
        return np.frombuffer(memory, dataset.dtype, num_items).reshape(-1, *dataset.shape[1:])

    def _others(self) -> Iterator[tuple[str, int, np.ndarray]]:
        """Yield the rows that no piece holds."""
        in_pieces = {piece.name for piece in self._pieces}
        for name, rows in self._datasets.items():
            if name not in in_pieces:
                for start, stop in hdf5_format.row_blocks(rows.shape, rows.dtype.itemsize):
                    yield name, start, np.asarray(rows[start:stop])


def _span_of(name: str, rows: Rows) -> Span | None:
    """Return where rows lie in their file; None where they are no single run of it."""
    offset = rows.id.get_offset() if isinstance(rows, h5py.Dataset) else None
    if offset is None or rows.size == 0:
        return None
    row_bytes = int(np.prod(rows.shape[1:], dtype=np.int64)) * rows.dtype.itemsize
    return Span(name, offset, rows.shape[0], row_bytes)


def fill_part(
    folder: Path, manifest: Manifest, part: TablePart, saved_ids: torch.Tensor | None = None
) -> None:
    """Write the checkpoint's rows and state over those of a live part, checking the files on the way.

    Of a file that has none of the part's rows only the ids are read: where the parts are those of the
    checkpoint, each machine reads its own files. Every row belongs to some machine, so every file that has
    rows is read, and its checksum checked, by one of them.

    Parameters
    ----------
    folder : Path
        Of the version.
    manifest : Manifest
    part : TablePart
        Filled in place.
    saved_ids : (n,) int64 tensor, optional
        Original id that each row has in the checkpoint, -1 for a row that stays as it is; without them the
        part's own ids.

    Raises
    ------
    CheckpointError
        If a file is damaged, or the checkpoint lacks one of the rows or has them in another width; the live
        rows are then of no use.
    """
    wanted = part.original_ids if saved_ids is None else saved_ids
    present = (wanted >= 0).nonzero().squeeze(1)
    # Both lists of ids are sorted, so rows are matched by merging: no index of all ids is built.
    sorted_ids, order = torch.sort(wanted[present])
    live_rows = present[order].numpy()
    live = (sorted_ids.cpu().numpy(), live_rows)
    num_found = first_id = 0
    unread = []
    for entry in manifest.of_table(part.table):
        check_file(folder, entry)
        try:
            found, crc32 = _fill_from(folder / entry.name, manifest.meta, part, live, first_id)
        except Exception:
            # A damaged file is reported as such, not by the error that its content caused.
            check_file(folder, entry, checksum=True)
            raise
        if crc32 is None:
            unread.append(entry)
        else:
            check_crc32(folder, entry, crc32)
        num_found += found
        first_id += entry.num_rows
    if num_found != len(live_rows):
        for entry in unread:  # the ids of one may be damaged
            check_file(folder, entry, checksum=True)
        raise CheckpointError(
            f"{folder} has {num_found} of the {len(live_rows)} rows of table {part.table!r}, part {part.part}"
        )


def _fill_from(
    path: Path, meta: CheckpointMeta, part: TablePart, live: tuple[np.ndarray, np.ndarray], first_id: int
) -> tuple[int, int | None]:
    """Fill a live part from one file.

    Parameters
    ----------
    live : pair of (n,) int64 arrays
        Ascending ids of the live rows in the checkpoint, and where the rows are.

    Returns
    -------
    num_found : int
        Live rows that the file has.
    crc32 : int or None
        Its checksum; None where it has rows and none of them is the part's, so that it was not read.
    """
    with hdf5_format.open_file(path) as file:
        ids, rows = _ids_and_rows(path, file, part, meta, first_id)
        live_ids, live_rows = live
        here, places = _matches(np.asarray(ids), live_ids)
        # A file without rows is no machine's, so every machine reads it for its checksum.
        if len(ids) and not len(here):
            return 0, None
        state = read_state(path, file, part.table, meta)
        targets = {"": part.rows} | {
            name: values for name, values in part.state.items() if _state_fits(name, values, state, path)
        }
        for name in sorted(set(state) - set(part.state)):
            logger.warning("%s: optimizer state %r is not used by this run's optimizer", path, name)
        sources = {name: rows if name == "" else state[name] for name in targets}
        target_rows = live_rows[places]
        reader = RowReader(path, sources)
        for name, start, block in reader:
            # Both lists are ascending, so a block's matches are one range of them.
            first, last = np.searchsorted(here, (start, start + len(block)))
            chosen = here[first:last] - start
            # By numpy: torch would start threads that compete for cores with the one that reads.
            found = block if len(chosen) == len(block) else block[chosen]
            put_rows(targets[name], target_rows[first:last], found)
        return len(here), reader.crc32


def read_state(
    path: Path, file: h5py.File, table: str, meta: CheckpointMeta
) -> Mapping[str, h5py.Dataset | np.ndarray]:
    """Return the optimizer state of a file's rows by name, PyTorch-BigGraph's among it.

    Raises
    ------
    CheckpointError
        If PyTorch-BigGraph's state is hostile or damaged.
    """
    found = hdf5_format.read_state(file)
    blob = file.get(f"{hdf5_format.OPTIMIZER_GROUP}/{hdf5_format.STATE_BLOB}")
    if found or table != RELATION or blob is None:
        return found
    try:
        return {"sum": bigraph_row_sums(hdf5_format.read_blob(blob)["state"], meta)}
    # State is optional: training can go on with sums of 0, while a missing row is an error.
    except (KeyError, ValueError, TypeError) as error:
        # State is optional: it starts anew, while a missing row is an error.
        logger.warning("%s: the optimizer's state is not that of the operators (%r)", path, error)
        return {}


def read_relations(path: Path, file: h5py.File, meta: CheckpointMeta) -> np.ndarray:
    """Return all relation rows of a model file, (R, W) float32.

    Raises
    ------
    CheckpointError
        If a parameter is missing or has another shape.
    """
    width = relation_width(file, meta)
    try:
        return from_parameters(file, meta, width)
    except (KeyError, ValueError) as error:
        raise CheckpointError(
            f"{path}: the relations' operators are not those of the run ({error})"
        ) from None


def relation_width(file: h5py.File, meta: CheckpointMeta) -> int:
    """Return the width of a relation's row: the sizes of the operator's parameters for relation 0, summed."""
    found = hdf5_format.shapes(file)
    groups = ("model/relations/0/operator/", "reciprocal/relations/0/operator/")
    stacked = max(1, len(meta.relations)) if is_dynamic(meta) else 1
    width = sum(math.prod(shape) // stacked for path, shape in found.items() if path.startswith(groups))
    # The operator "none" has no parameters, and one unused number in each of our rows.
    return width or (2 if meta.reciprocal else 1)


def _ids_and_rows(
    path: Path, file: h5py.File, part: TablePart, meta: CheckpointMeta, first_id: int
) -> tuple[np.ndarray, Rows]:
    """Return the original ids and the rows of a file."""
    if part.table == RELATION:
        rows = read_relations(path, file, meta)
        ids = np.arange(len(rows))
    else:
        rows = file[hdf5_format.EMBEDDINGS]
        ids = hdf5_format.original_ids(path, file, first_id)
    if rows.shape[1:] != tuple(part.rows.shape[1:]):
        raise CheckpointError(
            f"{path}: rows of table {part.table!r} are {rows.shape[1]} wide, "
            f"this run's are {part.rows.shape[1]}"
        )
    return ids, rows


def _matches(ids: np.ndarray, live_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return where two ascending lists of ids hold the same id, as places in each."""
    places = np.searchsorted(live_ids, ids)
    # Any valid index will do where the id is beyond the last one: the comparison below then fails.
    places[places == len(live_ids)] = 0
    here = np.flatnonzero(live_ids[places] == ids) if len(live_ids) else np.empty(0, np.int64)
    return here, places[here]


def _state_fits(name: str, live: torch.Tensor, state: Mapping[str, Rows], path: Path) -> bool:
    """Return whether stored state fits live state; logs a warning if not."""
    if name not in state:
        logger.warning("%s: has no optimizer state %r; it starts anew", path, name)
        return False
    stored = state[name]
    expected = live[:0].cpu().numpy().dtype
    if tuple(stored.shape[1:]) != tuple(live.shape[1:]) or stored.dtype != expected:
        logger.warning(
            "%s: optimizer state %r is %s of row shape %s, this run's is %s of %s; it starts anew",
            path, name, stored.dtype, tuple(stored.shape[1:]), expected, tuple(live.shape[1:]),
        )  # fmt: skip
        return False
    return True
