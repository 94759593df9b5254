"""Speed of writing and reading checkpoints, beside a plain sequential write of the same bytes with fsync.

    python benchmarks/checkpoint.py --folder /some/disk --num-rows 500000 --dim 200

Rows are random, with Adagrad's state beside them. Every file is put out of the page cache before it is read.
"background" is a copy and then a write beside which training could go on; "waiting" writes the live rows.
Figures go to stdout and, with --output, to a JSON file.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from dglkge.checkpoint.layout import CHECKPOINT_FOLDER, LATEST_LINK, Progress
from dglkge.checkpoint.manager import CheckpointManager
from dglkge.checkpoint.manifest import CheckpointMeta
from dglkge.typing import RELATION, Relation, TablePart

BLOCK_BYTES = 64 << 20


def meta_of(num_rows: int, dim: int) -> CheckpointMeta:
    """Describe a run of one entity type and one relation."""
    return CheckpointMeta(
        config={},
        dataset_name="benchmark",
        dataset_path="",
        dataset_fingerprint="benchmark",
        entity_types={"entity": num_rows},
        relations=[Relation("relation", "entity", "entity")],
        progress={Progress.FINISHED_EPOCHS: 0, Progress.BATCHES_DONE: 0, Progress.GLOBAL_BATCH_SIZE: 1},
        seed=0,
        score_function="complex",
        dim=dim,
        reciprocal=False,
        optimizer={"name": "sparse_adagrad", "lr": 0.1},
    )


def table(name: str, num_rows: int, dim: int) -> TablePart:
    """Draw a table, its rows in no order, as after partitioning."""
    rows = torch.rand(num_rows, dim)
    return TablePart(name, 0, torch.randperm(num_rows), rows, {"sum": torch.rand(num_rows, dim)})


def seconds(work: Callable[[], object]) -> float:
    """Return the seconds that a function takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def forget(paths: Iterable[Path]) -> None:
    """Evict files from the page cache."""
    for path in paths:
        with open(path, "rb") as file:
            # Dirty pages cannot be evicted, so the file is flushed first.
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def write_plainly(path: Path, part: TablePart) -> None:
    """Write a table's bytes one after the other and bring them to the disk."""
    with open(path, "wb", buffering=0) as file:
        for values in (part.rows, part.state["sum"]):
            for block in values.reshape(-1).split(BLOCK_BYTES // 4):
                file.write(block.numpy().data)
        os.fsync(file.fileno())


def read_plainly(path: Path) -> None:
    """Read a file to its end."""
    buffer = bytearray(BLOCK_BYTES)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def measure(folder: Path, num_rows: int, dim: int, num_repeats: int) -> dict[str, float]:
    """Write and read plainly and as a checkpoint; medians over some repeats.

    Both make a new file and drop one: a version the one before, the plain write its own, since two of them in
    the page cache would need memory that a virtual machine has to get from its host first.
    """
    torch.manual_seed(0)
    part, relations = table("entity", num_rows, dim), table(RELATION, 1, dim)
    manager = CheckpointManager(folder / CHECKPOINT_FOLDER)
    manager.reserve([part])
    meta = meta_of(num_rows, dim)
    # Rows and state: two float32 for each number.
    num_bytes = 8 * num_rows * dim
    plain = folder / "plain"
    times: dict[str, list[float]] = {
        name: [] for name in ("plain", "plain_alone", "save", "stall", "rest", "read", "read_plain")
    }
    # All kinds in each repeat: the speed of a disk drifts, and shares are taken within a repeat.
    for _ in range(num_repeats + 1):
        write_plainly(plain, part)  # the next one finds its memory in the page cache used before
        plain.unlink()
        writing = seconds(lambda: write_plainly(plain, part))
        times["plain_alone"].append(writing)
        times["plain"].append(writing + seconds(plain.unlink))
        write_plainly(plain, part)
        forget([plain])
        times["read_plain"].append(seconds(lambda: read_plainly(plain)))
        plain.unlink()
        times["save"].append(seconds(lambda: manager.save([part], relations, meta)))
        # start() returns when training could go on; finish() waits for the rest of the write.
        times["stall"].append(seconds(lambda: manager.start([part], relations, meta)))
        times["rest"].append(seconds(manager.finish))
        forget((folder / CHECKPOINT_FOLDER / LATEST_LINK).iterdir())
        times["read"].append(seconds(lambda: manager.restore([part])))
    times["background"] = [sum(pair) for pair in zip(times["stall"], times["rest"])]
    typical = {name: statistics.median(values[1:]) for name, values in times.items()}
    mega = num_bytes / 1e6
    return {
        "table_megabytes": round(mega, 1),
        "plain_write_megabytes_per_second": round(mega / typical["plain"], 3),
        "plain_write_without_drop_megabytes_per_second": round(mega / typical["plain_alone"], 3),
        "background_write_megabytes_per_second": round(mega / typical["background"], 3),
        "background_write_share_of_plain": share(times, "plain", "background"),
        "waiting_write_megabytes_per_second": round(mega / typical["save"], 3),
        "waiting_write_share_of_plain": share(times, "plain", "save"),
        "waiting_write_share_of_plain_without_drop": share(times, "plain_alone", "save"),
        "plain_read_megabytes_per_second": round(mega / typical["read_plain"], 3),
        "checkpoint_read_megabytes_per_second": round(mega / typical["read"], 3),
        "read_share_of_plain": share(times, "read_plain", "read"),
        "training_stall_seconds": round(typical["stall"], 4),
        "first_training_stall_seconds": round(times["stall"][0], 4),
        "stall_share_of_write": share(times, "stall", "background"),
        "copy_megabytes": round(manager.row_copy.num_bytes / 1e6, 1),
    }


def share(times: dict[str, list[float]], part: str, whole: str) -> float:
    """Return the median over the repeats of one time's share of another, without the first repeat."""
    return round(statistics.median(a / b for a, b in zip(times[part][1:], times[whole][1:])), 3)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("."), help="on the disk to measure (default: .)")
    parser.add_argument("--num-rows", type=int, default=500_000)
    parser.add_argument("--dim", type=int, default=200)
    parser.add_argument("--num-repeats", type=int, default=7, help="after one that warms up (default: 7)")
    parser.add_argument("--output", type=Path, help="JSON file for the figures")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="checkpoint_benchmark_", dir=args.folder))
    try:
        figures = {
            "num_rows": args.num_rows,
            "dim": args.dim,
            **measure(folder, args.num_rows, args.dim, args.num_repeats),
        }
    finally:
        shutil.rmtree(folder)
    for name, value in figures.items():
        print(f"{name:46} {value}")
    if args.output:
        args.output.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
