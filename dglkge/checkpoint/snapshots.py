"""Snapshots: versions kept as folders of links, ``epoch_{E}/`` and ``best/``, beside the versions' own files.

A snapshot is a checkpoint folder itself, PyTorch-BigGraph's as well as ours. Files of the version are
relative symbolic links, so the run's folder can be moved as a whole; lists of names, which a later version
may replace, are hard links. A version that a snapshot links to is not dropped, whatever its age.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dglkge.checkpoint import layout
from dglkge.checkpoint.durable import sync

WRITTEN_IN_PLACE = (layout.CONFIG_FILE, layout.STATS_FILE)
"""PyTorch-BigGraph writes into these when it resumes a run: a hard link to them would change too."""


def take(folder: Path, name: str, version: int, note: Mapping[str, Any], texts: Mapping[str, Path]) -> None:
    """Make a snapshot of a version; replaces an older one of that name.

    Parameters
    ----------
    folder : Path
        The checkpoint's folder.
    name : str
        ``"best"``, or one of :func:`dglkge.checkpoint.layout.epoch_snapshot`.
    version : int
        All its files are on the disk.
    note : mapping
        The reason; :func:`read_note` returns it.
    texts : mapping of str to Path
        Current path of each text file of the version, by name; empty if its manifest lists none.

    Raises
    ------
    OSError
        If there is no room on the disk.
    """
    target, new = folder / name, folder / (name + layout.TEMPORARY_SUFFIX)
    old = folder / (name + layout.REPLACED_SUFFIX)
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    for path in sorted(folder.iterdir()):
        found = layout.parse_versioned(path.name)
        if found is not None:
            if found.version == version and not found.staged and not layout.is_transient(path.name):
                os.symlink(os.path.join("..", path.name), new / path.name)
        elif layout.is_transient(path.name):
            continue
        elif path.is_file() and path.name not in (layout.VERSION_FILE, *texts):
            if not (texts and layout.is_replaced_text(path.name)):  # else of the version before
                _hard_link(path, new / path.name)
    for text, path in texts.items():
        _hard_link(path, new / text)
    (new / layout.VERSION_FILE).write_text(f"{version}\n", encoding="utf-8")
    note_path = new / layout.SNAPSHOT_NOTE_FILE
    note_path.write_text(json.dumps({"version": version, **note}) + "\n", encoding="utf-8")
    # The links are on the disk before the folder has its name; the files that they point to are durable
    # already.
    for path in (new / layout.VERSION_FILE, note_path, new):
        sync(path)
    # No call swaps two folders everywhere, so the old snapshot is renamed first. A crash between the renames
    # leaves it with the suffix, and recover() renames it back.
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.replace(target, old)
    os.replace(new, target)
    sync(folder)
    shutil.rmtree(old, ignore_errors=True)


def read_note(folder: Path, name: str) -> dict[str, Any]:
    """Return the note of a snapshot; empty if there is no such snapshot."""
    try:
        note = json.loads((folder / name / layout.SNAPSHOT_NOTE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return note if isinstance(note, dict) else {}


def kept_versions(folder: Path) -> set[int]:
    """Return the versions that snapshots link to."""
    return {version for _, versions in snapshots(folder) for version in versions}


def snapshots(folder: Path) -> Iterator[tuple[Path, set[int]]]:
    """Yield each snapshot and the versions of its files, which are part of their names."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if layout.is_snapshot(path.name) and path.is_dir():
            found = (layout.parse_versioned(name) for name in os.listdir(path))
            yield path, {one.version for one in found if one is not None}


def recover(folder: Path, version: int) -> None:
    """Clean up after an interrupted save: half-made snapshots, and those of unpublished versions."""
    for path in sorted(folder.glob("*" + layout.TEMPORARY_SUFFIX)):
        if path.is_dir() and layout.is_snapshot(path.stem):  # others' folders stay
            shutil.rmtree(path)
    # The replaced snapshot is removed only if its successor belongs to a published version. Otherwise the
    # successor is removed here, and the loop below renames the old one back.
    for path, versions in list(snapshots(folder)):
        target = path.with_suffix("")
        replaced = path.suffix == layout.REPLACED_SUFFIX and _counts(target, version)
        if replaced or max(versions, default=0) > version:
            shutil.rmtree(path)
    for path, _ in list(snapshots(folder)):
        if path.suffix == layout.REPLACED_SUFFIX:
            os.replace(path, path.with_suffix(""))


def _counts(snapshot: Path, version: int) -> bool:
    """Return whether a snapshot exists and is no newer than the published version."""
    return any(
        path == snapshot and max(versions, default=0) <= version
        for path, versions in snapshots(snapshot.parent)
    )


def _hard_link(source: Path, target: Path) -> None:
    """Hard-link a file; copy it if it may change later, or if the disk has no hard links."""
    try:
        # Later versions replace these texts by renaming, which leaves the linked inode as it is.
        if target.name not in WRITTEN_IN_PLACE:
            os.link(source, target)
            return
    except OSError:
        pass
    shutil.copyfile(source, target)
    sync(target)
