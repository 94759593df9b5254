"""Writes a data set folder atomically: it gets its name when it is complete, or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from dglkge.data import dataset_files
from dglkge.data.checksums import file_checksums
from dglkge.data.dataset_files import DESCRIPTION, PENDING_DESCRIPTION, TRAIN, Field, read_description
from dglkge.data.name_list import NameList
from dglkge.data.vocabulary import Vocabulary
from dglkge.errors import DglkgeError, InputError, StorageError
from dglkge.partition.ingest import IdTriples, TypedIds
from dglkge.partition.rows import pieces
from dglkge.partition.run_build import NO_ROOM

_LOCK = ".lock"


def check_output(output: Path, overwrite: bool) -> None:
    """Check that a data set may be written to a folder, and make its parent folder.

    Parameters
    ----------
    output : Path
        The data set folder to make.
    overwrite : bool
        Whether an existing data set may be replaced.

    Raises
    ------
    InputError
        If the output exists and must stay, or its parent folder cannot be made or is not writable.
    """
    try:
        _check_target(output, overwrite)
    except OSError as error:
        raise InputError(f"the output {output} cannot be used: {error.strerror}") from error
    parent = output.absolute().parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"the output's parent folder {parent} cannot be made: {error.strerror}") from error
    if not os.access(parent, os.W_OK | os.X_OK):
        raise InputError(f"the output's parent folder {parent} is not writable")


def _check_target(output: Path, overwrite: bool) -> None:
    """Check the output itself."""
    try:
        mode = output.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    if not stat.S_ISDIR(mode):
        raise InputError(f"the output {output} exists and is no folder")
    if any(output.iterdir()):
        if not overwrite:
            raise InputError(f"the output {output} exists; choose another, or give --overwrite")
        try:
            read_description(output)
        except InputError as error:
            raise InputError(f"--overwrite replaces only a dataset, and {output} is none: {error}") from error


@contextmanager
def staged(output: Path, overwrite: bool) -> Iterator[Path]:
    """Yield a temporary folder beside the output, and rename it to the output when the block succeeds.

    The block writes the description as :data:`dglkge.data.dataset_files.PENDING_DESCRIPTION`. The description
    gets its own name last, so the folder of a killed run never loads.

    On an exception the folder is removed. A killed run leaves it under a name that begins with a dot; the
    next run for the same output removes it. A lock on a file inside shows whether its run is still alive.

    Raises
    ------
    InputError
        If the output must stay (see :func:`check_output`), or another run is writing it.
    StorageError
        If a file cannot be written.
    """
    check_output(output, overwrite)
    # In the same parent folder, because a rename is atomic within one file system only.
    output = output.absolute()
    folder = output.with_name(f".{output.name}.partial")
    with _locked(output, folder):
        try:
            _restore(output)
            # Checked again under the lock, and once more before the rename: another run may have written the
            # output meanwhile, and reading the triples takes long.
            check_output(output, overwrite)
            _remove_all_but_lock(folder)
            yield folder
            check_output(output, overwrite)
            _replace(output, folder)
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise StorageError(f"cannot write {output}: {error.strerror}") from error
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise


@contextmanager
def _locked(output: Path, folder: Path) -> Iterator[None]:
    """Make the temporary folder and lock it; the kernel releases the lock when the process ends."""
    try:
        made = not folder.exists()
        folder.mkdir(exist_ok=True)
    except FileExistsError as error:
        raise InputError(
            f"another file is where its temporary folder would be: {folder}; "
            "remove it, or choose another output"
        ) from error
    except OSError as error:
        raise _unusable(folder, error) from error
    try:
        lock = open(folder / _LOCK, "a")
    except OSError as error:
        if made:
            folder.rmdir()
        raise _unusable(folder, error) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(f"another run is writing {output} (it holds {folder})") from error
        yield


def _unusable(folder: Path, error: OSError) -> DglkgeError:
    """Return the error for a temporary folder that cannot be used: a full disk, or a wrong place."""
    if error.errno in NO_ROOM:
        return StorageError(f"cannot write {folder}: {error.strerror}")
    return InputError(f"the temporary folder {folder} cannot be used: {error.strerror}")


def _remove_all_but_lock(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        elif entry.name != _LOCK:
            entry.unlink()


def _replaced(output: Path) -> Path:
    """Return the temporary name of a data set that is being replaced."""
    return output.with_name(f".{output.name}.replaced")


def _restore(output: Path) -> None:
    """Rename a data set back if the run that was replacing it was killed between the two renames."""
    if not output.exists() and _replaced(output).is_dir():
        _replaced(output).rename(output)


def _replace(output: Path, folder: Path) -> None:
    """Rename the folder to the output; on failure the old data set stays."""
    old = _replaced(output)
    shutil.rmtree(old, ignore_errors=True)
    # The lock stays held through the open file; only its name must not appear in the data set.
    (folder / _LOCK).unlink()
    (folder / PENDING_DESCRIPTION).rename(folder / DESCRIPTION)
    # No call of the operating system swaps two folders everywhere, so there are two renames. A crash between
    # them leaves the old data set under its temporary name, and _restore renames it back.
    replaces = output.exists()
    if replaces:
        output.rename(old)
    try:
        folder.rename(output)
    except BaseException:
        if replaces:
            old.rename(output)
        raise
    shutil.rmtree(old, ignore_errors=True)


def write_triples(folder: Path, triples: IdTriples, ids: TypedIds) -> dict[str, Any]:
    """Write all files but the partitions and the description.

    Parameters
    ----------
    folder : Path
        The empty folder of the new data set.
    triples : IdTriples
        All splits.
    ids : TypedIds
        The plan of the original ids.

    Returns
    -------
    dict
        Fields of ``dataset.json`` that describe them.
    """
    paths = []
    for index, type_ in enumerate(ids.types):
        path = dataset_files.vocabulary_path(folder, type_)
        path.parent.mkdir(exist_ok=True)
        _save_names(triples.entities, ids.entities_of(index), path)
        paths.append(path)
    ids.relations.save(folder / dataset_files.RELATIONS)
    paths.append(folder / dataset_files.RELATIONS)
    splits = {split: triples.splits.get(split, np.zeros((0, 3), np.int32)) for split in dataset_files.SPLITS}
    ranks = ids.pair_ranks()
    counts = np.zeros(int(ranks.max()) + 1, np.int64)
    if len(counts) == 1:
        counts[0] = len(splits[TRAIN])
    else:
        for _, (rows,) in pieces(splits[TRAIN]):
            counts += np.bincount(ranks[ids.relation_ids(rows)], minlength=len(counts))
    weights = triples.weights.get(TRAIN)
    weight_path = folder / dataset_files.TRAIN_WEIGHTS
    for split, rows in splits.items():
        path = dataset_files.split_path(folder, split)
        if split == TRAIN:
            _write_train(path, rows, weight_path, weights, ids, counts)
        else:
            _write_split(path, rows, ids)
        paths.append(path)
    if weights is not None:
        paths.append(weight_path)
    return {
        Field.ENTITY_TYPES: ids.num_entities(),
        Field.NUM_RELATIONS: len(ids.relations),
        Field.SPLITS: {split: len(rows) for split, rows in splits.items()},
        Field.EDGE_TYPES: _edge_types(ids, counts),
        Field.HAS_WEIGHTS: weights is not None,
        Field.FINGERPRINT: dataset_files.fingerprint(paths),
    }


def _save_names(names: Sequence[str], places: np.ndarray, path: Path) -> None:
    """Write the names at some places of a list."""
    if isinstance(names, NameList):
        (names if len(places) == len(names) else names.take(places)).save(path)
    else:
        Vocabulary([names[place] for place in places.tolist()], "entity").save(path)


def write_description(folder: Path, description: dict[str, Any]) -> None:
    """Write description and checksums under the pending name, durably; :func:`staged` gives it its own."""
    content = {
        Field.FORMAT_VERSION: dataset_files.FORMAT_VERSION,
        **description,
        Field.CHECKSUMS: file_checksums(folder),
    }
    with open(folder / PENDING_DESCRIPTION, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def _start_array(file: BinaryIO, dtype: str, shape: tuple[int, ...]) -> int:
    """Write the header of a ``.npy`` file; returns its length in bytes."""
    np.lib.format.write_array_header_1_0(file, {"descr": dtype, "fortran_order": False, "shape": shape})
    file.flush()
    return file.tell()


def _write_split(path: Path, rows: np.ndarray, ids: TypedIds) -> None:
    # In pieces: the 64-bit ids of a large split may not fit into memory beside the 32-bit ones. Written, not
    # mapped: on a full disk a write fails with an error, but a store to a mapped page is a SIGBUS.
    with open(path, "wb") as file:
        _start_array(file, "<i8", (len(rows), 3))
        for _, (piece,) in pieces(rows):
            file.write(np.ascontiguousarray(ids.original_ids(piece), dtype="<i8").tobytes())


def _write_train(
    path: Path,
    rows: np.ndarray,
    weight_path: Path,
    weights: np.ndarray | None,
    ids: TypedIds,
    counts: np.ndarray,
) -> None:
    """Write training triples and their weights: those of one pair of types are one range of triple ids.

    Within a pair they keep the order of the input. ``counts`` are the triples of each pair.
    """
    ranks, places = ids.pair_ranks(), np.cumsum(counts) - counts
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open(path, "wb"))
        start = _start_array(file, "<i8", (len(rows), 3))
        if weights is not None:
            weight_file = stack.enter_context(open(weight_path, "wb"))
            weight_start = _start_array(weight_file, weights.dtype.str, weights.shape)
        for piece, (some,) in pieces(rows):
            found = np.ascontiguousarray(ids.original_ids(some), dtype="<i8")
            pairs = ranks[found[:, 1]] if len(counts) > 1 else np.zeros(len(found), np.int64)
            of_pair = np.bincount(pairs)
            for pair in np.flatnonzero(of_pair).tolist():
                mine = slice(None) if len(counts) == 1 else np.flatnonzero(pairs == pair)
                _write_at(file, found[mine], start + int(places[pair]) * found.itemsize * 3)
                if weights is not None:
                    place = weight_start + int(places[pair]) * weights.itemsize
                    _write_at(weight_file, np.ascontiguousarray(weights[piece][mine]), place)
                places[pair] += of_pair[pair]


def _write_at(file: BinaryIO, array: np.ndarray, place: int) -> None:
    """Write an array at a place of a file, all of it."""
    content = array.data.cast("B")
    while content:
        written = os.pwrite(file.fileno(), content, place)
        content, place = content[written:], place + written


def _edge_types(ids: TypedIds, counts: np.ndarray) -> list[list[Any]]:
    """Return lhs, rhs, first and end triple id of each pair of types that occurs in training triples."""
    ranks = ids.pair_ranks()
    ends = np.cumsum(counts)
    edge_types = []
    for rank, (count, end) in enumerate(zip(counts.tolist(), ends.tolist())):
        relation = ids.relations[int(np.flatnonzero(ranks == rank)[0])]
        if count:
            edge_types.append([relation.lhs, relation.rhs, end - count, end])
    return edge_types
