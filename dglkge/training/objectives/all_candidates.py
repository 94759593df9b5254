"""Queries of a global batch against all candidates of some tables, sharded over the trainers.

Each trainer holds a shard of every table: its share of its machine's rows. It scores the queries of all
trainers against its shards (:mod:`.shard_objective`); what the shards find is put together by
:class:`QueryExchange`. Gradients of candidate rows stay where the rows are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Callable, Protocol

import numpy as np
import numpy.typing as npt
import torch

from dglkge.embeddings.embedding_table import EmbeddingTable
from dglkge.model.regularizers import Regularizer
from dglkge.optim.narrow_rows import is_narrow
from dglkge.training.objectives.query_exchange import QueryBlock, QueryExchange
from dglkge.training.objectives.row_dropout import RowDropout
from dglkge.training.objectives.rows import Scratch, Shift
from dglkge.training.objectives.shard_objective import Answers, ShardObjective, losses, normalizers
from dglkge.training.stats import PhaseClock

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


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
    shift : callable or None
        Returns what is added to the rows of node ids when they are compared.
    resident : callable or None
        Returns the owned rows where they are on a device; their gradients are left there.
    """

    table: EmbeddingTable
    first: int
    stop: int
    columns: slice
    kind: str
    shard: ShardObjective
    answers_of: Callable[[Ids], Answers]
    shift: Shift | None = None
    resident: Callable[[], torch.Tensor] | None = None

    @property
    def rows(self) -> torch.Tensor:
        """Owned rows, (R, D) as they are stored: a view on shared memory, or on a device."""
        if self.resident is not None:
            return self.resident()[:, self.columns]
        start = self.table.first_node_id
        return self.table.local_rows[self.first - start : self.stop - start, self.columns]


def only_answers(first: int, stop: int) -> Callable[[Ids], Answers]:
    """Return a function from keys of queries to answers; a key is the node id of the only answer."""

    # A key outside the owned run belongs to another shard: here the query then has no answers.
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
    regularizer : Regularizer, optional
        Penalty on answers that state their share in it.
    dropout : RowDropout, optional
        Of the candidates.
    """

    def __init__(
        self,
        candidates: Sequence[Candidates],
        exchange: QueryExchange,
        clock: PhaseClock,
        regularizer: Regularizer | None = None,
        dropout: RowDropout | None = None,
    ) -> None:
        self._candidates = list(candidates)
        self._dropout = dropout
        self._copies: dict[str, torch.Tensor] = {}
        self._regularizer = regularizer
        self._exchange = exchange
        self._clock = clock
        self._scratch = Scratch()
        self._device_scratch: Scratch | None = None
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
        self._copies = {}
        numbers, answers = [], []
        for block, one in zip(gathered, self._candidates):
            # Counts were gathered, so a block is empty on all trainers or on none: rounds of messages stay
            # paired.
            if len(block):
                answers.append(one.answers_of(block.keys))
                numbers.append(one.shard.score(torch.from_numpy(block.queries), self._rows(one), answers[-1]))
        self._clock.enter("exchange")
        shared = self._exchange.share(numbers) if numbers else []
        self._clock.enter("backward")
        parts, loss = self._differentiate(gathered, iter(zip(shared, answers)))
        self._clock.enter("exchange")
        return loss, self._exchange.return_gradients(parts)

    def _rows(self, one: Candidates) -> torch.Tensor:
        """Return the owned rows of a block as they are compared: float32, with their shift, after dropout."""
        name = one.table.name
        is_dropped = self._dropout is not None and self._dropout.drops(name)
        if not is_dropped and one.shift is None and not is_narrow(one.table.local_rows):
            return one.rows
        # Blocks of one table share the copy, and the mask with the rows that queries are made of.
        if name not in self._copies:
            start = one.table.first_node_id
            memory = self._scratch if one.resident is None else self._on_device(one.rows.device)
            copy = memory.take(f"copy~{name}", one.stop - one.first, one.table.dim)
            if one.resident is None:
                one.table.widened(np.arange(one.first - start, one.stop - start), copy)
            else:
                copy.copy_(one.resident())
            self._copies[name] = copy
            if one.shift is not None:
                self._copies[name] += one.shift(self._owned[name])
            if self._dropout is not None and is_dropped:
                self._dropout.apply(name, self._owned[name].numpy(), self._copies[name])
        return self._copies[name][:, one.columns]

    def _differentiate(self, gathered: Sequence[QueryBlock], shared: Any) -> tuple[list[torch.Tensor], float]:
        """Return this shard's part of the gradients of all queries, and the loss of this trainer's."""
        self._dense = {}
        parts, loss = [], 0.0
        for number, (block, one) in enumerate(zip(gathered, self._candidates)):
            part = self._scratch.take(f"of_queries~{number}", *block.queries.shape)
            parts.append(part)
            if not len(block):
                continue
            found, answers = next(shared)
            name, num_rows = one.table.name, one.stop - one.first
            if name not in self._dense:
                # Relation blocks of both directions share one table: its gradients are collected in one
                # array.
                memory = self._scratch if one.resident is None else self._on_device(one.rows.device)
                self._dense[name] = memory.take(f"dense~{name}", num_rows, one.table.dim)
                # A block writes only its columns, and the other direction's block may be empty.
                if self._is_partial(one):
                    self._dense[name].zero_()
            of_rows = self._dense[name][:, one.columns]
            one.shard.differentiate(normalizers(one.kind, found), block.factors, part, of_rows)
            loss += self._penalize(one, answers, block.factors, of_rows)
            # Every trainer computes all gradients of its shard, but counts only the loss of its own queries:
            # losses are summed over trainers.
            run = self._exchange.own_run(number)
            loss += float((losses(one.kind, found[:, :, run]) * block.factors[run]).sum())
        if self._dropout is not None:
            for name, of_rows in self._dense.items():
                self._dropout.apply(name, self._owned[name].numpy(), of_rows)
        return parts, loss

    def _penalize(self, one: Candidates, answers: Answers, factors: Floats, of_rows: torch.Tensor) -> float:
        """Add the gradients of the penalty on the answers among the owned rows; returns it."""
        if self._regularizer is None or answers.penalty_shares is None:
            return 0.0
        shares = factors[answers.query_of] * answers.penalty_shares
        # One row may answer several queries: its penalty is taken once, with the sum of their shares.
        weights = np.bincount(answers.places, weights=shares, minlength=one.stop - one.first)
        used = torch.from_numpy(np.flatnonzero(weights))
        of_used = torch.from_numpy(weights).float()[used].to(of_rows.device)
        used = used.to(of_rows.device)
        rows = self._rows(one)[used].requires_grad_()
        penalty = (self._regularizer(rows) * of_used).sum()
        if len(used):
            (gradients,) = torch.autograd.grad(penalty, rows)
            of_rows.index_add_(0, used, gradients)
        return penalty.item()

    def _on_device(self, device: torch.device) -> Scratch:
        """Return memory for gradients that are left on a device."""
        if self._device_scratch is None:
            self._device_scratch = Scratch(device)
        return self._device_scratch

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


@dataclass(frozen=True)
class Piece:
    """Queries of one group and block.

    Attributes
    ----------
    block : str
        Name of the candidates that they are compared with.
    queries : (q, D) tensor
    keys : (q,) int64
    factors : (q,) float32
    """

    block: str
    queries: torch.Tensor
    keys: Ids
    factors: Floats


class QueryMaker(Protocol):
    """Computes queries from rows, and the gradients of the rows from those of the queries.

    Attributes
    ----------
    reads_in_place : bool
        Whether rows are read where they are stored; otherwise they must have been copied.
    shares_relations : bool
        Whether groups hold the row of each relation once.
    """

    reads_in_place: bool
    shares_relations: bool

    def make(self, groups: Sequence[Any], global_size: int) -> list[Piece]:
        """Return all queries of a batch's groups."""
        ...

    def take_back(self, gradients: Sequence[torch.Tensor]) -> float:
        """Write the gradients of the rows, given those of each piece's queries; returns the penalty."""
        ...


