"""Queries of edges that are compared by inner products, and the gradients of their rows.

Between the two, :class:`DotSoftmax` takes three matmuls and the loop of the loss. DistMult and ComplEx have
compiled loops for both; every other product of an entity and its relation (Keci, SimplE, QuatE, a
user's) is differentiated by torch, which costs B·D numbers and not B·N.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dglkge.kernels import dot
from dglkge.model.functions.autograd import words
from dglkge.model.kge_model import KgeModel
from dglkge.model.regularizers import Regularizer
from dglkge.optim import workspace
from dglkge.step.contracts import Rows
from dglkge.step.planning import Group, Places
from dglkge.typing import Floats, Ids, Side

Addresses = tuple[Ids, ...]
"""Addresses of rows, or of gradients, of edges: of heads, tails and relations, (B,) each."""


@dataclass(frozen=True)
class QueryRuns:
    """Which rows of an array hold the queries of some groups: by group those of its tails, and of its
    heads.
    """

    groups: Sequence[Group]
    runs: Sequence[Mapping[Side, slice]]

    @functools.cached_property
    def places(self) -> tuple[Ids, Ids]:
        """The row of the tail query and that of the head query of each edge, (B,) of all groups."""
        tails, heads = (
            np.concatenate([np.arange(runs[side].start, runs[side].stop) for runs in self.runs])
            for side in (Side.TAIL, Side.HEAD)
        )
        return tails, heads

    def edges(self) -> Iterator[slice]:
        """Yield the place of each group's edges among those of all."""
        start = 0
        for group in self.groups:
            yield slice(start, start + len(group))
            start += len(group)


@dataclass
class EdgePenalty:
    """Adds the gradients of the queries' penalties to those of the rows of edges.

    ``n3`` is the weight of N3 in the loop that writes the gradients (``kernels.dot.write_gradients``), where
    the regularizer is just that; the methods then add nothing. The loops compute both sides.
    """

    model: KgeModel
    regularizer: Regularizer | None
    sides: Collection[Side] = tuple(Side)

    def __post_init__(self) -> None:
        self._operator = (self.model.score_function.complex_valued, self.model.reciprocal)
        regularizer = self.regularizer if len(self.sides) == len(Side) else None
        weights = regularizer.loop_weights if regularizer is not None and regularizer.compiled else None
        self._weights = weights
        self.n3 = np.float32(0)
        if weights is not None and weights.power == 3 and weights.entity == 2 * weights.relation:
            self.n3, self.regularizer = np.float32(weights.relation), None

    def add(self, rows: Addresses, factors: Floats, gradients: Addresses) -> float:
        """Add the gradients of some edges (b,), each times its factor; returns the summed penalty.

        It is 0 if the regularizer has no loop.
        """
        if self.regularizer is None or self._weights is None:
            return 0.0
        power, *weights = self._weights
        options = (self._operator, self.model.dim, factors, power, tuple(map(np.float32, weights)))
        return dot.add_penalties(rows, *options, gradients)

    def add_without_loop(self, queries: QueryRuns, rows: Rows, factors: Floats) -> float:
        """Add the gradients of all edges (B,), if the regularizer has no loop; returns the summed penalty."""
        if self.regularizer is None or self._weights is not None:
            return 0.0
        return sum(
            self._by_autograd(self.regularizer, group, rows, factors[run])
            for group, run in zip(queries.groups, queries.edges())
        )

    def _by_autograd(self, regularizer: Regularizer, group: Group, rows: Rows, factors: Floats) -> float:
        """Add the gradients of a regularizer that has no loop."""
        places = (group.heads, group.relations, group.tails)
        leaves = [rows.in_place(place).copied().requires_grad_() for place in places]
        heads, relations, tails = leaves
        entities = {Side.TAIL: (heads, tails), Side.HEAD: (tails, heads)}
        penalties = [
            regularizer.penalties(self.model, anchors, relations, truths, side)
            for side, (anchors, truths) in entities.items()
            if side in self.sides
        ]
        total = (sum(penalties[1:], penalties[0]) * torch.from_numpy(factors)).sum()
        total.backward()
        for place, leaf in zip(places, leaves):
            if leaf.grad is not None:
                rows.gradients(place).add_(leaf.grad)
        return total.item()


def _parts(arrays: Addresses, part: slice) -> Addresses:
    """Return a part of each of some arrays."""
    return arrays if part is workspace.WHOLE else tuple(array[part] for array in arrays)


