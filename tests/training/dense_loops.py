"""Losses of batches by plain loops in float64, read off the configuration: the oracle of training."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.nn import functional

import dglkge
from dglkge.data.dataset import Dataset
from dglkge.kernels.hashing import combine
from dglkge.model.losses import LOSSES, build_loss
from dglkge.sampling.negatives import UniformNegatives, degree_weights
from dglkge.typing import RELATION, Side
from tests.model.penalty_oracle import query_penalty
from tests.training.live import Rows, chunks_of, queries_of

SEED_OF_HEADS = combine(0x4EAD, 0)
COMPLEX = ("complex", "rotate")


def pair_scores(name: str, h: torch.Tensor, r: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """Scores of rows that are broadcast against one another, by the formula of each score function."""
    dim = h.shape[-1]
    if name == "distmult":
        return (h * r * t).sum(-1)
    if name == "rescal":
        return (h[..., :, None] * r.unflatten(-1, (dim, dim)) * t[..., None, :]).sum((-1, -2))
    if name == "simple":
        (h_a, h_b), (r_a, r_b), (t_a, t_b) = (row.chunk(2, -1) for row in (h, r, t))
        return (h_a * r_a * t_b + t_a * r_b * h_b).sum(-1) / 2
    if name == "quate":
        (a, b, c, d), w, (p, q, u, v) = (row.chunk(4, -1) for row in (h, r, t))
        norm = sum(part**2 for part in w).sqrt()
        e, f, g, k = (part / norm for part in w)
        real = (a * e - b * f - c * g - d * k) * p + (a * f + b * e + c * k - d * g) * q
        return (real + (a * g - b * k + c * e + d * f) * u + (a * k + b * g - c * f + d * e) * v).sum(-1)
    if name in ("pairre", "triplere"):
        first, *middle, last = r.split(dim, -1)
        h, t = (row / row.norm(dim=-1, keepdim=True) for row in (h, t))
        return -(h * first - t * last + sum(middle)).abs().sum(-1)
    if name == "transe_l2":
        return -(h + r - t).norm(dim=-1)
    half = dim // 2
    first, last = torch.complex(h[..., :half], h[..., half:]), torch.complex(t[..., :half], t[..., half:])
    if name == "rotate":
        return -(first * torch.polar(torch.ones_like(r), r) - last).abs().sum(-1)
    return (first * torch.complex(r[..., :half], r[..., half:]) * last.conj()).sum(-1).real


_MASK, _GAMMA = (1 << 64) - 1, 0x9E3779B97F4A7C15


def _mixed(state: int) -> int:
    """Return SplitMix64's output."""
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
    return state ^ (state >> 31)


