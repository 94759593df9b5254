"""Names and versions of a checkpoint's files. Everything here is pure; nothing touches a disk."""

from __future__ import annotations

import re
from dataclasses import dataclass

FORMAT_VERSION = 1
"""Version of the HDF5 files: PyTorch-BigGraph's, which refuses any other."""
MANIFEST_VERSION = 2
"""Version of our own manifest; version 1 listed the HDF5 files only."""

CHECKPOINT_FOLDER = "checkpoint"
VERSION_FILE = "checkpoint_version.txt"
CONFIG_FILE = "config.json"
RELATION_COUNT_FILE = "dynamic_rel_count.txt"
RELATION_NAMES_FILE = "dynamic_rel_names.json"
TEMPORARY_SUFFIX = ".tmp"
RECEIPT_SUFFIX = ".receipt.json"
DAMAGED_PREFIX = "damaged_v"
STATS_FILE = "training_stats.json"

_VERSIONED = re.compile(
    r"(?:embeddings_.+_\d+\.v(?P<part>\d+)\.h5|model\.v(?P<model>\d+)\.h5|manifest\.v(?P<manifest>\d+)\.json"
    r"|(?:entity_names_.+_\d+|config)\.v(?P<json>\d+)\.json|entity_count_.+_\d+\.v(?P<count>\d+)\.txt)"
    r"(?:\.receipt\.json)?(?P<temporary>(?:\.[0-9a-f]{16})?\.tmp)?"
)
_NAMES = re.compile(
    r"(?:entity_names_.+_(?P<names>\d+)\.json|entity_count_.+_(?P<count>\d+)\.txt)(?:(?:\.[0-9a-f]{16})?\.tmp)?"
)
_OF_A_JOB = re.compile(r".+\.[0-9a-f]{16}\.tmp")


@dataclass(frozen=True)
class VersionedFile:
    """What the name of a file that belongs to one version says.

    Attributes
    ----------
    version : int
        The version that it belongs to.
    temporary : bool
        Whether its writer had not finished.
    staged : bool
        Whether it is one of :func:`staged_file`.
    """

    version: int
    temporary: bool
    staged: bool = False


def embeddings_file(entity_type: str, part: int, version: int) -> str:
    """Return the name of the file that holds one part of one entity type."""
    return f"embeddings_{entity_type}_{part}.v{version}.h5"


def model_file(version: int) -> str:
    """Return the name of the file that holds the relations."""
    return f"model.v{version}.h5"


def manifest_file(version: int) -> str:
    """Return the name of the file that lists a version's files."""
    return f"manifest.v{version}.json"


def receipt_file(name: str) -> str:
    """Return the name of the note that tells rank 0 what a writer wrote."""
    return name + RECEIPT_SUFFIX


def temporary_file(name: str, nonce: str) -> str:
    """Return the name under which a job writes a file before it counts; two jobs never share one.

    Parameters
    ----------
    name : str
        The file's own name.
    nonce : str
        The job's, 16 hexadecimal digits; empty where no lease was taken.
    """
    return f"{name}.{nonce}{TEMPORARY_SUFFIX}" if nonce else name + TEMPORARY_SUFFIX


def is_temporary_of_a_job(name: str) -> bool:
    """Tell whether a name is one of :func:`temporary_file` with a nonce."""
    return _OF_A_JOB.fullmatch(name) is not None


def entity_names_file(entity_type: str, part: int) -> str:
    """Return the name of PyTorch-BigGraph's list of a part's names, in the order of its rows."""
    return f"entity_names_{entity_type}_{part}.json"


def entity_count_file(entity_type: str, part: int) -> str:
    """Return the name of PyTorch-BigGraph's count of a part's rows."""
    return f"entity_count_{entity_type}_{part}.txt"


def vocabulary_file(entity_type: str) -> str:
    """Return the name of our list of all names of a type: line number = original id."""
    return f"vocabulary_{entity_type}.txt"


def staged_file(name: str, version: int) -> str:
    """Return the name of a text file of a version while another version's text has its own name.

    ``entity_names_person_0.json`` and ``config.json`` have to have these names for PyTorch-BigGraph. Until
    its version counts, and again when the next one is about to, such a text is ``config.v7.json``.
    """
    stem, suffix = name.rsplit(".", 1)
    return f"{stem}.v{version}.{suffix}"


def is_replaced_text(name: str) -> bool:
    """Tell whether a text may differ between two versions of one run: names, counts and config.json."""
    return name == CONFIG_FILE or parse_names_part(name) is not None


def parse_versioned(name: str) -> VersionedFile | None:
    """Read the version out of a file's name; None where the name is not one of a version's."""
    match = _VERSIONED.fullmatch(name)
    if match is None:
        return None
    text = match["json"] or match["count"]
    version = text or match["part"] or match["model"] or match["manifest"]
    return VersionedFile(int(version), match["temporary"] is not None, text is not None)


def parse_names_part(name: str) -> int | None:
    """Return the part that a file of names or of a count belongs to; None for any other file."""
    match = _NAMES.fullmatch(name)
    return None if match is None else int(match["names"] or match["count"])
