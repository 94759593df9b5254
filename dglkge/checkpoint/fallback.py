"""Going back to the newest good version of a damaged checkpoint, when the user asks for it."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dglkge.checkpoint import layout, shared_texts, snapshots
from dglkge.checkpoint.file_check import check_text
from dglkge.checkpoint.manifest import Manifest, TextEntry
from dglkge.checkpoint.storage import CheckpointStorage
from dglkge.data.vocabulary import Vocabulary
from dglkge.errors import CheckpointError, write_error

logger = logging.getLogger(__name__)


def fall_back(storage: CheckpointStorage, names: Mapping[str, Vocabulary] | None = None) -> int | None:
    """Make the newest version with good rows the one that counts, if the one that counts now is damaged.

    Every file is read. What is newer than the good version is not deleted: it is moved to
    ``damaged_v{V}/``, with the snapshots that link to it. Damaged text files of the good version are moved
    there too, and written anew out of its rows and the names.

    Parameters
    ----------
    storage : CheckpointStorage
    names : mapping of str to Vocabulary, optional
        By entity type, as they were handed to the writer of the checkpoint.

    Returns
    -------
    int or None
        The version that was gone back to; None where nothing is damaged, or there is no checkpoint.

    Raises
    ------
    CheckpointError
        If no version is whole.
    """
    try:
        manifest = storage.published()
        if manifest is not None:
            storage.check_files(manifest, checksums=True)
        return None
    except CheckpointError as error:
        good = storage.newest_good()
        if good is None:
            raise
        logger.warning("%s", error)
    go_back(storage, good, names)
    return good


def go_back(storage: CheckpointStorage, good: int, names: Mapping[str, Vocabulary] | None = None) -> None:
    """Make a version the one that counts, move what is newer aside, and write damaged texts anew.

    Raises
    ------
    CheckpointError
        If the folder may not be written to, or a text does not come out as it was.
    StorageError
        If the disk is full or fails.
    """
    storage.check_lease()
    manifest = storage.manifest(good)
    try:
        aside = _set_aside(storage, good)
        _take_texts_of_snapshots(storage, manifest)
        storage.publish(good)
        storage.place_texts(manifest)
        written = shared_texts.write_anew(storage, manifest, names or {})
    except OSError as error:
        raise write_error(f"cannot write to {storage.path}", error) from error
    anew = f"; written anew: {', '.join(written)}" if written else ""
    logger.warning("checkpoint.fallback: going on from version %d%s%s", good, aside, anew)


def survey(storage: CheckpointStorage, is_thorough: bool) -> dict[str, Any]:
    """Read every file of a disk's copy, without changing anything.

    Parameters
    ----------
    storage : CheckpointStorage
    is_thorough : bool
        Whether to look at versions beside the one that counts as well.

    Returns
    -------
    dict
        ``problem`` with the version that counts, empty where it is whole; ``whole``, the checksums of the
        manifests of versions whose rows are whole, by version as text, since this goes through JSON.
    """
    problem, whole = "", []
    try:
        manifest = storage.published()
        if manifest is not None:
            storage.check_files(manifest, checksums=True)
            whole.append(manifest.version)
    except CheckpointError as error:
        problem = str(error)
    if is_thorough:
        whole = list(storage.whole_versions())
    return {"problem": problem, "whole": {str(version): storage.checksum_of(version) for version in whole}}


def choose_common(surveys: Mapping[str, Mapping[str, Any]]) -> int:
    """Return the newest version that is whole on all disks.

    Parameters
    ----------
    surveys : mapping of str to mapping
        By the name of the disk, the first machine's before all others.

    Raises
    ------
    CheckpointError
        If there is none; or if the first machine's newest version is whole and only copies are damaged, so
        that going back would give up work for nothing.
    """
    first = next(iter(surveys.values()))
    damaged = [f"{name}: {one['problem']}" for name, one in surveys.items() if one["problem"]]
    if not first["problem"]:
        newest = max(map(int, first["whole"]), default=0)
        raise CheckpointError(
            f"{damaged[0]}; version {newest} is whole on the first machine: move the damaged copy away, and "
            "start again with --sync, which sends it there anew"
        )
    common = [
        int(version)
        for version, checksum in first["whole"].items()
        if all(one["whole"].get(version) == checksum for one in surveys.values())
    ]
    if not common:
        raise CheckpointError(f"{damaged[0]}; no version is whole on all {len(surveys)} disks of the job")
    return max(common)


def _take_texts_of_snapshots(storage: CheckpointStorage, manifest: Manifest) -> None:
    """Stage the texts of a version that a snapshot has and the folder has not, or of a newer version."""
    kept = [path for path, versions in snapshots.snapshots(storage.path) if manifest.version in versions]
    for text in manifest.all_texts.values():
        if not layout.is_replaced_text(text.name) or _is_whole(storage.path, text, manifest.version):
            continue
        for snapshot in kept:
            if _is_whole(snapshot, text, manifest.version):
                with storage.new_file(layout.staged_file(text.name, manifest.version)) as path:
                    shutil.copyfile(snapshot / text.name, path)
                break


def _is_whole(folder: Path, text: TextEntry, version: int) -> bool:
    try:
        check_text(folder, text, version, checksum=True)
    except CheckpointError:
        return False
    return True


def _set_aside(storage: CheckpointStorage, good: int) -> str:
    """Move what is newer than ``good`` out of the way; returns where to, for the message."""
    newer = {path: found.version for path, found in storage.versioned() if found.version > good}
    if not newer:
        return ""
    target = storage.damaged_folder(max(newer.values()))
    # Snapshots first: their relative links must not come to life again with the next version of that number.
    for path, versions in list(snapshots.snapshots(storage.path)):
        if max(versions, default=0) > good:
            os.replace(path, target / path.name)
    for path in newer:
        os.replace(path, target / path.name)
    return f"; newer files were moved to {target}"
