"""``dglkge predict`` and ``similar``: answers to queries, scores of triples, and files of both."""

from __future__ import annotations

import pandas as pd
import pytest

import dglkge
from dglkge.evaluation.queries import score_triples
from tests.checkpoint.toy_checkpoint import calibrated, save_toy, toy_meta, toy_tables

COLUMNS = ["head", "relation", "tail"]


def names_of(dataset, triple):
    head, relation_id, tail = triple.tolist()
    relation = dataset.relations[relation_id]
    label = dataset.relations.labels[relation_id]
    return dataset.vocabulary(relation.lhs)[head], label, dataset.vocabulary(relation.rhs)[tail]


def test_tails_as_a_table(shown, run, dataset):
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


def test_among_the_entities_that_were_seen(report, refusal, run, dataset):
    """All of this data set were; without it the option is refused."""
    words = ["predict", run, "--head", "town1", "--relation", "lies_in", "-k", "99"]
    everything = report(*words)
    assert report(*words, "--candidates", "seen") == everything
    assert len(everything["answers"]) == dataset.num_entities("country")
    more = ["--known", "keep", "--candidates", "seen", "--dataset", "/nowhere"]
    assert "/nowhere is no dataset folder" in refusal(*words, *more)


def test_heads_by_the_type_of_the_tail(report, refusal, run):
    answer = report("predict", run, "--relation", "near (person → town)", "--tail", "town1")
    assert answer["query"] == "(?, near (person → town), town1)"
    assert (answer["asked"], answer["type"]) == ("head", "person")
    answer = report("predict", run, "--head", "person1", "--relation", "near")
    assert answer["relation"] == "near (person → town)"
    line = refusal("predict", run, "--relation", "near", "--tail", "town1")
    assert "relation 'near' joins several pairs of entity types; say which: 'near (person → town)'" in line


def test_relations(report, shown, run, dataset):
    triple = dataset.split("valid")[0]
    head, relation, tail = names_of(dataset, triple)
    words = ["predict", run, "--head", head, "--tail", tail]
    prediction = report(*words)
    assert prediction["asked"] == "relation" and "relation" not in prediction and "type" not in prediction
    pair = dataset.relations[int(triple[1])]
    fitting = [
        label
        for label, other in zip(dataset.relations.labels.names, dataset.relations.relations)
        if (other.lhs, other.rhs) == (pair.lhs, pair.rhs)
    ]
    known = {answer["name"]: answer["known"] for answer in prediction["answers"]}
    assert sorted(known) == sorted(fitting) and known[relation] == "valid"
    assert shown(*words).splitlines()[0] == f"({head}, ?, {tail}): best relations"


def test_a_file_of_queries(report, shown, refusal, run, tmp_path):
    """An unknown name is the problem of its own query, with its line."""
    queries = tmp_path / "queries.tsv"
    queries.write_text("person1\tknows\t?\n\npersn1\tknows\t?\nperson1\t?\tperson2\n?\tlies_in\tcountry0\n")
    words = ["predict", run, "--input", queries, "--topk", "2"]
    first, second, third, fourth = report(*words)
    assert (first["query"], fourth["query"]) == ("(person1, knows, ?)", "(?, lies_in, country0)")
    assert len(first["answers"]) == len(fourth["answers"]) == 2
    assert third["asked"] == "relation" and "answers" not in second
    problem = f"{queries}:3: unknown entity 'persn1'; did you mean 'person1'"
    assert second["problem"].startswith(problem)
    out = shown(*words)
    assert f"(persn1, knows, ?): no answer: {problem}" in out
    assert out.count("best tails of type person") == 1 and out.count("best heads of type town") == 1
    assert refusal(*words, "--strict").startswith(problem)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--head a", "give two of --head, --relation and --tail, and the third is predicted"),
        ("--topk 3", "or all three for their score. Got none"),
        ("--head a --tail b --relation knows", "unknown entity 'a'"),
        ("--triples x --head a", "give either --triples or one query, not both"),
        ("--input nowhere.tsv", "nowhere.tsv: there is no such file"),
        ("--input EMPTY", "none.tsv"),
        ("--head person1 --relation know", "unknown relation 'know'; did you mean 'knows'"),
        ("--head person1 --relation knows --topk 0", "answers must be at least 1, got 0"),
    ],
)
def test_mistakes(refusal, run, tmp_path, arguments, words):
    (tmp_path / "none.tsv").write_text("")
    arguments = [tmp_path / "none.tsv" if word == "EMPTY" else word for word in arguments.split()]
    assert words in refusal("predict", run, *arguments)


def test_without_the_data_set(shown, refusal, tmp_path, caplog):
    meta = toy_meta()
    tables = toy_tables(meta)
    for whole in tables.values():
        whole.rows.nan_to_num_(posinf=1.0)
    save_toy(tmp_path, meta, tables)
    words = ["predict", tmp_path, "--head", "person-1", "--relation", "likes"]
    assert len(shown(*words).splitlines()) == 12
    assert "known answers are not marked: the run's dataset /nowhere/toy is not there any more" in caplog.text
    line = refusal(*words, "--known", "drop")
    assert "/nowhere/toy is not there any more; say with --dataset where it is" in line


def test_scores_of_a_file(report, refusal, call, run, tmp_path):
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


def test_columns_known_triples_and_probabilities(report, run, dataset, tmp_path):
    triple = dataset.split("test")[0]
    head, relation, tail = names_of(dataset, triple)
    path = tmp_path / "triples.csv"
    path.write_text(f"o,s,p\n{tail},{head},{relation}\n")
    opened, curve = dglkge.open_run(run), calibrated(run, 0.3, -0.1)
    (scored,) = report("score", run, "--input", path, "--columns", "s,p,o")
    by_side = score_triples(opened.model, triple[None], dataset.relations.relations, opened.tables)
    values = [float(curve(scores)[0]) for scores in by_side.values()]
    assert scored["known"] == "test"
    assert scored["probability"] == pytest.approx(sum(values) / 2, rel=1e-12)


def test_similar(shown, report, run):
    lines = shown("similar", run, "--entity", "person4", "--topk", "3").splitlines()
    assert lines[0] == "nearest to person4 among entities of type person" and len(lines) == 5
    neighbours = report("similar", run, "country1")
    assert neighbours["type"] == "country"
    assert {entity["name"] for entity in neighbours["similar"]} == {"country0", "country2"}
    assert neighbours["similar"][0]["cosine"] >= neighbours["similar"][1]["cosine"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give one entity: dglkge similar RUN ENTITY"),
        (["nobody"], "no entity of any type is called 'nobody'; with a type"),
        (["persn4", "--type", "person"], "unknown entity 'persn4'; did you mean 'person4'"),
        (["x", "--type", "planet"], "unknown entity type 'planet'; known: 'country', 'person', 'town'"),
    ],
)
def test_mistakes_about_similar_entities(refusal, run, arguments, words):
    assert words in refusal("similar", run, *arguments)
