"""What a batch costs on 1, 2 and 4 hosts: bytes on the wire, CPU time and wall time, beside stock DGL.

    python examples/benchmarks/cluster.py                                # the table, about six minutes
    python examples/benchmarks/cluster.py --hosts 2 --batches 5 --num-entities 2000 --num-triples 20000

Hosts are namespaces of this machine (``cluster_hosts.py``; needs root), each with one server and one trainer
of one thread. They share its cores: bytes are those of as many machines, CPU seconds nearly, wall times are
not. What sharing costs the rows with several trainers on one host show, between which no network lies.
Every row of the table trains the same global batches of the same graph: ComplEx, softmax over negatives that
a whole batch shares, Adam. "stock" pulls rows with DGL's DistEmbedding and updates them with its SparseAdam.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster_hosts import cluster_hosts, what_is_missing
from cluster_jobs import LAUNCHER_LOG, launch, make_dataset
from cluster_trainer import Cost

TRAINER = Path(__file__).with_name("cluster_trainer.py")
LIMIT_SECONDS = 90
NUM_NEGATIVES = 1_000
LINK_BYTES_PER_SECOND = 10e9 / 8

STOCK = "stock DGL"

#: What is compared: name -> (``--system`` of the trainer, its settings).
SYSTEMS = {
    STOCK: ("stock", ["training.lookup=kvstore", "optimizer.name=row_adagrad"]),  # both are replaced
    "exact": ("ours", ["optimizer.name=sparse_adam"]),
    "bfloat16 wire": ("ours", ["optimizer.name=sparse_adam", "training.wire=bfloat16"]),
    "bfloat16 wire, local negatives": (
        "ours",
        [
            "optimizer.name=sparse_adam",
            "training.wire=bfloat16",
            "negatives.global_share=0",
            "negatives.local_share=1",
        ],
    ),
}


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
    kind, chosen = SYSTEMS[system]
    settings = [
        *(f"dataset={dataset}", f"model.dimension={arguments.dimension}"),
        *(f"training.batch_size={arguments.batch_size}", f"negatives.chunk_size={arguments.batch_size}"),
        *(f"negatives.num_uniform={NUM_NEGATIVES}", "optimizer.lr=0.01", "checkpoint.every_epochs=0"),
        *("checkpoint.background=false", "training.progress=never", *chosen),
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
    num_edges = arguments.batches * arguments.batch_size
    return Row(
        system,
        num_hosts,
        num_trainers,
        sum(cost.sent_bytes for cost in costs) / num_edges,
        sum(cost.cpu_seconds for cost in costs) / num_edges,
        max(cost.wall_seconds for cost in costs) / arguments.batches,
    )


def describe(row: Row, rows: Mapping[tuple[str, int, int], Row]) -> str:
    """Write one line of the table, with its ratios to stock DGL and to itself on one host."""
    cells = [row.system, str(row.num_hosts), str(row.num_trainers), f"{row.sent_bytes:,.0f}"]
    cells += [f"{1e6 * row.cpu_seconds:.1f}", f"{1e3 * row.wall_seconds:.0f}"]
    stock = rows.get((STOCK, row.num_hosts, row.num_trainers))
    if stock is None or stock is row:
        cells += ["", ""]
    else:
        cells.append(f"{row.sent_bytes / stock.sent_bytes:.2f}" if row.num_hosts > 1 else "")
        cells.append(f"{stock.wall_seconds / row.wall_seconds:.1f}")
    for num_trainers in (1, row.num_trainers):
        alone = rows.get((row.system, 1, num_trainers))
        cells.append(f"{row.cpu_seconds / alone.cpu_seconds:.2f}" if alone is not None else "")
    return f"| {' | '.join(cells)} |"


def layouts(nums_hosts: Sequence[int], system: str) -> list[tuple[int, int]]:
    """Return (hosts, trainers) to compare: each number of hosts, before it one host with as many trainers.

    The latter where one host is asked for, and for one system of each kind: without a network the wire and
    the place of negatives make no difference.
    """
    has_alone = 1 in nums_hosts and system in (STOCK, "exact")
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
    add("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), help="what to compare")
    add("--method", choices=("metis", "random"), default="metis", help="how to partition")
    add("--num-entities", type=int, default=100_000)
    add("--num-triples", type=int, default=500_000)
    add("--dimension", type=int, default=200, help="numbers in a row")
    add("--batch-size", type=int, default=4_096, help="triples in a global batch")
    add("--warm", type=int, default=3, help="batches before those that are measured")
    add("--batches", type=int, default=20, help="batches that are measured")
    add("--output", type=Path, help="JSON file for the figures")
    arguments = parser.parse_args()
    missing = what_is_missing()
    if missing is not None:
        sys.exit(f"no hosts can be made here: {missing}")
    print(
        "| system | hosts | trainers | bytes/edge | CPU µs/edge | ms/batch | bytes to stock | faster "
        "| CPU to 1 trainer | CPU to 1 host |"
    )
    print("|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
    rows: dict[tuple[str, int, int], Row] = {}
    with tempfile.TemporaryDirectory(prefix="dglkge-bench-") as name:
        sizes = (arguments.num_entities, arguments.num_triples, 100, arguments.method)
        wanted = {system: layouts(arguments.hosts, system) for system in arguments.systems}
        datasets: dict[int, Path] = {}
        for layout in layouts(arguments.hosts, STOCK):
            if layout[0] not in datasets:
                datasets[layout[0]] = make_dataset(Path(name), layout[0], *sizes)
            for system in arguments.systems:
                if layout in wanted[system]:
                    row = rows[(system, *layout)] = run(system, datasets[layout[0]], *layout, arguments)
                    print(describe(row, rows), flush=True)
    if arguments.output is not None:
        figures = [vars(row) for row in rows.values()]
        arguments.output.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
