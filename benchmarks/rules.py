"""Filtered MRR of a run's test split, by its embeddings alone, by rules first, and by both as one ranking.

    python benchmarks/rules.py runs/mine runs/other

Rules and their weights are those of ``dglkge evaluate --rules``. With rules first the embeddings order the
candidates of equal confidence only.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from typing import Any

import numpy as np

import dglkge
from dglkge.data.dataset_files import TEST
from dglkge.inference.rule_scores import mined, plain_rules, weighted

FIRST = 1e6
"""Weight of rules before which no difference of scores counts."""


def measure(path: str) -> dict[str, Any]:
    """Return the MRRs of a run, and the CPU seconds of mining, of choosing weights and of a ranking."""
    run, seconds = dglkge.open_run(path), [time.process_time()]
    rules = mined(run, plain_rules(run))
    seconds.append(time.process_time())
    run.bonus = weighted(run, rules)
    seconds.append(time.process_time())
    both = run.evaluate(TEST)
    seconds.append(time.process_time())
    run.bonus = replace(rules, weights=np.full_like(rules.weights, FIRST))
    first = run.evaluate(TEST)
    run.bonus = None
    return {
        "run": path,
        "data": run.tables.meta.dataset_name,
        "chains": sum(map(len, rules.rules.values())),
        **dict(zip(("mining s", "weights s", "ranking s"), np.diff(seconds).round().astype(int).tolist())),
        "model MRR": round(run.evaluate(TEST).both.mrr, 4),
        "rules first MRR": round(first.both.mrr, 4),
        "both MRR": round(both.both.mrr, 4),
    }


def main() -> None:
    """Measure the runs, and print a table or JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", help="folders of runs, whose data sets have splits valid and test")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    results = [measure(path) for path in args.runs]
    if args.json:
        print(json.dumps(results, indent=2))
        return
    print(" | ".join(results[0]))
    for result in results:
        print(" | ".join(map(str, result.values())))


if __name__ == "__main__":
    main()
