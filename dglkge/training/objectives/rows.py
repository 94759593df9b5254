"""Rows of a batch, by table: requests for groups of edges, the rows, their gradients.

Steps 3 and 4 of a batch: negatives are drawn, and with them all ids that a batch looks up are known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Callable

import numpy as np
import numpy.typing as npt
import torch

from dglkge.embeddings.embedding_table import EmbeddingTable
from dglkge.embeddings.found_rows import FoundRows
from dglkge.optim.narrow_rows import is_narrow
from dglkge.optim.scratch import Scratch
from dglkge.sampling.edge_batches import EdgeBatch
from dglkge.sampling.known_answers import KnownAnswers, KnownNegatives
from dglkge.sampling.negatives import NegativeSampler
from dglkge.typing import RELATION, Side

NodeIds = npt.NDArray[np.int64]

RangeOf = Callable[[str, NodeIds], NodeIds]
"""Returns the range (n,) of each node (n,) of an entity type."""

Shift = Callable[[torch.Tensor], torch.Tensor]
"""Returns what is added to the rows of node ids (n,): (n, D), or (D,) for all of them."""


class RowRequest:
    """Collects ids of one table for a batch, finds their rows, and holds their gradients.

    A row has a place for each time that it is requested. Equal ids are merged by the optimizer, which has to
    merge the gradients of all trainers anyway. Memory is kept from batch to batch.

    Parameters
    ----------
    table : EmbeddingTable
    scratch : Scratch, optional
        Memory that is shared with requests that are never open at the same time.

    Attributes
    ----------
    shift : callable or None
        Returns what is added to the copies of the rows of node ids (n,): (n, D), or (D,) for all.
    """

    shift: Shift | None = None

    def __init__(self, table: EmbeddingTable, scratch: Scratch | None = None) -> None:
        self.table = table
        self._scratch = Scratch() if scratch is None else scratch
        self.clear()

    def clear(self) -> None:
        """Drop the batch; its memory is used again."""
        self._wanted: list[NodeIds] = []
        self._num_wanted = 0
        self._ids: torch.Tensor | None = None
        self._rows = self._scratch.take("rows", 0, self.table.dim)
        self.gradients = self._scratch.take("gradients", 0, self.table.dim)

    def add(self, node_ids: NodeIds) -> RowPlaces:
        """Request the rows of node ids (n,)."""
        start = self._num_wanted
        self._wanted.append(node_ids)
        self._num_wanted += len(node_ids)
        return RowPlaces(self, slice(start, self._num_wanted))

    @property
    def ids(self) -> torch.Tensor:
        """All requested node ids (n,), with repetitions."""
        if self._ids is None:
            wanted = np.concatenate(self._wanted) if self._wanted else np.empty(0, np.int64)
            self._ids = torch.from_numpy(wanted)
        return self._ids

    @property
    def row_ids(self) -> torch.Tensor:
        """Node ids of the rows that are looked up and of the gradients."""
        return self.ids

    def open(self, copy: bool, rows: FoundRows | None = None) -> None:
        """Find all requested rows.

        Parameters
        ----------
        copy : bool
            Copy them, and start with gradients of 0; otherwise they are read in place, and gradients are
            undefined until they are written.
        rows : FoundRows, optional
            The rows, where the lookup has found them already.
        """
        ids = self.ids.numpy()
        self.gradients = self._scratch.take("gradients", len(ids), self.table.dim)
        if copy:
            # Autograd adds to gradients that exist; the compiled loops write all of them.
            self.gradients.zero_()
        # All rows are in this machine's shared memory: compiled loops read them there, without a copy. Rows
        # of 16 bits are widened: the loops take float32.
        if rows is None and not copy and self.table.is_whole and not is_narrow(self.table.local_rows):
            self._found = FoundRows.in_array(self.table.local_rows.numpy(), ids)
            return
        if rows is not None and not copy:
            self._found = rows
            return
        room = self._scratch.take("rows", len(ids), self.table.dim)
        self._rows = self.table.gather(self.ids, room) if rows is None else rows.copied(room)
        if self.shift is not None:
            self._rows += self.shift(self.ids)
        self._found = FoundRows.in_array(self._rows.numpy())

    def send(self) -> None:
        """Make the copied rows, which are final now, ready for :meth:`leaf`: they are."""

    def collect(self) -> None:
        """Put the gradients of all leaves into ``gradients``: they are."""

    @property
    def copied_rows(self) -> torch.Tensor:
        """The copied rows, (n, D); to be changed before they are used only."""
        return self._rows

    def leaf(self, place: slice) -> torch.Tensor:
        """Return some of the copied rows as a leaf; its gradient is accumulated into ``gradients[place]``."""
        leaf = self._rows[place].detach().requires_grad_()
        # Set before backward(): autograd then accumulates into this memory in place.
        leaf.grad = self.gradients[place]
        return leaf

    def found(self, place: slice) -> FoundRows:
        """Return the rows of a place, without a copy."""
        return self._found.part(place)


@dataclass(frozen=True)
class RowPlaces:
    """Consecutive places (n,) in a request."""

    request: RowRequest
    place: slice

    def leaf(self) -> torch.Tensor:
        """Return the rows (n, D) as a leaf of autograd; see :meth:`RowRequest.leaf`."""
        return self.request.leaf(self.place)

    def found(self) -> FoundRows:
        """Return the rows, without a copy."""
        return self.request.found(self.place)

    @property
    def ids(self) -> NodeIds:
        """Node ids of the rows, (n,)."""
        return self.request.ids[self.place].numpy()

    @property
    def gradients(self) -> torch.Tensor:
        """Gradients of the rows, (n, D) float32."""
        return self.request.gradients[self.place]


@dataclass(frozen=True)
class Negatives:
    """Negatives of a chunk: node ids (N,) and their rows."""

    ids: NodeIds
    rows: RowPlaces


@dataclass(frozen=True)
class AnswerRanges:
    """Which rows of the queries of one side are in the first of their bucket's two ranges.

    See :mod:`dglkge.sampling.range_offset`; which of the two is the first has no meaning.

    Attributes
    ----------
    anchors, truths : (B,) bool
        Of the queries' own entities and of the true answers.
    negatives : (N,) bool
    """

    anchors: npt.NDArray[np.bool_]
    truths: npt.NDArray[np.bool_]
    negatives: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Group:
    """Edges of a batch that join the same pair of entity types and share their negatives.

    Attributes
    ----------
    lhs, rhs : str
        Entity types.
    head_ids, tail_ids : (B,) int64
        Node ids.
    weights : (B,) float32 or None
    heads, relations, tails : RowPlaces
    negatives : mapping of Side to Negatives
        Of the sides that are trained. The same object for both where the entity types and the sampler are
        the same.
    known : mapping of Side to KnownNegatives
        Known answers, where they do not count as negatives.
    labels : (B,) float32 or None
        Confidences that the edges are true.
    relation_places : (B,) int64 or None
        Where ``relations`` holds each relation once (U,): the place there of each edge's.
    inputs : GroupInputs or None
        What the loss takes besides rows, where it is on a device already.
    ranges : mapping of Side to AnswerRanges
        Of the sides that are trained; empty where no score depends on them.
    """

    lhs: str
    rhs: str
    head_ids: NodeIds
    tail_ids: NodeIds
    weights: npt.NDArray[np.float32] | None
    heads: RowPlaces
    relations: RowPlaces
    tails: RowPlaces
    negatives: Mapping[Side, Negatives]
    known: Mapping[Side, KnownNegatives] = field(default_factory=dict)
    labels: npt.NDArray[np.float32] | None = None
    relation_places: NodeIds | None = None
    inputs: Any = None
    ranges: Mapping[Side, AnswerRanges] = field(default_factory=dict)

    @property
    def relation_ids(self) -> NodeIds:
        """Node id of each edge's relation, (B,)."""
        ids = self.relations.ids
        return ids if self.relation_places is None else ids[self.relation_places]

    def __len__(self) -> int:
        return len(self.head_ids)

    def factors(self, global_size: int) -> npt.NDArray[np.float32]:
        """Return the factor (B,) of each edge's loss: its weight by the size of the global batch."""
        factors = np.full(len(self), 1 / global_size, np.float32)
        return factors if self.weights is None else factors * self.weights


