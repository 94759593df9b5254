"""Loss of edges against all entities of the answer's type, and relation prediction beside it.

Of each edge, (h, r, ?) is scored against every possible tail and (?, r, t) against every possible head.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from dglkge.kernels import dot as dot_kernels
from dglkge.model.kge_model import KgeModel
from dglkge.model.regularizers import Regularizer
from dglkge.training.objectives.all_candidates import Piece
from dglkge.training.objectives.penalties import GroupPenalty, loop_weights
from dglkge.training.objectives.relation_prediction import RelationQueries, relation_pieces
from dglkge.training.objectives.rows import Group, Scratch
from dglkge.typing import Side

Ids = npt.NDArray[np.int64]


def make_queries(
    model: KgeModel,
    anchors: torch.Tensor,
    relations: torch.Tensor,
    side: Side,
    relation_ids: Ids,
    places: torch.Tensor | None,
) -> torch.Tensor:
    """Return the queries (B, Dq) of entities and relations, by autograd.

    Parameters
    ----------
    model : KgeModel
    anchors : (B, D) tensor
    relations : (B, ...) or (U, ...) tensor
    side : Side
    relation_ids : (B,) int64
    places : (B,) int64 tensor or None
        Where relations have one row each (U): the place of each query's.
    """
    if places is not None:
        return model.shared_query(anchors, relations, places, side)
    return model.query(anchors, relations, side, torch.from_numpy(relation_ids).to(anchors.device))


def places_on(places: Ids | None, device: torch.device) -> torch.Tensor | None:
    """Return places on a device, None where there are none."""
    return None if places is None else torch.from_numpy(places).to(device)


class AutogradQueries:
    """Queries and penalties of any model, by autograd; rows must have been copied.

    Parameters
    ----------
    model : KgeModel
    regularizer : Regularizer or None
    relation_weight : float
        Weight of relation prediction; 0: none.
    shares_relations : bool
        Groups hold the row of each relation once.
    """

    reads_in_place = False

    def __init__(
        self,
        model: KgeModel,
        regularizer: Regularizer | None,
        relation_weight: float,
        shares_relations: bool = False,
    ) -> None:
        self.shares_relations = shares_relations
        self._model = model
        self._regularizer = regularizer
        self._relation_weight = relation_weight

    def make(self, groups: Sequence[Group], global_size: int) -> list[Piece]:
        """Return the queries; see :class:`QueryMaker`."""
        model, pieces = self._model, []
        self._penalty = torch.zeros(())
        for group in groups:
            factors = group.factors(global_size)
            heads, relations, tails = group.heads.leaf(), group.relations.leaf(), group.tails.leaf()
            places = places_on(group.relation_places, heads.device)
            for side, anchors, answers, block, keys in (
                (Side.TAIL, heads, tails, group.rhs, group.tail_ids),
                (Side.HEAD, tails, heads, group.lhs, group.head_ids),
            ):
                query = make_queries(model, anchors, relations, side, group.relation_ids, places)
                pieces.append(Piece(block, query, keys, factors))
                if self._regularizer is not None:
                    penalty = self._regularizer.of_query(query, answers)
                    if penalty is None:
                        own_rows = relations if places is None else relations[places]
                        penalty = model.penalty(self._regularizer, anchors, own_rows, answers, side)
                    weights = torch.from_numpy(factors).to(penalty.device)
                    self._penalty = self._penalty + (penalty * weights).sum()
            if self._relation_weight:
                weighted = np.float32(self._relation_weight) * factors
                pieces += relation_pieces(model, group.relation_ids, heads, tails, weighted)
        self._queries = [piece.queries for piece in pieces]
        return pieces

    def take_back(self, gradients: Sequence[torch.Tensor]) -> float:
        """Write the gradients; see :class:`QueryMaker`."""
        penalty, queries = self._penalty, self._queries
        given = [of_query.to(query.device) for query, of_query in zip(queries, gradients)]
        tensors = [*queries, penalty] if penalty.requires_grad else queries
        given = [*given, torch.ones_like(penalty)] if penalty.requires_grad else given
        if tensors:
            torch.autograd.backward(tensors, given)
        return penalty.item()


def has_loops(model: KgeModel, regularizer: Regularizer | None) -> bool:
    """Return whether :class:`LoopQueries` computes the gradients of a model and a regularizer."""
    is_plain = type(model) is KgeModel and model.score_function.compiled
    return is_plain and (regularizer is None or loop_weights(model, regularizer) is not None)


class LoopQueries:
    """Queries and penalties of DistMult and ComplEx, by compiled loops, from rows in place.

    Parameters
    ----------
    model : KgeModel
    regularizer : Regularizer or None
        One that has loops; see :func:`has_loops`.
    relation_weight : float
        Weight of relation prediction; 0: none.
    """

    reads_in_place = True
    shares_relations = False

    def __init__(self, model: KgeModel, regularizer: Regularizer | None, relation_weight: float) -> None:
        self._model = model
        self._operator = (model.score_function.complex_valued, model.reciprocal)
        self._penalty = GroupPenalty(model, regularizer)
        self._of_relations = RelationQueries(model, relation_weight)
        self._scratch = Scratch()

    def make(self, groups: Sequence[Group], global_size: int) -> list[Piece]:
        """Return the queries; see :class:`QueryMaker`."""
        self._groups = [(group, group.factors(global_size)) for group in groups]
        num = sum(map(len, groups))
        room = self._scratch.take("queries", 2 * num, self._model.dim)
        pieces: list[Piece] = []
        start = 0
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
        return pieces + self._of_relations.make(groups, global_size)

    def take_back(self, gradients: Sequence[torch.Tensor]) -> float:
        """Write the gradients; see :class:`QueryMaker`."""
        loss, num_groups = 0.0, len(self._groups)
        for number, (group, factors) in enumerate(self._groups):
            of_queries = torch.cat(list(gradients[2 * number : 2 * number + 2])).numpy()
            # The answers' own shares are gradients of candidates, which are with the shards.
            none = np.zeros(2 * len(group), np.float32)
            outputs = [place.gradients.numpy() for place in (group.heads, group.tails, group.relations)]
            loss += dot_kernels.write_gradients(
                *_addresses(group),
                self._operator,
                of_queries,
                none,
                none,
                factors,
                self._penalty.n3,
                *outputs,
            )
            loss += self._penalty.add(group, factors)
        return loss + self._of_relations.take_back(gradients[2 * num_groups :])


def _addresses(group: Group) -> list[Ids]:
    """Return the addresses of the rows of the heads, tails and relations."""
    return [place.found().addresses for place in (group.heads, group.tails, group.relations)]
