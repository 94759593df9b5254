"""Writes a data set folder atomically: it gets its name when it is complete, or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from dglkge.data import dataset_files
from dglkge.data.dataset import Dataset
from dglkge.data.dataset_files import SPLITS, TEST, TRAIN, VALID, Field, parents_of, replacing
from dglkge.data.vocabulary import RelationVocabulary, Vocabulary
from dglkge.errors import InputError, StorageError, os_errors
from dglkge.file_lock import try_lock
from dglkge.partition.name_index import NameList
from dglkge.partition.report import partition_figures
from dglkge.partition.rows import open_npy, pieces
from dglkge.partition.run_build import NO_ROOM, GraphJob, run_build
from dglkge.typing import Ids

_LOCK = ".lock"

OriginalIds = Callable[[np.ndarray], np.ndarray]
"""Returns head, relation and tail as original ids (m, 3) of triples (m, 3) of other ids."""


def check_output(output: Path, overwrite: bool) -> None:
    """Raise InputError if the output exists and must stay."""
    with os_errors(InputError, f"the output {output} cannot be used"):
        exists = os.path.lexists(output)
        if exists and (output.is_symlink() or not output.is_dir()):
            raise InputError(f"the output {output} exists and is no folder")
        is_taken = exists and any(output.iterdir())
    if is_taken and not overwrite:
        raise InputError(f"the output {output} exists; choose another, or give --overwrite")
    if is_taken:
        try:
            dataset_files.read_description(output)
        except InputError as error:
            raise InputError(f"--overwrite replaces only a dataset, and {output} is none: {error}") from error


@contextmanager
def staged(output: Path, overwrite: bool) -> Iterator[Path]:
    """Yield a temporary folder beside the output, and rename it to the output when the block succeeds.

    The block writes the description as :data:`dglkge.data.dataset_files.PENDING_DESCRIPTION`. The description
    gets its own name last, so the folder of a killed run never loads.

    On an exception the folder is removed, and parent folders that were made for it. A killed run leaves it
    under a name that begins with a dot; the next run for the same output removes it. A lock on a file inside
    shows whether its run is still alive.

    Raises
    ------
    InputError
        If the output must stay (see :func:`check_output`), its parent folder cannot be made or written to, or
        another run is writing it.
    StorageError
        If a file cannot be written.
    """
    check_output(output, overwrite)
    # In the same parent folder, because a rename is atomic within one file system only.
    output = output.absolute()
    folder, old = (output.with_name(f".{output.name}.{state}") for state in ("partial", "replaced"))
    with parents_of(output), _locked(output, folder):
        try:
            if not output.exists() and old.is_dir():
                # The run that was replacing the data set was killed between its two renames.
                old.rename(output)
            # Checked again under the lock, and once more before the rename: another run may have written the
            # output meanwhile, and reading the triples takes long.
            check_output(output, overwrite)
            for entry in folder.iterdir():
                if entry.name != _LOCK:
                    shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
            yield folder
            check_output(output, overwrite)
            _replace(output, folder, old)
        except BaseException as error:
            shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, OSError):
                raise StorageError(f"cannot write {output}: {error.strerror}") from error
            raise


@contextmanager
def _locked(output: Path, folder: Path) -> Iterator[None]:
    """Make the temporary folder and lock it; the kernel releases the lock when the process ends."""
    try:
        folder.mkdir(exist_ok=True)
        lock = open(folder / _LOCK, "a")
    except OSError as error:
        with suppress(OSError):
            folder.rmdir()
        if error.errno in NO_ROOM:
            raise StorageError(f"cannot write {folder}: {error.strerror}") from error
        reason = error.strerror
        if isinstance(error, FileExistsError):
            reason = "another file is there; remove it, or choose another output"
        raise InputError(f"the temporary folder {folder} cannot be used: {reason}") from error
    with lock:
        if not try_lock(lock):
            raise InputError(f"another run is writing {output} (it holds {folder})")
        yield


def _replace(output: Path, folder: Path, old: Path) -> None:
    """Rename the folder to the output; on failure the old data set stays."""
    shutil.rmtree(old, ignore_errors=True)
    # The lock stays held through the open file; only its name must not appear in the data set.
    (folder / _LOCK).unlink()
    (folder / dataset_files.PENDING_DESCRIPTION).rename(folder / dataset_files.DESCRIPTION)
    # No call of the operating system swaps two folders everywhere, so there are two renames. A crash between
    # them leaves the old data set under its temporary name, and the next run renames it back.
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


def write_triples(
    folder: Path,
    names: Iterable[tuple[str, NameList]],
    relations: RelationVocabulary,
    splits: Mapping[str, np.ndarray],
    columns: Mapping[str, np.ndarray],
    original_ids: OriginalIds = lambda triples: triples,
) -> dict[str, Any]:
    """Write all files but the partitions and the description; returns the fields of it that describe them.

    Parameters
    ----------
    folder : Path
        The empty folder of the new data set.
    names : iterable of (str, NameList)
        The names of each entity type.
    relations : RelationVocabulary
    splits : mapping of str to (n, 3) integer array
    columns : mapping of str to (n,) array
        Values of the training triples by the file's name, for instance weights.
    original_ids : callable
        Returns the original ids (m, 3) of some triples (m, 3); by default they are these.
    """
    paths, num_entities = [], {}
    for type_, vocabulary in names:
        path = dataset_files.vocabulary_path(folder, type_)
        path.parent.mkdir(exist_ok=True)
        vocabulary.save(path)
        paths.append(path)
        num_entities[type_] = len(vocabulary)
    relations.save(folder / dataset_files.RELATIONS)
    paths.append(folder / dataset_files.RELATIONS)
    if relations.times:
        Vocabulary(relations.times, "time").save(folder / dataset_files.TIMES)
        paths.append(folder / dataset_files.TIMES)
    splits = {split: splits.get(split, np.zeros((0, 3), np.int32)) for split in SPLITS}
    # Pairs of entity types follow the relations, so their order does not depend on that of the triples.
    pairs: dict[tuple[str, str], int] = {}
    ranks = np.array([pairs.setdefault((r.lhs, r.rhs), len(pairs)) for r in relations.relations], np.int64)
    counts = np.zeros(len(pairs), np.int64)
    if len(pairs) == 1:
        counts[0] = len(splits[TRAIN])
    else:
        for _, (rows,) in pieces(splits[TRAIN]):
            counts += np.bincount(ranks[original_ids(rows)[:, 1]], minlength=len(counts))
    ends = np.cumsum(counts)
    split_paths = [dataset_files.split_path(folder, split) for split in splits]
    extra = {folder / name: column for name, column in columns.items()}
    _write_split({split_paths[0]: splits[TRAIN], **extra}, original_ids, ends - counts, ranks)
    for path, split in zip(split_paths[1:], (VALID, TEST)):
        _write_split({path: splits[split]}, original_ids, np.zeros(1, np.int64), ranks)
    return {
        Field.ENTITY_TYPES: num_entities,
        Field.NUM_RELATIONS: len(relations.timeless),
        **({Field.NUM_TIMES: len(relations.times)} if relations.times else {}),
        Field.SPLITS: {split: len(rows) for split, rows in splits.items()},
        Field.EDGE_TYPES: [
            [*pair, end - num, end] for pair, num, end in zip(pairs, counts.tolist(), ends.tolist()) if num
        ],
        Field.HAS_WEIGHTS: dataset_files.TRAIN_WEIGHTS in columns,
        Field.FINGERPRINT: dataset_files.fingerprint([*paths, *split_paths, *extra]),
    }


def _write_split(
    arrays: Mapping[Path, np.ndarray], original_ids: OriginalIds, places: Ids, ranks: Ids
) -> None:
    """Write the triples of a split, and then further values of them.

    The triples of a pair of types are one range, which begins at the place of the pair; ``ranks`` has the
    number of each relation's pair. Within a pair they keep the order of the input. A single place: all are
    one range.
    """
    with ExitStack() as stack:
        targets: list[tuple[BinaryIO, int]] = []
        for path, array in arrays.items():
            file = stack.enter_context(open_npy(path, array.dtype.str if targets else "<i8", array.shape))
            targets.append((file, file.tell()))
        # In pieces: the 64-bit ids of a large split may not fit into memory beside the 32-bit ones. Written,
        # not mapped: on a full disk a write fails with an error, but a store to a mapped page is a SIGBUS.
        for _, (some, *values) in pieces(*arrays.values()):
            blocks = [original_ids(some).astype("<i8", order="C"), *values]
            runs: dict[int, np.ndarray | slice] = {0: slice(None)}
            if len(places) > 1:
                pairs = ranks[blocks[0][:, 1]]
                runs = {pair: pairs == pair for pair in np.unique(pairs).tolist()}
            for pair, rows in runs.items():
                for block, (file, start) in zip(blocks, targets):
                    run = block[rows]
                    file.seek(start + int(places[pair]) * run[:1].nbytes)
                    file.write(run.data)
                places[pair] += len(run)


def finish_dataset(
    folder: Path, description: dict[str, Any], quality: dict[str, Any], facts: Mapping[str, Any], **job: Any
) -> dict[str, Any]:
    """Partition the graph of a folder of :func:`write_triples`, and write report and description.

    The description is durable, under the pending name; :func:`staged` gives it its own. ``facts`` are further
    fields of the report, ``job`` is as of :meth:`dglkge.partition.run_build.GraphJob.of`.

    Returns
    -------
    dict
        The content of ``partitions/report.json``.
    """
    run_build(folder, GraphJob.of(description, **job))
    description |= {Field.UNSEEN: quality["unseen"], Field.DUPLICATES: quality["duplicates"]}
    figures = {**partition_figures(Dataset(folder, description)), **facts, Field.QUALITY: quality}
    report = folder / dataset_files.PARTITIONS / dataset_files.REPORT
    report.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    version = {Field.FORMAT_VERSION: dataset_files.FORMAT_VERSION}
    content = {**version, **description, Field.CHECKSUMS: dataset_files.file_checksums(folder)}
    with replacing(folder / dataset_files.PENDING_DESCRIPTION) as file:
        file.write((json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())
    return figures
