"""Filling live tables from a version's files, whatever parts it was written in."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import h5py
import numpy as np
import torch

from dglkge.checkpoint import hdf5_format
from dglkge.checkpoint.file_check import check_crc32, check_file
from dglkge.checkpoint.manifest import CheckpointMeta, Manifest
from dglkge.checkpoint.relation_layout import bigraph_row_sums, from_parameters
from dglkge.checkpoint.row_reader import RowReader, Rows
from dglkge.checkpoint.storage import CheckpointStorage
from dglkge.errors import CheckpointError
from dglkge.typing import RELATION, TablePart

logger = logging.getLogger(__name__)


def fill_part(
    storage: CheckpointStorage, manifest: Manifest, part: TablePart, saved_ids: torch.Tensor | None = None
) -> None:
    """Write the checkpoint's rows and state over those of a live part, checking the files on the way.

    Of a file that has none of the part's rows only the ids are read: where the parts are those of the
    checkpoint, each machine reads its own files. Every row belongs to some machine, so every file that has
    rows is read, and its checksum checked, by one of them.

    Parameters
    ----------
    storage : CheckpointStorage
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
    sorted_ids, order = torch.sort(wanted[present])
    live_rows = present[order].numpy()
    live = (sorted_ids.cpu().numpy(), live_rows)
    num_found = first_id = 0
    unread = []
    for entry in manifest.of_table(part.table):
        check_file(storage.path, entry)
        try:
            found, crc32 = _fill_from(storage.path / entry.name, manifest.meta, part, live, first_id)
        except Exception:
            check_file(storage.path, entry, checksum=True)  # what is damaged is told before what came of it
            raise
        if crc32 is None:
            unread.append(entry)
        else:
            check_crc32(storage.path, entry, crc32)
        num_found += found
        first_id += entry.num_rows
    if num_found != len(live_rows):
        for entry in unread:  # the ids of one may be damaged
            check_file(storage.path, entry, checksum=True)
        raise CheckpointError(
            f"{storage.path}: version {manifest.version} has {num_found} of the {len(live_rows)} rows "
            f"of table {part.table!r}, part {part.part}"
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
            first, last = np.searchsorted(here, (start, start + len(block)))
            chosen = here[first:last] - start
            # Not by torch, whose threads would wait for the one that reads.
            target = targets[name].detach().numpy()
            target[target_rows[first:last]] = block if len(chosen) == len(block) else block[chosen]
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
    except (KeyError, ValueError, TypeError) as error:
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
    return sum(shape[-1] for path, shape in found.items() if path.startswith(groups))


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
    places[places == len(live_ids)] = 0
    here = np.flatnonzero(live_ids[places] == ids) if len(live_ids) else np.empty(0, np.int64)
    return here, places[here]


def _state_fits(name: str, live: torch.Tensor, state: Mapping[str, Rows], path: Path) -> bool:
    """Tell whether stored state can fill live state, and log where it cannot."""
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
