"""Answers to questions of several hops: beam search over probabilities, without training.

As CQD (Arakelyan et al. 2021, "Complex query answering with neural link predictors"): a link has its
calibrated probability, ``and`` multiplies, ``or`` is a + b - ab, ``not`` is 1 - a, and a variable that is not
asked for takes the entity with the greatest value. Of each such variable the best entities, a beam, go on.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch

from dglkge.data.dataset_files import SPLITS
from dglkge.data.known_triples import KnownTriples
from dglkge.errors import InputError, require_known
from dglkge.evaluation.calibration import Curve
from dglkge.evaluation.queries import full_float32_matmuls
from dglkge.inference.links.completion import least_score
from dglkge.inference.logic import And, Fact, Formula, Not, Or, Question, facts, is_variable, parse, variables
from dglkge.inference.search import check_k
from dglkge.inference.trained_model import TrainedModel
from dglkge.typing import Relation, Side

LEAST_PROBABILITY = 1e-6
"""Smaller ones count as 0."""

Assignment = tuple[dict[Fact, int], dict[str, str]]
"""Relation of each link, and type of each variable."""


@dataclass
class Hop:
    """Links of one relation from an entity, or from those of a variable, to the entities of another.

    What follows the anchor is there once the links were searched.

    Attributes
    ----------
    side : Side
        That of the variable whose entities are valued.
    anchor : int or Node
        The entity at the other side, or what its entities fulfil.
    ids : (b,) int64 array
        Entities at the other side, the beam.
    values : (b,) float64 array
        Their own values.
    query : (b, Dq) tensor
        Their queries.
    known : two (M,) int64 arrays
        Place in the beam, and entity, of every known link.
    """

    relation_id: int
    relation: Relation
    side: Side
    curve: Curve
    anchor: int | Node
    ids: np.ndarray = field(init=False)
    values: np.ndarray = field(init=False)
    query: torch.Tensor = field(init=False)
    known: tuple[np.ndarray, np.ndarray] = field(init=False)


@dataclass
class Node:
    """Operation on the values of a variable's entities: ``and``, ``or`` or ``not`` of its children.

    ``best`` (N,) is, of ``or``, the child with the greatest value of each entity, once they were valued.
    """

    operation: str
    children: list[Hop | Node]
    best: np.ndarray = field(init=False)


class Asked:
    """A question to a run, planned: relations and types are known, and its links form a tree.

    Parameters
    ----------
    splits : sequence of str
        Splits whose triples have probability 1.
    adapter : bool
        Whether to use the curves that were fitted for questions, if there are some.
    """

    def __init__(
        self, run: TrainedModel, question: str | Question, beam: int, splits: Sequence[str], adapter: bool
    ) -> None:
        question = parse(question) if isinstance(question, str) else question
        if beam < 1:
            raise InputError(f"the beam must be at least 1, got {beam}")
        self._run, self._beam = run, beam
        self._calibration = run.calibration.adapted() if adapter else run.calibration
        for split in splits:
            require_known("split", split, SPLITS)
        none = KnownTriples([np.empty((0, 3), np.int64)], len(run.tables.relations))
        self._known = run.known_triples(splits=tuple(splits)) if splits else none
        self._relations, types = self._assignment(list(dict.fromkeys(facts(question.formula))))
        self.answer_type = types[question.answer]
        self._root = self._plan(question.formula, question.answer, set())

    def _assignment(self, links: list[Fact]) -> Assignment:
        """Choose the relation of each link, so that each variable has one type."""
        relations, vocabulary = self._run.tables.relations, self._run.tables.vocabulary
        choices = {}
        for fact in links:
            ends = (fact.head, fact.tail)
            pairs = {id_: (relations[id_].lhs, relations[id_].rhs) for id_ in relations.ids_of(fact.relation)}
            for term, types in zip(ends, zip(*pairs.values())):
                if not is_variable(term) and not any(term in vocabulary(type_) for type_ in types):
                    vocabulary(min(types)).id(term)  # raises, with the nearest names
            choices[fact] = [
                (id_, types)
                for id_, types in pairs.items()
                if all(is_variable(term) or term in vocabulary(type_) for term, type_ in zip(ends, types))
            ]

        def extended(unassigned: list[Fact], assigned: Assignment) -> Iterator[Assignment]:
            if not unassigned:
                yield assigned
                return
            (ids, types), (fact, *rest) = assigned, unassigned
            for id_, pair in choices[fact]:
                new = {term: type_ for term, type_ in zip((fact.head, fact.tail), pair) if is_variable(term)}
                if all(types.get(term, type_) == type_ for term, type_ in new.items()):
                    yield from extended(rest, ({**ids, fact: id_}, {**types, **new}))

        # The links with fewest choices first; two ways are too many, and there may be millions.
        order = sorted(links, key=lambda fact: len(choices[fact]))
        solutions = list(islice(extended(order, ({}, {})), 2))
        if len(solutions) != 1:
            problem = "several ways; give a relation's label, which names them" if solutions else "no way"
            shown = ", ".join(map(str, links))
            raise InputError(f"the entity types of {shown} fit together in {problem}")
        return solutions[0]

    def _plan(self, formula: Formula, variable: str, visited: set[str]) -> Node:
        """Return what the entities of a variable fulfil."""
        if isinstance(formula, Not):
            return Node("not", [self._plan(formula.part, variable, visited)])
        if isinstance(formula, Or):
            return Node("or", [self._plan(part, variable, visited) for part in formula.parts])
        parts: list[Formula] = list(formula.parts) if isinstance(formula, And) else [formula]
        node = self._grow(parts, variable, visited | {variable})
        if parts:
            unconnected = ", ".join(sorted(set().union(*map(variables, parts)))) or str(parts[0])
            raise InputError(f"parts with {unconnected} are not connected with {variable}, or close a circle")
        return node

    def _grow(self, parts: list[Formula], variable: str, visited: set[str]) -> Node:
        """Take the parts that hang on a variable out of a list."""
        children: list[Hop | Node] = []
        reachable = {term for part in parts if isinstance(part, Fact) for term in variables(part)} | visited
        mine = [part for part in parts if variable in variables(part)]
        # A compound part belongs to the one variable that it shares with what is around it.
        mine = [part for part in mine if isinstance(part, Fact) or variables(part) & reachable == {variable}]
        for part in mine:
            parts.remove(part)
        for part in mine:
            if not isinstance(part, Fact):
                children.append(self._plan(part, variable, visited))
                continue
            side = Side.TAIL if part.tail == variable else Side.HEAD
            other = part.head if side is Side.TAIL else part.tail
            if other in visited:
                raise InputError(f"{part} closes a circle; the links of a question form a tree")
            id_ = self._relations[part]
            relation, curve = self._run.tables.relations[id_], self._calibration.curve_of(id_, side)
            anchor: int | Node
            if is_variable(other):
                visited.add(other)
                anchor = self._grow(parts, other, visited)
            else:
                anchor = self._run.tables.vocabulary(relation.anchor_type(side)).id(other)
            children.append(Hop(id_, relation, side, curve, anchor))
        return Node("and", children)

    @torch.no_grad()
    def answer(self, k: int) -> list[dict[str, Any]]:
        """Return the best answers: rank, entity, probability and path."""
        check_k(k)
        with full_float32_matmuls():
            values = self._values(self._root, self.answer_type)
        names, answers = self._run.tables.vocabulary(self.answer_type), []
        for rank, id_ in enumerate(_best(values, k)[: np.count_nonzero(values > 0)].tolist(), start=1):
            answer = {"rank": rank, "entity": names[id_], "probability": float(values[id_])}
            answers.append({**answer, "path": self._path(self._root, id_)})
        return answers

    def _values(self, node: Hop | Node, type_: str) -> np.ndarray:
        """Return the value of every entity of a type, (N,) float64."""
        if isinstance(node, Hop):
            return self._hop(node)
        values = [self._values(child, type_) for child in node.children]
        if node.operation == "not":
            return 1 - values[0]
        if node.operation == "or":
            node.best = np.argmax(values, axis=0)
            return 1 - functools.reduce(np.multiply, [1 - value for value in values])
        # No child: a variable that is only linked onwards.
        values = values or [np.ones(len(self._run.tables.vocabulary(type_)))]
        return functools.reduce(np.multiply, values)

    def _hop(self, hop: Hop) -> np.ndarray:
        """Return the greatest value over the beam of each entity at the other side, (N,)."""
        tables, anchor_type = self._run.tables, hop.relation.anchor_type(hop.side)
        if isinstance(hop.anchor, Node):
            values = self._values(hop.anchor, anchor_type)
            hop.ids = _best(values, self._beam)
            hop.values = values[hop.ids]
        else:
            hop.ids, hop.values = np.array([hop.anchor]), np.ones(1)
        hop.query = self._run.queries(hop.side, hop.ids, hop.relation_id, torch.float32)
        hop.known = self._known.answers(hop.side, hop.ids, np.full(len(hop.ids), hop.relation_id))
        type_ = hop.relation.candidate_type(hop.side)
        best_values = np.zeros(len(tables.vocabulary(type_)))
        low = least_score(hop.curve, LEAST_PROBABILITY)
        for row, ids, scores in self._run.likely_candidates.search(type_, hop.query, low):
            np.maximum.at(best_values, ids, hop.curve(scores) * hop.values[row])
        index, answers = hop.known
        np.maximum.at(best_values, answers, hop.values[index])
        return best_values

    def _path(self, node: Hop | Node, id_: int) -> list[dict[str, Any]]:
        """Return the links that gave an entity its value, those nearest to given entities first."""
        if isinstance(node, Node):
            if node.operation == "or":
                return self._path(node.children[node.best[id_]], id_)
            links = [link for child in node.children for link in self._path(child, id_)]
            return [{**link, "not": link["not"] ^ (node.operation == "not")} for link in links]
        row = self._run.tables.gather(node.relation.candidate_type(node.side), torch.tensor([id_])).float()
        scores = self._run.model.compare(node.query, row)[:, 0].numpy()
        index, answers = node.known
        known = np.isin(np.arange(len(node.ids)), index[answers == id_])
        # Of the links of the beam with the entity.
        probabilities = np.where(known, 1.0, node.curve(scores))
        best = int(np.argmax(probabilities * node.values))
        other = int(node.ids[best])
        before = self._path(node.anchor, other) if isinstance(node.anchor, Node) else []
        ends = (other, id_) if node.side is Side.TAIL else (id_, other)
        link = {**self._run.named_triple(ends[0], node.relation_id, ends[1]), "not": False}
        return [*before, {**link, "probability": float(probabilities[best]), "known": bool(known[best])}]


def _best(values: np.ndarray, k: int) -> np.ndarray:
    """Return the places of the k greatest values, in descending order, equal ones by place."""
    places = np.flatnonzero(values > 0)  # most are 0 in a large graph
    if k > len(places):
        places = np.arange(len(values))
    elif k < len(places):
        above = values[places]
        places = places[above >= np.partition(above, -k)[-k]]
    return places[np.argsort(-values[places], kind="stable")][:k]
