"""Questions and answers as data frames, against scores of single triples computed by the model's formula."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

import dglkge
from dglkge.errors import InputError
from dglkge.typing import RELATION, Side
from tests.checkpoint.toy_checkpoint import calibrated

COLUMNS = ["head", "relation", "tail"]


def single_score(run, side, triple):
    """Score one triple of original ids on one side."""
    head, relation_id, tail = triple
    relation = run.tables.relations[relation_id]
    anchor, answer = (head, tail) if side is Side.TAIL else (tail, head)
    query = run.model.query(
        run.tables.gather(relation.anchor_type(side), torch.tensor([anchor])),
        run.tables.gather(RELATION, torch.tensor([relation_id])),
        side,
        torch.tensor([relation_id]),
    )
    rows = run.tables.gather(relation.candidate_type(side), torch.tensor([answer]))
    return float(run.model.compare(query.double(), rows.double())[0, 0])


def mean_score(run, triple):
    return (single_score(run, Side.HEAD, triple) + single_score(run, Side.TAIL, triple)) / 2


def named(dataset, triple):
    """The names of a triple of original ids."""
    head, relation_id, tail = (int(part) for part in triple)
    relation = dataset.relations[relation_id]
    label = dataset.relations.labels[relation_id]
    return dataset.vocabulary(relation.lhs)[head], label, dataset.vocabulary(relation.rhs)[tail]


def test_tails_and_heads(folder, dataset):
    run = dglkge.open_run(folder)
    head, relation_id, tail = (int(part) for part in dataset.split("valid")[0])
    names = named(dataset, (head, relation_id, tail))
    for side, frame in (
        (Side.TAIL, run.predict_tails(names[0], names[1], k=1000)),
        (Side.HEAD, run.predict_heads(names[1], names[2], k=1000)),
    ):
        type_ = dataset.relations[relation_id].candidate_type(side)
        vocabulary = dataset.vocabulary(type_)
        expected = {
            vocabulary[other]: single_score(
                run, side, (head, relation_id, other) if side is Side.TAIL else (other, relation_id, tail)
            )
            for other in range(len(vocabulary))
        }
        assert frame.columns.tolist() == ["rank", "entity", "score", "known_from"]
        assert frame["rank"].tolist() == list(range(1, len(vocabulary) + 1))
        assert frame["entity"].tolist() == sorted(expected, key=lambda name: -expected[name])
        assert frame["score"].tolist() == pytest.approx(sorted(expected.values(), reverse=True), rel=1e-4)
        answer = names[2] if side is Side.TAIL else names[0]
        assert frame.set_index("entity")["known_from"][answer] == "valid"
    assert len(run.predict_tails(names[0], names[1], k=2)) == 2
    assert names[2] not in run.predict_tails(names[0], names[1], k=1000, known="drop")["entity"].tolist()
    with pytest.raises(
        InputError, match="unknown treatment of known answers 'hide'; known: 'drop', 'keep', 'mark'"
    ):
        run.predict_tails(names[0], names[1], known="hide")


def test_relations(folder, dataset):
    run = dglkge.open_run(folder)
    head, relation_id, tail = (int(part) for part in dataset.split("test")[0])
    names = named(dataset, (head, relation_id, tail))
    types = (dataset.relations[relation_id].lhs, dataset.relations[relation_id].rhs)
    expected = {
        dataset.relations.labels[other]: mean_score(run, (head, other, tail))
        for other, relation in enumerate(dataset.relations.relations)
        if (relation.lhs, relation.rhs) == types
    }
    frame = run.predict_relations(names[0], names[2], k=1000)
    assert frame["relation"].tolist() == sorted(expected, key=lambda label: -expected[label])
    assert frame["score"].tolist() == pytest.approx(sorted(expected.values(), reverse=True), rel=1e-4)
    assert frame.set_index("relation")["known_from"][names[1]] == "test"
    dropped = run.predict_relations(names[0], names[2], k=1000, known="drop")
    assert names[1] not in dropped["relation"].tolist()
    with pytest.raises(InputError, match="no relation joins the types of 'country0' and 'person1'"):
        run.predict_relations("country0", "person1")
    with pytest.raises(InputError, match="answers must be at least 1, got 0"):
        run.predict_relations(names[0], names[2], k=0)


def test_many_queries_of_all_kinds(folder, dataset):
    """Each query's answers are those that it gets alone; problems stand in the rows of their queries."""
    run = dglkge.open_run(folder)
    rows, single = [], []
    for triple in dataset.split("test")[:4]:
        head, relation, tail = named(dataset, triple)
        rows += [(head, relation, None), (np.nan, relation, tail), (head, "?", tail)]
        single.append(run.predict_tails(head, relation, k=3))
        single.append(run.predict_heads(relation, tail, k=3))
        single.append(run.predict_relations(head, tail, k=3))
    rows += [("nobody", "knows", None), ("person1", "knows", "person2"), (None, None, "person2")]
    index = [f"q{place}" for place in range(len(rows))]
    answers = run.predict(pd.DataFrame(rows, columns=COLUMNS, index=index), k=3)
    for place, (parts, alone) in enumerate(zip(rows, single)):
        missing = COLUMNS[[part == "?" or pd.isna(part) for part in parts].index(True)]
        query_rows = answers[answers["query"] == f"q{place}"]
        assert set(query_rows["missing"]) == {missing} and query_rows["problem"].isna().all()
        name = "relation" if missing == "relation" else "entity"
        for column, other_column in ((missing, name), ("rank", "rank"), ("known_from", "known_from")):
            assert query_rows[column].tolist() == alone[other_column].tolist()
        # A batch of queries adds in another order than one.
        assert query_rows["score"].tolist() == pytest.approx(alone["score"].tolist(), rel=1e-5)
        for column, part in zip(COLUMNS, parts):
            if column != missing:
                assert set(query_rows[column]) == {part}
    problems = answers.set_index("query")["problem"].dropna()
    assert problems.index.tolist() == ["q12", "q13", "q14"]
    assert problems["q12"].startswith("unknown entity 'nobody'")
    assert problems["q13"] == ("a query has two of head, relation and tail; (person1, knows, person2) has 3")
    assert problems["q14"].endswith("(?, ?, person2) has 1")
    assert answers["rank"].isna().sum() == 3
    with pytest.raises(InputError, match="row q12: unknown entity 'nobody'"):
        run.predict(pd.DataFrame(rows, columns=COLUMNS, index=index), strict=True)
    # A column may be absent; no query at all gives an empty frame of the same columns.
    assert run.predict(pd.DataFrame({"head": ["person1"], "relation": ["knows"]}), k=2)["rank"].tolist() == [
        1,
        2,
    ]
    nothing = run.predict(pd.DataFrame(columns=COLUMNS))
    assert len(nothing) == 0 and nothing.columns.tolist() == answers.columns.tolist()


