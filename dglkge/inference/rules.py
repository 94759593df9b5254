"""Paths between two entities, and the rules that they are examples of, with support and confidence.

A rule (x, r1, a), (a, r2, y) => (x, r, y) follows up to three links, each read in either direction, as in
AnyBURL (Meilicke et al. 2019). Its confidence is estimated on sampled entities x. Everything is looked up in
the index of known triples, which stays on the disk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dglkge.data.known_triples import KnownTriples
from dglkge.typing import Relation, Side

Step = tuple[int, Side]
"""A relation, and the side at which a link in this direction ends."""

Entity = tuple[str, int]
"""Type and id."""

MAX_LINKS = 1 << 17
"""Links of some entities in one direction that are looked at; of more, evenly spaced ones."""

MAX_NEIGHBOURS = 256
"""Entities next to the head through which paths of three links are searched; of more, evenly spaced ones."""

MAX_PATHS = 10_000
"""Paths of three links between two entities that are looked at."""

MAX_REACHED = 1 << 16
"""Pairs of a sampled entity and one that it leads to; of more, evenly spaced ones."""

SAMPLES = 200
"""Entities at which a rule's confidence is measured."""

PESSIMISM = 5
"""Examples without the conclusion that every rule is given, so that few examples do not make a sure rule."""


@dataclass(frozen=True)
class Path:
    """Links from one entity to another.

    Attributes
    ----------
    steps : tuple of Step
    entities : tuple of Entity
        One more than steps.
    """

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
    steps : tuple of Step
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
    """The known triples as a graph of typed entities.

    Parameters
    ----------
    known : KnownTriples
    relations : sequence of Relation
    """

    def __init__(self, known: KnownTriples, relations: Sequence[Relation]) -> None:
        self._known, self._relations = known, relations

    def neighbours(self, type_: str, ids: np.ndarray) -> Iterator[tuple[int, Step, str, int]]:
        """Yield place of the entity, step, type and id of every neighbour of entities (n,)."""
        for side in Side:
            relations = np.array(
                [id_ for id_, one in enumerate(self._relations) if one.anchor_type(side) == type_], np.int64
            )
            anchors = np.repeat(ids, len(relations))
            queries, others = self._known.answers(side, anchors, np.tile(relations, len(ids)))
            links = evenly(np.stack([queries, others], 1), MAX_LINKS)
            for query, other in links.tolist():
                place, which = divmod(query, len(relations))
                relation = int(relations[which])
                yield place, (relation, side), self._relations[relation].candidate_type(side), other

    def paths(self, head: Entity, relation_id: int, tail: Entity) -> list[Path]:
        """Return paths of one to three links that visit no entity twice, without the link itself.

        One path for each chain of relations, shorter chains first.
        """
        around = {
            end: [(step, (type_, id_)) for _, step, type_, id_ in self.neighbours(end[0], np.array([end[1]]))]
            for end in (head, tail)
        }
        found: dict[tuple[Step, ...], Path] = {}

        def add(*parts: tuple[Step, Entity]) -> None:
            steps = tuple(step for step, _ in parts)
            found.setdefault(steps, Path(steps, (head, *(entity for _, entity in parts))))

        # The last link of a path, read towards the tail.
        last: dict[Entity, list[Step]] = {}
        for (relation, side), entity in around[tail]:
            last.setdefault(entity, []).append((relation, side.other))
        between = [part for part in around[head] if part[1] not in (head, tail)]
        for step, entity in around[head]:
            if entity == tail and step != (relation_id, Side.TAIL):
                add((step, tail))
        for step, entity in between:
            for end in last.get(entity, ()):
                add((step, entity), (end, tail))
        budget = MAX_PATHS
        for type_ in dict.fromkeys(entity[0] for _, entity in between):
            first: dict[int, list[Step]] = {}
            for step, (other_type, id_) in between:
                if other_type == type_:
                    first.setdefault(id_, []).append(step)
            ids = evenly(np.array(list(first), np.int64), MAX_NEIGHBOURS)
            for place, step, other_type, id_ in self.neighbours(type_, ids):
                entity, middle = (other_type, id_), (type_, int(ids[place]))
                if entity in (head, tail, middle) or entity not in last:
                    continue
                for start in first[middle[1]]:
                    for end in last[entity]:
                        add((start, middle), (step, entity), (end, tail))
                        budget -= 1
                if budget < 0:
                    break
        return sorted(found.values(), key=lambda path: len(path.steps))

    def follow(
        self, starts: np.ndarray, steps: tuple[Step, ...], most: int = MAX_REACHED
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the pairs that a chain joins: places of the starts (n,) and entities that they lead to (n,).

        Each pair is there once. No walk comes back to its start.

        Parameters
        ----------
        starts : (Q,) int64 array
        steps : tuple of Step
        most : int
            Pairs after each step; of more, evenly spaced ones.
        """
        start_type = self._relations[steps[0][0]].anchor_type(steps[0][1])
        origin, reached = np.arange(len(starts)), starts
        for relation, side in steps:
            place, answers = self._known.answers(side, reached, np.full(len(reached), relation))
            size = int(answers.max(initial=0)) + 1
            pairs = evenly(np.unique(origin[place] * size + answers), most)
            origin, reached = np.divmod(pairs, size)
            if self._relations[relation].candidate_type(side) == start_type:  # the variables differ
                is_other = starts[origin] != reached
                origin, reached = origin[is_other], reached[is_other]
        return origin, reached

    def rule(self, steps: tuple[Step, ...], relation_id: int) -> Rule:
        """Measure a chain as a rule for a relation, from sampled entities at its start."""
        relation, side = steps[0]
        starts = self._known.seen(side.other, relation)
        draw = np.random.default_rng((0, relation_id, relation))
        starts = draw.permutation(starts)[:SAMPLES]
        origin, reached = self.follow(starts, steps)
        joined = self._known.contain(Side.TAIL, starts[origin], np.full(len(origin), relation_id), reached)
        return Rule(steps, int(joined.sum()), len(origin))

    def rules(self, relation_id: int, triples: np.ndarray, most: int) -> list[Rule]:
        """Return the rules for a relation with the greatest confidence.

        Parameters
        ----------
        relation_id : int
        triples : (n, 3) int64 array
            Known triples of the relation; their paths are the chains that are measured.
        most : int
            Chains that are measured, those of most triples.
        """
        relation, seen = self._relations[relation_id], Counter[tuple[Step, ...]]()
        for head, _, tail in triples.tolist():
            paths = self.paths((relation.lhs, head), relation_id, (relation.rhs, tail))
            seen.update(path.steps for path in paths)
        chains = [steps for steps, _ in seen.most_common(most)]
        return best_rules([self.rule(steps, relation_id) for steps in chains])


def best_rules(rules: Sequence[Rule]) -> list[Rule]:
    """Return the rules with support, by descending confidence, shorter ones first."""
    return sorted((rule for rule in rules if rule.support), key=lambda one: (-one.confidence, len(one.steps)))


def mirrored(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """Return a chain read from its end."""
    return tuple((relation, side.other) for relation, side in reversed(steps))


def evenly(rows: np.ndarray, most: int) -> np.ndarray:
    """Return the rows if there are at most so many, else so many, evenly spaced."""
    return rows if len(rows) <= most else rows[np.linspace(0, len(rows) - 1, most).astype(np.int64)]
