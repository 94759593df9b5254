"""Reasons for a link: training triples that made it likely, rules that imply it, similar known links.

The influence of a training triple is the change of the link's score that one Newton step of the answer's row
makes without that triple, as in CRIAGE (Pezeshkpour et al. 2019), here with the softmax over sampled
candidates. All other rows stay as they are: it orders the triples, and overestimates the change.
"""

from __future__ import annotations

import math
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


Link = tuple[int, int, int]
"""Head, relation and tail by id."""


class Explainer:
    """Finds reasons in the training triples of a run."""

    def __init__(self, run: TrainedModel) -> None:
        self._run = run
        self._known = run.known_triples(splits=(TRAIN,))
        self._graph = RuleGraph(self._known, run.tables.relations.relations)

    def reasons(self, head: str, relation: str, tail: str, k: int) -> dict[str, Any]:
        """Return score, probability, triples, rules and similar, the best k of each; ready for JSON."""
        check_k(k)
        tables, (_, head_id, relation_id) = self._run.tables, self._run.link_query(Side.TAIL, head, relation)
        link = head_id, relation_id, tables.vocabulary(tables.relations[relation_id].rhs).id(tail)
        ids, calibration, probability = np.array([link]), self._run.calibration_if_any, None
        scores = self._run.scores(ids)
        if calibration is not None:
            probability = float(calibration.triple_probabilities(scores, ids).mean())
        return {
            **self._run.named_triple(*link),
            "score": float(np.mean([scores[side] for side in Side])),
            "probability": probability,
            "triples": self.triples(link, k),
            "rules": self.rules(link, k),
            "similar": self.similar(link, k),
        }

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
        paths, relation_id = {path.steps: path for path in self._graph.paths(*link)}, link[1]
        rules = best_rules([self._graph.rule(steps, relation_id) for steps in list(paths)[:MAX_RULES]])
        return [self._rule(rule, relation_id, paths[rule.steps]) for rule in rules[:k]]

    def similar(self, link: Link, k: int) -> list[dict[str, Any]]:
        """Return known links of the relation that share an end, the most similar other end first."""
        links = []
        for side in Side:
            (type_, end_id), query = self._end(link, side), (link[side.anchor_column], link[1])
            _, answers = self._known.answers(side, *np.array([query]).T)
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

    def _end(self, link: Link, side: Side) -> Entity:
        return self._graph.relations[link[1]].candidate_type(side), link[side.column]

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
        return self._run.tables.gather(table, torch.from_numpy(np.ascontiguousarray(ids, np.int64))).float()

    def influences(self, link: Link, side: Side) -> tuple[np.ndarray, np.ndarray]:
        """Return the training triples (n, 3) of the end on a side, and their influences (n,)."""
        type_, end_id = self._end(link, side)
        row = self._rows(type_, np.array([end_id]))
        (direction,) = self._slopes(side, np.array([link]), row)[1].double()
        groups: dict[tuple[Side, str], list[Link]] = {}
        for path in self._graph.neighbours((type_, end_id), MAX_TRIPLES):
            (triple,), (_, other_side), (other_type, _) = path.links(), path.steps[0], path.entities[1]
            if triple != link:
                groups.setdefault((other_side.other, other_type), []).append(triple)
        if not groups:
            return np.empty((0, 3), np.int64), np.empty(0)
        triples, slopes, weights = list(map(np.array, groups.values())), [], []
        for (own_side, _), own_triples in zip(groups, triples):
            query, slope, scores = self._slopes(own_side, own_triples, row)
            slopes.append(slope.double())
            weights.append(self._probabilities(type_, query, scores).double())
        slope, probability = torch.cat(slopes), torch.cat(weights)
        curvature = (slope * (probability * (1 - probability))[:, None]).T @ slope
        curvature += torch.eye(len(curvature)) * (DAMPING * curvature.diagonal().mean() + 1e-9)
        effect = slope @ torch.linalg.solve(curvature, direction) * (1 - probability)
        return np.concatenate(triples), effect.numpy()

    def _slopes(self, side: Side, triples: np.ndarray, row: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries of triples (n, 3), slopes (n, D) of their scores in the answer's row, the scores."""
        relation_ids, model = np.ascontiguousarray(triples[:, 1]), self._run.model
        anchor_type = self._graph.relations[relation_ids[0]].anchor_type(side)
        anchors = self._rows(anchor_type, triples[:, side.anchor_column])
        relations = self._rows(RELATION, relation_ids)
        with torch.no_grad():
            query = model.query(anchors, relations, side, torch.from_numpy(relation_ids))
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
