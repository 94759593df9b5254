"""Questions of several hops against products and maxima over all entities, and CQD's adapter."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import dglkge
from dglkge.errors import InputError
from dglkge.evaluation.calibration import Platt
from dglkge.inference import questions
from dglkge.inference.links import adapter, missing_links
from dglkge.inference.links.adapter import Examples, QuestionMaker, fit_adapter
from dglkge.inference.logic import And, Fact, Not, Or, Question, parse
from dglkge.inference.truth import calibrate
from dglkge.model.kge_model import build_model
from dglkge.typing import Side
from tests.checkpoint.toy_checkpoint import calibrated
from tests.inference.link_scores import all_scores, known_pairs

CURVE = Platt(slope=2.0, offset=-0.3)
QUESTIONS = {
    "1p": "?x : (person1, knows, ?x)",
    "2p": "?x : (person1, knows, ?y), (?y, lives_in, ?x)",
    "3p": "?x : (person1, knows, ?y), (?y, lives_in, ?z), (?z, lies_in, ?x)",
    "2i": "?x : (person1, knows, ?x), (person2, knows, ?x)",
    "pi": "?x : (person1, knows, ?y), (?y, lives_in, ?x), (person2, lives_in, ?x)",
    "ip": "?x : (person1, knows, ?y), (person2, knows, ?y), (?y, lives_in, ?x)",
    "backwards": "?x : (?x, lives_in, ?t), (?t, lies_in, country1)",
    "2u": "?x : (person1, knows, ?x) or (person2, knows, ?x)",
    "up": "?x : ((person1, knows, ?y) or (person2, knows, ?y)), (?y, lives_in, ?x)",
    "2in": "?x : (person1, knows, ?x), not (person2, knows, ?x)",
    "inp": "?x : (person1, knows, ?y), not (person2, knows, ?y), (?y, lives_in, ?x)",
    "pin": "?x : (person1, knows, ?y), (?y, lives_in, ?x), not (person2, lives_in, ?x)",
    "pni": "?x : not ((person1, knows, ?y), (?y, lives_in, ?x)), (person2, lives_in, ?x)",
}


@pytest.fixture
def run(folder):
    opened = dglkge.open_run(folder)
    calibrated(folder, CURVE.slope, CURVE.offset)
    return opened


def expected_values(run, kind, splits):
    """Values of all answers: products over links, the greatest over other variables; known links are 1.

    A link is scored as an answer on the side that lies towards the variable that is asked for.
    """
    scores, known = all_scores(run), known_pairs(run, splits)
    id_of = run.tables.relations.id

    def links(name, side=Side.TAIL):
        return np.where(known[id_of(name)], 1.0, CURVE(scores[id_of(name), side]))

    def through(starts, relation):
        return (starts[:, None] * relation).max(0)

    people, countries = (run.tables.vocabulary(type_) for type_ in ("person", "country"))
    knows, lives, lies = links("knows"), links("lives_in"), links("lies_in")
    a, b = (knows[people.id(name)] for name in ("person1", "person2"))
    home_of_b = lives[people.id("person2")]
    in_country1 = links("lies_in", Side.HEAD)[:, countries.id("country1")]
    return {
        "1p": a,
        "2p": through(a, lives),
        "3p": through(through(a, lives), lies),
        "2i": a * b,
        "pi": through(a, lives) * home_of_b,
        "ip": through(a * b, lives),
        "backwards": through(in_country1, links("lives_in", Side.HEAD).T),
        "2u": 1 - (1 - a) * (1 - b),
        "up": through(1 - (1 - a) * (1 - b), lives),
        "2in": a * (1 - b),
        "inp": through(a * (1 - b), lives),
        "pin": through(a, lives) * (1 - home_of_b),
        "pni": (1 - through(a, lives)) * home_of_b,
    }[kind]


@pytest.mark.parametrize("splits", [("train",), ()], ids=["known", "predicted"])
@pytest.mark.parametrize("kind", QUESTIONS)
def test_all_types_of_questions(run, kind, splits):
    expected = expected_values(run, kind, splits)
    type_ = {10: "town", 3: "country"}.get(len(expected), "person")
    names = run.tables.vocabulary(type_)
    answers = run.ask(QUESTIONS[kind], k=len(names), beam=60, known_splits=splits)
    assert answers["probability"].is_monotonic_decreasing
    assert dict(zip(answers["entity"], answers["probability"])) == pytest.approx(
        {names[id_]: value for id_, value in enumerate(expected.tolist()) if value > 0}, abs=1e-5
    )
    if "not" in QUESTIONS[kind] or " or " in QUESTIONS[kind]:
        return
    for row in answers.head(3).itertuples():
        product = np.prod([link["probability"] for link in row.path])
        assert product == pytest.approx(row.probability, abs=1e-5)
        assert len(row.path) == QUESTIONS[kind].count("(")
        assert all(link["relation"] in QUESTIONS[kind] for link in row.path)


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
    """Of rows as wide as queries, and of narrower ones, which have zeros at their end; one shard has none."""
    monkeypatch.setattr(missing_links, "LEAST_ROWS", 1)
    monkeypatch.setattr(missing_links, "SCREENED", 1)
    draws = torch.Generator().manual_seed(1)
    rows = (torch.randn(1003, 40, generator=draws) * torch.logspace(0, -2, 40))[:, :width].contiguous()
    query = torch.randn(5, 40, generator=draws)
    ids = torch.arange(1003)
    shards = [SimpleNamespace(rows=rows[part], original_ids=ids[part]) for part in (slice(0), slice(1003))]
    tables = SimpleNamespace(meta=SimpleNamespace(dim=40), shards=lambda _type: shards)
    norm, model = float(rows.norm(dim=1).max()), build_model("distmult", 40, reciprocal=True)
    search = missing_links.LikelyCandidates(model, tables, lambda _type: norm)
    search.is_narrow = True
    exact = query[:, :width].double() @ rows.double().T
    for low in (-0.5, 0.0, 4.0, 1e9):
        blocks = list(search.search("entity", query, low))
        pairs = {pair for row, ids, _ in blocks for pair in zip(row.tolist(), ids.tolist())}
        assert pairs == {tuple(pair) for pair in torch.nonzero(exact >= low).tolist()}


def test_a_narrow_beam_takes_the_best(run):
    wide, narrow = (run.ask(QUESTIONS["2p"], beam=beam, known_splits=()) for beam in (60, 1))
    first = run.ask(QUESTIONS["1p"], k=1, known_splits=())["entity"][0]
    assert all(path[0]["tail"] == first for path in narrow["path"])
    assert narrow["probability"][0] <= wide["probability"][0] + 1e-6


def test_text_is_read_as_the_tree():
    question = parse('?x : (("a, b", r (s → t), ?y) or (?y, and or, c)), not (d, q, ?x), (?y, p, ?x)')
    either = Or((Fact("a, b", "r (s → t)", "?y"), Fact("?y", "and or", "c")))
    assert question == Question("?x", And((either, Not(Fact("d", "q", "?x")), Fact("?y", "p", "?x"))))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("(person1, knows, ?x)", "begins with a variable"),
        ("?x : (person1, knows, ?y)", "no triple has it"),
        ("?x : (person1, knows, ?x", "not closed"),
        ("?x : " + "(" * 1200, "allowed are 100 open parentheses"),
        ("?x : (person1, knows)", "got 2 parts"),
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


START = Platt(1.0, -1.0)


def test_loss_one_entity_at_a_time():
    draws = np.random.default_rng(0)
    slopes, offsets = draws.random(4) + 0.5, draws.normal(size=4)
    scores, groups = draws.normal(size=(50, 3)), draws.integers(-1, 4, (50, 3))
    signs, labels, weights = draws.choice([-1, 1], (50, 3)), draws.random(50) < 0.3, draws.random(50)
    groups[:, 0] = np.abs(groups[:, 0])
    probability = 1 / (1 + np.exp(-(slopes[groups] * scores + offsets[groups])))
    probability = np.where(signs > 0, probability, 1 - probability)
    value = np.where(groups >= 0, probability, 1).prod(1)
    expected = -(weights * np.log(np.where(labels, value, 1 - value))).sum()
    columns = (scores, groups, signs, labels, weights, np.arange(50) // 5)
    examples = Examples(*map(torch.from_numpy, columns))
    loss = examples.loss(torch.from_numpy(slopes), torch.from_numpy(offsets))
    assert float(loss) == pytest.approx(expected / 10)


def test_questions_need_a_valid_triple_and_their_answers_are_all(run):
    maker = QuestionMaker(run, START, seed=1)
    train, valid = ({tuple(row) for row in run.dataset.split(split).tolist()} for split in ("train", "valid"))
    kinds = set()

    def holds(link, entity, triples):
        other, relation_id, place = link
        ends = (entity, other) if list(Side)[place] is Side.HEAD else (other, entity)
        return (ends[0], relation_id, ends[1]) in triples

    for question in filter(None, (maker.draw() for _ in range(60))):
        type_, links, signs = question
        made, answers = maker.examples(*question), set()
        for entity in range(len(run.tables.vocabulary(type_))):
            pairs = list(zip(links.tolist(), signs))
            is_answer = all(holds(link, entity, train | valid) == (sign > 0) for link, sign in pairs)
            if is_answer and not all(holds(link, entity, train) or sign < 0 for link, sign in pairs):
                answers.add(entity)
        if made is None:
            assert not answers or len(answers) == len(run.tables.vocabulary(type_))
            continue
        scores, groups, _, labels, weights = made
        assert labels.sum() == len(answers) and (weights > 0).all()
        kinds.add((int((signs > 0).sum()), int((signs < 0).sum())))
        # The first answer's links have the scores of its triples, those of train none.
        first = min(answers)
        for place, link in enumerate(links.tolist()):
            side = list(Side)[link[2]]
            ends = (first, link[0]) if side is Side.HEAD else (link[0], first)
            expected = run.scores(np.array([[ends[0], link[1], ends[1]]]))[side]
            assert scores[0, place] == pytest.approx(float(expected[0]), abs=1e-4)
            assert (groups[0, place] < 0) == holds(link, first, train)
    assert kinds == set(adapter.KINDS)


def test_curves_lower_the_loss_and_depend_on_the_relation(run, folder, monkeypatch):
    monkeypatch.setattr(adapter, "RIDGES", (0.1, 1e6))
    curves = fit_adapter(run, START, 40, seed=3)
    assert set(curves) == {(id_, side) for id_ in range(len(run.tables.relations)) for side in Side}
    assert all(curve.slope > 0 for curve in curves.values())
    maker, parts = QuestionMaker(run, START, seed=3), []
    while len(parts) < 40:
        question = maker.draw()
        made = None if question is None else maker.examples(*question)
        if made is not None:
            parts.append((*made, np.full(len(made[-1]), len(parts))))
    examples = Examples(*(torch.from_numpy(np.concatenate(columns)) for columns in zip(*parts)))
    ordered = [curves[id_, side] for id_ in range(len(run.tables.relations)) for side in Side]
    after, before = (
        examples.loss(*torch.tensor([[curve.slope, curve.offset] for curve in some_curves]).T)
        for some_curves in (ordered, [START] * len(ordered))
    )
    assert after < before
    with pytest.raises(InputError, match="cannot be made"):
        monkeypatch.setattr(QuestionMaker, "draw", lambda self: None)
        fit_adapter(run, START, 1)
    with pytest.raises(InputError, match="falls with the score"):
        calibrate(run, run.known_triples(), "platt", num_questions=1)  # of random rows


def test_ask_takes_the_adapter_of_the_run(run, folder):
    calibrated(folder, START.slope, START.offset)
    fitted = replace(dglkge.open_run(folder).calibration, for_questions=fit_adapter(run, START, 20))
    (folder / "calibration.json").write_text(json.dumps(fitted.to_dict()))
    again = dglkge.open_run(folder)
    assert again.calibration == fitted
    question = "?x : (person1, knows, ?x)"
    (id_,) = run.tables.relations.ids_of("knows")
    for uses, curve in ((True, fitted.for_questions[id_, Side.TAIL]), (False, fitted.curve)):
        (best,) = again.ask(question, 1, known_splits=(), adapter=uses).itertuples()
        names = run.tables.vocabulary("person")
        score = run.scores(np.array([[names.id("person1"), id_, names.id(best.entity)]]))[Side.TAIL]
        assert best.probability == pytest.approx(float(curve(score)[0]), abs=1e-5)
