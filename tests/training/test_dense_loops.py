"""Epochs of every objective equal plain loops in float64, with torch's own Adagrad: losses and all tables."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

import dglkge
from dglkge.config import load_config
from dglkge.data.dataset import Dataset
from dglkge.errors import InputError
from dglkge.kernels.hashing import GOLDEN_GAMMA, combine, split_mix
from dglkge.model.losses import LOSSES, build_loss
from dglkge.sampling.negatives import UniformNegatives, degree_weights
from dglkge.typing import RELATION, Side
from tests.model.penalty_oracle import query_penalty
from tests.toy_kg import temporal_dataset, toy_dataset, weighted_dataset
from tests.training.live import Rows, assert_epochs_equal, chunks_of, queries_of, settings

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
    if name == "transe_l2":
        return -(h + r - t).norm(dim=-1)
    half = dim // 2
    first, last = torch.complex(h[..., :half], h[..., half:]), torch.complex(t[..., :half], t[..., half:])
    if name == "rotate":
        return -(first * torch.polar(torch.ones_like(r), r) - last).abs().sum(-1)
    return (first * torch.complex(r[..., :half], r[..., half:]) * last.conj()).sum(-1).real


def dropout_mask(table: str, batch: int, num: int, dim: int, rate: float, seed: int = 0) -> torch.Tensor:
    """Return the factors (num, dim) of all rows by original id, four from each output of SplitMix64."""
    digest = hashlib.blake2b(f"{seed}/dropout/{table}/{batch}".encode(), digest_size=8).digest()
    row_states = split_mix(int.from_bytes(digest, "little") + np.arange(num, dtype=np.uint64) * GOLDEN_GAMMA)
    columns = np.arange(dim, dtype=np.uint64)
    words = split_mix(row_states[:, None] + (columns // 4 + 1) * GOLDEN_GAMMA)
    bits = words >> (16 * (columns % 4)) & 0xFFFF
    return torch.from_numpy(np.where(bits >= rate * 65536, 1 / (1 - rate), 0.0))


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
        relations = self.data.relations.relations
        return relations[relation].lhs, relations[relation].rhs

    def loss(self, data: Dataset, trainer: Any, rows: Rows, batch: Any) -> torch.Tensor:
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
        if self.config.loss.name not in ("softmax", "margin_ranking"):
            return 1.0
        queries = [*self.answers.values()]
        if self.config.training.relation_prediction:
            queries += self.relations.values()
        return num_answers / float(np.mean([len(answers) for answers in queries]))

    def among_relations(
        self, side: Side, anchor: torch.Tensor, true: torch.Tensor, relations: list[int]
    ) -> tuple[torch.Tensor, list[int]]:
        """Return scores of all relations, reciprocal ones in both directions, and places of the true ones."""
        if not self.reciprocal:
            return self.scores(side, anchor, self.rows[RELATION], true), relations
        rows = torch.cat([self.side_rows[Side.TAIL], self.side_rows[Side.HEAD]])
        first = len(self.rows[RELATION]) if side is Side.HEAD else 0
        return pair_scores(self.name, anchor, rows, true), [first + relation for relation in relations]

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
                scores, places = self.among_relations(side, anchor, true, [relation // self.data.num_times])
                yield predicts * self.full_loss(scores, places)

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
            for h, t, time in zip(run.heads, run.tails, run.times):
                pair = ((run.lhs, run.rhs), int(original[run.lhs][h]), int(original[run.rhs][t]), int(time))
                head, tail = self.single[run.lhs][pair[1]], self.single[run.rhs][pair[2]]
                for side, anchor, true in ((Side.TAIL, head, tail), (Side.HEAD, tail, head)):
                    relations = sorted(self.relations[pair])
                    loss = self.full_loss(*self.among_relations(side, anchor, true, relations))
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

    def sampled_loss(self, truth: torch.Tensor, negatives: torch.Tensor, label: float) -> torch.Tensor:
        """Return the loss of a query by the loss itself, which test_losses.py compares with loops."""
        labels = {"labels": truth.new_tensor([label])} if self.config.loss.has_confidences else {}
        return build_loss(**dict(self.config.loss))(truth[None], negatives[None], None, **labels)[0]


N3 = "regularizer.name=n3 regularizer.weight=0.02"
PREDICTED = "training.relation_prediction=3"
SMOOTHED = "training.objective.label_smoothing=0.1"
DROPPED = "model.entity_dropout=0.25 model.relation_dropout=0.125"
ONE_VS_ALL, K_VS_ALL = "training.objective=one_vs_all", "training.objective=k_vs_all training.batch_size=70"
NOT_RECIPROCAL = "model.reciprocal_relations=false"
REFERENCE = "training.kernels=reference"
ON_DEVICE = "training.device=cpu_staged tables.storage=device"


@pytest.fixture(scope="module")
def weighted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return weighted_dataset(tmp_path_factory.mktemp("weighted"))


def assert_equal(dataset: Path, run: Path, case: str, num_epochs: int = 2, rel: float = 1e-3) -> Oracle:
    config = load_config(None, settings(dataset, run, *case.split()))
    oracle = Oracle(config)
    sums_batch = config.loss.batch_reduction == "sum"
    assert_epochs_equal(config, oracle.loss, num_epochs, rel=rel, sums_batch=sums_batch)
    return oracle


FULL = f"{ONE_VS_ALL} {N3} {PREDICTED} {SMOOTHED}"
FULL_DISTMULT = f"{ONE_VS_ALL} {PREDICTED} model.score_function=distmult"
PENALTIES = {
    "n3": "regularizer.entity_ratio=0.5 regularizer.relation_ratio=3",
    "lp": "regularizer.relation_ratio=0 regularizer.p=2",
    "f2": "regularizer.relation_ratio=0.5",
    "dura": "regularizer.product_ratio=3 regularizer.entity_ratio=0.5",
    "ivr": "regularizer.product_ratio=2 regularizer.p=2.5",
}


def penalized(name: str, case: str = "") -> str:
    return f"{case} regularizer.name={name} regularizer.weight=0.02 {PENALTIES[name]}"


SAMPLED = [
    "negatives.num_for_heads=5",
    f"negatives.num_for_tails=0 {N3}",
    f"negatives.num_for_heads=0 loss.name=bce {N3}",
    "negatives.mask_known=true negatives.num_for_tails=4",
    f"negatives.mask_known=true loss.name=bce {REFERENCE}",
    "negatives.degree_power=0.75",
    "negatives.name=all_entities",
    "negatives.name=all_entities loss.name=margin_ranking negatives.num_for_heads=0",
    "loss.adversarial_weights=true loss.adversarial_temperature=2",
    "loss.name=bce loss.reduction=sum",
    "loss.name=squared loss.batch_reduction=sum",
    f"{PREDICTED} {REFERENCE}",
    f"{PREDICTED} model.score_function=distmult loss.name=logistic {NOT_RECIPROCAL}",
]
NAMES = ("distmult", "complex", "rotate", "rescal", "simple")
OTHERS = [
    f"{PREDICTED} model.score_function=transe_l2 loss.name=margin_ranking",
    f"{PREDICTED} model.score_function=rotate loss.name=self_adversarial loss.margin=2 {NOT_RECIPROCAL}",
    FULL,
    f"{FULL} loss.name=logistic",
    f"{ONE_VS_ALL} loss.name=logistic",
    *(f"{ONE_VS_ALL} {PREDICTED} loss.name={name}" for name in ("margin_ranking", "self_adversarial")),
    f"{FULL} {REFERENCE}",
    f"{FULL} {REFERENCE} model.score_function=rotate",
    *(f"{FULL} model.score_function={name} {NOT_RECIPROCAL}" for name in NAMES),
    *(f"{FULL} model.score_function={name}" for name in ("transe_l2", "rotate", "simple")),
    *map(penalized, PENALTIES),
    *(penalized(name, REFERENCE) for name in ("f2", "dura", "ivr")),
    *(penalized(name, f"{FULL_DISTMULT} {NOT_RECIPROCAL}") for name in ("n3", "dura", "ivr")),
    *(penalized(name, f"{ONE_VS_ALL} {PREDICTED}") for name in ("lp", "f2", "dura")),
    # Of queries with several answers the mean over the answers.
    *(penalized(name, K_VS_ALL) for name in ("n3", "lp", "f2", "dura")),
    f"{N3} {DROPPED}",
    f"{N3} {REFERENCE} {DROPPED}",
    f"{ONE_VS_ALL} {N3} {PREDICTED} {DROPPED}",
    f"{K_VS_ALL} {N3} {REFERENCE} {DROPPED}",
]


@pytest.mark.parametrize("case", [*SAMPLED, *OTHERS])
def test_batches_of_triples_or_queries(case: str, tmp_path: Path) -> None:
    assert_equal(toy_dataset(typed=True), tmp_path / "run", case, rel=1e-4 if case in SAMPLED else 1e-3)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("case", ["", ONE_VS_ALL, K_VS_ALL])
def test_relations_are_predicted_at_the_times_of_triples(case: str, on_device: bool, tmp_path: Path) -> None:
    """A relation at a time has the row of the relation, on the host and on a device."""
    more = ON_DEVICE if on_device else ""
    oracle = assert_equal(temporal_dataset(), tmp_path / "run", f"{case} {PREDICTED} {more}", 1, rel=1e-4)
    assert oracle.data.num_times == 4


@pytest.mark.parametrize("case", [
    "loss.relation_weights.near=0.5 loss.relation_weights.knows=3",
    "loss.relation_weights.lives_in=0 loss.name=hinge negatives.num_for_heads=0",
    "loss.confidences=true loss.name=logistic",
    "loss.confidences=true loss.name=bce loss.relation_weights.near=2",
    f"loss.confidences=true loss.name=hinge {REFERENCE}",
])  # fmt: skip
def test_weights_of_triples_and_relations(case: str, weighted: Path, tmp_path: Path) -> None:
    assert_equal(weighted, tmp_path / "run", case, rel=1e-4)


@pytest.mark.parametrize("case", [
    K_VS_ALL,
    f"{K_VS_ALL} loss.name=logistic {SMOOTHED} {N3}",
    f"{K_VS_ALL} {PREDICTED} loss.name=margin_ranking",
    f"{K_VS_ALL} {PREDICTED} loss.batch_reduction=sum",
    f"{K_VS_ALL} {SMOOTHED} {PREDICTED} loss.name=logistic model.score_function=transe_l2",
])  # fmt: skip
def test_k_vs_all_has_each_query_and_each_pair_once_an_epoch(case: str, tmp_path: Path) -> None:
    oracle = assert_equal(toy_dataset(typed=True), tmp_path / "run", case)
    epoch = [*oracle.answers, *(oracle.relations if PREDICTED in case else ())]
    assert sorted(oracle.seen, key=str) == sorted([*epoch, *epoch], key=str)
    assert set(oracle.seen[: len(epoch)]) == set(epoch)


@pytest.mark.parametrize(("case", "scale", "message"), [
    ("loss.confidences=true loss.name=bce", 1.0, "and the triples of .* have no weights; allowed: false"),
    ("loss.confidences=true loss.name=bce", 2.0, r"training triple \d+ of .* has the weight 1.*\[0, 1\]"),
    ("loss.relation_weights.knowz=2", 1.0, "unknown relation 'knowz'; did you mean 'knows'"),
])  # fmt: skip
def test_weights_that_do_not_fit_the_data_are_refused(case, scale, message, tmp_path):
    dataset = toy_dataset(typed=True) if scale == 1 else weighted_dataset(tmp_path / "data", scale)
    config = load_config(None, [f"dataset={dataset}", f"output={tmp_path / 'run'}", *case.split()])
    with pytest.raises(InputError, match=message), dglkge.join_cluster(config):
        pass
    assert not (tmp_path / "run").exists()
