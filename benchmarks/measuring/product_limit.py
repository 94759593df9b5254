"""Speed of this machine at the matrix products that a batch needs at least."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from pathlib import Path

import torch

WARM_UP_ROUNDS = 3


def flops_per_positive(num_negatives: int, dimension: int) -> int:
    """Return the operations of a positive's products: scores, and two for the gradients, on both sides."""
    # 2 operations for each number, 3 products, 2 sides.
    return 12 * num_negatives * dimension


def measure_product_limit(
    num_processes: int, num_threads: int, rows: int, columns: int, dimension: int, dtype: str, seconds: float
) -> float:
    """Measure plain ``torch.mm`` in several processes at once.

    Each takes the three products of one side of its share of a batch again and again: scores
    (rows, dimension) x (dimension, columns), and the gradients of the queries and of the negatives.

    Parameters
    ----------
    num_processes, num_threads : int
        As many as there are trainers, and the threads of each.
    rows, columns, dimension : int
        Positives of a trainer's share, negatives, and length of a row.
    dtype : str
        ``float32`` or ``bfloat16``.
    seconds : float
        Time of the measurement.

    Returns
    -------
    float
        Operations per second of all processes together.

    Raises
    ------
    RuntimeError
        If one of them fails.
    """
    shape = [num_threads, rows, columns, dimension, dtype, seconds]
    command = [sys.executable, str(Path(__file__).resolve()), *map(str, shape)]
    with contextlib.ExitStack() as stack:
        workers = [
            stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            for _ in range(num_processes)
        ]
        # All processes are warm before the first one measures: they share caches and memory bandwidth, as
        # trainers do.
        for worker in workers:
            _answer(worker)  # it is warm
        for worker in workers:
            worker.stdin.write("\n")  # type: ignore[union-attr]
            worker.stdin.flush()  # type: ignore[union-attr]
        return sum(float(_answer(worker)) for worker in workers)


def _answer(worker: subprocess.Popen[str]) -> str:
    """Return the next line that a process writes.

    Raises
    ------
    RuntimeError
        If it ends instead.
    """
    line = worker.stdout.readline()  # type: ignore[union-attr]
    if not line:
        raise RuntimeError(f"a process that measures matrix products ended with {worker.wait()}")
    return line


def _work(num_threads: int, rows: int, columns: int, dimension: int, dtype: str, seconds: float) -> None:
    """Measure one process: print a line when warm, wait for a line, print the speed."""
    torch.set_num_threads(num_threads)
    kind = getattr(torch, dtype)
    query, negatives, scores = (
        torch.randn(*shape).to(kind) for shape in ((rows, dimension), (columns, dimension), (rows, columns))
    )
    # Outputs are allocated once: page faults are no part of the products.
    scores_out, query_out, negatives_out = (torch.empty_like(x) for x in (scores, query, negatives))

    def products() -> None:
        torch.mm(query, negatives.T, out=scores_out)
        torch.mm(scores, negatives, out=query_out)
        torch.mm(scores.T, query, out=negatives_out)

    for _ in range(WARM_UP_ROUNDS):
        products()
    print("warm", flush=True)
    sys.stdin.readline()
    start, rounds = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        products()
        rounds += 1
    print(rounds * 6.0 * rows * columns * dimension / (time.perf_counter() - start), flush=True)


if __name__ == "__main__":
    num_threads, num_rows, num_columns, width = map(int, sys.argv[1:5])
    _work(num_threads, num_rows, num_columns, width, sys.argv[5], float(sys.argv[6]))
