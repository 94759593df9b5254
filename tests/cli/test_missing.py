"""``dglkge complete``, ``ask`` and ``explain``: what they print and write, and what is refused."""

from __future__ import annotations

import json

import pandas as pd
import pytest

import dglkge
from tests.checkpoint.toy_checkpoint import calibrated


def test_writes_the_best_of_each_query(report, refusal, run, tmp_path):
    path = tmp_path / "best.parquet"
    words = ["complete", run, "-o", path, "-k", "2", "--relation", "lies_in", "--held-out", "test"]
    summary = report(*words)
    expected = dglkge.open_run(run).complete(relations=["lies_in"], k=2, held_out="test")
    pd.testing.assert_frame_equal(pd.read_parquet(path), expected)
    assert (summary["triples"], summary["queries"], summary["pairs"]) == (len(expected), 10, 30)
    written = (run / "completion-test.json").read_text()
    assert json.loads(written)["curve"] == summary["curve"] and "Infinity" not in written
    assert f"{path} exists" in refusal(*words)


def test_says_the_recall_of_an_index(report, shown, run, tmp_path):
    pytest.importorskip("faiss", reason="faiss is not installed")
    words = [
        "complete",
        run,
        "-o",
        tmp_path / "best.parquet",
        "-k",
        "2",
        "--candidates",
        "faiss",
        "--overwrite",
    ]
    assert report(*words)["recall"]["recall"] == 1  # one list has all
    assert "recall of the index: 1.0000, of " in shown(*words)


def test_answers_a_question(report, shown, refusal, run):
    calibrated(run, 1.0, 0.0)
    words = ["ask", run, "?x : (person1, knows, ?y), (?y, lives_in, ?x)", "-k", "3"]
    result = report(*words)
    expected = dglkge.open_run(run).ask(words[2], k=3)["entity"].tolist()
    assert result["type"] == "town" and [answer["entity"] for answer in result["answers"]] == expected
    lines = shown(*words).splitlines()
    assert lines[1].split() == ["rank", "probability", "answer", "path"] and "knows" in lines[2]
    assert "begins with a variable" in refusal("ask", run, "(person1, knows, ?y)")


def test_reasons(report, shown, refusal, run):
    link = ["--head", "person1", "--relation", "lives_in", "--tail", "town1"]
    words = ["explain", run, *link, "-k", "3"]
    assert report(*words) == dglkge.open_run(run).explain("person1", "lives_in", "town1", 3)
    text = shown(*words)
    assert text.startswith("(person1, lives_in, town1): score ")
    assert all(part in text for part in ("of the", "instead of the", "confidence", "=> (x, lives_in, y)"))
    rules = report("explain", run, "--relation", "lives_in", "-k", "2")["rules"]
    assert [rule["rule"] for rule in rules] == dglkge.open_run(run).rules("lives_in", 2)["rule"].tolist()
    assert rules[0]["rule"] in shown("explain", run, "--relation", "lives_in")
    assert "give --head and --tail, or neither" in refusal("explain", run, *link[:4])
    assert "nobody" in refusal("explain", run, "--head", "nobody", *link[2:])


def test_numbers(report, shown, refusal, run, tmp_path):
    opened, path = dglkge.open_run(run), tmp_path / "values.tsv"
    rows = opened.tables["person"][:30]
    path.write_text("".join(f"person{number}\t{row[:3].sum()}\n" for number, row in enumerate(rows)))
    result = report("attributes", run, path, "-k", "3", "-o", tmp_path / "all.parquet")
    values = {f"person{number}": float(row[:3].sum()) for number, row in enumerate(rows)}
    expected = opened.predict_numbers(values)
    unknown = expected[expected["known"].isna()]
    assert result["r2"] == pytest.approx(expected.attrs["r2"]) and result["values"] == 30
    assert [entity["entity"] for entity in result["entities"]] == unknown["entity"][:3].tolist()
    assert pd.read_parquet(tmp_path / "all.parquet")["entity"].tolist() == unknown["entity"].tolist()
    assert shown("attributes", run, path, "--least", "-k", "1").split()[-1] == unknown["entity"].iloc[-1]
    path.write_text("person1\tmany\n")
    assert "the value of 'person1' is 'many'; expected a number" in refusal("attributes", run, path)


def test_needs_probabilities(refusal, run, tmp_path):
    assert "fit probabilities first" in refusal("complete", run, "-o", tmp_path / "all.parquet")
    assert "--threads must be 1 to" in refusal("complete", run, "-o", "x", "--threads", "0")
