"""Reasons for links: paths and rules by brute force, influences by training again without a triple."""

from __future__ import annotations

import itertools
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional

import dglkge
from dglkge.data.known_triples import KnownTriples
from dglkge.errors import InputError
from dglkge.inference.reasons import Explainer, Link
from dglkge.inference.rules import RuleGraph
from dglkge.model.kge_model import build_model
from dglkge.typing import RELATION, Relation, Side

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
        paths = graph.paths(ends[0], relation_id, ends[1])
        expected = {steps for steps, end in chains(links, ends[0], 3) if end == ends[1]}
        assert {path.steps for path in paths} == expected - {((relation_id, Side.TAIL),)}
        for path in paths:
            triples = dataset.split("train").tolist()
            assert all(list(link) in triples for link in path.links())
            assert path.entities[0] == ends[0] and path.entities[-1] == ends[1]


def test_rules_count_the_pairs_of_a_chain(dataset, links):
    """The toy has fewer entities than are sampled."""
    graph = RuleGraph(dataset.known_triples(["train"]), dataset.relations.relations)
    train = {tuple(triple) for triple in dataset.split("train").tolist()}
    for relation_id, relation in enumerate(dataset.relations.relations):
        triples = dataset.split("train")
        rules = graph.rules(relation_id, triples[triples[:, 1] == relation_id], 5, 20)
        assert [rule.confidence for rule in rules] == sorted(
            (mined.confidence for mined in rules), reverse=True
        )
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
        cubes = [rows[name][ids].abs().pow(3).sum()
                 for name, ids in (("entity", heads), ("entity", tails), (RELATION, relations))]  # fmt: skip
        loss = 0.1 * sum(cubes)
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
    tables = SimpleNamespace(
        gather=lambda table, ids: whole[table][ids], relations=relations, vocabulary=lambda _: range(30)
    )
    run = SimpleNamespace(tables=tables, model=model, known_triples=lambda splits: KnownTriples([train], 4))

    def score(rows, head, relation_id, tail):
        parts = rows["entity"][[head]], rows[RELATION][[relation_id]], rows["entity"][[tail]]
        return sum(model.score(*parts, side).item() for side in Side) / 2

    explainer, falls = Explainer(run), {"strong": [], "weak": []}
    for link_ids in triples[-40::10].tolist():
        link, influence_of = Link(("entity", link_ids[0]), link_ids[1], ("entity", link_ids[2])), Counter()
        for side in Side:
            for triple, influence in zip(*explainer.influences(link, side)):
                influence_of[tuple(triple)] += influence
        order = sorted(influence_of, key=influence_of.get)
        for name, some in (("strong", order[-3:]), ("weak", order[:3])):
            for triple in some:
                rows = trained(train[~(train == triple).all(1)])
                falls[name].append(score(whole, *link_ids) - score(rows, *link_ids))
    assert np.mean(falls["strong"]) > 0.1 and np.mean(falls["weak"]) < 0


def test_reasons_by_name(dataset, folder):
    run, train = dglkge.open_run(folder), dataset.split("train")
    head, relation_id, tail = train[train[:, 1] == dataset.relations.id("knows")][0].tolist()
    names = dataset.vocabulary("person")
    link = (names[head], "knows", names[tail])
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


def test_similar_links_are_the_known_ones_by_cosine(dataset, folder):
    run = dglkge.open_run(folder)
    similar = run.explain("person1", "lives_in", "town1", k=50)["similar"]
    train, relation_id = run.dataset.split("train"), run.tables.relations.id("lives_in")
    relation_triples = train[train[:, 1] == relation_id]
    people, towns = run.tables.vocabulary("person"), run.tables.vocabulary("town")
    expected = []
    for column, other, table, names, name in (
        (0, 2, "person", people, "person1"),
        (2, 0, "town", towns, "town1"),
    ):
        anchor = {0: towns.id("town1"), 2: people.id("person1")}[column]
        for id_ in set(relation_triples[relation_triples[:, other] == anchor][:, column].tolist()) - {
            names.id(name)
        }:
            rows = run.tables.gather(table, torch.tensor([id_, names.id(name)])).double()
            expected.append((functional.cosine_similarity(rows[0], rows[1], dim=0).item(), names[id_]))
    expected.sort(reverse=True)
    assert [link["entity"] for link in similar] == [name for _, name in expected]
    assert [link["cosine"] for link in similar] == pytest.approx([cosine for cosine, _ in expected], abs=1e-6)


@pytest.mark.parametrize(
    ("link", "words"),
    [
        (("nobody", "lives_in", "town1"), "nobody"),
        (("person1", "lives_in", "person2"), "person2"),
        (("person1", "near", "town1", 0), "must be at least 1"),
    ],
)
def test_refusals(folder, link, words):
    with pytest.raises(InputError, match=words):
        dglkge.open_run(folder).explain(*link)
