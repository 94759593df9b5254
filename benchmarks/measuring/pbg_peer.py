"""PyTorch-BigGraph on the same data and settings (Lerer et al. 2019)."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from dglkge.config import Config
from dglkge.data.dataset import Dataset
from dglkge.errors import InputError
from measuring.processes import Finished, run_watched
from measuring.run_figures import Epoch, RunFigures

REQUIREMENT = "torchbiggraph==1.0.0"
ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "4294967296",
    "MALLOC_TOP_PAD_": "67108864",
}
"""Without these glibc maps and unmaps the tens of megabytes of every batch anew: half the speed."""

OPERATORS = {"complex": "complex_diagonal", "distmult": "diagonal", "transe_l2": "translation"}
COMPARATORS = {"complex": "dot", "distmult": "dot", "transe_l2": "l2"}
LOSSES = {"softmax": "softmax", "logistic": "logistic", "margin_ranking": "ranking"}
BATCH_NEGATIVES = 50
"""Its default: so many positives share their uniform negatives and are negatives of each other."""

_LINE = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) +(?:\[.*?\] +)?(.*)$")
_PROCESSED = re.compile(r"Processed (\d+) edges in ([\d.]+) s")
_LOADED = re.compile(r"Processed \d+ edges .*; io: ([\d.]+) s")
_STARTING = re.compile(r"Starting epoch (\d+) /")
_MRR = re.compile(r"^Stats: .*\bmrr: +([\d.e+-]+)")


def describe(
    config: Config, folder: Path, num_workers: int, num_parts: int, sets: Sequence[str]
) -> dict[str, Any]:
    """Return its configuration for a configuration of ours.

    Parameters
    ----------
    config : Config
    folder : Path
        Where :func:`export` has put the data.
    num_workers, num_parts : int
    sets : sequence of str
        ``key=value`` that override what follows from ours; values are JSON.

    Raises
    ------
    InputError
        For a model or loss that it does not have, or a setting that is no ``key=value``.
    """
    score, loss = config.model.score_function.name, config.loss.name
    if score not in OPERATORS or loss not in LOSSES:
        raise InputError(f"PyTorch-BigGraph has no {score} with {loss}")
    described: dict[str, Any] = {
        "entity_path": str(folder / "entities"),
        "edge_paths": [str(folder / "train")],
        "checkpoint_path": str(folder / "model"),
        "entities": {"entity": {"num_partitions": num_parts}},
        # Dynamic relations: one entry stands for all, with an operator for each side, as our reciprocal rows.
        "relations": [
            {"name": "all", "lhs": "entity", "rhs": "entity", "operator": OPERATORS[score]},
        ],
        "dynamic_relations": True,
        "dimension": config.model.dimension,
        "init_scale": config.model.init_scale,
        # Its default adds a learned vector for each entity type, which we do not have.
        "global_emb": False,
        "comparator": COMPARATORS[score],
        "loss_fn": LOSSES[loss],
        "margin": getattr(config.loss, "margin", 0.1),
        "num_epochs": config.training.num_epochs,
        "batch_size": config.training.batch_size,
        "num_uniform_negs": max(config.negatives.per_side.values()),
        "num_batch_negs": BATCH_NEGATIVES,
        "lr": config.optimizer.lr,
        "workers": num_workers,
        "eval_fraction": 0,
    }
    for setting in sets:
        key, equals, value = setting.partition("=")
        if not equals:
            raise InputError(f"{setting!r} is no key=value")
        described[key] = json.loads(value)
    return described


def export(dataset: Dataset, folder: Path, num_parts: int) -> None:
    """Write a dataset as its importer would: entity i is row i // P of partition i % P.

    Raises
    ------
    InputError
        If the dataset has several entity types.
    """
    if list(dataset.entity_types) != ["entity"]:
        raise InputError(f"the peer's export takes one entity type, entity; {dataset.path} has others")
    entities = folder / "entities"
    entities.mkdir(parents=True)
    num_entities = dataset.num_entities("entity")
    for part in range(num_parts):
        count = len(range(part, num_entities, num_parts))
        (entities / f"entity_count_entity_{part}.txt").write_text(f"{count}\n")
    (entities / "dynamic_rel_count.txt").write_text(f"{len(dataset.relations)}\n")
    for split in ("train", "valid", "test"):
        _write_buckets(folder / split, np.asarray(dataset.split(split)), num_parts)


def _write_buckets(folder: Path, triples: np.ndarray, num_parts: int) -> None:
    folder.mkdir()
    for lhs in range(num_parts):
        for rhs in range(num_parts):
            inside = (triples[:, 0] % num_parts == lhs) & (triples[:, 2] % num_parts == rhs)
            bucket = triples[inside] if num_parts > 1 else triples
            with h5py.File(folder / f"edges_{lhs}_{rhs}.h5", "w") as file:
                file.attrs["format_version"] = 1
                file.create_dataset("lhs", data=bucket[:, 0] // num_parts)
                file.create_dataset("rhs", data=bucket[:, 2] // num_parts)
                file.create_dataset("rel", data=np.ascontiguousarray(bucket[:, 1]))


def train(
    python: Path,
    config: Config,
    num_workers: int,
    num_parts: int,
    sets: Sequence[str],
    folder: Path,
    limit_seconds: float,
    within: Callable[[list[str]], list[str]] = list,
) -> RunFigures:
    """Run it on a dataset of ours with Hogwild workers; where it has one partition, it can rank too.

    Parameters
    ----------
    python : Path
        Interpreter of an environment that has it.
    config : Config
    num_workers, num_parts : int
    sets : sequence of str
        See :func:`describe`.
    folder : Path
        New folder for its data, model and logs.
    limit_seconds : float
    within : callable
        Makes of the command of training another one that runs it, in a control group for example.

    Raises
    ------
    InputError
        If it cannot run such a configuration.
    RuntimeError
        If it fails.
    """
    described = describe(config, folder, num_workers, num_parts, sets)
    export(Dataset.open(config.dataset), folder, num_parts)
    path = folder / "config.py"
    path.write_text(f"def get_torchbiggraph_config():\n    return {described!r}\n", encoding="utf-8")
    log = folder / "train.log"
    # Its command in the peer's environment, run by that environment's interpreter.
    program = python.parent / "torchbiggraph_train"
    done = run_watched(within([str(python), str(program), str(path)]), log, limit_seconds, ALLOCATOR)
    mrr = None
    if config.evaluation.split == "test" and num_parts == 1:
        script = Path(__file__).with_name("pbg_filtered_ranking.py")
        command = [
            str(python),
            str(script),
            str(path),
            *(str(folder / split) for split in ("test", "valid", "train")),
        ]
        run_watched(command, folder / "eval.log", limit_seconds, ALLOCATOR)
        mrr = read_mrr((folder / "eval.log").read_text(encoding="utf-8"))
    return figures(done, log.read_text(encoding="utf-8"), mrr)


def figures(done: Finished, log: str, mrr: float | None) -> RunFigures:
    """Read its log: seconds of each epoch's buckets, and when what happened."""
    epochs: list[list[tuple[int, float, float]]] = []
    first_start = first_batch = last = 0.0
    for moment, message in timed_lines(log):
        last = moment
        if _STARTING.search(message):
            epochs.append([])
            first_start = first_start or moment
        # A line for each bucket, written at its end: the start is the seconds before.
        elif processed := _PROCESSED.search(message):
            edges, seconds = int(processed.group(1)), float(processed.group(2))
            # Its log has no processor time; samples of the watcher are interpolated.
            used = done.processor_seconds_between(moment - seconds, moment)
            epochs[-1].append((edges, seconds, used))
            first_batch = first_batch or moment - seconds
    return RunFigures(
        epochs=[Epoch(*(sum(column) for column in zip(*buckets))) for buckets in epochs],
        wall_seconds=last - first_start,
        first_batch_seconds=first_batch - done.started_at,
        peak_bytes=done.peak_bytes,
        processor_seconds=done.processor_seconds,
        job_seconds=done.seconds,
        mrr=mrr,
    )


