"""The examples in the docstrings of dglkge.optim run."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from typing import Any

import pytest

import dglkge.optim

MODULES = sorted(module.name for module in pkgutil.iter_modules(dglkge.optim.__path__, "dglkge.optim."))


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str, standalone_graph: Any) -> None:
    """In DGL's standalone mode, as the examples say."""
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_every_optimizer_and_rule_has_an_example() -> None:
    """Public optimizers, and the update rules behind them."""
    from dglkge.kernels.rules import adagrad, adam, row_adagrad

    names = ("NarrowEmbedding", "RowAdagrad", "SparseAdagrad", "SparseAdam")
    documented = [getattr(dglkge.optim, name) for name in names] + [adagrad, row_adagrad, adam]
    for each in documented:
        assert ">>> " in each.__doc__
        assert ".. math::" in each.__doc__ or ":math:" in each.__doc__
