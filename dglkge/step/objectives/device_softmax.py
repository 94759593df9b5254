"""Softmax of inner products on a device: over negatives that are drawn there, or all candidates.

Over negatives: the numbers of :class:`AutogradLoss`, for all chunks of a batch at once. Scores become shares
of the negatives in their own sum, and gradients are products with these shares: what a query has besides is a
factor of its row,

    loss_i = log(e^{p_i} + sum_j e^{s_ij}) - p_i,    d loss_i / d s_ij = w_i share_ij,
    share_ij = e^{s_ij - l_i},  l_i = log sum_j e^{s_ij},  w_i = e^{l_i - log(e^{p_i} + e^{l_i})},

and it is multiplied to the query's gradient, and to the query in those of the negatives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dglkge.model.full_losses import GREATEST, TARGET, TOTAL, AnswerScores, Totals
from dglkge.model.kge_model import KgeModel
from dglkge.model.negative_terms import IGNORED_SCORE
from dglkge.model.regularizers import Regularizer
from dglkge.planning.memory import KEPT_SHARES
from dglkge.sampling.device_batches import ChunkNegatives, DeviceBatch
from dglkge.step import reductions
from dglkge.step.contracts import Computation, Gradients, Objective, Rows
from dglkge.step.objectives.shard_objective import Answers, AutogradShard, ShardNumbers, runs_of
from dglkge.step.planning import Places, Plan, PlannedGroup, number_of
from dglkge.step.reductions import ChunkedScores, differentiate_chunks, share_scores, sum_by_place
from dglkge.typing import RELATION, Floats, Side

NO_IDS = np.empty(0, np.int64)
"""Ids of places on a device: they are in the plan alone."""


class AllEntities:
    """All entities of the type as the negatives of one chunk: the whole batch."""

    def __init__(self, node_ids: Tensor) -> None:
        self._node_ids = node_ids[None]

    def sample(self, epoch: int, batch: int, num_chunks: int) -> Tensor:
        """Return the node ids (1, N)."""
        return self._node_ids


class Comparison(NamedTuple):
    """Queries (B,) of one kind, ``chunk_size`` in a chunk, and the candidates (C * N,) of their chunks.

    ``ids`` (C, N) are numbers of the candidates, int32, ``answers`` (B,) those of the answers; ``factors``
    (B,) are those of the losses.
    """

    candidates: Places
    ids: Tensor
    answers: Tensor
    factors: Tensor
    chunk_size: int


@dataclass(frozen=True)
class ChunkedGroup(PlannedGroup):
    """All edges of a batch; ``is_loop`` (B,): head and tail are the same entity."""

    heads: Places
    relations: Places
    tails: Places
    is_loop: Tensor
    comparisons: list[Comparison]


Scored = tuple[Tensor, Tensor, Tensor | None]
"""Queries (B, D), scores of single pairs (1 or 2, B) and penalties (B,) of a comparison."""


@dataclass
class DeviceSoftmax(Objective):
    """Losses of batches on a device against negatives or all entities, and their gradients.

    There is one entity type. The samplers are of the sides that are trained. ``own_entity``: the query's own
    entity is one negative more. ``sums_batch``: train the sum over a global batch instead of its mean.
    ``relation_weight`` is that of the queries (h, ?, t) against all ``relation_ids`` (R,), 0: none.
    """

    entity_type: str
    samplers: Mapping[Side, ChunkNegatives | AllEntities]
    chunk_size: int
    model: KgeModel
    regularizer: Regularizer | None
    own_entity: bool
    sums_batch: bool
    computation: Computation
    relation_ids: Tensor
    relation_weight: float

    reads_in_place = False
    sent_bytes = 0

    def __post_init__(self) -> None:
        # Not the mapping: torch.compile does not look up members of an Enum.
        self._sides = tuple(self.samplers)
        compiles = self.computation.is_compiled
        self._scored = torch.compile(self._score, fullgraph=True) if compiles else self._score

    def plan(self, batch: DeviceBatch) -> Plan:
        num_chunks = -(-len(batch) // self.chunk_size)
        pieces: list[Tensor] = []

        def ask(ids: Tensor) -> Places:
            start = sum(map(len, pieces))
            pieces.append(ids)
            return Places(self.entity_type, slice(start, start + len(ids)), NO_IDS)

        heads, tails = ask(batch.heads), ask(batch.tails)
        # Sides with the same sampler share their negatives.
        distinct = dict.fromkeys(self.samplers.values())
        drawn = {sampler: sampler.sample(batch.epoch, batch.index, num_chunks) for sampler in distinct}
        places = {sampler: ask(chunk_ids.view(-1)) for sampler, chunk_ids in drawn.items()}
        divisor = 1 if self.sums_batch else len(batch)
        factors = torch.full((len(batch),), 1 / divisor, device=batch.heads.device)
        if batch.weights is not None:
            factors *= batch.weights
        # One device holds all rows: their ids fit into 32 bits.
        ids = {sampler: chunk_ids.int() for sampler, chunk_ids in drawn.items()}
        answers = {Side.HEAD: batch.heads.int(), Side.TAIL: batch.tails.int()}
        comparisons = [
            Comparison(places[sampler], ids[sampler], answers[side], factors, self.chunk_size)
            for side, sampler in self.samplers.items()
        ]
        node_ids = {self.entity_type: torch.cat(pieces), RELATION: batch.relations}
        if self.relation_weight:
            node_ids[RELATION] = torch.cat([batch.relations, self.relation_ids])
            comparisons += self._relation_comparisons(batch.relations, factors)
        relations = Places(RELATION, slice(0, len(batch)), NO_IDS)
        group = ChunkedGroup(heads, relations, tails, batch.heads == batch.tails, comparisons)
        return Plan(number_of(batch), divisor, node_ids, [group])

    def _relation_comparisons(self, relations: Tensor, factors: Tensor) -> list[Comparison]:
        """Return the comparisons of the queries (h, ?, t), and (t, ?, h) for reciprocal relations."""
        num, num_directions = len(relations), 1 + self.model.reciprocal
        candidates = Places(RELATION, slice(num, num + len(self.relation_ids)), NO_IDS)
        # Both directions are side by side in a row. Without them one query has twice the factor.
        ids = torch.arange(len(self.relation_ids) * num_directions, device=relations.device).int()[None]
        first = (relations - self.relation_ids[0]) * num_directions
        factors = factors * (self.relation_weight * 2 / num_directions)
        return [
            Comparison(candidates, ids, (first + direction).int(), factors, num)
            for direction in range(num_directions)
        ]

    def gradients(self, plan: Plan, rows: Rows) -> Callable[[], Gradients]:
        self.computation.clock.enter("score")
        (group,) = plan.groups
        heads, relations, tails = map(rows.leaf, (group.heads, group.relations, group.tails))
        scored = self._scored(heads, relations, tails, group.is_loop)
        loss = torch.zeros((), device=heads.device)
        outputs, outer = [], []
        for comparison, (query, pairs, penalty) in zip(group.comparisons, scored):
            losses, *gradients = self._compare(comparison, query.detach(), pairs.detach(), rows)
            outputs += [query, pairs]
            outer += gradients
            if penalty is not None:
                losses += penalty.detach()
                outputs.append(penalty)
                outer.append(comparison.factors)
            loss += losses @ comparison.factors
        torch.autograd.backward(outputs, outer)

        def finish() -> Gradients:
            self.computation.clock.enter("backward")
            return Gradients(loss * plan.divisor)

        return finish

    def _score(self, heads: Tensor, relations: Tensor, tails: Tensor, is_loop: Tensor) -> list[Scored]:
        """Score the queries of each comparison.

        The pairs are those with the true answers, and with the own entities. A function of tensors, which
        ``torch.compile`` fuses.
        """
        scored = []
        for side in self._sides:
            anchors, truths = (heads, tails) if side is Side.TAIL else (tails, heads)
            query = self.model.query(anchors, relations, side)
            pairs = [self.model.compare_pairs(query, truths)]
            if self.own_entity:
                own_scores = self.model.compare_pairs(query, anchors)
                pairs.append(own_scores.masked_fill(is_loop, IGNORED_SCORE))
            penalty = None
            if self.regularizer is not None:
                penalty = self.regularizer.penalties(self.model, anchors, relations, truths, side, query)
            scored.append((query, torch.stack(pairs), penalty))
        if self.relation_weight:
            directions = relations.chunk(1 + self.model.reciprocal, dim=1)
            for (anchors, truths), true in zip(((heads, tails), (tails, heads)), directions):
                query = self.model.relation_query(anchors, truths)
                scored.append((query, (query * true).sum(1)[None], None))
        return scored

    def _compare(
        self, comparison: Comparison, query: Tensor, pairs: Tensor, rows: Rows
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compare queries (B, D) with the candidates of their chunks, and add the gradients of these.

        ``pairs`` (1 or 2, B) are the scores of the true answers, and of the own entities. Returns losses
        (B,), the gradients of the queries from the candidates, and those of the pairs.
        """
        shape = (*comparison.ids.shape, query.shape[1])
        candidates = rows.leaf(comparison.candidates).detach().view(shape)
        candidate_gradients = rows.gradients(comparison.candidates).view(shape)
        losses, pair_gradients = map(torch.empty_like, (pairs[0], pairs))

        def weigh(run: slice, logs: Tensor) -> Tensor:
            scores, factors = pairs[:, run], comparison.factors[run]
            totals = torch.cat([scores, logs[None]]).logsumexp(0)
            losses[run] = totals - scores[0]
            pair_gradients[:, run] = (scores - totals).exp() * factors
            return (logs - totals).exp() * factors

        chunks = ChunkedScores(query, candidates, comparison.answers, comparison.ids, comparison.chunk_size)
        dtype = self.computation.matmul_dtype
        query_gradients = differentiate_chunks(chunks, dtype, weigh, candidate_gradients)
        pair_gradients[0] -= comparison.factors
        return losses, query_gradients, pair_gradients


