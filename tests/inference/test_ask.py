"""Questions of several hops against an evaluator that tries every assignment of the variables."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import dglkge
from dglkge.errors import InputError
from dglkge.evaluation.calibration import Platt
from dglkge.inference import questions
from dglkge.inference.links import missing_links
from dglkge.inference.logic import And, Fact, Not, Or, Question, facts, parse, variables
from dglkge.inference.whole_tables import WholeTables
from dglkge.model.kge_model import build_model
from dglkge.typing import RELATION, Side
from tests.checkpoint.toy_checkpoint import calibrated

CURVE = Platt(slope=2.0, offset=-0.3)
A, B, C = "person1", "person2", "person7"
QUESTIONS = {
    "1p": f"?x : ({A}, knows, ?x)",
    "2p": f"?x : ({A}, knows, ?y), (?y, lives_in, ?x)",
    "3p": f"?x : ({A}, knows, ?y), (?y, lives_in, ?z), (?z, lies_in, ?x)",
    "2i": f"?x : ({A}, knows, ?x), ({B}, knows, ?x)",
    "3i": f"?x : ({A}, knows, ?x), ({B}, knows, ?x), (?x, lives_in, town3)",
    "pi": f"?x : ({A}, knows, ?y), (?y, lives_in, ?x), ({B}, lives_in, ?x)",
    "ip": f"?x : ({A}, knows, ?y), ({B}, knows, ?y), (?y, lives_in, ?x)",
    "2u": f"?x : ({A}, knows, ?x) or ({B}, knows, ?x)",
    "up": f"?x : (({A}, knows, ?y) or ({B}, knows, ?y)), (?y, lives_in, ?x)",
    "2in": f"?x : ({A}, knows, ?x), not ({B}, knows, ?x)",
    "3in": f"?x : ({A}, knows, ?x), ({C}, knows, ?x), not ({B}, knows, ?x)",
    "inp": f"?x : ({A}, knows, ?y), not ({B}, knows, ?y), (?y, lives_in, ?x)",
    "pin": f"?x : ({A}, knows, ?y), (?y, lives_in, ?x), not ({B}, lives_in, ?x)",
    "pni": f"?x : not (({A}, knows, ?y), (?y, lives_in, ?x)), ({B}, lives_in, ?x)",
    "backwards": "?x : (?x, lives_in, ?t), (?t, lies_in, country1)",
}


@pytest.fixture
def run(folder):
    opened = dglkge.open_run(folder)
    calibrated(folder, CURVE.slope, CURVE.offset)
    return opened


class BruteForce:
    """Values of a formula with every variable bound, each link scored alone in float64."""

    def __init__(self, run, question, splits):
        self.run = run
        self.known = {tuple(row) for split in splits for row in run.dataset.split(split).tolist()}
        self.types, self.cache = {}, {}
        for fact in facts(question.formula):
            (id_,) = run.tables.relations.ids_of(fact.relation)
            relation = run.tables.relations[id_]
            self.types |= {fact.head: relation.lhs, fact.tail: relation.rhs}

    def link(self, triple):
        if triple not in self.cache:
            tables, (head, id_, tail) = self.run.tables, triple
            relation = tables.relations[id_]
            rows = [
                tables.gather(table, torch.tensor([row])).double()
                for table, row in ((relation.lhs, head), (RELATION, id_), (relation.rhs, tail))
            ]
            self.cache[triple] = [float(CURVE(self.run.model.score(*rows, side).numpy())[0]) for side in Side]
        return self.cache[triple]

    def value(self, formula, bound, side_of):
        parts = formula.parts if isinstance(formula, And) else (formula,) if isinstance(formula, Fact) else ()
        # What one compound part alone mentions is bound inside it.
        mentions = [
            name for part in parts for name in variables(part) for _ in range(1 + isinstance(part, Fact))
        ]
        local = sorted({name for name in mentions if mentions.count(name) > 1} - set(bound))
        sizes = [range(len(self.run.tables.vocabulary(self.types[name]))) for name in local]
        best = 0.0
        for ids in itertools.product(*sizes):
            env = {**bound, **dict(zip(local, ids))}
            if isinstance(formula, Fact):
                value = self.fact(formula, env, side_of)
            elif isinstance(formula, And):
                value = float(np.prod([self.value(part, env, side_of) for part in formula.parts]))
            elif isinstance(formula, Or):
                value = 1 - float(np.prod([1 - self.value(part, env, side_of) for part in formula.parts]))
            else:
                value = 1 - self.value(formula.part, env, side_of)
            best = max(best, value)
        return best

    def fact(self, fact, env, side_of):
        (id_,) = self.run.tables.relations.ids_of(fact.relation)
        ends = [
            env[term] if term in env else self.run.tables.vocabulary(self.types[term]).id(term)
            for term in (fact.head, fact.tail)
        ]
        triple = (ends[0], id_, ends[1])
        if triple in self.known:
            return 1.0
        # A link is scored as an answer on the side that lies towards the variable that is asked for.
        return self.link(triple)[list(Side).index(side_of[fact])]


def sides(question):
    """The side of each link's variable that is nearer to the answer."""
    distance, links = {question.answer: 0}, list(facts(question.formula))
    while any({fact.head, fact.tail} - set(distance) for fact in links):
        for fact in links:
            near = [distance[term] for term in (fact.head, fact.tail) if term in distance]
            for term in (fact.head, fact.tail):
                if near and term not in distance:
                    distance[term] = min(near) + 1
    return {fact: Side.TAIL if distance[fact.tail] < distance[fact.head] else Side.HEAD for fact in links}


