"""``training.kernels: reference`` trains the tables of auto, for every score function, loss and optimizer.

The reference is autograd and plain torch; auto is compiled loops and gradients written by hand.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from dglkge.model.choices import OPTIMIZERS
from dglkge.model.losses import LOSSES
from dglkge.step.objectives.dot_softmax import DotSoftmax
from dglkge.step.objectives.scored_losses import AutogradLoss
from tests.optim.test_new_rule import MomentumRule
from tests.training.live import assert_same, trained

# Score functions by their own tests, everything by draws in test_training_net.py: here one of each kind.
SCORE_FUNCTIONS = ("keci", "quate", "transe_l1", "transe_l2", "rotate", "rescal", "transr", "pairre", "conve",
                   "conex", "tucker", "transformer")  # fmt: skip
CASES = [
    *(f"model.score_function={name} loss.name=softmax" for name in SCORE_FUNCTIONS),
    *(f"loss.name={name}" for name in LOSSES if name != "softmax"),
    "regularizer.name=dura regularizer.weight=0.1",
    "loss.adversarial_weights=true",
    "loss.name=margin_ranking loss.reduction=sum",
    "negatives.mask_known=true",
    "negatives.num_for_heads=5 negatives.degree_power=0.75",
    "negatives.in_batch_share=0.5 negatives.global_share=0.5",
    "training.objective=k_vs_all model.score_function=tucker dense.optimizer=SGD",
]


@pytest.fixture
def momentum(monkeypatch: pytest.MonkeyPatch) -> str:
    """Settings of SGD with momentum, which is linear: Adagrad turns gradients of rounding noise into steps.

    Of the Manhattan distance, e.g., gradients are sums of weights that cancel to 0 but for rounding.
    """
    monkeypatch.setitem(OPTIMIZERS._members, "momentum", MomentumRule)
    return "optimizer.name=momentum"


@pytest.mark.parametrize("case", CASES)
def test_reference_and_auto_agree(case: str, tmp_path: Path, momentum: str) -> None:
    assert_agreement(tmp_path, f"{case} {momentum}")


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_reference_and_auto_agree_for_every_optimizer(name: str, tmp_path: Path) -> None:
    plain, auto = assert_agreement(tmp_path, f"optimizer.name={name}")
    assert isinstance(plain, AutogradLoss) and isinstance(auto, DotSoftmax)


def assert_agreement(folder: Path, case: str) -> tuple[object, object]:
    """Train both ways and compare losses, MRR and tables; return the objectives."""
    plain = trained(folder, "reference", *case.split())
    auto = trained(folder, "auto", *case.split())
    assert_same(auto, plain, 1e-3, 1e-4, loss_rtol=1e-4)
    return plain[2], auto[2]
