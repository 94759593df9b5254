"""Optimizers and negative samplers that a configuration chooses by name: the classes, their facts."""

from __future__ import annotations

import pytest

from dglkge import optim
from dglkge.model.choices import NEGATIVE_SAMPLERS, OPTIMIZERS
from dglkge.sampling.negatives import MixedNegatives


@pytest.mark.parametrize(
    ("name", "wanted", "widths", "bigraph_state"),
    [
        ("sparse_adagrad", optim.SparseAdagrad, (7,), True),
        ("row_adagrad", optim.RowAdagrad, (1,), True),
        ("sparse_adam", optim.SparseAdam, (1, 7, 7), False),
    ],
)
def test_optimizers(name, wanted, widths, bigraph_state):
    choice = OPTIMIZERS.get(name)
    assert choice.load() is wanted
    assert (choice.state_widths(7), choice.bigraph_state) == (widths, bigraph_state)


def test_all_optimizers_are_registered():
    found = {OPTIMIZERS.get(name).load().__name__ for name in OPTIMIZERS}
    assert found == set(optim.__all__) - {"NarrowEmbedding"}


def test_negative_samplers():
    assert [NEGATIVE_SAMPLERS.get(name).load() for name in NEGATIVE_SAMPLERS] == [MixedNegatives]
    assert list(NEGATIVE_SAMPLERS) == ["mixed"]
