"""State of a run from its files: progress, speed, loss, learning curves, metrics, processes, events.

No process is asked, so this works for a run of another machine whose files are copied here, and for a run
that has ended.
"""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from dglkge.checkpoint import layout
from dglkge.checkpoint.layout import Progress
from dglkge.data.dataset_files import TEST, VALID
from dglkge.distributed.jobs import human_bytes
from dglkge.distributed.world import parse_line
from dglkge.errors import InputError
from dglkge.launch.console import LAUNCHER_LOG, is_noise

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
        **{name: thinned(points, [line[name] for line in batches]) for name in ("loss", "edges_per_second")},
        VALID: {
            name: thinned(*zip(*sorted(values.items())))
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
    whole_seconds = round(seconds)
    for size, large, unit, small in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole_seconds >= size:
            return f"{whole_seconds // size} {large} {whole_seconds % size // unit} {small}"
    return f"{seconds:.3g} s"


NONE = "–"


def number(value: float | None, form: str = ",") -> str:
    """Return a figure that may be missing in a format of Python's, or as bytes."""
    if value is None:
        return NONE
    return human_bytes(value) if form == "bytes" else format(value, form)


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


TRAINING, STOPPED, FINISHED, NEW = "training", "no news", "finished", "not begun"
"""States: lines come; none came for a while; all epochs are done; there is no line yet."""

QUIET_SECONDS = 60.0
"""Time without a new line until a run has no news, or QUIET_FACTOR times the last pause if that is longer."""
QUIET_FACTOR = 5

TAIL_BYTES = 65536
MOST_EVENTS = 200

_LAUNCHER_LINE = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z) (.*)")


def run_state(
    folder: Path, logs: Path | None = None, num_lines: int = 10, now: float | None = None
) -> dict[str, Any]:
    """Return the state of a run or of a checkpoint in it; what is not known is None or empty.

    Parameters
    ----------
    logs : Path, optional
        Folder of its logs; by default the one that the run names, and ``logs/`` in the run.
    num_lines : int
        Events, and lines of the first trainer's log.
    now : float, optional
        Seconds since the epoch.

    Raises
    ------
    InputError
        If the folder is no run.
    """
    folder = records_folder(folder)
    if not folder.is_dir():
        raise InputError(f"{folder} does not exist; expected the folder of a run")
    names = (layout.RUN_CONFIG_FILE, layout.RUN_STATS_FILE, layout.CHECKPOINT_FOLDER, layout.LEASE_FILE)
    if not any((folder / name).exists() for name in names):
        raise InputError(f"{folder} is no folder of a run: it has none of {', '.join(names)}")
    now = time.time() if now is None else now
    lines = read_lines(folder / layout.RUN_STATS_FILE)
    batches = [line for line in lines if Progress.BATCHES_DONE in line]
    last: Mapping[str, Any] = batches[-1] if batches else {}
    config, manifest = _read_json(folder / layout.RUN_CONFIG_FILE), _newest_manifest(folder)
    num_epochs = config.get("training", {}).get("num_epochs")
    progress = _progress(last, num_epochs)
    version, saved = manifest.get("version"), manifest.get("progress", {})
    quiet = _quiet_seconds(folder, lines, now)
    has_all = bool(last) and progress["epochs_done"] == num_epochs
    is_finished = has_all or saved.get(Progress.ENDED_AFTER) is not None
    # The time between the last two lines, negative where an epoch has begun.
    pause = batches[-1]["epoch_seconds"] - batches[-2]["epoch_seconds"] if len(batches) > 1 else 0.0
    is_quiet = quiet is None or quiet > max(QUIET_SECONDS, QUIET_FACTOR * pause)
    found_logs = _find_logs(folder, logs)
    return {
        "run": str(folder),
        "state": FINISHED if is_finished else NEW if not last else STOPPED if is_quiet else TRAINING,
        "progress": progress,
        **{name: last.get(name) for name in ("loss", Progress.EPOCH_LOSS, "edges_per_second")},
        "seconds_left": None if is_finished else _seconds_left(batches, progress),
        "quiet_seconds": quiet,
        VALID: _validations(lines),
        TEST: _read_json(folder / layout.RUN_METRICS_FILE).get(TEST, {}).get("both"),
        "version": version,
        "bytes_sent": last.get("bytes_sent"),
        "processes": last.get("processes", {}),
        "logs": None if found_logs is None else str(found_logs),
        "events": _events(lines, found_logs)[-num_lines:] if num_lines else [],
        "log": [] if found_logs is None or not num_lines else _log_tail(found_logs, num_lines),
    }


