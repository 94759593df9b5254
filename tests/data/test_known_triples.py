"""Known answers against a brute-force search."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dglkge.data.known_triples import KnownTriples
from dglkge.typing import Side

NUM_ENTITIES, NUM_RELATIONS = 6, 3
TRIPLE = st.tuples(
    st.integers(0, NUM_ENTITIES - 1), st.integers(0, NUM_RELATIONS - 1), st.integers(0, NUM_ENTITIES - 1)
)
TRIPLES = st.lists(TRIPLE, max_size=60)
QUERIES = st.lists(st.tuples(st.integers(0, NUM_ENTITIES), st.integers(0, NUM_RELATIONS - 1)), max_size=12)


def as_array(rows: list[tuple[int, int, int]]) -> np.ndarray:
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


def brute_force(triples: list, side: Side, queries: list) -> list[tuple[int, int]]:
    """All (place of the query, answer), by looking at every triple for every query."""
    found = set()
    for place, (entity, relation) in enumerate(queries):
        for triple in triples:
            given_entity, answer = (triple[0], triple[2]) if side is Side.TAIL else (triple[2], triple[0])
            if given_entity == entity and triple[1] == relation:
                found.add((place, answer))
    return sorted(found)


@settings(max_examples=150, deadline=None)
@given(splits=st.lists(TRIPLES, max_size=3), queries=QUERIES, side=st.sampled_from(list(Side)))
def test_answers_are_those_of_brute_force(splits, queries, side):
    known = KnownTriples([as_array(rows) for rows in splits], NUM_RELATIONS)
    asked = np.array(queries, dtype=np.int64).reshape(-1, 2)
    query_index, answers = known.answers(side, asked[:, 0], asked[:, 1])
    assert query_index.dtype == answers.dtype == np.int64
    triples = [row for rows in splits for row in rows]
    assert list(zip(query_index.tolist(), answers.tolist())) == brute_force(triples, side, queries)


def test_without_triples_or_queries_there_are_no_answers():
    nothing = np.zeros(0, np.int64)
    known = KnownTriples([as_array([(0, 0, 1)])], 1)
    for index, queries in ((KnownTriples([], 2), [np.array([0, 1])] * 2), (known, [nothing, nothing])):
        query_index, answers = index.answers(Side.TAIL, *queries)
        assert len(query_index) == len(answers) == 0


def test_mapped_files_with_ids_beyond_32_bits_do_not_wrap(tmp_path):
    large = 2**40
    np.save(tmp_path / "train.npy", as_array([(large, 999, 3), (large + 1, 0, 4)]))
    known = KnownTriples([np.load(tmp_path / "train.npy", mmap_mode="r")], 1000)
    assert known.answers(Side.TAIL, np.array([large]), np.array([999]))[1].tolist() == [3]
