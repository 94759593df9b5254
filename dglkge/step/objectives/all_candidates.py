"""Queries of a global batch against all candidates of some tables, sharded over the trainers.

Each trainer holds a shard of every table: its share of its machine's rows. It scores the queries of all
trainers against its shards (:mod:`.shard_objective`); what the shards find is put together by
:class:`QueryExchange`. Gradients of candidate rows stay where the rows are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from dglkge.embeddings.embedding_table import EmbeddingTable
from dglkge.model.full_losses import NO_ANSWERS, AnswerScores, Totals
from dglkge.model.kge_model import KgeModel
from dglkge.model.regularizers import Regularizer
from dglkge.optim.narrow_rows import is_narrow
from dglkge.optim.workspace import Scratch
from dglkge.step.contracts import Gradients, Objective, PhaseClock, RowGradients, Rows
from dglkge.step.objectives.query_exchange import QueryBlock, QueryExchange
from dglkge.step.objectives.shard_objective import Answers, ShardObjective
from dglkge.step.planning import Plan
from dglkge.step.rows import Transforms
from dglkge.typing import Floats, Ids, Side


@dataclass(frozen=True)
class Candidates:
    """Candidates that the queries of a table are compared with, as one trainer holds them.

    Attributes
    ----------
    table : EmbeddingTable
    first, stop : int
        Run of node ids that this trainer owns.
    candidates_a_row : int
        Candidates that are side by side in a row: both directions of reciprocal relations, else 1.
    shard : ShardObjective
    answers_of : callable
        Returns the answers among the owned rows of queries with some keys.
    resident : callable or None
        Returns the owned rows where they are on a device; their gradients are left there.
    num_times : int
        Times that each row is of; as a candidate it is that at the first one.
    """

    table: EmbeddingTable
    first: int
    stop: int
    candidates_a_row: int
    shard: ShardObjective
    answers_of: Callable[[Ids], Answers]
    resident: Callable[[], Tensor] | None = None
    num_times: int = 1

    def each(self, rows: Tensor) -> Tensor:
        """Return the candidates of rows (R, D), one below the other."""
        each = self.candidates_a_row
        return rows.view(len(rows) * each, rows.shape[1] // each)

    @property
    def ids(self) -> Tensor:
        """Ids (R,) of the owned rows, as transforms and the optimizer take them."""
        return torch.arange(self.first, self.stop) * self.num_times

    @property
    def stored(self) -> Tensor:
        """Owned rows, (R, D) as they are stored: a view on shared memory, or on a device.

        Their gradients are left on the same device.
        """
        if self.resident is not None:
            return self.resident()
        start = self.table.first_node_id
        return self.table.local_rows[self.first - start : self.stop - start]


def of_directions(answers_of: Callable[[Ids], Answers]) -> Callable[[Ids], Answers]:
    """Return the function for keys that are doubled, plus 1 for the second direction of reciprocal relations.

    The two directions of a relation are side by side in its row.
    """

    def of_doubled(keys: Ids) -> Answers:
        answers = answers_of(keys // 2)
        return replace(answers, places=2 * answers.places + (keys % 2)[answers.query_of])

    return of_doubled


def only_answers(first: int, stop: int, num_times: int = 1) -> Callable[[Ids], Answers]:
    """Return a function from keys of queries to answers; a key is the only answer's node id, at a time."""

    # A key outside the owned run belongs to another shard: here the query then has no answers.
    def answers_of(keys: Ids) -> Answers:
        keys = keys // num_times
        is_here = (keys >= first) & (keys < stop)
        starts, places = np.append(0, np.cumsum(is_here)), keys[is_here] - first
        return Answers(starts, places, np.ones(len(places), np.float32))

    return answers_of


class _Scored(NamedTuple):
    """A block of queries with the candidates and answers of this trainer's shard."""

    number: int
    block: QueryBlock
    candidates: Candidates
    rows: Tensor
    answers: Answers


class Piece(NamedTuple):
    """Queries (q, D) of one group, with keys (q,) and factors (q,), and the table of their candidates."""

    table: str
    queries: Tensor
    keys: Ids
    factors: Floats


TakeBack = Callable[[Sequence[Tensor]], float]
"""Writes the gradients of the rows, given those of each piece's queries; returns the penalty."""


class QueryMaker(Protocol):
    """Computes queries from rows, and the gradients of the rows from those of the queries.

    ``reads_in_place``: rows are read where they are stored, otherwise they must have been copied.
    ``shares_relations``: groups hold the row of each relation once.
    """

    reads_in_place: bool
    shares_relations: bool

    def make(self, plan: Plan, rows: Rows) -> tuple[list[Piece], TakeBack]:
        """Return all queries of a batch's groups, and what takes their gradients back to the rows."""


