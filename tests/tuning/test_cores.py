"""Core numbers against deleting nodes, and data set folders of k-cores: exactly their triples, by name."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dglkge.data.dataset import Dataset
from dglkge.errors import InputError
from dglkge.partition.make_dataset import partition_dataframe
from dglkge.partition.options import Options
from dglkge.tuning.tune import Cores, core_numbers, core_shares, triple_cores
from tests.inference.link_scores import names_of
from tests.partition_tools.conftest import build_here  # noqa: F401
from tests.toy_kg import TIMES, temporal_dataset, toy_dataset

pytestmark = pytest.mark.usefixtures("build_here")

NUM_NODES = 9
edges = st.lists(st.tuples(st.integers(0, NUM_NODES - 1), st.integers(0, NUM_NODES - 1)), max_size=50)


def core_by_deletion(triples, k):
    """Delete triples of entities with fewer than k of them, again and again."""
    while True:
        ends = [end for head, _, tail, *_ in triples for end in (head, tail)]
        kept = [t for t in triples if ends.count(t[0]) >= k and ends.count(t[2]) >= k]
        if len(kept) == len(triples):
            return kept
        triples = kept


@settings(max_examples=150, deadline=None)
@given(pairs=edges)
def test_equals_deletion(pairs):
    heads, tails = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    core = core_numbers(heads, tails, NUM_NODES)
    kept = [core_by_deletion([(a, "", b) for a, b in pairs], k) for k in range(int(core.max()) + 2)]
    for k in range(1, len(kept)):
        assert set(np.flatnonzero(core >= k).tolist()) == {end for a, _, b in kept[k] for end in (a, b)}
    if pairs:
        cores = triple_cores(heads, tails, core)
        shares = [len(kept[k]) / len(pairs) for k in range(cores.max() + 1)]
        assert core_shares(cores).tolist() == shares and shares[0] == 1


def named(dataset: Dataset, split: str) -> list[tuple[str, ...]]:
    relations = [dataset.relations[int(relation_id)] for _, relation_id, _ in dataset.split(split)]
    names = [names_of(dataset, triple) for triple in dataset.split(split)]
    return sorted((h, r.name, t, r.lhs, r.rhs) for (h, _, t), r in zip(names, relations))


@pytest.mark.parametrize("core", [1, 2, 3])
def test_core_of_typed_entities(core, tmp_path, monkeypatch):
    monkeypatch.setattr("dglkge.tuning.tune.FEWEST_VALID", 0)
    dataset = Dataset.open(toy_dataset(typed=True))
    Cores(dataset).write(core, tmp_path / "core", seed=0)
    smaller = Dataset.open(tmp_path / "core")
    train = core_by_deletion(named(dataset, "train"), core)
    assert named(smaller, "train") == train and (core == 1 or len(train) < len(dataset.split("train")))
    entities = {end for head, _, tail, *_ in train for end in (head, tail)}
    relations = {(name, lhs, rhs) for _, name, _, lhs, rhs in train}
    assert named(smaller, "valid") == [
        t for t in named(dataset, "valid") if {t[0], t[2]} <= entities and (t[1], *t[3:]) in relations
    ]
    assert {name for type_ in smaller.entity_types for name in smaller.vocabulary(type_).names} == entities
    assert len(smaller.split("test")) == 0 and smaller.num_parts == 1


def test_training_triples_are_held_out_where_valid_ones_are_few(tmp_path):
    rows = [(f"e{a}", f"r{(a * b) % 3}", f"e{b}") for a in range(12) for b in range(12)]
    frame = pd.DataFrame(rows, columns=["head", "relation", "tail"])
    frame["weight"] = np.arange(len(frame), dtype=np.float32) + 1
    columns = "head,relation,tail,weight"
    partition_dataframe(frame, tmp_path / "all", columns=columns, options=Options(method="random"))
    dataset = Dataset.open(tmp_path / "all")
    weight_of = {row: i + 1.0 for i, row in enumerate(rows)}
    Cores(dataset).write(2, tmp_path / "core", seed=1)
    smaller = Dataset.open(tmp_path / "core")
    assert len(smaller.split("valid")) == int(0.05 * len(rows))
    assert sorted(named(smaller, "train") + named(smaller, "valid")) == named(dataset, "train")
    weights = [weight_of[names_of(smaller, triple)] for triple in smaller.split("train")]
    assert smaller.train_weights().tolist() == weights


def test_nothing_to_rank(tmp_path):
    frame = pd.DataFrame([("a", "r", "b"), ("b", "r", "c")], columns=["head", "relation", "tail"])
    partition_dataframe(frame, tmp_path / "all", options=Options(method="random"))
    words = "the 1-core of .*/all has 2 training triples and no valid ones to rank"
    with pytest.raises(InputError, match=words):
        Cores(Dataset.open(tmp_path / "all")).write(1, tmp_path / "core", seed=0)
    assert not (tmp_path / "core").exists()


def test_a_core_has_the_times_of_its_triples(tmp_path):
    """As facts by name: relations at their times, out of the files that the core's folder has."""
    dataset = Dataset.open(temporal_dataset())
    Cores(dataset).write(2, tmp_path / "core", seed=0)
    core = Dataset.open(tmp_path / "core")
    assert set(core.relations.times) == set(dataset.relations.times) == set(TIMES)
    train, valid, core_train, core_valid = (
        set(named(data, split)) for data in (dataset, core) for split in ("train", "valid")
    )
    assert core_train <= train and len(core_train) > 100 and core_valid <= valid | train
