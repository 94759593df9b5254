"""The figures, against counting by hand, and the table."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from dglkge.data.dataset import Dataset
from dglkge.partition.report import partition_figures, print_figures
from tests.data.toy_folder import BOUNDARIES, NODE_IDS, RELATIONS, TRAIN, write_toy_folder


@pytest.fixture
def figures(tmp_path):
    dataset = Dataset.open(write_toy_folder(tmp_path / "toy"))
    unseen = {"entities": 1200, "relations": 0, "triples": 7}
    dataset.description |= {
        "unseen": {"valid_and_test": unseen},
        "duplicates": {"train": 3, "valid": 0, "test": 0},
    }
    return partition_figures(dataset)


def owner(ntype: str, original_id: int) -> int:
    return int(NODE_IDS[ntype][original_id] >= BOUNDARIES[ntype][1])


def test_figures_are_those_counted_by_hand(figures):
    edges, cut = [0, 0], [0, 0]
    for head, relation, tail in TRAIN.tolist():
        _, lhs, rhs = RELATIONS[relation]
        part = owner(rhs, tail)
        edges[part] += 1
        cut[part] += owner(lhs, head) != part
    assert [part["num_edges"] for part in figures["parts"]] == edges
    assert [part["cut_edges"] for part in figures["parts"]] == cut
    assert figures["edge_cut"] == {"edges": sum(cut), "fraction": sum(cut) / len(TRAIN)}
    assert figures["balance"]["edges"] == pytest.approx(max(edges) / (len(TRAIN) / 2))
    assert figures["balance"]["entities"] == 1
    assert [part["num_entities"] for part in figures["parts"]] == [3, 3]
    assert figures["parts"][0]["nodes"] == {"person": 2, "relation": 2, "town": 1}


def table(figures) -> str:
    stream = io.StringIO()
    print_figures(figures, Console(file=stream, width=100))
    return stream.getvalue()


def test_table_says_what_a_user_should_know(figures):
    text = table(figures)
    assert "toy: 6 entities of 2 types, 3 relations" in text
    assert "triples: 5 train, 1 valid, 0 test" in text
    assert "never seen in training: 1,200 entities and 0 relations in 7 triples" in text
    assert "repeated: 3 in train" in text
    assert "partitions (random, seed 0)" in text
    assert f"edge cut: {figures['edge_cut']['edges']} " in text
    assert len([line for line in text.splitlines() if line.startswith("│")]) == 2


def test_table_leaves_out_what_did_not_happen(figures):
    figures["duplicates"]["train"] = 0
    figures["unseen"]["valid_and_test"]["triples"] = 0
    text = table(figures)
    assert "repeated" not in text and "never seen" not in text


def test_names_are_no_markup(figures):
    assert "[bold]x[/bold]" in table({**figures, "name": "[bold]x[/bold]"})
