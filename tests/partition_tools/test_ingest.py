"""Names to ids: independent of chunks and of order."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dglkge.data.text_format import Columns, RowRules
from dglkge.data.triples import frame_chunks
from dglkge.errors import InputError
from dglkge.partition.ingest import IdTriples, ingest_ids, ingest_names

ROW = st.tuples(st.sampled_from("abcde"), st.sampled_from(["r", "s"]), st.sampled_from("cdefg"))


def chunks(rows: list[tuple], size: int = 1000, rules: RowRules | None = None) -> list[dict[str, pa.Array]]:
    frame = pd.DataFrame(rows, columns=["head", "relation", "tail"])
    found = []
    for start in range(0, len(rows), size):
        found += frame_chunks(frame.iloc[start : start + size], Columns(), rules or RowRules(), "train")
    return found


def named(triples: IdTriples, split: str) -> list[tuple]:
    return [
        (triples.entities[h], triples.relations[r], triples.entities[t]) for h, r, t in triples.splits[split]
    ]


@settings(max_examples=50, deadline=None)
@given(
    train=st.lists(ROW, min_size=1, max_size=30),
    test=st.lists(ROW, min_size=1, max_size=9),
    size=st.integers(1, 9),
)
def test_ids_lead_back_to_the_names_and_do_not_depend_on_chunks(train, test, size):
    whole = ingest_names({"train": chunks(train), "test": chunks(test)})
    pieces = ingest_names({"train": chunks(train, size), "test": chunks(test, size)})
    assert named(whole, "train") == train and named(whole, "test") == test
    assert whole.entities == pieces.entities == sorted({x for h, _, t in train + test for x in (h, t)})
    assert whole.relations == sorted({r for _, r, _ in train + test})
    assert all(np.array_equal(whole.splits[split], pieces.splits[split]) for split in whole.splits)


@pytest.mark.parametrize(
    "row, message",
    [
        (("a\nb", "r", "c"), r"the entity name 'a\\nb' holds '\\n'"),
        (("a", "r\ns", "c"), r"the relation name 'r\\ns' holds '\\n'"),
        (("a", "r\ts", "c"), r"the relation name 'r\\ts' holds '\\t'"),
    ],
)
def test_names_that_no_file_can_hold_are_refused(row, message):
    with pytest.raises(InputError, match=message):
        ingest_names({"train": chunks([row])})
    assert ingest_names({"train": chunks([("a\tb", "r", "c")])}).entities == ["a\tb", "c"]


IDS = RowRules({"head": 100, "relation": 100, "tail": 100})


def test_integers_are_their_own_ids_and_maps_of_any_length_name_them():
    triples = ingest_ids({"train": chunks([(2, 1, 0), (1, 0, 2)], rules=IDS)}, None, None)
    assert triples.splits["train"].tolist() == [[2, 1, 0], [1, 0, 2]]
    assert triples.entities == ["0", "1", "2"] and triples.relations == ["0", "1"]
    triples = ingest_ids({"train": chunks([(0, 0, 2)], rules=IDS)}, ["a", "b", "c", "d"], ["r"])
    assert triples.entities == ["a", "b", "c", "d"] and named(triples, "train") == [("a", "r", "c")]


@pytest.mark.parametrize(
    "rows, message",
    [
        ([(0, 0, 2), (2, 0, 2)], "1 of the entity ids 0 to 2 never occur, the first is 1: give --entity-map"),
        ([(0, 1, 1)], "the relation ids reach 1, more than there are fields"),
        ([(0, 0, 1), (1, 2, 0), (1, 2, 0)], "1 of the relation ids 0 to 2 never occur, the first is 1"),
        ([(0, 0, 99)], "the entity ids reach 99, more than there are fields"),
    ],
)
def test_ids_with_holes_are_refused(rows, message):
    with pytest.raises(InputError, match=message):
        ingest_ids({"train": chunks(rows, rules=IDS)}, None, None)
