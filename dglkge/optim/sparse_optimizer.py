"""Base of the distributed sparse optimizers: the step, its options and its votes."""

from __future__ import annotations

import abc
import gc
import logging
import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Callable

import numpy as np
import torch
from dgl.distributed import DistEmbedding, DistTensor

from dglkge.optim.alltoall import Alltoall
from dglkge.optim.hyper_parameters import check_group, check_options
from dglkge.optim.network_exchange import WireFormat
from dglkge.optim.scaled_gradients import EmbeddingParameter
from dglkge.optim.state_file import SavedState
from dglkge.optim.step_exchange import StepExchange, ignore_phase
from dglkge.optim.table import Background, Rule, Table, key_of

#: The optimizer of each embedding of this process, by its kvstore and the name of its tensor there. A process
#: that trains twice has two kvstores; an optimizer of the first one may still be referenced.
_OWNERS: weakref.WeakValueDictionary = weakref.WeakValueDictionary()


def claim(embeddings: Sequence[Any], optimizer: Any) -> None:
    """Make an optimizer that of some embeddings, for as long as it lives; all of them or none.

    Raises
    ------
    TypeError
        Something is no ``dgl.distributed.DistEmbedding``.
    ValueError
        An embedding has an optimizer already.
    """
    kind = type(optimizer).__name__
    for embedding in embeddings:
        if not isinstance(embedding, DistEmbedding):
            got = type(embedding).__name__
            raise TypeError(f"{kind} updates dgl.distributed.DistEmbedding only, got {got}")
    keys = [(id(embedding.kvstore), embedding.data_name) for embedding in embeddings]
    if any(key in _OWNERS for key in keys):
        gc.collect()  # an optimizer that nobody holds any more may still hang in a reference cycle
    for embedding, key in zip(embeddings, keys):
        if key in _OWNERS or keys.count(key) > 1:
            other = type(_OWNERS.get(key, optimizer)).__name__
            raise ValueError(
                f"embedding {embedding.name!r} has an optimizer already ({other}): "
                "two would overwrite each other's state"
            )
    for key in keys:
        _OWNERS[key] = optimizer


logger = logging.getLogger(__name__)


class StepSignals:
    """The part of an optimizer that talks.

    Attributes
    ----------
    num_skipped_rows : int
        Rows that were left alone, by any trainer, because their gradient was not finite.
    num_votes : int
        How many trainers gave their vote to the last finished step: the same number on each.
    """

    _tables: Sequence[Any]
    _raise_nonfinite: bool
    _enter: Callable[[str], None] = staticmethod(ignore_phase)
    num_votes = 0
    num_skipped_rows = 0

    def when_phase(self, enter: Callable[[str], None]) -> None:
        """Tell a function when merge, exchange, update and waiting begin."""
        self._enter = enter

    def _report(self, num_bad: np.ndarray) -> None:
        """Count or raise rows whose gradient was not finite, from the numbers of all trainers."""
        if not num_bad.any():
            return
        self.num_skipped_rows += int(num_bad.sum())
        text = ", ".join(
            f"{count} rows of {table.label!r}" for table, count in zip(self._tables, num_bad) if count
        )
        if self._raise_nonfinite:
            raise FloatingPointError(f"the gradient is not finite for {text}; these rows were not updated")
        logger.warning("the gradient is not finite for %s; these rows were not updated", text)


Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]


