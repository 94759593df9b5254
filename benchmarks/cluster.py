"""Cost of a batch on 1, 2 and 4 hosts: bytes on the wire, CPU time and wall time, beside stock DGL.

    python benchmarks/cluster.py                                # the table, about 15 minutes
    python benchmarks/cluster.py --hosts 2 --rounds 1 --num-entities 2000 --num-triples 20000
    python benchmarks/cluster.py --batch-per-trainer 4096 --systems exact "machine order"

Hosts are namespaces of this machine (``cluster_hosts.py``; needs root), each with one server and one trainer
of one thread. They share its cores: bytes are those of as many machines, CPU seconds nearly, wall times are
not. What sharing costs the rows with several trainers on one host show, between which no network lies.
Every row of the table trains the same global batches of the same graph: ComplEx, softmax over negatives that
a whole batch shares, Adam. "stock DGL" pulls rows with DGL's DistEmbedding and updates them with its
SparseAdam; torch differentiates the loss. "stock DGL, helped" is given distinct ids and our loss, so that
only the ways of rows and gradients differ. Everything is run several times in turn; the table has medians.
With --batch-per-trainer the batch grows with the trainers, and its chunks of negatives do not: in "machine
order" (sampling.order) the work of each trainer is then the same on any number of hosts, in "exact" (the
global order) it grows.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import tqdm

from cluster_hosts import cluster_hosts, what_is_missing
from cluster_jobs import LAUNCHER_LOG, launch, make_dataset
from cluster_trainer import Cost

TRAINER = Path(__file__).with_name("cluster_trainer.py")
LIMIT_SECONDS = 180
NUM_NEGATIVES = 1_000

STOCK = "stock DGL"
HELPED = "stock DGL, helped"

#: The first two are replaced.
STOCK_SETTINGS = ["training.lookup=kvstore", "optimizer.name=row_adagrad", "sampling.order=global"]
OUR_SETTINGS = ["optimizer.name=sparse_adam", "sampling.order=global"]
MACHINE_ORDER = "machine order"

#: What is compared: name -> (``--system`` of the trainer, its settings).
SYSTEMS = {
    STOCK: ("stock", STOCK_SETTINGS),
    HELPED: ("stock-merged", STOCK_SETTINGS),
    "exact": ("ours", OUR_SETTINGS),
    MACHINE_ORDER: ("ours", ["optimizer.name=sparse_adam", "sampling.order=machine"]),
    "bfloat16 wire": ("ours", [*OUR_SETTINGS, "training.wire=bfloat16"]),
    "bfloat16 wire, local negatives": (
        "ours",
        [
            *OUR_SETTINGS,
            "training.wire=bfloat16",
            "negatives.global_share=0",
            "negatives.local_share=1",
        ],
    ),
}

#: Without a batch that grows, the order of the machines is nothing but smaller chunks.
DEFAULT_SYSTEMS = [name for name in SYSTEMS if name != MACHINE_ORDER]

HEADING = (
    "| system | hosts | trainers | bytes/edge | CPU µs/edge | ms/batch | bytes to stock | to helped "
    "| faster than stock | than helped | CPU to 1 trainer | CPU to 1 host |\n"
    "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
)


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes
    ----------
    system : str
    num_hosts, num_trainers : int
    sent_bytes, cpu_seconds : float
        For each edge, of all hosts together.
    wall_seconds : float
        For each batch.
    """

    system: str
    num_hosts: int
    num_trainers: int
    sent_bytes: float
    cpu_seconds: float
    wall_seconds: float