def test_scores_of_triples(folder, dataset):
    run = dglkge.open_run(folder)
    triples = dataset.split("train")[:20]
    frame = pd.DataFrame([named(dataset, triple) for triple in triples], columns=COLUMNS)
    frame["extra"] = 1
    frame = frame.set_index(pd.Index(range(100, 120)))
    frame.loc[105, "head"] = "nobody"
    frame.loc[107, "tail"] = None
    scored = run.score(frame)
    assert scored.columns.tolist() == [*COLUMNS, "score", "known_from", "problem"]
    assert scored.index.tolist() == frame.index.tolist()
    good = [place for place in range(20) if place not in (5, 7)]
    expected_scores = [mean_score(run, [int(part) for part in triples[place]]) for place in good]
    assert scored["score"].iloc[good].tolist() == pytest.approx(expected_scores, rel=1e-6)
    assert set(scored["known_from"].iloc[good]) == {"train"}
    assert np.isnan(scored.loc[105, "score"]) and "unknown" in scored.loc[105, "problem"]
    assert scored.loc[107, "problem"].startswith("a triple has head, relation and tail; got (")
    with pytest.raises(InputError, match="row 105: unknown entity 'nobody'|row 105: relation"):
        run.score(frame, strict=True)
    with pytest.raises(InputError, match="the triples have no column relation and no column tail; they have"):
        run.score(pd.DataFrame({"head": ["a"], "x": ["b"]}))
    assert len(run.score(frame.iloc[:0])) == 0


def test_probabilities(folder, dataset):
    run = dglkge.open_run(folder)
    calibrated(folder, 0.3, -0.1)
    frame = run.predict_tails("person1", "knows")
    assert frame["probability"].tolist() == pytest.approx(
        (1 / (1 + np.exp(-(0.3 * frame["score"] - 0.1)))).tolist()
    )
    assert run.predict(pd.DataFrame({"head": ["x"], "relation": ["knows"]}))["probability"].isna().all()


def test_similar_and_embeddings(folder, dataset):
    run = dglkge.open_run(folder)
    names = ["town1", "person3", "person0"]
    rows = run.embeddings(names)
    assert rows.index.tolist() == names and (rows.dtypes == np.float32).all()
    for name, table in zip(names, ("town", "person", "person")):
        id_ = dataset.vocabulary(table).id(name)
        assert rows.loc[name].to_numpy().tolist() == run.tables.gather(table, torch.tensor([id_]))[0].tolist()
    people = run.embeddings(entity_type="person")
    assert people.index.tolist() == dataset.vocabulary("person").names
    vectors = people.to_numpy(np.float64)
    person_id = dataset.vocabulary("person").id("person3")
    cosines = (
        vectors @ vectors[person_id] / np.linalg.norm(vectors, axis=1) / np.linalg.norm(vectors[person_id])
    )
    order = [int(place) for place in np.argsort(-cosines) if place != person_id][:4]
    frame = run.similar("person3", k=4)
    assert frame["rank"].tolist() == [1, 2, 3, 4]
    assert frame["entity"].tolist() == [dataset.vocabulary("person")[place] for place in order]
    assert frame["cosine"].tolist() == pytest.approx(cosines[order].tolist(), rel=1e-5)
    with pytest.raises(
        InputError, match="there are several entity types: say which of country, person, town"
    ):
        run.embeddings()
    with pytest.raises(InputError, match="names are a list of texts; got the text 'person3'"):
        run.embeddings("person3")


def test_metrics_as_a_frame(folder, dataset):
    result = dglkge.open_run(folder).evaluate("test")
    whole = result.to_frame().set_index("side")
    assert whole.index.tolist() == ["both", "head", "tail"]
    assert (
        whole.loc["both", "mrr"] == result.both.mrr and whole.loc["tail", "hits@10"] == result.tail.hits[10]
    )
    by_relation = result.to_frame(by="relation").set_index(["relation", "side"])
    label, sides = next(iter(result.per_relation().items()))
    assert by_relation.loc[(label, "head"), "mr"] == sides["head"].mr
    assert set(result.to_frame(by="category")["category"]) == set(result.per_category())
    with pytest.raises(InputError, match="unknown way of dividing the queries 'x'"):
        result.to_frame(by="x")
    with pytest.raises(InputError, match="unknown split 'tests'; did you mean 'test'"):
        dglkge.open_run(folder).evaluate("tests")
