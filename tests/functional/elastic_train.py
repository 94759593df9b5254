"""A training script as users write it, that also tells which triples it trained and waits where told to.

A file ``FOLDER/hold``, ``EPOCH INDEX RANK MODE``, makes that trainer wait in that batch, and say so in a file
``held``: with MODE ``stop`` until it was asked to stop, with ``kill`` until it is ended.
``--signal-in-evaluation`` makes the last trainer send SIGINT to itself there.
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

import dglkge
from dglkge.evaluation import evaluator as ranking_evaluator

HOLD_SECONDS = 100


def hold(folder: Path, cluster, epoch: int, index: int) -> None:
    """Wait where the file says."""
    order, held = folder / "hold", folder / "held"
    if held.exists() or not order.exists():
        return
    *place, mode = order.read_text().split()
    if place != [str(epoch), str(index), str(cluster.world.rank)]:
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
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--signal-in-evaluation", action="store_true")
    parser.add_argument("--set", action="append", default=[])
    arguments = parser.parse_args()
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    config = dglkge.load_config(None, arguments.set)
    with dglkge.join_cluster(config) as cluster:
        start = committed(config.output)
        trainer = dglkge.build_trainer(config, cluster)
        world = cluster.world
        log = Path(os.environ.get("DGLKGE_LOG_DIR", config.output)) / f"trained-{world.rank}.jsonl"
        with log.open("w", buffering=1) as lines:
            lines.write(json.dumps(start) + "\n")
            for epoch in dglkge.remaining_epochs_until(config.training.num_epochs):
                for batch in trainer.batches():
                    hold(arguments.folder, cluster, epoch, batch.index)
                    trainer.step(batch)
                    lines.write(json.dumps([epoch, batch.index, batch.triple_ids.tolist()]) + "\n")
        if arguments.signal_in_evaluation and world.rank == world.world_size - 1:
            signal_in_evaluation()
        if config.evaluation.split != "none":
            trainer.evaluate(config.evaluation.split)
    return 0


if __name__ == "__main__":
    sys.exit(dglkge.run_command("elastic_train.py", main))
