"""Processor time of a training step with many trainers, and with many threads of a trainer.

Forks the trainers from one process that has imported everything, with tables in their common memory: batches,
objective, exchange through shared memory and update are those of a job; DGL, which takes no part in a batch,
is left out. Processor time counts threads and waits, and does not depend on how many cores there are.

    python benchmarks/many_trainers.py --layouts 2x1,8x1,16x1,48x1
    python benchmarks/many_trainers.py --layouts 2x1,2x8,4x12 --matmul-dtype bfloat16

The graph has the sizes of FB15k-237; heads and tails are drawn in proportion to rank to the power -0.8.
A layout is trainers x threads of each. "sent" are bytes of gradients a batch that trainers write for one
another, "distinct" those of the batch's rows, each once.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import sys
import time
from typing import Any

import numpy as np
import torch

from dglkge.data.partition_layout import EdgeTable
from dglkge.embeddings.row_lookup import FoundRows
from dglkge.model.kge_model import build_model
from dglkge.model.losses import Softmax
from dglkge.optim.links import NEUTRAL, RuleStep
from dglkge.optim.network_exchange import WireFormat
from dglkge.optim.outboxes import NeighbourOutbox, Neighbours, Outbox
from dglkge.optim.row_chains import GradientRows
from dglkge.optim.rules import Adagrad
from dglkge.optim.step_exchange import SharedExchange, num_fields
from dglkge.optim.workspace import Scratch
from dglkge.sampling.edge_batches import EdgeBatches, EdgeOptions
from dglkge.sampling.negatives import MixedNegatives
from dglkge.step.contracts import PHASES, Computation, PhaseClock, Rows, TableRows
from dglkge.step.objectives.dot_softmax import DotSoftmax
from dglkge.step.planning import EdgePlanner, Plan
from dglkge.typing import RELATION, Side

NUM_ENTITIES, NUM_RELATIONS, NUM_TRIPLES = 14_541, 237, 272_115
ENTITY, TABLES = "entity", ("entity", RELATION)
WARM_UP_BATCHES = 3
COLUMNS = {
    "planning": ("order", "edges", "negatives"),
    "rows": ("gather",),
    "products": ("score", "backward"),
    "loss": ("loss",),
    "exchange": ("merge", "exchange"),
    "update": ("update",),
    "waiting": ("waiting",),
    "other": ("other",),
}


class ProcessorClock(PhaseClock):
    """Adds up processor seconds of this process, all threads together, by phase."""

    def __init__(self) -> None:
        super().__init__(is_on=True)
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.phase, self.since = "other", time.process_time()

    def enter(self, phase: str) -> None:
        now = time.process_time()
        self.seconds[self.phase] += now - self.since
        self.phase, self.since = phase, now


class Trainer:
    """One trainer: the parts of a job's step, with tables and outboxes that were made before the fork."""

    def __init__(
        self, options: argparse.Namespace, tables: dict[str, list[np.ndarray]], edges: np.ndarray
    ) -> None:
        self.options, self.tables, self.edges = options, tables, edges
        self.clock = ProcessorClock()
        self.dims = tuple(tables[name][0].shape[1] for name in TABLES)
        self.chains = [GradientRows(dim, np.dtype(np.float32)) for dim in self.dims]
        self.scratch = {name: Scratch() for name in TABLES}
        nodes = {ENTITY: np.arange(NUM_ENTITIES)}
        sampler = MixedNegatives(
            options.negatives, (1.0, 0.0, 0.0), nodes, {ENTITY: (0, NUM_ENTITIES)}, [(ENTITY, ENTITY)], 1
        )
        planner = EdgePlanner(TABLES, [(ENTITY, ENTITY)], dict.fromkeys(Side, sampler))
        model = build_model("complex", dim=options.dimension, reciprocal=True)
        computation = Computation(matmul_dtype=getattr(torch, options.matmul_dtype), clock=self.clock)
        self.objective = DotSoftmax(planner, model, Softmax(), None, True, computation)

    def batches(self, place: int, num: int) -> EdgeBatches:
        """Return the batches of a trainer among ``num``."""
        table = EdgeTable(np.arange(NUM_TRIPLES), self.edges, None)
        return EdgeBatches(
            table,
            EdgeOptions(
                np.zeros(NUM_RELATIONS, np.int64),
                NUM_TRIPLES,
                self.options.batch_size,
                self.options.chunk_size,
                place,
                num,
                seed=1,
            ),
        )

    def rows(self, plan: Plan) -> Rows:
        """Return the rows of a plan where they lie, and room for their gradients."""
        tables = {}
        for name, ids in plan.ids.items():
            table = self.tables[name][0]
            gradients = self.scratch[name].take("gradients", len(ids), table.shape[1])
            tables[name] = TableRows(ids, None, gradients, FoundRows.in_array(table, ids.numpy()))
        return Rows(tables)

    def run(self, place: int, exchange: SharedExchange | None, batches: EdgeBatches) -> None:
        """Train all batches."""
        group = {"lr": 0.1, **NEUTRAL, "eps": 1e-10}
        for index in range(WARM_UP_BATCHES + self.options.batches):
            if index == WARM_UP_BATCHES:
                self.clock.seconds = dict.fromkeys(PHASES, 0.0)
                self.sent = exchange.sent_bytes if exchange else 0
                self.start = resource.getrusage(resource.RUSAGE_SELF)
            batch = batches.batch(0, index, self.clock.enter)
            self.clock.enter("negatives")
            plan = self.objective.plan(batch)
            self.clock.enter("gather")
            rows = self.rows(plan)
            self.objective.gradients(plan, rows)()
            self.clock.enter("merge")
            for chains, (_, ids, gradients) in zip(self.chains, rows.collect()):
                chains.clear()
                chains.add(ids.numpy(), gradients.numpy())
            self.clock.enter("exchange")
            step = RuleStep.of(Adagrad(), group, number=index)
            all_keys = [np.arange(chains.num_keys) for chains in self.chains]
            for turn in [all_keys] if exchange is None else exchange.run(all_keys, self.clock.enter):
                self.clock.enter("update")
                for name, chains, keys in zip(TABLES, self.chains, turn):
                    chains.update(step, self.tables[name], chains.keys[keys], keys)
                self.clock.enter("exchange")
            self.clock.enter("waiting")
            if exchange is not None:
                exchange.finish(np.zeros(2, np.int64), 0)
            self.clock.enter("other")

    def figures(self, exchange: SharedExchange | None) -> dict[str, Any]:
        """Return processor seconds and bytes after the first batches."""
        self.clock.enter("other")
        end = resource.getrusage(resource.RUSAGE_SELF)
        cpu = end.ru_utime + end.ru_stime - self.start.ru_utime - self.start.ru_stime
        sent = exchange.sent_bytes - self.sent if exchange else 0
        return {"cpu": cpu, "phases": self.clock.seconds, "sent": sent, "switches": end.ru_nivcsw}

    def distinct_bytes(self) -> float:
        """Return the bytes of the distinct gradients of a batch."""
        batches = self.batches(0, 1)
        plans = [self.objective.plan(batches.batch(0, index)) for index in range(WARM_UP_BATCHES)]
        sizes = [
            4 * len(plan.ids[name].unique()) * dim for plan in plans for name, dim in zip(TABLES, self.dims)
        ]
        return sum(sizes) / len(plans)


