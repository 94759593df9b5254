"""Queries of a global batch against all candidates of some tables, sharded over the trainers.

Each trainer holds a shard of every table: its share of its machine's rows. It scores the queries of all
trainers against its shards (:mod:`.shard_objective`); what the shards find is put together by
:class:`QueryExchange`. Gradients of candidate rows stay where the rows are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Callable

import numpy as np
import numpy.typing as npt
import torch

from dglkge.embeddings.embedding_table import EmbeddingTable
from dglkge.training.query_exchange import QueryBlock, QueryExchange
from dglkge.training.rows import Scratch
from dglkge.training.shard_objective import Answers, ShardObjective, losses, normalizers
from dglkge.training.stats import PhaseClock

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Candidates:
    """Candidates that one block of queries is compared with, as one trainer holds them.

    Attributes
    ----------
    table : EmbeddingTable
    first, stop : int
        Run of node ids that this trainer owns.
    columns : slice
        Part of the table's rows that is compared: one direction of reciprocal relations, else everything.
    kind : str
        Kind of the objective.
    shard : ShardObjective
    answers_of : callable
        Returns the answers among the owned rows of queries with some keys.
    """

    table: EmbeddingTable
    first: int
    stop: int
    columns: slice
    kind: str
    shard: ShardObjective
    answers_of: Callable[[Ids], Answers]

    @property
    def rows(self) -> torch.Tensor:
        """Owned rows, (R, D), a view on shared memory."""
        start = self.table.first_node_id
        return self.table.local_rows[self.first - start : self.stop - start, self.columns]


def only_answers(first: int, stop: int) -> Callable[[Ids], Answers]:
    """Return the answers of queries whose key is the node id of their only one."""

    def answers_of(keys: Ids) -> Answers:
        is_here = (keys >= first) & (keys < stop)
        starts = np.zeros(len(keys) + 1, np.int64)
        np.cumsum(is_here, out=starts[1:])
        places = keys[is_here] - first
        return Answers(starts, places, np.ones(len(places), np.float32))

    return answers_of


class AllCandidates:
    """Computes losses and gradients of blocks of queries; a collective.

    Parameters
    ----------
    candidates : sequence of Candidates
        One of each block of queries, the same blocks on every trainer.
    exchange : QueryExchange
    clock : PhaseClock
    """

    def __init__(self, candidates: Sequence[Candidates], exchange: QueryExchange, clock: PhaseClock) -> None:
        self._candidates = list(candidates)
        self._exchange = exchange
        self._clock = clock
        self._scratch = Scratch()
        self._dense: dict[str, torch.Tensor] = {}
        self._owned = {one.table.name: torch.arange(one.first, one.stop) for one in candidates}

    @property
    def sent_bytes(self) -> int:
        """Bytes of queries, numbers and gradients that this trainer sent to other machines."""
        return self._exchange.sent_bytes

    def run(self, blocks: Sequence[QueryBlock]) -> tuple[float, list[torch.Tensor]]:
        """Return the loss of this trainer's queries, each times its factor, and their gradients (q, D).

        Parameters
        ----------
        blocks : sequence of QueryBlock
            This trainer's queries; any of them may be empty.
        """
        self._clock.enter("exchange")
        gathered = self._exchange.gather(blocks)
        self._clock.enter("score")
        numbers, used = [], []
        for block, one in zip(gathered, self._candidates):
            if len(block):
                queries = torch.from_numpy(block.queries)
                numbers.append(one.shard.score(queries, one.rows, one.answers_of(block.keys)))
                used.append(one)
        self._clock.enter("exchange")
        shared = self._exchange.share(numbers) if numbers else []
        self._clock.enter("backward")
        parts, loss = self._differentiate(gathered, iter(shared))
        self._clock.enter("exchange")
        return loss, self._exchange.return_gradients(parts)

    def _differentiate(self, gathered: Sequence[QueryBlock], shared: Any) -> tuple[list[torch.Tensor], float]:
        """Return this shard's part of the gradients of all queries, and the loss of this trainer's."""
        self._dense = {}
        parts, loss = [], 0.0
        for number, (block, one) in enumerate(zip(gathered, self._candidates)):
            part = self._scratch.take(f"part{number}", *block.queries.shape)
            parts.append(part)
            if not len(block):
                continue
            found = next(shared)
            name, num_rows = one.table.name, one.stop - one.first
            if name not in self._dense:
                self._dense[name] = self._scratch.take(f"dense~{name}", num_rows, one.table.dim)
                if self._is_partial(one):
                    self._dense[name].zero_()
            of_rows = self._dense[name][:, one.columns]
            one.shard.differentiate(normalizers(one.kind, found), block.factors, part, of_rows)
            run = self._exchange.own_run(number)
            loss += float((losses(one.kind, found[:, :, run]) * block.factors[run]).sum())
        return parts, loss

    @staticmethod
    def _is_partial(one: Candidates) -> bool:
        """Return whether a block's candidates are only a part of the columns of their table."""
        start, stop, _ = one.columns.indices(one.table.dim)
        return stop - start < one.table.dim

    def gradients(self) -> list[tuple[Any, torch.Tensor, torch.Tensor]]:
        """Return (embedding, node ids, gradients) of all rows that this trainer owns, for the optimizer.

        A table whose rows were no candidate of the last batch is absent.
        """
        tables = {one.table.name: one.table for one in self._candidates}
        return [(tables[name].embedding, self._owned[name], rows) for name, rows in self._dense.items()]
