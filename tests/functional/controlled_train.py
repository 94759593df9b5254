"""A training script that registers an object, and stops itself in a batch: ``--stop-at EPOCH INDEX``."""

from __future__ import annotations

import argparse
import os
import signal
import sys

import torch

import dglkge


class Averages:
    """An object of the script's own, which changes with every batch."""

    def __init__(self) -> None:
        self.total = torch.zeros(2, dtype=torch.float64)

    def add(self, epoch: int, index: int) -> None:
        """Change in a way that depends on the order."""
        self.total = self.total * 0.9 + torch.tensor([epoch + 1.0, index + 1.0], dtype=torch.float64)

    def state_dict(self) -> dict:
        """Return the state."""
        return {"total": self.total}

    def load_state_dict(self, state: dict) -> None:
        """Take over a state."""
        self.total = state["total"]


def main() -> int:
    """Train and evaluate."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--stop-at", type=int, nargs=2, default=[-1, -1])
    parser.add_argument("--set", action="append", default=[])
    arguments = parser.parse_args()
    config = dglkge.load_config(None, arguments.set)
    with dglkge.join_cluster(config) as cluster:
        trainer = dglkge.build_trainer(config, cluster)
        averages = Averages()
        trainer.register("averages", averages)
        world = cluster.world
        for epoch in dglkge.remaining_epochs_until(config.training.num_epochs):
            for batch in trainer.batches():
                if [epoch, batch.index] == arguments.stop_at and world.rank == world.world_size - 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                trainer.step(batch)
                averages.add(epoch, batch.index)
        trainer.evaluate("test")
    return 0


if __name__ == "__main__":
    sys.exit(dglkge.run_command("controlled_train.py", main))
