"""Paths between two entities, and the rules that they are examples of, with support and confidence.

A rule (x, r1, a), (a, r2, y) => (x, r, y) follows up to three links, each read in either direction; a rule
with constants is (x, r1, d) => (x, r, c). Both are as in AnyBURL (Meilicke et al. 2019). Everything is looked
up in the index of known triples, which stays on the disk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dglkge.data.known_triples import KnownTriples
from dglkge.data.sorted_arrays import equal_pairs, is_first, sorted_distinct, spans
from dglkge.typing import Relation, Side

Step = tuple[int, Side]
"""A relation, and the side at which a link in this direction ends."""

Entity = tuple[str, int]
"""Type and id."""

Pairs = tuple[np.ndarray, np.ndarray]
Confidences = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Query (M,), candidate (M,) and confidence (M,)."""

MAX_LINKS = 1 << 17
"""Links of some entities in one direction that are looked at; of more, evenly spaced ones."""

MAX_NEIGHBOURS = 256
"""Entities next to the head through which paths of three links are searched; of more, evenly spaced ones."""

MINED_NEIGHBOURS = 32
"""The same, of each triple from which rules are mined."""

MAX_PATHS = 10_000
"""Paths of three links between two entities that are looked at; of more, evenly spaced ones."""

MAX_REACHED = 1 << 14
"""Pairs of a sampled entity and one that it leads to; of more, evenly spaced ones."""

SAMPLES = 200
"""Entities at which a rule's confidence is measured."""

PESSIMISM = 5
"""Examples without the conclusion that every rule is given, so that few examples do not make a sure rule."""

MIN_SUPPORT, MIN_CONFIDENCE = 3, 0.05
"""Of rules with constants."""

MAX_STARTS = 1 << 14
"""Entities of a relation of which rules with constants are counted; of more, evenly spaced ones."""

_ID_BITS = 48
"""A node is the number of an entity's type, followed by its id in so many bits."""


@dataclass(frozen=True)
class Path:
    """Links from one entity to another; there is one entity more than steps."""

    steps: tuple[Step, ...]
    entities: tuple[Entity, ...]

    def links(self) -> Iterator[tuple[int, int, int]]:
        """Yield head, relation and tail id of each link."""
        for (relation, side), (_, before), (_, after) in zip(self.steps, self.entities, self.entities[1:]):
            yield (before, relation, after) if side is Side.TAIL else (after, relation, before)


@dataclass(frozen=True)
class Rule:
    """A chain of links that implies a relation.

    Attributes
    ----------
    support : int
        Pairs that the chain joins, and the relation too.
    pairs : int
        Pairs that the chain joins, among the sampled ones.
    """

    steps: tuple[Step, ...]
    support: int
    pairs: int

    @property
    def confidence(self) -> float:
        """Share of the pairs that the relation joins too, with :data:`PESSIMISM`."""
        return self.support / (self.pairs + PESSIMISM)


