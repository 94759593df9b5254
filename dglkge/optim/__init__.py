"""Distributed sparse optimizers for ``dgl.distributed.DistEmbedding``; needs torch, dgl, numpy, numba
and ``dglkge.kernels`` only.

Change ``from dgl.distributed.optim import SparseAdagrad, SparseAdam`` to
``from dglkge.optim import SparseAdagrad, SparseAdam``: the same constructors and methods.
"""

from __future__ import annotations

from dglkge.optim.narrow_rows import NarrowEmbedding
from dglkge.optim.optimizers import RowAdagrad, SparseAdagrad, SparseAdam

__all__ = ["NarrowEmbedding", "RowAdagrad", "SparseAdagrad", "SparseAdam"]