class CandidateLoss:
    """Losses and gradients of a batch's groups against all candidates; a collective.

    Parameters
    ----------
    maker : QueryMaker
    blocks : sequence of str
        Names of the blocks of queries, in the order of the candidates.
    candidates : AllCandidates
    dims : sequence of int
        Width of the queries of each block.
    clock : PhaseClock
    """

    def __init__(
        self,
        maker: QueryMaker,
        blocks: Sequence[str],
        dims: Sequence[int],
        candidates: AllCandidates,
        clock: PhaseClock,
    ) -> None:
        self.reads_in_place = maker.reads_in_place
        self.shares_relations = maker.shares_relations
        self._maker = maker
        self._blocks = list(zip(blocks, dims))
        self._candidates = candidates
        self._clock = clock

    def __call__(self, groups: Sequence[Any], global_size: int) -> float:
        """Return the summed loss; leaves the gradients, divided by ``global_size``, with the rows."""
        self._clock.enter("score")
        pieces = self._maker.make(groups, global_size)
        order = [
            [number for number, piece in enumerate(pieces) if piece.block == name] for name, _ in self._blocks
        ]
        blocks = [
            _block([pieces[number] for number in numbers], dim)
            for numbers, (_, dim) in zip(order, self._blocks)
        ]
        loss, gradients = self._candidates.run(blocks)
        self._clock.enter("backward")
        # Blocks group pieces by table; the gradients go back in the order in which the maker returned the
        # pieces.
        of_pieces = [torch.empty(0)] * len(pieces)
        for numbers, of_block in zip(order, gradients):
            parts = of_block.split([len(pieces[number].keys) for number in numbers])
            for number, part in zip(numbers, parts):
                of_pieces[number] = part
        loss += self._maker.take_back(of_pieces)
        return loss * global_size

    @property
    def sent_bytes(self) -> int:
        """Bytes that this trainer sent to other machines."""
        return self._candidates.sent_bytes

    def dense_gradients(self) -> list[tuple[Any, torch.Tensor, torch.Tensor]]:
        """Return (embedding, node ids, gradients) of the candidates that this trainer owns."""
        return self._candidates.gradients()


def _block(pieces: Sequence[Piece], dim: int) -> QueryBlock:
    """Put the queries of one block together."""
    if not pieces:
        return QueryBlock(np.empty((0, dim), np.float32), np.empty(0, np.int64), np.empty(0, np.float32))
    # Detached: the gradients of the queries come back as numbers, and take_back starts autograd from them.
    queries = [piece.queries.detach() for piece in pieces]
    return QueryBlock(
        (queries[0] if len(queries) == 1 else torch.cat(queries)).cpu().numpy(),
        np.concatenate([piece.keys for piece in pieces]),
        np.concatenate([piece.factors for piece in pieces]),
    )