def shared(rows: int, width: int, scale: float) -> np.ndarray:
    """Return random rows in memory that forked processes share."""
    made = torch.empty(rows, width).share_memory_()
    return (made.normal_(std=scale) if scale else made.zero_()).numpy()


def measure(trainer: Trainer, num: int, steps: int) -> list[dict[str, Any]]:
    """Fork trainers, and return the figures of each."""
    outboxes = [Outbox(num_fields(len(TABLES))) for _ in range(num)]
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()

    def run(place: int) -> None:
        torch.set_num_threads(trainer.options.threads)
        exchange = None
        if num > 1:
            peers = [other for other in range(num) if other != place]
            neighbours = [NeighbourOutbox(other, outboxes[other].address) for other in peers]
            wire = WireFormat((torch.float32,) * 2, trainer.dims, np.dtype(np.int32), False)
            boxes = Neighbours(outboxes[place], neighbours, timeout_seconds=300)
            exchange = SharedExchange(boxes, place, peers, trainer.chains, wire)
        trainer.run(place, exchange, trainer.batches(place, num))
        results.put(trainer.figures(exchange))

    processes = [context.Process(target=run, args=(place,), daemon=True) for place in range(num)]
    for process in processes:
        process.start()
    figures = [results.get() for _ in processes]
    for process in processes:
        process.join()
    return figures


def main() -> int:
    """Measure all layouts and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--layouts", default="2x1,8x1,16x1,48x1", help="trainers x threads, ... (default: %(default)s)")
    add("--batches", type=int, default=100)
    add("--batch-size", type=int, default=1000)
    add("--chunk-size", type=int, default=1000)
    add("--negatives", type=int, default=1000)
    add("--dimension", type=int, default=400)
    add("--matmul-dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    shares = np.arange(1, NUM_ENTITIES + 1) ** -0.8
    ends = rng.choice(NUM_ENTITIES, (NUM_TRIPLES, 2), p=shares / shares.sum())
    relations = rng.integers(0, NUM_RELATIONS, NUM_TRIPLES)
    edges = np.stack([ends[:, 0], relations, ends[:, 1]], axis=1).astype(np.int32)
    sizes = {ENTITY: (NUM_ENTITIES, options.dimension), RELATION: (NUM_RELATIONS, 2 * options.dimension)}
    torch.set_num_threads(1)  # before the fork: threads of OpenMP do not survive it
    tables = {name: [shared(*size, 0.1), shared(*size, 0)] for name, size in sizes.items()}
    print("| trainers | threads | " + " | ".join(COLUMNS) + " | CPU µs an edge | : first | sent : distinct |")
    print("|--:|--:|" + "--:|" * (len(COLUMNS) + 3))
    first = 0.0
    for layout in options.layouts.split(","):
        num, options.threads = map(int, layout.split("x"))
        trainer = Trainer(options, tables, edges)
        figures = measure(trainer, num, options.batches)
        per_edge = 1e6 / (options.batches * options.batch_size)
        total = per_edge * sum(process["cpu"] for process in figures)
        first = first or total
        phases = [
            per_edge * sum(process["phases"][phase] for process in figures for phase in column)
            for column in COLUMNS.values()
        ]
        sent = sum(process["sent"] for process in figures) / options.batches / trainer.distinct_bytes()
        numbers = " | ".join(f"{seconds:.1f}" for seconds in phases)
        print(
            f"| {num} | {options.threads} | {numbers} | {total:.1f} | {total / first:.2f} | {sent:.2f} |",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
