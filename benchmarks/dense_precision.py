"""Time of the module path in float32, bfloat16 and float16, as written and by torch.compile.

    python benchmarks/dense_precision.py --json precision.json

A batch here is what dense parameters add to one: queries of both sides, scores against negatives, softmax,
backward pass, the sum of the gradients and the optimizer's step, on random rows in one process with all
cores. Lookup and update of rows are not in it. All variants of a score function run in turn, --pairs times;
figures are medians, and ratios are medians of the ratios to float32 of the same turn. Markdown goes to
stdout, everything to --json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from dglkge.distributed.process_group import DeviceGroups
from dglkge.errors import DglkgeError
from dglkge.model.device import NARROW_TYPES, ModulePrecision, autocast_problem, compiler_problem
from dglkge.model.kge_model import build_model
from dglkge.step.dense_parameters import DenseParameters
from dglkge.typing import Side
from measuring.machine import describe_machine

NAMES = ("tucker", "conve", "conex", "transformer")
TYPES = ("none", "bfloat16", "float16")
BASE = ("none", False)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--score-functions", default=",".join(NAMES), metavar="NAME,...")
    add("--dimension", type=int, default=200, help="conve has one number more, its bias")
    add("--batch-size", type=int, default=1000)
    add("--negatives", type=int, default=1000, help="for each batch and side")
    add("--relations", type=int, default=200, help="different ones in a batch")
    add("--batches", type=int, default=3, help="of each measurement")
    add("--pairs", type=int, default=5, help="measurements of each variant, in turn")
    add("--device", default="cpu", choices=("cpu", "cuda"))
    add("--json", type=Path, help="file for all figures")
    return parser


def variants(device: str) -> list[tuple[str, bool]]:
    """Return the settings of ``dense.autocast`` and ``dense.compile`` that this machine has."""
    types = [name for name in TYPES if name == "none" or autocast_problem(device, NARROW_TYPES[name]) is None]
    return list(itertools.product(types, [False] if compiler_problem() else [False, True]))


def make_batch(args: argparse.Namespace, name: str, autocast: str, compiles: bool) -> Callable[[], None]:
    """Return a function that trains one batch."""
    device, draw = torch.device(args.device), torch.Generator().manual_seed(0)
    model = build_model(name, args.dimension + (name == "conve"), reciprocal=True)
    model = model.on_device(device)
    precision = ModulePrecision(args.device, NARROW_TYPES.get(autocast, torch.float32), compiles)
    module: Any = model.module
    dense = DenseParameters(
        module,
        lambda parameters: torch.optim.Adam(parameters, lr=1e-4),
        DeviceGroups(),
        loss_scale=precision.loss_scale,
        scaled=[name for name, _ in module.named_parameters()],
    )
    computing = model.in_precision(precision)
    shares = computing.score_function.shares_relations
    places = torch.randint(args.relations, (args.batch_size,), generator=draw).to(device)
    sizes = (args.batch_size, args.batch_size, args.negatives)
    rows = [torch.randn(size, model.dim, generator=draw).to(device) * 0.1 for size in sizes]
    relation_rows = torch.randn(args.relations, model.relation_width, generator=draw).to(device) * 0.1

    def train() -> None:
        dense.start_batch()
        heads, tails, negatives, relations = (
            block.detach().requires_grad_() for block in (*rows, relation_rows)
        )
        loss = torch.zeros((), device=device)
        for side, anchors, truths in ((Side.TAIL, heads, tails), (Side.HEAD, tails, heads)):
            if shares:
                query = computing.query(anchors, relations, side, places=places)
            else:
                query = computing.query(anchors, relations[places], side)
            scores = computing.compare(query, negatives)
            true = computing.compare_pairs(query, truths)
            loss = loss + (torch.cat([true[:, None], scores], 1).logsumexp(1) - true).mean()
        loss.backward()
        if dense.sum_gradients():
            dense.update()

    return train


def measure(batch: Callable[[], None], num_batches: int, device: str) -> dict[str, float]:
    """Return the time and the processor time of a batch, in seconds."""
    finish = torch.cuda.synchronize if device == "cuda" else lambda: None
    finish()
    started, cpu_started = time.perf_counter(), time.process_time()
    for _ in range(num_batches):
        batch()
    finish()
    elapsed = time.perf_counter() - started, time.process_time() - cpu_started
    return {"seconds": elapsed[0] / num_batches, "cpu_seconds": elapsed[1] / num_batches}


def measure_all(args: argparse.Namespace, name: str) -> list[dict[str, Any]]:
    """Measure the variants of a score function in turn; returns a row for each."""
    rows: list[dict[str, Any]] = []
    batches = []
    kind: Any = type(build_model(name, 4, True).module)
    has_forward = kind.forward is not torch.nn.Module.forward
    for autocast, compiles in variants(args.device):
        # Matrix products alone: training refuses to compile them.
        if compiles and not has_forward:
            continue
        batch = make_batch(args, name, autocast, compiles)
        first = measure(batch, 1, args.device)["seconds"]
        # What remains is allocated, as state of the optimizer.
        measure(batch, 1, args.device)
        rows.append({"score_function": name, "autocast": autocast, "compile": compiles, "runs": []})
        rows[-1]["first_seconds"] = first
        batches.append(batch)
    for _ in range(args.pairs):
        for row, batch in zip(rows, batches):
            row["runs"].append(measure(batch, args.batches, args.device))
    for row in rows:
        for key in ("seconds", "cpu_seconds"):
            row[key] = statistics.median(run[key] for run in row["runs"])
        ratios = [run["seconds"] / base["seconds"] for run, base in zip(row["runs"], rows[0]["runs"])]
        row["ratio"] = statistics.median(ratios)
    return rows


def report(rows: list[dict[str, Any]]) -> str:
    """Return the table."""
    lines = [
        "| score function | autocast | compile | ms a batch | to float32 | CPU s a batch | first batch, s |",
        "|---|---|---|--:|--:|--:|--:|",
    ]
    for row in rows:
        cells = [row["score_function"], row["autocast"], str(row["compile"]).lower()]
        cells += [f"{1000 * row['seconds']:.0f}", f"{row['ratio']:.2f}", f"{row['cpu_seconds']:.2f}"]
        lines.append("| " + " | ".join([*cells, f"{row['first_seconds']:.1f}"]) + " |")
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print and write."""
    args = build_parser().parse_args(words)
    rows: list[dict[str, Any]] = []
    try:
        for name in args.score_functions.split(","):
            load = os.getloadavg()[0]
            rows += [{**row, "load_before": load} for row in measure_all(args, name)]
            if args.json:
                figures = {"machine": describe_machine(), "settings": {**vars(args), "json": str(args.json)}}
                args.json.write_text(json.dumps({**figures, "rows": rows}, indent=1) + "\n", encoding="utf-8")
            print(f"{name}: measured", file=sys.stderr, flush=True)
    except (DglkgeError, OSError) as error:
        print(f"dense_precision.py: {error}", file=sys.stderr)
        return 2 if isinstance(error, DglkgeError) else 1
    print(report(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
