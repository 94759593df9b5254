"""All missing triples: time by size of the graph, and held-out triples found, at which precision.

    python benchmarks/completion.py runs/fb15k237                precision and recall of the test triples
    python benchmarks/completion.py --growth 10000,100000        seconds by entities, in bfloat16 and float32

A run must be calibrated: for FB15k-237 ``dglkge calibrate RUN --positive-rate 6e-6 --corruptions 20``. For
the growth ComplEx rows are made, D = 200, whose n-th principal axis has 1 / n of the variance of the first,
with one relation; 4,096 heads are searched in one thread, and ten in a million of the possible triples are
above the limit. Seconds of the process are beside those of the clock: the machine may be busy.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import dglkge
from dglkge.inference.links import completion
from dglkge.inference.links.missing_links import CANDIDATE_PANEL, LinkSearch
from dglkge.model.kge_model import build_model
from dglkge.typing import Side
from measuring.machine import describe_machine

DIM = 200
QUERIES = 4096
"""Heads that are searched for a time; the time of all heads is in proportion."""


def grown(num_entities: int, is_narrow: bool) -> dict[str, Any]:
    """Search some heads of a relation among all entities, in one thread."""
    draws = torch.Generator().manual_seed(0)
    axes = torch.linalg.qr(torch.randn(DIM, DIM, generator=draws)).Q
    scales = 3 * torch.arange(1, DIM + 1) ** -0.5
    rows = (torch.randn(num_entities, DIM, generator=draws) * scales) @ axes
    relation = torch.randn(1, DIM, generator=draws)
    model = build_model("complex", DIM, reciprocal=False)
    query = model.query(rows[:QUERIES].double(), relation.double().expand(QUERIES, -1), Side.TAIL)
    sample = query[:512].float() @ rows[-4096:].T
    least = float(sample.flatten().sort(descending=True).values[len(sample) * 4096 // 100_000])
    norm = float(rows.norm(dim=1).max())
    none = torch.empty(0, dtype=torch.int64)
    start, begin = time.perf_counter(), time.process_time()
    search = LinkSearch(model, query, norm, (none, none), least, is_narrow=is_narrow)
    for first in range(0, num_entities, CANDIDATE_PANEL):
        ids = torch.arange(first, min(first + CANDIDATE_PANEL, num_entities))
        search.add(ids, rows[first : first + CANDIDATE_PANEL])
    links = search.take()
    return {
        "entities": num_entities,
        "bfloat16": is_narrow,
        "links": len(links),
        "seconds": time.perf_counter() - start,
        "cpu_seconds": time.process_time() - begin,
        "pairs_per_cpu_second": QUERIES * num_entities / (time.process_time() - begin),
        "cpu_hours_all_heads": (time.process_time() - begin) * num_entities / QUERIES / 3600,
    }


def complete(path: str, threads: int, **limits: Any) -> dict[str, Any]:
    """Complete a run with its test split held out."""
    run = dglkge.open_run(path)
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        start, begin = time.perf_counter(), time.process_time()
        question = completion.plan_completion(run, **limits, held_out="test")
        summary = completion.write_completion(question, Path(folder) / "missing.parquet")
    return {
        **limits,
        "seconds": time.perf_counter() - start,
        "cpu_seconds": time.process_time() - begin,
        **{name: value for name, value in summary.items() if name != "path"},
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", nargs="?", help="a calibrated run")
    parser.add_argument("--growth", default="", help="numbers of entities, separated by commas")
    parser.add_argument("--min-probability", type=float, default=0.5)
    parser.add_argument("-k", type=int, help="most tails of each pair of head and relation")
    parser.add_argument("--relation", action="append", help="only this one; may be repeated")
    parser.add_argument("--candidates", default="all", help="faiss: by an index")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    report: dict[str, Any] = {"machine": describe_machine()}
    if args.growth:
        torch.set_num_threads(1)
        with torch.no_grad():
            grown(5000, True)  # loads the compiled loops
            report["growth"] = []
            for size in map(int, args.growth.split(",")):
                for is_narrow in (True, False):
                    report["growth"].append(grown(size, is_narrow))
                    print(json.dumps(report["growth"][-1]), flush=True)
    if args.run:
        limits = {"min_probability": args.min_probability, "k": args.k, "candidates": args.candidates}
        report["found"] = complete(args.run, args.threads, relations=args.relation, **limits)
        print(json.dumps(report["found"]))
    if args.json:
        args.json.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