class Panel(NamedTuple):
    """Consecutive rows (w, D) of a shard in the type of the products, with the shares (Q, w) of their scores
    in the sum of powers of the panel, and the logarithm of each query's sum (Q,). Rows of 0 with shares of 0
    follow those of ``run``.
    """

    run: slice
    rows: Tensor
    shares: Tensor
    logs: Tensor


@dataclass
class DeviceSoftmaxShard(AutogradShard):
    """Scores and gradients by three matrix products and one pass over the scores; see :class:`AutogradShard`.

    Shares are those of a panel alone; a query's factor for each panel follows once all are known.
    """

    @torch.no_grad()
    def score(self, queries: Tensor, rows: Tensor, answers: Answers, scores: AnswerScores) -> ShardNumbers:
        self._panels: list[Panel] = []
        if not 0 < len(queries) * len(rows) <= KEPT_SHARES:
            return super().score(queries, rows, answers, scores)
        queries = self._queries = queries.to(rows.device)
        self._rows = rows
        places, query_of = map(self._there, map(torch.from_numpy, (answers.places, answers.query_of)))
        keep = 1 - self.objective.label_smoothing
        labels = self._there(torch.from_numpy((keep * answers.shares).astype(np.float32)))
        true = (queries[query_of] * rows[places]).sum(1)
        self._answer_tensors = places, query_of, labels, true
        operand = queries.to(self._dtype)
        for run in runs_of(len(rows), reductions.MOST_COLUMNS):
            width = run.stop - run.start
            # Products of a width that is no multiple of 8 take four times as long.
            candidates = rows.new_zeros(-(-width // 8) * 8, rows.shape[1], dtype=self._dtype)
            candidates[:width] = rows[run]
            powers = operand @ candidates.T
            powers[:, width:] = IGNORED_SCORE
            self._ignore_answers(powers, run)
            self._panels.append(Panel(run, candidates, powers, share_scores(powers)))
        return ShardNumbers(self._numbers().cpu().numpy())

    def _ignore_answers(self, scores: Tensor, run: slice) -> None:
        """Overwrite the scores (Q, w) of answers among the rows of a panel, which are added by themselves."""
        places, query_of, *_ = self._answer_tensors
        if run != slice(0, len(self._rows)):
            here = (places >= run.start) & (places < run.stop)
            places, query_of = places[here] - run.start, query_of[here]
        scores[query_of, places] = IGNORED_SCORE

    def _numbers(self) -> Tensor:
        """Return the numbers (3, Q) of this shard."""
        _, query_of, labels, true = self._answer_tensors
        queries, num = self._queries, len(self._queries)
        logs = torch.stack([panel.logs for panel in self._panels])
        numbers = queries.new_full((3, num), IGNORED_SCORE)
        greatest = numbers[GREATEST].scatter_reduce_(0, query_of, true, "amax")
        torch.maximum(greatest, logs.amax(0), out=greatest)
        both = torch.stack([(true - greatest[query_of]).exp(), labels * true], 1)
        powers, targets = sum_by_place(both, query_of, num).T
        numbers[TOTAL] = (logs - greatest).exp().sum(0) + powers
        numbers[TARGET] = targets
        if self.objective.background:
            self._sum_of_rows = self._rows.sum(0)
            numbers[TARGET] += self.objective.background * (queries @ self._sum_of_rows)
        return numbers

    @torch.no_grad()
    def differentiate(
        self, totals: Totals, factors: Floats, query_gradients: Tensor, row_gradients: Tensor
    ) -> None:
        if not self._panels:
            with torch.enable_grad():
                super().differentiate(totals, factors, query_gradients, row_gradients)
            return
        places, query_of, labels, true = self._answer_tensors
        queries, weights = self._queries, self._there(torch.from_numpy(factors))
        normalizers = self._there(torch.from_numpy(totals.normalizers.astype(np.float32)))
        answer_gradients = weights[query_of] * ((true - normalizers[query_of]).exp() - labels)
        gradients = sum_by_place(answer_gradients[:, None] * self._rows[places], query_of, len(queries))
        for panel in self._panels:
            scales = (weights * (panel.logs - normalizers).exp())[:, None]
            gradients += scales * (panel.shares @ panel.rows)
            products = panel.shares.T @ (scales * queries).to(self._dtype)
            row_gradients[panel.run] = products[: panel.run.stop - panel.run.start]
        row_gradients += sum_by_place(answer_gradients[:, None] * queries[query_of], places, len(self._rows))
        if self.objective.background:
            gradients.addr_(weights, self._sum_of_rows, alpha=-self.objective.background)
            row_gradients.sub_(self.objective.background * (weights @ queries))
        query_gradients.copy_(gradients)
        self._panels = []
