"""Going back to the newest good version of a damaged checkpoint, when the user asks for it."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from dglkge.checkpoint import layout, shared_texts, snapshots
from dglkge.checkpoint.file_check import check_text
from dglkge.checkpoint.manifest import Manifest, TextEntry
from dglkge.checkpoint.storage import CheckpointStorage
from dglkge.data.vocabulary import Vocabulary
from dglkge.errors import CheckpointError

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
    manifest = storage.manifest(good)
    aside = _set_aside(storage, good)
    _take_texts_of_snapshots(storage, manifest)
    storage.publish(good)
    storage.place_texts(manifest)
    written = shared_texts.write_anew(storage, manifest, names or {})
    anew = f"; written anew: {', '.join(written)}" if written else ""
    logger.warning("checkpoint.fallback: going on from version %d%s%s", good, aside, anew)
    return good


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