# The product of three variables takes long: 3p is tried once.
CASES = [(kind, splits) for splits in (("train",), ()) for kind in QUESTIONS if splits or kind != "3p"]


@pytest.mark.parametrize(("kind", "splits"), CASES)
def test_all_types_of_questions(run, kind, splits):
    question = parse(QUESTIONS[kind])
    oracle = BruteForce(run, question, splits)
    type_ = oracle.types[question.answer]
    names = run.tables.vocabulary(type_)
    side_of = sides(question)
    expected = {
        names[id_]: oracle.value(question.formula, {question.answer: id_}, side_of)
        for id_ in range(len(names))
    }
    answers = run.ask(QUESTIONS[kind], k=len(names), beam=60, known_splits=splits)
    assert answers["probability"].is_monotonic_decreasing
    assert dict(zip(answers["entity"], answers["probability"])) == pytest.approx(
        {name: value for name, value in expected.items() if value > 0}, abs=1e-5
    )
    for row in answers.head(3).itertuples():
        if kind in ("1p", "2p", "3p", "2i", "3i", "pi", "ip", "backwards"):
            assert np.prod([link["probability"] for link in row.path]) == pytest.approx(
                row.probability, abs=1e-5
            )
            assert {link["relation"] for link in row.path} == {
                fact.relation for fact in facts(question.formula)
            }


@pytest.mark.parametrize("screened", [1, 10**9])
def test_screening_in_bfloat16_changes_no_answer(run, monkeypatch, screened):
    """Whether few candidates remain, which are scored again, or too many."""
    monkeypatch.setattr(missing_links, "SCREENED", screened)
    monkeypatch.setattr(missing_links, "LEAST_ROWS", 1)
    monkeypatch.setattr(questions, "LEAST_PROBABILITY", 0.3)
    plain = [run.ask(QUESTIONS[kind], k=60, known_splits=()) for kind in ("2p", "up", "inp")]
    run.likely_candidates.is_narrow = True
    for kind, expected in zip(("2p", "up", "inp"), plain):
        answers = run.ask(QUESTIONS[kind], k=60, known_splits=())
        assert answers["entity"].tolist() == expected["entity"].tolist() and len(answers) > 1
        np.testing.assert_allclose(answers["probability"], expected["probability"], atol=1e-6)


