"""SparseAdagrad, RowAdagrad and SparseAdam: the state of each, and the loop that updates its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from dglkge.kernels.updates import update_adagrad, update_adam, update_row_adagrad
from dglkge.optim import table as row_storage
from dglkge.optim.sparse_optimizer import SparseOptimizer


class SparseAdagrad(SparseOptimizer):
    r"""Adagrad on the rows of :class:`dgl.distributed.DistEmbedding` tables.

    .. math:: G \leftarrow G + g^2, \qquad w \leftarrow w - \eta\, g / (\sqrt{G} + \epsilon)

    for every touched row; the same results as ``torch.optim.Adagrad`` on a dense parameter. Formula:
    :func:`dglkge.kernels.rules.adagrad`. Drop-in for ``dgl.distributed.optim.SparseAdagrad``.

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


class RowAdagrad(SparseOptimizer):
    r"""Adagrad with one float of state a row, for :class:`dgl.distributed.DistEmbedding` tables.

    .. math:: G \leftarrow G + \frac{1}{D} \sum_j g_j^2, \qquad w \leftarrow w - \eta\, g / (\sqrt{G} +
    \epsilon)

    for every touched row, as PyTorch-BigGraph and DGL-KE do.
    Formula: :func:`dglkge.kernels.rules.row_adagrad`.

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
    ...     _ = dgl.distributed.partition_graph(dgl.rand_graph(6, 9), "doc_rows", 1, folder.name)
    ...     dgl.distributed.initialize("unused")
    >>> graph = dgl.distributed.DistGraph("doc_rows", part_config=f"{folder.name}/doc_rows.json")
    >>> policy = graph.get_node_partition_policy("_N")
    >>> table = dgl.distributed.DistEmbedding(6, 2, "doc_rows_table", part_policy=policy)
    >>> optimizer = RowAdagrad([table], lr=0.5)
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
        return {"sum": ()}

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
        return update_row_adagrad(
            rows,
            total.reshape(-1, 1),
            targets,
            selected,
            chain,
            options,
            kind(hyper["lr"]),
            kind(hyper["eps"]),
        )


class SparseAdam(SparseOptimizer):
    r"""Adam on the rows of :class:`dgl.distributed.DistEmbedding` tables; only touched rows and their state
    move.

    .. math::
        m \leftarrow \beta_1 m + (1-\beta_1) g, \qquad v \leftarrow \beta_2 v + (1-\beta_2) g^2, \qquad
        w \leftarrow w - \frac{\eta}{1-\beta_1^t}\, \frac{m}{\sqrt{v/(1-\beta_2^t)} + \epsilon}

    Formula: :func:`dglkge.kernels.rules.adam`. Drop-in for ``dgl.distributed.optim.SparseAdam``.

    Parameters
    ----------
    params : DistEmbedding, sequence of DistEmbedding, or sequence of dict
        The embeddings, or parameter groups.
    lr : float
        Learning rate.
    betas : (float, float)
        Decay of the first and second moment.
    eps : float
        Added to the root.
    bias_correction : {"row", "global"}
        What t counts: the updates of the row (DGL's rule), or the steps in which any trainer had a gradient
        for the table; the latter gives the results of ``torch.optim.SparseAdam``, whose epsilon is not
        corrected for bias.
    row_wise : bool
        Keep one second moment a row, fed by the mean of the squares.
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
    ...     _ = dgl.distributed.partition_graph(dgl.rand_graph(6, 9), "doc_adam", 1, folder.name)
    ...     dgl.distributed.initialize("unused")
    >>> graph = dgl.distributed.DistGraph("doc_adam", part_config=f"{folder.name}/doc_adam.json")
    >>> policy = graph.get_node_partition_policy("_N")
    >>> table = dgl.distributed.DistEmbedding(6, 2, "doc_adam_table", part_policy=policy)
    >>> optimizer = SparseAdam([table], lr=0.5, eps=0.0)
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
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        *,
        bias_correction: str = "row",
        row_wise: bool = False,
        weight_decay: float = 0.0,
        max_row_norm: float | None = None,
        duplicates: str = "sum",
        wire_dtype: torch.dtype | None = None,
        overlap: bool = False,
        nonfinite: str = "raise",
        timeout_seconds: float = 1800.0,
        synchronous: bool = True,
    ) -> None:
        if bias_correction not in ("row", "global"):
            raise ValueError(f"bias_correction must be 'row' or 'global', got {bias_correction!r}")
        self._global_steps = bias_correction == "global"
        self._row_wise = row_wise
        defaults = {
            "lr": lr,
            "eps": eps,
            "betas": tuple(betas),
            "weight_decay": weight_decay,
            "max_row_norm": max_row_norm,
        }
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
        return {"step": (), "mem": (dim,), "power": () if self._row_wise else (dim,)}

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
        rows, step, mem, power = arrays
        beta1, beta2 = hyper["betas"]
        return update_adam(
            rows,
            step,
            mem,
            power.reshape(len(power), -1),
            targets,
            selected,
            chain,
            options,
            float(hyper["lr"]),
            float(hyper["eps"]),
            (float(beta1), float(beta2)),
            num_steps if self._global_steps else 0,
        )

    def recover_num_steps(self) -> None:
        """After the state tensors were written directly: take the steps so far from them (a collective call).

        Only ``bias_correction="global"`` needs it; ``step`` then holds the step of each row's last update.
        """
        self.finish()
        for table in self._tables:
            steps = row_storage.state_array(table.state["step"])
            table.num_steps = int(max(self._group.gather(float(steps.max(initial=0.0)))))
