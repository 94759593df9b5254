"""Adagrad for distributed embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from dglkge.kernels.updates import update_adagrad
from dglkge.optim.sparse_optimizer import SparseOptimizer


class SparseAdagrad(SparseOptimizer):
    r"""Adagrad on the rows of :class:`dgl.distributed.DistEmbedding` tables.

    .. math:: G \leftarrow G + g^2, \qquad w \leftarrow w - \eta\, g / (\sqrt{G} + \epsilon)

    for every touched row; the same results as ``torch.optim.Adagrad`` on a dense parameter. Formula:
    :func:`update_rules.adagrad`. Drop-in for ``dgl.distributed.optim.SparseAdagrad``.

    Parameters
    ----------
    params : DistEmbedding, sequence of DistEmbedding, or sequence of dict
        The embeddings, or parameter groups.
    lr : float
        Learning rate.
    eps : float
        Added to the root.
    weight_decay : float
        Multiple of the row that is added to its gradient, for touched rows only.
    max_row_norm : float, optional
        Gradients of rows that are longer (in the 2-norm, after merging) are scaled to this length.
    duplicates, wire_dtype, overlap, nonfinite, timeout_seconds, synchronous
        See :class:`SparseOptimizer`.

    Examples
    --------
    One process in DGL's standalone mode; in a cluster every trainer runs the same lines.

    >>> import contextlib, io, tempfile, dgl
    >>> folder = tempfile.TemporaryDirectory()
    >>> with contextlib.redirect_stdout(io.StringIO()):
    ...     _ = dgl.distributed.partition_graph(dgl.rand_graph(6, 9), "doc_adagrad", 1, folder.name)
    ...     dgl.distributed.initialize("unused")
    >>> graph = dgl.distributed.DistGraph("doc_adagrad", part_config=f"{folder.name}/doc_adagrad.json")
    >>> policy = graph.get_node_partition_policy("_N")
    >>> table = dgl.distributed.DistEmbedding(6, 2, "doc_adagrad_table", part_policy=policy)
    >>> optimizer = SparseAdagrad([table], lr=0.5)
    >>> optimizer.zero_grad()
    >>> table(torch.tensor([1, 1])).sum().backward()
    >>> optimizer.step()
    >>> table.weight[torch.tensor([0, 1])].round(decimals=5).tolist()
    [[0.0, 0.0], [-0.5, -0.5]]
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        eps: float = 1e-10,
        *,
        weight_decay: float = 0.0,
        max_row_norm: float | None = None,
        duplicates: str = "sum",
        wire_dtype: torch.dtype | None = None,
        overlap: bool = False,
        nonfinite: str = "raise",
        timeout_seconds: float = 1800.0,
        synchronous: bool = True,
    ) -> None:
        defaults = {"lr": lr, "eps": eps, "weight_decay": weight_decay, "max_row_norm": max_row_norm}
        super().__init__(
            params,
            defaults,
            duplicates=duplicates,
            wire_dtype=wire_dtype,
            overlap=overlap,
            nonfinite=nonfinite,
            timeout_seconds=timeout_seconds,
            synchronous=synchronous,
        )

    def _state_shapes(self, dim: int) -> dict[str, tuple[int, ...]]:
        return {"sum": (dim,)}

    def _apply_rule(
        self,
        arrays: Sequence[np.ndarray],
        targets: np.ndarray,
        selected: np.ndarray,
        chain: tuple,
        options: tuple,
        hyper: Mapping[str, Any],
        num_steps: int,
    ) -> int:
        rows, total = arrays
        kind = rows.dtype.type
        return update_adagrad(
            rows, total, targets, selected, chain, options, kind(hyper["lr"]), kind(hyper["eps"])
        )
