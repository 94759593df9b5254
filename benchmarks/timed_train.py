"""The training script with a clock: examples/train.py that writes the times of its milestones.

    dglkge-launch benchmarks/timed_train.py --config my.yaml --timings timings.json

Rank 0 writes milestones in seconds since the epoch, and for every epoch its edges, seconds and the
processor seconds of all trainers. The other benchmarks start it; see training.py.
"""

from __future__ import annotations

import time

_STARTED_AT = time.time()  # before anything heavy is imported

import argparse  # noqa: E402
import json  # noqa: E402
import logging  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import numpy as np  # noqa: E402

import dglkge  # noqa: E402


def train_epoch(trainer: Any, cluster: Any, max_batches: int, marks: dict[str, float]) -> dict[str, float]:
    """Train an epoch, or its first batches; returns its figures over all trainers."""
    clock, processor, edges = time.perf_counter(), time.process_time(), 0
    for number, batch in enumerate(trainer.batches(), start=1):
        trainer.step(batch)
        marks.setdefault("first_batch", time.time())
        edges += len(batch)
        if number == max_batches:
            break
    # The epoch ends when the slowest trainer has ended it.
    cluster.barrier()
    seconds, ended_at = time.perf_counter() - clock, time.time()
    total = cluster.sum(np.array([edges, time.process_time() - processor]))
    return {
        "edges": int(total[0]),
        "seconds": seconds,
        "processor_seconds": float(total[1]),
        "ended_at": ended_at,
    }


def main() -> int:
    """Train by the configuration; rank 0 writes the timings."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", help="YAML file; what it leaves out has a default")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one field")
    parser.add_argument("--timings", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--max-batches", type=int, default=0, help="leave each epoch after so many; 0: none")
    parser.add_argument(
        "--max-epochs", type=int, default=0, help="end after so many, with no last commit; 0: none"
    )
    arguments = parser.parse_args()
    logging.basicConfig(format="%(message)s")
    logging.getLogger("dglkge").setLevel(logging.INFO)
    config = dglkge.load_config(arguments.config, arguments.set)
    marks = {"script": _STARTED_AT, "imported": time.time()}

    with dglkge.join_cluster(config) as cluster:
        marks["joined"] = time.time()
        trainer = dglkge.build_trainer(config, cluster)
        marks["built"] = time.time()
        epochs = []
        num_epochs = arguments.max_epochs or config.training.num_epochs
        for _epoch in dglkge.remaining_epochs_until(num_epochs):
            marks.setdefault("training", time.time())
            epochs.append(train_epoch(trainer, cluster, arguments.max_batches, marks))
        # --max-epochs ends before the configuration does, to skip this commit.
        if num_epochs == config.training.num_epochs:
            trainer.commit()
        marks["trained"] = time.time()
        if config.evaluation.split != "none":
            trainer.evaluate(config.evaluation.split)
            marks["evaluated"] = time.time()
        if cluster.world.rank == 0:
            arguments.timings.write_text(json.dumps({"marks": marks, "epochs": epochs}), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(dglkge.run_command("timed_train.py", main))
