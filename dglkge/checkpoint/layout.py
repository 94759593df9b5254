"""Names of the files and JSON fields of a run's folder and of its checkpoint: the only place that has them.

Everything here is pure: no function touches a disk. Standard library only, because the launcher and its
agents on other machines import it.

A run's folder::

    config.json        the run's configuration
    job.json           folder of the logs of the newest job and its numbers of processes
    stats.jsonl        JSON lines: loss and speed, some times per epoch; metrics of the valid split
    metrics.json       ranking results of the training job, by split
    metrics-*.json     one ranking result of dglkge evaluate each, named by its protocol
    validation.json    number of the epoch after which the valid split was last ranked
    init_from.json     coverage and projection of the given vectors that entities started with
    features/          frozen vectors of entities: {type}.npy by original id, and features.json about them
    calibration.json   probabilities of scores, see dglkge.inference.calibration
    trackers.json      ids of the run in the trackers of training.loggers
    lease.json         the job that may write here, see dglkge.distributed.lease
    copies.json        on a machine of a job with --sync: the run, and the launchers' folders that have a copy
    outbox_{rank}/     files that are not yet delivered to the first machine
    checkpoint/        see dglkge.checkpoint.storage
"""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass

FORMAT_VERSION = 1
"""Version of the HDF5 files: PyTorch-BigGraph's, which refuses any other."""
MANIFEST_VERSION = 2
"""Version of our own manifest; version 1 listed the HDF5 files only."""

RUN_CONFIG_FILE = "config.json"
RUN_JOB_FILE = "job.json"
RUN_STATS_FILE = "stats.jsonl"
RUN_METRICS_FILE = "metrics.json"
METRICS_PATTERN = "metrics*.json"
"""Shell pattern of all files of ranking results."""
RUN_VALIDATION_FILE = "validation.json"
RUN_VECTORS_FILE = "init_from.json"
RUN_CALIBRATION_FILE = "calibration.json"
RUN_TRACKERS_FILE = "trackers.json"
FEATURES_FOLDER = "features"
FEATURES_NOTE_FILE = "features.json"
LEASE_FILE = "lease.json"
ORIGIN_FILE = "copies.json"
OUTBOX_FOLDER = "outbox"
CHECKPOINT_FOLDER = "checkpoint"
WRITER_FILE = "writer.json"
"""At the URL of ``checkpoint.storage``: the job that may write there."""
LOCK_FILE = "download.lock"
"""In a folder to which a run is downloaded."""

VERSION_FILE = "checkpoint_version.txt"
CONFIG_FILE = "config.json"
"""PyTorch-BigGraph's configuration, in the checkpoint's folder; the run's own has the same name beside it."""
RELATION_COUNT_FILE = "dynamic_rel_count.txt"
RELATION_NAMES_FILE = "dynamic_rel_names.json"
STATS_FILE = "training_stats.json"
SNAPSHOT_NOTE_FILE = "snapshot.json"
BEST_SNAPSHOT = "best"

TEMPORARY_SUFFIX = ".tmp"
RECEIPT_SUFFIX = ".receipt.json"
DAMAGED_PREFIX = "damaged_v"
REPLACED_SUFFIX = ".old"
"""Of a snapshot while another one of its name takes its place."""

MANIFEST_PATTERN = "manifest.v*.json"
HDF5_PATTERN = "*.v*.h5"
"""Shell patterns of the files of all versions."""

MOST_VERSION_DIGITS = 18
"""Limit of the digits in the version file. Python refuses to parse numbers of thousands of digits."""


class Progress:
    """Fields of a manifest's progress; ``validation.json`` has the first one too."""

    FINISHED_EPOCHS = "finished_epochs"
    BATCHES_DONE = "batches_done"
    GLOBAL_BATCH_SIZE = "global_batch_size"
    EPOCH_LOSS = "epoch_loss"
    PASSES_DONE = "passes_done"
    """Of the open epoch: edge sets and chunks that have ended in it."""
    VALIDATION_PENDING = "validation_pending"
    ENDED_AFTER = "ended_after"
    ORDER_MARK = "order_mark"


# One expression for all names of versions, because clean-up must find each of them: rows, manifests, staged
# texts, and the receipts and unfinished files of these.
_VERSIONED = re.compile(
    r"(?:embeddings_.+_\d+\.v(?P<part>\d+)\.h5|model\.v(?P<model>\d+)\.h5|manifest\.v(?P<manifest>\d+)\.json"
    r"|(?:entity_names_.+_\d+|config)\.v(?P<json>\d+)\.json|entity_count_.+_\d+\.v(?P<count>\d+)\.txt"
    r"|training_state\.v(?P<state>\d+)\.pt)"
    r"(?:\.receipt\.json)?(?P<temporary>(?:\.[0-9a-f]{16})?\.tmp)?"
)
_NAMES = re.compile(
    r"(?:entity_names_.+_(?P<names>\d+)\.json|entity_count_.+_(?P<count>\d+)\.txt)(?:(?:\.[0-9a-f]{16})?\.tmp)?"
)
# 16 hexadecimal digits are a job's nonce. Temporary files of other programs do not have them.
_OF_A_JOB = re.compile(r".+\.[0-9a-f]{16}\.tmp")
_RECORDS = (
    RUN_CONFIG_FILE,
    RUN_STATS_FILE,
    RUN_VALIDATION_FILE,
    RUN_VECTORS_FILE,
    RUN_CALIBRATION_FILE,
    RUN_TRACKERS_FILE,
)
_SNAPSHOT = re.compile(r"(?:epoch_\d+|best)(?:\.old)?")


