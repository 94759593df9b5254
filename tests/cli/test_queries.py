"""``dglkge predict``, ``similar``, ``complete``, ``ask``, ``explain``, ``attributes``: text, JSON, files."""

from __future__ import annotations

import json

import pandas as pd
import pytest

import dglkge
from tests.checkpoint.toy_checkpoint import calibrated, save_toy, toy_meta, toy_tables
from tests.inference.link_scores import names_of

COLUMNS = ["head", "relation", "tail"]


def test_tails_as_a_table(shown, report, refusal, run, dataset):
    triple = dataset.split("train")[dataset.split("train")[:, 1] == 1][0]
    town, _, country = names_of(dataset, triple)
    words = ["predict", run, "--head", town, "--relation", "lies_in"]
    lines = shown(*words).splitlines()
    assert lines[0] == f"({town}, lies_in, ?): best tails of type country"
    assert lines[1].split() == ["rank", "score", "tail", "known", "from"]
    assert [line.split()[0] for line in lines[2:]] == ["1", "2", "3"]
    assert [line.split()[2] for line in lines[2:] if line.endswith(" train")] == [country]
    dropped, kept = (shown(*words, "--known", treatment) for treatment in ("drop", "keep"))
    assert country not in dropped and len(dropped.splitlines()) == 4
    assert country in kept and "known" not in kept and "train" not in kept
    assert report(*words, "--candidates", "seen") == report(*words)
    more = ["--known", "keep", "--candidates", "seen", "--dataset", "/nowhere"]
    assert "/nowhere is no dataset folder" in refusal(*words, *more)


def test_heads_by_the_type_of_the_tail_and_similar_entities(report, shown, run):
    answer = report("predict", run, "--relation", "near (person → town)", "--tail", "town1")
    assert answer["query"] == "(?, near (person → town), town1)"
    assert (answer["asked"], answer["type"]) == ("head", "person")
    lines = shown("similar", run, "--entity", "person4", "--topk", "3").splitlines()
    assert lines[0] == "nearest to person4 among entities of type person" and len(lines) == 5
    neighbours = report("similar", run, "country1")
    assert neighbours["type"] == "country"
    names, cosines = zip(*((entity["name"], entity["cosine"]) for entity in neighbours["similar"]))
    assert set(names) == {"country0", "country2"} and cosines[0] >= cosines[1]


def test_a_file_of_queries(report, shown, refusal, run, tmp_path):
    queries = tmp_path / "queries.tsv"
    queries.write_text("person1\tknows\t?\n\npersn1\tknows\t?\nperson1\t?\tperson2\n?\tlies_in\tcountry0\n")
    words = ["predict", run, "--input", queries, "--topk", "2"]
    first, second, third, fourth = report(*words)
    assert (first["query"], fourth["query"]) == ("(person1, knows, ?)", "(?, lies_in, country0)")
    assert len(first["answers"]) == len(fourth["answers"]) == 2
    assert third["asked"] == "relation" and "relation" not in third and "type" not in third
    assert "answers" not in second and all(set(answer) >= {"name", "known"} for answer in third["answers"])
    problem = f"{queries}:3: unknown entity 'persn1'; did you mean 'person1'"
    assert second["problem"].startswith(problem)
    out = shown(*words)
    assert f"(persn1, knows, ?): no answer: {problem}" in out
    assert out.count("best tails of type person") == 1 and out.count("best heads of type town") == 1
    assert "(person1, ?, person2): best relations" in out
    assert refusal(*words, "--strict").startswith(problem)


@pytest.mark.parametrize(
    ("command", "arguments", "words"),
    [
        ("predict", "--head a", "give two of --head, --relation and --tail, and the third is predicted"),
        ("predict", "--topk 3", "or all three for their score. Got none"),
        ("predict", "--triples x --head a", "give either --triples or one query, not both"),
        ("predict", "--input nowhere.tsv", "nowhere.tsv: there is no such file"),
        ("predict", "--input EMPTY", "none.tsv"),
        (
            "predict",
            "--head person1 --relation knows --topk 0",
            "answers must be a whole number of at least 1, got 0",
        ),
        ("complete", "-o all.parquet", "fit probabilities first"),
        ("explain", "--head person1 --relation lives_in", "give --head and --tail, or neither"),
        ("explain", "--head nobody --relation lives_in --tail town1", "nobody"),
        ("similar", "", "give one entity: dglkge similar RUN ENTITY"),
        ("similar", "x --type planet", "unknown entity type 'planet'; known: 'country', 'person', 'town'"),
    ],
)
def test_mistakes(refusal, run, tmp_path, command, arguments, words):
    (tmp_path / "none.tsv").write_text("")
    arguments = [tmp_path / "none.tsv" if word == "EMPTY" else word for word in arguments.split()]
    assert words in refusal(command, run, *arguments)