class RuleGraph:
    """The known triples as a graph of typed entities."""

    def __init__(self, known: KnownTriples, relations: Sequence[Relation]) -> None:
        self._known, self.relations = known, relations
        self._types = sorted({type_ for relation in relations for type_ in (relation.lhs, relation.rhs)})
        # The number of a step is twice its relation's, plus 1 if it is read from the tail.
        self._steps: list[Step] = [(id_, side) for id_ in range(len(relations)) for side in _READ]
        reached = [relations[id_].candidate_type(side) for id_, side in self._steps]
        self._reached = np.array(list(map(self._types.index, reached)), np.int64)

    def neighbours(self, entity: Entity, most: int) -> Iterator[Path]:
        """Yield the path to each neighbour of an entity; of more than so many, evenly spaced ones."""
        _, *columns = self._links(entity[0], np.array([entity[1]]))
        for step, node in evenly(np.stack(columns, 1), most).tolist():
            yield Path((self._steps[step],), (entity, self._entity(node)))

    def _links(self, type_: str, ids: np.ndarray) -> list[np.ndarray]:
        """Return place of the entity, number of the step and node of every neighbour of entities (n,)."""
        parts = []
        for side in _READ:
            relations = self._anchored(type_, side)
            anchors = np.repeat(ids, len(relations))
            answers = self._known.answers(side, anchors, np.tile(relations, len(ids)))
            queries, neighbours = evenly(np.stack(answers, 1), MAX_LINKS).T
            places, which = np.divmod(queries, max(len(relations), 1))
            steps = 2 * relations[which] + _READ.index(side)
            parts.append((places, steps, self._reached[steps] << _ID_BITS | neighbours))
        return [np.concatenate(columns) for columns in zip(*parts)]

    def _anchored(self, type_: str, side: Side) -> np.ndarray:
        """Return the relations (n,) whose links lead from a type to their ends on a side."""
        return np.flatnonzero([relation.anchor_type(side) == type_ for relation in self.relations])

    def _entity(self, node: int) -> Entity:
        return self._types[node >> _ID_BITS], node & (1 << _ID_BITS) - 1

    def paths(self, head: int, relation_id: int, tail: int, most: int = MAX_NEIGHBOURS) -> list[Path]:
        """Return paths between the ends of a link that visit no entity twice, of up to three others.

        One path for each chain of relations, shorter chains first. Paths of three links go through at most so
        many entities of a type next to the head.
        """
        start, goal = (self.relations[relation_id].lhs, head), (self.relations[relation_id].rhs, tail)
        links = (self._links(type_, np.array([id_])) for type_, id_ in (start, goal))
        (_, first, near), (_, last, far) = links
        last = last ^ 1  # read towards the tail
        ends = [self._types.index(type_) << _ID_BITS | id_ for type_, id_ in (start, goal)]
        is_direct = (near == ends[1]) & (first != 2 * relation_id)
        chains = _distinct_chains([first[is_direct]], [])
        is_between = ~np.isin(near, ends)
        first, near = first[is_between], near[is_between]
        i, j = equal_pairs(near, far)
        chains += _distinct_chains([first[i], last[j]], [near[i]])
        parts = [np.empty((5, 0), np.int64)]
        for type_ in np.unique(near >> _ID_BITS).tolist():
            middle = evenly(np.unique(near[near >> _ID_BITS == type_]), most)
            place, step, beyond = self._links(self._types[type_], middle & (1 << _ID_BITS) - 1)
            before = middle[place]
            fits = np.isin(beyond, far) & ~np.isin(beyond, ends) & (beyond != before)
            step, beyond, before = step[fits], beyond[fits], before[fits]
            i, j = evenly(np.stack(equal_pairs(near, before), 1), MAX_PATHS).T
            at, k = evenly(np.stack(equal_pairs(beyond[j], far), 1), MAX_PATHS).T
            i, j = i[at], j[at]
            parts.append(np.stack([first[i], step[j], last[k], near[i], beyond[j]]))
        columns = np.concatenate(parts, axis=1)
        chains += _distinct_chains(list(columns[:3]), list(columns[3:]))
        return [
            Path(tuple(map(self._steps.__getitem__, steps)), (start, *map(self._entity, between), goal))
            for steps, between in chains
        ]

    def follow(self, starts: np.ndarray, steps: tuple[Step, ...], most: int = MAX_REACHED) -> Pairs:
        """Return the pairs that a chain joins: places of the starts (n,) and entities that they lead to (n,).

        Each pair is there once, and at most so many after each step. No walk comes back to its start.
        """
        start_type = self.relations[steps[0][0]].anchor_type(steps[0][1])
        origin, reached = np.arange(len(starts)), starts
        for relation, side in steps:
            anchors = sorted_distinct(reached)
            first, count, answers = self._known.runs(side, anchors, np.full(len(anchors), relation))
            anchor_places = np.searchsorted(anchors, reached)
            place, places = spans(first[anchor_places], count[anchor_places])
            answers = answers[places].astype(np.int64)
            size = int(answers.max(initial=0)) + 1
            pairs = evenly(sorted_distinct(origin[place] * size + answers), most)
            origin, reached = np.divmod(pairs, size)
            if self.relations[relation].candidate_type(side) == start_type:  # the variables differ
                is_other = starts[origin] != reached
                origin, reached = origin[is_other], reached[is_other]
        return origin, reached

    def rule(self, steps: tuple[Step, ...], relation_id: int) -> Rule:
        """Measure a chain as a rule for a relation, from sampled entities at its start."""
        relation, side = steps[0]
        draw = np.random.default_rng((0, relation_id, relation))
        starts = draw.permutation(self._known.seen(side.other, relation))[:SAMPLES]
        origin, reached = self.follow(starts, steps)
        joins = self._known.contain(Side.TAIL, starts[origin], np.full(len(origin), relation_id), reached)
        return Rule(steps, int(joins.sum()), len(origin))

    def rules(self, relation_id: int, triples: np.ndarray, samples: int, most: int) -> list[Rule]:
        """Return the rules for a relation with the greatest confidence.

        They are the chains of most paths of a sample of its known triples (n, 3); most of them are measured.
        """
        chain_counts = Counter[tuple[Step, ...]]()
        sample = np.random.default_rng((0, relation_id)).permutation(len(triples))[:samples]
        for head, _, tail in triples[np.sort(sample)].tolist():
            paths = self.paths(head, relation_id, tail, MINED_NEIGHBOURS)
            chain_counts.update(path.steps for path in paths)
        return best_rules([self.rule(steps, relation_id) for steps, _ in chain_counts.most_common(most)])

    def constants(self, side: Side, relation_id: int, anchors: np.ndarray) -> Iterator[Confidences]:
        """Yield what rules with constants say about queries of a relation, one relation of bodies at a time.

        A rule (x, s, d) => (x, r, c), or the same for the other sides, has support (its examples x) and
        confidence as those of chains, with all entities x of the relation s and d.

        Yields
        ------
        query, answer, confidence : (n,) arrays
            Places of the anchors (Q,), constants c, and the confidence of a rule that leads to them; a pair
            may be there several times.
        """
        known, relation = self._known, self.relations[relation_id]
        starts = known.seen(side.other, relation_id)
        scale = max(1.0, len(starts) / MAX_STARTS)
        starts = evenly(starts, MAX_STARTS)
        origins, conclusions = known.answers(side, starts, np.full(len(starts), relation_id))
        count = np.bincount(origins, minlength=len(starts))
        first = np.cumsum(count) - count
        size = int(conclusions.max(initial=0)) + 1
        for side_of_body in _READ:
            for body in self._anchored(relation.anchor_type(side), side_of_body).tolist():
                query, features_of_anchors = known.answers(side_of_body, anchors, np.full(len(anchors), body))
                features = sorted_distinct(features_of_anchors)
                if not len(features):
                    continue
                x, d = known.answers(side_of_body, starts, np.full(len(starts), body))
                # Examples: of each start with a feature, its conclusions.
                place = np.searchsorted(features, d).clip(max=len(features) - 1)
                x, place = x[features[place] == d], place[features[place] == d]
                example, places = spans(first[x], count[x])
                codes = place[example] * size + conclusions[places]
                distinct, support = np.unique(codes, return_counts=True)
                feature, answer = np.divmod(distinct, size)
                _, examples = known.runs(side_of_body.other, features, np.full(len(features), body))[:2]
                confidence = support * scale / (examples[feature] + PESSIMISM)
                is_kept = (support >= MIN_SUPPORT) & (confidence >= MIN_CONFIDENCE)
                if (body, side_of_body) == (relation_id, side):  # the conclusion itself
                    is_kept &= features[feature] != answer
                feature, answer, confidence = feature[is_kept], answer[is_kept], confidence[is_kept]
                i, j = equal_pairs(features_of_anchors, features[feature])
                yield query[i], answer[j], confidence[j]


_READ = (Side.TAIL, Side.HEAD)


def best_rules(rules: Sequence[Rule]) -> list[Rule]:
    """Return the rules with support, by descending confidence, shorter ones first."""
    supported = [rule for rule in rules if rule.support]
    return sorted(supported, key=lambda rule: (-rule.confidence, len(rule.steps)))


def mirrored(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """Return a chain read from its end."""
    return tuple((relation, side.other) for relation, side in reversed(steps))


def evenly(rows: np.ndarray, most: int) -> np.ndarray:
    """Return the rows if there are at most so many, else so many, evenly spaced."""
    return rows if len(rows) <= most else rows[np.linspace(0, len(rows) - 1, most).astype(np.int64)]


def _distinct_chains(steps: Sequence[np.ndarray], nodes: Sequence[np.ndarray]) -> list[tuple[list[int], ...]]:
    """Return each chain of steps (n,) once, with the nodes between them of its first path."""
    order, length = np.lexsort(steps[::-1]), len(steps)
    table = np.stack([*steps, *nodes], 1)[order]
    return [(row[:length], row[length:]) for row in table[is_first(*table[:, :length].T)].tolist()]
