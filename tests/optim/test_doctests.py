"""The examples in the docstrings of dglkge.optim run."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from typing import Any

import dglkge.optim
from dglkge.kernels import rules


def test_examples(standalone_graph: Any) -> None:
    """In DGL's standalone mode, as the examples say."""
    for module in pkgutil.iter_modules(dglkge.optim.__path__, "dglkge.optim."):
        assert doctest.testmod(importlib.import_module(module.name)).failed == 0, module.name


def test_every_optimizer_has_a_formula_and_every_rule_an_example() -> None:
    """Public optimizers, of which the first shows how all are used, and the update rules behind them."""
    names = ("NarrowEmbedding", "RowAdagrad", "SparseAdagrad", "SparseAdam")
    documented = [getattr(dglkge.optim, name) for name in names]
    for item in [dglkge.optim.SparseAdagrad, rules.adagrad, rules.row_adagrad, rules.adam]:
        assert ">>> " in item.__doc__
    for item in [*documented, rules.adagrad, rules.row_adagrad, rules.adam]:
        assert ".. math::" in item.__doc__ or ":math:" in item.__doc__