@pytest.mark.parametrize("width", [40, 30])
def test_bounds_of_bfloat16_skip_no_candidate(width, monkeypatch):
    """Of rows as wide as queries, and of narrower ones, which have zeros at their end."""
    draws = torch.Generator().manual_seed(1)
    rows = (torch.randn(1003, 40, generator=draws) * torch.logspace(0, -2, 40))[:, :width].contiguous()
    query = torch.randn(5, 40, generator=draws)
    meta = SimpleNamespace(dim=40, entity_types={"entity": 1003}, relations=[])
    tables = WholeTables(Path(), meta, {"entity": rows, RELATION: rows[:0]})
    monkeypatch.setattr(missing_links, "LEAST_ROWS", 1)
    search = missing_links.LikelyCandidates(
        build_model("distmult", 40, reciprocal=True), tables, lambda _type: float(rows.norm(dim=1).max())
    )
    search.is_narrow = True
    for low in (-0.5, 0.0, 4.0, 1e9):
        monkeypatch.setattr(missing_links, "SCREENED", 1)
        blocks = list(search.search("entity", query, low))
        exact = query[:, :width].double() @ rows.double().T
        pairs = {pair for row, ids, _ in blocks for pair in zip(row.tolist(), ids.tolist())}
        assert pairs == {tuple(pair) for pair in torch.nonzero(exact >= low).tolist()}


def test_a_shard_without_rows_has_no_likely_candidates(monkeypatch):
    """A type may have all its rows in one part of a checkpoint."""
    rows, ids = torch.ones(3, 4), torch.arange(3)
    shards = [SimpleNamespace(rows=rows[start:], original_ids=ids[start:]) for start in (3, 0)]
    tables = SimpleNamespace(meta=SimpleNamespace(dim=4), shards=lambda _type: shards)
    monkeypatch.setattr(missing_links, "LEAST_ROWS", 1)
    monkeypatch.setattr(missing_links, "SCREENED", 1)
    search = missing_links.LikelyCandidates(
        build_model("distmult", 4, reciprocal=True), tables, lambda _: 2.0
    )
    search.is_narrow = True
    blocks = search.search("entity", torch.ones(1, 4), 0.5)
    assert [ids.tolist() for _, ids, _ in blocks] == [[], [0, 1, 2]]


def test_a_narrow_beam_takes_the_best(run):
    wide, narrow = (run.ask(QUESTIONS["2p"], beam=beam, known_splits=()) for beam in (60, 1))
    first = run.ask(QUESTIONS["1p"], k=1, known_splits=())["entity"][0]
    assert all(path[0]["tail"] == first for path in narrow["path"])
    assert narrow["probability"][0] <= wide["probability"][0] + 1e-6


def test_text_is_read_as_the_tree():
    question = parse('?x : (("a, b", r (s → t), ?y) or (?y, and or, c)), not (d, q, ?x), (?y, p, ?x)')
    assert question == Question(
        "?x",
        And(
            (
                Or((Fact("a, b", "r (s → t)", "?y"), Fact("?y", "and or", "c"))),
                Not(Fact("d", "q", "?x")),
                Fact("?y", "p", "?x"),
            )
        ),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("(person1, knows, ?x)", "begins with a variable"),
        ("?x : (person1, knows, ?y)", "no triple has it"),
        ("?x : (person1, knows, ?x", "not closed"),
        ("?x : (person1, knows)", "got 2 parts"),
        ("?x : (nothing, knows)", "got 2 parts"),
        ("?x : (persona, knows, ?x)", "persona"),
        ("?x : (person1, know, ?x)", "knows"),
        ("?x : (person1, knows, ?x), (?x, lies_in, ?y)", "no way"),
        ("?x : (?x, near, ?y)" + "".join(f", (?x{n}, near, ?y{n})" for n in range(30)), "several ways"),
        ("?x : (?x, knows, ?y), (?y, knows, ?z), (?z, knows, ?x)", "circle"),
        ("?x : (person1, knows, ?x), (person2, knows, ?y)", "not connected"),
    ],
)
def test_refuses_what_is_no_question(run, text, message):
    with pytest.raises(InputError, match=message):
        run.ask(text)
