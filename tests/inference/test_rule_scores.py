"""Rules beside a model: confidences and weights by brute force, and one ranking of both."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

import dglkge
from dglkge.data.dataset import Dataset
from dglkge.errors import InputError
from dglkge.evaluation.metrics import Protocol
from dglkge.inference import rule_scores, rules
from dglkge.inference.rules import PESSIMISM, Rule
from dglkge.typing import Side
from tests.checkpoint.toy_checkpoint import calibrated


@pytest.fixture
def run(folder):
    return dglkge.open_run(folder)


def expected_confidences(run, scores, side, relation_id, anchor):
    """Greatest confidence by candidate: chains walked link by link, constants counted over all triples."""
    train = [tuple(triple) for triple in run.dataset.split("train").tolist()]
    relations = run.tables.relations.relations
    links = [
        ((relation, to), (relations[relation].anchor_type(to), triple[to.anchor_column]), triple[to.column])
        for triple in train
        for relation in [triple[1]]
        for to in Side
    ]
    start, best = (relations[relation_id].anchor_type(side), anchor), {}
    for rule in scores.rules[relation_id]:
        steps = rule.steps if side is Side.TAIL else rules.mirrored(rule.steps)
        reached = {start}
        for step in steps:
            type_ = relations[step[0]].candidate_type(step[1])
            reached = {(type_, end) for taken, begin, end in links if taken == step and begin in reached}
            reached -= {start}
        for _, end in reached:
            best[end] = max(best.get(end, 0), rule.confidence)
    pairs = {(begin, end) for taken, begin, end in links if taken == (relation_id, side)}
    for step, begin, constant in links:
        if begin != start:
            continue
        examples = {example for taken, example, end in links if taken == step and end == constant}
        for conclusion in {end for _, end in pairs}:
            support = len({example for example in examples if (example, conclusion) in pairs})
            confidence = support / (len(examples) + PESSIMISM)
            is_itself = (step, constant) == ((relation_id, side), conclusion)
            if support >= rules.MIN_SUPPORT and confidence >= rules.MIN_CONFIDENCE and not is_itself:
                best[conclusion] = max(best.get(conclusion, 0), confidence)
    return best


def test_confidences_are_those_of_the_best_rule(run, monkeypatch):
    monkeypatch.setattr(rules, "MIN_SUPPORT", 2)  # the toy has few examples
    scores = rule_scores.mined(run, rule_scores.plain_rules(run))
    num_constants = 0
    for relation_id in range(len(run.tables.relations)):
        for side in Side:
            monkeypatch.setattr(rule_scores, "DENSE_NUMBERS", 30)  # few queries at a time
            anchors = np.arange(8)
            query, candidate, confidence = scores.confidences(side, relation_id, anchors)
            for place, anchor in enumerate(anchors.tolist()):
                mine = query == place
                best = dict(zip(candidate[mine].tolist(), confidence[mine].tolist()))
                expected = expected_confidences(run, scores, side, relation_id, anchor)
                assert best == pytest.approx(expected, rel=1e-6)
                without = expected_confidences(
                    run, replace(scores, rules={relation_id: []}), side, relation_id, anchor
                )
                num_constants += len(without)
    assert num_constants and any(scores.rules.values())


def test_only_the_best_candidates_count(run, monkeypatch):
    scores = rule_scores.mined(run, rule_scores.plain_rules(run))
    knows, anchors = run.tables.relations.id("knows"), np.arange(6)
    query, _, confidence = scores.confidences(Side.TAIL, knows, anchors)
    monkeypatch.setattr(rule_scores, "MOST_CANDIDATES", 2)
    few, _, kept = scores.confidences(Side.TAIL, knows, anchors)
    for place in range(len(anchors)):
        descending = np.sort(confidence[query == place])[::-1]
        assert np.sort(kept[few == place])[::-1].tolist() == descending[descending >= descending[1]].tolist()
    assert len(few) < len(query)


def test_one_ranking(run, folder):
    """A model's score plus what rules add decides the ranks, the predictions and the scores of triples."""
    both = run.with_rules()
    assert both.bonus.weights.any()
    relation_id, head = run.tables.relations.id("lives_in"), run.tables.vocabulary("person").id("person1")
    plain = run.predict_tails("person1", "lives_in", k=100, known="keep").set_index("entity")["score"]
    answer_scores = both.predict_tails("person1", "lives_in", k=100, known="keep").set_index("entity")[
        "score"
    ]
    _, towns, added = both.bonus(Side.TAIL, np.array([head]), np.array([relation_id]))
    names = run.tables.vocabulary("town").names
    expected = plain.add(pd.Series(added, [names[id_] for id_ in towns.tolist()]), fill_value=0)
    assert answer_scores.to_dict() == pytest.approx(expected.to_dict(), rel=1e-5) and len(added)
    assert answer_scores.is_monotonic_decreasing
    frame = pd.DataFrame({"head": ["person1"], "relation": ["lives_in"], "tail": [answer_scores.index[0]]})
    by_hand = [
        both.bonus(side, np.array([anchor]), np.array([relation_id]))
        for side, anchor in ((Side.TAIL, head), (Side.HEAD, names.index(answer_scores.index[0])))
    ]
    added = [
        value[ids == answer].sum()
        for (_, ids, value), answer in zip(by_hand, (names.index(answer_scores.index[0]), head))
    ]
    assert both.score(frame)["score"][0] == pytest.approx(run.score(frame)["score"][0] + np.mean(added))
    # Ranks are those of the predictions, which no known answer precedes.
    for row, rank in zip(run.dataset.split("test")[:12], both.evaluate("test").ranks[Side.TAIL]):
        relation = run.tables.relations[row[1]]
        name = run.tables.vocabulary(relation.rhs)[row[2]]
        frame = both.predict_tails(
            run.tables.vocabulary(relation.lhs)[row[0]], run.tables.relations.labels[row[1]], k=10_000
        )
        score = frame["score"][frame["entity"] == name].item()
        other_scores = frame[(frame["entity"] != name) & frame["known_from"].isna()]["score"]
        assert (other_scores > score + 1e-5).sum() + 1 <= rank <= (other_scores >= score - 1e-5).sum() + 1


