"""``dglkge predict``: scores of the triples of a file."""

from __future__ import annotations

import json

import pandas as pd
import pytest

import dglkge
from dglkge.data.dataset import Dataset
from dglkge.evaluation.calibration import Calibration, Platt
from dglkge.evaluation.queries import score_triples

COLUMNS = ["head", "relation", "tail"]


@pytest.fixture
def triples(tmp_path):
    path = tmp_path / "triples.tsv"
    path.write_text("person1\tknows\tperson2\n\nnobody\tknows\tperson2\nperson3\tnear\ttown1\n")
    return path


def wanted(run):
    """The scores of both known triples by the Python interface."""
    frame = pd.DataFrame([("person1", "knows", "person2"), ("person3", "near", "town1")], columns=COLUMNS)
    return dglkge.open_run(run).score(frame)["score"].tolist()


def test_a_file_with_an_unknown_name(call, run, triples):
    status, out, err = call("score", run, "--input", triples, "--json")
    first, second, third = json.loads(out)
    assert (status, err) == (0, "")
    assert [first["score"], third["score"]] == wanted(run)
    assert {name: third[name] for name in COLUMNS} == dict(zip(COLUMNS, ("person3", "near", "town1")))
    assert "probability" not in first
    assert set(second) == {*COLUMNS, "problem"}
    assert second["problem"].startswith(f"{triples}:3: unknown entity 'nobody'")
    status, out, err = call("score", run, "--input", triples)
    lines = out.splitlines()
    assert status == 0 and err == "dglkge predict: 1 of 3 triples have a problem\n"
    assert lines[0].split() == ["score", *COLUMNS, "problem"]
    assert lines[1].split()[:4] == [f"{wanted(run)[0]:.4f}", "person1", "knows", "person2"]
    assert f"{triples}:3: unknown entity 'nobody'" in lines[2]
    status, out, err = call("score", run, "--input", triples, "--strict")
    assert (status, out) == (2, "")
    assert err.startswith(f"dglkge: error: {triples}:3: unknown entity 'nobody'")


def test_columns_known_triples_and_probabilities(call, run, tmp_path):
    dataset = Dataset.open(dglkge.open_run(run).dataset.path)
    head, relation, tail = dataset.split("test")[0]
    names = dataset.relations[relation]
    triple = (
        dataset.vocabulary(names.lhs)[head],
        dataset.relations.labels[relation],
        dataset.vocabulary(names.rhs)[tail],
    )
    path = tmp_path / "triples.csv"
    path.write_text("o,s,p\n" + ",".join((triple[2], triple[0], triple[1])) + "\n")
    opened = dglkge.open_run(run).checkpoint
    curve = Platt(0.3, -0.1)
    calibration = Calibration(
        "platt", curve, 0.5, 10, 0, 5, 5, opened.manifest.run_id, opened.version
    )  # fmt: skip
    (run / "calibration.json").write_text(json.dumps(calibration.to_dict()))
    status, out, err = call("score", run, "--input", path, "--columns", "s,p,o", "--json")
    (report,) = json.loads(out)
    assert (status, err) == (0, "")
    assert report["known"] == "test"
    model, tables = dglkge.open_run(run).model, dglkge.open_run(run).tables
    by_side = score_triples(model, dataset.split("test")[:1], dataset.relations.relations, tables)
    values = [float(curve(scores)[0]) for scores in by_side.values()]
    assert report["probability"] == pytest.approx(sum(values) / 2, rel=1e-12)


def test_an_empty_file_is_refused(call, run, tmp_path):
    (tmp_path / "none.tsv").write_text("")
    status, out, err = call("score", run, "--input", tmp_path / "none.tsv")
    assert (status, out) == (2, "") and "none.tsv" in err
