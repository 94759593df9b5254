"""Reasons for a link: training triples that made it likely, rules that imply it, similar known links.

The influence of a training triple is the change of the link's score that one Newton step of the answer's row
makes without that triple, as in CRIAGE (Pezeshkpour et al. 2019), here with the softmax over sampled
candidates. All other rows stay as they are: it orders the triples, and overestimates the change.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dglkge.data.dataset_files import TRAIN
from dglkge.inference.rules import Entity, Path, Rule, RuleGraph, best_rules, evenly
from dglkge.inference.search import check_k
from dglkge.inference.trained_model import TrainedModel
from dglkge.typing import RELATION, Side

MAX_TRIPLES = 1 << 10
"""Training triples of an entity that are looked at; of more, evenly spaced ones."""

NUM_CANDIDATES = 1 << 12
"""Entities that stand for all in the softmax of a triple."""

MAX_RULES = 100
"""Chains between two entities that are measured as rules, the shortest ones."""

RULE_COLUMNS = ("rule", "confidence", "support", "pairs")
"""What is known of a rule."""

DAMPING = 1.0
"""Of the curvature of a row, times its mean: triples in which the entity is no answer bend the loss, too."""


@dataclass(frozen=True)
class Link:
    """A triple by id, with the types of its ends."""

    head: Entity
    relation_id: int
    tail: Entity

    def end(self, side: Side) -> Entity:
        """Return the entity on a side."""
        return self.tail if side is Side.TAIL else self.head


class Explainer:
    """Finds reasons in the training triples of a run."""

    def __init__(self, run: TrainedModel) -> None:
        self._run = run
        self._known = run.known_triples(splits=(TRAIN,))
        self._graph = RuleGraph(self._known, run.tables.relations.relations)

    def reasons(self, head: str, relation: str, tail: str, k: int) -> dict[str, Any]:
        """Return score, probability, triples, rules and similar, the best k of each; ready for JSON."""
        check_k(k)
        link = self._link(head, relation, tail)
        calibration, probability = self._run.calibration_if_any, None
        ids = np.array([[link.head[1], link.relation_id, link.tail[1]]])
        scores = self._run.scores(ids)
        if calibration is not None:
            probability = float(calibration.triple_probabilities(scores, ids).mean())
        measures = {"score": float(np.mean([scores[side] for side in Side])), "probability": probability}
        reasons = {
            "triples": self.triples(link, k),
            "rules": self.rules(link, k),
            "similar": self.similar(link, k),
        }
        return {**self._run.named_triple(*ids[0].tolist()), **measures, **reasons}

    def triples(self, link: Link, k: int) -> list[dict[str, Any]]:
        """Return the training triples of both ends without which the score would fall most."""
        influential = []
        for side in Side:
            triples, influences = self.influences(link, side)
            influential += [
                {**self._run.named_triple(*triple), "of": side.value, "influence": influence}
                for triple, influence in zip(triples.tolist(), influences.tolist())
                if influence > 0
            ]
        # A triple of both ends changes both rows.
        return sorted(influential, key=lambda reason: -reason["influence"])[:k]

    def rules(self, link: Link, k: int) -> list[dict[str, Any]]:
        """Return the rules of the paths between the ends with the greatest confidence, each with its path."""
        paths = {path.steps: path for path in self._graph.paths(link.head, link.relation_id, link.tail)}
        rules = best_rules([self._graph.rule(steps, link.relation_id) for steps in list(paths)[:MAX_RULES]])
        return [self._rule(rule, link.relation_id, paths[rule.steps]) for rule in rules[:k]]

    def similar(self, link: Link, k: int) -> list[dict[str, Any]]:
        """Return known links of the relation that share an end, the most similar other end first."""
        links = []
        for side in Side:
            (type_, end_id), (_, anchor) = link.end(side), link.end(side.other)
            _, answers = self._known.answers(side, np.array([anchor]), np.array([link.relation_id]))
            answers = evenly(answers[answers != end_id], NUM_CANDIDATES)
            rows = self._rows(type_, np.append(answers, end_id))
            rows = rows / rows.norm(dim=1, keepdim=True).clamp_min(torch.finfo(rows.dtype).tiny)
            cosines = (rows[:-1] @ rows[-1]).tolist()
            names = self._run.tables.vocabulary(type_)
            links += [
                {"entity": names[id_], "instead_of": side.value, "cosine": cosine}
                for id_, cosine in zip(answers.tolist(), cosines)
            ]
        return sorted(links, key=lambda reason: -reason["cosine"])[:k]

    def rules_of(self, relation: str, k: int, samples: int) -> list[dict[str, Any]]:
        """Return the best rules for a relation, mined from a sample of its triples."""
        check_k(k)
        id_ = self._run.tables.relations.id(relation)
        train = self._run.dataset.split(TRAIN)
        rules = self._graph.rules(id_, train[train[:, 1] == id_], samples, MAX_RULES)
        return [self._rule(rule, id_) for rule in rules[:k]]

    def _link(self, head: str, relation: str, tail: str) -> Link:
        tables, query = self._run.tables, self._run.link_query(Side.TAIL, head, relation)
        types = tables.relations[query.relation_id]
        tail_id = tables.vocabulary(types.rhs).id(tail)
        return Link((types.lhs, query.entity_id), query.relation_id, (types.rhs, tail_id))

    def _rule(self, rule: Rule, relation_id: int, path: Path | None = None) -> dict[str, Any]:
        """Return a rule as a text and its numbers, with its path by name where there is one."""
        labels, variables = self._run.tables.relations.labels, ["x", *"ab"[: len(rule.steps) - 1], "y"]
        body = []
        for (id_, side), *ends in zip(rule.steps, variables, variables[1:]):
            head, tail = ends if side is Side.TAIL else reversed(ends)
            body.append(f"({head}, {labels[id_]}, {tail})")
        text = f"{', '.join(body)} => (x, {labels[relation_id]}, y)"
        fields = dict(zip(RULE_COLUMNS, (text, rule.confidence, rule.support, rule.pairs)))
        links = () if path is None else path.links()
        return {**fields, "path": [self._run.named_triple(*triple) for triple in links]}

    def _rows(self, table: str, ids: np.ndarray) -> Tensor:
        return self._run.tables.gather(table, torch.from_numpy(np.asarray(ids, np.int64))).float()

    def influences(self, link: Link, side: Side) -> tuple[np.ndarray, np.ndarray]:
        """Return the training triples (n, 3) of the end on a side, and their influences (n,)."""
        (type_, end_id), (anchor_type, anchor) = link.end(side), link.end(side.other)
        row = self._rows(type_, np.array([end_id]))
        asked = (anchor_type, np.array([anchor])), np.array([link.relation_id])
        (direction,) = self._slopes(side, *asked, row)[1].double()
        triples, slopes, weights = [np.empty((0, 3), np.int64)], [], []
        own_triples = list(self._graph.neighbours(type_, np.array([end_id])))
        places = evenly(np.arange(len(own_triples)), MAX_TRIPLES).tolist()
        groups: dict[tuple[Side, str], list[tuple[int, int]]] = {}
        for _, (relation_id, end_side), other_type, other in (own_triples[place] for place in places):
            groups.setdefault((end_side.other, other_type), []).append((relation_id, other))
        for (own_side, other_type), parts in groups.items():
            relations, other_ids = map(np.array, zip(*parts))
            table = np.full((len(parts), 3), end_id)
            table[:, 1], table[:, own_side.anchor_column] = relations, other_ids
            is_asked = (table == [link.head[1], link.relation_id, link.tail[1]]).all(1)
            query, slope, scores = self._slopes(own_side, (other_type, other_ids), relations, row)
            triples.append(table[~is_asked])
            slopes.append(slope[~is_asked].double())
            weights.append(self._probabilities(type_, query, scores)[~is_asked].double())
        all_triples = np.concatenate(triples)
        if not len(all_triples):
            return all_triples, np.empty(0)
        slope, probability = torch.cat(slopes), torch.cat(weights)
        curvature = (slope * (probability * (1 - probability))[:, None]).T @ slope
        curvature += torch.eye(len(curvature)) * (DAMPING * curvature.diagonal().mean() + 1e-9)
        effect = slope @ torch.linalg.solve(curvature, direction) * (1 - probability)
        return all_triples, effect.numpy()

    def _slopes(
        self, side: Side, anchors: tuple[str, np.ndarray], relation_ids: np.ndarray, row: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries of triples, slopes (n, D) of their scores in the answer's row, and the scores."""
        ids, model = torch.from_numpy(relation_ids), self._run.model
        with torch.no_grad():
            query = model.query(self._rows(*anchors), self._rows(RELATION, relation_ids), side, ids)
        answers = row.expand(len(query), -1).clone().requires_grad_()
        scores = model.compare_pairs(query, answers)
        (slopes,) = torch.autograd.grad(scores.sum(), answers)
        return query, slopes, scores.detach()

    def _probabilities(self, type_: str, query: Tensor, scores: Tensor) -> Tensor:
        """Return the softmax of scores (n,) among all entities of the type, of which some stand for all."""
        count = len(self._run.tables.vocabulary(type_))
        ids = evenly(np.arange(count), NUM_CANDIDATES)
        with torch.no_grad():
            log_sums = self._run.model.compare(query, self._rows(type_, ids)).logsumexp(1)
        return torch.sigmoid(scores - log_sums - math.log(count / len(ids)))
