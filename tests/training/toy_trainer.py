"""A trainer with real epochs, order, checkpoints and cluster of one, whose tables and steps are toys."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dglkge.checkpoint.manager import CheckpointManager, TrainerGroup
from dglkge.checkpoint.mirror import Mirror
from dglkge.config import load_config
from dglkge.data.partition_layout import EdgeTable
from dglkge.distributed.preemption import Preempted
from dglkge.distributed.runtime import Cluster
from dglkge.distributed.world import World
from dglkge.sampling.edge_batches import EdgeBatch, EdgeBatches, EdgeOptions
from dglkge.sampling.triple_order import plan_passes
from dglkge.step.contracts import BatchMeasures, Computation, StepResult
from dglkge.training.job import Job
from dglkge.training.script import ElasticEpochs
from dglkge.training.statistics.passes import Passes
from dglkge.training.trainer import Trainer
from dglkge.typing import Side, TablePart
from tests.checkpoint.toy_checkpoint import toy_meta

NUM_TRIPLES, BATCH_SIZE, NUM_BATCHES = 23, 5, 5
NUM_QUERY_BATCHES = 4
EVERY_BATCH = ("checkpoint.every_batches=1", "checkpoint.background=false")


class ToyTable:
    """A table whose every number says how many triples were trained."""

    def __init__(self, name: str, num_rows: int) -> None:
        self.name, self.embedding = name, name
        self.rows = torch.zeros(num_rows, 6 if name == "person" else 12)

    def own_part(self, state: dict[str, torch.Tensor]) -> TablePart:
        return TablePart(self.name, 0, torch.arange(len(self.rows)), self.rows, state)

    whole = own_part


class ToyTables(dict):
    entity_types = ("person",)
    lookup = SimpleNamespace(sent_bytes=0)


class ToyEvaluator:
    """Asks a few batches of queries, ``before`` each of which it calls; ``mrr`` yields the results."""

    def __init__(self, mrr: Iterator[float]) -> None:
        self.mrr, self.ranked = mrr, []
        self.before: Callable[[int], None] = lambda number: None

    def evaluate(self, split, bar, between):
        for number in range(NUM_QUERY_BATCHES):
            self.before(number)
            between()
        self.ranked.append(split)
        figures = {"mrr": next(self.mrr) if split == "valid" else 0.0}
        return SimpleNamespace(to_dict=dict, figures=lambda: figures, both=SimpleNamespace(**figures))


class ToyRun:
    """One life of a run in a folder, and the triples that it has ``trained``; their loss is their batch.

    With ``has_measures`` a triple's penalty is twice its batch's number, and it has 3 violators for its tail.
    """

    def __init__(
        self,
        folder: Path,
        *settings: str,
        own_config: bool = False,
        lrs: Sequence[float] = (),
        mirror: Mirror | None = None,
        held_out: Any = None,
        has_measures: bool = False,
        mrr: Sequence[float] | None = None,
    ) -> None:
        folder.mkdir(exist_ok=True)
        sets = ["training.progress=never", "dataset=toy", f"output={folder}"]
        sets += [f"training.batch_size={BATCH_SIZE}", *settings, f"training.batch_statistics={has_measures}"]
        config = load_config(None, sets)
        self.has_measures = has_measures
        self.evaluator = ToyEvaluator(itertools.repeat(0.5) if mrr is None else iter(mrr))
        self.epochs, self.cluster = ElasticEpochs(), Cluster(World(), None)
        self.trained: list[tuple[int, list[int]]] = []
        self.param_groups = [{"lr": lr} for lr in lrs]
        self.lrs_of_batches: list[list[float]] = []
        self.tables: Any = ToyTables(person=ToyTable("person", 23), relation=ToyTable("relation", 2))
        optimizer = SimpleNamespace(
            state_tensors=lambda name: {"sum": self.tables[name].rows + 0.5},
            param_groups=self.param_groups,
            drain=lambda: None,
        )
        ids = np.arange(NUM_TRIPLES)
        edges = EdgeTable(ids, np.stack([ids, ids % 2, ids], axis=1), None)
        sizes = (NUM_TRIPLES, BATCH_SIZE, BATCH_SIZE)
        order = EdgeBatches(edges, EdgeOptions(np.zeros(2, np.int64), *sizes, 0, 1, seed=1))
        group = TrainerGroup(barrier=self.cluster.barrier)
        self.checkpoints = CheckpointManager(folder / "checkpoint", group, num_parts=1, mirror=mirror)
        absent: Any = None
        job = Job(config, self.cluster, absent, absent, absent, absent, Computation(), self.tables, optimizer)
        progress = {"finished_epochs": 0, "batches_done": 0, "global_batch_size": BATCH_SIZE}
        meta = toy_meta(progress=progress, **({"config": config.to_dict()} if own_config else {}))
        passes = Passes(plan_passes([(0, NUM_TRIPLES)], config.training.edge_chunks, BATCH_SIZE), held_out)
        self.look_ahead = order
        self.trainer = Trainer(job, self, self.evaluator, self.checkpoints, meta, self.epochs, passes)

    def __call__(self, batch: EdgeBatch, flags: int = 0) -> StepResult:
        self.trained.append((batch.epoch, batch.triple_ids.tolist()))
        self.lrs_of_batches.append([group["lr"] for group in self.param_groups])
        for table in self.tables.values():
            table.rows += len(batch)
        measures = BatchMeasures(self.has_measures)
        if self.has_measures:
            measures.add_penalty(2.0 * batch.index * len(batch))
            measures.add_violators(Side.TAIL, 3 * len(batch))
        flag_sum: Any = None  # the toy step sums no flags: trainers exchange them themselves
        return StepResult(float(batch.index * len(batch)), measures.sums, 0, False, flag_sum)

    def train(self, until: int, after: Mapping[tuple[int, int], Callable[[], Any]] | None = None) -> None:
        """Run the usual loops; ``after`` has what is called after the step of an epoch's batch."""
        for epoch in self.epochs.remaining_until(until):
            for batch in self.trainer.batches():
                self.trainer.step(batch)
                if (epoch, batch.index) in (after or {}):
                    after[epoch, batch.index]()

    def finish(self, until: int, after: Mapping[tuple[int, int], Callable[[], Any]] | None = None) -> ToyRun:
        self.train(until, after)
        self.cluster.leave()
        return self

    def stop(self, epoch: int, index: int, number: int = signal.SIGTERM, until: int = 3) -> int:
        """Train until a signal comes in a batch; return the status with which the trainer exits."""
        with self.cluster.stop.listening(), pytest.raises(Preempted) as caught:
            self.train(until, {(epoch, index): lambda: signal.raise_signal(number)})
        return caught.value.code

    def leave_by_break(self, epoch: int, index: int) -> None:
        """Train until a batch, and leave both loops after its step by break."""
        for current in self.epochs.remaining_until(9):
            for batch in self.trainer.batches():
                self.trainer.step(batch)
                if (current, batch.index) == (epoch, index):
                    break
            if current == epoch:
                break

    def break_off(self, num_batches: int) -> None:
        """Train some batches of an epoch, and leave it open as a killed job does."""
        # Kept: the epoch counts as finished when its loop is collected.
        self._open_loop = self.epochs.remaining_until(9)
        next(self._open_loop)
        for batch in self.trainer.batches():
            if batch.index == num_batches:
                break
            self.trainer.step(batch)

    @property
    def num_trained(self) -> int:
        return int(self.tables["person"].rows[0, 0])

    def committed(self) -> tuple[int, int] | None:
        """Return epochs and batches of the newest version, once what is being written counts."""
        self.checkpoints.finish()
        meta = self.checkpoints.latest()
        return None if meta is None else (meta.progress["finished_epochs"], meta.progress["batches_done"])
