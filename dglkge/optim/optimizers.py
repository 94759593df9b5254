"""SparseAdagrad, RowAdagrad and SparseAdam: each an update rule and the optimizer class that users call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dglkge.kernels.updates import decay_rows, update_adagrad, update_adam, update_row_adagrad
from dglkge.optim.dgl_tables import state_array
from dglkge.optim.rules import UpdateRule, check_not_negative
from dglkge.optim.sparse_optimizer import SparseOptimizer


@dataclass(frozen=True)
class AdagradRule(UpdateRule):
    """Adagrad: the sum of squared gradients of each number of a row."""

    def state_shapes(self, dim: int) -> dict[str, tuple[int, ...]]:
        """Sum of squared gradients of every number of a row."""
        return {"sum": (dim,)}

    def check(self, hyper: Mapping[str, Any]) -> None:
        """Check that lr and eps are finite numbers >= 0."""
        check_not_negative(hyper, "lr", "eps")
        super().check(hyper)

    def update_compiled(
        self,
        arrays: Sequence[np.ndarray],
        targets: np.ndarray,
        selected: np.ndarray,
        chain: tuple,
        options: tuple,
        hyper: Mapping[str, Any],
        num_steps: int,
    ) -> int:
        """Run the compiled loop; see :meth:`UpdateRule.update_compiled`."""
        rows, total = arrays
        kind = rows.dtype.type
        return update_adagrad(
            rows, total, targets, selected, chain, options, kind(hyper["lr"]), kind(hyper["eps"])
        )

    def update_rows(
        self,
        rows: torch.Tensor,
        state: Sequence[torch.Tensor],
        gradient: torch.Tensor,
        hyper: Mapping[str, Any],
        num_steps: int,
    ) -> None:
        """Compute the same in torch; see :meth:`UpdateRule.update_rows`."""
        (total,) = state
        total += gradient**2
        rows -= hyper["lr"] * gradient / (total.sqrt() + hyper["eps"])


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
        Multiple of the row that is added to its gradient; touched rows only.
    max_row_norm : float, optional
        Limit of the 2-norm of a row's merged gradient; longer ones are scaled to it.
    duplicates, wire_dtype, overlap, nonfinite, timeout_seconds, synchronous, kernels
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
        kernels: str = "auto",
    ) -> None:
        defaults = {"lr": lr, "eps": eps, "weight_decay": weight_decay, "max_row_norm": max_row_norm}
        super().__init__(
            params,
            AdagradRule(),
            defaults,
            duplicates=duplicates,
            wire_dtype=wire_dtype,
            overlap=overlap,
            nonfinite=nonfinite,
            timeout_seconds=timeout_seconds,
            synchronous=synchronous,
            kernels=kernels,
        )


@dataclass(frozen=True)
class RowAdagradRule(UpdateRule):
    """Adagrad with one number of state a row: the sum of the mean squared gradients."""

    def state_shapes(self, dim: int) -> dict[str, tuple[int, ...]]:
        """Sum of the mean squared gradients of a row: one number."""
        return {"sum": ()}

    def check(self, hyper: Mapping[str, Any]) -> None:
        """Check that lr and eps are finite numbers >= 0."""
        check_not_negative(hyper, "lr", "eps")
        super().check(hyper)

    def update_compiled(
        self,
        arrays: Sequence[np.ndarray],
        targets: np.ndarray,
        selected: np.ndarray,
        chain: tuple,
        options: tuple,
        hyper: Mapping[str, Any],
        num_steps: int,
    ) -> int:
        """Run the compiled loop; see :meth:`UpdateRule.update_compiled`."""
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

    def update_rows(
        self,
        rows: torch.Tensor,
        state: Sequence[torch.Tensor],
        gradient: torch.Tensor,
        hyper: Mapping[str, Any],
        num_steps: int,
    ) -> None:
        """Compute the same in torch; see :meth:`UpdateRule.update_rows`."""
        (total,) = state
        total += (gradient**2).mean(dim=1)
        rows -= hyper["lr"] * gradient / (total.sqrt() + hyper["eps"])[:, None]


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
        Multiple of the row that is added to its gradient; touched rows only.
    max_row_norm : float, optional
        Limit of the 2-norm of a row's merged gradient; longer ones are scaled to it.
    duplicates, wire_dtype, overlap, nonfinite, timeout_seconds, synchronous, kernels
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
        kernels: str = "auto",
    ) -> None:
        defaults = {"lr": lr, "eps": eps, "weight_decay": weight_decay, "max_row_norm": max_row_norm}
        super().__init__(
            params,
            RowAdagradRule(),
            defaults,
            duplicates=duplicates,
            wire_dtype=wire_dtype,
            overlap=overlap,
            nonfinite=nonfinite,
            timeout_seconds=timeout_seconds,
            synchronous=synchronous,
            kernels=kernels,
        )


@dataclass(frozen=True)
class AdamRule(UpdateRule):
    """Adam on touched rows only: first and second moment, and the step of the row's last update.

    Attributes
    ----------
    global_steps : bool
        Correct bias by the number of steps of the table instead of the updates of the row.
    row_wise : bool
        One second moment a row, fed by the mean of the squares.
    """

    global_steps: bool = False
    row_wise: bool = False

    def state_shapes(self, dim: int) -> dict[str, tuple[int, ...]]:
        """Step of the last update and both moments of a row."""
        return {"step": (), "mem": (dim,), "power": () if self.row_wise else (dim,)}

    def check(self, hyper: Mapping[str, Any]) -> None:
        """Check lr, eps and that both betas are in [0, 1)."""
        check_not_negative(hyper, "lr", "eps")
        super().check(hyper)
        betas = hyper["betas"]
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be two numbers in [0, 1), got {betas}")

    def decays_alone(self, hyper: Mapping[str, Any]) -> bool:
        """Whether the decay is decoupled; see :meth:`UpdateRule.decays_alone`."""
        return bool(hyper.get("decoupled_weight_decay", False))

    def update_compiled(
        self,
        arrays: Sequence[np.ndarray],
        targets: np.ndarray,
        selected: np.ndarray,
        chain: tuple,
        options: tuple,
        hyper: Mapping[str, Any],
        num_steps: int,
    ) -> int:
        """Run the compiled loop; see :meth:`UpdateRule.update_compiled`."""
        rows, step, mem, power = arrays
        beta1, beta2 = hyper["betas"]
        keep = _kept_share(hyper)
        if keep != 1:
            # A loop of its own: the update's loop stays as fast, and as exact, without a decay.
            decay_rows(rows, targets, selected, chain, options, rows.dtype.type(keep))
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
            num_steps if self.global_steps else 0,
        )

    def update_rows(
        self,
        rows: torch.Tensor,
        state: Sequence[torch.Tensor],
        gradient: torch.Tensor,
        hyper: Mapping[str, Any],
        num_steps: int,
    ) -> None:
        """Compute the same in torch; see :meth:`UpdateRule.update_rows`."""
        step, mem, power = state
        beta1, beta2 = hyper["betas"]
        rows *= _kept_share(hyper)
        if self.global_steps:
            step.fill_(num_steps)
        else:
            step += 1
        # Powers of the betas are close to 1 for the first steps: differences from 1 need double precision.
        time = step.double()
        step_size = (hyper["lr"] / (1 - beta1**time)).to(rows.dtype)
        root_scale = (1 / (1 - beta2**time).sqrt()).to(rows.dtype)
        eps = hyper["eps"] * root_scale if self.global_steps else torch.full_like(root_scale, hyper["eps"])
        square = (gradient**2).mean(dim=1) if self.row_wise else gradient**2
        # As in the compiled loop: in float32, 1 - 0.999 differs from 0.001 by 1e-5 of its value.
        narrow1, narrow2 = torch.tensor((beta1, beta2), dtype=rows.dtype)
        mem.mul_(narrow1).add_((1 - narrow1) * gradient)
        power.mul_(narrow2).add_((1 - narrow2) * square)
        root = power.sqrt()[:, None] if self.row_wise else power.sqrt()
        rows -= step_size[:, None] * mem / (root * root_scale[:, None] + eps[:, None])


def _kept_share(hyper: Mapping[str, Any]) -> float:
    """Factor on a row before its update: 1 - lr·weight_decay if the decay is decoupled, else 1."""
    if not hyper.get("decoupled_weight_decay", False):
        return 1.0
    return 1.0 - float(hyper["lr"]) * float(hyper["weight_decay"])


class SparseAdam(SparseOptimizer):
    r"""Adam on the rows of :class:`dgl.distributed.DistEmbedding` tables; updates touched rows and their
    state only.

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
        Meaning of t: "row" counts the updates of the row (DGL's rule); "global" counts the steps in which any
        trainer had a gradient for the table, and gives the results of ``torch.optim.SparseAdam``, which does
        not correct epsilon for bias.
    row_wise : bool
        Keep one second moment a row, fed by the mean of the squares.
    weight_decay : float
        Multiple of the row that is added to its gradient; touched rows only.
    decoupled_weight_decay : bool
        Multiply the row by 1 - lr·weight_decay before its update instead (AdamW; Loshchilov and Hutter,
        "Decoupled Weight Decay Regularization", ICLR 2019, algorithm 2, as ``torch.optim.AdamW`` has it);
        touched rows only.
    max_row_norm : float, optional
        Limit of the 2-norm of a row's merged gradient; longer ones are scaled to it.
    duplicates, wire_dtype, overlap, nonfinite, timeout_seconds, synchronous, kernels
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
        kernels: str = "auto",
        decoupled_weight_decay: bool = False,
    ) -> None:
        if bias_correction not in ("row", "global"):
            raise ValueError(f"bias_correction must be 'row' or 'global', got {bias_correction!r}")
        defaults = {
            "lr": lr,
            "eps": eps,
            "betas": tuple(betas),
            "weight_decay": weight_decay,
            "max_row_norm": max_row_norm,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        super().__init__(
            params,
            AdamRule(bias_correction == "global", row_wise),
            defaults,
            duplicates=duplicates,
            wire_dtype=wire_dtype,
            overlap=overlap,
            nonfinite=nonfinite,
            timeout_seconds=timeout_seconds,
            synchronous=synchronous,
            kernels=kernels,
        )

    def recover_num_steps(self) -> None:
        """Recover the number of steps from state tensors that were written directly; a collective call.

        Only ``bias_correction="global"`` needs it; ``step`` then holds the step of each row's last update.
        """
        self.finish()
        for table in self._tables:
            steps = state_array(table.state["step"])
            table.num_steps = int(max(self._group.gather(float(steps.max(initial=0.0)))))
