"""Going back to the newest good version of a damaged checkpoint, when the user asks for it."""

from __future__ import annotations

import logging
import os

from dglkge.checkpoint import layout, snapshots
from dglkge.checkpoint.storage import CheckpointStorage
from dglkge.errors import CheckpointError

logger = logging.getLogger(__name__)


def fall_back(storage: CheckpointStorage) -> int | None:
    """Make the newest good version the one that counts, if the one that counts now is damaged.

    Every file is read. What is newer than the good version is not deleted: it is moved to
    ``damaged_v{V}/``, with the snapshots that link to it.

    Parameters
    ----------
    storage : CheckpointStorage

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
    aside = _set_aside(storage, good)
    storage.publish(good)
    logger.warning("checkpoint.fallback: going on from version %d%s", good, aside)
    return good


def _set_aside(storage: CheckpointStorage, good: int) -> str:
    """Move what is newer than ``good`` out of the way; returns where to, for the message."""
    newer = {path: found.version for path, found in storage.versioned() if found.version > good}
    if not newer:
        return ""
    target = storage.path / f"{layout.DAMAGED_PREFIX}{max(newer.values())}"
    target.mkdir(exist_ok=True)
    # Snapshots first: their relative links must not come to life again with the next version of that number.
    for path, versions in list(snapshots.snapshots(storage.path)):
        if max(versions, default=0) > good and not (target / path.name).exists():
            os.replace(path, target / path.name)
    for path in newer:
        os.replace(path, target / path.name)
    return f"; newer files were moved to {target}"