def loading_seconds(log: str) -> list[float]:
    """Return the seconds in which it loaded and wrote the partitions of the buckets, for each epoch."""
    epochs: list[float] = []
    for _, message in timed_lines(log):
        if _STARTING.search(message):
            epochs.append(0.0)
        elif loaded := _LOADED.search(message):
            epochs[-1] += float(loaded.group(1))
    return epochs


def seconds_for_share(log: str, num_edges: int) -> float:
    """Return the seconds for so many edges at the speed of the last epoch, waits between buckets included."""
    start = end = edges = 0.0
    for moment, message in timed_lines(log):
        if _STARTING.search(message):
            start, edges = moment, 0
        elif processed := _PROCESSED.search(message):
            end, edges = moment, edges + int(processed.group(1))
    return num_edges / edges * (end - start)


def timed_lines(log: str) -> list[tuple[float, str]]:
    """Return the log's lines with a time, as (seconds since the epoch, message)."""
    lines = []
    for line in log.splitlines():
        if match := _LINE.match(line):
            moment = datetime.datetime.strptime(match.group(1), "%Y-%m-%d %H:%M:%S,%f")
            lines.append((moment.timestamp(), match.group(2)))
    return lines


def read_mrr(log: str) -> float:
    """Return the MRR that its evaluation logs last."""
    return [float(match.group(1)) for _, message in timed_lines(log) if (match := _MRR.match(message))][-1]
