"""Duplicates and what training never sees, against counting with sets."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dglkge.partition.splits import count_duplicates, count_unseen

TRIPLE = st.tuples(st.integers(0, 5), st.integers(0, 2), st.integers(0, 5))


def as_array(rows):
    return np.array(rows, dtype=np.int32).reshape(-1, 3)


@given(rows=st.lists(TRIPLE, max_size=50))
def test_duplicates(rows):
    assert count_duplicates(as_array(rows)) == sum(count - 1 for count in Counter(rows).values())


@settings(deadline=None)
@given(st.lists(TRIPLE, min_size=1, max_size=5), st.lists(TRIPLE, max_size=6), st.lists(TRIPLE, max_size=6))
def test_unseen(train, valid, test):
    rows = {"train": train, "valid": valid, "test": test}
    splits = {split: as_array(found) for split, found in rows.items()}
    counts = count_unseen(splits, {split: array[:, 1] for split, array in splits.items()}, 6, 3)
    seen_entities = {x for h, _, t in train for x in (h, t)}
    seen_relations = {r for _, r, _ in train}
    rows["valid_and_test"] = valid + test
    for split in ("valid", "test", "valid_and_test"):
        entities = {x for h, _, t in rows[split] for x in (h, t)} - seen_entities
        relations = {r for _, r, _ in rows[split]} - seen_relations
        touched = [row for row in rows[split] if {row[0], row[2]} & entities or row[1] in relations]
        assert counts[split] == {
            "entities": len(entities),
            "relations": len(relations),
            "triples": len(touched),
        }
