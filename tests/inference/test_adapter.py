"""CQD's adapter: its loss one entity at a time, and scores whose sigmoids are known."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import dglkge
from dglkge.errors import InputError
from dglkge.evaluation.calibration import Platt
from dglkge.inference.links import adapter
from dglkge.inference.links.adapter import Examples, QuestionMaker, fit_adapter
from dglkge.inference.truth import calibrate
from dglkge.typing import Side
from tests.checkpoint.toy_checkpoint import calibrated

CURVE = Platt(1.0, -1.0)


@pytest.fixture
def run(folder):
    return dglkge.open_run(folder)


def test_loss_one_entity_at_a_time():
    draws = np.random.default_rng(0)
    slopes, offsets = draws.random(4) + 0.5, draws.normal(size=4)
    scores, groups = draws.normal(size=(50, 3)), draws.integers(-1, 4, (50, 3))
    signs, labels, weights = draws.choice([-1, 1], (50, 3)), draws.random(50) < 0.3, draws.random(50)
    groups[:, 0] = np.abs(groups[:, 0])
    expected = 0.0
    for row in range(50):
        value = 1.0
        for score, group, sign in zip(scores[row], groups[row], signs[row]):
            if group >= 0:
                p = 1 / (1 + math.exp(-(slopes[group] * score + offsets[group])))
                value *= p if sign > 0 else 1 - p
        expected -= weights[row] * math.log(value if labels[row] else 1 - value)
    columns = (scores, groups, signs, labels, weights, np.arange(50) // 5)
    examples = Examples(*map(torch.from_numpy, columns))
    loss = examples.loss(torch.from_numpy(slopes), torch.from_numpy(offsets))
    assert float(loss) == pytest.approx(expected / 10)


def test_questions_need_a_valid_triple_and_their_answers_are_all(run):
    maker = QuestionMaker(run, CURVE, seed=1)
    train, valid = ({tuple(row) for row in run.dataset.split(split).tolist()} for split in ("train", "valid"))
    kinds = set()

    def holds(link, entity, triples):
        other, relation_id, place = link
        ends = (entity, other) if list(Side)[place] is Side.HEAD else (other, entity)
        return (ends[0], relation_id, ends[1]) in triples

    for question in filter(None, (maker.draw() for _ in range(60))):
        type_, links, signs = question
        made = maker.examples(*question)
        answers = {
            entity
            for entity in range(len(run.tables.vocabulary(type_)))
            if all(
                holds(link, entity, train | valid) == (sign > 0) for link, sign in zip(links.tolist(), signs)
            )
            and not all(holds(link, entity, train) or sign < 0 for link, sign in zip(links.tolist(), signs))
        }
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
    curves = fit_adapter(run, CURVE, 40, seed=3)
    assert set(curves) == {(id_, side) for id_ in range(len(run.tables.relations)) for side in Side}
    assert all(curve.slope > 0 for curve in curves.values())
    maker, parts = QuestionMaker(run, CURVE, seed=3), []
    while len(parts) < 40:
        question = maker.draw()
        made = None if question is None else maker.examples(*question)
        if made is not None:
            parts.append((*made, np.full(len(made[-1]), len(parts))))
    examples = Examples(*(torch.from_numpy(np.concatenate(columns)) for columns in zip(*parts)))
    ordered = [curves[id_, side] for id_ in range(len(run.tables.relations)) for side in Side]
    after = examples.loss(
        *(torch.tensor([getattr(c, name) for c in ordered]) for name in ("slope", "offset"))
    )
    before = examples.loss(
        torch.full((len(ordered),), CURVE.slope), torch.full((len(ordered),), CURVE.offset)
    )
    assert after < before
    with pytest.raises(InputError, match="cannot be made"):
        monkeypatch.setattr(QuestionMaker, "draw", lambda self: None)
        fit_adapter(run, CURVE, 1)
    with pytest.raises(InputError, match="falls with the score"):
        calibrate(run, run.known_triples(), "platt", num_questions=1)  # of random rows


def test_ask_takes_the_adapter_of_the_run(run, folder):
    calibrated(folder, CURVE.slope, CURVE.offset)
    fitted = replace(dglkge.open_run(folder).calibration, for_questions=fit_adapter(run, CURVE, 20))
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
