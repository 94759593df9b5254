"""Missing triples against the scores of all possible triples, one by one in float64."""

from __future__ import annotations

import json
import os
import resource
from dataclasses import replace
from unittest import mock

import numpy as np
import pandas as pd
import pytest
import torch

import dglkge
from dglkge.errors import InputError
from dglkge.evaluation.calibration import Platt
from dglkge.inference.links import approximate
from dglkge.inference.links import completion as completion_module
from dglkge.inference.links.missing_links import LinkSearch
from dglkge.model.kge_model import build_model
from dglkge.typing import Side
from tests.checkpoint.toy_checkpoint import calibrated, save_toy_run
from tests.inference.link_scores import all_scores, known_pairs

CURVE = Platt(slope=3.0, offset=0.5)


@pytest.fixture
def run(folder):
    opened = dglkge.open_run(folder)
    calibrated(folder, CURVE.slope, CURVE.offset)
    return opened


def all_missing(run, splits=("train", "valid", "test")):
    """Every possible triple that no split has: ids, names and score, the best first."""
    scores, known, parts = all_scores(run), known_pairs(run, splits), []
    for relation_id, relation in enumerate(run.tables.relations.relations):
        types = relation.lhs, relation.rhs
        heads, tails = (np.array(run.tables.vocabulary(type_).names) for type_ in types)
        h, t = np.nonzero(~known[relation_id])
        names = {"head": heads[h], "relation": run.tables.relations.labels[relation_id], "tail": tails[t]}
        values = scores[relation_id, Side.TAIL][h, t]
        parts.append(pd.DataFrame({"h": h, "r": relation_id, "t": t, **names, "score": values}))
    return pd.concat(parts).sort_values("score", ascending=False, kind="stable")


NAMES = ["head", "relation", "tail"]


def same(frame, expected, column="score"):
    assert frame[column].is_monotonic_decreasing
    pd.testing.assert_frame_equal(
        *(triples[[*NAMES, column]].sort_values(NAMES, ignore_index=True) for triples in (frame, expected)),
        rtol=1e-12 if column == "score" else 1e-5,
    )


def test_links_above_a_probability_and_the_best_of_each_query(run):
    expected = all_missing(run)
    probability = CURVE(expected["score"].to_numpy())
    least = float(np.quantile(probability, 0.7))
    frame = run.complete(min_probability=least)
    assert 100 < len(frame) < len(expected)
    same(frame, expected[probability >= least])
    np.testing.assert_allclose(frame["probability"], CURVE(frame["score"].to_numpy()))
    same(run.complete(k=3), expected.groupby(["h", "r"]).head(3))
    are_asked = (expected["relation"] == "knows") & expected["head"].isin(["person1", "person7"])
    frame = run.complete(relations=["knows"], heads=["person7", "person1"], k=2, limit=3)
    same(frame, expected[are_asked].groupby("h").head(2).head(3))


def test_curves_of_relations_are_limits_and_order(run, folder):
    curves = {(id_, Side.TAIL): Platt(1.0 + id_, 0.5 - id_) for id_ in (0, 2)}
    fitted = replace(run.calibration, by_relation=curves)
    (folder / "calibration.json").write_text(json.dumps(fitted.to_dict()))
    expected = all_missing(run)
    expected["probability"] = [
        float(curves.get((id_, Side.TAIL), CURVE)(score))
        for id_, score in zip(expected["r"], expected["score"])
    ]
    least = float(expected["probability"].quantile(0.6))
    frame = dglkge.open_run(folder).complete(min_probability=least)
    same(frame, expected[expected["probability"] >= least], "probability")
    assert not frame["score"].is_monotonic_decreasing


def test_seen_candidates_and_a_held_out_split(run):
    expected = all_missing(run, ("train", "valid"))
    train = np.concatenate([run.dataset.split(split) for split in ("train", "valid")])
    heads, tails = (set(map(tuple, train[:, columns].tolist())) for columns in ((0, 1), (1, 2)))
    ids = expected[["h", "r", "t"]].to_numpy().tolist()
    are_seen = [(h, r) in heads and (r, t) in tails for h, r, t in ids]
    frame = run.complete(k=4, candidates="seen", held_out="test")
    same(frame, expected[are_seen].groupby(["h", "r"]).head(4))


