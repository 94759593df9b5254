"""Filtered MRR of a run, of rules mined from its training triples, and of both as one ranking.

    python benchmarks/rules.py runs/mine runs/other

A candidate's score is that of the model plus a weight times the greatest confidence of a rule that leads to
it (Meilicke et al. 2021). The weight is the best of some on the valid split; the test split is ranked once.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import dglkge
from dglkge.data.dataset_files import SPLITS, TEST, TRAIN, VALID
from dglkge.inference.rules import Rule, RuleGraph, mirrored
from dglkge.typing import RELATION, Side

WEIGHTS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0)
QUERIES_AT_A_TIME = 256
MOST_PAIRS = 1 << 22
"""Pairs of a query and a candidate that a chain may lead to; of more, evenly spaced ones."""


@dataclass
class Block:
    """Queries of a relation and side: scores, confidences, and which candidates are other answers (b, N)."""

    scores: np.ndarray
    confidences: np.ndarray
    excluded: np.ndarray
    answers: np.ndarray

    def reciprocal_ranks(self, model: float, rules: float) -> np.ndarray:
        """Return 1 / rank of each answer (b,), realistic ties, by a weighted sum."""
        total = model * self.scores + rules * self.confidences
        total[self.excluded] = -np.inf
        answer = total[np.arange(len(total)), self.answers][:, None]
        return 1 / (0.5 + (total > answer).sum(1) + 0.5 * (total == answer).sum(1))


class Ranking:
    """A run and the rules of its relations."""

    def __init__(self, path: str, samples: int, most: int, least: float) -> None:
        self.run = dglkge.open_run(path)
        self._relations = self.run.tables.relations.relations
        self._graph = RuleGraph(self.run.known_of((TRAIN,)), self._relations)
        train, draw = self.run.dataset.split(TRAIN), np.random.default_rng(0)
        self.rules: dict[int, list[Rule]] = {}
        for relation_id in range(len(self._relations)):
            own = train[train[:, 1] == relation_id]
            sample = own[draw.permutation(len(own))[:samples]]
            found = self._graph.rules(relation_id, sample, most)
            self.rules[relation_id] = [rule for rule in found if rule.confidence >= least]

    def blocks(self, split: str, limit: int | None) -> Iterator[Block]:
        """Yield the queries of a split."""
        triples = self.run.dataset.split(split)[:limit]
        for relation_id in np.unique(triples[:, 1]).tolist():
            part = triples[triples[:, 1] == relation_id]
            for start in range(0, len(part), QUERIES_AT_A_TIME):
                for side in Side:
                    columns = np.ascontiguousarray(part[start : start + QUERIES_AT_A_TIME].T)
                    anchors, answers = columns[side.anchor_column], columns[side.column]
                    yield self._block(side, relation_id, anchors, answers)

    def _block(self, side: Side, relation_id: int, anchors: np.ndarray, answers: np.ndarray) -> Block:
        relation, tables = self._relations[relation_id], self.run.tables
        ids = torch.full((len(anchors),), relation_id)
        rows = tables.gather(relation.anchor_type(side), torch.from_numpy(anchors))
        candidate_type = relation.candidate_type(side)
        every = tables.gather(candidate_type, torch.arange(len(tables.vocabulary(candidate_type))))
        with torch.no_grad():
            query = self.run.model.query(rows, tables.gather(RELATION, ids), side, ids)
            scores = self.run.model.compare(query, every).numpy()
        confidences = np.zeros_like(scores)
        for rule in self.rules[relation_id]:
            steps = rule.steps if side is Side.TAIL else mirrored(rule.steps)
            place, reached = self._graph.follow(anchors, steps, MOST_PAIRS)
            confidences[place, reached] = np.maximum(confidences[place, reached], rule.confidence)
        excluded = np.zeros(scores.shape, bool)
        known = self.run.known_of(SPLITS).answers(side, anchors, ids.numpy())
        excluded[known] = True
        excluded[np.arange(len(answers)), answers] = False
        return Block(scores, confidences, excluded, answers)


def mean_ranks(blocks: Iterator[Block], weights: Sequence[tuple[float, float]]) -> np.ndarray:
    """Return the MRR of each pair of weights of model and rules."""
    ranks = [[block.reciprocal_ranks(*pair) for pair in weights] for block in blocks]
    return np.array([np.concatenate(column).mean() for column in zip(*ranks)])


def measure(path: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the MRRs of a run."""
    start = time.process_time()
    ranking = Ranking(path, args.samples, args.rules, args.least)
    mined = time.process_time() - start
    on_valid = mean_ranks(ranking.blocks(VALID, args.limit), [(1.0, weight) for weight in WEIGHTS])
    weight = WEIGHTS[int(np.argmax(on_valid))]
    model, rules, both = mean_ranks(ranking.blocks(TEST, args.limit), [(1.0, 0.0), (0.0, 1.0), (1.0, weight)])
    return {
        "run": path,
        "data": ranking.run.tables.meta.dataset_name,
        "model": ranking.run.tables.meta.score_function,
        "rules": sum(map(len, ranking.rules.values())),
        "mining CPU s": round(mined),
        "weight": weight,
        "model MRR": round(float(model), 4),
        "rules MRR": round(float(rules), 4),
        "both MRR": round(float(both), 4),
    }


def main() -> None:
    """Measure the runs, and print a table or JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", help="folders of runs, whose data sets have splits valid and test")
    parser.add_argument(
        "--samples", type=int, default=100, help="training triples of a relation that are followed"
    )
    parser.add_argument("--rules", type=int, default=100, help="chains of a relation that are measured")
    parser.add_argument("--least", type=float, default=0.01, help="least confidence of a rule")
    parser.add_argument("--limit", type=int, help="triples of each split (default: all)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    results = [measure(path, args) for path in args.runs]
    if args.json:
        print(json.dumps(results, indent=2))
        return
    print(" | ".join(results[0]))
    for result in results:
        print(" | ".join(map(str, result.values())))


if __name__ == "__main__":
    main()