@dataclass(frozen=True)
class VersionedFile:
    """Facts in the name of a file that belongs to one version.

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


def split_metrics_file(split: str, protocol: str) -> str:
    """Return the name of the file of ``dglkge evaluate``'s result, in the run's folder.

    Parameters
    ----------
    split : str
    protocol : str
        What differs from the default protocol, each after a hyphen: ``-raw-first500``.
    """
    return f"metrics-{split}{protocol}.json"


def triples_metrics_file(stem: str, protocol: str) -> str:
    """Return the name of the file of ``dglkge evaluate --triples``'s result, in the run's folder."""
    return f"metrics-triples-{stem}{protocol}.json"


def is_record(name: str) -> bool:
    """Return whether a name is that of a record in the run's folder, which its copy at a URL has too."""
    return name in _RECORDS or fnmatch.fnmatchcase(name, METRICS_PATTERN)


def outbox_folder(rank: int) -> str:
    """Return the name of the folder of a trainer's undelivered files, in the run's folder."""
    return f"{OUTBOX_FOLDER}_{rank}"


def embeddings_file(entity_type: str, part: int, version: int) -> str:
    """Return the name of the file of one part of one entity type."""
    return f"embeddings_{entity_type}_{part}.v{version}.h5"


def first_parts_pattern(version: int) -> str:
    """Return the shell pattern of the first part of every entity type in a version."""
    return embeddings_file("*", 0, version)


def model_file(version: int) -> str:
    """Return the name of the file of the relations."""
    return f"model.v{version}.h5"


def training_state_file(version: int) -> str:
    """Return the name of the file of what changes during training beside the tables: schedules, patience."""
    return f"training_state.v{version}.pt"


def manifest_file(version: int) -> str:
    """Return the name of the file that lists a version's files."""
    return f"manifest.v{version}.json"


def receipt_file(name: str) -> str:
    """Return the name of a writer's receipt for a file: rank 0 waits for the receipts of all writers."""
    return name + RECEIPT_SUFFIX


def receipts_pattern(version: int) -> str:
    """Return the shell pattern of all receipts of a version."""
    return receipt_file(f"*.v{version}.h5")


def temporary_file(name: str, nonce: str) -> str:
    """Return the name of a file while a job writes it; two jobs never share one.

    Parameters
    ----------
    name : str
        The file's own name.
    nonce : str
        The job's, 16 hexadecimal digits; empty where no lease was taken.
    """
    return f"{name}.{nonce}{TEMPORARY_SUFFIX}" if nonce else name + TEMPORARY_SUFFIX


def is_temporary_of_a_job(name: str) -> bool:
    """Return whether a name is one of :func:`temporary_file` with a nonce."""
    return _OF_A_JOB.fullmatch(name) is not None


def is_transient(name: str) -> bool:
    """Return whether a name is that of a receipt or of an unfinished file: neither belongs to a copy."""
    return name.endswith((RECEIPT_SUFFIX, TEMPORARY_SUFFIX))


def entity_names_file(entity_type: str, part: int) -> str:
    """Return the name of PyTorch-BigGraph's list of a part's names, in the order of its rows."""
    return f"entity_names_{entity_type}_{part}.json"


def entity_count_file(entity_type: str, part: int) -> str:
    """Return the name of PyTorch-BigGraph's count of a part's rows."""
    return f"entity_count_{entity_type}_{part}.txt"


def features_array(entity_type: str) -> str:
    """Return the name of the frozen vectors of an entity type in the folder of features."""
    return f"{entity_type}.npy"


def vocabulary_file(entity_type: str) -> str:
    """Return the name of our list of all names of a type: line number = original id."""
    return f"vocabulary_{entity_type}.txt"


def epoch_snapshot(epoch: int) -> str:
    """Return PyTorch-BigGraph's name of the snapshot after so many epochs."""
    return f"epoch_{epoch}"


def is_snapshot(name: str) -> bool:
    """Return whether a name is that of a snapshot's folder, or of one that is being replaced."""
    return _SNAPSHOT.fullmatch(name) is not None


def staged_file(name: str, version: int) -> str:
    """Return the name of a text file of a version while another version's text has its own name.

    PyTorch-BigGraph requires the names ``entity_names_person_0.json`` and ``config.json``. Before its version
    is published, and again before the next one is, such a text has the name ``config.v7.json``.
    """
    # The version goes before the suffix, so that a staged file still ends in .json or .txt.
    stem, suffix = name.rsplit(".", 1)
    return f"{stem}.v{version}.{suffix}"


def is_replaced_text(name: str) -> bool:
    """Return whether a text may differ between two versions of one run: names, counts and config.json."""
    return name == CONFIG_FILE or parse_names_part(name) is not None


def parse_versioned(name: str) -> VersionedFile | None:
    """Parse the name of a file of a version; None for any other name."""
    match = _VERSIONED.fullmatch(name)
    if match is None:
        return None
    text = match["json"] or match["count"]
    version = text or match["part"] or match["model"] or match["manifest"] or match["state"]
    return VersionedFile(int(version), match["temporary"] is not None, text is not None)


def parse_names_part(name: str) -> int | None:
    """Return the part that a file of names or of a count belongs to; None for any other file."""
    match = _NAMES.fullmatch(name)
    return None if match is None else int(match["names"] or match["count"])


def parse_version(text: str) -> int | None:
    """Return the number that a version file holds; None for any other text."""
    # str.isdigit alone also accepts digits of other scripts and superscripts; int() refuses the latter.
    is_number = text.isascii() and text.isdigit() and len(text) <= MOST_VERSION_DIGITS
    return int(text) if is_number else None
