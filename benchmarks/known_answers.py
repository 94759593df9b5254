"""Index of known answers: bytes of a triple, seconds to build, microseconds of a lookup.

    python benchmarks/known_answers.py --values 1000000,10000000 --json known.json

Each size has a process of its own, which draws triples with the skew of synthetic_graph.py (a tenth as many
entities as triples, 100 relations), builds the index, maps it and looks up queries of random triples, in
batches as training does. Private memory is that of the process by the kernel (RssAnon), so it leaves out the
pages of the file, which all processes of a machine share.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dglkge.data.known_triples import open_known_index
from dglkge.typing import Side
from measuring.machine import describe_machine
from synthetic_graph import BLOCK_ROWS, Shape, edges

NUM_RELATIONS = 100
BATCH, NUM_BATCHES = 1000, 100
LIMIT_SECONDS = 900.0


def private_bytes() -> int:
    """Return the private memory of this process."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def write_triples(path: Path, num_triples: int) -> np.ndarray:
    """Write triples as a data set has them, and map them."""
    shape = Shape(max(num_triples // 10, 2), NUM_RELATIONS, num_triples)
    array = np.lib.format.open_memmap(path, "w+", np.int64, (num_triples, 3))
    for start in range(0, num_triples, BLOCK_ROWS):
        end = min(start + BLOCK_ROWS, num_triples)
        array[start:end] = np.stack(edges(shape, start, end), axis=1)
    array.flush()
    del array
    triples: np.ndarray = np.load(path, mmap_mode="r")
    return triples


def measure(num_triples: int, work: Path) -> dict[str, Any]:
    """Measure one size, in this process."""
    triples = write_triples(work / "triples.npy", num_triples)
    before = private_bytes()
    start = time.perf_counter()
    open_known_index(work, "train", "benchmark", triples, NUM_RELATIONS)
    build_seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    start = time.perf_counter()
    index = open_known_index(work, "train", "benchmark", triples, NUM_RELATIONS)
    open_seconds = time.perf_counter() - start
    random = np.random.default_rng(0)
    queries = [triples[np.sort(random.integers(0, num_triples, BATCH))] for _ in range(NUM_BATCHES)]
    figures: dict[str, Any] = {"triples": num_triples}
    for side in Side:
        start = time.perf_counter()
        for rows in queries:
            index[side].runs(rows[:, side.anchor_column], rows[:, 1])
        figures[f"{side.value}_lookup_us"] = (time.perf_counter() - start) / (BATCH * NUM_BATCHES) * 1e6
    distinct = len(index[Side.TAIL].keys)
    size = (work / "known_train.index").stat().st_size
    return {
        **figures,
        "distinct": distinct,
        "file_bytes_per_distinct_triple": size / distinct,
        "build_seconds": build_seconds,
        "open_seconds": open_seconds,
        "peak_bytes": peak,
        "private_bytes_kept": private_bytes() - before,
    }


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--values", default="1000000", help="numbers of triples (1000000)")
    parser.add_argument("--work", type=Path, help="folder for the files (a temporary one)")
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    if args.one:
        print(json.dumps(measure(args.one, args.work)))
        return 0
    rows = []
    for value in args.values.split(","):
        with tempfile.TemporaryDirectory(dir=args.work, prefix="known_answers_") as work:
            command = [sys.executable, __file__, "--one", value, "--work", work]
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=LIMIT_SECONDS)
        rows.append(json.loads(done.stdout))
        print(json.dumps(rows[-1], indent=1))
    if args.json:
        figures = {"machine": describe_machine(), "rows": rows}
        args.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
