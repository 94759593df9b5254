"""Entities that come after training: their rows by fold-in, beside training on and training from the start.

    python benchmarks/fold_in.py --triples datasets/FB15k-237 --entities 300 \
        --config dglkge/config/recipes/fb15k237/complex-1min.yaml

The semi-inductive protocol of Wikidata5M-SI (Kochsiek and Gemulla 2023): a share of the entities is held out
with all their triples, and the rest is trained, but for a twentieth of its triples, which stand for the old
graph. Of each new entity some triples with trained entities are given, K of --context, and all after the
first max(K) are asked: the trained entity is the answer, among all trained and new ones, filtered by all
known triples. The new entity as the answer is reported beside it.

fold-in K: run.add_entities, on one thread: all new entities at once, and the median of some alone, after the
first one; processor time, by an entity. mean row: of all entities. training on: data extend,
checkpoint.init_path and training.rows: touched, on the given triples alone. from the start: the same triples,
all rows anew. The last two have the greatest K.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

import dglkge
from dglkge.errors import DglkgeError, InputError
from dglkge.evaluation.metrics import Protocol
from dglkge.inference.run import Run
from dglkge.typing import Side
from inductive import ENTITY, Parts, partition, read_triples, resolve
from measuring.machine import describe_machine

ALONE = 20
"""Entities whose rows are found one by one as well."""
HEADER = (
    "| rows of new entities | MRR | Hits@10 | MRR, answer new | MRR of the old graph | time |\n"
    "|---|--:|--:|--:|--:|--:|"
)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--triples", required=True, type=Path, help="folder of train, valid and test")
    add("--config", required=True, type=Path)
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="override one field, in all runs")
    add("--held-out", type=float, default=0.1, metavar="SHARE", help="of the entities (default: 0.1)")
    add("--context", default="1,3,10", metavar="K,...", help="given triples of an entity (default: 1,3,10)")
    add("--entities", type=int, metavar="N", help="as many of the held-out ones are new (default: all)")
    add("--epochs-on", type=int, default=5, metavar="N", help="of training on (default: 5)")
    add("--seed", type=int, default=0)
    add("--trainers", type=int, default=1)
    add("--json", type=Path, help="file for all figures")
    return parser


def contexts(parts: Parts, sizes: Sequence[int], most: int | None, seed: int) -> tuple[Any, pd.DataFrame]:
    """Return the given triples by the number of them for an entity, and the asked ones."""
    about = pd.concat([parts.context, parts.queries], ignore_index=True)
    new = set(parts.new)
    is_new_head = about["head"].isin(new)
    about = about[is_new_head != about["tail"].isin(new)].sample(frac=1, random_state=seed)
    about["new"] = about["head"].where(about["head"].isin(new), about["tail"])
    about["place"] = about.groupby("new").cumcount()
    counts = about.groupby("new")["place"].max()
    fitting = sorted(counts[counts >= max(sizes)].index)
    entities = np.random.default_rng(seed).permutation(fitting)[:most]
    about = about[about["new"].isin(set(entities))]
    context = {size: about[about["place"] < size].reset_index(drop=True) for size in sizes}
    return context, about[about["place"] >= max(sizes)].reset_index(drop=True)


def measure(run: Run, queries: pd.DataFrame, name: str, seconds: float) -> dict[str, Any]:
    """Rank the asked triples and those of the old graph."""
    triples = resolve(queries, run)
    result = run.evaluate(Protocol(split="asked"), triples, also_known=[triples])
    is_head = queries["head"].eq(queries["new"]).to_numpy()
    tails, heads = (np.asarray(result.ranks[side], dtype=float) for side in (Side.TAIL, Side.HEAD))
    known, new = np.where(is_head, tails, heads), np.where(is_head, heads, tails)
    old = run.evaluate("valid").to_dict()["both"]["mrr"]
    return {
        "name": name, "mrr": float(np.mean(1 / known)), "hits@10": float(np.mean(known <= 10)),
        "mrr_new": float(np.mean(1 / new)), "mrr_old": old, "seconds": seconds,
    }  # fmt: skip


def timed(make: Callable[[], Run]) -> tuple[Run, float]:
    """Return a run, and the seconds it took to make it."""
    start = time.perf_counter()
    return make(), time.perf_counter() - start


def processor_seconds(make: Callable[[], Run]) -> tuple[Run, float]:
    """Return a run, and the processor time it took to make it: the machine may have other work."""
    start = time.process_time()
    return make(), time.process_time() - start


def with_mean_rows(run: Run, names: Sequence[str]) -> Run:
    """Return the run with the mean row for each new entity."""
    rows = torch.cat([shard.rows for shard in run.tables.shards(ENTITY)]).mean(0)
    made = run.checkpoint.with_new_rows({ENTITY: (list(names), rows.repeat(len(names), 1))})
    return Run(made, run._dataset_path)


def compare(args: argparse.Namespace, work: Path) -> tuple[list[dict[str, Any]], str]:
    """Make all rows of the table."""
    from dglkge.partition.extend import extend_dataset

    sizes = [int(size) for size in args.context.split(",")]
    parts = Parts(read_triples(args.triples), args.held_out, 0.5, args.seed)
    context, queries = contexts(parts, sizes, args.entities, args.seed)
    names = sorted(set(queries["new"]))
    data = partition(parts, None, work)
    settings = {"evaluation.split": "none", "training.progress": "never", "seed": args.seed}
    settings.update(word.split("=", 1) for word in args.set)

    def train(dataset: Path, name: str, **more: Any) -> Run:
        run_settings = {**settings, **{field.replace("__", "."): value for field, value in more.items()}}
        return dglkge.train(
            str(dataset),
            output=work / name,
            config=args.config,
            settings=run_settings,
            trainers=args.trainers,
        )

    run, seconds = timed(lambda: train(data, "run"))
    old = run.evaluate("valid").to_dict()["both"]["mrr"]
    rows = [{"name": "none yet", "mrr_old": old, "seconds": seconds}]

    def add(name: str, made: Run, seconds: float, **more: float) -> None:
        rows.append({**measure(made, queries, name, seconds), **more})
        print(line(rows[-1], len(names)), file=sys.stderr, flush=True)

    add("mean row", with_mean_rows(run, names), 0.0)
    threads = torch.get_num_threads()
    for size in sizes:
        torch.set_num_threads(1)
        frame = context[size]
        some = [frame[frame["new"] == name] for name in names[:ALONE]]
        alone = [processor_seconds(lambda triples=triples: run.add_entities(triples))[1] for triples in some]  # type: ignore[misc]
        made, seconds = processor_seconds(lambda frame=frame: run.add_entities(frame))  # type: ignore[misc]
        torch.set_num_threads(threads)
        add(f"fold-in {size}", made, seconds, alone=float(np.median(alone)))
    path = work / "given.tsv"
    context[max(sizes)][["head", "relation", "tail"]].to_csv(path, sep="\t", header=False, index=False)
    extend_dataset(data, [path], work / "extended", "given")
    going_on = {
        "checkpoint__init_path": str(work / "run"), "training__edge_sets": ["given"],
        "training__rows": "touched", "training__num_epochs": args.epochs_on,
    }  # fmt: skip
    add("training on", *timed(lambda: train(work / "extended", "on", **going_on)))
    add("from the start", *timed(lambda: train(work / "extended", "anew")))
    title = f"{len(names)} new entities of {len(parts.new)} held out, {len(queries)} triples asked"
    return rows, title


def line(row: dict[str, Any], count: int) -> str:
    """Return a line of the table."""
    figures = [f"{row[name]:.3f}" if name in row else "" for name in ("mrr", "hits@10", "mrr_new", "mrr_old")]
    seconds = row["seconds"]
    shown = f"{seconds:.0f} s"
    if "alone" in row:
        shown = f"{1000 * seconds / count:.0f} ms an entity, {1000 * row['alone']:.0f} ms alone"
    return f"| {row['name']} | {' | '.join(figures)} | {shown} |"


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print and write."""
    args = build_parser().parse_args(words)
    work = Path(tempfile.mkdtemp(prefix="fold_in_"))
    try:
        rows, title = compare(args, work)
    except DglkgeError as error:
        print(f"fold_in.py: {error}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    finally:
        shutil.rmtree(work, ignore_errors=True)
    count = int(title.split()[0])
    print("\n".join([title, HEADER, *(line(row, count) for row in rows)]))
    if args.json:
        figures = {"machine": describe_machine(), "title": title, "rows": rows}
        args.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
