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


def spoil_gradients(trainer: Trainer, is_first: bool, is_last: bool) -> None:
    compute = trainer._train_step.objective.gradients

    def gradients(plan: Any, rows: Any) -> Any:
        finish, index = compute(plan, rows), plan.number % (1 << 32)

        def spoilt() -> Any:
            result = finish()
            if index == 1 and is_last:
                next(iter(trainer._job.dense._parameters.values())).grad.view(-1)[-1] = float("inf")
            if index == 3 and is_first:
                next(table.rows for table in rows.collect() if len(table.ids))[0, 0] = float("nan")
            return result

        return spoilt

    trainer._train_step.objective.gradients = gradients


if __name__ == "__main__":
    config, noted = dglkge.load_config(None, sys.argv[3::2]), []
    with dglkge.join_cluster(config) as cluster:
        trainer, rank = dglkge.build_trainer(config, cluster), cluster.world.rank
        spoil_gradients(trainer, rank == 0, rank == cluster.world.world_size - 1)
        for _ in dglkge.remaining_epochs_until(config.training.num_epochs):
            for batch in trainer.batches():
                cluster.barrier()
                before = everything(trainer)
                cluster.barrier()
                trainer.step(batch)
                cluster.barrier()
                same = all(map(torch.equal, before, everything(trainer)))
                noted.append([batch.index, same, trainer._job.dense.loss_scale.scale])
        Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(noted))
