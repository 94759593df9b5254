"""Loss of edges against all entities of the answer's type, and relation prediction beside it.

Of each edge, (h, r, ?) is scored against every possible tail and (?, r, t) against every possible head.
Relation prediction (Chen et al. 2021, "Relation prediction as an auxiliary training objective for improving
multi-relational graph representations") adds (h, ?, t) against all relations, times a weight.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from dglkge.kernels import dot as dot_kernels
from dglkge.model.kge_model import KgeModel
from dglkge.model.regularizers import Regularizer
from dglkge.training.all_candidates import Piece
from dglkge.training.rows import Group, Scratch
from dglkge.typing import Side

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

RELATION_BLOCKS = {Side.TAIL: "relation~tail", Side.HEAD: "relation~head"}
"""Names of the blocks of relation prediction; '~' cannot be confused with an entity type of that name."""


def relation_pieces(
    model: KgeModel,
    group: Group,
    heads: torch.Tensor,
    tails: torch.Tensor,
    factors: Floats,
) -> list[Piece]:
    """Return the queries (h, ?, t): one for each direction that has relation rows of its own."""
    # The true answer of (h, ?, t) is the relation itself.
    keys = group.relations.request.ids[group.relations.place].numpy()
    forwards = model.score_function.relation_query(heads, tails)
    # Without reciprocal rows both directions have the same scores: one query with twice the factor.
    if not model.reciprocal:
        return [Piece(RELATION_BLOCKS[Side.TAIL], forwards, keys, 2 * factors)]
    backwards = model.score_function.relation_query(tails, heads)
    return [
        Piece(RELATION_BLOCKS[Side.TAIL], forwards, keys, factors),
        Piece(RELATION_BLOCKS[Side.HEAD], backwards, keys, factors),
    ]


def edge_factors(group: Group, global_size: int) -> Floats:
    """Return the factor (B,) of each edge's loss: its weight by the size of the global batch."""
    factors = np.full(len(group), 1 / global_size, np.float32)
    return factors if group.weights is None else factors * group.weights


class AutogradQueries:
    """Queries and penalties of any model, by autograd; rows must have been copied.

    Parameters
    ----------
    model : KgeModel
    regularizer : Regularizer or None
    relation_weight : float
        Weight of relation prediction; 0: none.
    """

    reads_in_place = False

    def __init__(self, model: KgeModel, regularizer: Regularizer | None, relation_weight: float) -> None:
        self._model = model
        self._regularizer = regularizer
        self._relation_weight = relation_weight

    def make(self, groups: Sequence[Group], global_size: int) -> list[Piece]:
        """Return the queries; see :class:`QueryMaker`."""
        model, pieces = self._model, []
        self._penalty = torch.zeros(())
        for group in groups:
            factors = edge_factors(group, global_size)
            heads, relations, tails = group.heads.leaf(), group.relations.leaf(), group.tails.leaf()
            for side, anchors, answers, block, keys in (
                (Side.TAIL, heads, tails, group.rhs, group.tail_ids),
                (Side.HEAD, tails, heads, group.lhs, group.head_ids),
            ):
                pieces.append(Piece(block, model.query(anchors, relations, side), keys, factors))
                if self._regularizer is not None:
                    penalty = model.penalty(self._regularizer, anchors, relations, answers, side)
                    self._penalty = self._penalty + (penalty * torch.from_numpy(factors)).sum()
            if self._relation_weight:
                weighted = np.float32(self._relation_weight) * factors
                pieces += relation_pieces(model, group, heads, tails, weighted)
        self._queries = [piece.queries for piece in pieces]
        return pieces

    def take_back(self, gradients: Sequence[torch.Tensor]) -> float:
        """Write the gradients; see :class:`QueryMaker`."""
        penalty, queries = self._penalty, self._queries
        tensors = [*queries, penalty] if penalty.requires_grad else queries
        given = [*gradients, torch.ones(())] if penalty.requires_grad else list(gradients)
        if tensors:
            torch.autograd.backward(tensors, given)
        return penalty.item()


