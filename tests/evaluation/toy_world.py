"""Small random graphs with rows full of ties, and the ranks that plain Python finds for them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from dglkge.evaluation.evaluator import RankingEvaluator
from dglkge.evaluation.metrics import Protocol, RankingResult
from dglkge.model.kge_model import KgeModel, build_model
from dglkge.typing import RELATION, Relation, Side
from tests.model.score_oracle import fitting_dim, float64_score

RELATIONS = [Relation("knows", "person", "person"), Relation("visits", "person", "town")]


class MemoryRows:
    def __init__(self, tables: dict[str, torch.Tensor]) -> None:
        self.tables = tables

    def gather(self, table: str, ids: torch.Tensor) -> torch.Tensor:
        return self.tables[table][ids]


class MemoryShard:
    def __init__(self, table: torch.Tensor, ids: torch.Tensor) -> None:
        self.original_ids, self.rows = ids, table[ids]
        self._place = torch.full((len(table),), -1)
        self._place[ids] = torch.arange(len(ids))

    def locate(self, ids: torch.Tensor) -> torch.Tensor:
        return self._place[ids]


def split_rows(table: torch.Tensor, num_shards: int, seed: int = 0) -> list[MemoryShard]:
    """Deal a table's rows out to shards at random; some may get none."""
    random = np.random.default_rng(seed)
    owner, order = random.integers(num_shards, size=len(table)), random.permutation(len(table))
    return [MemoryShard(table, torch.from_numpy(order[owner[order] == shard])) for shard in range(num_shards)]


@dataclass
class World:
    """A model (and its score function's name), its rows, and triples over two entity types."""

    name: str
    model: KgeModel
    tables: dict[str, torch.Tensor]
    known: np.ndarray
    triples: np.ndarray
    options: dict[str, Any] = field(default_factory=dict)  # of the evaluator
    bonus: dict[tuple[Side, int, int, int], float] = field(default_factory=dict)
    """Added to scores, by side, given entity, relation and candidate."""

    def evaluate(self, protocol: Protocol, num_shards: int = 1, known=None, **more):
        """Rank with the evaluator, the rows dealt out to some shards."""
        types = ("person", "town")
        shards = {type_: split_rows(self.tables[type_], num_shards, seed=num_shards) for type_ in types}
        evaluator = RankingEvaluator(self.model, RELATIONS, protocol, **self.options, bonus=self._bonus)
        return evaluator.evaluate(self.triples, known, MemoryRows(self.tables), shards, **more)

    def _bonus(self, side: Side, anchors: np.ndarray, relations: np.ndarray):
        """Return the pairs of queries in no order."""
        queries = list(enumerate(zip(anchors.tolist(), relations.tolist())))
        rows = [
            (query, candidate, value)
            for (bonus_side, *pair, candidate), value in self.bonus.items()
            for query, anchor_and_relation in queries
            if bonus_side is side and tuple(pair) == anchor_and_relation
        ]
        places = np.array([row[:2] for row in rows], np.int64).reshape(-1, 2)
        return places[:, 0], places[:, 1], np.array([row[2] for row in rows])

    def draw_bonus(self, seed: int) -> None:
        """Give a third of all candidates of the tested queries, true answers too, one of three numbers."""
        draw = np.random.default_rng(seed)
        for side in Side:
            for triple in self.triples.tolist():
                candidate_type = RELATIONS[triple[1]].candidate_type(side)
                is_drawn = draw.random(len(self.tables[candidate_type])) < 1 / 3
                for candidate in np.flatnonzero(is_drawn).tolist():
                    key = side, triple[side.anchor_column], triple[1], candidate
                    self.bonus[key] = float(draw.choice([0.5, 1.0, 4.0]))

    def brute_force(self, side, triple, filtered, candidates=None):
        """Count greater, equal and all competing candidates of one query, one Python float at a time."""
        candidate_type = RELATIONS[triple[1]].candidate_type(side)
        known = {tuple(row) for row in self.known.tolist()} if filtered else set()
        true_score = self.score(triple, side)
        greater = equal = negatives = 0
        for candidate in range(len(self.tables[candidate_type])) if candidates is None else candidates:
            corrupted = triple.copy()
            corrupted[side.column] = candidate
            if candidate == triple[side.column] or tuple(corrupted.tolist()) in known:
                continue
            score = self.score(corrupted, side)
            greater += score > true_score
            equal += score == true_score
            negatives += 1
        return greater, equal, negatives

    def score(self, triple: np.ndarray, side: Side) -> float:
        relation = RELATIONS[triple[1]]
        head, tail = self.tables[relation.lhs][triple[0]], self.tables[relation.rhs][triple[2]]
        row = self.tables[RELATION][triple[1]]
        if self.model.reciprocal:
            row = row.chunk(2)[0 if side is Side.TAIL else 1]
            head, tail = (head, tail) if side is Side.TAIL else (tail, head)
        key = int(triple[side.anchor_column]), int(triple[1]), int(triple[side.column])
        added = self.bonus.get((side, *key), 0.0)
        return float64_score(self.name, head.tolist(), row.tolist(), tail.tolist()) + added


def assert_same(result: RankingResult, expected: RankingResult) -> None:
    for side in Side:
        assert result.ranks[side].tolist() == expected.ranks[side].tolist()
        assert result.num_negatives[side].tolist() == expected.num_negatives[side].tolist()


def toy_world(name, reciprocal, dim=4, num_people=23, num_towns=7, seed=0, grid=False):
    """Draw a world: with ``grid`` of small integers; else normal, a third of the rows copies, some 0."""
    random = np.random.default_rng(seed)
    dim = fitting_dim(name, dim)
    model = build_model(name, dim, reciprocal)

    def rows(num_rows: int, width: int) -> torch.Tensor:
        if grid:
            return torch.from_numpy(random.integers(-2, 3, size=(num_rows, width)).astype(np.float32))
        drawn = random.normal(size=(num_rows, width)).astype(np.float32)
        copies = random.random(num_rows) < 0.35
        drawn[copies] = drawn[random.integers(num_rows, size=copies.sum())]
        drawn[random.random(num_rows) < 0.1] = 0
        return torch.from_numpy(drawn)

    tables = {
        "person": rows(num_people, dim),
        "town": rows(num_towns, dim),
        RELATION: model.set_times(rows(len(RELATIONS), model.relation_width), torch.zeros(len(RELATIONS))),
    }

    def triples(num_triples: int) -> np.ndarray:
        relation = random.integers(len(RELATIONS), size=num_triples)
        heads = random.integers(num_people, size=num_triples)
        tails = random.integers(np.where(relation == 0, num_people, num_towns))
        return np.stack([heads, relation, tails], axis=1)

    tested = triples(int(random.integers(1, 25)))
    known = np.concatenate([tested[: len(tested) // 2], triples(60)])
    return World(name, model, tables, known, tested)
