"""Distributed sparse optimizers for ``dgl.distributed.DistEmbedding``; needs torch, dgl, numpy, numba
and ``dglkge.kernels`` only.

Change ``from dgl.distributed.optim import SparseAdagrad, SparseAdam`` to
``from dglkge.optim import SparseAdagrad, SparseAdam``: the same constructors and methods. An optimizer of
your own is ``SparseOptimizer`` with a subclass of ``UpdateRule``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dglkge.optim.rules import Adagrad, Adam, RowWiseAdagrad, UpdateRule

if TYPE_CHECKING:
    from dglkge.optim.narrow_rows import NarrowEmbedding
    from dglkge.optim.optimizers import RowAdagrad, SparseAdagrad, SparseAdam
    from dglkge.optim.sparse_optimizer import SparseOptimizer

__all__ = [
    "Adagrad",
    "Adam",
    "NarrowEmbedding",
    "RowAdagrad",
    "RowWiseAdagrad",
    "SparseAdagrad",
    "SparseAdam",
    "SparseOptimizer",
    "UpdateRule",
]

_MODULES = {"NarrowEmbedding": "narrow_rows", "SparseOptimizer": "sparse_optimizer"}


def __getattr__(name: str) -> Any:
    """Import an optimizer when it is used: planning reads the rules without torch and DGL."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'optimizers')}"), name)
