"""Filling live tables from a version's files, whatever parts it was written in."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import h5py
import numpy as np
import torch

from dglkge.checkpoint import hdf5_format
from dglkge.checkpoint.manifest import CheckpointMeta, Manifest
from dglkge.checkpoint.relation_layout import bigraph_row_sums, from_parameters
from dglkge.checkpoint.storage import CheckpointStorage
from dglkge.errors import CheckpointError
from dglkge.typing import RELATION, TablePart

logger = logging.getLogger(__name__)


def fill_part(
    folder: Path, manifest: Manifest, part: TablePart, saved_ids: torch.Tensor | None = None
) -> None:
    """Write the checkpoint's rows and state over those of a live part.

    Parameters
    ----------
    folder : Path
    manifest : Manifest
    part : TablePart
        Filled in place.
    saved_ids : (n,) int64 tensor, optional
        Original id that each row has in the checkpoint, -1 for a row that stays as it is; without them the
        part's own ids.

    Raises
    ------
    CheckpointError
        If the checkpoint lacks one of the rows, or has them in another width.
    """
    wanted = part.original_ids if saved_ids is None else saved_ids
    present = (wanted >= 0).nonzero().squeeze(1)
    sorted_ids, order = torch.sort(wanted[present])
    order = present[order]
    live_ids = sorted_ids.cpu().numpy()
    num_found = first_id = 0
    for entry in manifest.of_table(part.table):
        path = folder / entry.name
        with hdf5_format.open_file(path) as file:
            ids, rows = _ids_and_rows(path, file, part, manifest.meta, first_id)
            first_id += entry.num_rows
            state = read_state(path, file, part.table, manifest.meta)
            live_state = {
                name: live for name, live in part.state.items() if _state_fits(name, live, state, path)
            }
            for name in sorted(set(state) - set(part.state)):
                logger.warning("%s: optimizer state %r is not used by this run's optimizer", path, name)
            for start, stop in hdf5_format.row_blocks((len(ids), *rows.shape[1:]), rows.dtype.itemsize):
                here, live = _matches(np.asarray(ids[start:stop]), live_ids)
                if not len(here):
                    continue
                num_found += len(here)
                target = order[torch.from_numpy(live)]
                _copy_block(part.rows, target, rows[start:stop], here)
                for name, values in live_state.items():
                    _copy_block(values, target, state[name][start:stop], here)
    if num_found != len(live_ids):
        raise CheckpointError(
            f"{folder}: version {manifest.version} has {num_found} of the {len(live_ids)} rows "
            f"of table {part.table!r}, part {part.part}"
        )


def fill_checked(
    storage: CheckpointStorage, manifest: Manifest, part: TablePart, saved_ids: torch.Tensor | None = None
) -> None:
    """Fill a live part as :func:`fill_part` does, while a thread compares the files with their checksums.

    Raises
    ------
    CheckpointError
        If a file is damaged or lacks a row; the live rows are then of no use.
    """
    described = dataclasses.replace(manifest, files=manifest.of_table(part.table))
    storage.check_files(described)  # a file that is cut off must not be mapped
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="dglkge-checksums")
    checked = thread.submit(storage.check_files, described, checksums=True)
    thread.shutdown(wait=False)
    try:
        fill_part(storage.path, manifest, part, saved_ids)
    except Exception:
        checked.result()  # what is damaged is told before what came of it
        raise
    checked.result()


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
) -> tuple[np.ndarray, np.ndarray]:
    """Return the original ids and the rows of a file, mapped where that is possible."""
    if part.table == RELATION:
        rows = read_relations(path, file, meta)
        ids = np.arange(len(rows))
    else:
        rows = hdf5_format.map_rows(path, file[hdf5_format.EMBEDDINGS])
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


def _copy_block(target: torch.Tensor, target_rows: torch.Tensor, block: np.ndarray, here: np.ndarray) -> None:
    """Copy some rows of a block to some rows of a live table."""
    if len(here) < len(block):
        block = block[here]
    # Not by torch: its threads would wait for the one that reads the file for its checksum.
    target.detach().numpy()[target_rows.numpy()] = block


def _state_fits(name: str, live: torch.Tensor, state: Mapping[str, np.ndarray], path: Path) -> bool:
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
