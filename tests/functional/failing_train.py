"""A training script with an ending of its own, while its last version is written to a slow disk.

``fail`` raises an exception after the last batch, ``break`` leaves the second epoch after two batches.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

import dglkge
from dglkge.checkpoint import part_files as row_stream

SLOW_SECONDS = 0.5
"""Two files of rows: the launcher leaves three seconds to those who are left when a trainer has failed."""


def slow_disk() -> None:
    """Let each file of rows take its time."""
    fill_rows = row_stream.fill_rows

    def wait_and_fill(*arguments: Any) -> int:
        time.sleep(SLOW_SECONDS)
        return fill_rows(*arguments)

    row_stream.fill_rows = wait_and_fill


def main() -> int:
    """Train with the overrides of the command line, and end as its first word says."""
    ending, *words = sys.argv[1:]
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    config = dglkge.load_config(None, words[1::2])
    with dglkge.join_cluster(config) as cluster:
        trainer = dglkge.build_trainer(config, cluster)
        slow_disk()
        for epoch in dglkge.remaining_epochs_until(config.training.num_epochs):
            for batch in trainer.batches():
                trainer.step(batch)
                if (ending, epoch, batch.index) == ("break", 1, 1):
                    break
            if (ending, epoch) == ("break", 1):
                break
        if ending == "fail":
            raise ValueError("a mistake of the script's own")
    return 0


if __name__ == "__main__":
    sys.exit(dglkge.run_command("failing_train.py", main))
