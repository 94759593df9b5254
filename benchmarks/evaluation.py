"""Speed of filtered ranking, beside the plain matrix product that it needs at least.

    python benchmarks/evaluation.py --dataset datasets/fb15k237
    python benchmarks/evaluation.py --num-entities 100000 --num-triples 2000 --dim 200

The rows are random: speed does not depend on what was learned. The peer, in the same run, is the plain loop:
a product of a thousand queries with all entities, known answers overwritten, comparisons counted. Figures go
to stdout and, with --output, to a JSON file; --markdown prints them as a row of a table.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch

from dglkge.data.dataset import Dataset
from dglkge.data.known_triples import KnownTriples
from dglkge.evaluation.evaluator import RankingEvaluator
from dglkge.evaluation.metrics import Protocol
from dglkge.model.kge_model import KgeModel, build_model
from dglkge.typing import RELATION, Relation, Side

PLAIN_BATCH = 1000
PRODUCT_TILE = 1024
PRODUCT_SECONDS = 2.0
"""Time for which the plain product is measured."""


class RandomRows:
    """Random rows for every table, whole in memory."""

    def __init__(self, model: KgeModel, num_rows: dict[str, int]) -> None:
        self.tables = {
            table: model.initial_rows(table, torch.arange(count), seed=0, scale=1.0)
            for table, count in num_rows.items()
        }

    def gather(self, table: str, ids: torch.Tensor) -> torch.Tensor:
        """Return rows by original id."""
        return self.tables[table][ids]


class WholeTable:
    """All rows of one table, in the order of their ids."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows
        self.original_ids = torch.arange(len(rows))

    def locate(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the ids: row i is entity i."""
        return ids


def random_graph(args: argparse.Namespace) -> tuple[list[Relation], dict[str, int], list[np.ndarray]]:
    """Draw triples of one entity type."""
    random = np.random.default_rng(0)
    relations = [Relation(f"relation{i}", "entity", "entity") for i in range(args.num_relations)]
    ids = random.integers(
        [args.num_entities, args.num_relations, args.num_entities], size=(args.num_triples, 3)
    )
    return relations, {"entity": args.num_entities}, [ids]


def read_graph(args: argparse.Namespace) -> tuple[list[Relation], dict[str, int], list[np.ndarray]]:
    """Open a dataset folder; its test split is ranked."""
    dataset = Dataset.open(args.dataset)
    counts = {entity_type: dataset.num_entities(entity_type) for entity_type in dataset.entity_types}
    splits = [np.asarray(dataset.split(name)) for name in ("train", "valid", "test")]
    return dataset.relations.relations, counts, splits


def plain_loop(
    model: KgeModel, rows: RandomRows, relations: list[Relation], known: KnownTriples, triples: np.ndarray
) -> tuple[float, float]:
    """Rank in the plain way, float32, ties counted half; return seconds and the mean reciprocal rank."""
    start, reciprocal_ranks = time.perf_counter(), []
    for side in Side:
        for pair in sorted({(relation.lhs, relation.rhs) for relation in relations}):
            joined = np.array([(relation.lhs, relation.rhs) == pair for relation in relations])
            joined_triples = triples[joined[triples[:, 1]]]
            anchor_type, candidate_type = pair if side is Side.TAIL else pair[::-1]
            candidates = rows.tables[candidate_type]
            for first in range(0, len(joined_triples), PLAIN_BATCH):
                batch = torch.from_numpy(joined_triples[first : first + PLAIN_BATCH])
                anchors, answers = batch[:, side.anchor_column], batch[:, side.column]
                query = model.query(
                    rows.gather(anchor_type, anchors), rows.gather(RELATION, batch[:, 1]), side
                )
                scores = model.compare(query, candidates)
                # Kept aside: the next line overwrites all known answers, the right one among them.
                true = scores.gather(1, answers[:, None])
                query_index, known_ids = known.answers(side, anchors.numpy(), batch[:, 1].numpy())
                scores[torch.from_numpy(query_index), torch.from_numpy(known_ids)] = -torch.inf
                scores.scatter_(1, answers[:, None], true)
                # The right answer equals itself, so it is not a tie.
                ties = ((scores == true).sum(1) - 1) / 2
                reciprocal_ranks.append(1 / (1 + (scores > true).sum(1) + ties))
    return time.perf_counter() - start, float(torch.cat(reciprocal_ranks).double().mean())


def product_seconds_per_score(model: KgeModel) -> float:
    """Measure a plain torch.matmul of the evaluation's tiles."""
    query, candidates = torch.randn(2, PRODUCT_TILE, model.dim)
    # Not timed: the first product starts the threads.
    query @ candidates.T
    start, num_products = time.perf_counter(), 0
    while time.perf_counter() - start < PRODUCT_SECONDS:
        query @ candidates.T
        num_products += 1
    return (time.perf_counter() - start) / num_products / PRODUCT_TILE**2


def measure(args: argparse.Namespace) -> dict[str, object]:
    """Rank once as a warm-up, and once timed."""
    relations, counts, splits = read_graph(args) if args.dataset else random_graph(args)
    model = build_model(args.score_function, args.dim, args.reciprocal)
    rows = RandomRows(model, {**counts, RELATION: len(relations)})
    shards = {entity_type: [WholeTable(rows.tables[entity_type])] for entity_type in counts}
    known = KnownTriples(splits, len(relations))
    evaluator = RankingEvaluator(model, relations, Protocol())
    # Warm-up, which also builds the index of known answers.
    evaluator.evaluate(splits[-1][:100], known, rows, shards)
    start = time.perf_counter()
    result = evaluator.evaluate(splits[-1], known, rows, shards)
    seconds = time.perf_counter() - start
    ranked = [relations[relation] for relation in splits[-1][:, 1]]
    num_scores = sum(counts[relation.candidate_type(side)] for relation in ranked for side in Side)
    product_seconds = product_seconds_per_score(model) * num_scores
    plain_seconds, plain_mrr = plain_loop(model, rows, relations, known, splits[-1])
    return {
        "graph": str(args.dataset or "random"),
        "score_function": args.score_function,
        "dim": args.dim,
        "num_threads": torch.get_num_threads(),
        "num_queries": result.both.num_queries,
        "seconds": round(seconds, 3),
        "queries_per_second": round(result.both.num_queries / seconds),
        "scores_per_second": round(num_scores / seconds),
        "product_seconds": round(product_seconds, 3),
        "share_of_product_limit": round(product_seconds / seconds, 3),
        "plain_loop_seconds": round(plain_seconds, 3),
        "times_faster_than_plain_loop": round(plain_seconds / seconds, 2),
        "mrr": round(result.both.mrr, 6),
        "plain_loop_mrr": round(plain_mrr, 6),
    }


def main() -> None:
    """Measure and show."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dataset", type=Path, help="dataset folder; without it the graph is random")
    parser.add_argument("--num-entities", type=int, default=14_541)
    parser.add_argument("--num-relations", type=int, default=237)
    parser.add_argument("--num-triples", type=int, default=20_466)
    parser.add_argument("--score-function", default="complex")
    parser.add_argument("--dim", type=int, default=400)
    parser.add_argument("--reciprocal", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--num-threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path, help="JSON file for the figures")
    parser.add_argument("--markdown", action="store_true", help="print a table's header and row as well")
    args = parser.parse_args()
    torch.set_num_threads(args.num_threads)
    figures = measure(args)
    for name, value in figures.items():
        print(f"{name:24} {value}")
    print("(the limit is the time of the products alone, every query counted; equal queries are scored once)")
    if args.markdown:
        shown = {name: value for name, value in figures.items() if name not in ("mrr", "plain_loop_mrr")}
        print(f"| {' | '.join(shown)} |\n|{'--|' * len(shown)}\n| {' | '.join(map(str, shown.values()))} |")
    if args.output:
        args.output.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