@pytest.mark.parametrize("question", [{"k": 3}, {"min_probability": 0.4}, {"k": 4, "min_probability": 0.6}])
def test_an_index_finds_links_with_the_recall_that_is_measured(run, tmp_path, monkeypatch, question):
    pytest.importorskip("faiss", reason="faiss is not installed")
    monkeypatch.setattr(approximate, "ROWS_PER_LIST", 8)
    monkeypatch.setattr(approximate, "RECALL_WANTED", 0.4)
    monkeypatch.setattr(approximate, "FIRST_CANDIDATES", 2)
    question = {"relations": ["knows"], **question}
    exact, approximate_frame = run.complete(**question), run.complete(**question, candidates="faiss")
    both = approximate_frame[[*NAMES, "score"]].merge(exact[[*NAMES, "score"]], on=NAMES)
    np.testing.assert_allclose(both["score_x"], both["score_y"], rtol=1e-12)
    if "k" not in question:  # else the fourth best takes the place of one that was missed
        assert len(both) == len(approximate_frame)
    # All queries are the sample: the recall is that of the whole.
    recall = approximate_frame.attrs["recall"]
    assert recall["links"] == len(exact) > 10 and recall["recall"] == pytest.approx(len(both) / len(exact))
    index = recall["indexes"]["person"]
    assert 0.2 < recall["recall"] < 1 and index["lists_searched"] < index["lists"]
    summary = run.complete_to(tmp_path / "all.parquet", **question, candidates="faiss")
    assert summary["recall"] == recall
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "all.parquet"), approximate_frame)


def test_an_index_is_built_once_nothing_is_refused(run, tmp_path, monkeypatch):
    monkeypatch.setattr(approximate, "import_extra", mock.Mock(side_effect=InputError("needs faiss-cpu")))
    path = tmp_path / "best.parquet"
    with pytest.raises(InputError, match="needs faiss-cpu"):
        run.complete_to(path, candidates="faiss")
    assert not list(tmp_path.glob("best*"))  # no parts that would refuse the next completion
    path.touch()
    with pytest.raises(InputError, match="exists"):
        run.complete_to(path, candidates="faiss")


def test_precision_and_recall_of_held_out_triples(run, tmp_path):
    expected = all_missing(run, ("train", "valid")).groupby(["h", "r"]).head(5)
    test = {tuple(row) for row in run.dataset.split("test").tolist()}
    hits = [tuple(row) in test for row in expected[["h", "r", "t"]].to_numpy().tolist()]
    summary = run.complete_to(tmp_path / "all.parquet", k=5, held_out="test")
    assert pd.read_parquet(tmp_path / "all.parquet")["held_out"].tolist() == hits
    assert 0 < sum(hits) < summary["held_out_triples"] == len(test)
    for point in summary["curve"]:
        num_hits = sum(hits[: point["rank"]])
        assert point["precision"] == pytest.approx(num_hits / point["rank"])
        assert point["recall"] == pytest.approx(num_hits / len(test))
    assert summary["curve"][-1]["rank"] == len(expected)


def test_goes_on_after_an_interruption(run, tmp_path, monkeypatch):
    monkeypatch.setattr(completion_module, "UNIT_PAIRS", 1)
    monkeypatch.setattr(completion_module, "QUERY_NUMBERS", 200)
    path = tmp_path / "missing.parquet"
    searched = []

    def stop_at_the_third(count):
        searched.append(count)
        if len(searched) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.complete_to(path, k=2, progress=stop_at_the_third)
    assert not path.exists()
    with pytest.raises(InputError, match="another completion"):
        run.complete_to(path, k=3)
    done = len([path for path in (tmp_path / "missing.parquet.parts").iterdir() if path.name.isdigit()])
    again = []
    run.complete_to(path, k=2, progress=again.append)
    assert 3 <= done < len(again)
    same(pd.read_parquet(path), all_missing(run).groupby(["h", "r"]).head(2))
    assert list(tmp_path.glob("missing*")) == [path]


