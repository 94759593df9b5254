"""Settings of losses and negatives, over epochs, against a dense float64 loop over triples and candidates."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dglkge
from dglkge.config import load_config
from dglkge.data.dataset import Dataset
from dglkge.errors import InputError
from dglkge.kernels.hashing import combine
from dglkge.sampling.draws import degree_weights
from dglkge.sampling.edge_batches import EdgeBatch
from dglkge.sampling.negatives import UniformNegatives
from dglkge.step.objectives.autograd_loss import AutogradLoss
from dglkge.step.objectives.dot_softmax import DotSoftmax
from dglkge.typing import RELATION, Side
from tests.toy_kg import toy_dataset, weighted_dataset
from tests.training.live import Rows, assert_epochs_equal, chunks_of, opened, rows_by_node, train
from tests.training.test_train_step import complex_score, cube_of_moduli

DIM, NUM_NEGATIVES, CHUNK, BATCH, EPOCHS = 8, 12, 20, 50, 2
SEED_OF_HEADS = combine(0x4EAD, 0)


@dataclass(frozen=True)
class Wanted:
    """What a case asks for, as the oracle computes it."""

    tails: int = NUM_NEGATIVES
    heads: int = NUM_NEGATIVES
    loss: str = "softmax"
    masks: bool = False
    power: float = 0.0
    temperature: float | None = None
    reduction: str = "mean"
    sums_batch: bool = False
    n3: float = 0.0
    draws_all: bool = False
    relations: tuple[tuple[str, float], ...] = ()
    labels: bool = False


CASES = {
    "negatives.num_for_heads=5": Wanted(heads=5),
    "negatives.num_for_heads=0": Wanted(heads=0),
    "negatives.num_for_tails=0 regularizer.name=n3 regularizer.weight=0.02": Wanted(tails=0, n3=0.02),
    "negatives.num_for_heads=0 loss.name=bce regularizer.name=n3 regularizer.weight=0.02": Wanted(
        heads=0, loss="bce", n3=0.02
    ),
    "negatives.mask_known=true": Wanted(masks=True),
    "negatives.mask_known=true negatives.num_for_tails=4": Wanted(tails=4, masks=True),
    "negatives.mask_known=true loss.name=hinge": Wanted(masks=True, loss="hinge"),
    "negatives.mask_known=true loss.name=bce training.kernels=reference": Wanted(masks=True, loss="bce"),
    "negatives.degree_power=0.75": Wanted(power=0.75),
    "negatives.degree_power=2 negatives.num_for_heads=7 loss.name=squared": Wanted(
        power=2.0, heads=7, loss="squared"
    ),
    "negatives.name=all_entities": Wanted(draws_all=True),
    "negatives.name=all_entities loss.name=margin_ranking negatives.num_for_heads=0": Wanted(
        draws_all=True, loss="margin_ranking", heads=0
    ),
    "loss.adversarial_weights=true loss.adversarial_temperature=2": Wanted(temperature=2.0),
    "loss.adversarial_weights=true loss.name=bce": Wanted(temperature=1.0, loss="bce"),
    "loss.name=bce loss.reduction=sum": Wanted(loss="bce", reduction="sum"),
    "loss.batch_reduction=sum": Wanted(sums_batch=True),
    "loss.name=squared loss.batch_reduction=sum": Wanted(loss="squared", sums_batch=True),
}


def query_loss(
    wanted: Wanted, truth: torch.Tensor, others: list[torch.Tensor], label: float = 1.0
) -> torch.Tensor:
    """Return the loss of one query from the scores of its answers that count."""
    softplus = torch.nn.functional.softplus
    entropy = label * softplus(-truth) + (1 - label) * softplus(truth)
    n = torch.stack(others) if others else truth.new_zeros(0)
    num = max(1, len(others))
    weights = torch.full_like(n, 1 / num)
    if wanted.temperature is not None:
        weights = torch.softmax(wanted.temperature * n.detach(), 0)
    elif wanted.reduction == "sum":
        weights = torch.ones_like(n)
    if wanted.loss == "softmax":
        return torch.log(truth.exp() + num * (weights * n.exp()).sum()) - truth
    if wanted.loss == "margin_ranking":
        return (weights * (1 - truth + n).relu()).sum()
    if wanted.loss == "hinge":
        of_truth = label * (1 - truth).relu() + (1 - label) * (1 + truth).relu()
        return of_truth + (weights * (1 + n).relu()).sum()
    if wanted.loss == "squared":
        return (label - truth) ** 2 + (weights * n**2).sum()
    if wanted.loss == "bce" and wanted.temperature is None and wanted.reduction == "mean":
        return (entropy + softplus(n).sum()) / (1 + len(others))
    return entropy + (weights * softplus(n)).sum()


def samplers(data: Dataset, wanted: Wanted) -> dict[Side, UniformNegatives]:
    """Return the samplers, over original ids; degrees are counted triple by triple."""
    original = {name: np.arange(data.num_entities(name)) for name in data.entity_types}
    weights = None
    if wanted.power:
        degrees = {name: np.zeros(len(ids), np.int64) for name, ids in original.items()}
        for head, relation, tail in data.split("train"):
            degrees[data.relations.relations[relation].lhs][head] += 1
            degrees[data.relations.relations[relation].rhs][tail] += 1
        weights = {name: degree_weights(found, wanted.power) for name, found in degrees.items()}
    heads_seed = 0 if wanted.heads == wanted.tails or not wanted.tails else SEED_OF_HEADS
    return {
        Side.TAIL: UniformNegatives(wanted.tails, original, 0, weights),
        Side.HEAD: UniformNegatives(wanted.heads, original, heads_seed, weights),
    }


def oracle_batch(data: Dataset, rows: Rows, batch: EdgeBatch, wanted: Wanted) -> torch.Tensor:
    """Return the summed loss of a global batch."""
    weights, place = data.train_weights(), (batch.epoch, batch.index)
    known = {tuple(triple) for triple in data.split("train").tolist()}
    drawn = samplers(data, wanted)
    rows = {name: table.unbind() for name, table in rows.items()}
    total = torch.zeros((), dtype=torch.float64)
    for triple_id, chunk in zip(batch.triple_ids, chunks_of(batch)):
        weight = 1.0 if weights is None else weights[triple_id]
        h, r, t = (int(x) for x in data.split("train")[triple_id])
        relation = data.relations.relations[r]
        both = rows[RELATION][r]
        for side, anchor, truth, row, anchor_type, truth_type in (
            (Side.TAIL, h, t, both[:DIM], relation.lhs, relation.rhs),
            (Side.HEAD, t, h, both[DIM:], relation.rhs, relation.lhs),
        ):
            if not (wanted.tails if side is Side.TAIL else wanted.heads):
                continue
            query = rows[anchor_type][anchor]
            candidates = drawn[side].sample(truth_type, *place, int(chunk)).tolist()
            candidates += [anchor] if anchor_type == truth_type else []
            if wanted.draws_all:
                candidates = list(range(data.num_entities(truth_type)))
            ignored = {truth}
            if wanted.masks:
                ignored |= {c for c in candidates if ((h, r, c) if side is Side.TAIL else (c, r, t)) in known}
            score = complex_score(query, row, rows[truth_type][truth])
            others = [rows[truth_type][c] for c in candidates if c not in ignored]
            others = list(complex_score(query, row, torch.stack(others))) if others else []
            loss = query_loss(wanted, score, others, float(weight) if wanted.labels else 1.0)
            if wanted.n3:
                loss = loss + wanted.n3 * sum(map(cube_of_moduli, (query, row, rows[truth_type][truth])))
            factor = dict(wanted.relations).get(relation.name, 1.0)
            total = total + (factor if wanted.labels else factor * float(weight)) * loss
    return total


def assert_trained(dataset: Path, run: Path, case: str, wanted: Wanted) -> None:
    """Train, and compare losses and tables with the oracle's."""
    settings = [
        *(f"dataset={dataset}", f"output={run}", f"model.dimension={DIM}", "model.init_scale=0.3"),
        *([] if wanted.draws_all else [f"negatives.num_uniform={NUM_NEGATIVES}"]),
        f"negatives.chunk_size={CHUNK}",
        *(f"training.batch_size={BATCH}", f"training.num_epochs={EPOCHS}", "checkpoint.every_epochs=0"),
        "regularizer.name=none",
        *("training.matmul_dtype=float32", *case.split()),
    ]

    def loss_of(data: Dataset, trainer: Any, rows: Rows, batch: EdgeBatch) -> torch.Tensor:
        kind = AutogradLoss if "training.kernels=reference" in case else DotSoftmax
        assert isinstance(trainer._train_step.objective, kind)
        return oracle_batch(data, rows, batch, wanted)

    assert_epochs_equal(load_config(None, settings), loss_of, EPOCHS, rel=1e-4, sums_batch=wanted.sums_batch)


