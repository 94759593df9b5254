"""A training script as users write it, that also tells which triples it trained and stops where told to.

A file ``FOLDER/hold``, ``EPOCH INDEX RANK MODE``, is an order for a trainer in a batch. With MODE ``signal``
it sends SIGTERM to itself; else it waits and says so in a file ``held``: with ``stop`` until it was asked to
stop, with ``kill`` until it is ended. ``--signal-in-evaluation`` makes the last trainer send SIGINT to itself
there. The folder is that of the run's folder. The script has an object of its own in the checkpoint.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import time
from pathlib import Path

import torch

import dglkge
from dglkge.evaluation import evaluator as ranking_evaluator

HOLD_SECONDS = 100


class Averages:
    """An object of the script's own, which changes with every batch in a way that depends on the order."""

    def __init__(self) -> None:
        self.total = torch.zeros(2, dtype=torch.float64)

    def add(self, epoch: int, index: int) -> None:
        """Count a batch."""
        self.total = self.total * 0.9 + torch.tensor([epoch + 1.0, index + 1.0], dtype=torch.float64)

    def state_dict(self) -> dict:
        """Return the state."""
        return {"total": self.total}

    def load_state_dict(self, state: dict) -> None:
        """Take over a state."""
        self.total = state["total"]


def obey(folder: Path, cluster, epoch: int, index: int) -> None:
    """Do what the file says."""
    order, held = folder / "hold", folder / "held"
    if held.exists() or not order.exists():
        return
    *place, mode = order.read_text().split()
    if place != [str(epoch), str(index), str(cluster.world.rank)]:
        return
    if mode == "signal":
        os.kill(os.getpid(), signal.SIGTERM)
        return
    held.touch()
    limit = time.monotonic() + HOLD_SECONDS
    while not (mode == "stop" and cluster.stop.is_noted):
        if time.monotonic() > limit:
            raise TimeoutError("the wait was not ended")
        time.sleep(0.02)


def signal_in_evaluation() -> None:
    """Send SIGINT to this process while its second batch of queries is scored."""
    ask, calls = ranking_evaluator.score_queries, []

    def score_queries(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return ask(*arguments)

    ranking_evaluator.score_queries = score_queries


def committed(output: str) -> list[int]:
    """Return the epochs and batches of the newest commit."""
    if not (Path(output) / "checkpoint" / "checkpoint_version.txt").exists():
        return [0, 0]
    progress = dglkge.open_checkpoint(output).meta.progress
    return [progress["finished_epochs"], progress["batches_done"]]


def main() -> int:
    """Train and evaluate."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--signal-in-evaluation", action="store_true")
    parser.add_argument("--set", action="append", default=[])
    arguments = parser.parse_args()
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    config = dglkge.load_config(None, arguments.set)
    with dglkge.join_cluster(config) as cluster:
        start = committed(config.output)
        trainer = dglkge.build_trainer(config, cluster)
        averages = Averages()
        trainer.register("averages", averages)
        world = cluster.world
        log = (
            Path(os.environ.get("DGLKGE_LOG_DIR", config.output))
            / f"trained-{world.machine}-{world.rank}.jsonl"
        )
        with log.open("a", buffering=1) as lines:
            lines.write(json.dumps(start) + "\n")
            for epoch in dglkge.remaining_epochs_until(config.training.num_epochs):
                for batch in trainer.batches():
                    obey(Path(config.output).parent, cluster, epoch, batch.index)
                    trainer.step(batch)
                    averages.add(epoch, batch.index)
                    ids = batch.triple_ids.tolist()
                    lines.write(json.dumps([epoch, batch.index, batch.global_size, ids]) + "\n")
        if arguments.signal_in_evaluation and world.rank == world.world_size - 1:
            signal_in_evaluation()
        if config.evaluation.split != "none":
            trainer.evaluate(config.evaluation.split)
    return 0


if __name__ == "__main__":
    sys.exit(dglkge.run_command("elastic_train.py", main))
