"""The figures of a report against the same numbers computed otherwise."""

from __future__ import annotations

import json

import numpy as np
import pytest

import dglkge
from dglkge.errors import InputError
from dglkge.report.figures import Choices, collect, configuration, frequent_entities, project, run_labels
from tests.report.conftest import HOSTILE

pytest.importorskip("sklearn", reason="scikit-learn is not installed")


@pytest.fixture(scope="module")
def figures(runs):
    return collect([str(runs.first)], Choices(limit=0, points=0))


def test_ranking_is_that_of_the_run_and_figures_are_json(runs, figures):
    assert json.loads(json.dumps(figures, allow_nan=False)) == figures
    ranking, expected = figures["runs"][0]["ranking"], dglkge.open_run(runs.first).evaluate("test").to_dict()
    assert ranking["sides"] == {side: expected[side] for side in ("both", "head", "tail")}
    assert ranking["relations"] == expected["per_relation"]
    assert ranking["categories"] == expected["per_category"]
    assert ranking["num_triples"] == ranking["num_triples_of_split"] == len(runs.dataset.split("test"))


def test_a_limit_draws_triples_of_the_whole_split(runs):
    choices = [Choices(limit=6, points=0, seed=seed) for seed in (0, 0, 1)]
    drawn = [collect([str(runs.first)], choice)["runs"][0]["ranking"] for choice in choices]
    assert [ranking["num_triples"] for ranking in drawn] == [6, 6, 6]
    assert drawn[0]["sides"]["both"]["num_queries"] == 12
    assert drawn[0]["relations"] == drawn[1]["relations"] != drawn[2]["relations"]


def test_examples_have_the_rank_of_their_triple(runs, figures):
    run, checked = dglkge.open_run(runs.first), 0
    best, worst = (figures["runs"][0]["examples"][kind] for kind in ("best", "worst"))
    assert best[0]["mrr"] >= worst[0]["mrr"]
    assert not {example["relation"] for example in best} & {example["relation"] for example in worst}
    for example in [*best, *worst]:
        relation = runs.dataset.relations.labels.id(example["relation"])
        pair = runs.dataset.relations[relation]
        heads, tails = runs.dataset.vocabulary(pair.lhs), runs.dataset.vocabulary(pair.rhs)
        for query in example["queries"]:
            ends = (query["given"], query["true"])
            head, tail = ends if query["side"] == "tail" else ends[::-1]
            result = run.evaluate("test", np.array([[heads.id(head), relation, tails.id(tail)]]))
            assert getattr(result, query["side"]).mr == query["rank"]
            if query["side"] == "tail":
                answers = run.predict_tails(head, example["relation"], k=5)["entity"].tolist()
                assert [answer["name"] for answer in query["answers"]] == answers
            checked += 1
    assert checked >= 8


def test_the_data_set_and_its_partitions(runs, figures):
    (data,) = figures["datasets"]
    assert data["triples"] == {name: len(runs.dataset.split(name)) for name in ("train", "valid", "test")}
    assert data["entities"] == {name: runs.dataset.num_entities(name) for name in runs.dataset.entity_types}
    assert sum(part["num_edges"] for part in data["partitions"]["parts"]) == data["triples"]["train"]
    degrees = dglkge.open_run(str(runs.first)).degrees
    expected = {name: np.zeros(len(of), int) for name, of in degrees.items()}
    for head, relation_id, tail in runs.dataset.split("train").tolist():
        pair = runs.dataset.relations[relation_id]
        expected[pair.lhs][head] += 1
        expected[pair.rhs][tail] += 1
    for name, of in degrees.items():
        assert of.tolist() == expected[name].tolist()
    assert sum(count for *_, count in data["degrees"]["histogram"]) == sum(data["entities"].values())


def test_the_map_shows_the_entities_of_the_highest_degrees(runs):
    entity_map = collect([str(runs.first)], Choices(limit=5, points=12))["runs"][0]["map"]
    types = {name: type_["names"] for name, type_ in entity_map["types"].items()}
    assert 12 <= entity_map["num_entities"] == sum(map(len, types.values())) <= 14
    assert set(types) == set(runs.dataset.entity_types) and HOSTILE["town0"] in types["town"]
    degrees = dglkge.open_run(str(runs.first)).degrees
    for name, ids in frequent_entities(degrees, 12).items():
        rest = np.delete(degrees[name], ids)
        assert not len(rest) or degrees[name][ids].min() >= rest.max()


def test_maps():
    """PCA by singular values; t-SNE keeps groups together; equal rows have a map."""
    rows = np.random.default_rng(0).normal(size=(50, 7)) * np.array([5, 3, 1, 1, 1, 1, 1])
    points, explained = project(rows, "pca")
    left, sizes, _ = np.linalg.svd(rows - rows.mean(0), full_matrices=False)
    assert np.allclose(np.abs(points), np.abs(left[:, :2] * sizes[:2]))
    assert explained == pytest.approx((sizes[:2] ** 2 / (sizes**2).sum()).tolist())
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
    # What auto has decided is no change.
    rows = {row["field"]: row for row in configuration([{"training": {"matmul_dtype": "bfloat16"}}])}
    assert rows["training.matmul_dtype"]["values"] == ["bfloat16"]
    assert rows["training.matmul_dtype"]["is_changed"] == [False]


def test_labels_are_as_long_as_they_must_be():
    assert run_labels(["a/run", "b/run", "c"]) == ["a/run", "b/run", "c"]
    with pytest.raises(InputError, match="the same run is given twice: a, a/"):
        run_labels(["a", "a/"])
