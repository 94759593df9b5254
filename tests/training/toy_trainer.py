"""A trainer with real epochs, order, checkpoints and cluster of one, whose tables and steps are toys."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from dglkge.checkpoint import CheckpointManager, TrainerGroup
from dglkge.checkpoint.mirror import Mirror
from dglkge.config import load_config
from dglkge.data.partition_layout import EdgeTable
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


class ToyTable:
    """A table whose every number says how many triples were trained."""

    def __init__(self, name: str, num_rows: int) -> None:
        self.name, self.embedding = name, name
        self.rows = torch.zeros(num_rows, 6 if name == "person" else 12)

    def own_part(self, state: dict[str, torch.Tensor]) -> TablePart:
        """Return all rows."""
        return TablePart(self.name, 0, torch.arange(len(self.rows)), self.rows, state)

    whole = own_part


class ToyTables(dict):
    """The tables of the toy run."""

    entity_types = ("person",)
    lookup = SimpleNamespace(sent_bytes=0)


class ToyEvaluator:
    """Asks a few batches of queries; ``before`` is called with the number of each.

    ``ranked`` lists the splits that were ranked to their end; ``mrr`` yields the result of each.
    """

    def __init__(self) -> None:
        self.before = lambda number: None
        self.mrr: Iterator[float] = itertools.repeat(0.5)
        self.ranked: list[str] = []

    def evaluate(self, split, bar, between):
        """Rank nothing, and let others in between."""
        for number in range(NUM_QUERY_BATCHES):
            self.before(number)
            between()
        self.ranked.append(split)
        mrr = next(self.mrr) if split == "valid" else 0.0
        to_dict, figures = (lambda: {"queries": NUM_QUERY_BATCHES}), (lambda: {"mrr": mrr})
        return SimpleNamespace(to_dict=to_dict, figures=figures, both=SimpleNamespace(mrr=mrr))


class ToyRun:
    """One life of a run in a folder, and the triples that it has ``trained``.

    A triple's loss is the number of its batch. With ``own_config`` its checkpoints hold the configuration.
    With ``has_measures`` a triple's penalty is twice its batch's number, and it has 3 violators for its tail.
    ``lrs`` are those of the optimizer's groups at the start; ``lrs_of_batches`` has those of each batch.
    """

    def __init__(
        self,
        folder: Path,
        *settings: str,
        epochs: ElasticEpochs | None = None,
        own_config: bool = False,
        lrs: Sequence[float] = (),
        mirror: Mirror | None = None,
        held_out: Any = None,
        has_measures: bool = False,
    ) -> None:
        self.has_measures = has_measures
        sets = ["dataset=toy", f"output={folder}", f"training.batch_size={BATCH_SIZE}", *settings]
        sets.append(f"training.batch_statistics={str(has_measures).lower()}")
        config = load_config(None, ["training.progress=never", *sets])
        self.tables = ToyTables(person=ToyTable("person", 23), relation=ToyTable("relation", 2))
        self.epochs = ElasticEpochs() if epochs is None else epochs
        self.cluster = Cluster(World(), None)
        self.evaluator = ToyEvaluator()
        self.trained: list[tuple[int, list[int]]] = []
        ids = np.arange(NUM_TRIPLES)
        edges = EdgeTable(ids, np.stack([ids, ids % 2, ids], axis=1), None)
        pair_of_relation = np.zeros(2, np.int64)
        options = EdgeOptions(pair_of_relation, NUM_TRIPLES, BATCH_SIZE, BATCH_SIZE, 0, 1, seed=1)
        order = EdgeBatches(edges, options)
        self.checkpoints = CheckpointManager(
            folder / "checkpoint",
            TrainerGroup(barrier=self.cluster.barrier),
            num_parts=1,
            mirror=mirror,
            has_store=mirror is not None,
        )
        folder.mkdir(exist_ok=True)
        self.param_groups = [{"lr": lr} for lr in lrs]
        self.lrs_of_batches: list[list[float]] = []
        optimizer = SimpleNamespace(
            state_tensors=lambda name: {"sum": self.tables[name].rows + 0.5},
            param_groups=self.param_groups,
            drain=lambda: None,
        )
        absent: Any = None
        tables: Any = self.tables
        job = Job(config, self.cluster, absent, absent, absent, absent, Computation(), tables, optimizer)
        self.trainer = Trainer(
            job,
            order,
            self,
            self.evaluator,
            self.checkpoints,
            toy_meta(
                progress={"finished_epochs": 0, "batches_done": 0, "global_batch_size": BATCH_SIZE},
                **({"config": config.to_dict()} if own_config else {}),
            ),
            self.epochs,
            Passes(plan_passes([(0, NUM_TRIPLES)], config.training.edge_chunks, BATCH_SIZE), held_out),
        )

    def __call__(self, batch: EdgeBatch, flags: int = 0) -> StepResult:
        """Train one batch."""
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

    def train(self, until: int) -> None:
        """Run the usual loops."""
        for _ in self.epochs.remaining_until(until):
            for batch in self.trainer.batches():
                self.trainer.step(batch)

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
        """What the tables say."""
        return int(self.tables["person"].rows[0, 0])

    def committed(self) -> tuple[int, int] | None:
        """Return epochs and batches of the newest version, once what is being written counts."""
        self.checkpoints.finish()
        meta = self.checkpoints.latest()
        return None if meta is None else (meta.progress["finished_epochs"], meta.progress["batches_done"])
