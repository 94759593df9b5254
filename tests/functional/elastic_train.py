"""A training script as users write it, that also tells which triples it trained and stops where told to.

A file ``FOLDER/hold``, ``EPOCH INDEX RANK MODE``, is an order for a trainer in a batch. With MODE ``signal``
it sends SIGTERM to itself; else it waits and says so in a file ``held``: with ``stop`` until it was asked to
stop, with ``kill`` until it is ended, with ``go`` for a file ``go``. The folder is that of the run's folder.

``--signal-in-evaluation``: the last trainer sends SIGINT to itself there. ``--ending`` is one of ``fail``
(raises after the last batch), ``break`` (leaves the second epoch after two batches; both while the last
version is written to a slow disk), ``full`` (the first attempt finds the disk full) and ``late`` (rank 1
interrupts itself while it waits in DGL's shutdown for the others).
"""

from __future__ import annotations

import argparse
import atexit
import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

import dglkge
from dglkge.checkpoint import part_files
from dglkge.evaluation import evaluator as ranking_evaluator
from dglkge.training import cadence

HOLD_SECONDS = 100
SLOW_SECONDS = 0.5
"""Two files of rows: the launcher leaves three seconds to those who are left when a trainer has failed."""


class Averages:
    """An object of the script's own, which changes with every batch in a way that depends on the order."""

    def __init__(self) -> None:
        self.total = torch.zeros(2, dtype=torch.float64)

    def add(self, epoch: int, index: int) -> None:
        self.total = self.total * 0.9 + torch.tensor([epoch + 1.0, index + 1.0], dtype=torch.float64)

    def state_dict(self) -> dict:
        return {"total": self.total}

    def load_state_dict(self, state: dict) -> None:
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
    ends = {"stop": lambda: cluster.stop.is_noted, "kill": lambda: False, "go": (folder / "go").exists}
    wait_until(ends[mode])


def wait_until(is_true) -> None:
    limit = time.monotonic() + HOLD_SECONDS
    while not is_true():
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


def change_disk(is_full: bool) -> None:
    """Let each file of rows take its time, or find no room."""
    fill_rows = part_files.fill_rows

    def changed(*arguments):
        if is_full:
            raise OSError(28, "No space left on device")
        time.sleep(SLOW_SECONDS)
        return fill_rows(*arguments)

    part_files.fill_rows = changed


def leave_late(folder: Path) -> None:
    """Rank 1 gets SIGINT once it waits in DGL's shutdown, which the others begin after that."""
    if os.environ.get("RANK") == "1":
        words = f"sleep 2; kill -INT {os.getpid()}; sleep 1; touch {folder}/go"
        atexit.register(subprocess.Popen, ["sh", "-c", words])
    else:
        wait_until((folder / "go").exists)


def committed(output: str) -> list[int]:
    """Return the epochs and batches of the newest commit."""
    try:
        progress = dglkge.open_checkpoint(output).meta.progress
    except dglkge.InputError:  # there is none yet
        return [0, 0]
    return [progress["finished_epochs"], progress["batches_done"]]


def main(arguments: argparse.Namespace, config) -> int:
    ending = arguments.ending
    cadence.TRIPLES_A_REPORT = 1  # the losses of every batch
    with dglkge.join_cluster(config) as cluster:
        start = committed(config.output)
        trainer = dglkge.build_trainer(config, cluster)
        averages, world = Averages(), cluster.world
        trainer.register("averages", averages)
        folder = Path(os.environ.get("DGLKGE_LOG_DIR", config.output))
        if ending in ("fail", "break") or (ending == "full" and folder.name == "attempt-1"):
            change_disk(ending == "full")
        with open(folder / f"trained-{world.machine}-{world.rank}.jsonl", "a", buffering=1) as lines:
            lines.write(json.dumps(start) + "\n")
            for epoch in dglkge.remaining_epochs_until(config.training.num_epochs):
                for batch in trainer.batches():
                    obey(Path(config.output).parent, cluster, epoch, batch.index)
                    trainer.step(batch)
                    averages.add(epoch, batch.index)
                    ids = batch.triple_ids.tolist()
                    lines.write(json.dumps([epoch, batch.index, batch.global_size, ids]) + "\n")
                    if (ending, epoch, batch.index) == ("break", 1, 1):
                        break
                if (ending, epoch) == ("break", 1):
                    break
        if ending == "fail":
            raise ValueError("a mistake of the script's own")
        if arguments.signal_in_evaluation and world.rank == world.world_size - 1:
            signal_in_evaluation()
        if config.evaluation.split != "none":
            trainer.evaluate(config.evaluation.split)
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--signal-in-evaluation", action="store_true")
    parser.add_argument("--ending", choices=("fail", "break", "full", "late"))
    parser.add_argument("--set", action="append", default=[])
    arguments = parser.parse_args()
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    config = dglkge.load_config(None, arguments.set)
    status = dglkge.run_command("elastic_train.py", lambda: main(arguments, config))
    if arguments.ending == "late":
        leave_late(Path(config.output).parent)
    sys.exit(status)