def test_new_entities_come_before_or_after_rules(run):
    triples = [("Ann", "lives_in", "town4"), ("Ann", "knows", "person3"), ("person3", "near", "Utopia")]
    facts = pd.DataFrame(triples, columns=["head", "relation", "tail"])
    rows = run.add_entities(facts)
    run.with_rules()  # mined without the new entities
    before, after = rows.with_rules(), run.with_rules().add_entities(facts)
    for name, relation in (("Ann", "near"), ("person3", "lives_in"), ("Ann", "knows")):
        plain, *both = (model.predict_tails(name, relation, k=100) for model in (rows, before, after))
        pd.testing.assert_frame_equal(*both)
        assert both[0]["score"].tolist() != plain["score"].tolist()


def test_weights_are_the_best_on_the_valid_split(run, monkeypatch):
    monkeypatch.setattr(rule_scores, "PRIOR_RANKS", 0)
    monkeypatch.setattr(rule_scores, "TRIPLES_AT_A_TIME", 7)
    scores = rule_scores.weighted(run, rule_scores.mined(run, rule_scores.plain_rules(run)))
    valid = run.dataset.split("valid")
    for relation_id in np.unique(valid[:, 1]).tolist():
        relation_triples = valid[valid[:, 1] == relation_id]
        for number, side in enumerate(Side):
            means = []
            for weight in rule_scores.WEIGHTS:
                run.bonus = replace(scores, weights=np.full_like(scores.weights, weight))
                means.append((1 / run.evaluate(Protocol("valid"), relation_triples).ranks[side]).mean())
            assert scores.weights[relation_id, number] == rule_scores.WEIGHTS[int(np.argmax(means))]


def test_rules_are_mined_once_for_a_version(run, folder, monkeypatch, caplog):
    first = run.with_rules().bonus
    path = folder / "rules.json"
    fields = json.loads(path.read_text())
    assert set(fields["relations"]) == set(run.tables.relations.labels.names)
    with monkeypatch.context() as patch:
        patch.setattr(rule_scores, "mined", None)
        again = dglkge.open_run(folder).with_rules().bonus
    assert again.rules == first.rules and (again.weights == first.weights).all()
    assert all(isinstance(rule, Rule) for relation_rules in again.rules.values() for rule in relation_rules)
    # Of another version, they are mined again.
    path.write_text(json.dumps({**fields, "version": fields["version"] + 1, "relations": {}}))
    renewed = dglkge.open_run(folder).with_rules().bonus
    assert renewed.rules == first.rules and json.loads(path.read_text()) == fields
    path.unlink()
    monkeypatch.setattr(rule_scores.os, "replace", lambda *_: (_ for _ in ()).throw(OSError(30, "read-only")))
    assert dglkge.open_run(folder).with_rules().bonus.rules == first.rules
    assert "rules are not kept: cannot write" in caplog.text and not path.exists()


def test_refusals(run, folder):
    calibrated(folder, 1.0, 0.0)
    both = run.with_rules()
    with pytest.raises(InputError, match="scores of the model alone"):
        both.complete(k=1)
    with pytest.raises(InputError, match="probabilities are fitted to scores of the model alone"):
        both.ask("?x : (person1, knows, ?x)")
    assert "probability" in run.predict_tails("person1", "knows").columns
    assert "probability" not in both.predict_tails("person1", "knows").columns
    (folder / "rules.json").write_text("[]")
    with pytest.raises(InputError, match=r"rules\.json"):
        dglkge.open_run(folder).with_rules()


def test_needs_valid_triples(run, monkeypatch):
    split = Dataset.split
    monkeypatch.setattr(
        Dataset, "split", lambda self, name: split(self, name)[: 0 if name == "valid" else None]
    )
    with pytest.raises(InputError, match="weights of rules are chosen on the valid split"):
        run.with_rules()
