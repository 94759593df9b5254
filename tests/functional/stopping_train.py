"""A training loop that writes which triples each trainer trained, and stops where a file says.

The file ``stop`` beside the run's folder, ``EPOCH INDEX``, makes rank 0 send SIGTERM to itself in that batch.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import dglkge


def main() -> int:
    """Train."""
    config = dglkge.load_config(None, sys.argv[2::2])
    folder = Path(config.output).parent
    stop = folder / "stop"
    place = stop.read_text().split() if stop.exists() else []
    with dglkge.join_cluster(config) as cluster:
        trainer = dglkge.build_trainer(config, cluster)
        world = cluster.world
        log = folder / f"trained-{len(place)}-{world.machine}-{world.rank}.jsonl"
        with log.open("w", buffering=1) as lines:
            for epoch in dglkge.remaining_epochs_until(config.training.num_epochs):
                for batch in trainer.batches():
                    if world.rank == 0 and place == [str(epoch), str(batch.index)]:
                        os.kill(os.getpid(), signal.SIGTERM)
                    trainer.step(batch)
                    ids = batch.triple_ids.tolist()
                    lines.write(json.dumps([epoch, batch.index, batch.global_size, ids]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(dglkge.run_command("stopping_train.py", main))
