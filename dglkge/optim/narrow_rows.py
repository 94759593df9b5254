"""Embeddings whose rows are bfloat16 or float16 in memory; gradients, updates and state are float32.

DGL's servers know no bfloat16, so such rows are tensors of int16 words, and their meaning is
known here alone. Rows that are read are widened, exactly; an update widens the row, applies the rule in
float32 and rounds the result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from dgl.distributed import DistEmbedding, DistTensor
from numpy import ndarray
from torch import Tensor

from dglkge.kernels.hashing import combine, stream_key
from dglkge.kernels.rows import round_rows, round_rows_plain, widen_rows
from dglkge.optim.dgl_tables import adopt_tensor, as_array, record_read
from dglkge.optim.workspace import Scratch

if TYPE_CHECKING:
    from dglkge.optim.links import RuleStep
    from dglkge.optim.row_chains import GradientRows

NARROW_DTYPES = (torch.bfloat16, torch.float16)
STOCHASTIC, NEAREST = ROUNDINGS = ("stochastic", "nearest")


def is_narrow(rows: Tensor) -> bool:
    """Return whether rows are of 16-bit numbers."""
    return rows.dtype in NARROW_DTYPES


def widen(rows: Tensor, places: ndarray, out: Tensor | None = None, kernels: str = "auto") -> Tensor:
    """Return rows (N, D) at some places as float32, in ``out`` if given; rows of other types are copied as
    they are.

    ``kernels`` "auto": by a compiled loop, "reference": by torch. An IndexError if there is no row at one of
    the places.
    """
    if not is_narrow(rows) or kernels == "reference":
        index = torch.from_numpy(places)
        if not is_narrow(rows):
            return torch.index_select(rows, 0, index, out=out)
        narrow = torch.index_select(rows, 0, index)
        return narrow.float() if out is None else out.copy_(narrow)
    # The compiled loop reads at these places without a check of bounds.
    if len(places) and not 0 <= int(places.min()) <= int(places.max()) < len(rows):
        raise IndexError(f"rows {int(places.min())} to {int(places.max())}, expected 0 to {len(rows) - 1}")
    widened = torch.empty(len(places), rows.shape[1]) if out is None else out
    words = as_array(rows.detach().view(torch.int16))
    widen_rows(words, places, rows.dtype == torch.float16, widened.numpy())
    return widened


class NarrowEmbedding(DistEmbedding):
    r"""A ``DistEmbedding`` of 16-bit rows, for the optimizers of this package.

    An update is computed in float32 and rounded. With :math:`x_1 \le x < x_2` the neighbours of a number,

    .. math:: P(x_2) = \frac{x - x_1}{x_2 - x_1}, \qquad P(x_1) = 1 - P(x_2)

    ``weight`` holds int16 words. Rows are read by calling the embedding, as ever, and are float32 then:
    widened exactly. They start as zeros; :meth:`write` sets them.

    Parameters
    ----------
    num_embeddings, embedding_dim : int
        Number of rows, and their width.
    name : str
        Name in the kvstore.
    part_policy : dgl.distributed.PartitionPolicy
        As of ``DistEmbedding``.
    dtype : torch.dtype
        ``torch.bfloat16``, or ``torch.float16``, which becomes infinite beyond 65504.
    rounding : {"stochastic", "nearest"}
        Rounding of updated rows. "stochastic": up or down at random, so that the mean is the exact number;
        the random bits are a function of seed, name, step, id of the row and column, so runs can be repeated,
        with any number of trainers. "nearest" loses every step that is smaller than half the distance of two
        numbers.
    seed : int
        Of the random bits.
    row_ids : ndarray, optional
        "(num_embeddings,) int64" the id of each row that its random bits depend on, where they should be the
        same in another partitioning of the graph. Default: the row's own.

    Raises
    ------
    ValueError
        For another dtype or rounding.

    Examples
    --------
    One process in DGL's standalone mode; in a cluster every trainer runs the same lines.

    >>> import contextlib, io, tempfile, dgl
    >>> from dglkge.optim import SparseAdagrad
    >>> folder = tempfile.TemporaryDirectory()
    >>> with contextlib.redirect_stdout(io.StringIO()):
    ...     _ = dgl.distributed.partition_graph(dgl.rand_graph(6, 9), "doc_narrow", 1, folder.name)
    ...     dgl.distributed.initialize("unused")
    >>> graph = dgl.distributed.DistGraph("doc_narrow", part_config=f"{folder.name}/doc_narrow.json")
    >>> policy = graph.get_node_partition_policy("_N")
    >>> table = NarrowEmbedding(6, 2, "doc_narrow_table", policy)
    >>> optimizer = SparseAdagrad([table], lr=0.5)
    >>> table(torch.tensor([1, 1])).sum().backward()
    >>> optimizer.step()
    >>> table.read(torch.tensor([0, 1])).tolist()
    [[0.0, 0.0], [-0.5, -0.5]]
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        name: str,
        part_policy: Any,
        *,
        dtype: torch.dtype = torch.bfloat16,
        rounding: str = STOCHASTIC,
        seed: int = 0,
        row_ids: ndarray | None = None,
    ) -> None:
        if dtype not in NARROW_DTYPES:
            raise ValueError(f"dtype must be torch.bfloat16 or torch.float16, got {dtype}")
        if rounding not in ROUNDINGS:
            raise ValueError(f"rounding must be 'stochastic' or 'nearest', got {rounding!r}")
        # Not DistEmbedding's constructor: it makes a tensor of float32. DGL stores and sends int16.
        shape = num_embeddings, embedding_dim
        adopt_tensor(self, DistTensor(shape, torch.int16, name, part_policy=part_policy), part_policy)
        self.row_dtype = dtype
        self.rounding = rounding
        self._row_ids = row_ids
        self._key = int(stream_key(seed, "rounding", name)[0])

    def __call__(self, idx: Tensor, device: torch.device | str = "cpu") -> Tensor:
        """Return rows (n, D) as float32; their gradients go to the optimizer."""
        ids = torch.as_tensor(idx)
        return record_read(self, ids, self.read(ids).to(device, non_blocking=True))

    def read(self, ids: Tensor) -> Tensor:
        """Return rows (n, D) as float32, without a gradient."""
        return self.typed(self.weight[ids]).float()

    def write(self, ids: Tensor, rows: Tensor) -> None:
        """Set rows (n, D), rounded to the nearest."""
        self.weight[ids] = rows.to(self.row_dtype).contiguous().view(torch.int16)

    def typed(self, words: Tensor) -> Tensor:
        """View words as what they mean, in the same memory."""
        return words.view(self.row_dtype)

    def round_into(
        self, rows: ndarray, words: ndarray, places: ndarray, ids: ndarray, step: int, kernels: str
    ) -> None:
        """Round updated rows (n, D) float32 and write them to some distinct places of words (N, D) uint16.

        The random bits depend on the ids "(n,) int64" of the rows and on the number of the step.
        """
        is_half = self.row_dtype == torch.float16
        if self.rounding == NEAREST:
            rounded = torch.from_numpy(rows).to(self.row_dtype)
            words[places] = rounded.view(torch.int16).numpy().view(np.uint16)
            return
        keyed = ids if self._row_ids is None else self._row_ids[ids]
        key = combine(self._key, step)
        if kernels == "reference":
            round_rows_plain(rows, words, places, keyed, key, is_half)
        else:
            # Typed: numba would take a number below 2**63 for int64, and compile a second loop for it.
            round_rows(rows, words, places, keyed, np.uint64(key), is_half)


