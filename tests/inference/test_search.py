"""Names of queries, and predictions and similar entities against scoring every candidate by itself."""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dglkge.checkpoint import open_checkpoint
from dglkge.data.known_triples import KnownTriples
from dglkge.data.vocabulary import RelationVocabulary, Vocabulary
from dglkge.errors import InputError
from dglkge.inference import search
from dglkge.inference.choices import ALL, CANDIDATES, SEEN, Known
from dglkge.inference.search import LinkQuery, best_answers, most_similar
from dglkge.inference.trained_model import TrainedModel
from dglkge.model.kge_model import build_model
from dglkge.typing import RELATION, Relation, Side
from tests.checkpoint.toy_checkpoint import RELATION_WIDTH, TWO_PAIRS, save_toy, toy_meta, toy_tables

KNOWN = np.array([[0, 0, 1], [0, 0, 2], [0, 0, 22], [4, 1, 0], [4, 1, 3], [2, 1, 3], [7, 2, 4], [1, 0, 22]])
BY_SPLIT = {
    "train": KnownTriples([KNOWN[:3]], len(TWO_PAIRS)),
    "test": KnownTriples([KNOWN[2:]], len(TWO_PAIRS)),
}
"""The third triple stands in both."""
QUERIES = [
    LinkQuery(Side.TAIL, 0, 0),
    LinkQuery(Side.HEAD, 22, 0),
    LinkQuery(Side.TAIL, 4, 1),
    LinkQuery(Side.HEAD, 3, 1),
    LinkQuery(Side.TAIL, 7, 2),
    LinkQuery(Side.TAIL, 9, 0),
    LinkQuery(Side.TAIL, 0, 0),
]


def split_of(triple):
    """Return the split of a triple, looked up one by one."""
    places = [place for place, known in enumerate(KNOWN.tolist()) if known == triple]
    return None if not places else "train" if places[0] < 3 else "test"


class Toy:
    """A checkpoint without the special values, its model, and answers by brute force."""

    def __init__(self, path, score_function="complex", reciprocal=True, num_parts=3, fill=None, **changes):
        self.meta = toy_meta(score_function, TWO_PAIRS, reciprocal, **changes)
        self.tables = toy_tables(self.meta)
        for whole in self.tables.values():
            whole.rows.nan_to_num_(posinf=1.0) if fill is None else whole.rows.fill_(fill)
        save_toy(path, self.meta, self.tables, num_parts)
        self.checkpoint = open_checkpoint(path)
        self.model = build_model(score_function, self.meta.dim, reciprocal)

    def answers(self, queries=QUERIES, k=4, known=Known.MARK, candidates=ALL):
        return best_answers(self.model, self.checkpoint, queries, k, known, candidates, BY_SPLIT)

    def expected(self, query, k, known, candidates):
        """Score every candidate as a triple of its own, in float64."""
        relation = self.meta.relations[query.relation_id]
        allowed_ids = set(KNOWN[KNOWN[:, 1] == query.relation_id, query.side.column].tolist())
        answers = []
        for id_ in range(self.meta.entity_types[relation.candidate_type(query.side)]):
            head, tail = (query.entity_id, id_) if query.side is Side.TAIL else (id_, query.entity_id)
            split = split_of([head, query.relation_id, tail])
            if (known is Known.DROP and split) or (candidates == SEEN and id_ not in allowed_ids):
                continue
            rows = (
                self.tables[relation.lhs].rows[head],
                self.tables[RELATION].rows[query.relation_id],
                self.tables[relation.rhs].rows[tail],
            )
            score = self.model.score(*(row.double()[None] for row in rows), query.side).item()
            answers.append((score, id_, split if known is Known.MARK else None))
        return sorted(answers, key=lambda pair: (-pair[0], pair[1]))[:k]