def test_more_sorted_files_than_may_be_open_are_merged(tmp_path, monkeypatch):
    monkeypatch.setattr(completion_module, "MERGED_ROWS", 1)
    random, runs = np.random.default_rng(0), []
    for number in range(60):
        links = np.zeros(5000 if number < 2 else 3, completion_module.LINK)
        links["probability"] = random.integers(0, 3, len(links)) / 2
        links["score"], links["head"] = random.integers(0, 9, len(links)), random.integers(0, 99, len(links))
        runs.append(completion_module._sorted(links))
        runs[-1].tofile(tmp_path / f"{number:02d}.links")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 10, before[1]))
    try:
        blocks = list(completion_module._merged(sorted(tmp_path.iterdir())))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    merged, unmerged = np.concatenate(blocks), np.concatenate(runs)
    order = completion_module._order(merged)
    assert len(blocks) > 3 and np.array_equal(np.sort(order), order)
    assert np.array_equal(np.sort(merged), np.sort(unmerged))


@pytest.mark.parametrize(
    ("question", "message"),
    [
        ({"min_probability": 1.5}, "at most 1, got 1.5"),
        ({"relations": ["know"]}, "knows"),
        ({"heads": ["town1"], "relations": ["knows"]}, "is of type town"),
        ({"held_out": "dev"}, "valid"),
    ],
)
def test_refuses_bad_questions(run, question, message):
    with pytest.raises(InputError, match=message):
        run.complete(**question)


@pytest.mark.parametrize("entity_type", ["person", "town"])
@pytest.mark.parametrize("candidates", ["all", "seen", "faiss"])
def test_rows_that_are_no_numbers_are_refused(tmp_path, dataset, monkeypatch, entity_type, candidates):
    """Of a head, which is not among those that the recall is measured on, and of a tail."""
    monkeypatch.setattr(approximate, "SAMPLED_RELATIONS", 1)
    monkeypatch.setattr(approximate, "SAMPLED_HEADS", 1)
    if candidates == "faiss":
        pytest.importorskip("faiss", reason="faiss is not installed")
    run = dglkge.open_run(save_toy_run(tmp_path / "run", dataset, nan_in=entity_type))
    with pytest.raises(InputError, match="cannot be searched: a score is not finite"):
        run.complete(relations=["lives_in"], k=2, candidates=candidates)


@pytest.mark.parametrize("is_narrow", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("share", [0.5, 1e-4])
def test_rounding_skips_no_pair(share, is_narrow):
    # Rows as those of a trained model: few directions have most of the length.
    draws = torch.Generator().manual_seed(3)
    scales = torch.logspace(0, -2, 48)
    query = torch.randn(1500, 48, generator=draws) * scales
    rows = torch.randn(2100, 48, generator=draws) * scales
    model = build_model("distmult", 48, reciprocal=True)
    exact = query.double() @ rows.double().T
    # Between two scores: one that equals the limit may be rounded to either side.
    least = float(exact.flatten().sort(descending=True).values[int(share * exact.numel()) :][:2].mean())
    none = torch.empty(0, dtype=torch.int64)
    norm = float(rows.norm(dim=1).max())
    search = LinkSearch(model, query.double(), norm, (none, none), least, is_narrow=is_narrow)
    search.add(torch.arange(0), rows[:0])  # a type of one entity has rows in one part of a checkpoint only
    for start in range(0, len(rows), 700):
        search.add(torch.arange(start, start + 700), rows[start : start + 700])
    links = search.take()
    query_ids, candidate_ids = torch.nonzero(exact >= least).numpy().T
    order = np.lexsort((links["candidate"], links["query"]))
    assert np.array_equal(links["query"][order], query_ids)
    assert np.array_equal(links["candidate"][order], candidate_ids)


def test_an_index_prints_no_warning_and_is_measured_with_full_float32_matmuls(run, monkeypatch, capfd):
    pytest.importorskip("faiss", reason="faiss is not installed")
    precisions, links = set(), completion_module.Completion.links

    def observed(*arguments):
        precisions.add(torch.get_float32_matmul_precision())
        return links(*arguments)

    monkeypatch.setattr(completion_module.Completion, "links", observed)
    torch.set_float32_matmul_precision("medium")
    try:
        run.complete(k=1, candidates="faiss")
    finally:
        torch.set_float32_matmul_precision("highest")
    assert precisions == {"highest"} and "WARNING" not in capfd.readouterr().err
