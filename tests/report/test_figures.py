"""The figures of a report against the same numbers computed otherwise."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest

import dglkge
from dglkge.errors import InputError
from dglkge.report.figures import Choices, collect, configuration, frequent_entities, project, run_labels
from tests.report.toy_report import HOSTILE

pytest.importorskip("sklearn", reason="scikit-learn is not installed")


@pytest.fixture(scope="module")
def figures(runs):
    return collect([str(runs.first)], Choices(limit=0, points=0))


def test_ranking_is_that_of_the_run(runs, figures):
    result = dglkge.open_run(runs.first).evaluate("test")
    ranking, expected = figures["runs"][0]["ranking"], result.to_dict()
    assert ranking["sides"] == {side: expected[side] for side in ("both", "head", "tail")}
    assert ranking["relations"] == expected["per_relation"]
    assert ranking["categories"] == expected["per_category"]
    assert ranking["num_triples"] == ranking["num_triples_of_split"] == len(runs.dataset.split("test"))


def test_a_limit_draws_triples_of_the_whole_split(runs):
    drawn = [
        collect([str(runs.first)], Choices(limit=6, points=0, seed=seed))["runs"][0]["ranking"]
        for seed in (0, 0, 1)
    ]
    assert [ranking["num_triples"] for ranking in drawn] == [6, 6, 6]
    assert drawn[0]["sides"]["both"]["num_queries"] == 12
    assert drawn[0]["relations"] == drawn[1]["relations"] != drawn[2]["relations"]


def test_examples_have_the_rank_of_their_triple(runs, figures):
    run = dglkge.open_run(runs.first)
    examples = figures["runs"][0]["examples"]
    assert examples["best"][0]["mrr"] >= examples["worst"][0]["mrr"]
    assert not {example["relation"] for example in examples["best"]} & {
        example["relation"] for example in examples["worst"]
    }
    relations, checked = runs.dataset.relations, 0
    for example in [*examples["best"], *examples["worst"]]:
        for query in example["queries"]:
            ends = (query["given"], query["true"])
            head, tail = ends if query["side"] == "tail" else ends[::-1]
            relation = relations.labels.id(example["relation"])
            pair = relations[relation]
            ids = [
                runs.dataset.vocabulary(pair.lhs).id(head),
                relation,
                runs.dataset.vocabulary(pair.rhs).id(tail),
            ]
            result = run.evaluate("test", np.array([ids]))
            assert getattr(result, query["side"]).mr == query["rank"]
            best = run.predict_tails(head, example["relation"], k=5) if query["side"] == "tail" else None
            if best is not None:
                assert [answer["name"] for answer in query["answers"]] == best["entity"].tolist()
            checked += 1
    assert checked >= 8


def test_the_data_set_and_its_partitions(runs, figures):
    (data,) = figures["datasets"]
    assert data["triples"] == {name: len(runs.dataset.split(name)) for name in ("train", "valid", "test")}
    assert data["entities"] == {name: runs.dataset.num_entities(name) for name in runs.dataset.entity_types}
    assert sum(part["num_edges"] for part in data["partitions"]["parts"]) == data["triples"]["train"]
    counts: Counter = Counter()
    for head, relation, tail in runs.dataset.split("train").tolist():
        pair = runs.dataset.relations[relation]
        counts[pair.lhs, head] += 1
        counts[pair.rhs, tail] += 1
    degrees = dglkge.open_run(str(runs.first)).degrees
    assert {
        (name, id_): n for name, of in degrees.items() for id_, n in enumerate(of.tolist()) if n
    } == counts
    assert sum(count for *_, count in data["degrees"]["histogram"]) == sum(data["entities"].values())


def test_the_map_shows_the_entities_of_the_highest_degrees(runs):
    entity_map = collect([str(runs.first)], Choices(limit=5, points=12))["runs"][0]["map"]
    assert entity_map["num_entities"] == sum(len(type_["names"]) for type_ in entity_map["types"].values())
    assert 12 <= entity_map["num_entities"] <= 14 and set(entity_map["types"]) == set(
        runs.dataset.entity_types
    )
    assert HOSTILE["town0"] in entity_map["types"]["town"]["names"]
    degrees = dglkge.open_run(str(runs.first)).degrees
    frequent = frequent_entities(degrees, 12)
    for name, ids in frequent.items():
        rest = np.delete(degrees[name], ids)
        assert not len(rest) or degrees[name][ids].min() >= rest.max()


def test_pca_is_that_of_the_singular_values():
    rows = np.random.default_rng(0).normal(size=(50, 7)) * np.array([5, 3, 1, 1, 1, 1, 1])
    points, explained = project(rows, "pca")
    left, sizes, _ = np.linalg.svd(rows - rows.mean(0), full_matrices=False)
    assert np.allclose(np.abs(points), np.abs(left[:, :2] * sizes[:2]))
    assert explained == pytest.approx((sizes[:2] ** 2 / (sizes**2).sum()).tolist())


def test_tsne_keeps_groups_together_and_equal_rows_have_a_map():
    groups = np.repeat([[0.0] * 5, [50.0] * 5], 10, axis=0) + np.random.default_rng(0).normal(size=(20, 5))
    points, explained = project(groups, "tsne")
    centres = points.reshape(2, 10, 2).mean(1)
    nearest = np.linalg.norm(points[:, None] - centres, axis=2).argmin(1)
    assert nearest.tolist() == [0] * 10 + [1] * 10 and explained == []
    assert not project(np.ones((5, 3)), "pca")[0].any()
    with pytest.raises(InputError, match="not finite: the run has diverged"):
        project(np.full((5, 3), np.nan), "pca")


def test_changed_fields_are_marked():
    by_field = {row["field"]: row for row in configuration([{"model": {"dimension": 6}}, {}])}
    assert by_field["model.dimension"]["values"] == [6, 400] and by_field["model.dimension"]["differs"]
    assert by_field["model.dimension"]["is_changed"] == [True, False]
    assert not by_field["training.batch_size"]["differs"]


def test_what_auto_has_decided_is_no_change():
    (row,) = [
        row for row in configuration([{"training": {"matmul_dtype": "bfloat16"}}]) if "matmul" in row["field"]
    ]
    assert row["values"] == ["bfloat16"] and row["is_changed"] == [False]


def test_labels_are_as_long_as_they_must_be():
    assert run_labels(["a/run", "b/run", "c"]) == ["a/run", "b/run", "c"]
    with pytest.raises(InputError, match="the same run is given twice: a, a/"):
        run_labels(["a", "a/"])


def test_figures_are_json(figures):
    assert json.loads(json.dumps(figures, allow_nan=False)) == figures
