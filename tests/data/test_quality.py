"""Quality of the data, against counting with Python's sets."""

from __future__ import annotations

from collections import Counter
from itertools import combinations_with_replacement

import networkx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dglkge.data import quality as module
from dglkge.data.dataset import Dataset
from dglkge.data.quality import LEAKS, MIN_OVERLAP, NEAR_SHARE, Leaks, NumberedTriples, measure_quality
from tests.data.toy_folder import write_toy_folder

NUM_ENTITIES, NUM_RELATIONS = 6, 4
TRIPLE = st.tuples(
    st.integers(0, NUM_ENTITIES - 1), st.integers(0, NUM_RELATIONS - 1), st.integers(0, NUM_ENTITIES - 1)
)
TRIPLES = st.lists(TRIPLE, max_size=40)
MIRRORED = st.lists(TRIPLE, min_size=1, max_size=25).map(
    # Relation 1 is the inverse of 0, and 3 a duplicate of 2.
    lambda rows: [(t, 1, h) if r == 0 else (h, 3, t) for h, r, t in rows if r in (0, 2)] + rows
)


def numbered(rows: dict[str, list[tuple]], num_entities: int = NUM_ENTITIES) -> NumberedTriples:
    splits = {split: tuple(np.array(triples, np.int32).reshape(-1, 3).T) for split, triples in rows.items()}
    return NumberedTriples(splits, num_entities, NUM_RELATIONS, "e{}".format, "r{}".format)


def near_by_sets(rows: dict[str, list[tuple]], near_share: float, min_overlap: int) -> dict[tuple, tuple]:
    """Overlap and sizes of each pair of relations, by (first, second, whether inverse)."""
    triples = {row for split_rows in rows.values() for row in split_rows}
    near = {}
    for first, second in combinations_with_replacement(range(NUM_RELATIONS), 2):
        for is_inverse in (True, False):
            if first == second and not is_inverse:
                continue
            mine, partners = (
                {(h, t) for h, r, t in triples if r == relation and not (is_inverse and h == t)}
                for relation in (first, second)
            )
            counterparts = {(t, h) for h, t in partners} if is_inverse else partners
            overlap = len(mine & counterparts)
            if overlap >= min_overlap and overlap >= near_share * max(len(mine), len(partners)):
                near[first, second, is_inverse] = (overlap, len(mine), len(partners))
    return near


def leaks_by_sets(rows: dict[str, list[tuple]], split: str, near: dict[tuple, tuple]) -> list[tuple]:
    """Whether each triple is in train, reversed in train, in train otherwise, and implied."""
    train = set(rows["train"])
    leaks = []
    for h, r, t in rows[split]:
        rest = train - {(h, r, t)}
        partners = {(partner, is_inverse) for first, second, is_inverse in near
                    for mine, partner in ((first, second), (second, first)) if mine == r}  # fmt: skip
        implied = any(((t, p, h) if is_inverse else (h, p, t)) in rest for p, is_inverse in partners)
        reversed_ = any((t, any_relation, h) in rest for any_relation in range(NUM_RELATIONS))
        other_relation = any((h, any_relation, t) in rest for any_relation in range(NUM_RELATIONS))
        leaks.append(((h, r, t) in train, reversed_, other_relation, implied))
    return leaks


def unseen_by_sets(train: list[tuple], rows: list[tuple]) -> dict[str, int]:
    entities = {x for h, _, t in rows for x in (h, t)} - {x for h, _, t in train for x in (h, t)}
    relations = {r for _, r, _ in rows} - {r for _, r, _ in train}
    touched = [row for row in rows if {row[0], row[2]} & entities or row[1] in relations]
    return {"entities": len(entities), "relations": len(relations), "triples": len(touched)}


def degrees_and_components(train: list[tuple]) -> dict[str, object]:
    graph = networkx.MultiGraph()
    graph.add_nodes_from(range(NUM_ENTITIES))
    graph.add_edges_from((h, t) for h, _, t in train)
    degrees = [degree for _, degree in graph.degree]
    seen = graph.subgraph(entity for entity in graph if degrees[entity])
    sizes = [len(component) for component in networkx.connected_components(seen)]
    hubs = sorted(graph, key=lambda entity: (-degrees[entity], entity))
    share = pytest.approx(max(sizes) / len(seen))
    statistics = {"min": min(degrees), "median": np.median(degrees), "max": max(degrees)}
    statistics |= {"mean": pytest.approx(np.mean(degrees))}
    statistics |= {f"entities_of_degree_{degree}": degrees.count(degree) for degree in (0, 1)}
    return {
        "degrees": statistics,
        "hubs": [{"entity": f"e{entity}", "degree": degrees[entity]} for entity in hubs],
        "components": {"count": len(sizes), "largest": max(sizes), "largest_share": share},
    }


def masks_of(leaks: Leaks) -> list[tuple]:
    return list(zip(*(leaks[name].tolist() for name in LEAKS)))