class QueryOptions(NamedTuple):
    """What queries are made of.

    ``relation_weight`` is that of the queries (h, ?, t), 0: none; ``shares_relations``: groups may hold the
    row of each relation once; ``has_loops``: compiled loops may be used; ``is_compiled``: by torch.compile.
    """

    model: KgeModel
    regularizer: Regularizer | None
    relation_weight: float
    shares_relations: bool
    has_loops: bool
    is_compiled: bool


class ModelQueries(QueryMaker):
    """Queries and penalties of any model, by autograd: what its kinds share."""

    reads_in_place = False

    def __init__(self, options: QueryOptions) -> None:
        self.shares_relations = options.shares_relations
        self._model, self._regularizer = options.model, options.regularizer
        self._relation_weight = options.relation_weight
        # For any number of rows; each side is compiled by itself.
        self._made = torch.compile(self._make, dynamic=True) if options.is_compiled else self._make

    def _make(
        self, side: Side, anchors: Tensor, relations: Tensor, *more: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return queries (n, D), and their penalties (n,) if there is a regularizer.

        Besides: the rows of the answers, the ids of the relations, and their places if they are shared.
        """
        answers, ids, places = more
        query = self._model.query(anchors, relations, side, ids, places)
        if self._regularizer is None:
            return query, None
        rows = (anchors, relations, answers)
        return query, self._regularizer.penalties(self._model, *rows, side, query, places)


@dataclass
class CandidateLoss(Objective):
    """Losses and gradients of a batch's groups against all candidates; a collective.

    Attributes
    ----------
    planner : EdgePlanner or QueryPlanner
    maker : QueryMaker
    blocks : mapping of str to int
        Width of the queries for each table, in the order of the candidates.
    candidates : sequence of Candidates
        One of each table, the same tables on every trainer.
    exchange : QueryExchange
    clock : PhaseClock
    transforms : Transforms
        Of the rows of the candidates, whose gradients are returned as those of transformed rows.
    regularizer : Regularizer, optional
        Penalty on answers that state their share in it.
    """

    planner: Any
    maker: QueryMaker
    blocks: Mapping[str, int]
    candidates: Sequence[Candidates]
    exchange: QueryExchange
    clock: PhaseClock
    transforms: Transforms
    regularizer: Regularizer | None = None

    def __post_init__(self) -> None:
        self.reads_in_place = self.maker.reads_in_place
        self._scratch_of = {torch.device("cpu"): Scratch()}
        self._owned = {shard.table.name: shard.ids for shard in self.candidates}

    @property
    def sent_bytes(self) -> int:
        return self.exchange.sent_bytes

    def plan(self, batch: Any) -> Plan:
        return self.planner.plan(batch, self.maker.shares_relations)

    def gradients(self, plan: Plan, rows: Rows) -> Callable[[], Gradients]:
        # Collectives of the host would interrupt a device in any case.
        return lambda: self._compute(plan, rows)

    def _compute(self, plan: Plan, rows: Rows) -> Gradients:
        """Write the gradients of a batch's rows."""
        self.clock.enter("score")
        pieces, take_back = self.maker.make(plan, rows)
        of_table = {name: [piece for piece in pieces if piece.table == name] for name in self.blocks}
        blocks = [_block(of_table[name], dim) for name, dim in self.blocks.items()]
        loss, gradients, row_gradients = self._run(blocks)
        self.clock.enter("backward")
        # Blocks group pieces by table; the gradients go back in the order in which the maker returned the
        # pieces.
        parts = {
            name: iter(gradient.split([len(piece.keys) for piece in of_table[name]]))
            for name, gradient in zip(of_table, gradients)
        }
        loss += take_back([next(parts[piece.table]) for piece in pieces])
        return Gradients(loss * plan.divisor, row_gradients)

    def _run(self, blocks: Sequence[QueryBlock]) -> tuple[float, list[Tensor], list[RowGradients]]:
        """Return losses and gradients of this trainer's queries, and gradients of candidates.

        The loss is of this trainer's queries, each times its factor; gradients of queries (q, D) are of each
        block, those of rows of all that this trainer owns. A table whose rows were no candidate is absent.
        """
        self.clock.enter("exchange")
        gathered = self.exchange.gather(blocks)
        self.clock.enter("score")
        scored: list[_Scored] = []
        for number, (block, candidates) in enumerate(zip(gathered, self.candidates)):
            # Counts were gathered, so a block is empty on all trainers or on none: rounds of messages stay
            # paired.
            if len(block):
                rows, answers = candidates.each(self._rows(candidates)), candidates.answers_of(block.keys)
                scored.append(_Scored(number, block, candidates, rows, answers))
        answer_scores = self._answer_scores(scored)
        numbers = [
            block.candidates.shard.score(block.block.queries, block.rows, block.answers, scores)
            for block, scores in zip(scored, answer_scores)
        ]
        self.clock.enter("exchange")
        shared = iter(self.exchange.share([array for pair in numbers for array in pair]) if numbers else [])
        totals = [
            block.candidates.shard.objective.loss.totals(next(shared), next(shared), scores)
            for block, scores in zip(scored, answer_scores)
        ]
        self.clock.enter("backward")
        parts = [
            self._memory(block.queries.device).take(f"query gradients~{number}", *block.queries.shape)
            for number, block in enumerate(gathered)
        ]
        loss, row_gradients = self._differentiate(scored, totals, parts)
        self.clock.enter("exchange")
        return loss, self.exchange.return_gradients(parts), row_gradients

    def _answer_scores(self, scored: Sequence[_Scored]) -> list[AnswerScores]:
        """Return the scores of the answers on all shards, if their one loss reads them."""
        if not scored or not scored[0].candidates.shard.objective.loss.reads_answers:
            return [NO_ANSWERS] * len(scored)
        pairs = []
        for block in scored:
            scores = block.candidates.shard.score_answers(block.block.queries, block.rows, block.answers)
            pairs.append((block.answers.query_of, scores))
        self.clock.enter("exchange")
        gathered = self.exchange.gather_answers(pairs)
        self.clock.enter("score")
        return gathered

    def _rows(self, candidates: Candidates) -> Tensor:
        """Return the owned rows of a table as float32 and transformed: as they are stored, or a copy."""
        table, stored = candidates.table, candidates.stored
        if table.name not in self.transforms and not is_narrow(table.local_rows):
            return stored
        copy = self._memory(stored.device).take(f"copy~{table.name}", len(stored), table.dim)
        if candidates.resident is None:
            start = candidates.first - table.first_node_id
            table.widened(np.arange(start, start + len(stored)), copy)
        else:
            copy.copy_(stored)
        self.transforms.forward(table.name, self._owned[table.name], copy)
        return copy

    def _differentiate(
        self, scored: Sequence[_Scored], totals: Sequence[Totals], parts: Sequence[Tensor]
    ) -> tuple[float, list[RowGradients]]:
        """Write this shard's part of the queries' gradients; returns the loss and the gradients of rows."""
        gradients, loss = [], 0.0
        for block, total in zip(scored, totals):
            candidates, factors = block.candidates, block.block.factors
            table, size = candidates.table, (candidates.stop - candidates.first, candidates.table.dim)
            rows = self._memory(candidates.stored.device).take(f"dense~{table.name}", *size)
            gradients.append(RowGradients(table.name, self._owned[table.name], rows))
            row_gradients = candidates.each(rows)
            candidates.shard.differentiate(total, factors, parts[block.number], row_gradients)
            loss += self._penalize(block.rows, block.answers, factors, row_gradients)
            # Every trainer computes all gradients of its shard, but counts only the loss of its own queries:
            # losses are summed over trainers.
            run = self.exchange.own_run(block.number)
            loss += float((total.losses[run] * factors[run]).sum())
        return loss, gradients

    def _penalize(self, rows: Tensor, answers: Answers, factors: Floats, row_gradients: Tensor) -> float:
        """Add the gradients of the penalty on the answers among the owned rows; returns it."""
        if self.regularizer is None or answers.penalty_shares is None:
            return 0.0
        shares = factors[answers.query_of] * answers.penalty_shares
        # One row may answer several queries: its penalty is taken once, with the sum of their shares.
        weights = np.bincount(answers.places, weights=shares, minlength=len(rows))
        answering = torch.from_numpy(np.flatnonzero(weights))
        row_weights = torch.from_numpy(weights).float()[answering].to(row_gradients.device)
        answering = answering.to(row_gradients.device)
        leaf = rows[answering].requires_grad_()
        penalty = (self.regularizer(leaf) * row_weights).sum()
        if len(answering):
            (gradients,) = torch.autograd.grad(penalty, leaf)
            row_gradients.index_add_(0, answering, gradients)
        return penalty.item()

    def _memory(self, device: torch.device) -> Scratch:
        """Return memory on a device."""
        return self._scratch_of.setdefault(device, Scratch(device))


def _block(pieces: Sequence[Piece], dim: int) -> QueryBlock:
    """Put the queries of one block together."""
    if not pieces:
        return QueryBlock(torch.empty(0, dim), np.empty(0, np.int64), np.empty(0, np.float32))
    # Detached: the gradients of the queries come back as numbers, and take_back starts autograd from them.
    queries = [piece.queries.detach() for piece in pieces]
    return QueryBlock(
        queries[0] if len(queries) == 1 else torch.cat(queries),
        np.concatenate([piece.keys for piece in pieces]),
        np.concatenate([piece.factors for piece in pieces]),
    )
