"""Time of an optimizer step: dglkge.optim beside dgl.distributed.optim, on the same gradients in one job.

Starts one DGL server and two trainers on this machine. Both optimizers get the same ids (a fifth of them
duplicates) and the same gradients, in turn, step by step; the time of a step is that of the slower trainer.

    python benchmarks/optimizer_step.py                  # the whole table, about three minutes
    python benchmarks/optimizer_step.py --repeats 5 --dims 128
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dglkge import optim  # before dgl
from dglkge.distributed.dgl_compat import dgl
from dglkge.optim.table import Table

NUM_TRAINERS = 2
NUM_NODES = 100_000
#: (number of ids a trainer, width of a row) for each --dims
CASES = {128: (2_304, 128), 400: (20_000, 400)}
#: Floats of state beside each parameter.
STATE_FLOATS = {"SparseAdagrad": 1, "SparseAdam": 2}
LIMIT_SECONDS = 1_200


def main() -> int:
    """Run the job, or one process of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=25, help="timed steps a case (default: %(default)s)")
    parser.add_argument("--dims", type=int, nargs="+", choices=sorted(CASES), default=sorted(CASES))
    arguments = parser.parse_args()
    # The server and the trainers are this program again, as in DGL's own scripts.
    if "BENCHMARK_FOLDER" in os.environ:
        run_process(Path(os.environ["BENCHMARK_FOLDER"]), arguments)
        return 0
    return launch()


def launch() -> int:
    """Make a graph, start a server and the trainers, wait for them."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ring = torch.arange(NUM_NODES + 1) % NUM_NODES
        graph = dgl.graph((ring, ring.flip(0)), num_nodes=NUM_NODES)
        # The process's number in the name: DGL shares the graph's memory under it.
        dgl.distributed.partition_graph(graph, f"bench{os.getpid()}", 1, name, part_method="random")
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        (folder / "ip_config.txt").write_text(f"127.0.0.1 {port}\n")
        env = {
            **os.environ,
            "BENCHMARK_FOLDER": name,
            "DGL_DIST_MODE": "distributed",
            "DGL_NUM_SAMPLER": "0",
            "DGL_NUM_SERVER": "1",
            "DGL_NUM_CLIENT": str(NUM_TRAINERS),
            "DGL_IP_CONFIG": f"{name}/ip_config.txt",
            "DGL_CONF_PATH": f"{name}/bench{os.getpid()}.json",
            "DGL_SERVER_ID": "0",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        processes = []
        for role, rank in [("server", 0)] + [("client", rank) for rank in range(NUM_TRAINERS)]:
            quiet = subprocess.DEVNULL if role == "server" else None
            processes.append(
                subprocess.Popen(
                    [sys.executable, *sys.argv],
                    stdout=quiet,
                    env={**env, "DGL_ROLE": role, "RANK": str(rank)},
                )
            )
        try:
            # Trainers first: the server ends after them.
            return max(abs(process.wait(LIMIT_SECONDS)) for process in reversed(processes))
        finally:
            for process in processes:
                process.kill()
                process.wait()


def run_process(folder: Path, arguments: argparse.Namespace) -> None:
    """Run as the server, or as a trainer that measures all cases."""
    dgl.distributed.initialize(os.environ["DGL_IP_CONFIG"])
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=NUM_TRAINERS)
    config = os.environ["DGL_CONF_PATH"]
    graph = dgl.distributed.DistGraph(Path(config).stem, part_config=config)
    policy = graph.get_node_partition_policy("_N")
    rows = []
    for dim in arguments.dims:
        for name in STATE_FLOATS:
            rows.append(measure(name, *CASES[dim], policy, arguments.repeats))
    if rank == 0:
        print_table(rows)


def measure(name: str, num_ids: int, dim: int, policy: Any, repeats: int) -> dict[str, Any]:
    """Time the steps of DGL's optimizer and ours (float32 and bfloat16 on the wire) on the same traces."""
    makers = {
        "dgl": lambda table: getattr(dgl.distributed.optim, name)([table], lr=0.01),
        "ours": lambda table: getattr(optim, name)([table], lr=0.01),
        "bf16": lambda table: getattr(optim, name)([table], lr=0.01, wire_dtype=torch.bfloat16),
    }
    tables = {
        way: dgl.distributed.DistEmbedding(NUM_NODES, dim, f"{name}_{dim}_{way}", part_policy=policy)
        for way in makers
    }
    optimizers = {way: make(tables[way]) for way, make in makers.items()}
    map_all_pages()
    dgl_bytes = count_bytes_of_dgl()
    update_seconds = time_of_updates()
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    gradients = [torch.randn(num_ids, dim, generator=generator) for _ in range(2)]
    seconds: dict[str, list[float]] = {way: [] for way in [*makers, "update", "copy"]}
    for repeat in range(repeats + 3):
        ids = draw_ids(num_ids, generator)
        for way, optimizer in optimizers.items():
            rows = tables[way](ids)
            rows.grad = gradients[repeat % 2]
            # DGL's optimizer needs it before each step; ours does not.
            optimizer.zero_grad() if way == "dgl" else None
            update_seconds[0] = 0.0
            seconds[way].append(timed(optimizer.step))
            if way == "ours":
                seconds["update"].append(slowest(update_seconds[0]))
        seconds["copy"].append(time_of_copy(len(ids.unique()) * dim * (1 + STATE_FLOATS[name])))
    steps = repeats + 3
    # Without the first three steps, which warm up.
    result = {way: statistics.median(values[3:]) * 1e3 for way, values in seconds.items()}
    return {
        "optimizer": name,
        "ids": num_ids,
        "dim": dim,
        **result,
        "dgl_bytes": dgl_bytes[0] // steps,
        "ours_bytes": optimizers["ours"].sent_bytes // steps,
        "bf16_bytes": optimizers["bf16"].sent_bytes // steps,
    }


