"""Predictions and similar entities against scoring every candidate by itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dglkge.checkpoint import open_checkpoint
from dglkge.data.known_triples import KnownTriples
from dglkge.errors import InputError
from dglkge.inference import search
from dglkge.inference.choices import ALL, CANDIDATES, SEEN, Known
from dglkge.inference.search import LinkPredictor, LinkQuery, most_similar
from dglkge.model.kge_model import build_model
from dglkge.typing import RELATION, Side
from tests.checkpoint.toy_checkpoint import RELATION_WIDTH, TWO_PAIRS, save_toy, toy_meta, toy_tables

KNOWN = np.array([[0, 0, 1], [0, 0, 2], [0, 0, 22], [4, 1, 0], [4, 1, 3], [2, 1, 3], [7, 2, 4], [1, 0, 22]])
QUERIES = [
    LinkQuery(Side.TAIL, 0, 0),
    LinkQuery(Side.HEAD, 22, 0),
    LinkQuery(Side.TAIL, 4, 1),
    LinkQuery(Side.HEAD, 3, 1),
    LinkQuery(Side.TAIL, 7, 2),
    LinkQuery(Side.TAIL, 9, 0),
    LinkQuery(Side.TAIL, 0, 0),
]


def finite_tables(meta):
    """Draw tables without the special values."""
    tables = toy_tables(meta)
    for whole in tables.values():
        whole.rows.nan_to_num_(posinf=1.0)
    return tables


def known_by_split(meta):
    """Put the known triples into two splits; the third stands in both."""
    num_relations = len(meta.relations)
    return {
        "train": KnownTriples([KNOWN[:3]], num_relations),
        "test": KnownTriples([KNOWN[2:]], num_relations),
    }


def split_of(triple):
    """Return the split of a triple, looked up one by one."""
    places = [place for place, known in enumerate(KNOWN.tolist()) if known == triple]
    return None if not places else "train" if places[0] < 3 else "test"


def make(path, score_function="complex", reciprocal=True, num_parts=3):
    meta = toy_meta(score_function, TWO_PAIRS, reciprocal)
    tables = finite_tables(meta)
    save_toy(path, meta, tables, num_parts)
    checkpoint = open_checkpoint(path)
    model = build_model(score_function, meta.dim, reciprocal)
    shards = {table: checkpoint.shards(table) for table in meta.entity_types}
    predictor = LinkPredictor(model, meta.relations, checkpoint, shards, known_by_split(meta))
    return predictor, model, meta, tables


def brute_force(model, meta, tables, query, k, known, candidates=ALL):
    """Score every candidate as a triple of its own, in float64."""
    relation = meta.relations[query.relation_id]
    seen = set(KNOWN[KNOWN[:, 1] == query.relation_id, query.side.column].tolist())
    found = []
    for id_ in range(meta.entity_types[relation.candidate_type(query.side)]):
        head, tail = (query.entity_id, id_) if query.side is Side.TAIL else (id_, query.entity_id)
        split = split_of([head, query.relation_id, tail])
        if (known is Known.DROP and split) or (candidates == SEEN and id_ not in seen):
            continue
        rows = (
            tables[relation.lhs].rows[head],
            tables[RELATION].rows[query.relation_id],
            tables[relation.rhs].rows[tail],
        )
        score = model.score(*(row.double()[None] for row in rows), query.side).item()
        found.append((score, id_, split if known is Known.MARK else None))
    return sorted(found, key=lambda one: (-one[0], one[1]))[:k]


CASES = [
    (name, number % 2 == 0, list(Known)[number % 3], CANDIDATES[number // 2 % 2])
    for number, name in enumerate([*sorted(RELATION_WIDTH), "complex", "transe_l2"])
]
"""Every score function, and every pair of the other choices."""


@pytest.mark.parametrize(("score_function", "reciprocal", "known", "candidates"), CASES)
def test_against_brute_force(tmp_path, score_function, reciprocal, known, candidates):
    predictor, model, meta, tables = make(tmp_path, score_function, reciprocal)
    answers = predictor.predict(QUERIES, 4, known, candidates)
    assert len(answers) == len(QUERIES)
    for query, got in zip(QUERIES, answers):
        expected = brute_force(model, meta, tables, query, 4, known, candidates)
        assert [answer.entity_id for answer in got] == [id_ for _, id_, _ in expected]
        assert [answer.known for answer in got] == [split for _, _, split in expected]
        np.testing.assert_allclose(
            [answer.score for answer in got], [score for score, _, _ in expected], rtol=1e-4
        )


@pytest.mark.parametrize(
    ("num_parts", "block_bytes", "candidates"),
    [(1, 1, ALL), (2, 200, SEEN), (5, 1, SEEN), (5, 1 << 20, ALL), (5, 1, ALL)],
)
def test_shards_and_blocks_change_nothing(tmp_path, monkeypatch, num_parts, block_bytes, candidates):
    predictor, model, meta, tables = make(tmp_path, num_parts=num_parts)
    monkeypatch.setattr(search, "BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(search, "QUERIES_AT_A_TIME", 2)
    for query, got in zip(QUERIES, predictor.predict(QUERIES, 6, Known.DROP, candidates)):
        expected = brute_force(model, meta, tables, query, 6, Known.DROP, candidates)
        assert [answer.entity_id for answer in got] == [id_ for _, id_, _ in expected]


def test_more_answers_than_candidates(tmp_path):
    predictor, _, _, _ = make(tmp_path)
    (films,) = predictor.predict([LinkQuery(Side.TAIL, 4, 1)], k=100, known=Known.DROP)
    assert sorted(answer.entity_id for answer in films) == [1, 2, 4]
    (films,) = predictor.predict([LinkQuery(Side.TAIL, 4, 1)], k=100, known=Known.MARK)
    assert {answer.entity_id for answer in films if answer.known} == {0, 3}
    assert len(films) == 5
    assert predictor.predict([], k=3) == []


def test_equal_scores_stand_in_the_order_of_ids(tmp_path):
    meta = toy_meta("distmult", TWO_PAIRS)
    tables = finite_tables(meta)
    for whole in tables.values():
        whole.rows.fill_(1.0)
    save_toy(tmp_path, meta, tables, 3)
    checkpoint = open_checkpoint(tmp_path)
    shards = {table: checkpoint.shards(table) for table in meta.entity_types}
    predictor = LinkPredictor(build_model("distmult", 6, True), meta.relations, checkpoint, shards)
    (answers,) = predictor.predict([LinkQuery(Side.TAIL, 0, 0)], k=23)
    assert [answer.entity_id for answer in answers] == list(range(23))


def test_bad_wishes(tmp_path):
    predictor, model, meta, _ = make(tmp_path)
    with pytest.raises(InputError, match="the number of answers must be at least 1, got 0"):
        predictor.predict(QUERIES, k=0)
    bare = LinkPredictor(model, meta.relations, open_checkpoint(tmp_path), {})
    for wish in ({"known": Known.MARK}, {"candidates": SEEN}):
        with pytest.raises(InputError, match="seen candidates, and marks or drops of known answers, need"):
            bare.predict(QUERIES, **wish)
    with pytest.raises(InputError, match="unknown choice of candidates 'sen'; did you mean 'seen'"):
        predictor.predict(QUERIES, candidates="sen")


@pytest.mark.parametrize(("num_parts", "block_bytes"), [(1, 1), (3, 1 << 20)])
def test_similar_entities_against_cosines_one_by_one(tmp_path, monkeypatch, num_parts, block_bytes):
    meta = toy_meta()
    tables = toy_tables(meta)
    tables["person"].rows.nan_to_num_(posinf=1.0)
    save_toy(tmp_path, meta, tables, num_parts)
    monkeypatch.setattr(search, "BLOCK_BYTES", block_bytes)
    checkpoint = open_checkpoint(tmp_path)
    ids = torch.tensor([3, 22, 3])
    got = most_similar(checkpoint, checkpoint.shards("person"), "person", ids, k=5)
    rows = tables["person"].rows.double().numpy()
    for id_, answers in zip(ids.tolist(), got):
        cosines = rows @ rows[id_] / np.linalg.norm(rows, axis=1) / np.linalg.norm(rows[id_])
        cosines[id_] = -2
        expected = np.argsort(-cosines)[:5]
        assert [answer.entity_id for answer in answers] == expected.tolist()
        np.testing.assert_allclose([answer.score for answer in answers], cosines[expected], atol=1e-5)


def test_similar_entities_among_few_and_rows_of_zeros(tmp_path):
    meta = toy_meta(num_people=3)
    tables = toy_tables(meta)
    tables["person"].rows.zero_()
    save_toy(tmp_path, meta, tables)
    checkpoint = open_checkpoint(tmp_path)
    (answers,) = most_similar(checkpoint, checkpoint.shards("person"), "person", torch.tensor([1]), k=9)
    assert [(answer.entity_id, answer.score) for answer in answers] == [(0, 0.0), (2, 0.0)]
    with pytest.raises(InputError, match="at least 1, got -1"):
        most_similar(checkpoint, checkpoint.shards("person"), "person", torch.tensor([1]), k=-1)
