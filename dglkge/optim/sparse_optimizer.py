"""The optimizer that runs any update rule: parameter groups, options, and the course of a step."""

from __future__ import annotations

import functools
import gc
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from dgl.distributed import DistEmbedding, DistTensor
from numpy import ndarray
from torch import Tensor

from dglkge.optim.alltoall import Alltoall
from dglkge.optim.dgl_tables import EmbeddingParameter, call_alive, identity_of, key_of
from dglkge.optim.links import NEUTRAL, Options, RuleStep, UpdateResult
from dglkge.optim.network_exchange import WireFormat
from dglkge.optim.row_chains import Clipping, GradientRows
from dglkge.optim.rules import UpdateRule
from dglkge.optim.state_file import SavedState
from dglkge.optim.step_exchange import StepExchange, ignore_phase
from dglkge.optim.table import Table

logger = logging.getLogger(__name__)

#: The optimizer that steps each embedding of this process, by :func:`identity_of`. Weak: an optimizer that is
#: no longer referenced frees its embeddings.
_STEPPED_BY: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()


Pairs = Sequence[tuple[Tensor, Tensor]]


class SparseOptimizer(SavedState, torch.optim.Optimizer):
    """Optimizer of :class:`dgl.distributed.DistEmbedding` tables, for any update rule.

    Every trainer constructs it, and calls :meth:`step` or :meth:`step_rows` equally often. It is a
    ``torch.optim.Optimizer``, so the schedulers of ``torch.optim.lr_scheduler`` and ``torch.amp.GradScaler``
    work on it; if a gradient of one trainer overflows, all trainers skip the step. In ``param_groups`` an
    embedding is represented by an empty tensor with the attribute ``embedding``.

    An embedding may have several optimizers, for example to load what another one saved. They share state of
    one name, as DGL's optimizers do. Only one of them may step.

    Parameters
    ----------
    params : DistEmbedding, sequence of DistEmbedding, or sequence of dict
        The embeddings, or parameter groups ``{"params": [...], "lr": ...}``.
    rule : UpdateRule
        Update rule of the touched rows; a parameter group may have another one, see :meth:`add_param_group`.
    lr : float
        Learning rate.
    weight_decay : float
        Multiple of the row that is added to its gradient; touched rows only.
    decoupled_weight_decay : bool
        Multiply the row by 1 - lr·weight_decay before its update instead (Loshchilov and Hutter, "Decoupled
        Weight Decay Regularization", ICLR 2019, algorithm 2; with Adam it is ``torch.optim.AdamW``); touched
        rows only.
    max_row_norm : float, optional
        Limit of the 2-norm of a row's merged gradient; longer ones are scaled to it.
    **options
        Fields of :class:`Options`, for all tables.

    Attributes
    ----------
    tables : list of Table
        The embeddings with their state, in the order in which they were given.
    num_skipped_rows : int
        Updates that were skipped, by any trainer, because the row's gradient was not finite.
    num_started : int
        Steps so far: the number of the next one, see :meth:`step_rows`.
    """

    num_skipped_rows = 0
    num_started = 0
    _has_claimed = False
    clipping: Clipping | None = None
    _enter: Callable[[str], None] = staticmethod(ignore_phase)

    def __init__(
        self,
        params: Any,
        rule: UpdateRule,
        lr: float,
        *,
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
        max_row_norm: float | None = None,
        **options: Any,
    ) -> None:
        self._rule = rule
        self._options = Options(**options)
        self._mean = self._options.duplicates == "mean"
        self.tables: list[Table] = []
        self._params: list[Any] = []
        self._earlier_bytes = np.zeros(2, np.int64)
        self._is_built = False
        self._updating = threading.Lock()
        overlap = self._options.overlap
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dglkge-optim") if overlap else None
        self._step: Future[UpdateResult] | None = None
        self._result: UpdateResult | None = None
        # The thread of a background step, or of a lagged exchange, and the user's own collectives would
        # interleave in one group.
        self._group = Alltoall(
            self._options.timeout_seconds, own_group=overlap or not self._options.synchronous
        )
        self._rank, self._world_size = self._group.rank, self._group.size
        links = dict(zip(NEUTRAL, (weight_decay, decoupled_weight_decay, max_row_norm)))
        defaults = {"lr": lr, **links, **rule.hyper}
        super().__init__([params] if isinstance(params, DistEmbedding) else params, defaults)
        self._connect()
        self._is_built = True

    def when_phase(self, enter: Callable[[str], None]) -> None:
        """Set the function that is called with the name of each phase of a step as it begins.

        Phases are "merge", "exchange", "update" and "waiting"; with ``overlap`` the calls come from the
        background thread.
        """
        self._enter = enter

    def clip_gradients(self, norm: float | None = None, value: float | None = None) -> None:
        """Clip the merged gradient of every step from now on; every trainer sets the same limits.

        The gradient is that of the global batch, so the result does not depend on the number of trainers but
        for the order of sums. It replaces ``torch.nn.utils.clip_grad_norm_`` and ``clip_grad_value_``, which
        see the gradients of one trainer only, before equal rows are added up. Weight decay is added, and
        ``max_row_norm`` applied, afterwards. A step merges all rows into a copy first, and with ``norm`` has
        one round of messages more.

        Parameters
        ----------
        norm : float, optional
            Limit of the 2-norm over all rows of all embeddings.
        value : float, optional
            Limit of the size of each number of a row's merged gradient; applied before the norm is taken.

        Raises
        ------
        ValueError
            If a limit is not a positive number, or for ``norm`` with ``synchronous=False``: no trainer has
            the gradients of all; on several machines for ``value`` as well.
        """
        if norm is not None and not self._options.synchronous:
            raise ValueError("clip_gradients: norm needs synchronous=True, which adds up all gradients")
        if value is not None and self._exchange.lagged is not None:
            raise ValueError("clip_gradients: value needs synchronous=True on several machines")
        is_off = norm is None and value is None
        self.finish()
        self.clipping = None if is_off else Clipping(norm, value, self._mean)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add embeddings, with hyper-parameters of their own where given (a collective call).

        Parameters
        ----------
        param_group : dict
            ``{"params": [...], "lr": ..., ...}``; with ``"rule"``, an :class:`UpdateRule`, these embeddings
            have that rule.

        Raises
        ------
        TypeError
            An object is not a DistEmbedding.
        ValueError
            An embedding is in the optimizer already, or a hyper-parameter is out of range.
        """
        rule = param_group.get("rule", self._rule)
        common = {name: self.defaults[name] for name in ("lr", *NEUTRAL)}
        # The rule is not part of the group: a state file has no objects, and is loaded into one of equal
        # rules.
        group = {**common, **rule.hyper, **param_group}
        group.pop("rule", None)
        RuleStep.of(rule, group)  # a ValueError names what is out of range
        params = group["params"]
        embeddings = [params] if isinstance(params, DistEmbedding) else list(params)
        for embedding in embeddings:
            if not isinstance(embedding, DistEmbedding):
                kind, got = type(self).__name__, type(embedding).__name__
                raise TypeError(f"{kind} updates dgl.distributed.DistEmbedding only, got {got}")
        keys = [key_of(embedding) for embedding in [*self._params, *embeddings]]
        for key in keys:
            if keys.count(key) > 1:
                raise ValueError(f"embedding {key!r} is given twice")
        if self._is_built:
            self.drain()
        self._has_claimed = False
        group["params"] = []
        for embedding in embeddings:
            table = Table(embedding, rule, self._options.kernels)
            table.warm_up(self._rule_step(table, group))
            if self._thread is not None:
                table.fence(weakref.WeakMethod(self.finish))
            self.tables.append(table)
            self._params.append(embedding)
            unscale: Any = weakref.WeakMethod(self._unscale) if len(self.tables) == 1 else None
            group["params"].append(EmbeddingParameter.of(embedding, unscale))
        self._name_tables()
        self.param_groups.append(group)
        if self._is_built:  # otherwise the constructor does it, once for all groups
            self._earlier_bytes += np.array([self._exchange.sent_bytes, self._exchange.network_bytes])
            self._connect()

    def _name_tables(self) -> None:
        """Label each table by its name, or by its key where names repeat."""
        names = [table.name for table in self.tables]
        self._table_of_key = {table.key: table for table in self.tables}
        for table in self.tables:
            table.label = table.name if names.count(table.name) == 1 else table.key

    def _hyper_of(self) -> dict[str, dict[str, Any]]:
        """Return a copy of the parameter group of each table by its key; a scheduler may change the groups
        while a step runs in the background.
        """
        return {table.key: dict(group) for tables, group in self._groups_of_tables() for table in tables}

    def _rule_step(self, table: Table, hyper: Mapping[str, Any], number: int = 0) -> RuleStep:
        """Update of a table, with its hyper-parameters as they are now and its steps so far."""
        return RuleStep.of(table.rule, hyper, self._mean, table.max_norm, max(1, table.num_steps), number)

    def _connect(self) -> None:
        """Connect to the other trainers; a collective, done here so that no later call is a hidden one."""
        narrow = max(table.num_rows for table in self.tables) < 2**31
        wire = WireFormat(
            tuple(table.wire_dtype(self._options.wire_dtype) for table in self.tables),
            tuple(table.dim for table in self.tables),
            np.dtype(np.int32 if narrow else np.int64),
            self._mean,
        )
        self._num_late_bad = np.zeros(len(self.tables), np.int64)
        starts, chains = zip(*((table.starts, table.chains) for table in self.tables))
        # Weak: the exchange belongs to the optimizer.
        apply = functools.partial(call_alive, weakref.WeakMethod(self._apply_arrived))
        ways = (self._options.synchronous, self._options.max_lag, apply)
        self._exchange = StepExchange(self._group, self.tables[0].part_id, starts, chains, wire, *ways)

    def drain(self) -> None:
        """Wait until the gradients of all trainers have been applied; a collective, at equal steps.

        Needed with ``synchronous=False`` on several machines only; elsewhere it does nothing.
        """
        self.finish()
        if self._exchange.lagged is not None:
            self._exchange.lagged.drain()
            self._report_late()

    def _apply_arrived(self) -> None:
        """Update this trainer's rows from the gradients of other machines; in the exchange's thread."""
        hyper_of, arrived = self._hyper_of(), self._exchange.lagged.arrived  # type: ignore[union-attr]
        # One thread at a time: both use the tables' room, and no update of this trainer is lost.
        with self._updating, torch.no_grad():
            for place, (table, gradients) in enumerate(zip(self.tables, arrived)):
                step = self._rule_step(table, hyper_of[table.key], self.num_started)
                self._num_late_bad[place] += table.update(
                    step, gradients, np.arange(gradients.num_keys), None
                )

    def _report_late(self) -> None:
        """Report the gradients of other machines that were not finite."""
        with self._updating:
            late, self._num_late_bad = self._num_late_bad, np.zeros(len(self.tables), np.int64)
        self.report_nonfinite(late)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Apply the gradients of all rows read since the last step; a collective.

        When it returns (with ``overlap``: after :meth:`finish`), every trainer may read the updated rows.

        Parameters
        ----------
        closure : callable, optional
            Computes the loss again and returns it.

        Raises
        ------
        FloatingPointError
            A gradient was not finite (with ``nonfinite="raise"``); raised on every trainer.
        ValueError
            Another optimizer has stepped one of the embeddings.
        TimeoutError
            A trainer did not call this step in time.
        ConnectionError
            A trainer's process ended, or its step failed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._start([table.trace.take() for table in self.tables])
        return loss

    def step_rows(
        self,
        gradients: Sequence[tuple[Any, Tensor, Tensor]],
        extra: int = 0,
        other_squares: float = 0.0,
        number: int | None = None,
    ) -> UpdateResult | None:
        """Apply gradient rows that the caller computed; like :meth:`step`, every trainer calls it.

        Parameters
        ----------
        gradients : sequence of (DistEmbedding, Tensor, Tensor)
            Embedding, ids "(n,) int64" and gradient rows "(n, D)"; ids may repeat, an embedding may appear
            several times, or not at all. The rows are not copied: do not change them before the step is
            finished.
        extra : int
            An integer that is summed over all trainers with the step, without another round of messages.
        other_squares : float
            Sum of the squares of the gradient of parameters that are no rows, the same on every trainer. With
            ``clip_gradients(norm=...)`` the norm is that of the rows and of these together; multiply these by
            the result's ``clip_factor``.
        number : int, optional
            Number of the step, on which the random bits of :class:`NarrowEmbedding` depend; the same on all
            trainers. A training that is resumed gives the one that the step would have had. Default: the
            number of steps before it.

        Returns
        -------
        UpdateResult or None
            None with ``overlap``: :meth:`finish` returns it.
        """
        pairs: dict[str, list[Any]] = {table.key: [] for table in self.tables}
        for embedding, ids, rows in gradients:
            pairs[self._table_of(embedding).key].append((ids, rows))
        return self._start(list(pairs.values()), extra, other_squares, number)

    def finish(self) -> UpdateResult | None:
        """Wait for the step that runs in the background, if any, and raise its exception.

        Returns the result of the last step with ``overlap``, else None.
        """
        step, self._step = self._step, None
        if step is not None:
            self._result = step.result()
        return self._result

    def _start(
        self, pairs: Sequence[Pairs], extra: int = 0, other_squares: float = 0.0, number: int | None = None
    ) -> UpdateResult | None:
        """Apply the gradients, given as (ids, rows) pairs for each table, now or in the background."""
        self._claim()
        self.finish()
        number = self.num_started if number is None else number
        self.num_started += 1
        run = functools.partial(self._run, pairs, self._hyper_of(), extra, other_squares, number)
        if self._thread is None:
            return run()
        self._step = self._thread.submit(run)
        return None

    def _claim(self) -> None:
        """Register as the optimizer that steps its embeddings, all of them or none: another one is a
        ValueError.
        """
        if self._has_claimed:
            return
        keys = [identity_of(embedding) for embedding in self._params]
        if any(_STEPPED_BY.get(key, self) is not self for key in keys):
            gc.collect()  # an unreferenced optimizer may still be part of a reference cycle
        for embedding, key in zip(self._params, keys):
            other = _STEPPED_BY.get(key, self)
            if other is not self:
                raise ValueError(
                    f"embedding {embedding.name!r} is updated by another optimizer ({type(other).__name__}): "
                    "only one may step, two would overwrite each other's updates"
                )
        _STEPPED_BY.update(dict.fromkeys(keys, self))
        self._has_claimed = True

    @torch.no_grad()
    def _run(
        self, pairs: Sequence[Pairs], hyper: Mapping[str, Any], extra: int, other_squares: float, number: int
    ) -> UpdateResult:
        """Merge the gradients, send rows to their owners, and update the rows that this trainer owns."""
        exchange = self._exchange
        limit = self._options.timeout_seconds if self._options.synchronous else None
        num_bad, factor = np.zeros(len(self.tables), np.int64), 1.0
        try:
            self._enter("merge")
            for table, pairs_of_table in zip(self.tables, pairs):
                table.collect(pairs_of_table)
            self._enter("exchange")
            turns: Iterable[tuple[list[ndarray], ndarray]] = exchange.run(self._enter, extra)
            gradients = [table.chains for table in self.tables]
            if self.clipping is not None:
                # One turn: every gradient is merged before the first row changes.
                gradients, turns, factor = self._clipped(self.clipping, list(turns), other_squares)
            for turn, (selected, active) in enumerate(turns):
                self._enter("update")
                with self._updating:
                    for place, table in enumerate(self.tables):
                        table.num_steps += int(turn == 0 and active[place])
                        step = self._rule_step(table, hyper[table.key], number)
                        num_bad[place] += table.update(step, gradients[place], selected[place], limit)
                self._enter("exchange")
        except BaseException:
            # The other trainers of the machine wait in shared memory: without a mark they would time out.
            exchange.fail()
            raise
        finally:
            for table in self.tables:
                table.chains.clear()
        self._enter("waiting")
        num_bad, extra_sum = exchange.finish(num_bad, extra)
        self.report_nonfinite(num_bad)
        self._report_late()
        return UpdateResult(extra_sum, factor)

    def _clipped(
        self, clipping: Clipping, turns: Sequence[tuple[list[ndarray], ndarray]], other_squares: float
    ) -> tuple[list[GradientRows], list[tuple[list[ndarray], ndarray]], float]:
        """Clip the gradients of all rows that this trainer updates; returns them, one turn, the factor."""
        self._enter("merge")
        selected = [np.concatenate(table_keys) for table_keys in zip(*(keys for keys, _ in turns))]
        chains, gradients = [table.chains for table in self.tables], []
        merged, squares = clipping.merge(chains, selected)
        self._enter("exchange")
        factor = clipping.scale(merged, squares, other_squares, self._group.sum)
        for table_chains, keys, rows in zip(chains, selected, merged):
            # Each merged gradient is the only one of its row.
            gradients.append(type(table_chains)(table_chains.dim, table_chains.dtype))
            gradients[-1].add(table_chains.keys[keys], rows.numpy())
        return gradients, [([np.arange(len(keys)) for keys in selected], turns[0][1])], factor

    def report_nonfinite(self, num_bad: ndarray) -> None:
        """Count and log, or raise, rows whose gradient was not finite: "(num_tables,)" sums over trainers."""
        if not num_bad.any():
            return
        self.num_skipped_rows += int(num_bad.sum())
        rows = [f"{count} rows of {table.label!r}" for table, count in zip(self.tables, num_bad) if count]
        message = f"the gradient is not finite for {', '.join(rows)}; these rows were not updated"
        if self._options.nonfinite == "raise":
            raise FloatingPointError(message)
        logger.warning(message)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Remove the gradients that have arrived; reads whose backward is still to come are kept.

        So it may be called before the forward, as with ``torch.optim``, or between forward and backward, as
        in DGL's examples.
        """
        for table in self.tables:
            table.trace.drop_gradients()

    @torch.no_grad()
    def _unscale(self, inverse_scale: Tensor) -> bool:
        """Multiply the gradients that have arrived, for ``torch.amp.GradScaler``; a collective.

        Returns whether one of them, on any trainer, is not finite: then no trainer may make the step. With
        ``synchronous=False``: on this trainer.
        """
        self.finish()
        is_bad = False
        for table in self.tables:
            for gradient in table.trace.gradients():
                is_bad = is_bad or not bool(torch.isfinite(gradient).all())
                gradient.mul_(inverse_scale.to(gradient.device))
        if self._options.synchronous:
            is_bad = bool(self._group.sum(np.array([is_bad], np.int64))[0])
        return is_bad

    def limit_norms(self, embedding: Any, max_norm: float) -> None:
        """Scale rows of an embedding that an update makes longer than ``max_norm`` to that Euclidean length.

        The owner of a row does it after the merged gradient is applied, so the result does not depend on the
        number of trainers. Longer rows without a gradient stay as they are. Every trainer calls it.
        PyTorch-BigGraph and ``torch.nn.Embedding`` scale rows when they are read instead.

        Raises
        ------
        ValueError
            If the limit is not positive, or the embedding is not one of this optimizer's.
        """
        if not max_norm > 0:
            raise ValueError(f"max_norm must be positive, got {max_norm}")
        self.finish()
        self._table_of(embedding).max_norm = float(max_norm)

    def count_step(self, active: Sequence[bool], number: int) -> list[RuleStep]:
        """Count a step that is computed elsewhere; returns the update of each table, with today's groups.

        ``active`` says whether any trainer has a gradient for each table; ``number`` as in :meth:`step_rows`.
        """
        self._claim()
        hyper_of = self._hyper_of()
        for table, is_active in zip(self.tables, active):
            table.num_steps += int(is_active)
        return [self._rule_step(table, hyper_of[table.key], number) for table in self.tables]

    def state_tensors(self, embedding: Any) -> dict[str, DistTensor]:
        """State tensors of an embedding by name, with an entry for each of its rows."""
        self.finish()
        return dict(self._table_of(embedding).state)

    def _table_of(self, embedding: Any) -> Table:
        table = self._table_of_key.get(key_of(embedding))
        if table is None:
            labels = sorted(table.label for table in self.tables)
            raise ValueError(f"embedding {embedding.name!r} is not one of this optimizer's: {labels}")
        return table

    @property
    def sent_bytes(self) -> int:
        """Bytes of gradients that this trainer sent to others since the start."""
        return int(self._earlier_bytes[0]) + self._exchange.sent_bytes

    @property
    def network_bytes(self) -> int:
        """Part of :attr:`sent_bytes` that was sent over the network; normally to other machines."""
        return int(self._earlier_bytes[1]) + self._exchange.network_bytes
