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
    found, wanted = figures["runs"][0]["ranking"], result.to_dict()
    assert found["sides"] == {side: wanted[side] for side in ("both", "head", "tail")}
    assert found["relations"] == wanted["per_relation"]
    assert found["categories"] == wanted["per_category"]
    assert found["num_triples"] == found["num_triples_of_split"] == len(runs.dataset.split("test"))


def test_a_limit_draws_triples_of_the_whole_split(runs):
    drawn = [
        collect([str(runs.first)], Choices(limit=6, points=0, seed=seed))["runs"][0]["ranking"]
        for seed in (0, 0, 1)
    ]
    assert [one["num_triples"] for one in drawn] == [6, 6, 6]
    assert drawn[0]["sides"]["both"]["num_queries"] == 12
    assert drawn[0]["relations"] == drawn[1]["relations"] != drawn[2]["relations"]


def test_examples_have_the_rank_of_their_triple(runs, figures):
    run = dglkge.open_run(runs.first)
    found = figures["runs"][0]["examples"]
    assert found["best"][0]["mrr"] >= found["worst"][0]["mrr"]
    assert not {one["relation"] for one in found["best"]} & {one["relation"] for one in found["worst"]}
    relations, checked = runs.dataset.relations, 0
    for one in [*found["best"], *found["worst"]]:
        for query in one["queries"]:
            ends = (query["given"], query["true"])
            head, tail = ends if query["side"] == "tail" else ends[::-1]
            relation = relations.labels.id(one["relation"])
            pair = relations[relation]
            ids = [
                runs.dataset.vocabulary(pair.lhs).id(head),
                relation,
                runs.dataset.vocabulary(pair.rhs).id(tail),
            ]
            result = run.evaluate("test", np.array([ids]))
            assert getattr(result, query["side"]).mr == query["rank"]
            best = run.predict_tails(head, one["relation"], k=5) if query["side"] == "tail" else None
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
    found = dglkge.open_run(str(runs.first)).degrees
    assert {(name, id_): n for name, of in found.items() for id_, n in enumerate(of.tolist()) if n} == counts
    assert sum(count for *_, count in data["degrees"]["histogram"]) == sum(data["entities"].values())


def test_the_map_shows_the_entities_of_the_highest_degrees(runs):
    found = collect([str(runs.first)], Choices(limit=5, points=12))["runs"][0]["map"]
    assert found["num_entities"] == sum(len(one["names"]) for one in found["types"].values())
    assert 12 <= found["num_entities"] <= 14 and set(found["types"]) == set(runs.dataset.entity_types)
    assert HOSTILE["town0"] in found["types"]["town"]["names"]
    of_entities = dglkge.open_run(str(runs.first)).degrees
    chosen = frequent_entities(of_entities, 12)
    for name, ids in chosen.items():
        rest = np.delete(of_entities[name], ids)
        assert not len(rest) or of_entities[name][ids].min() >= rest.max()


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
    found = {one["field"]: one for one in configuration([{"model": {"dimension": 6}}, {}])}
    assert found["model.dimension"]["values"] == [6, 400] and found["model.dimension"]["differs"]
    assert found["model.dimension"]["is_changed"] == [True, False]
    assert not found["training.batch_size"]["differs"]


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
