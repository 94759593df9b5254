"""PyKEEN on the same data and settings (Ali et al. 2021): its sampled training loop, in one process."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from dglkge.config import Config
from dglkge.errors import InputError
from measuring.processes import Finished, run_watched
from measuring.run_figures import Epoch, RunFigures

MODELS = {"complex": "ComplEx", "distmult": "DistMult", "transe_l2": "TransE", "rotate": "RotatE"}
MAX_TRIPLES = 20_000
"""An epoch of so many triples shows its speed; it scores every pair of positive and negative by itself."""


def describe(config: Config, folder: Path, num_threads: int) -> dict[str, Any]:
    """Return the settings of ``pykeen_train.py``.

    Raises
    ------
    InputError
        For a model that PyKEEN lacks, or another loss than softmax.
    """
    score, loss = config.model.score_function.name, config.loss.name
    if score not in MODELS or loss != "softmax":
        raise InputError(
            f"PyKEEN is run with softmax and one of {', '.join(MODELS)}; got {score} with {loss}"
        )
    is_complex = score in ("complex", "rotate")
    return {
        "triples": str(Path(config.dataset).resolve() / "train.npy"),
        "model": MODELS[score],
        "dimension": config.model.dimension // 2 if is_complex else config.model.dimension,
        "num_negatives": max(config.negatives.per_side.values()),
        "batch_size": config.training.batch_size,
        "num_epochs": config.training.num_epochs,
        "lr": config.optimizer.lr,
        "seed": config.seed,
        "num_threads": num_threads,
        "max_triples": MAX_TRIPLES,
        "timings": str(folder / "timings.json"),
    }


def train(python: Path, config: Config, folder: Path, limit_seconds: float) -> RunFigures:
    """Run it on the first triples of a dataset of ours, with all cores.

    Raises
    ------
    InputError
        If it cannot run such a configuration.
    RuntimeError
        If it fails.
    """
    folder.mkdir(parents=True)
    path = folder / "settings.json"
    path.write_text(json.dumps(describe(config, folder, len(os.sched_getaffinity(0)))), encoding="utf-8")
    script = Path(__file__).with_name("pykeen_train.py")
    done = run_watched([str(python), str(script), str(path)], folder / "train.log", limit_seconds)
    return figures(done, json.loads((folder / "timings.json").read_text(encoding="utf-8")))


def figures(done: Finished, timings: dict[str, Any]) -> RunFigures:
    """Combine the run's cost and its timings."""
    return RunFigures(
        epochs=[Epoch(**epoch) for epoch in timings["epochs"]],
        wall_seconds=sum(epoch["seconds"] for epoch in timings["epochs"]),
        first_batch_seconds=timings["training"] - done.started_at,
        peak_bytes=done.peak_bytes,
        processor_seconds=done.processor_seconds,
        job_seconds=done.seconds,
    )