@pytest.mark.parametrize("case", list(CASES))
def test_epochs_equal_a_dense_float64_loop(case: str, tmp_path: Path) -> None:
    assert_trained(toy_dataset(typed=True), tmp_path / "run", case, CASES[case])


WEIGHTED = {
    "loss.relation_weights.near=0.5 loss.relation_weights.knows=3": Wanted(
        relations=(("near", 0.5), ("knows", 3.0))
    ),
    "loss.relation_weights.lives_in=0 loss.name=hinge negatives.num_for_heads=0": Wanted(
        relations=(("lives_in", 0.0),), loss="hinge", heads=0
    ),
    "loss.confidences=true loss.name=logistic": Wanted(labels=True, loss="logistic"),
    "loss.confidences=true loss.name=bce loss.relation_weights.near=2": Wanted(
        labels=True, loss="bce", relations=(("near", 2.0),)
    ),
    "loss.confidences=true loss.name=squared negatives.mask_known=true": Wanted(
        labels=True, loss="squared", masks=True
    ),
    "loss.confidences=true loss.name=hinge training.kernels=reference": Wanted(labels=True, loss="hinge"),
    "loss.name=squared": Wanted(loss="squared"),
}


@pytest.fixture(scope="module")
def weighted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set whose triples have weights in [0, 1]."""
    return weighted_dataset(tmp_path_factory.mktemp("weighted"))


@pytest.mark.parametrize("case", list(WEIGHTED))
def test_epochs_with_weights_equal_a_dense_float64_loop(case: str, weighted: Path, tmp_path: Path) -> None:
    assert_trained(weighted, tmp_path / "run", case, WEIGHTED[case])


REFUSED = [
    ("loss.confidences=true loss.name=bce", 1.0, "and the triples of .* have no weights; allowed: false"),
    ("loss.confidences=true loss.name=bce", 2.0, r"training triple \d+ of .* has the weight 1.*\[0, 1\]"),
    ("loss.relation_weights.knowz=2", 1.0, "unknown relation 'knowz'; did you mean 'knows'"),
]


@pytest.mark.parametrize("case, scale, message", REFUSED)
def test_settings_that_do_not_fit_the_data_are_refused(
    case: str, scale: float, message: str, tmp_path: Path
) -> None:
    dataset = toy_dataset(typed=True) if scale == 1 else weighted_dataset(tmp_path / "data", scale)
    config = load_config(None, [f"dataset={dataset}", f"output={tmp_path / 'run'}", *case.split()])
    with pytest.raises(InputError, match=message), dglkge.join_cluster(config):
        pass
    assert not (tmp_path / "run").exists()


def test_softmax_over_all_negatives_is_one_vs_all(tmp_path: Path) -> None:
    tables = []
    for number, case in enumerate(("negatives.name=all_entities", "training.objective=one_vs_all")):
        settings = [f"dataset={toy_dataset(typed=True)}", f"output={tmp_path / str(number)}", case]
        settings += [f"model.dimension={DIM}", "model.init_scale=0.3", f"training.batch_size={BATCH}"]
        settings += ["regularizer.name=none"]
        settings += ["training.matmul_dtype=float32"]
        with opened(load_config(None, settings)) as trainer:
            losses = torch.tensor(train(trainer, 2))
            tables.append({**rows_by_node(trainer), "losses": losses})
    for name, rows in tables[0].items():
        np.testing.assert_allclose(tables[1][name], rows, rtol=1e-3, atol=1e-4, err_msg=name)


def test_masked_negatives_occur_in_the_toy_data() -> None:
    """Otherwise the cases above would not show that they are masked."""
    data = Dataset.open(toy_dataset(typed=True))
    triples = data.split("train")
    pairs, counts = np.unique(triples[:, 1:], axis=0, return_counts=True)
    assert counts.max() > 2 and len(pairs) > 20
