"""Reasons for links and rules beside a model, by brute force and by training again without a triple."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from torch.nn import functional

import dglkge
from dglkge.data.dataset import Dataset
from dglkge.data.known_triples import KnownTriples
from dglkge.errors import InputError
from dglkge.evaluation.metrics import Protocol
from dglkge.inference import rule_scores, rules
from dglkge.inference.reasons import Explainer
from dglkge.inference.rules import PESSIMISM, Rule, RuleGraph
from dglkge.model.kge_model import build_model
from dglkge.typing import RELATION, Relation, Side
from tests.checkpoint.toy_checkpoint import calibrated
from tests.inference.link_scores import names_of

DIM = 16


@pytest.fixture
def links(dataset):
    """By typed entity: (step, entity) of every training triple, in both directions."""
    pairs = {}
    for head, relation_id, tail in dataset.split("train").tolist():
        relation = dataset.relations[relation_id]
        ends = (relation.lhs, head), (relation.rhs, tail)
        for (start, end), side in ((ends, Side.TAIL), (ends[::-1], Side.HEAD)):
            pairs.setdefault(start, []).append(((relation_id, side), end))
    return pairs


def chains(links, start, length, visited=()):
    """Yield (steps, end) of all walks that visit no entity twice."""
    for step, entity in links.get(start, ()):
        if entity not in (start, *visited):
            yield (step,), entity
            if length > 1:
                for steps, end in chains(links, entity, length - 1, (start, *visited)):
                    yield (step, *steps), end


def test_paths_are_all_chains(dataset, links):
    graph = RuleGraph(dataset.known_triples(["train"]), dataset.relations.relations)
    for head, relation_id, tail in dataset.split("train")[::25].tolist():
        relation = dataset.relations[relation_id]
        ends = (relation.lhs, head), (relation.rhs, tail)
        paths = graph.paths(head, relation_id, tail)
        expected = {steps for steps, end in chains(links, ends[0], 3) if end == ends[1]}
        assert {path.steps for path in paths} == expected - {((relation_id, Side.TAIL),)}
        for path in paths:
            assert all(list(link) in dataset.split("train").tolist() for link in path.links())
            assert path.entities[0] == ends[0] and path.entities[-1] == ends[1]


def test_rules_count_the_pairs_of_a_chain(dataset, links):
    graph = RuleGraph(dataset.known_triples(["train"]), dataset.relations.relations)
    train = {tuple(triple) for triple in dataset.split("train").tolist()}
    for relation_id, relation in enumerate(dataset.relations.relations):
        triples = dataset.split("train")
        rules = graph.rules(relation_id, triples[triples[:, 1] == relation_id], 5, 20)
        confidences = [rule.confidence for rule in rules]
        assert confidences == sorted(confidences, reverse=True)
        for rule in rules[:4]:
            ends = {entity for entity in links if entity[0] == relation.lhs}
            pairs = {(start, start) for start in ends}
            for step in rule.steps:
                pairs = {(a, c) for a, b in pairs for link, c in links.get(b, ()) if link == step and a != c}
            hits = sum((a[1], relation_id, b[1]) in train for a, b in pairs)
            assert (rule.support, rule.pairs, rule.confidence) == (hits, len(pairs), hits / (len(pairs) + 5))


def learned_graph():
    """Return shuffled triples (360, 3): of each head and relation the best three tails of random rows."""
    draw = torch.Generator().manual_seed(1)
    entities, relations = torch.randn(30, 8, generator=draw), torch.randn(4, 16, generator=draw)
    model, triples = build_model("complex", 8, reciprocal=True), []
    for relation_id, row in enumerate(relations):
        best = (model.query(entities, row.expand(30, -1), Side.TAIL) @ entities.T).topk(3).indices
        triples += [[head, relation_id, tail] for head, tails in enumerate(best.tolist()) for tail in tails]
    return np.array(triples)[torch.randperm(len(triples), generator=draw).numpy()]


def trained(triples):
    """Return rows of ComplEx by table, trained with softmax over all entities and N3, from one start."""
    model, draw = build_model("complex", DIM, reciprocal=True), torch.Generator().manual_seed(0)
    sizes = {"entity": (30, DIM), RELATION: (4, 2 * DIM)}
    rows = {name: (torch.randn(*size, generator=draw) * 0.1).requires_grad_() for name, size in sizes.items()}
    optimizer = torch.optim.Adam(rows.values(), lr=0.05)
    heads, relations, tails = torch.from_numpy(triples).T
    for _ in range(150):
        optimizer.zero_grad()
        parts = rows["entity"][heads], rows["entity"][tails], rows[RELATION][relations]
        loss = 0.1 * sum(part.abs().pow(3).sum() for part in parts)
        for side, anchors, answers in ((Side.TAIL, heads, tails), (Side.HEAD, tails, heads)):
            query = model.query(rows["entity"][anchors], rows[RELATION][relations], side)
            loss = loss + functional.cross_entropy(query @ rows["entity"].T, answers, reduction="sum")
        (loss / len(triples)).backward()
        optimizer.step()
    return {name: row.detach() for name, row in rows.items()}


def test_influences_order_triples_as_training_without_them_does():
    """Without a strong triple the score falls, without a weak one it rises, on average."""
    model, triples = build_model("complex", DIM, reciprocal=True), learned_graph()
    train, whole = triples[:-40], trained(triples[:-40])
    relations = SimpleNamespace(relations=[Relation(f"r{number}", "entity", "entity") for number in range(4)])
    rows_of = {"gather": lambda table, ids: whole[table][ids], "vocabulary": lambda _: range(30)}
    tables = SimpleNamespace(relations=relations, **rows_of)
    run = SimpleNamespace(tables=tables, model=model, known_triples=lambda splits: KnownTriples([train], 4))

    def score(rows, head, relation_id, tail):
        parts = rows["entity"][[head]], rows[RELATION][[relation_id]], rows["entity"][[tail]]
        return sum(model.score(*parts, side).item() for side in Side) / 2

    explainer, falls = Explainer(run), {"strong": [], "weak": []}
    for link_ids in triples[-40::10].tolist():
        influence_of = Counter()
        for side in Side:
            for triple, influence in zip(*explainer.influences(tuple(link_ids), side)):
                influence_of[tuple(triple)] += influence
        order = sorted(influence_of, key=influence_of.get)
        for name, some in (("strong", order[-3:]), ("weak", order[:3])):
            for triple in some:
                rows = trained(train[~(train == triple).all(1)])
                falls[name].append(score(whole, *link_ids) - score(rows, *link_ids))
    assert np.mean(falls["strong"]) > 0.1 and np.mean(falls["weak"]) < 0


def test_reasons_by_name(dataset, run):
    train = dataset.split("train")
    link = names_of(dataset, train[train[:, 1] == dataset.relations.id("knows")][0])
    reasons = run.explain(*link, k=4)
    assert (reasons["head"], reasons["relation"], reasons["tail"]) == link and reasons["probability"] is None
    triples = [tuple(reason[role] for role in ("head", "relation", "tail")) for reason in reasons["triples"]]
    # A known link is no reason for itself.
    assert triples and link not in triples
    assert all({link[0], link[2]} & {head, tail} for head, _, tail in triples)
    influences = [reason["influence"] for reason in reasons["triples"]]
    assert influences == sorted(influences, reverse=True) and min(influences) > 0
    assert reasons["rules"]
    for rule in reasons["rules"]:
        ends = [{link["head"], link["tail"]} for link in rule["path"]]
        assert link[0] in ends[0] and link[2] in ends[-1]
        assert all(before & after for before, after in itertools.pairwise(ends))
    rules = run.rules("knows", k=3)
    assert rules["rule"].str.endswith("=> (x, knows, y)").all() and len(rules) == 3


def test_similar_links_are_the_known_ones_by_cosine(dataset, run):
    similar = run.explain("person1", "lives_in", "town1", k=50)["similar"]
    names = [names_of(dataset, triple) for triple in dataset.split("train")]
    train = pd.DataFrame(names, columns=["h", "r", "t"])
    lives = train[train["r"] == "lives_in"]
    expected, people, towns = {}, lives["h"][lives["t"] == "town1"], lives["t"][lives["h"] == "person1"]
    for name, others in (("person1", people), ("town1", towns)):
        names = [name, *sorted(set(others) - {name})]
        rows = torch.tensor(run.embeddings(names).to_numpy(np.float64))
        cosines = functional.cosine_similarity(rows[:1], rows[1:])
        expected |= dict(zip(names[1:], cosines.tolist()))
    expected = pd.Series(expected).sort_values(ascending=False)
    assert [link["entity"] for link in similar] == expected.index.tolist()
    assert [link["cosine"] for link in similar] == pytest.approx(expected.tolist(), abs=1e-6)


def expected_confidences(links, rules_of_relation, side, relation_id, start):
    """Greatest confidence by candidate: chains walked link by link, constants counted over all triples."""
    best = Counter()
    for rule in rules_of_relation:
        reached = {start}
        for step in rule.steps if side is Side.TAIL else rules.mirrored(rule.steps):
            ends = {end for begin in reached for taken, end in links.get(begin, ()) if taken == step}
            reached = ends - {start}
        best |= Counter(dict.fromkeys(reached, rule.confidence))
    asked = (relation_id, side)
    pairs = {(begin, end) for begin, steps in links.items() for step, end in steps if step == asked}
    for step, constant in links.get(start, ()):
        examples = {begin for begin, steps in links.items() if (step, constant) in steps}
        for conclusion in {end for _, end in pairs} - ({constant} if step == asked else set()):
            support = sum((example, conclusion) in pairs for example in examples)
            confidence = support / (len(examples) + PESSIMISM)
            if support >= rules.MIN_SUPPORT and confidence >= rules.MIN_CONFIDENCE:
                best |= Counter({conclusion: confidence})
    return {id_: confidence for (_, id_), confidence in best.items()}


def test_confidences_are_those_of_the_best_rule(run, links, monkeypatch):
    monkeypatch.setattr(rules, "MIN_SUPPORT", 2)  # the toy has few examples
    monkeypatch.setattr(rule_scores, "DENSE_NUMBERS", 30)  # few queries at a time
    scores, num_constants = rule_scores.mined(run, rule_scores.plain_rules(run)), 0
    for relation_id, relation in enumerate(run.tables.relations.relations):
        for side in Side:
            query, candidate, confidence = scores.confidences(side, relation_id, np.arange(8))
            for anchor in range(8):
                best = dict(zip(candidate[query == anchor].tolist(), confidence[query == anchor].tolist()))
                start, chains_of = (relation.anchor_type(side), anchor), scores.rules[relation_id]
                expected = expected_confidences(links, chains_of, side, relation_id, start)
                assert best == pytest.approx(expected, rel=1e-6)
                num_constants += len(expected_confidences(links, [], side, relation_id, start))
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


def test_one_ranking(run):
    both = run.with_rules()
    assert both.bonus.weights.any()
    relation_id, head = run.tables.relations.id("lives_in"), run.tables.vocabulary("person").id("person1")
    plain = run.predict_tails("person1", "lives_in", k=100, known="keep").set_index("entity")["score"]
    scores = both.predict_tails("person1", "lives_in", k=100, known="keep").set_index("entity")["score"]
    _, towns, added = both.bonus(Side.TAIL, np.array([head]), np.array([relation_id]))
    names = run.tables.vocabulary("town").names
    expected = plain.add(pd.Series(added, [names[id_] for id_ in towns.tolist()]), fill_value=0)
    assert scores.to_dict() == pytest.approx(expected.to_dict(), rel=1e-5) and len(added)
    assert scores.is_monotonic_decreasing
    best, bonuses = names.index(scores.index[0]), []
    for side, anchor, answer in ((Side.TAIL, head, best), (Side.HEAD, best, head)):
        _, ids, values = both.bonus(side, np.array([anchor]), np.array([relation_id]))
        bonuses.append(values[ids == answer].sum())
    frame = pd.DataFrame({"head": ["person1"], "relation": ["lives_in"], "tail": [scores.index[0]]})
    assert both.score(frame)["score"][0] == pytest.approx(run.score(frame)["score"][0] + np.mean(bonuses))
    # Ranks are those of the predictions, which no known answer precedes.
    for row, rank in zip(run.dataset.split("test")[:12], both.evaluate("test").ranks[Side.TAIL]):
        head, label, name = names_of(run.dataset, row)
        frame = both.predict_tails(head, label, k=10_000)
        score = frame["score"][frame["entity"] == name].item()
        other_scores = frame[(frame["entity"] != name) & frame["known_from"].isna()]["score"]
        assert (other_scores > score + 1e-5).sum() + 1 <= rank <= (other_scores >= score - 1e-5).sum() + 1


def test_new_entities_come_before_or_after_rules(run):
    triples = [("Ann", "lives_in", "town4"), ("Ann", "knows", "person3"), ("person3", "near", "Utopia")]
    facts = pd.DataFrame(triples, columns=["head", "relation", "tail"])
    rows = run.add_entities(facts)
    path = run.checkpoint.run_folder / "rules.json"
    path.unlink(missing_ok=True)
    more = run.add_entities(pd.DataFrame([("person1", "knows", "person3")], columns=facts.columns))
    for added in (rows, more):
        added.with_rules()
        assert not path.exists()
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
    # Of another version, or damaged, they are mined again.
    for other in {"version": fields["version"] + 1, "relations": {}}, {"relations": {"likes": 1}}:
        path.write_text(json.dumps({**fields, **other}))
        renewed = dglkge.open_run(folder).with_rules().bonus
        assert renewed.rules == first.rules and json.loads(path.read_text()) == fields
    path.unlink()
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError(30, "read-only")))
    assert dglkge.open_run(folder).with_rules().bonus.rules == first.rules
    assert "rules are not kept: cannot write" in caplog.text and not path.exists()


def test_refusals_of_rules(run, folder, monkeypatch):
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
    (folder / "rules.json").unlink()
    monkeypatch.setattr(Dataset, "split", lambda data, name: np.empty((0, 3), np.int64))
    with pytest.raises(InputError, match="weights of rules are chosen on the valid split"):
        dglkge.open_run(folder).with_rules()