CASES = [
    (name, number % 2 == 0, list(Known)[number % 3], CANDIDATES[number // 2 % 2])
    for number, name in enumerate([*sorted(RELATION_WIDTH), "complex", "transe_l2"])
]
"""Every score function, and every pair of the other choices."""


@pytest.mark.parametrize(("score_function", "reciprocal", "known", "candidates"), CASES)
def test_against_brute_force(tmp_path, score_function, reciprocal, known, candidates):
    toy = Toy(tmp_path, score_function, reciprocal)
    answers = toy.answers(known=known, candidates=candidates)
    assert len(answers) == len(QUERIES)
    for query, got in zip(QUERIES, answers):
        expected = toy.expected(query, 4, known, candidates)
        assert [(answer.entity_id, answer.known) for answer in got] == [answer_[1:] for answer_ in expected]
        scores = [score for score, *_ in expected]
        np.testing.assert_allclose([answer.score for answer in got], scores, rtol=1e-4)


@pytest.mark.parametrize(
    ("num_parts", "block_bytes", "candidates"),
    [(1, 1, ALL), (2, 200, SEEN), (5, 1, SEEN), (5, 1 << 20, ALL), (5, 1, ALL)],
)
def test_shards_and_blocks_change_nothing(tmp_path, monkeypatch, num_parts, block_bytes, candidates):
    toy = Toy(tmp_path, num_parts=num_parts)
    monkeypatch.setattr(search, "BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(search, "QUERIES_AT_A_TIME", 2)
    for query, got in zip(QUERIES, toy.answers(k=6, known=Known.DROP, candidates=candidates)):
        expected = toy.expected(query, 6, Known.DROP, candidates)
        assert [answer.entity_id for answer in got] == [id_ for _, id_, _ in expected]


def test_numbers_of_answers(tmp_path):
    toy, query = Toy(tmp_path), [LinkQuery(Side.TAIL, 4, 1)]
    (films,) = toy.answers(query, 100, Known.DROP)
    assert sorted(answer.entity_id for answer in films) == [1, 2, 4]
    (films,) = toy.answers(query, 100)
    assert {answer.entity_id for answer in films if answer.known} == {0, 3}
    assert len(films) == 5
    assert toy.answers([]) == []
    with pytest.raises(InputError, match="the number of answers must be at least 1, got 0"):
        toy.answers(k=0)
    with pytest.raises(InputError, match="unknown choice of candidates 'sen'; did you mean 'seen'"):
        toy.answers(candidates="sen")


def test_equal_scores_stand_in_the_order_of_ids(tmp_path):
    (answers,) = Toy(tmp_path, "distmult", fill=1.0).answers([LinkQuery(Side.TAIL, 0, 0)], 23)
    assert [answer.entity_id for answer in answers] == list(range(23))


@pytest.mark.parametrize(("num_parts", "block_bytes"), [(1, 1), (3, 1 << 20)])
def test_similar_entities_against_cosines_one_by_one(tmp_path, monkeypatch, num_parts, block_bytes):
    toy = Toy(tmp_path, num_parts=num_parts)
    monkeypatch.setattr(search, "BLOCK_BYTES", block_bytes)
    ids = torch.tensor([3, 22, 3])
    rows = toy.tables["person"].rows.double().numpy()
    for id_, answers in zip(ids.tolist(), most_similar(toy.checkpoint, "person", ids, k=5)):
        cosines = rows @ rows[id_] / np.linalg.norm(rows, axis=1) / np.linalg.norm(rows[id_])
        cosines[id_] = -2
        expected = np.argsort(-cosines)[:5]
        assert [other for other, _ in answers] == expected.tolist()
        np.testing.assert_allclose([cosine for _, cosine in answers], cosines[expected], atol=1e-5)


def test_similar_entities_among_few_and_rows_of_zeros(tmp_path):
    toy = Toy(tmp_path, fill=0.0, num_people=3)
    assert most_similar(toy.checkpoint, "person", torch.tensor([1]), k=9) == [[(0, 0.0), (2, 0.0)]]
    with pytest.raises(InputError, match="at least 1, got -1"):
        most_similar(toy.checkpoint, "person", torch.tensor([1]), k=-1)


NAMES = {
    "person": Vocabulary(["Ann", "Bob", "It"], "entity"),
    "film": Vocabulary(["Brazil", "Kes", "It"], "entity"),
}
PAIRS = [("likes", "person", "person"), ("made", "person", "film")]
PAIRS += [("likes", "person", "film"), ("likes", "film", "film")]


@pytest.mark.parametrize(
    ("side", "entity", "relation", "expected"),
    [
        (Side.TAIL, "Bob", "made", (1, 1)),
        (Side.HEAD, "Kes", "made", (1, 1)),
        (Side.TAIL, "Ann", "likes (person → film)", (0, 2)),
        (Side.HEAD, "It", "likes (film → film)", (2, 3)),
        # The entity settles which relation.
        (Side.TAIL, "Kes", "likes", (1, 3)),
        (Side.HEAD, "Ann", "likes", (0, 0)),
        (Side.TAIL, "Ann", "likes", "say which: 'likes (person → person)', 'likes (person → film)'"),
        (Side.TAIL, "Anne", "made", "unknown entity 'Anne'; did you mean 'Ann'"),
        (Side.TAIL, "Ann", "mad", "unknown relation 'mad'; did you mean 'made'"),
        (Side.TAIL, "Kes", "made", "unknown entity 'Kes'"),
    ],
)
def test_names_of_queries(side, entity, relation, expected):
    relations = RelationVocabulary([Relation(*pair) for pair in PAIRS])
    model = TrainedModel(SimpleNamespace(relations=relations, vocabulary=NAMES.__getitem__))
    if isinstance(expected, tuple):
        assert model.link_query(side, entity, relation) == LinkQuery(side, *expected)
        return
    with pytest.raises(InputError, match=re.escape(expected)):
        model.link_query(side, entity, relation)
