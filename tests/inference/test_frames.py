"""Answers to queries by name and by brute force, evaluation by buckets, and numbers of entities."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import pytest
import torch

import dglkge
from dglkge.data.known_triples import KnownTriples
from dglkge.errors import InputError
from dglkge.evaluation.metrics import Protocol
from dglkge.inference import search
from dglkge.inference.choices import ALL, CANDIDATES, Known
from dglkge.inference.search import LinkQuery, most_similar
from dglkge.typing import Side
from tests.checkpoint.toy_checkpoint import RELATION_WIDTH, save_toy, save_toy_run, toy_meta, toy_tables
from tests.inference.link_scores import all_scores, names_of

COLUMNS = ["head", "relation", "tail"]


def mean_scores(run, triples):
    scores = all_scores(run)
    return [np.mean([scores[r, side][h, t] for side in Side]) for h, r, t in triples]


def test_tails_and_heads(run, dataset):
    head, relation_id, tail = (int(part) for part in dataset.split("valid")[0])
    names = names_of(dataset, (head, relation_id, tail))
    tail_scores = all_scores(run)[relation_id, Side.TAIL][head]
    head_scores = all_scores(run)[relation_id, Side.HEAD][:, tail]
    for side, frame, answer, scores in (
        (Side.TAIL, run.predict_tails(*names[:2], k=1000), names[2], tail_scores),
        (Side.HEAD, run.predict_heads(*names[1:], k=1000), names[0], head_scores),
    ):
        entities = np.array(dataset.vocabulary(dataset.relations[relation_id].candidate_type(side)).names)
        order = np.argsort(-scores)
        assert frame.columns.tolist() == ["rank", "entity", "score", "known_from"]
        assert frame["rank"].tolist() == list(range(1, len(entities) + 1))
        assert frame["entity"].tolist() == entities[order].tolist()
        assert frame["score"].tolist() == pytest.approx(scores[order].tolist(), rel=1e-4)
        assert frame.set_index("entity")["known_from"][answer] == "valid"
    assert len(run.predict_tails(*names[:2], k=2)) == 2
    assert names[2] not in run.predict_tails(*names[:2], k=1000, known="drop")["entity"].tolist()
    with pytest.raises(InputError, match="unknown choice of candidates 'sen'; did you mean 'seen'"):
        run.predict_tails(*names[:2], candidates="sen")


def test_relations(run, dataset):
    head, relation_id, tail = (int(part) for part in dataset.split("test")[0])
    names = names_of(dataset, (head, relation_id, tail))
    types, expected = (dataset.relations[relation_id].lhs, dataset.relations[relation_id].rhs), {}
    for other, pair in enumerate(dataset.relations.relations):
        if (pair.lhs, pair.rhs) == types:
            (expected[dataset.relations.labels[other]],) = mean_scores(run, [(head, other, tail)])
    frame = run.predict_relations(names[0], names[2], k=1000)
    assert frame["relation"].tolist() == sorted(expected, key=lambda label: -expected[label])
    assert frame["score"].tolist() == pytest.approx(sorted(expected.values(), reverse=True), rel=1e-4)
    # Of a triple with a relation as of the whole triple; times are read where relations have them.
    assert (
        run.score(frame.assign(head=names[0], tail=names[2], time="x"), strict=True)["score"].tolist()
        == frame["score"].tolist()
    )
    assert frame.set_index("relation")["known_from"][names[1]] == "test"
    dropped = run.predict_relations(names[0], names[2], k=1000, known="drop")
    assert names[1] not in dropped["relation"].tolist()
    with pytest.raises(InputError, match="no relation joins the types of 'country0' and 'person1'"):
        run.predict_relations("country0", "person1")
    with pytest.raises(InputError, match="the relations of the run have no times"):
        run.predict_times("town1", "near", "town2")


def test_many_queries_of_all_kinds(run, dataset):
    """Each query's answers are those that it gets alone; problems stand in the rows of their queries."""
    rows, single = [], []
    for triple in dataset.split("test")[:4]:
        head, relation, tail = names_of(dataset, triple)
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
        # A batch of queries adds in another order than one.
        columns = [missing, "rank", "known_from", "score"]
        alone = alone.rename(columns={"entity": missing})[columns]
        query_rows = query_rows.reset_index(drop=True)
        pd.testing.assert_frame_equal(query_rows[columns], alone, rtol=1e-5, atol=0, check_dtype=False)
        for column, part in zip(COLUMNS, parts):
            assert column == missing or set(query_rows[column]) == {part}
    problems = answers.set_index("query")["problem"].dropna()
    assert problems.index.tolist() == ["q12", "q13", "q14"]
    assert problems["q12"].startswith("unknown entity 'nobody'")
    assert problems["q13"] == ("a query has two of head, relation and tail; (person1, knows, person2) has 3")
    assert problems["q14"].endswith("(?, ?, person2) has 1")
    assert answers["rank"].isna().sum() == 3
    with pytest.raises(InputError, match="row q12: unknown entity 'nobody'"):
        run.predict(pd.DataFrame(rows, columns=COLUMNS, index=index), strict=True)
    # A column may be absent; no query at all gives an empty frame of the same columns.
    without_tails = pd.DataFrame({"head": ["person1"], "relation": ["knows"]})
    assert run.predict(without_tails, k=2)["rank"].tolist() == [1, 2]
    notes = pd.DataFrame([["a", "b"]], columns=["note", "note"])
    assert run.predict(pd.concat([without_tails, notes], axis=1), k=2)["rank"].tolist() == [1, 2]
    nothing = run.predict(pd.DataFrame(columns=COLUMNS))
    assert len(nothing) == 0 and nothing.columns.tolist() == answers.columns.tolist()