class CompiledQueries:
    """Queries of both sides of the edges of some groups, of DistMult and ComplEx, by ``kernels.dot``.

    Rows are read where they lie.
    """

    def __init__(self, model: KgeModel, penalty: EdgePenalty, queries: QueryRuns, rows: Rows) -> None:
        self._operator = (model.score_function.complex_valued, model.reciprocal)
        # An address says nothing of the array that it is in, so the rows are kept alive.
        self._penalty, self._queries, self._rows = penalty, queries, rows
        places = list(zip(*((group.heads, group.tails, group.relations) for group in queries.groups)))
        # Of heads, tails and relations, (B,) each.
        self._addresses, self._gradients = zip(*map(rows.addresses, places))
        self._places = queries.places
        # Numbers of an edge: those of its head, its tail and its relation.
        self._width = 2 * model.dim + model.relation_width

    def write(self, queries: Tensor, positive: np.ndarray, own_scores: np.ndarray) -> None:
        """Write the queries (Q, D), and the scores (Q,) of their true answers and own entities."""
        operand = words(queries)

        def make(part: slice) -> None:
            rows, places = _parts(self._addresses, part), _parts(self._places, part)
            dot.make_queries(rows, self._operator, places, operand, positive, own_scores)

        workspace.split(len(self._places[0]), self._width, make)

    def differentiate(
        self, query_gradients: Tensor, missing: np.ndarray, own_shares: np.ndarray, factors: np.ndarray
    ) -> float:
        """Write the gradients of the groups' rows; returns the summed penalty, each edge's times its factor
        (B,).

        ``query_gradients`` (Q, D) is the contribution of the negatives to the gradients of the queries;
        ``missing`` and ``own_shares`` (Q,) are the gradients of the scores of the true answers and of the own
        entities.
        """
        operand, shares = words(query_gradients), (missing, own_shares)

        def write(part: slice) -> float:
            rows, places = _parts(self._addresses, part), _parts(self._places, part)
            gradients, n3 = _parts(self._gradients, part), self._penalty.n3
            options = (rows, self._operator, places, operand, shares, factors[part], n3, gradients)
            return dot.write_gradients(*options) + self._penalty.add(rows, factors[part], gradients)

        penalty = float(sum(workspace.split(len(factors), self._width, write)))
        return penalty + self._penalty.add_without_loop(self._queries, self._rows, factors)


class DifferentiatedQueries:
    """The same of any model that compares by inner products, differentiated by torch."""

    def __init__(
        self, model: KgeModel, regularizer: Regularizer | None, queries: QueryRuns, rows: Rows
    ) -> None:
        self._model, self._regularizer, self._queries, self._rows = model, regularizer, queries, rows
        # Rows of edges; by run of queries these and their scores; by run of edges penalties of a group.
        self._leaves: list[tuple[Places, Tensor]] = []
        self._outputs: list[tuple[slice, tuple[Tensor, Tensor, Tensor]]] = []
        self._penalties: list[tuple[slice, list[Tensor]]] = []

    def write(self, queries: Tensor, positive: np.ndarray, own_scores: np.ndarray) -> None:
        """As of :class:`CompiledQueries`."""
        model = self._model
        for group, runs, edges in zip(self._queries.groups, self._queries.runs, self._queries.edges()):
            places = (group.heads, group.relations, group.tails)
            leaves = [self._rows.in_place(place).copied().requires_grad_() for place in places]
            self._leaves += zip(places, leaves)
            heads, relations, tails = leaves
            penalties: list[Tensor] = []
            for side, run in runs.items():
                if side not in group.negatives:
                    # What such a side holds is multiplied by 0.
                    queries[run] = 0
                    positive[run] = own_scores[run] = 0
                    continue
                anchors, truths = (heads, tails) if side is Side.TAIL else (tails, heads)
                query = model.query(anchors, relations, side)
                true, own_score = model.compare_pairs(query, truths), model.compare_pairs(query, anchors)
                self._outputs.append((run, (query, true, own_score)))
                queries[run] = query.detach()
                positive[run], own_scores[run] = true.detach().numpy(), own_score.detach().numpy()
                if self._regularizer is not None:
                    triples = (anchors, relations, truths)
                    penalties.append(self._regularizer.penalties(model, *triples, side, query))
            self._penalties.append((edges, penalties))

    def differentiate(
        self, query_gradients: Tensor, missing: np.ndarray, own_shares: np.ndarray, factors: np.ndarray
    ) -> float:
        """As of :class:`CompiledQueries`."""
        outputs: list[Tensor] = []
        slopes: list[Tensor] = []
        for run, tensors in self._outputs:
            outputs += tensors
            slopes += [query_gradients[run].float(), *map(torch.from_numpy, (missing[run], own_shares[run]))]
        penalty = 0.0
        for edges, penalties in self._penalties:
            weights = torch.from_numpy(factors[edges])
            outputs += penalties
            slopes += [weights] * len(penalties)
            penalty += float(sum(float(part.detach().double() @ weights.double()) for part in penalties))
        gradients = torch.autograd.grad(outputs, [leaf for _, leaf in self._leaves], slopes)
        for (places, _), gradient in zip(self._leaves, gradients):
            self._rows.gradients(places).copy_(gradient)
        return penalty