class SparseOptimizer(StepSignals, SavedState, torch.optim.Optimizer, abc.ABC):
    """Optimizer of :class:`dgl.distributed.DistEmbedding` tables.

    Every trainer constructs it, and calls :meth:`step` or :meth:`step_rows` equally often. It is a
    ``torch.optim.Optimizer``, so the schedulers of ``torch.optim.lr_scheduler`` and ``torch.amp.GradScaler``
    work on it; if a gradient of one trainer overflows, all trainers leave out the step. In ``param_groups``
    an embedding is represented by an empty tensor with the attribute ``embedding``.

    Parameters
    ----------
    params : DistEmbedding, sequence of DistEmbedding, or sequence of dict
        The embeddings, or parameter groups ``{"params": [...], "lr": ...}``.
    defaults : dict
        Hyper-parameters of a group: lr, eps, weight_decay, max_row_norm and those of the rule.
    duplicates : {"sum", "mean"}
        What becomes of several gradients for one row in a step, those of other trainers included. "sum" is
        torch's rule: a hub that is read often moves as far as its gradients say. Divide the loss by the size
        of the global batch, and the result depends on that batch alone, not on how it was split between
        trainers. If instead each trainer takes the mean over its own share, which
        ``DistributedDataParallel`` would average, the sum over n trainers is n times the gradient of one
        process, and a triple of a small share weighs more. "mean" is DGL's rule: every touched row gets one
        average gradient, so hubs learn more slowly, and adding trainers (a larger global batch) does not make
        a step longer.
    wire_dtype : torch.dtype, optional
        Type in which rows travel between trainers: ``torch.bfloat16`` or ``torch.float16`` (which overflows
        beyond 65504). Default: the type in which they are computed. Rows and state keep their type.
    overlap : bool
        Let exchange and update run in the background; they are finished before rows are read or written
        through the embedding, or by :meth:`finish`. Whoever reads the kvstore's memory directly calls
        :meth:`finish` first.
    nonfinite : {"raise", "skip"}
        A row whose gradient has a NaN or an infinity is never updated. "raise": every trainer then raises
        ``FloatingPointError`` at the end of the step; "skip": it is counted in ``num_skipped_rows``.
    timeout_seconds : float
        How long a step waits for the other trainers.
    synchronous : bool
        Otherwise steps are Hogwild's (Niu et al. 2011): a trainer applies its own gradients to shared rows
        at once, and waits for nobody. Trainers of one machine only; updates that meet in a row may be lost,
        no two runs are alike, and votes are counted for each trainer alone.
    """

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        *,
        duplicates: str,
        wire_dtype: torch.dtype | None,
        overlap: bool,
        nonfinite: str,
        timeout_seconds: float,
        synchronous: bool,
    ) -> None:
        self._synchronous = synchronous
        check_options(duplicates, wire_dtype, nonfinite, timeout_seconds)
        self._mean = duplicates == "mean"
        self._wire_dtype = wire_dtype
        self._raise_nonfinite = nonfinite == "raise"
        self._timeout_seconds = timeout_seconds
        self._tables: list[Table] = []
        self._states: dict[str, Any] = {}
        self._params: list[Any] = []
        self._earlier_bytes = np.zeros(2, np.int64)
        self._is_built = False
        self._background = Background() if overlap else None
        self._group = Alltoall(timeout_seconds, own_group=overlap)
        self._rank, self._world_size = self._group.rank, self._group.size
        super().__init__([params] if isinstance(params, DistEmbedding) else params, defaults)
        self._connect()
        self._is_built = True

    @abc.abstractmethod
    def _state_shapes(self, dim: int) -> dict[str, tuple[int, ...]]:
        """Name of each state tensor of a table and the shape of one of its rows."""

    @abc.abstractmethod
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
        """Update the target rows of ``arrays`` = [rows, *state]; returns how many were left alone as not
        finite."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add embeddings, with hyper-parameters of their own where given (a collective call).

        Parameters
        ----------
        param_group : dict
            ``{"params": [...], "lr": ..., ...}``.

        Raises
        ------
        TypeError
            Something is no DistEmbedding.
        ValueError
            An embedding has an optimizer already, or a hyper-parameter is out of range.
        """
        group = {**self.defaults, **param_group}
        params = group["params"]
        embeddings = [params] if isinstance(params, DistEmbedding) else list(params)
        check_group(group)
        self.finish()
        claim(embeddings, self)
        group["params"] = []
        for embedding in embeddings:
            table = Table(embedding, self._state_shapes(embedding.embedding_dim))
            table.warm_up(self._rule(table, group))
            if self._background is not None:
                table.fence(weakref.WeakMethod(self.finish))
            self._tables.append(table)
            self._params.append(embedding)
            unscale: weakref.WeakMethod[Any] | None = None
            if len(self._tables) == 1:
                unscale = weakref.WeakMethod(self._unscale)
            group["params"].append(EmbeddingParameter.of(embedding, unscale))
        self._name_tables()
        self.param_groups.append(group)
        if self._is_built:  # otherwise the constructor does it, once for all groups
            self._earlier_bytes += np.array([self._exchange.sent_bytes, self._exchange.network_bytes])
            self._connect()

    def _name_tables(self) -> None:
        """Tell tables of the same name apart by their keys, and list their state under these names."""
        names = [table.name for table in self._tables]
        for table in self._tables:
            table.label = table.name if names.count(table.name) == 1 else table.key
        self._states = {
            table.label: tuple(table.state.values()) if len(table.state) > 1 else table.state["sum"]
            for table in self._tables
        }

    def _rule(self, table: Table, hyper: Mapping[str, Any]) -> Rule:
        """The update rule with everything but the rows filled in."""
        kind = table.chains.dtype.type
        max_norm = math.inf if hyper["max_row_norm"] is None else hyper["max_row_norm"]
        options = (self._mean, kind(max_norm), kind(hyper["weight_decay"]))

        def rule(
            arrays: Sequence[np.ndarray], targets: np.ndarray, selected: np.ndarray, chain: tuple
        ) -> int:
            return self._apply_rule(arrays, targets, selected, chain, options, hyper, max(1, table.num_steps))

        return rule

    def _connect(self) -> None:
        """Set up the ways to the other trainers, all of whom do so now: no later call is a hidden
        collective."""
        narrow = max(table.num_rows for table in self._tables) < 2**31
        wire = WireFormat(
            tuple(table.wire_dtype(self._wire_dtype) for table in self._tables),
            tuple(table.dim for table in self._tables),
            np.dtype(np.int32 if narrow else np.int64),
            self._mean,
        )
        self._exchange = StepExchange(
            self._group,
            self._tables[0].part_id,
            [table.starts for table in self._tables],
            [table.chains for table in self._tables],
            wire,
            self._synchronous,
        )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Apply the gradients of all rows read since the last step, on all trainers; then all may read the
        rows.

        Parameters
        ----------
        closure : callable, optional
            Computes the loss again and returns it.

        Raises
        ------
        FloatingPointError
            A gradient was not finite (with ``nonfinite="raise"``); raised on every trainer.
        TimeoutError
            A trainer did not come to this step.
        ConnectionError
            A trainer ended, or gave up in this step.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._start([table.trace.take() for table in self._tables])
        return loss

    def step_rows(
        self, gradients: Sequence[tuple[Any, torch.Tensor, torch.Tensor]], vote: bool = False
    ) -> None:
        """Apply gradient rows that the caller computed; like :meth:`step`, every trainer calls it.

        Parameters
        ----------
        gradients : sequence of (DistEmbedding, Tensor, Tensor)
            Embedding, ids "(n,) int64" and gradient rows "(n, D)"; ids may repeat, an embedding may come
            several times, or not at all. The rows are not copied: leave them alone until the step is
            finished.
        vote : bool
            Counted over all trainers: ``num_votes``, once the step is finished, is the same on each. It tells
            them all what one of them knows, without another round of messages.
        """
        pairs: dict[str, list] = {table.key: [] for table in self._tables}
        for embedding, ids, rows in gradients:
            key = key_of(embedding)
            if key not in pairs:
                raise self._unknown(embedding)
            pairs[key].append((ids, rows))
        self._start(list(pairs.values()), vote)

    def finish(self) -> None:
        """Wait for the step that runs in the background, if any, and raise what it raised."""
        if self._background is not None:
            self._background.finish()

    def _start(self, pairs_by_table: Sequence[Pairs], vote: bool = False) -> None:
        """Apply the gradients, given as (ids, rows) pairs for each table, now or in the background."""
        self.finish()
        hyper_of = {key: group for keys, group in self._keyed_groups() for key in keys}
        rules = [self._rule(table, dict(hyper_of[table.key])) for table in self._tables]
        if self._background is None:
            self._run(pairs_by_table, rules, vote)
        else:
            self._background.start(lambda: self._run(pairs_by_table, rules, vote))

    def _keyed_groups(self) -> list[tuple[list[str], dict[str, Any]]]:
        """Each parameter group with the keys of its tables."""
        return [([key_of(each.embedding) for each in group["params"]], group) for group in self.param_groups]

    @torch.no_grad()
    def _run(self, pairs_by_table: Sequence[Pairs], rules: Sequence[Rule], vote: bool) -> None:
        """Exchange the gradients and update the rows that fall to this trainer."""
        exchange = self._exchange
        limit = self._timeout_seconds if self._synchronous else None
        num_bad = np.zeros(len(self._tables), np.int64)
        try:
            self._enter("merge")
            for table, pairs in zip(self._tables, pairs_by_table):
                table.collect(pairs)
            self._enter("exchange")
            for turn, (selected, active) in enumerate(exchange.run(self._enter)):
                self._enter("update")
                for number, table in enumerate(self._tables):
                    table.num_steps += int(turn == 0 and active[number])
                    num_bad[number] += table.update(selected[number], rules[number], limit)
                self._enter("exchange")
        except BaseException:
            exchange.fail()
            raise
        finally:
            for table in self._tables:
                table.chains.clear()
        self._enter("waiting")
        num_bad = exchange.finish(num_bad, vote)
        self.num_votes = exchange.num_votes
        self._report(num_bad)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients that have arrived; reads whose backward is still to come are kept.

        So it may stand before the forward, as with ``torch.optim``, or between forward and backward, as in
        DGL's examples.
        """
        for table in self._tables:
            table.trace.drop_gradients()

    @torch.no_grad()
    def _unscale(self, inverse_scale: torch.Tensor) -> bool:
        """Multiply the gradients that have arrived, for ``torch.amp.GradScaler``; a collective.

        Returns
        -------
        bool
            Whether one of them, on any trainer, is not finite: then no trainer may make the step. Trainers
            that are not synchronous decide each for itself.
        """
        self.finish()
        is_bad = False
        for table in self._tables:
            for gradient in table.trace.gradients():
                is_bad = is_bad or not bool(torch.isfinite(gradient).all())
                gradient.mul_(inverse_scale.to(gradient.device))
        if self._synchronous:
            is_bad = bool(self._group.sum(np.array([is_bad], np.int64))[0])
        return is_bad

    def state_tensors(self, embedding: Any) -> dict[str, DistTensor]:
        """The state of an embedding by name, as distributed tensors with a row for each row of the
        embedding."""
        self.finish()
        for table in self._tables:
            if table.key == key_of(embedding):
                return dict(table.state)
        raise self._unknown(embedding)

    def _unknown(self, embedding: Any) -> ValueError:
        return ValueError(
            f"embedding {embedding.name!r} is not one of this optimizer's: {sorted(self._states)}"
        )

    @property
    def sent_bytes(self) -> int:
        """Bytes of gradients that this trainer sent to others since the start."""
        return int(self._earlier_bytes[0]) + self._exchange.sent_bytes

    @property
    def network_bytes(self) -> int:
        """Those of them that went over the network: to trainers of other machines, normally."""
        return int(self._earlier_bytes[1]) + self._exchange.network_bytes