def test_scores_of_triples(run, dataset):
    triples = dataset.split("train")[:20]
    frame = pd.DataFrame([names_of(dataset, triple) for triple in triples], columns=COLUMNS)
    frame = frame.assign(extra=1).set_index(pd.Index(range(100, 120)))
    frame.loc[105, "head"] = "nobody"
    frame.loc[107, "tail"] = None
    scored = run.score(frame)
    assert scored.columns.tolist() == [*COLUMNS, "score", "known_from", "problem"]
    assert scored.index.tolist() == frame.index.tolist()
    good = [place for place in range(20) if place not in (5, 7)]
    expected = mean_scores(run, triples[good].tolist())
    assert scored["score"].iloc[good].tolist() == pytest.approx(expected, rel=1e-6)
    assert set(scored["known_from"].iloc[good]) == {"train"}
    assert np.isnan(scored.loc[105, "score"]) and "unknown" in scored.loc[105, "problem"]
    assert scored.loc[107, "problem"].startswith("a triple has head, relation and tail; got (")
    with pytest.raises(InputError, match="the triples have no column relation and no column tail; they have"):
        run.score(pd.DataFrame({"head": ["a"], "x": ["b"]}))
    assert len(run.score(frame.iloc[:0])) == 0


def test_similar_and_embeddings(run, dataset):
    names = ["town1", "person3", "person0"]
    rows = run.embeddings(names)
    assert rows.index.tolist() == names and (rows.dtypes == np.float32).all()
    assert run.embeddings(pd.Series(names, index=[2, 0, 1])).equals(rows)
    for name, table in zip(names, ("town", "person", "person")):
        assert rows.loc[name].tolist() == run.tables[table][name].tolist()
    people = run.embeddings(entity_type="person")
    assert people.index.tolist() == dataset.vocabulary("person").names
    unit = people.div(np.linalg.norm(people, axis=1), axis=0)
    expected = (unit @ unit.loc["person3"]).drop("person3").nlargest(4)
    frame = run.similar("person3", k=4)
    assert frame["rank"].tolist() == [1, 2, 3, 4] and frame["entity"].tolist() == expected.index.tolist()
    assert frame["cosine"].tolist() == pytest.approx(expected.tolist(), rel=1e-5)
    with pytest.raises(InputError, match="several entity types: say which of country, person, town"):
        run.embeddings()


def test_metrics_as_a_frame(run):
    result = run.evaluate("test")
    whole = result.to_frame().set_index("side")
    assert whole.index.tolist() == ["both", "head", "tail"] and whole.loc["both", "mrr"] == result.both.mrr
    assert whole.loc["tail", "hits@10"] == result.tail.hits[10]
    by_relation = result.to_frame(by="relation").set_index(["relation", "side"])
    label, sides = next(iter(result.per_relation().items()))
    assert by_relation.loc[(label, "head"), "mr"] == sides["head"].mr
    assert set(result.to_frame(by="category")["category"]) == set(result.per_category())
    with pytest.raises(InputError, match="unknown split 'tests'; did you mean 'test'"):
        run.evaluate("tests")


