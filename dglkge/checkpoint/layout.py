"""Names of the files and JSON fields of a run's folder and of its checkpoint: the only place that has them.

No function touches a disk. Standard library only, because launcher and node programs import it.

A run's folder::

    config.json        the run's configuration
    job.json           folder of the logs of the newest job and its numbers of processes
    stats.jsonl        JSON lines: loss and speed, some times per epoch; metrics of the valid split
    metrics.json       ranking results of the training job, by split
    metrics-*.json     one ranking result of dglkge evaluate each, named by its protocol
    validation.json    number of the epoch after which the valid split was last ranked
    init_from.json     coverage and projection of the given vectors that entities started with
    features/          frozen vectors of entities: {type}.npy by original id, and features.json about them
    calibration.json   probabilities of scores, see dglkge.evaluation.calibration
    trackers.json      ids of the run in the trackers of training.loggers
    tensorboard/       event files, with training.loggers: [tensorboard]
    lease.json         the job that may write here, see dglkge.distributed.lease
    checkpoint/        see dglkge.checkpoint.storage
"""

from __future__ import annotations

import fnmatch
import json
import re
from typing import Any

FORMAT_VERSION = 1
"""Version of the HDF5 files: PyTorch-BigGraph's, which refuses any other."""
MANIFEST_VERSION = 3
"""Version of our own manifest."""

RUN_CONFIG_FILE = "config.json"
RUN_JOB_FILE = "job.json"
RUN_STATS_FILE = "stats.jsonl"
BUCKET_RECORD = "bucket_record"
"""Field of its lines that have the record of a bucket."""
RUN_METRICS_FILE = "metrics.json"
METRICS_PATTERN = "metrics*.json"
"""Shell pattern of all files of ranking results."""
RUN_VALIDATION_FILE = "validation.json"
RUN_VECTORS_FILE = "init_from.json"
COMPLETION_PATTERN = "completion-*.json"
RUN_CALIBRATION_FILE = "calibration.json"
RUN_RULES_FILE = "rules.json"
RUN_TRACKERS_FILE = "trackers.json"
EVENTS_FOLDER = "tensorboard"
"""Event files of training.loggers."""
FEATURES_FOLDER = "features"
FEATURES_NOTE_FILE = "features.json"
LEASE_FILE = "lease.json"
CHECKPOINT_FOLDER = "checkpoint"
WRITER_FILE = "writer.json"
"""At the run's store, a URL or the launcher's folder: the job that may write there."""
LOCK_FILE = "download.lock"
"""In a folder to which a run is downloaded."""

VERSION_FILE = "checkpoint_version.txt"
CONFIG_FILE = "config.json"
"""PyTorch-BigGraph's configuration, in the checkpoint's folder; the run's own has the same name beside it."""
RELATION_COUNT_FILE = "dynamic_rel_count.txt"
RELATION_NAMES_FILE = "dynamic_rel_names.json"
STATS_FILE = "training_stats.json"
MANIFEST_FILE = "manifest.json"
"""In the folder of a version; written last, after all files that it lists."""
STATE_FILE = "training_state.pt"
"""In the folder of a version: what changes during training beside the tables, such as schedules, patience."""
LATEST_LINK = "latest"
"""Leads to the folder of the published version, on disks that have links."""
BEST = "best"
"""Pointer to the version with the best score."""
POINTER = f"{BEST}|epoch_[0-9]{{1,18}}"
"""Pattern of the names of pointers to versions that are kept."""

TEMPORARY_SUFFIX = ".tmp"
RECEIPT_SUFFIX = ".receipt.json"
DAMAGED_PREFIX = "damaged_v"


class Progress:
    """Fields of a manifest's progress; ``validation.json`` has the first one too."""

    FINISHED_EPOCHS = "finished_epochs"
    BATCHES_DONE = "batches_done"
    GLOBAL_BATCH_SIZE = "global_batch_size"
    EPOCH_LOSS = "epoch_loss"
    PASSES_DONE = "passes_done"
    """Of the open epoch: edge sets and chunks that have ended in it."""
    VALIDATION_PENDING = "validation_pending"
    """1: the valid split is yet to be ranked after the last finished epoch."""
    ENDED_AFTER = "ended_after"
    """Epochs after which training ended, in an earlier version that was restored as the best."""
    ORDER_MARK = "order_mark"
    """Checksum of the order of an open epoch, where that depends on the partitions."""


_RECORDS = {RUN_CONFIG_FILE, RUN_JOB_FILE, RUN_STATS_FILE, RUN_VALIDATION_FILE}
_RECORDS |= {RUN_VECTORS_FILE, RUN_CALIBRATION_FILE, RUN_RULES_FILE, RUN_TRACKERS_FILE}


def metrics_file(triples: str, protocol: str) -> str:
    """Return the name of the file of ``dglkge evaluate``'s result, in the run's folder.

    `triples` is a split, or ``triples-STEM`` of a file; `protocol` has what differs from the default one,
    each after a hyphen: ``-raw-first500``.
    """
    return f"metrics-{triples}{protocol}.json"


def completion_file(split: str) -> str:
    """Return the name of the file of ``dglkge complete --held-out``'s curve, in the run's folder."""
    return COMPLETION_PATTERN.replace("*", split)


def is_record(name: str) -> bool:
    """Return whether a name is that of a record in the run's folder, which its store has too."""
    return name in _RECORDS or fnmatch.fnmatchcase(name, METRICS_PATTERN)


def embeddings_file(entity_type: str, part: int, version: int) -> str:
    """Return the name of the file of one part of one entity type."""
    return f"embeddings_{entity_type}_{part}.v{version}.h5"


def model_file(version: int) -> str:
    """Return the name of the file of the relations."""
    return f"model.v{version}.h5"


def version_folder(version: int) -> str:
    """Return the name of the folder of a version, in the checkpoint's folder."""
    return f"v{version}"


def parse_version_folder(name: str) -> int | None:
    """Return the version of which a name is the folder's; None for any other name."""
    return parse_version(name[1:]) if name.startswith("v") else None


def receipt_file(name: str) -> str:
    """Return the name of a writer's receipt for a file: rank 0 waits for the receipts of all writers."""
    return name + RECEIPT_SUFFIX


def temporary_file(name: str, nonce: str) -> str:
    """Return the name of a file while a job writes it: two jobs never share one. No lease has no nonce."""
    return f"{name}.{nonce}{TEMPORARY_SUFFIX}" if nonce else name + TEMPORARY_SUFFIX


def is_temporary_of_a_job(name: str) -> bool:
    """Return whether a name is one of :func:`temporary_file` with a nonce."""
    # Temporary files of other programs have no nonce.
    return re.search(r"\.[0-9a-f]{16}\.tmp\Z", name) is not None


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


def epoch_pointer(epoch: int) -> str:
    """Return PyTorch-BigGraph's name of the version that is kept after so many epochs."""
    return f"epoch_{epoch}"


def is_pointer(name: str) -> bool:
    """Return whether a name is that of a pointer to a version that is kept."""
    return re.fullmatch(POINTER, name) is not None


def parse_object(text: str | bytes | None) -> dict[str, Any]:
    """Return the object of a JSON text; empty if there is none, or it is torn."""
    try:
        value = json.loads(text or b"{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def parse_version(text: str) -> int | None:
    """Return the number that a version file holds; None for any other text."""
    # Python refuses to parse numbers of thousands of digits.
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else None
