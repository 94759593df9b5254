"""One training of ``dglkge tune``, as a process: trains a configuration and ranks its split."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from dglkge.cli.common import run_command
from dglkge.config import load_config
from dglkge.training.build import build_trainer
from dglkge.training.epochs import remaining_epochs_until
from dglkge.training.join import join_cluster


def main(argv: Sequence[str] | None = None) -> int:
    """Train; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True)
    arguments = parser.parse_args(argv)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("dglkge").setLevel(logging.INFO)
    return run_command("dglkge tune", lambda: _train(arguments.config))


def _train(path: str) -> int:
    config = load_config(path)
    with join_cluster(config) as cluster:
        trainer = build_trainer(config, cluster)
        for _epoch in remaining_epochs_until(config.training.num_epochs):
            for batch in trainer.batches():
                trainer.step(batch)
        if config.evaluation.split != "none":
            trainer.evaluate(config.evaluation.split)
    return 0


if __name__ == "__main__":
    sys.exit(main())
