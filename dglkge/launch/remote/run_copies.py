"""Copies of a run's folder on the machines of a job: operations on one copy, choice of the newest.

Every machine gets a copy of the checkpoint before a job starts; then only the first machine's grows. Copies
are therefore compared by lineage (:mod:`dglkge.checkpoint.lineage`), never by version number alone. The
newest copy is chosen if it continues all others, on whichever machine it is; copies with different histories
are an error.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dglkge.checkpoint import layout
from dglkge.checkpoint.layout import CHECKPOINT_FOLDER, LEASE_FILE, ORIGIN_FILE, VERSION_FILE
from dglkge.checkpoint.lineage import RunCopy, copy_to_dict, manifest_checksum
from dglkge.checkpoint.storage import read_copy
from dglkge.distributed.lease import Holder
from dglkge.errors import InputError
from dglkge.launch.remote.host_files import STAGING_PREFIX, names_below

OWN_FILES = (LEASE_FILE, ORIGIN_FILE)
"""Files of a run's folder that belong to one machine and are not copied."""

HOLD_FOLDER = STAGING_PREFIX + "held"
HOLD_ATTEMPTS = 5
HOLD_SLICE_SECONDS = 60.0
"""Time that one call of :func:`hold_version` copies, where the disk has no hard links: see there."""
COPY_BLOCK_BYTES = 8 << 20


@dataclass(frozen=True)
class Candidate:
    """A copy of a run, and where it lies.

    Attributes
    ----------
    place : str
        For messages.
    copy : RunCopy
    was_fetched : bool
        Whether the launcher's folder has had a copy of this run.
    """

    place: str
    copy: RunCopy
    was_fetched: bool = False


def describe_copy(folder: str, launcher: str, job: str) -> dict[str, Any]:
    """Describe this machine's copy of a run.

    Parameters
    ----------
    folder : str
        The run's.
    launcher : str
        Identity of the launcher's folder.
    job : str
        The launcher's job, which may hold the folder itself.

    Raises
    ------
    InputError
        If a process of this machine writes to the folder.
    """
    with contextlib.suppress(OSError):
        holder = Holder.from_bytes(Path(folder, LEASE_FILE).read_bytes())
        if holder is not None and holder.job != job and holder.is_on_this_host and not holder.is_dead:
            raise InputError(f"{folder} is in use: another job writes there, {holder.describe()}")
    copy = read_copy(Path(folder))
    origin = _read_origin(Path(folder))
    was_fetched = origin.get("run_id") == copy.run_id and launcher in origin.get("launchers", ())
    return {"copy": copy_to_dict(copy), "was_fetched": was_fetched}