def _progress(last: Mapping[str, Any], num_epochs: int | None) -> dict[str, Any]:
    """Return the place in the training of the last line; the epoch counts from 1."""
    done, of = last.get(Progress.BATCHES_DONE, 0), last.get("num_batches")
    epochs_done = last["epoch"] + done / of if last and of else 0.0
    return {
        "epoch": last["epoch"] + 1 if last else 0,
        "num_epochs": num_epochs,
        Progress.BATCHES_DONE: done,
        "num_batches": of,
        "epochs_done": epochs_done,
        "fraction": min(1.0, epochs_done / num_epochs) if num_epochs else None,
    }


def _validations(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the last and the best ranking of the valid split."""
    results = [
        {"epoch": line["epoch"] + 1, **line[VALID]} for line in lines if isinstance(line.get(VALID), dict)
    ]
    best = max(results, key=lambda result: result.get("mrr", 0.0), default=None)
    return {"last": results[-1] if results else None, "best": best}


def _seconds_left(batches: Sequence[Mapping[str, Any]], progress: Mapping[str, Any]) -> float | None:
    """Return the training time that is left at the speed of the newest part of an epoch; None if unknown."""
    if not batches or not progress["num_epochs"]:
        return None
    last = batches[-1]
    # A job that has resumed restarts the clock of the epoch: only lines of one start are compared.
    before = (
        line
        for line in batches[-6:-1]
        if line["epoch"] == last["epoch"] and line["epoch_seconds"] < last["epoch_seconds"]
    )
    first = next(before, {"epoch_seconds": 0.0, Progress.BATCHES_DONE: 0})
    num = last[Progress.BATCHES_DONE] - first[Progress.BATCHES_DONE]
    if num <= 0:
        return None
    num_batches = (progress["num_epochs"] - progress["epochs_done"]) * last["num_batches"]
    return max(0.0, num_batches) * (last["epoch_seconds"] - first["epoch_seconds"]) / num


def _quiet_seconds(folder: Path, lines: Sequence[Mapping[str, Any]], now: float) -> float | None:
    """Return the seconds since the last line; by the time of the file for lines without one."""
    with contextlib.suppress(LookupError, ValueError, AttributeError):
        return max(0.0, now - datetime.fromisoformat(lines[-1]["time"].replace("Z", "+00:00")).timestamp())
    with contextlib.suppress(OSError):
        return max(0.0, now - (folder / layout.RUN_STATS_FILE).stat().st_mtime)
    return None


def _newest_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of the published version; empty if there is none."""
    checkpoint = folder / layout.CHECKPOINT_FOLDER
    with contextlib.suppress(OSError, ValueError):
        version = layout.parse_version((checkpoint / layout.VERSION_FILE).read_text(encoding="utf-8").strip())
        if version:
            path = checkpoint / layout.version_folder(version) / layout.MANIFEST_FILE
            return {**_read_json(path), "version": version}
    return {}


def _read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object; empty if it is absent, half-written or no object."""
    try:
        return layout.parse_object(path.read_bytes())
    except OSError:
        return {}


def _find_logs(folder: Path, log_folder: Path | None) -> Path | None:
    """Return the folder of the newest attempt's logs, or None; a folder that is named must exist."""
    if log_folder is not None and not log_folder.is_dir():
        raise InputError(f"there is no folder of logs {log_folder}")
    job = _read_json(folder / layout.RUN_JOB_FILE)
    places = [folder / str(job[name]) for name in ("log_dir_from_here", "log_dir") if job.get(name)]
    for place in [log_folder] if log_folder is not None else [*places, folder / "logs"]:
        if place.is_dir():
            # --max_restarts makes a folder of each attempt.
            attempts = sorted(place.glob("attempt-*"), key=lambda path: path.stat().st_mtime)
            return attempts[-1] if attempts else place
    return None


def _events(lines: Sequence[Mapping[str, Any]], logs: Path | None) -> list[dict[str, Any]]:
    """Return rankings, messages of the launcher and JSON lines of trainers, in the order of time."""
    events = []
    for line in lines:
        if isinstance(line.get(VALID), dict) and isinstance(line.get("time"), str):
            message = f"epoch {line['epoch'] + 1}: valid MRR {line[VALID].get('mrr', 0.0):.4f}"
            events.append({"time": line["time"], "process": "trainer 0", "level": "info", "message": message})
    for path in [] if logs is None else [logs / LAUNCHER_LOG, *sorted(logs.glob("trainer-*.log"))]:
        for text in _tail(path)[-MOST_EVENTS:]:
            record = parse_line(text)
            plain = _LAUNCHER_LINE.fullmatch(text) if record is None and path.name == LAUNCHER_LOG else None
            if plain:
                record = {"time": plain[1], "level": "info", "process": "launcher", "message": plain[2]}
            # Messages of DGL are of level debug.
            if record is not None and record["level"] != "debug":
                events.append({name: record[name] for name in ("time", "process", "level", "message")})
    # Times are of one form, so their order is that of their texts; sorting is stable.
    return sorted(events, key=lambda event: event["time"])[-MOST_EVENTS:]


def _log_tail(logs: Path, num_lines: int) -> list[str]:
    """Return the last lines of the first trainer's log without those that are events already."""
    lines = [line for line in _tail(logs / "trainer-0.log") if parse_line(line) is None]
    return [line for line in lines if line.strip() and not is_noise(line)][-num_lines:]


def _tail(path: Path) -> list[str]:
    """Return the whole lines in the last TAIL_BYTES of a file; none if it cannot be read."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - TAIL_BYTES))
        lines = file.read(TAIL_BYTES).decode(errors="replace").splitlines()
        # The first one may have begun before.
        return lines[1:] if size > TAIL_BYTES else lines
    return []


PROCESS_GAUGES = (
    ("memory_bytes", "process_resident_memory_bytes", "resident memory of a process, shared parts included"),
    ("shared_bytes", "process_shared_memory_bytes", "part of it that other processes may share"),
    ("bytes_sent", "process_epoch_sent_bytes", "bytes sent to other machines in this epoch"),
)
"""Column of a process in the statistics, name of the gauge, and its help."""

ESCAPED = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
"""Characters of labels as the format quotes them."""


def prometheus_text(state: Mapping[str, Any], now: float | None = None) -> str:
    """Return a state in Prometheus' text format, for node_exporter's textfile collector or a web server."""
    run = {"run": state["run"]}
    progress, valid = state["progress"], state[VALID]["last"] or {}
    values = {
        "up": (int(state["state"] == TRAINING), "1 while lines of statistics come, else 0"),
        "finished": (int(state["state"] == FINISHED), "1 if all epochs are done"),
        "epochs_done": (progress["epochs_done"], "epochs that are trained, with fractions"),
        "epochs": (progress["num_epochs"], "epochs that will be trained"),
        "loss": (state["loss"], "mean loss of a triple since the line before"),
        Progress.EPOCH_LOSS: (state[Progress.EPOCH_LOSS], "mean loss of a triple in this epoch"),
        "edges_per_second": (state["edges_per_second"], "triples trained per second"),
        "epoch_sent_bytes": (state["bytes_sent"], "bytes sent to other machines in this epoch"),
        "quiet_seconds": (state["quiet_seconds"], "seconds since the last line of statistics"),
        "left_seconds": (state["seconds_left"], "estimate of the training time that is left"),
        "checkpoint_version": (state["version"], "number of the published version"),
        "written_timestamp_seconds": (time.time() if now is None else now, "time at which this was written"),
    }
    texts = [_gauge(name, words, [(run, value)]) for name, (value, words) in values.items()]
    for name, words, metrics in (
        ("valid_metric", "last ranking of the valid split", valid),
        ("test_metric", "ranking of the test split at the end", state[TEST] or {}),
    ):
        samples = [({**run, "metric": key}, value) for key, value in metrics.items() if key != "epoch"]
        texts.append(_gauge(name, words, samples))
    for column, name, words in PROCESS_GAUGES:
        samples = [
            ({**run, "process": process, "machine": str(numbers.get("machine", 0))}, numbers.get(column))
            for process, numbers in state["processes"].items()
        ]
        texts.append(_gauge(name, words, samples))
    return "".join(texts)


def _gauge(name: str, words: str, samples: Iterable[tuple[Mapping[str, str], Any]]) -> str:
    """Return a gauge as the format writes it; empty if no sample is a number."""
    lines = []
    for labels, value in samples:
        if isinstance(value, (int, float)):
            quoted = (f'{label}="{text.translate(ESCAPED)}"' for label, text in labels.items())
            number = {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}.get(text := repr(float(value)), text)
            lines.append(f"dglkge_{name}{{{','.join(quoted)}}} {number}\n")
    head = f"# HELP dglkge_{name} {words}\n# TYPE dglkge_{name} gauge\n"
    return head + "".join(lines) if lines else ""
