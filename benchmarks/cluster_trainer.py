"""One process of a job of ``cluster.py``: trains some batches and writes what they cost this host.

Started by ``cluster.py`` under ``dglkge-launch``, not by hand. ``--system stock`` trains the same batches
with what DGL and torch have: rows come through ``DistEmbedding`` from DGL's kvstore, torch differentiates the
loss, and DGL's ``SparseAdam`` updates the rows. ``--system stock-merged`` merges equal ids before the pull
and their gradients after it, which DGL does not, and takes the loss and its gradients as we do.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

import dglkge
from dglkge.config import Config
from dglkge.distributed.runtime import Cluster
from dglkge.embeddings.row_lookup import FoundRows, TableIds
from dglkge.embeddings.table_set import TableSet
from dglkge.model.kge_model import build_model
from dglkge.model.losses import build_loss
from dglkge.optim.links import UpdateResult
from dglkge.step.contracts import Computation
from dglkge.step.objectives.scored_losses import AutogradLoss
from dglkge.step.rows import HostStore
from dglkge.training.trainer import Trainer

import dgl  # isort: skip  after dglkge, which lets it load with any torch


@dataclass(frozen=True)
class Cost:
    """Cost of a host so far.

    Attributes
    ----------
    sent_bytes : int
        By its interface ``eth0``.
    cpu_seconds : float
        Of the job's servers and trainers.
    wall_seconds : float
    """

    sent_bytes: int
    cpu_seconds: float
    wall_seconds: float

    @classmethod
    def so_far(cls) -> Cost:
        """Read the counters of the interface and of the processes of this host."""
        interface = Path("/proc/net/dev").read_text(encoding="ascii").partition("eth0:")[2].split()
        seconds = 0.0
        # All processes of the host: the counters of this process would miss the server.
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if "DGL_ROLE" in process.environ():
                    seconds += process_cpu_seconds(process.pid)
        return cls(int(interface[8]), seconds, time.monotonic())

    def since(self, before: Cost) -> Cost:
        """Return what was spent after an earlier moment."""
        return Cost(
            self.sent_bytes - before.sent_bytes,
            self.cpu_seconds - before.cpu_seconds,
            self.wall_seconds - before.wall_seconds,
        )


def process_cpu_seconds(pid: int) -> float:
    """Return the processor time of a process and all of its threads, in seconds.

    Its clock counts nanoseconds; /proc counts ticks of 10 ms, of which a short run may see none.
    """
    clock = (~pid << 3) | 2  # of the process, not of a thread; what clock_getcpuclockid(3) returns
    try:
        return time.clock_gettime(clock)
    except OSError as error:  # EINVAL: no such process
        raise psutil.NoSuchProcess(pid) from error


class StockRows:
    """Stands in for both the lookup of rows and the optimizer, with what DGL has."""

    num_ahead = 0
    sent_bytes = 0
    network_bytes = 0

    def __init__(self, tables: TableSet, lr: float, merges: bool) -> None:
        self._merges = merges
        self._embeddings = {name: table.embedding for name, table in tables.items()}
        self._optimizer = dgl.distributed.optim.SparseAdam(list(self._embeddings.values()), lr=lr)
        self._pulled: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def announce(self, batch: int, table_ids: TableIds) -> None:
        """Do nothing."""

    def before_update(self) -> None:
        """Do nothing."""

    def finish(self) -> None:
        """Do nothing: DGL's step returns when it is done."""

    drain = finish

    def state_tensors(self, embedding: Any) -> dict[str, torch.Tensor]:
        """Return nothing: the commit when the trainer leaves holds rows without DGL's state."""
        return {}

    def rows(self, batch: int, table_ids: TableIds) -> dict[str, FoundRows]:
        """Pull the rows of each table's ids, or of the distinct ones."""
        tables = {}
        for name, ids in table_ids.items():
            pulled, source = ids, torch.arange(len(ids))
            if self._merges:
                pulled, source = torch.unique(ids, return_inverse=True)
            rows = self._embeddings[name](pulled)  # notes ids and rows for the optimizer
            self._pulled[id(self._embeddings[name])] = (rows, source)
            tables[name] = FoundRows.in_array(rows.detach().numpy(), source.numpy())
        return tables

    def step_rows(
        self,
        updates: Sequence[tuple[Any, torch.Tensor, torch.Tensor]],
        extra: int,
        other_squares: float,
        number: int,
    ) -> UpdateResult:
        """Give each table's rows their gradients and let DGL update them."""
        # DGL's optimizer reads the gradient of the tensor that the embedding returned.
        for embedding, _, gradients in updates:
            rows, source = self._pulled[id(embedding)]
            rows.grad = (
                torch.zeros_like(rows).index_add_(0, source, gradients) if self._merges else gradients.clone()
            )
        self._optimizer.zero_grad()  # forgets, at the end of the next step, what that step has used
        self._optimizer.step()
        return UpdateResult(extra)