def request_rows(
    batch: EdgeBatch,
    pairs: Sequence[tuple[str, str]],
    sampler: NegativeSampler | Mapping[Side, NegativeSampler] | None,
    requests: Mapping[str, RowRequest],
    known: KnownAnswers | None = None,
    shares_relations: bool = False,
    range_of: RangeOf | None = None,
) -> list[Group]:
    """Make the groups of a batch: draw its negatives and request all rows.

    Groups of one chunk share negatives by entity type and sampler.

    Parameters
    ----------
    batch : EdgeBatch
    pairs : sequence of (str, str)
        Entity types of the heads and tails of each edge type.
    sampler : NegativeSampler, mapping of Side to NegativeSampler, or None
        One for both sides, or one for each side that is trained. None: the groups have no negatives.
    requests : mapping of str to RowRequest
        By table.
    known : KnownAnswers, optional
        Answers that are no negatives.
    shares_relations : bool
        Request the row of a relation once for all edges of a group.
    range_of : callable, optional
        Returns the ranges of nodes, where scores depend on them.
    """
    samplers: Mapping[Side, NegativeSampler] = {}
    if isinstance(sampler, Mapping):
        samplers = sampler
    elif sampler is not None:
        samplers = {Side.HEAD: sampler, Side.TAIL: sampler}
    drawn: dict[tuple[int, str, int], Negatives] = {}

    def negatives(side: Side, entity_type: str, chunk: int) -> Negatives:
        # Drawn once for each chunk and type: its rows are requested, sent and updated once for all groups.
        key = (chunk, entity_type, id(samplers[side]))
        if key not in drawn:
            ids = samplers[side].sample(entity_type, batch, chunk)
            drawn[key] = Negatives(ids, requests[entity_type].add(ids))
        return drawn[key]

    groups = []
    for found in batch.groups:
        run = slice(found.start, found.end)
        lhs, rhs = pairs[found.pair]
        heads, relations, tails = batch.heads[run], batch.relations[run], batch.tails[run]
        wanted, relation_places = relations, None
        if shares_relations:
            wanted, relation_places = np.unique(relations, return_inverse=True)
        places = (requests[lhs].add(heads), requests[RELATION].add(wanted), requests[rhs].add(tails))
        types = {Side.HEAD: lhs, Side.TAIL: rhs}
        against = {side: negatives(side, types[side], found.chunk) for side in Side if side in samplers}
        anchors = {Side.HEAD: (rhs, tails), Side.TAIL: (lhs, heads)}
        known_of = {
            side: known.among(side, *anchors[side], relations, types[side], against[side].ids)
            for side in against
            if known is not None
        }
        ranges = {}
        if range_of is not None:
            of_heads, of_tails = range_of(lhs, heads), range_of(rhs, tails)
            # A chunk is of one bucket: its rows are in two ranges, that of the first head and the other one.
            first = of_heads[0]
            known_and_missing = {
                Side.HEAD: (of_tails == first, of_heads == first),
                Side.TAIL: (of_heads == first, of_tails == first),
            }
            ranges = {
                side: AnswerRanges(
                    *known_and_missing[side], range_of(types[side], found_negatives.ids) == first
                )
                for side, found_negatives in against.items()
            }
        groups.append(
            Group(
                lhs,
                rhs,
                heads,
                tails,
                None if batch.weights is None else batch.weights[run],
                *places,
                against,
                known_of,
                None if batch.labels is None else batch.labels[run],
                relation_places,
                ranges=ranges,
            )
        )
    return groups
