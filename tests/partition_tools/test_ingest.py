"""Names to ids, independent of chunks and of order; splits by a hash."""

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
from dglkge.partition.options import parse_fractions
from dglkge.partition.splits import hash_triples, split_by_hash

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


def triples(num: int, seed: int = 0) -> IdTriples:
    rows = np.random.default_rng(seed).integers(0, 500, (num, 3)).astype(np.int32)
    return IdTriples([], [], {"train": rows}, {"train": np.arange(num, dtype=np.float32)})


def test_fractions():
    given = {
        "0.9,0.05,0.05": (0.9, 0.05, 0.05),
        "0.8": (0.8, 0.1, 0.1),
        "1": (1, 0, 0),
        "0.5, 0.5, 0": (0.5, 0.5, 0),
    }
    for text, fractions in given.items():
        assert parse_fractions(text) == pytest.approx(fractions)
    for text in ("", "a", "0.9,0.1", "0,0.5,0.5", "1.2,-0.1,-0.1", "nan,0,1", "2"):
        with pytest.raises(InputError, match="give one or three fractions"):
            parse_fractions(text)
    with pytest.raises(InputError, match="the fractions add up to 0.99, not 1"):
        parse_fractions("0.9,0.05,0.04")


def test_sizes_are_as_asked_for():
    split = split_by_hash(triples(20000), (0.8, 0.15, 0.05), seed=3)
    sizes = [len(split.splits[name]) for name in ("train", "valid", "test")]
    assert sum(sizes) == 20000
    # five standard deviations of a binomial
    assert sizes == pytest.approx([16000, 3000, 1000], abs=5 * (20000 * 0.8 * 0.2) ** 0.5)


def test_nothing_is_lost_and_weights_follow():
    before = triples(1000)
    after = split_by_hash(before, (0.6, 0.2, 0.2), seed=0)
    rows = {tuple(r): w for r, w in zip(before.splits["train"].tolist(), before.weights["train"].tolist())}
    found = 0
    for name, part in after.splits.items():
        for row, weight in zip(part.tolist(), after.weights[name].tolist()):
            assert rows[tuple(row)] == weight
            found += 1
    assert found == 1000


def test_split_depends_on_the_triple_and_the_seed_alone():
    rows = triples(400).splits["train"]
    where = {}
    for order in (np.arange(400), np.random.default_rng(1).permutation(400)):
        split = split_by_hash(IdTriples([], [], {"train": rows[order]}), (0.5, 0.25, 0.25), seed=7)
        for name, part in split.splits.items():
            for row in part.tolist():
                assert where.setdefault(tuple(row), name) == name
    other = split_by_hash(IdTriples([], [], {"train": rows}), (0.5, 0.25, 0.25), seed=8)
    assert {tuple(row) for row in other.splits["test"].tolist()} != {
        k for k, name in where.items() if name == "test"
    }


def test_nothing_left_to_train_on():
    with pytest.raises(InputError, match="no triple is left to train on out of 2"):
        split_by_hash(triples(2), (1e-9, 0.5, 0.5), seed=0)


def splitmix(state: int) -> int:
    """SplitMix64 in Python's own integers."""
    mask = 2**64 - 1
    state = (state + 0x9E3779B97F4A7C15) & mask
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
    return state ^ (state >> 31)


def test_hash_is_splitmix64():
    rows = triples(20).splits["train"]
    for row, value in zip(rows.tolist(), hash_triples(rows, seed=2**40).tolist()):
        state = 2**40
        for number in row:
            state = splitmix(state ^ number)
        assert value == state