def has_loops(model: KgeModel, regularizer: Regularizer | None) -> bool:
    """Return whether :class:`LoopQueries` computes the gradients of a model and a regularizer."""
    is_complex = model.score_function.complex_valued
    is_plain = type(model) is KgeModel and model.score_function.compiled
    if regularizer is None or not is_plain:
        return is_plain
    return regularizer.compiled and regularizer.complex_valued == is_complex


class LoopQueries:
    """Queries and penalties of DistMult and ComplEx, by compiled loops, from rows in place.

    Parameters
    ----------
    model : KgeModel
    regularizer : Regularizer or None
        N3 of the model's kind of rows; see :func:`has_loops`.
    relation_weight : float
        Weight of relation prediction; 0: none.
    """

    reads_in_place = True

    def __init__(self, model: KgeModel, regularizer: Regularizer | None, relation_weight: float) -> None:
        self._model = model
        self._operator = (model.score_function.complex_valued, model.reciprocal)
        self._n3 = np.float32(0 if regularizer is None else regularizer.weight)
        self._relation_weight = relation_weight
        self._scratch = Scratch()

    def make(self, groups: Sequence[Group], global_size: int) -> list[Piece]:
        """Return the queries; see :class:`QueryMaker`."""
        self._groups = [(group, edge_factors(group, global_size)) for group in groups]
        num = sum(map(len, groups))
        room = self._scratch.take("queries", 2 * num, self._model.dim)
        pieces, start = [], 0
        for group, factors in self._groups:
            middle, end = start + len(group), start + 2 * len(group)
            # The loop also writes scores of the true and own entities; here the shards compute the true ones.
            unused = self._scratch.take("scores", 2, end - start).numpy()
            dot_kernels.make_queries(
                *_addresses(group), self._operator, room[start:end].numpy(), unused[0], unused[1]
            )
            pieces += [
                Piece(group.rhs, room[start:middle], group.tail_ids, factors),
                Piece(group.lhs, room[middle:end], group.head_ids, factors),
            ]
            start = end
        self._leaves, self._relation_queries = [], []
        if self._relation_weight:
            for group, factors in self._groups:
                leaves = [place.found().copied().requires_grad_() for place in (group.heads, group.tails)]
                weighted = np.float32(self._relation_weight) * factors
                of_relations = relation_pieces(self._model, group, leaves[0], leaves[1], weighted)
                self._leaves.append(leaves)
                self._relation_queries += [piece.queries for piece in of_relations]
                pieces += of_relations
        return pieces

    def take_back(self, gradients: Sequence[torch.Tensor]) -> float:
        """Write the gradients; see :class:`QueryMaker`."""
        loss, num_groups = 0.0, len(self._groups)
        for number, (group, factors) in enumerate(self._groups):
            of_queries = torch.cat(list(gradients[2 * number : 2 * number + 2])).numpy()
            # The answers' own shares are gradients of candidates, which are with the shards.
            none = np.zeros(2 * len(group), np.float32)
            outputs = [place.gradients.numpy() for place in (group.heads, group.tails, group.relations)]
            loss += dot_kernels.write_gradients(
                *_addresses(group), self._operator, of_queries, none, none, factors, self._n3, *outputs
            )
        if self._relation_queries:
            torch.autograd.backward(self._relation_queries, list(gradients[2 * num_groups :]))
            for (group, _), (heads, tails) in zip(self._groups, self._leaves):
                for place, leaf in ((group.heads, heads), (group.tails, tails)):
                    if leaf.grad is not None:
                        place.gradients.add_(leaf.grad)
        return loss


def _addresses(group: Group) -> list[Ids]:
    """Return the addresses of the rows of the heads, tails and relations."""
    return [place.found().addresses for place in (group.heads, group.tails, group.relations)]
