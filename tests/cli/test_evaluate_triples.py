"""``dglkge evaluate`` of a file of triples, and its tables by relation, category and side."""

from __future__ import annotations

import json

import numpy as np
import pytest

from dglkge.evaluation.metrics import relation_categories
from dglkge.inference.run import open_run


def write_triples(dataset, triples, path):
    lines = []
    for head, relation_id, tail in triples.tolist():
        relation = dataset.relations[relation_id]
        names = dataset.vocabulary(relation.lhs)[head], dataset.vocabulary(relation.rhs)[tail]
        lines.append(f"{names[0]}\t{relation.name}\t{names[1]}\n")
    path.write_text("".join(lines), encoding="utf-8")
    return path


def test_a_file_of_a_split_has_the_metrics_of_the_split(call, run, dataset, tmp_path):
    path = write_triples(dataset, dataset.split("valid"), tmp_path / "mine.tsv")
    status, out, _ = call("evaluate", run, "--triples", path)
    assert status == 0
    assert out.startswith(f"triples of {path}, filtered, all candidates, realistic ties")
    assert f"written to {run}/metrics-triples-mine.json" in out
    found = json.loads((run / "metrics-triples-mine.json").read_text())
    assert found.pop("protocol")["split"] == str(path)
    status, out, _ = call("evaluate", run, "--split", "valid", "--json")
    expected = json.loads(out)
    assert expected.pop("protocol")["split"] == "valid"
    assert found == expected


def test_triples_of_a_file_are_known(call, run, dataset, tmp_path):
    """Answers that only the file has are left out of the candidates of its other queries."""
    towns = [f"town{i}" for i in range(10)]
    path = tmp_path / "mine.tsv"
    path.write_text("".join(f"{town}\tlies_in\tcountry{i}\n" for town in towns for i in range(3)))
    status, out, _ = call("evaluate", run, "--triples", path, "--limit", "3", "--json")
    report = json.loads(out)
    assert status == 0 and report["num_triples"] == 3
    assert report["tail"]["mr"] == 1.0 and report["tail"]["num_queries"] == 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--triples", "BAD"], "bad.tsv:2: unknown entity 'person99'; did you mean"),
        (["--triples", "/nowhere.tsv"], "/nowhere.tsv: there is no such file"),
        (["--triples", "BAD", "--split", "valid"], "give either --split or --triples, not both"),
        (["--columns", "htr"], "--columns goes with --triples"),
        (["--delimiter", "tab"], "--delimiter goes with --triples"),
        (["--triples", "BAD", "--columns", "hht"], "does not give head, relation and tail once each"),
    ],
)
def test_mistakes(call, run, tmp_path, arguments, words):
    bad = tmp_path / "bad.tsv"
    bad.write_text("person1\tknows\tperson2\nperson1\tknows\tperson99\n")
    status, out, err = call("evaluate", run, *[bad if word == "BAD" else word for word in arguments])
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert words in err
    assert not list(run.glob("metrics*"))


def test_by_category_and_side(call, run, dataset):
    status, out, _ = call("evaluate", run, "--split", "valid", "--by", "category", "--by", "side")
    assert status == 0
    categories = relation_categories(dataset.split("train"), dataset.num_relations)
    used = {categories.names[id_] for id_ in np.unique(dataset.split("valid")[:, 1])}
    report = json.loads((run / "metrics-valid.json").read_text())
    assert set(report["per_category"]) == used and len(used) > 1
    for name in used:
        assert f"\n  {name}, head  " in out and f"\n{name}  " in out
    assert "\nboth, pessimistic ties  " in out
    assert report["ties"]["realistic"]["both"] == report["both"]
    labels = list(open_run(run).tables.relations.labels.names)
    assert report["relation_categories"] == categories.to_dict(labels)