def test_buckets_then_edge_sets_then_all(run, dataset):
    results = list(run.evaluate_buckets(["valid", "test"], num_ranges=2))
    assert [name for name, bucket, _ in results if bucket is None] == ["valid", "test", None]
    for name in ("valid", "test"):
        whole = run.evaluate(name)
        *buckets, edge_set = [result for result in results if result.edge_set == name]
        assert [part.bucket for part in buckets] == sorted({part.bucket for part in buckets})
        # Every triple is in the bucket of its own ids, with the rank of the evaluation in one go.
        expected, ranks = {}, zip(whole.ranks[Side.HEAD], whole.ranks[Side.TAIL])
        for (head, relation_id, tail), ranks_of_triple in zip(dataset.split(name).tolist(), ranks):
            relation = dataset.relations[relation_id]
            halves = [dataset.num_entities(type_) // 2 for type_ in (relation.lhs, relation.rhs)]
            bucket = (int(head >= halves[0]), int(tail >= halves[1]))
            expected.setdefault(bucket, []).append((relation_id, *ranks_of_triple))
        assert len(expected) > 1
        for _, bucket, result in buckets:
            rows = zip(result.relation_ids.tolist(), result.ranks[Side.HEAD], result.ranks[Side.TAIL])
            assert list(rows) == expected.pop(bucket) and result.protocol.split == name
        assert not expected and edge_set.result.to_dict() == whole.to_dict()
    both, last = [run.evaluate(name).both for name in ("valid", "test")], results[-1].result
    assert last.both.num_queries == sum(metrics.num_queries for metrics in both)
    total = sum(metrics.mrr * metrics.num_queries for metrics in both)
    assert last.both.mrr == pytest.approx(total / last.both.num_queries)
    assert last.protocol.split == "valid+test"


def test_results_come_one_by_one_and_triples_of_the_caller_are_true(run, dataset):
    ranked = []
    results = run.evaluate_buckets("test", Protocol(filtered=False), 2, ranked.append)
    assert not ranked
    first = next(results)
    assert sum(ranked) == first.result.both.num_queries < 2 * len(dataset.split("test"))
    triples = np.concatenate([dataset.split("test")[:3], [[0, dataset.split("test")[0, 1], 0]]])
    *_, whole, everything = run.evaluate_buckets({"mine": triples}, num_ranges=3)
    expected = run.evaluate(Protocol(split="mine"), triples, also_known=[triples])
    assert whole.edge_set == "mine" and whole.result.to_dict() == expected.to_dict()
    assert everything.result.both == whole.result.both
    refused = {"edge set 'tset'; did you mean 'test'": "tset", "has no triples": {"mine": triples[:0]}}
    for words, edge_sets in refused.items():
        with pytest.raises(InputError, match=words):
            run.evaluate_buckets(edge_sets)


def test_numbers_that_rows_determine_are_found_and_others_are_not(run):
    pytest.importorskip("sklearn")
    names, rows = run.tables.vocabulary("person").names, run.tables["person"][:].double().numpy()
    truth = 3 + rows @ [1.0, -2.0, 0.5, 0.0, 4.0, 1.0]
    known_numbers = pd.Series(truth[:30], names[:30])
    frame = run.predict_numbers(known_numbers)
    assert frame["predicted"].is_monotonic_decreasing and sorted(frame["entity"]) == sorted(names)
    frame = frame.set_index("entity").loc[list(names)]
    assert frame["predicted"].tolist() == pytest.approx(truth, abs=0.05)
    assert frame["known"][:30].tolist() == known_numbers.tolist() and frame["known"][30:].isna().all()
    assert frame.attrs["r2"] > 0.999 and frame.attrs["mean_error"] < 0.05
    draws = np.random.default_rng(0).normal(size=40)
    frame = run.predict_numbers(dict(zip(names, draws)))
    # What is not determined is predicted by the mean.
    assert frame.attrs["r2"] < 0.2 and frame["predicted"].std() < 0.7 * draws.std()
    for value in (np.nan, -1e308):
        with pytest.raises(
            InputError,
            match=f"the value of 'person1' is {value}; expected a number below".replace("+", r"\+"),
        ):
            run.predict_numbers({**known_numbers, "person1": value})


def expected_answers(scores, splits, query, known, candidates):
    """The six best by scores that were computed one by one, each with its split, and these scores."""
    of_relation = scores[query.relation_id, query.side]
    values = of_relation[query.entity_id] if query.side is Side.TAIL else of_relation[:, query.entity_id]
    split_of, seen = {}, set()
    for split, triples in reversed(splits.items()):  # the first split that has a triple counts
        for triple in triples[triples[:, 1] == query.relation_id].tolist():
            seen.add(triple[query.side.column])
            if triple[query.side.anchor_column] == query.entity_id:
                split_of[triple[query.side.column]] = split
    ids = [
        id_
        for id_ in np.argsort(-values, kind="stable").tolist()
        if not (known is Known.DROP and id_ in split_of) and (candidates == ALL or id_ in seen)
    ][:6]
    return [(id_, split_of.get(id_) if known is Known.MARK else None) for id_ in ids], values[ids]


MODELS = [*sorted(RELATION_WIDTH), "complex", "transe_l2", "complex"]


@pytest.mark.parametrize("number, score_function", [*enumerate(MODELS)])
def test_answers_against_brute_force(tmp_path, dataset, monkeypatch, number, score_function):
    """Every score function, and every pair of the other choices."""
    known, candidates = list(Known)[number % 3], CANDIDATES[number // 2 % 2]
    monkeypatch.setattr(search, "BLOCK_BYTES", (1, 200, 1 << 20)[number % 3])
    monkeypatch.setattr(search, "QUERIES_AT_A_TIME", 2)
    run = dglkge.open_run(save_toy_run(tmp_path, dataset, score_function, reciprocal=number % 2 == 0))
    # Few triples, so that not all entities are seen; some stand in both splits.
    splits = {"train": dataset.split("train")[::8], "test": dataset.split("train")[4::12]}
    run._known_by_split = {split: KnownTriples([triples], 5) for split, triples in splits.items()}
    queries = [
        LinkQuery(side, triple[side.anchor_column], triple[1])
        for triple in np.concatenate(list(splits.values())).tolist()
        for side in Side
    ]
    scores, answers = all_scores(run), run.answer(queries, 6, known, candidates)
    assert len(answers) == len(queries)
    for query, got in zip(queries, answers):
        expected, values = expected_answers(scores, splits, query, known, candidates)
        assert [(answer.entity_id, answer.known) for answer in got] == expected
        np.testing.assert_allclose([answer.score for answer in got], values, rtol=1e-4)


@pytest.mark.parametrize("block_bytes", [1, 1 << 20])
def test_similar_entities_and_equal_scores(run, tmp_path, monkeypatch, block_bytes):
    """Against cosines one by one; what is equal stands in the order of ids."""
    monkeypatch.setattr(search, "BLOCK_BYTES", block_bytes)
    ids, rows = torch.tensor([3, 22, 3]), run.tables["person"][:].double().numpy()
    for id_, answers in zip(ids.tolist(), most_similar(run.tables, "person", ids, k=5)):
        cosines = rows @ rows[id_] / np.linalg.norm(rows, axis=1) / np.linalg.norm(rows[id_])
        cosines[id_] = -2
        expected = np.argsort(-cosines)[:5]
        assert [other for other, _ in answers] == expected.tolist()
        np.testing.assert_allclose([cosine for _, cosine in answers], cosines[expected], atol=1e-5)
    meta = toy_meta("distmult")
    tables = toy_tables(meta)
    for whole in tables.values():
        whole.rows.zero_()
    save_toy(tmp_path / "zeros", meta, tables)
    zeros, ids = dglkge.open_run(tmp_path / "zeros"), torch.tensor([1])
    (answers,) = zeros.answer([LinkQuery(Side.TAIL, 0, 0)], 23, Known.KEEP)
    assert [answer.entity_id for answer in answers] == list(range(23))
    expected = [(id_, 0.0) for id_ in range(23) if id_ != 1]
    assert most_similar(zeros.tables, "person", ids, k=99) == [expected]
    with pytest.raises(InputError, match="at least 1, got -1"):
        most_similar(zeros.tables, "person", ids, k=-1)


@pytest.mark.parametrize(
    ("side", "entity", "relation", "expected"),
    [
        (Side.HEAD, "town1", "near (town → town)", "near (town → town)"),
        (Side.TAIL, "person1", "near", "near (person → town)"),
        (Side.TAIL, "town1", "near", "near (town → town)"),
        (Side.HEAD, "town1", "near", "say which: 'near (person → town)', 'near (town → town)'"),
        (Side.TAIL, "person1", "know", "unknown relation 'know'; did you mean 'knows'"),
        (Side.TAIL, "town1", "knows", "unknown entity 'town1'"),
    ],
)
def test_names_of_queries(run, side, entity, relation, expected):
    relations = run.tables.relations
    if expected in relations.labels.names:
        id_ = relations.labels.id(expected)
        entity_id = run.tables.vocabulary(relations[id_].anchor_type(side)).id(entity)
        assert run.link_query(side, entity, relation) == LinkQuery(side, entity_id, id_)
        return
    with pytest.raises(InputError, match=re.escape(expected)):
        run.link_query(side, entity, relation)