@settings(max_examples=150)
@given(
    train=st.one_of(TRIPLES.filter(bool), MIRRORED),
    valid=TRIPLES,
    test=TRIPLES,
    near_share=st.sampled_from([0.0, 0.4, NEAR_SHARE, 1.0]),
    min_overlap=st.integers(1, 3),
    at_a_time=st.sampled_from([1, 3, 1 << 20]),
)
def test_figures_are_those_of_sets(train, valid, test, near_share, min_overlap, at_a_time):
    rows = {"train": train, "valid": valid, "test": test}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_COMBINATIONS_AT_A_TIME", at_a_time)
        patch.setattr(module, "NEAR_SHARE", near_share)
        patch.setattr(module, "MIN_OVERLAP", min_overlap)
        quality = measure_quality(numbered(rows))
    report = quality.report
    near = near_by_sets(rows, near_share, min_overlap)
    pairs = report["relation_pairs"]["largest"]
    pairs_by_key = {(*pair["relations"], pair["kind"] != "duplicate"): pair for pair in pairs}
    assert len(pairs_by_key) == len(pairs) == report["relation_pairs"]["count"]
    assert {key: (pair["overlap"], *pair["triples"]) for key, pair in pairs_by_key.items()} == {
        (f"r{first}", f"r{second}", kind): value for (first, second, kind), value in near.items()
    }
    symmetric = [pair for (first, second, _), pair in pairs_by_key.items() if first == second]
    assert all(pair["kind"] == "symmetric" for pair in symmetric)
    assert all(pair["share"] == pytest.approx(pair["overlap"] / max(pair["triples"])) for pair in pairs)
    assert [pair["overlap"] for pair in pairs] == sorted((pair["overlap"] for pair in pairs), reverse=True)
    for split, leaks in quality.leaks.items():
        expected = leaks_by_sets(rows, split, near)
        assert masks_of(leaks) == expected
        counts = [report["leaks"][split][name]["triples"] for name in LEAKS]
        assert counts == np.array(expected).reshape(-1, 4).sum(0).tolist()
        assert report["unseen"][split] == unseen_by_sets(train, rows[split])
    in_valid = sum(row in set(valid) for row in test)
    share = pytest.approx(in_valid / max(len(test), 1))
    assert report["leaks"]["test"]["in_valid"] == {"triples": in_valid, "share": share}
    assert report["unseen"]["valid_and_test"] == unseen_by_sets(train, valid + test)
    assert report["triples"] == {split: len(triples) for split, triples in rows.items()}
    repeated = {split: len(triples) - len(set(triples)) for split, triples in rows.items()}
    assert report["duplicates"] == repeated
    uses = Counter(r for _, r, _ in set(train))
    single = [f"r{r}" for r in sorted(uses) if uses[r] == 1]
    assert report["single_triple_relations"] == {"count": len(single), "examples": single}
    assert degrees_and_components(train).items() <= report.items()


def test_large_numbers_do_not_overflow():
    """2**31 - 1 entities in 32-bit arrays: their pairs need 62 bits."""
    most = 2**31 - 1
    columns = np.array([[most - 1, 0, most - 2], [most - 2, 1, most - 1], [5, 0, most - 1]], dtype=np.int32)
    splits = {"train": tuple(columns.T), "valid": tuple(columns[:0].T), "test": tuple(columns[:1].T)}
    index = module.TripleIndex(NumberedTriples(splits, most, 2, str, str))
    assert masks_of(index.leaks("test", np.zeros(0, module._PAIR))) == [(True, True, False, False)]
    # 256 triples of one pair of entities: a count of 8 bits would be 0.
    rows = {"train": [(0, 0, 1)] * 256, "valid": [], "test": []}
    assert measure_quality(numbered(rows)).report["components"]["count"] == 1


def test_the_largest_pairs_are_listed(monkeypatch):
    monkeypatch.setattr(module, "MAX_PAIRS", 1)
    rows = [(0, 0, 1), (2, 0, 3), (1, 1, 0), (3, 1, 2), (0, 2, 4), (4, 2, 0)]
    pairs = measure_quality(numbered({"train": rows, "valid": [], "test": []})).report["relation_pairs"]
    assert (pairs["least_share"], pairs["count"], len(pairs["largest"])) == (NEAR_SHARE, 2, 1)


def test_entities_of_two_types_are_counted_apart(tmp_path):
    """The ids of both begin at 0."""
    report = measure_quality(Dataset.open(write_toy_folder(tmp_path / "toy")).numbered()).report
    assert report["triples"] == {"train": 5, "valid": 1, "test": 0}
    degrees = {hub["entity"]: hub["degree"] for hub in report["hubs"]}
    assert degrees == {"Ada": 3, "Bob": 2, "NA": 2, " Eve ": 1, "Rome": 1, "Ōsaka": 1}
    assert report["components"] == {"count": 1, "largest": 6, "largest_share": 1.0}
    assert report["single_triple_relations"] == {"count": 1, "examples": ["near (person → person)"]}


@pytest.mark.parametrize(
    ("num_entities", "bucket_bytes", "num_workers"),
    [(8, 1 << 20, 1), (60, 640, 3), (60, 640, 1), (3000, 900, 3)],
)
def test_buckets_and_workers_do_not_change_the_figures(num_entities, bucket_bytes, num_workers, monkeypatch):
    rng = np.random.default_rng(num_entities)
    rows: dict[str, list[tuple]] = {}
    for split, num in (("train", 500), ("valid", 40), ("test", 60)):
        columns = rng.integers(0, num_entities, (num, 2)).T.tolist()
        # Relation 1 is the inverse of 0.
        triples = list(zip(columns[0], rng.choice([0, 2, 3], num).tolist(), columns[1]))
        rows[split] = triples + [(t, 1, h) for h, r, t in triples if r == 0] + triples[:9]
    rows["test"] += rows["train"][::50] + [(t, r, h) for h, r, t in rows["train"][::60]] + rows["valid"][:5]
    # Several buckets at a time, of several pieces.
    monkeypatch.setattr(module, "_ROWS_AT_A_TIME", 70)
    measured = measure_quality(numbered(rows, num_entities), bucket_bytes, num_workers)
    near = near_by_sets(rows, NEAR_SHARE, MIN_OVERLAP)
    assert measured.report["relation_pairs"]["count"] == len(near) > 0
    for split, marks in measured.leaks.items():
        assert masks_of(marks) == leaks_by_sets(rows, split, near)
    pairs = Counter(frozenset((h, t)) for split in rows for h, _, t in rows[split])
    assert num_entities < 1000 or min(pairs.values()) == 1
