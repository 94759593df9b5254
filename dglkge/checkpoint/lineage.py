"""Lineage of a run: the jobs that wrote its versions. Compares copies of a run. Standard library only.

A version number alone does not identify a version: version 7 of an abandoned job differs from version 7 of
the job that resumed from version 6 instead. A version is identified by the job that wrote it (its nonce) and
its number. The lineage lists all jobs of a run with the versions that each of them added.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MOST_SHOWN = 5


@dataclass(frozen=True)
class JobVersions:
    """The versions that one job added to a run.

    Attributes
    ----------
    job : str
        Its nonce.
    first, last : int
        Versions.
    host, since : str
        Host and start time, for messages.
    """

    job: str
    first: int
    last: int
    host: str = ""
    since: str = ""


@dataclass(frozen=True)
class RunCopy:
    """Copy of a run in one folder.

    Attributes
    ----------
    version : int
        The published version; 0 if there is none.
    run_id : str
        Equal for all versions of a run.
    checksum : str
        SHA-256 of the manifest, 16 hexadecimal digits: copies with equal checksums hold the same files.
    lineage : tuple of JobVersions
        The last one includes the version itself.
    problem : str
        Description of the damage; empty for a whole copy.
    """

    version: int = 0
    run_id: str = ""
    checksum: str = ""
    lineage: tuple[JobVersions, ...] = ()
    problem: str = ""

    def continues(self, older: RunCopy) -> bool:
        """Return whether this version equals another one or descends from it."""
        # Version 0 is an empty folder: every run descends from it.
        if older.version == 0 or (older.version == self.version and older.checksum == self.checksum):
            return True
        if older.version >= self.version or not older.lineage:
            return False
        # The older version is an ancestor if this lineage has it among the versions of the job that wrote it.
        # An abandoned job has a shorter range here than in its own lineage.
        last = older.lineage[-1]
        return any(one.job == last.job and one.first <= last.last <= one.last for one in self.lineage)

    def describe(self) -> str:
        """Return the history as text for messages."""
        shown = [_describe_job(one) for one in self.lineage[-MOST_SHOWN:]]
        if len(self.lineage) > MOST_SHOWN:
            shown.insert(0, f"{len(self.lineage) - MOST_SHOWN} earlier jobs")
        return f"version {self.version} of run {self.run_id[:8]} ({'; '.join(shown)})"


def extended(
    lineage: Sequence[JobVersions], job: str, version: int, host: str, since: str
) -> list[JobVersions]:
    """Return a lineage with one more version at its end."""
    # The versions of one job are one entry, so the list grows with restarts and not with versions.
    if lineage and lineage[-1].job == job and lineage[-1].last == version - 1:
        return [*lineage[:-1], dataclasses.replace(lineage[-1], last=version)]
    return [*lineage, JobVersions(job, version, version, host, since)]


def manifest_crc32(body: Mapping[str, Any]) -> int:
    """Return the CRC-32 of the canonical JSON of a manifest without its own checksum."""
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def manifest_checksum(content: bytes) -> str:
    """Return the identity of a manifest file: SHA-256 of its bytes, 16 hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()[:16]


def _describe_job(one: JobVersions) -> str:
    """Return the versions, host and start of a job as text."""
    number = str(one.first) if one.first == one.last else f"{one.first} to {one.last}"
    where = f" on {one.host}" if one.host else ""
    when = f" at {one.since}" if one.since else ""
    return f"{number} by job {one.job[:8]}{where}{when}"
