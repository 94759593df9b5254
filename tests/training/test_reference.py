"""``training.kernels: reference`` trains the tables of auto, for every score function, loss and optimizer.

The reference is autograd over the definitions, sums of duplicate rows and update rules in plain torch; auto
is compiled loops and gradients written by hand. Other tests check by hand what both share.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dglkge.config import load_config
from dglkge.model.choices import OPTIMIZERS
from dglkge.model.losses import LOSSES
from dglkge.step.objectives.autograd_loss import AutogradLoss
from dglkge.step.objectives.dot_softmax import DotSoftmax
from tests.optim.test_new_rule import MomentumRule
from tests.toy_kg import toy_dataset
from tests.training.live import opened, rows_by_node, train

# Score functions by their own tests, everything by draws in test_training_net.py: here one of each kind.
CASES = [
    *(f"model.score_function={name} loss.name=softmax"
      for name in ("keci", "quate", "transe_l1", "transe_l2", "rotate", "rescal", "transr", "pairre", "conve",
                   "conex", "tucker", "transformer")),
    *(f"loss.name={name}" for name in LOSSES if name != "softmax"),
    "regularizer.name=dura regularizer.weight=0.1",
    "loss.adversarial_weights=true",
    "loss.name=margin_ranking loss.reduction=sum",
    "negatives.mask_known=true",
    "negatives.num_for_heads=5 negatives.degree_power=0.75",
    "negatives.in_batch_share=0.5 negatives.global_share=0.5",
]  # fmt: skip


@pytest.fixture
def momentum(monkeypatch: pytest.MonkeyPatch) -> str:
    """Settings of SGD with momentum, which is linear: Adagrad turns gradients of rounding noise into steps.

    Of the Manhattan distance, e.g., gradients are sums of weights that cancel to 0 but for rounding.
    """
    monkeypatch.setitem(OPTIMIZERS._members, "momentum", MomentumRule)
    return "optimizer.name=momentum"


def trained(folder: Path, kernels: str, *more: str) -> tuple[list[float], dict[str, np.ndarray], object]:
    """Train an epoch; return the losses of its batches, the tables and the loss of groups."""
    settings = [
        *(f"dataset={toy_dataset(typed=True)}", f"output={folder / kernels}", "training.num_epochs=1"),
        *("model.dimension=8", "model.init_scale=0.3", "training.batch_size=20", "optimizer.lr=0.05"),
        *([] if "negatives.name=all_entities" in more else ["negatives.num_uniform=12"]),
        *("negatives.chunk_size=20", "training.matmul_dtype=float32"),
        *("checkpoint.every_epochs=0", "evaluation.max_triples=3", f"training.kernels={kernels}", *more),
    ]
    with opened(load_config(None, settings)) as trainer:
        losses = train(trainer, 1)
        tables = {name: rows.numpy() for name, rows in rows_by_node(trainer).items()}
        mrr = trainer.evaluate("test").both.mrr
        of_groups = trainer._train_step.objective
    return [*losses, mrr], tables, of_groups


@pytest.mark.parametrize("case", CASES)
def test_reference_and_auto_agree(case: str, tmp_path: Path, momentum: str) -> None:
    assert_agreement(tmp_path, f"{case} {momentum}")


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_reference_and_auto_agree_for_every_optimizer(name: str, tmp_path: Path) -> None:
    assert_agreement(tmp_path, f"optimizer.name={name}")


def assert_agreement(folder: Path, case: str) -> None:
    """Train both ways and compare losses, MRR and tables."""
    losses, tables, _ = trained(folder, "auto", *case.split())
    plain_losses, plain_tables, of_groups = trained(folder, "reference", *case.split())
    assert len(losses) > 5 and isinstance(of_groups, AutogradLoss)
    np.testing.assert_allclose(losses, plain_losses, rtol=1e-4)
    assert tables.keys() == plain_tables.keys()
    for name, rows in tables.items():
        np.testing.assert_allclose(rows, plain_tables[name], rtol=1e-3, atol=1e-4, err_msg=name)


def test_auto_takes_the_compiled_step(tmp_path: Path) -> None:
    assert isinstance(trained(tmp_path, "auto")[2], DotSoftmax)