class NarrowUpdate:
    """Update of 16-bit rows by any rule: blocks of rows and state are copied, updated and written back.

    A block stays in the processor's cache between its passes. Plain twins take all rows at once.
    """

    #: Numbers of the rows of a block: with Adagrad's state 1 MiB in float32.
    NUMBERS_A_BLOCK = 1 << 17

    def __init__(self, embedding: NarrowEmbedding, kernels: str) -> None:
        self._embedding, self._kernels = embedding, kernels
        self._scratch = Scratch()

    def apply(
        self, gradients: GradientRows, step: RuleStep, arrays: Sequence[ndarray], rows: tuple[ndarray, ...]
    ) -> int:
        """Update words "(N, D)" and state "(N, ...)"; returns how many rows were skipped as not finite.

        ``rows`` are the places of the rows, their positions among the keys of the gradients, and their ids.
        """
        size = max(1, self.NUMBERS_A_BLOCK // self._embedding.embedding_dim)
        if self._kernels == "reference":
            size = max(1, len(rows[0]))
        num_bad = 0
        for start in range(0, len(rows[0]), size):
            targets, selected, ids = (numbers[start : start + size] for numbers in rows)
            copies = self._copies(arrays, targets)
            num_bad += gradients.update(step, copies, np.arange(len(targets)), selected)
            # A skipped row has 16 bits already, so rounding leaves it as it was.
            self._embedding.round_into(copies[0], arrays[0], targets, ids, step.number, self._kernels)
            for array, updated in zip(arrays[1:], copies[1:]):
                array[targets] = updated
        return num_bad

    def _copies(self, arrays: Sequence[ndarray], places: ndarray) -> list[ndarray]:
        """Return copies of words, widened to float32, and of state at some places; valid until the next
        call.
        """
        words, *state = arrays
        rows = self._scratch.take("rows", len(places), words.shape[1])
        typed = self._embedding.typed(torch.from_numpy(words.view(np.int16)))
        copies = [widen(typed, places, rows, self._kernels).numpy()]
        for number, array in enumerate(state):
            copy = self._scratch.take(number, len(places), math.prod(array.shape[1:])).numpy()
            copy = copy.reshape(len(places), *array.shape[1:])
            # Places are in range; "raise" would copy once more.
            copies.append(np.take(array, places, axis=0, out=copy, mode="clip"))
        return copies