def map_all_pages() -> None:
    """Read all shared memory once: a page's first touch by a process costs more than the work on it."""
    store = dgl.distributed.kvstore.get_kvstore().data_store
    for rows in store.values():
        rows.sum()
    dist.barrier()


def draw_ids(num_ids: int, generator: torch.Generator) -> torch.Tensor:
    """Random ids, a fifth of them repeating others, "(num_ids,) int64"."""
    num_distinct = num_ids - num_ids // 5
    distinct = torch.randperm(NUM_NODES, generator=generator)[:num_distinct]
    repeated = distinct[torch.randint(num_distinct, (num_ids - num_distinct,), generator=generator)]
    return torch.cat([distinct, repeated])[torch.randperm(num_ids, generator=generator)]


def slowest(value: float) -> float:
    """The largest value of all trainers."""
    largest = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest)


def timed(work: Callable[[], Any]) -> float:
    """Seconds that some work takes on the slower trainer, all starting together."""
    dist.barrier()
    start = time.perf_counter()
    work()
    return slowest(time.perf_counter() - start)


def time_of_copy(num_floats: int) -> float:
    """Seconds to copy so many float32 from memory to memory, on all trainers at once."""
    source, target = np.ones(num_floats, np.float32), np.zeros(num_floats, np.float32)
    return timed(lambda: np.copyto(target, source))


def time_of_updates() -> list[float]:
    """A cell that sums up the seconds spent in our local update."""
    # The original is kept on the class: each case wraps it anew, and must not time an earlier wrapper.
    cell, update = [0.0], Table.__dict__.get("plain_update", Table.update)

    def measured(table: Table, *rest: Any) -> int:
        start = time.perf_counter()
        try:
            return update(table, *rest)
        finally:
            cell[0] += time.perf_counter() - start

    Table.plain_update, Table.update = update, measured  # type: ignore[attr-defined, method-assign, assignment]
    return cell


def count_bytes_of_dgl() -> list[int]:
    """A cell that sums up the bytes that DGL's optimizer hands to its exchange for the other trainer."""
    import dgl.distributed.optim.pytorch.sparse_optim as module

    cell = [0]

    def counted(exchange: Callable[..., Any]) -> Callable[..., Any]:
        def call(rank: int, world_size: int, received: list[Any], sent: list[Any], *rest: Any) -> Any:
            cell[0] += sum(
                part.numel() * part.element_size() for peer, part in enumerate(sent) if peer != rank
            )
            return plain(rank, world_size, received, sent, *rest)

        plain = getattr(exchange, "plain", exchange)
        call.plain = plain  # type: ignore[attr-defined]
        return call

    # By prefix: the name of the exchange differs between DGL's versions.
    for name in [name for name in vars(module) if name.startswith("alltoall")]:
        setattr(module, name, counted(getattr(module, name)))
    return cell


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print the results as Markdown."""
    print(
        f"\ndgl {dgl.__version__}, torch {torch.__version__}, {os.cpu_count()} cores, 1 server, "
        f"{NUM_TRAINERS} trainers, {NUM_NODES:,} rows; medians in ms\n"
    )
    print(
        "| optimizer | ids | dim | DGL | ours | ratio | ours, bfloat16 | ratio | local update | plain copy "
        "| bytes sent: DGL | ours | bfloat16 | bfloat16 : DGL |"
    )
    print("|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
    for row in rows:
        print(
            f"| {row['optimizer']} | {row['ids']:,} | {row['dim']} | {row['dgl']:.2f} | {row['ours']:.2f} "
            f"| {row['dgl'] / row['ours']:.1f}× | {row['bf16']:.2f} | {row['dgl'] / row['bf16']:.1f}× "
            f"| {row['update']:.2f} | {row['copy']:.2f} | {row['dgl_bytes']:,} | {row['ours_bytes']:,} "
            f"| {row['bf16_bytes']:,} | {row['bf16_bytes'] / row['dgl_bytes']:.2f} |"
        )
    print(json.dumps(rows), file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