def dropout_mask(table: str, batch: int, num: int, dim: int, rate: float, seed: int = 0) -> torch.Tensor:
    """Return the factors (num, dim) of all rows by original id: SplitMix64 in Python's integers."""
    digest = hashlib.blake2b(f"{seed}/dropout/{table}/{batch}".encode(), digest_size=8).digest()
    key = int.from_bytes(digest, "little")
    factors = torch.zeros(num, dim, dtype=torch.float64)
    for row in range(num):
        row_state = _mixed((key + row * _GAMMA) & _MASK)
        for column in range(dim):
            word = _mixed((row_state + (column // 4 + 1) * _GAMMA) & _MASK)
            bits = word >> 16 * (column % 4) & 0xFFFF
            factors[row, column] = 1 / (1 - rate) if bits >= rate * 65536 else 0
    return factors


class Oracle:
    """Losses of the batches of a configuration; ``seen`` lists the queries and pairs of ``k_vs_all``."""

    def __init__(self, config: dglkge.Config) -> None:
        self.config, self.data = config, Dataset.open(config.dataset)
        self.name, self.reciprocal = config.model.score_function.name, config.model.reciprocal_relations
        self.triples, self.weights = self.data.split("train").tolist(), self.data.train_weights()
        self.seen: list[Any] = []
        self.answers: dict[tuple[Side, int, int], set[int]] = defaultdict(set)
        self.relations: dict[Any, set[int]] = defaultdict(set)
        for h, r, t in self.triples:
            self.answers[Side.TAIL, r, h].add(t)
            self.answers[Side.HEAD, r, t].add(h)
            relation, time = divmod(r, self.data.num_times)
            self.relations[self.types(r), h, t, time].add(relation)

    def types(self, relation: int) -> tuple[str, str]:
        """Return the types of heads and tails of a relation."""
        relations = self.data.relations.relations
        return relations[relation].lhs, relations[relation].rhs

    def loss(self, data: Dataset, trainer: Any, rows: Rows, batch: Any) -> torch.Tensor:
        """Return the summed loss of a global batch."""
        model = self.config.model
        if model.entity_dropout:
            number = (batch.epoch << 32) + batch.index
            rates = dict.fromkeys(rows, model.entity_dropout) | {RELATION: model.relation_dropout}
            rows = {
                name: some * dropout_mask(name, number, *some.shape, rates[name])
                for name, some in rows.items()
            }
        self.rows = rows
        # Cut once: the gradient of an index into a table is as large as the table.
        self.single = {name: table.unbind() for name, table in rows.items()}
        width = rows[RELATION].shape[1] // (2 if self.reciprocal else 1)
        self.side_rows = {Side.TAIL: rows[RELATION][:, :width], Side.HEAD: rows[RELATION][:, -width:]}
        # A relation has one row at all times.
        self.relation_rows = {
            side: [row for row in some.unbind() for _ in range(self.data.num_times)]
            for side, some in self.side_rows.items()
        }
        kind = self.config.training.objective.name
        return torch.stack(list(getattr(self, kind)(trainer, batch))).sum()

    def queries(self, batch: Any) -> Iterator[tuple[int, Side, tuple[str, int], tuple[str, int]]]:
        """Yield the place of each triple, and side, entity and answer of its two queries."""
        for place, triple_id in enumerate(batch.triple_ids):
            h, r, t = self.triples[triple_id]
            lhs, rhs = self.types(r)
            yield place, Side.TAIL, (lhs, h), (rhs, t)
            yield place, Side.HEAD, (rhs, t), (lhs, h)

    def scores(
        self, side: Side, entity: torch.Tensor, relation: torch.Tensor, candidates: torch.Tensor
    ) -> torch.Tensor:
        """Return scores of candidates; without reciprocal relations a head's query has the formula turned."""
        if side is Side.HEAD and not self.reciprocal:
            return pair_scores(self.name, candidates, relation, entity)
        return pair_scores(self.name, entity, relation, candidates)

    def penalty(self, side: Side, entity: torch.Tensor, relation: int, answer: torch.Tensor) -> torch.Tensor:
        """Return the weighted penalty of a query with one answer."""
        settings = self.config.regularizer
        if not getattr(settings, "weight", 0):
            return torch.zeros((), dtype=torch.float64)
        is_turned = side is Side.HEAD and not self.reciprocal
        ratio = 0.0 if self.name == "rotate" else getattr(settings, "relation_ratio", 1.0)
        return settings.weight * query_penalty(
            settings.name, entity, self.relation_rows[side][relation], answer,
            is_complex=self.name in COMPLEX, is_turned=is_turned,
            p=getattr(settings, "p", 3.0), entity_ratio=getattr(settings, "entity_ratio", 1.0),
            relation_ratio=ratio, product_ratio=getattr(settings, "product_ratio", 1.0),
        )  # fmt: skip

    def full_loss(self, scores: torch.Tensor, answers: list[int]) -> torch.Tensor:
        """Return the loss of a query with its answers among all candidates."""
        loss, smoothing = self.config.loss.name, getattr(self.config.training.objective, "smoothing", 0.0)
        labels = torch.zeros(len(scores), dtype=torch.float64)
        labels[answers] = 1 / len(answers) if loss == "softmax" else 1.0
        smooth = (1 - smoothing) * labels + smoothing / len(scores)
        if loss == "softmax":
            return functional.cross_entropy(scores, smooth)
        if loss in ("logistic", "bce"):
            return functional.binary_cross_entropy_with_logits(scores, smooth, reduction="sum")
        assert loss == "margin_ranking" or len(answers) == 1
        adding = {"reduction": "sum"} if "reduction" in LOSSES.get(loss).Settings.model_fields else {}
        is_answer = labels.bool()[None]
        terms = [build_loss(loss, **adding)(scores[a][None], scores[None], is_answer)[0] for a in answers]
        return torch.stack(terms).mean()

    def weight(self, num_answers: int) -> float:
        """Return the weight of a query of ``k_vs_all``."""
        if self.config.loss.name not in ("softmax", "margin_ranking"):
            return 1.0
        queries = [*self.answers.values()]
        if self.config.training.relation_prediction:
            queries += self.relations.values()
        return num_answers / float(np.mean([len(answers) for answers in queries]))

    def among_relations(
        self, side: Side, anchor: torch.Tensor, true: torch.Tensor, relations: list[int]
    ) -> tuple[torch.Tensor, list[int]]:
        """Return the scores of all relations between two entities, and the places of those that are true.

        Reciprocal relations are candidates in both directions.
        """
        if not self.reciprocal:
            return self.scores(side, anchor, self.rows[RELATION], true), relations
        rows = torch.cat([self.side_rows[Side.TAIL], self.side_rows[Side.HEAD]])
        first = len(self.rows[RELATION]) if side is Side.HEAD else 0
        return pair_scores(self.name, anchor, rows, true), [first + relation for relation in relations]

    def relation_loss(
        self, side: Side, anchor: torch.Tensor, true: torch.Tensor, relations: list[int]
    ) -> torch.Tensor:
        """Return the loss of a query (h, ?, t) or, of the head's side, (t, ?, h)."""
        return self.full_loss(*self.among_relations(side, anchor, true, relations))

    def one_vs_all(self, trainer: Any, batch: Any) -> Iterator[torch.Tensor]:
        """Yield the terms of a batch of triples among all entities, and all relations."""
        predicts = self.config.training.relation_prediction
        for place, side, (kind, entity), (answer_type, answer) in self.queries(batch):
            relation = self.triples[batch.triple_ids[place]][1]
            anchor, true = self.single[kind][entity], self.single[answer_type][answer]
            row = self.relation_rows[side][relation]
            yield self.full_loss(self.scores(side, anchor, row, self.rows[answer_type]), [answer])
            yield self.penalty(side, anchor, relation, true)
            if predicts:
                yield predicts * self.relation_loss(side, anchor, true, [relation // self.data.num_times])

    def k_vs_all(self, trainer: Any, batch: Any) -> Iterator[torch.Tensor]:
        """Yield the terms of a batch of queries with their answers, and of pairs with their relations."""
        queries, num_pairs = queries_of(trainer, batch), 0
        for query in queries:
            side, relation, entity = query
            kinds = self.types(relation)
            kind, answer_type = kinds if side is Side.TAIL else kinds[::-1]
            anchor, answers = self.single[kind][entity], sorted(self.answers[query])
            scores = self.scores(side, anchor, self.relation_rows[side][relation], self.rows[answer_type])
            penalties = [self.penalty(side, anchor, relation, self.single[answer_type][a]) for a in answers]
            loss = self.full_loss(scores, answers) + torch.stack(penalties).mean()
            yield self.weight(len(answers)) * loss
        predicts = self.config.training.relation_prediction
        original = {name: np.asarray(table.original_ids) for name, table in trainer.tables.items()}
        for run in batch.pair_runs if predicts else ():
            part = slice(run.start, run.end)
            for h, t, time in zip(batch.pair_heads[part], batch.pair_tails[part], batch.pair_times[part]):
                pair = ((run.lhs, run.rhs), int(original[run.lhs][h]), int(original[run.rhs][t]), int(time))
                head, tail = self.single[run.lhs][pair[1]], self.single[run.rhs][pair[2]]
                for side, anchor, true in ((Side.TAIL, head, tail), (Side.HEAD, tail, head)):
                    relations = sorted(self.relations[pair])
                    loss = self.relation_loss(side, anchor, true, relations)
                    yield predicts * self.weight(len(relations)) * loss
                self.seen.append(pair)
                num_pairs += 1
        self.seen += queries
        assert len(queries) + num_pairs == len(batch) == batch.global_size

    def negative_sampling(self, trainer: Any, batch: Any) -> Iterator[torch.Tensor]:
        """Yield the terms of a batch of triples, each among its chunk's negatives and its own entity."""
        config, samplers = self.config, self.samplers()
        chunks, drawn = chunks_of(batch), {}
        for place, side, (kind, entity), (answer_type, answer) in self.queries(batch):
            triple_id = batch.triple_ids[place]
            h, r, t = self.triples[triple_id]
            if side not in samplers:
                continue
            anchor, true = self.single[kind][entity], self.single[answer_type][answer]
            row = self.relation_rows[side][r]
            key = (side, answer_type, int(chunks[place]))
            if key not in drawn:
                drawn[key] = samplers[side].sample(answer_type, batch.epoch, batch.index, key[2]).tolist()
            candidates = drawn[key] + ([entity] if kind == answer_type else [])
            if config.negatives.name == "all_entities":
                candidates = list(range(len(self.rows[answer_type])))
            ignored = {answer} | (self.answers[side, r, entity] if config.negatives.mask_known else set())
            negatives = [c for c in candidates if c not in ignored]
            negative = self.scores(side, anchor, row, self.rows[answer_type][negatives])
            weight = 1.0 if self.weights is None else float(self.weights[triple_id])
            label = weight if config.loss.has_confidences else 1.0
            loss = self.sampled_loss(self.scores(side, anchor, row, true), negative, label)
            loss = loss + self.penalty(side, anchor, r, true)
            factor = dict(config.loss.relation_weights or {}).get(self.data.relations.relations[r].name, 1.0)
            yield factor * (1.0 if config.loss.has_confidences else weight) * loss
            if config.training.relation_prediction:
                relation = r // self.data.num_times
                scores, (place,) = self.among_relations(side, anchor, true, [relation])
                cross_entropy = functional.cross_entropy(scores, torch.tensor(place))
                yield config.training.relation_prediction * cross_entropy

    def samplers(self) -> dict[Side, UniformNegatives]:
        """Return the samplers, over original ids; degrees are counted triple by triple."""
        settings = self.config.negatives
        original = {name: np.arange(self.data.num_entities(name)) for name in self.data.entity_types}
        numbers = {
            side: getattr(settings, "num_uniform", 1) if number < 0 else number
            for side, number in ((Side.TAIL, settings.num_for_tails), (Side.HEAD, settings.num_for_heads))
        }
        weights = None
        if getattr(settings, "degree_power", 0):
            degrees = {name: np.zeros(len(ids), np.int64) for name, ids in original.items()}
            for head, relation, tail in self.triples:
                lhs, rhs = self.types(relation)
                degrees[lhs][head] += 1
                degrees[rhs][tail] += 1
            weights = {name: degree_weights(some, settings.degree_power) for name, some in degrees.items()}
        is_shared = numbers[Side.HEAD] == numbers[Side.TAIL] or not numbers[Side.TAIL]
        seeds = {Side.TAIL: 0, Side.HEAD: 0 if is_shared else SEED_OF_HEADS}
        return {
            side: UniformNegatives(number, original, seeds[side], weights)
            for side, number in numbers.items()
            if number
        }

    def sampled_loss(self, truth: torch.Tensor, n: torch.Tensor, label: float) -> torch.Tensor:
        """Return the loss of a query from the scores of its answer and of the negatives that count."""
        settings, softplus = self.config.loss, functional.softplus
        entropy = label * softplus(-truth) + (1 - label) * softplus(truth)
        num, adds = max(1, len(n)), getattr(settings, "reduction", "mean") == "sum"
        weights = torch.full_like(n, 1.0 if adds else 1 / num)
        is_weighted = settings.name == "self_adversarial" or getattr(settings, "adversarial_weights", False)
        if is_weighted:
            weights = torch.softmax(settings.adversarial_temperature * n.detach(), 0)
        if settings.name == "softmax":
            return torch.log(truth.exp() + num * (weights * n.exp()).sum()) - truth
        if settings.name == "margin_ranking":
            return (weights * (settings.margin - truth + n).relu()).sum()
        if settings.name == "self_adversarial":
            return softplus(-(settings.margin + truth)) + (weights * softplus(settings.margin + n)).sum()
        if settings.name == "hinge":
            truth_loss = (
                label * (settings.margin - truth).relu() + (1 - label) * (settings.margin + truth).relu()
            )
            return truth_loss + (weights * (settings.margin + n).relu()).sum()
        if settings.name == "squared":
            return (label - truth) ** 2 + (weights * n**2).sum()
        if settings.name == "bce" and not is_weighted and not adds:
            return (entropy + softplus(n).sum()) / (1 + len(n))
        return entropy + (weights * softplus(n)).sum()