def test_without_the_data_set(shown, refusal, tmp_path, caplog):
    save_toy(tmp_path, toy_meta(), toy_tables(toy_meta(), finite=True))
    words = ["predict", tmp_path, "--head", "person-1", "--relation", "likes"]
    assert len(shown(*words).splitlines()) == 12
    assert "known answers are not marked: the run's dataset /nowhere/toy is not there any more" in caplog.text
    line = refusal(*words, "--known", "drop")
    assert "/nowhere/toy is not there any more; say with --dataset where it is" in line


def test_scores_of_a_file(report, refusal, call, run, dataset, tmp_path):
    path = tmp_path / "triples.tsv"
    path.write_text("person1\tknows\tperson2\n\nnobody\tknows\tperson2\nperson3\tnear\ttown1\n")
    frame = pd.DataFrame([("person1", "knows", "person2"), ("person3", "near", "town1")], columns=COLUMNS)
    expected = dglkge.open_run(run).score(frame)["score"].tolist()
    words = ["score", run, "--input", path]
    first, second, third = report(*words)
    assert [first["score"], third["score"]] == expected and "probability" not in first
    assert [third[name] for name in COLUMNS] == ["person3", "near", "town1"]
    problem = f"{path}:3: unknown entity 'nobody'"
    assert set(second) == {*COLUMNS, "problem"} and second["problem"].startswith(problem)
    status, out, err = call(*words)
    lines = out.splitlines()
    assert status == 0 and err == "dglkge predict: 1 of 3 triples have a problem\n"
    assert lines[0].split() == ["score", *COLUMNS, "problem"]
    assert lines[1].split()[:4] == [f"{expected[0]:.4f}", "person1", "knows", "person2"]
    assert problem in lines[2]
    assert refusal(*words, "--strict").startswith(problem)
    head, relation, tail = names_of(dataset, dataset.split("test")[0])
    (tmp_path / "triples.csv").write_text(f"o,s,p\n{tail},{head},{relation}\n")
    (scored,) = report("score", run, "--input", tmp_path / "triples.csv", "--columns", "s,p,o")
    assert (scored["head"], scored["tail"], scored["known"]) == (head, tail, "test")


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


def test_says_the_recall_of_an_index(shown, run, tmp_path):
    pytest.importorskip("faiss", reason="faiss is not installed")
    words = ["complete", run, "-o", tmp_path / "best.parquet", "-k", "2", "--candidates", "faiss"]
    assert "recall of the index: 1.0000, of " in shown(*words)  # one list has all


def test_answers_a_question(report, shown, refusal, run):
    calibrated(run, 1.0, 0.0)
    words = ["ask", run, "?x : (person1, knows, ?y), (?y, lives_in, ?x)", "-k", "3"]
    result = report(*words)
    expected = dglkge.open_run(run).ask(words[2], k=3)["entity"].tolist()
    assert result["type"] == "town" and [answer["entity"] for answer in result["answers"]] == expected
    lines = shown(*words).splitlines()
    assert lines[1].split() == ["rank", "probability", "answer", "path"] and "knows" in lines[2]
    assert "begins with a variable" in refusal("ask", run, "(person1, knows, ?y)")


def test_reasons(report, shown, run):
    link = ["--head", "person1", "--relation", "lives_in", "--tail", "town1"]
    words = ["explain", run, *link, "-k", "3"]
    assert report(*words) == dglkge.open_run(run).explain("person1", "lives_in", "town1", 3)
    text = shown(*words)
    assert text.startswith("(person1, lives_in, town1): score ")
    assert all(part in text for part in ("of the", "instead of the", "confidence", "=> (x, lives_in, y)"))
    rules = report("explain", run, "--relation", "lives_in", "-k", "2")["rules"]
    assert [rule["rule"] for rule in rules] == dglkge.open_run(run).rules("lives_in", 2)["rule"].tolist()
    assert rules[0]["rule"] in shown("explain", run, "--relation", "lives_in")


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