def note_origin(folder: str, launcher: str) -> None:
    """Record beside this machine's copy that a launcher's folder has one too.

    Raises
    ------
    InputError
        If that cannot be written.
    """
    run_id = read_copy(Path(folder)).run_id
    origin = _read_origin(Path(folder))
    launchers = list(origin.get("launchers", ())) if origin.get("run_id") == run_id else []
    if launcher in launchers:
        return
    path = Path(folder, ORIGIN_FILE)
    temporary = path.with_name(f"{ORIGIN_FILE}.{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps({"run_id": run_id, "launchers": [*launchers, launcher]}) + "\n")
        os.replace(temporary, path)
    except OSError as error:
        raise InputError(f"cannot write to {folder}: {error.strerror}") from None


class _SliceEnded(Exception):
    """The time of a call is over, and files are still to be copied."""


def hold_version(folder: str, known: str, seconds: float = math.inf) -> str | dict[str, int] | None:
    """Link the files of the newest version into a folder, which keeps them while they are copied.

    The job continues meanwhile, and removes a version when it has published the next.

    Parameters
    ----------
    folder : str
        The run's.
    known : str
        Checksum of the version that is known already.
    seconds : float
        Copies of files, on a disk without hard links, go on for so long; the next call continues them. The
        launcher's limit for an answer is therefore one of progress, and not of the whole copy.

    Returns
    -------
    str, dict or None
        A folder with the run's records and its checkpoint; ``{"copied_bytes": n}`` if the time was over; None
        if there is nothing new, or versions follow each other too fast.

    Raises
    ------
    InputError
        If the folder cannot be made.
    """
    hold = Path(folder, HOLD_FOLDER)
    deadline = time.monotonic() + seconds
    for _ in range(HOLD_ATTEMPTS):
        copy = read_copy(Path(folder))
        if copy.version == 0 or copy.problem or copy.checksum == known:
            return None
        if not _is_hold_of(hold, copy):
            drop_hold(str(hold))
        try:
            _link_version(Path(folder), hold, copy.version, deadline)
        except _SliceEnded:
            return {"copied_bytes": sum(path.lstat().st_size for path in hold.rglob("*"))}
        except FileNotFoundError:  # dropped meanwhile
            continue
        except OSError as error:
            raise InputError(f"cannot write to {hold}: {error.strerror}") from None
        # Read, link, compare: the job takes no lock for this and may have published a version meanwhile.
        if read_copy(hold).checksum == copy.checksum:
            return str(hold)
    drop_hold(str(hold))
    return None


def drop_hold(hold: str) -> None:
    """Remove what :func:`hold_version` made."""
    shutil.rmtree(hold, ignore_errors=True)


def choose_copy(launcher: Candidate, machines: Mapping[str, Candidate]) -> str | None:
    """Choose the copy that a job continues.

    Parameters
    ----------
    launcher : Candidate
        The launcher's own.
    machines : mapping of str to Candidate
        By address, in the order of the job.

    Returns
    -------
    str or None
        The machine whose copy is newer than the launcher's; None if the launcher's is the newest, or there is
        none at all.

    Raises
    ------
    InputError
        If a copy is damaged, two copies have different histories, or the launcher's was removed.
    """
    everything = [launcher, *machines.values()]
    for one in everything:
        if one.copy.problem:
            others = [other for other in everything if other.copy.version and not other.copy.problem]
            rest = "; ".join(f"{other.place} has {other.copy.describe()}" for other in others)
            raise InputError(
                f"the copy of the run in {one.place} is damaged: {one.copy.problem}; nothing was changed. "
                + (f"Whole copies: {rest}. To go on from those, " if others else "To start anew, ")
                + "move the damaged folder away"
            )
    # The highest version number is the candidate only. It must descend from every other copy, or nothing is
    # chosen.
    newest = max(everything, key=lambda one: one.copy.version)
    for one in everything:
        if not newest.copy.continues(one.copy):
            raise InputError(
                "the copies of the run have different histories, and neither goes on from the other: "
                f"{newest.place} has {newest.copy.describe()}; {one.place} has {one.copy.describe()}. "
                "Nothing was changed; move the copies away that you do not want"
            )
    # A missing local copy may be deliberate: without this test the job would bring the removed run back.
    if launcher.copy.version == 0:
        left = [one for one in machines.values() if one.copy.version and one.was_fetched]
        if left:
            rest = "; ".join(f"{one.place} has {one.copy.describe()}" for one in left)
            raise InputError(
                f"the run was removed from {launcher.place}, and is still on machines of the job: {rest}. "
                "Nothing was changed; to start anew move those folders away too, to go on copy one of them "
                "back"
            )
    if newest.copy.version == launcher.copy.version:
        return None
    return next(address for address, one in machines.items() if one is newest)


def _is_hold_of(hold: Path, copy: RunCopy) -> bool:
    """Return whether a folder holds a part of a version: its manifest is linked before all other files."""
    try:
        content = (hold / CHECKPOINT_FOLDER / _manifest(copy.version)).read_bytes()
    except OSError:
        return False
    return manifest_checksum(content) == copy.checksum


def _link_version(run: Path, hold: Path, version: int, deadline: float) -> None:
    """Link the checkpoint's files, apart from those of a version that does not count; copy the records.

    Files that are in the hold already stay: an earlier call linked or copied them.

    Raises
    ------
    _SliceEnded
        If a file was to be copied after the deadline.
    """
    folder, target = run / CHECKPOINT_FOLDER, hold / CHECKPOINT_FOLDER
    target.mkdir(parents=True, exist_ok=True)
    manifest = _manifest(version)
    # The manifest first: it identifies the version that a hold belongs to, see _is_hold_of.
    for name in sorted(names_below(str(folder)), key=lambda name: (name != manifest, name)):
        is_newer = (layout.parse_version_folder(Path(name).parts[0]) or 0) > version
        is_unfinished = any(layout.is_transient(part) for part in Path(name).parts)
        if name == VERSION_FILE or is_unfinished or is_newer:
            continue
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(target / name):
            continue
        if (folder / name).is_symlink():
            os.symlink(os.readlink(folder / name), target / name)
        else:
            # The manifest is small, and without it the next call would begin anew.
            _link(folder / name, target / name, math.inf if name == manifest else deadline)
    # The version file last, so that an unfinished hold does not read as a checkpoint.
    (target / VERSION_FILE).write_text(f"{version}\n", encoding="utf-8")
    for path in sorted(run.iterdir()):
        # Copied and not linked: the job appends to its records in place.
        if path.is_file() and path.name not in OWN_FILES and not path.name.endswith(layout.TEMPORARY_SUFFIX):
            shutil.copy2(path, hold / path.name)


def _manifest(version: int) -> str:
    """Return the name of a version's manifest in the checkpoint's folder."""
    return f"{layout.version_folder(version)}/{layout.MANIFEST_FILE}"


def _link(source: Path, target: Path, deadline: float) -> None:
    """Give a file one more name; on a disk without hard links, copy it, or go on with its copy."""
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        unfinished = target.with_name(target.name + layout.TEMPORARY_SUFFIX)
        with open(source, "rb") as old, open(unfinished, "ab") as new:
            # Goes on behind the bytes that earlier calls have copied.
            old.seek(new.tell())
            while block := old.read(COPY_BLOCK_BYTES):
                new.write(block)
                if time.monotonic() >= deadline:
                    raise _SliceEnded from None
        shutil.copystat(source, unfinished)
        os.replace(unfinished, target)


def _read_origin(folder: Path) -> dict[str, Any]:
    """Read what :func:`note_origin` wrote."""
    try:
        origin = json.loads((folder / ORIGIN_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return origin if isinstance(origin, dict) else {}
