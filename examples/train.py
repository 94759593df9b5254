"""Train knowledge-graph embeddings: copy this file and make it yours.

    dglkge-launch --ip_config ip_config.txt examples/train.py --config examples/fb15k237/complex.yaml
    python examples/train.py --config examples/fb15k237/complex.yaml --set model.dimension=100

The first trains on the servers and trainers of every machine in ip_config.txt, the second in this one
process. Started again, either goes on from its last commit.
"""

from __future__ import annotations

import argparse
import logging
import sys

import dglkge


def main() -> int:
    """Train, evaluate, and say where everything lies."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", help="YAML file; what it leaves out has a default")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one field")
    parser.add_argument("--import", dest="imports", action="append", default=[], metavar="MODULE",
                        help="a module or .py file of yours that registers components")  # fmt: skip
    arguments = parser.parse_args()
    logging.basicConfig(format="%(message)s")
    logging.getLogger("dglkge").setLevel(logging.INFO)
    config = dglkge.load_config(arguments.config, arguments.set, arguments.imports)

    # Server processes stay inside this line until all trainers have left.
    with dglkge.join_cluster(config) as cluster:
        trainer = dglkge.build_trainer(config, cluster)
        for _epoch in dglkge.remaining_epochs_until(config.training.num_epochs):
            for batch in trainer.batches():  # this trainer's share of each global batch
                trainer.step(batch)  # pull rows, score, backward, exchange gradients, update
        if config.evaluation.split != "none":
            result = trainer.evaluate(config.evaluation.split)
            if cluster.world.rank == 0:
                print(dglkge.format_table(result))
        if cluster.world.rank == 0:
            print(f"checkpoint, statistics and metrics are in {config.output}")
    return 0


if __name__ == "__main__":
    sys.exit(dglkge.run_command("train.py", main))
