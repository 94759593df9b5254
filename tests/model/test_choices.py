"""Optimizers and negative samplers that a configuration chooses by name: the classes, their facts."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dglkge import optim
from dglkge.model.choices import NEGATIVE_SAMPLERS, OBJECTIVES, OPTIMIZERS, state_widths
from dglkge.sampling.negatives import AllNegatives, MixedNegatives


@pytest.mark.parametrize(
    ("name", "rule", "widths"),
    [
        ("sparse_adagrad", optim.Adagrad, (7,)),
        ("row_adagrad", optim.RowWiseAdagrad, (1,)),
        ("sparse_adam", optim.Adam, (1, 7, 7)),
    ],
)
def test_optimizers(name, rule, widths):
    assert OPTIMIZERS.get(name) is rule
    assert state_widths(name, 7) == widths


def test_all_rules_are_registered():
    exported = [getattr(optim, name) for name in optim.__all__]
    rules = [each for each in exported if issubclass(each, optim.UpdateRule) and each is not optim.UpdateRule]
    assert {rule for _, rule in OPTIMIZERS.items()} == set(rules)


def test_facts_of_optimizers_need_neither_torch_nor_dgl():
    """The launcher and ``dglkge plan`` read them."""
    program = "import sys; from dglkge.model.choices import state_widths; state_widths('sparse_adam', 7); "
    program += "print(*{'torch', 'dgl', 'numba'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr


def test_negative_samplers():
    assert [NEGATIVE_SAMPLERS.get(name).load() for name in NEGATIVE_SAMPLERS] == [
        AllNegatives,
        MixedNegatives,
    ]
    assert list(NEGATIVE_SAMPLERS) == ["all_entities", "mixed"]


def test_labels_are_smoothed_where_there_are_labels_of_all_candidates() -> None:
    options = {name: list(OBJECTIVES.get(name).Settings.model_fields) for name in OBJECTIVES}
    assert options == {
        "negative_sampling": ["name"],
        "one_vs_all": ["name", "label_smoothing"],
        "k_vs_all": ["name", "label_smoothing"],
    }


def test_all_entities_is_a_sampler_without_counts():
    choice = NEGATIVE_SAMPLERS.get("all_entities")
    settings = choice.Settings(name="all_entities", num_for_heads=0)
    assert choice.load() is AllNegatives and settings.takes_all
    assert [bool(count) for count in settings.per_side.values()] == [False, True]
    assert "degree_power" not in choice.Settings.model_fields