def run(system: str, dataset: Path, num_hosts: int, num_trainers: int, arguments: argparse.Namespace) -> Row:
    """Train some batches on so many hosts, with so many trainers in all."""
    kind, extra = SYSTEMS[system]
    batch_size, chunk_size = batch_sizes(num_trainers, arguments)
    settings = [
        *(f"dataset={dataset}", f"model.dimension={arguments.dimension}"),
        *(f"training.batch_size={batch_size}", f"negatives.chunk_size={chunk_size}"),
        # No commit and no background thread: neither belongs to the cost of a batch.
        *(f"negatives.num_uniform={NUM_NEGATIVES}", "optimizer.lr=0.01", "checkpoint.every_epochs=0"),
        # The reference of cluster_trainer.py has no regularizer.
        *("regularizer.name=none", "checkpoint.background=false", "training.progress=never", *extra),
    ]
    with cluster_hosts(num_hosts, "6g") as hosts, tempfile.TemporaryDirectory(prefix="dglkge-job-") as name:
        folder = Path(name)
        command: list[str | Path] = [TRAINER, "--system", kind, "--result", folder]
        command += ["--warm", str(arguments.warm), "--batches", str(arguments.batches)]
        for setting in [*settings, f"output={folder / 'run'}"]:
            command += ["--set", setting]
        options = ["--num_trainers", str(num_trainers // num_hosts), "--log_dir", str(folder / "logs")]
        job = launch(hosts, folder, options, command)
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(LIMIT_SECONDS)
        if job.returncode != 0:  # None if it still runs
            output = (folder / LAUNCHER_LOG).read_text(encoding="utf-8")
            raise RuntimeError(f"the job ended with {job.returncode}:\n{output}")
        texts = [(folder / f"cost-{host}.json").read_text(encoding="ascii") for host in range(num_hosts)]
    costs = [Cost(**json.loads(text)) for text in texts]
    num_edges = arguments.batches * batch_size
    return Row(
        system,
        num_hosts,
        num_trainers,
        # Bytes and CPU time add up over hosts. Wall time does not: the slowest host decides.
        sum(cost.sent_bytes for cost in costs) / num_edges,
        sum(cost.cpu_seconds for cost in costs) / num_edges,
        max(cost.wall_seconds for cost in costs) / arguments.batches,
    )


def batch_sizes(num_trainers: int, arguments: argparse.Namespace) -> tuple[int, int]:
    """Return the triples of a global batch, and how many of them share their negatives."""
    if arguments.batch_per_trainer:
        return num_trainers * arguments.batch_per_trainer, arguments.batch_per_trainer
    # One chunk for each batch: all of its positives share their negatives.
    return arguments.batch_size, arguments.batch_size


def describe(row: Row, rows: Mapping[tuple[str, int, int], Row]) -> str:
    """Write one line of the table, with its ratios to stock DGL and to itself on one host."""
    cells = [row.system, str(row.num_hosts), str(row.num_trainers), f"{row.sent_bytes:,.0f}"]
    cells += [f"{1e6 * row.cpu_seconds:.1f}", f"{1e3 * row.wall_seconds:.0f}"]
    fewer_bytes, faster = [], []
    for name in (STOCK, HELPED):
        peer = rows.get((name, row.num_hosts, row.num_trainers))
        if row.system in (STOCK, HELPED):
            peer = None
        fewer_bytes.append(f"{row.sent_bytes / peer.sent_bytes:.2f}" if peer and row.num_hosts > 1 else "")
        faster.append(f"{peer.wall_seconds / row.wall_seconds:.1f}" if peer else "")
    cells += [*fewer_bytes, *faster]
    for num_trainers in (1, row.num_trainers):
        alone = rows.get((row.system, 1, num_trainers))
        cells.append(f"{row.cpu_seconds / alone.cpu_seconds:.2f}" if alone is not None else "")
    return f"| {' | '.join(cells)} |"


def median(rows: Sequence[Row]) -> Row:
    """Return the medians of several runs of the same."""
    return replace(
        rows[0],
        sent_bytes=statistics.median(row.sent_bytes for row in rows),
        cpu_seconds=statistics.median(row.cpu_seconds for row in rows),
        wall_seconds=statistics.median(row.wall_seconds for row in rows),
    )


def layouts(nums_hosts: Sequence[int], system: str) -> list[tuple[int, int]]:
    """Return (hosts, trainers) to compare: each number of hosts, before it one host with as many trainers.

    The latter where one host is asked for, and for one system of each kind: without a network the wire and
    the place of negatives make no difference.
    """
    has_alone = 1 in nums_hosts and system in (HELPED, "exact", MACHINE_ORDER)
    return [
        layout
        for num in nums_hosts
        for layout in ([(1, num)] if num > 1 and has_alone else []) + [(num, num)]
    ]


def main() -> int:
    """Run all systems on all numbers of hosts, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--hosts", type=int, nargs="+", default=[1, 2, 4], help="numbers of hosts (default: 1 2 4)")
    add("--systems", nargs="+", choices=SYSTEMS, default=DEFAULT_SYSTEMS, help="what to compare")
    add("--method", choices=("metis", "random"), default="metis", help="how to partition")
    add("--num-entities", type=int, default=100_000)
    add("--num-triples", type=int, default=500_000)
    add("--dimension", type=int, default=200, help="numbers in a row")
    add("--batch-size", type=int, default=16_384, help="triples in a global batch")
    add("--batch-per-trainer", type=int, help="triples in a global batch and in a chunk, for each trainer")
    add("--warm", type=int, default=4, help="batches before those that are measured")
    add("--batches", type=int, default=12, help="batches that are measured")
    add("--rounds", type=int, default=3, help="runs of which the table has the medians")
    add("--output", type=Path, help="JSON file for the figures")
    arguments = parser.parse_args()
    missing = what_is_missing()
    if missing is not None:
        sys.exit(f"no hosts can be made here: {missing}")
    keys = [
        (system, *layout)
        for layout in layouts(arguments.hosts, HELPED)
        for system in arguments.systems
        if layout in layouts(arguments.hosts, system)
    ]
    runs: dict[tuple[str, int, int], list[Row]] = {key: [] for key in keys}
    with tempfile.TemporaryDirectory(prefix="dglkge-bench-") as name:
        sizes = (arguments.num_entities, arguments.num_triples, 100, arguments.method)
        datasets = {num: make_dataset(Path(name), num, *sizes) for num in sorted({key[1] for key in keys})}
        # Rounds outside, systems inside: a slow phase of the machine then hits all systems alike.
        for _, (system, num_hosts, num_trainers) in tqdm.tqdm(
            list(itertools.product(range(arguments.rounds), keys)), unit="run", disable=None
        ):
            row = run(system, datasets[num_hosts], num_hosts, num_trainers, arguments)
            runs[system, num_hosts, num_trainers].append(row)
    rows = {key: median(repeats) for key, repeats in runs.items()}
    print(HEADING)
    for row in rows.values():
        print(describe(row, rows))
    if arguments.output is not None:
        figures = [
            {**vars(rows[key]), "runs": [vars(row) for row in repeats]} for key, repeats in runs.items()
        ]
        arguments.output.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
