"""A training script in which gradients of one trainer are not finite; every trainer writes what came of it.

In batch 1 a gradient of the module overflows on the last trainer, in batch 3 one of a row on the first. The
file ``FOLDER/RANK.json`` has for each batch: whether rows and dense parameters are as before, and the scale.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

import dglkge
from dglkge.training.trainer import Trainer


def everything(trainer: Trainer) -> list[torch.Tensor]:
    """Return copies of this machine's rows, and of the dense parameters and their optimizer's state."""
    state = trainer._job.dense.state_dict().items()
    dense = [values for path, values in state if "/loss_scale/" not in path]
    return [*(table.local_rows.clone() for table in trainer.tables.values()), *dense]


def main() -> None:
    """Train with the overrides of the command line."""
    folder = Path(sys.argv[1])
    config = dglkge.load_config(None, sys.argv[3::2])
    with dglkge.join_cluster(config) as cluster:
        trainer = dglkge.build_trainer(config, cluster)
        world, step = cluster.world, trainer._train_step
        is_last, is_first = world.rank == world.world_size - 1, world.rank == 0
        compute, noted = step.objective.gradients, []

        def injected(plan: Any, rows: Any) -> Any:
            finish = compute(plan, rows)

            def spoilt() -> Any:
                result, index = finish(), plan.number % (1 << 32)
                if index == 1 and is_last:
                    next(iter(trainer._job.dense._parameters.values())).grad.view(-1)[-1] = float("inf")
                if index == 3 and is_first:
                    gradients = next(table.rows for table in rows.collect() if len(table.ids))
                    gradients[0, 0] = float("nan")
                return result

            return spoilt

        step.objective.gradients = injected
        for _ in dglkge.remaining_epochs_until(config.training.num_epochs):
            for batch in trainer.batches():
                cluster.barrier()
                before = everything(trainer)
                cluster.barrier()
                trainer.step(batch)
                cluster.barrier()
                after = everything(trainer)
                same = len(before) == len(after) and all(map(torch.equal, before, after))
                noted.append([batch.index, same, trainer._job.dense.loss_scale.scale])
        (folder / f"{world.rank}.json").write_text(json.dumps(noted))


if __name__ == "__main__":
    main()
