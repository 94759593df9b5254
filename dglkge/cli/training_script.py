"""The training script of ``dglkge train`` and :func:`dglkge.train`; ``examples/train.py`` is the one to copy.

dglkge-launch --ip_config ip_config.txt -m dglkge.cli.training_script --config CONFIG.yaml
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from dglkge.cli.common import run_command
from dglkge.config import load_config
from dglkge.evaluation.metrics import format_table
from dglkge.training.script import join_cluster, remaining_epochs_until
from dglkge.training.trainer import build_trainer


def main(argv: Sequence[str] | None = None) -> int:
    """Train, evaluate, and print where the results are."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", help="YAML file; what it leaves out has a default")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one field")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="the same without --set")
    parser.add_argument("--import", dest="imports", action="append", default=[], metavar="MODULE",
                        help="a module or .py file of yours that registers components")  # fmt: skip
    arguments = parser.parse_intermixed_args(argv)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("dglkge").setLevel(logging.INFO)
    config = load_config(arguments.config, [*arguments.set, *arguments.overrides], arguments.imports)

    # In a server process this line runs DGL's server loop, and exits when all trainers have finished.
    with join_cluster(config) as cluster:
        trainer = build_trainer(config, cluster)
        for _epoch in remaining_epochs_until(config.training.num_epochs):
            for batch in trainer.batches():  # this trainer's share of each global batch
                trainer.step(batch)  # look up rows, score, backward, exchange gradients, update
        # A collective: every trainer ranks against the rows of its own machine.
        if config.evaluation.split != "none":
            result = trainer.evaluate(config.evaluation.split)
            if cluster.world.rank == 0:
                print(format_table(result))
        if cluster.world.rank == 0:
            print(f"checkpoint, statistics and metrics are in {config.output}")
    return 0


if __name__ == "__main__":
    sys.exit(run_command("dglkge train", main))
