"""SparseAdagrad, RowAdagrad and SparseAdam: :class:`SparseOptimizer` under DGL's and torch's names."""

from __future__ import annotations

from typing import Any

from dglkge.optim.rules import Adagrad, Adam, RowWiseAdagrad
from dglkge.optim.sparse_optimizer import SparseOptimizer


class SparseAdagrad(SparseOptimizer):
    r"""Adagrad on the rows of :class:`dgl.distributed.DistEmbedding` tables.

    .. math:: G \leftarrow G + g^2, \qquad w \leftarrow w - \eta\, g / (\sqrt{G} + \epsilon)

    for every touched row; the same results as ``torch.optim.Adagrad`` on a dense parameter. Formula:
    :func:`dglkge.kernels.rules.adagrad`. Drop-in for ``dgl.distributed.optim.SparseAdagrad``; what differs is
    in docs/optimizers.md.

    Parameters
    ----------
    params : DistEmbedding, sequence of DistEmbedding, or sequence of dict
        The embeddings, or parameter groups.
    lr : float
        Learning rate.
    eps : float
        Added to the root.
    eps_inside_root : bool
        Add epsilon to the sum instead: :math:`\sqrt{G + \epsilon}`, as ``dgl.optim.SparseAdagrad`` does.
    **options
        See :class:`SparseOptimizer`.

    Examples
    --------
    One process in DGL's standalone mode; in a cluster every trainer runs the same lines.

    >>> import contextlib, io, tempfile, dgl, torch
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

    _rule_class: type[Adagrad] = Adagrad

    def __init__(
        self, params: Any, lr: float, eps: float = 1e-10, *, eps_inside_root: bool = False, **options: Any
    ) -> None:
        super().__init__(params, self._rule_class(eps, eps_inside_root), lr, **options)


class RowAdagrad(SparseAdagrad):
    r"""Adagrad with one float of state a row, for :class:`dgl.distributed.DistEmbedding` tables.

    .. math:: G \leftarrow G + \frac{1}{D} \sum_j g_j^2, \qquad w \leftarrow w - \eta\, g / (\sqrt{G} +
    \epsilon)

    for every touched row, as PyTorch-BigGraph and DGL-KE do.
    Formula: :func:`dglkge.kernels.rules.row_adagrad`. Parameters are those of :class:`SparseAdagrad`.
    """

    _rule_class = RowWiseAdagrad


class SparseAdam(SparseOptimizer):
    r"""Adam on the rows of :class:`dgl.distributed.DistEmbedding` tables; updates touched rows and their
    state only.

    .. math::
        m \leftarrow \beta_1 m + (1-\beta_1) g, \qquad v \leftarrow \beta_2 v + (1-\beta_2) g^2, \qquad
        w \leftarrow w - \frac{\eta}{1-\beta_1^t}\, \frac{m}{\sqrt{v/(1-\beta_2^t)} + \epsilon}

    Formula: :func:`dglkge.kernels.rules.adam`. Drop-in for ``dgl.distributed.optim.SparseAdam``.

    Parameters
    ----------
    params, lr, **options
        As for :class:`SparseAdagrad`.
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
        **options: Any,
    ) -> None:
        super().__init__(params, Adam((betas[0], betas[1]), eps, bias_correction, row_wise), lr, **options)
