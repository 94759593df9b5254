"""The figures, against counting by hand, and the table."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from dglkge.data.dataset import Dataset
from dglkge.partition.report import partition_figures, print_figures, print_quality
from tests.data.toy_folder import BOUNDARIES, NODE_IDS, RELATIONS, TRAIN, write_toy_folder


def owner(ntype: str, original_id: int) -> int:
    return int(NODE_IDS[ntype][original_id] >= BOUNDARIES[ntype][1])


def test_figures_are_those_counted_by_hand_and_printed(tmp_path):
    figures = partition_figures(Dataset.open(write_toy_folder(tmp_path / "toy")))
    edges, cut = [0, 0], [0, 0]
    for head, relation, tail in TRAIN.tolist():
        _, lhs, rhs = RELATIONS[relation]
        part = owner(rhs, tail)
        edges[part] += 1
        cut[part] += owner(lhs, head) != part
    assert [part["num_edges"] for part in figures["parts"]] == edges
    assert [part["cut_edges"] for part in figures["parts"]] == cut
    assert figures["edge_cut"] == {"edges": sum(cut), "fraction": sum(cut) / len(TRAIN)}
    assert figures["balance"] == {"edges": pytest.approx(max(edges) / (len(TRAIN) / 2)), "entities": 1}
    assert [part["num_entities"] for part in figures["parts"]] == [3, 3]
    assert figures["parts"][0]["nodes"] == {"person": 2, "relation": 2, "town": 1}
    stream = io.StringIO()
    print_figures({**figures, "name": "[bold]x[/bold]"}, Console(file=stream, width=100))
    text = stream.getvalue()
    for words in (
        "[bold]x[/bold]: 6 entities of 2 types, 3 relations", "triples: 5 train, 1 valid, 0 test",
        "partitions (random, seed 0)", f"edge cut: {sum(cut)} ",
    ):  # fmt: skip
        assert words in text
    assert len([line for line in text.splitlines() if line.startswith("│")]) == 2


def quality_lines(**changes) -> list[str]:
    nothing = {"triples": 0, "share": 0.0}
    both = {"in_train": nothing, "reverse_in_train": nothing, "other_relation_in_train": nothing}
    unseen = {"entities": 0, "relations": 0, "triples": 0}
    quality = {
        "triples": {"train": 4000, "valid": 0, "test": 10},
        "duplicates": {"train": 3, "valid": 0, "test": 0},
        "leaks": {
            "valid": {**both, "implied": nothing},
            "test": {**both, "in_valid": nothing, "implied": {"triples": 9, "share": 0.9}},
        },
        "relation_pairs": {"least_share": 0.8, "count": 0, "largest": []},
        "unseen": {"valid": unseen, "test": {"entities": 1200, "relations": 0, "triples": 7}},
        "single_triple_relations": {"count": 0, "examples": []},
        "degrees": {"min": 0, "median": 2.5, "mean": 3.25, "max": 1234}
        | {"entities_of_degree_0": 1, "entities_of_degree_1": 2},
        "hubs": [{"entity": f"[b]{i}", "degree": 1234 - i} for i in range(10)],
        "components": {"count": 2, "largest": 30, "largest_share": 0.75},
    }
    stream = io.StringIO()
    print_quality({**quality, **changes}, Console(file=stream, width=100))
    return [" ".join(line.replace("│", " ").split()) for line in stream.getvalue().splitlines()]


def test_quality_is_printed():
    lines = quality_lines()
    for line in (
        "triples 4,000 0 10",
        "repeat an earlier one 3 0 0",
        "stand in train 0 (0.0%) 0 (0.0%)",
        "stand in valid 0 (0.0%)",
        "implied by train 0 (0.0%) 9 (90.0%)",
        "have a name unseen in train 0 7",
        "entities unseen in train 0 1,200",
        "training triples of an entity: 0 to 1,234, median 2.5, mean 3.2; 2 entities have one, 1 none",
        "entities with most: [b]0 1,234, [b]1 1,233, [b]2 1,232, [b]3 1,231, [b]4 1,230",
        "connected components of train: 2; the largest has 30 entities (75.0%)",
    ):
        assert line in lines
    assert not [line for line in lines if "pairs of relations" in line or "one training triple" in line]


def test_relations_are_printed():
    common = {"relations": ["a", "b"], "triples": [10, 8], "overlap": 8, "share": 0.8}
    kinds = ["inverse", "duplicate", "symmetric"] + ["duplicate"] * 8
    pairs = {"least_share": 0.8, "count": 11, "largest": [{**common, "kind": kind} for kind in kinds]}
    single = {"count": 3, "examples": ["x", "y"]}
    lines = quality_lines(relation_pairs=pairs, single_triple_relations=single)
    first = lines.index("pairs of relations that share 80% or more of their triples: 11, the largest 10")
    shown = ["80.0% 8 a is the inverse of b", "80.0% 8 a is a duplicate of b", "80.0% 8 a is symmetric"]
    assert lines[first + 1 : first + 4] == shown
    assert len([line for line in lines if line.startswith("80.0%")]) == 10
    assert "relations with one training triple: 3 (x, y, ...)" in lines
