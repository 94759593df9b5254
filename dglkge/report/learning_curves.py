"""Learning curves of a run, from the JSON lines that training writes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dglkge.checkpoint import layout
from dglkge.checkpoint.layout import Progress
from dglkge.data.dataset_files import VALID

MOST_POINTS = 400
"""Points of a curve in the page; a longer one shows means of neighbours."""


def records_folder(run_folder: Path) -> Path:
    """Return the folder with a run's records, for its checkpoint or a version in that too.

    Examples
    --------
    >>> records_folder(Path("runs/demo/checkpoint/best")), records_folder(Path("runs/demo/checkpoint"))
    (PosixPath('runs/demo'), PosixPath('runs/demo'))
    """
    if run_folder.name == layout.CHECKPOINT_FOLDER:
        return run_folder.parent
    inside = run_folder.parent.name == layout.CHECKPOINT_FOLDER
    return run_folder.parent.parent if inside else run_folder


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of ``stats.jsonl``; a torn line, which a crash leaves, is skipped."""
    if not path.is_file():
        return []
    records = map(layout.parse_object, path.read_text(encoding="utf-8", errors="replace").splitlines())
    return [record for record in records if isinstance(record.get("epoch"), int)]


def learning_curves(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Collect the curves and times of a run.

    A job that stopped without a commit trains some batches again: their later lines replace the earlier ones
    in the curves, and their time counts twice, since it was spent.

    Returns
    -------
    dict
        ``loss`` and ``edges_per_second``: ``[epochs done, value]`` pairs; ``valid``: such pairs by metric;
        ``epochs``: those that ended; ``seconds``: time in the training loop; ``phase_seconds``: by phase, of
        all trainers; ``buckets``: their records in the last epoch that has any.
    """
    batches: list[Mapping[str, Any]] = []
    for line in lines:
        if Progress.BATCHES_DONE in line:
            while batches and _epochs_done(batches[-1]) >= _epochs_done(line):
                batches.pop()
            batches.append(line)
    points = [_epochs_done(line) for line in batches]
    valid: dict[str, dict[int, float]] = {}
    for line in lines:
        for name, value in line.get(VALID, {}).items():
            valid.setdefault(name, {})[line["epoch"] + 1] = value
    ends = [line for line in batches if line[Progress.BATCHES_DONE] == line["num_batches"]]
    phases: Counter[str] = Counter()
    for line in ends:
        phases.update(line.get("phase_seconds", {}))
    return {
        "loss": thinned(points, [line["loss"] for line in batches]),
        "edges_per_second": thinned(points, [line["edges_per_second"] for line in batches]),
        VALID: {
            name: thinned(sorted(values), [values[epoch] for epoch in sorted(values)])
            for name, values in valid.items()
            if name != "num_queries"
        },
        "epochs": [
            {
                "epoch": line["epoch"] + 1,
                "loss": line[Progress.EPOCH_LOSS],
                "seconds": line["epoch_seconds"],
                "bytes_sent": line.get("bytes_sent"),
                "num_trainers": line.get("num_trainers"),
                # 0: the system did not tell.
                "trainer_memory_bytes": line.get("trainer_memory_bytes") or None,
            }
            for line in ends
        ],
        "seconds": _seconds(lines),
        "phase_seconds": dict(phases),
        "buckets": _buckets(lines),
    }


def finite(value: Any) -> Any:
    """Return a value with None for NaN and infinity, which JSON does not have.

    Examples
    --------
    >>> finite({"loss": [1.0, float("nan")]})
    {'loss': [1.0, None]}
    """
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def duration(seconds: float) -> str:
    """Return a time in its two largest units.

    Examples
    --------
    >>> duration(4.32), duration(75.0), duration(7325.0), duration(200_000.0)
    ('4.32 s', '1 min 15 s', '2 h 2 min', '2 d 7 h')
    """
    left = round(seconds)
    for size, large, unit, small in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if left >= size:
            return f"{left // size} {large} {left % size // unit} {small}"
    return f"{seconds:.3g} s"


def thinned(points: Sequence[float], values: Sequence[float]) -> list[list[float]]:
    """Return pairs of point and value, at most :data:`MOST_POINTS`: means of equally many neighbours.

    Examples
    --------
    >>> thinned([1, 2], [0.5, 0.25])
    [[1.0, 0.5], [2.0, 0.25]]
    """
    if not len(points):
        return []
    groups = min(MOST_POINTS, len(points))
    x, y = (np.array_split(np.asarray(numbers, dtype=float), groups) for numbers in (points, values))
    # The last point of a group: the mean covers what was trained up to it.
    return [[float(ends[-1]), float(group.mean())] for ends, group in zip(x, y)]


def _buckets(lines: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return the records of buckets of the last epoch that has any; later ones replace earlier ones."""
    records = {
        (line["epoch"], line[layout.BUCKET_RECORD]["index"]): line[layout.BUCKET_RECORD]
        for line in lines
        if layout.BUCKET_RECORD in line
    }
    last = max((epoch for epoch, _ in records), default=0)
    return [record for (epoch, _), record in sorted(records.items()) if epoch == last]


def _epochs_done(line: Mapping[str, Any]) -> float:
    return float(line["epoch"] + line[Progress.BATCHES_DONE] / line["num_batches"])


def _seconds(lines: Sequence[Mapping[str, Any]]) -> float:
    """Return the sum over all epochs, and parts of epochs between two stops, of their seconds."""
    total, before = 0.0, (-1, 0, 0.0)
    for line in lines:
        if "epoch_seconds" not in line:
            continue
        epoch, done, seconds = line["epoch"], line[Progress.BATCHES_DONE], line["epoch_seconds"]
        # The clock starts again with each epoch and after each stop.
        if epoch != before[0] or done <= before[1] or seconds < before[2]:
            total += before[2]
        before = (epoch, done, seconds)
    return total + before[2]