def use_stock_rows(trainer: Any, config: Config, merges: bool) -> None:
    """Replace the lookup and the optimizer of a trainer."""
    stock = StockRows(trainer.tables, config.optimizer.lr, merges)
    trainer.tables.lookup = stock
    # Both places, as the trainer and its step each hold a reference.
    trainer.optimizer = trainer._train_step.updates.optimizer = stock


def use_autograd(trainer: Any, config: Config) -> None:
    """Let torch differentiate the loss of a trainer, without a regularizer."""
    model_settings = config.model
    model = build_model(
        model_settings.score_function.name, model_settings.dimension, model_settings.reciprocal_relations
    )
    loss = build_loss(config.loss.name)
    step = trainer._train_step
    # The planner of the trainer's own objective draws the negatives.
    planner = step.objective.planner
    objective = AutogradLoss(planner, model, loss, None, config.negatives.scores_own, Computation())
    step.objective = step.look_ahead.objective = objective
    step.store = step.look_ahead.store = HostStore(trainer.tables, step.transforms, reads_in_place=False)


def measure(cluster: Cluster, trainer: Trainer, num_warm: int, num_batches: int) -> Cost:
    """Train some batches and return the cost of all but the first ones on this host."""
    before = Cost.so_far()
    for _ in dglkge.remaining_epochs_until(1_000):
        for batch in trainer.batches():
            trainer.step(batch)
            num_warm -= 1
            if num_warm == 0:
                # A barrier on both sides of the reading: no host may start or go on with a batch meanwhile.
                trainer.optimizer.finish()
                cluster.barrier()
                before = Cost.so_far()
                cluster.barrier()
            if num_warm == -num_batches:
                trainer.optimizer.finish()
                cluster.barrier()
                cost = Cost.so_far().since(before)
                cluster.barrier()
                return cost
    raise RuntimeError("the data set has too few triples")


def main() -> int:
    """Train and write this host's cost."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--system", choices=("ours", "stock", "stock-merged"), required=True)
    parser.add_argument("--warm", type=int, required=True)
    parser.add_argument("--batches", type=int, required=True)
    parser.add_argument("--result", type=Path, required=True, help="folder for the costs")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    arguments = parser.parse_args()
    config = dglkge.load_config(None, arguments.set)
    with dglkge.join_cluster(config) as cluster:
        trainer = dglkge.build_trainer(config, cluster)
        if arguments.system != "ours":
            use_stock_rows(trainer, config, merges=arguments.system == "stock-merged")
        if arguments.system == "stock":
            use_autograd(trainer, config)
        cost = measure(cluster, trainer, arguments.warm, arguments.batches)
        if cluster.world.is_machine_leader:
            path = arguments.result / f"cost-{cluster.world.machine}.json"
            path.write_text(json.dumps(asdict(cost)), encoding="ascii")
    return 0


if __name__ == "__main__":
    sys.exit(dglkge.run_command("cluster_trainer.py", main))
