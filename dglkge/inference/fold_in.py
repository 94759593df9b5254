"""Fold-in: rows for new entities from their triples alone; all other rows stay.

The row of a new entity minimizes the run's own loss and regularizer by L-BFGS (Liu and Nocedal 1989), for
many entities at once. It starts at the known entity that answers the entity's queries best. Where scores are
inner products of queries that are linear in the entity (ComplEx, DistMult, RESCAL), softmax, cross entropy
and the norms of rows are convex in the row, which then is the one minimum.

The loss has the queries of the own triples, as the entity given and as the answer, with their penalties; and
the queries of other triples, in which it is one negative more. Without the latter nothing keeps a row from
being a good answer to everything. Scores are float32, the row and the sum are float64. Where a type has more
entities, and the training more triples, than are taken, fixed samples stand for all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from dglkge.checkpoint.conversion import saved_entity_ids, saved_types
from dglkge.checkpoint.reader import Checkpoint
from dglkge.config.schema import value_at
from dglkge.data.dataset import Dataset
from dglkge.data.dataset_files import TRAIN
from dglkge.data.named_triples import find_triples
from dglkge.data.text_format import ROLES
from dglkge.errors import InputError
from dglkge.evaluation.metrics import places_by_id
from dglkge.inference.fold_in_loss import CandidateLoss, Term, better_rows, run_loss, run_regularizer
from dglkge.inference.frames import triple_parts
from dglkge.inference.rules import Entity, evenly
from dglkge.kernels.rules import limit_norms
from dglkge.model.kge_model import KgeModel
from dglkge.model.regularizers import Regularizer
from dglkge.typing import RELATION, Side

NUM_CANDIDATES = 1 << 10
"""Entities of a type that are candidates, where it has more."""

NUM_TRIPLES = 1 << 12
"""Training triples in whose queries a new entity is a negative, where there are more."""

MAX_SCORES = 1 << 23
"""Scores of a block of entities; of an entity with more for a side, triples that are evenly spaced count."""

MAX_ROUNDS = 5
"""Times that the search of a row begins anew where it was."""


def new_names(checkpoint: Checkpoint, frame: pd.DataFrame) -> dict[str, list[str]]:
    """Return the names that no entity type has, by the type that the relations of their triples give them.

    Parameters
    ----------
    frame : DataFrame
        Columns head, relation and tail, of texts.
    """
    vocabularies = {name: checkpoint.vocabulary(name) for name in checkpoint.entity_types}
    possible: dict[str, set[str]] = {}
    for row, (head, relation, tail) in zip(frame.index, frame.itertuples(index=False)):
        try:
            relations = [checkpoint.relations[id_] for id_ in checkpoint.relations.ids_of(relation)]
        except InputError as error:
            raise InputError(f"row {row}: {error}") from None
        new = {name for name in (head, tail) if not any(name in names for names in vocabularies.values())}
        pairs = [(fitting.lhs, fitting.rhs) for fitting in relations]
        for place, name in enumerate((head, tail)):
            pairs = [types for types in pairs if name in new or name in vocabularies[types[place]]]
        for place, name in enumerate((head, tail)):
            if name in new:
                types_of_end = {types[place] for types in pairs}
                possible[name] = possible.get(name, types_of_end) & types_of_end
    names_by_type: dict[str, list[str]] = {}
    for name, types in possible.items():
        if len(types) != 1:
            labels = ", ".join(map(repr, checkpoint.relations.labels.names))
            raise InputError(
                f"the relations of the new entity {name!r} must give it one type, and give it "
                f"{' or '.join(sorted(types)) or 'none'}; relations: {labels}"
            )
        names_by_type.setdefault(types.pop(), []).append(name)
    return names_by_type


def lacking_triples(checkpoint: Checkpoint, dataset: Dataset) -> pd.DataFrame:
    """Return the training triples of a data set, by name, with an entity that a checkpoint lacks."""
    types = saved_types(checkpoint.entity_types, dataset.entity_types)
    names = {name: dataset.vocabulary(name) for name in dataset.entity_types}
    lacks = {name: saved_entity_ids(checkpoint, types[name], names[name]) < 0 for name in names}
    train, relations = dataset.split(TRAIN), dataset.relations.relations
    rows = []
    for id_, places in places_by_id(train[:, 1]).items():
        relation, triples = relations[id_], train[places]
        triples = triples[lacks[relation.lhs][triples[:, 0]] | lacks[relation.rhs][triples[:, 2]]]
        heads, tails = names[relation.lhs], names[relation.rhs]
        rows += [(heads[head], relation.name, tails[tail]) for head, _, tail in triples.tolist()]
    return pd.DataFrame(rows, columns=list(ROLES))


class _EntityTriples:
    """Triples (n, 3) of a new entity, at most so many of them; of more, some that are evenly spaced."""

    def __init__(self, id_: int, triples: np.ndarray, most: int) -> None:
        self.id, self.triples = id_, evenly(triples, most)
        self.share = len(triples) / len(self.triples)


class _Part(NamedTuple):
    """Queries (B,) of triples of a block of new entities, for one side and one type of the other end.

    Of each query number and id of the entity, weight, and place of its relation among rows.
    """

    side: Side
    other: str
    triples: np.ndarray
    owners: Tensor
    ids: Tensor
    weights: Tensor
    relations: Tensor
    places: Tensor


def _joined(parts: Sequence[_Part]) -> list[Tensor]:
    """Return owners, ids and weights of all parts."""
    return [torch.cat(columns) for columns in zip(*((part.owners, part.ids, part.weights) for part in parts))]


def _pieces(parts: Sequence[_Part], *rows: Tensor) -> Iterator[tuple[Any, ...]]:
    """Yield each part, and its piece of each tensor."""
    sizes = [len(part.owners) for part in parts]
    return zip(parts, *(tensor.split(sizes) for tensor in rows))


class FoldIn:
    """Finds the rows of new entities of a run."""

    def __init__(self, checkpoint: Checkpoint, model: KgeModel, dataset: Dataset) -> None:
        if checkpoint.meta.dims:
            raise InputError(f"{checkpoint.path}: new entities get rows where all have one width")
        self._checkpoint, self._model = checkpoint, model
        self._counts, self._relations = checkpoint.meta.entity_types, checkpoint.relations.relations
        self._loss, self._regularizer = run_loss(checkpoint), run_regularizer(checkpoint, model)
        # The penalty of a query is then the sum of those of its rows: that of a new row is computed once.
        rule = getattr(type(self._regularizer), "query_penalties", None)
        self._penalizes_rows = rule is Regularizer.query_penalties
        weights = self._loss.settings.relation_weights
        relation_weights = [weights.get(relation.name, 1.0) for relation in self._relations]
        self._weights = torch.tensor(relation_weights, dtype=torch.float64)
        self._max_norm = float(value_at(checkpoint.config, ("model", "max_norm"), 0.0))
        fields = {side: ("negatives", f"num_for_{side.value}s") for side in Side}
        self._sides = [side for side, field in fields.items() if value_at(checkpoint.config, field, -1)]
        types = list(self._counts)
        # Number of the type of the head and of the tail of each relation.
        self._types = {
            side: np.array([types.index(relation.candidate_type(side)) for relation in self._relations])
            for side in Side
        }
        self._new: Mapping[str, Tensor] = {}
        self._candidates = functools.cache(self._candidate_loss)
        self._training_term = functools.cache(self._term_of_training)
        train = dataset.split(TRAIN)
        sample = self._sample(len(train), NUM_TRIPLES).numpy()
        self._train, self._share = np.asarray(train[sample]), len(train) / max(1, len(sample))

    def with_entities(self, frame: pd.DataFrame) -> tuple[Checkpoint, np.ndarray]:
        """Return the checkpoint with the new entities of triples, and the triples by id, (n, 3) int64.

        The ids of new entities follow the last one of their type.
        """
        parts = triple_parts(frame, self._checkpoint.relations)
        for row in [row for row, part in zip(frame.index, parts) if None in part][:1]:
            raise InputError(f"row {row}: head, relation, tail or time is missing")
        frame = pd.DataFrame(parts, frame.index, list(ROLES), dtype="category")
        names, dim = new_names(self._checkpoint, frame), self._checkpoint.meta.dim
        new = {table: (names[table], torch.zeros(len(names[table]), dim)) for table in names}
        named = self._checkpoint.with_new_rows(new)
        triples, faults = find_triples(frame, named.relations, named.vocabulary)
        for row in sorted(faults)[:1]:
            raise InputError(f"row {frame.index[row]}: {faults[row]}")
        for table, id_ in self._fill(triples, {table: rows for table, (_, rows) in new.items()}):
            name = names[table][id_ - self._counts[table]]
            raise InputError(f"no triple joins the new entity {name!r} to one that has a row")
        return self._checkpoint.with_new_rows(new), triples

    def _fill(self, triples: np.ndarray, new: Mapping[str, Tensor]) -> list[Entity]:
        """Fill the rows of new entities; return those that no chain of triples joins to known ones.

        First come those with triples of known ones, then what these are joined to, and so on. Then the rows
        of all that are joined to new ones are found once more.
        """
        self._new, triples_of = new, dict[Entity, list[int]]()
        types = [(relation.lhs, relation.rhs) for relation in self._relations]
        ends = [list(zip(types[relation], (head, tail))) for head, relation, tail in triples.tolist()]
        for place, pair in enumerate(ends):
            for type_, id_ in dict.fromkeys(pair):
                if id_ >= self._counts[type_]:
                    triples_of.setdefault((type_, id_), []).append(place)
        missing = triples_of
        while missing:
            usable = {}
            for entity, places in missing.items():
                places = [place for place in places if not missing.keys() & ({*ends[place]} - {entity})]
                # A triple that joins an entity to itself gives it no place among the others.
                if any(len({*ends[place]}) > 1 for place in places):
                    usable[entity] = places
            if not usable:
                return list(missing)
            self._find(usable, triples)
            missing = {entity: places for entity, places in missing.items() if entity not in usable}
        between_new = [pair for pair in ends if pair[0] != pair[1] and triples_of.keys() >= {*pair}]
        joined = {entity for pair in between_new for entity in pair}
        self._find({entity: places for entity, places in triples_of.items() if entity in joined}, triples)
        return []

    def _find(self, places_of: Mapping[Entity, Sequence[int]], triples: np.ndarray) -> None:
        """Write the best rows of entities for some of the triples, in blocks of one type."""
        for table, rows in self._new.items():
            num_candidates, block, total = len(self._candidates(table).ids), list[_EntityTriples](), 0
            for id_, places in [(id_, places) for (kind, id_), places in places_of.items() if kind == table]:
                entity = _EntityTriples(id_, triples[list(places)], max(1, MAX_SCORES // num_candidates))
                cost = 2 * (len(entity.triples) * num_candidates + len(self._train))
                if block and total + cost > MAX_SCORES:
                    self._find_block(table, block, rows)
                    block, total = [], 0
                block.append(entity)
                total += cost
            if block:
                self._find_block(table, block, rows)

    def _find_block(self, table: str, block: Sequence[_EntityTriples], rows: Tensor) -> None:
        places = torch.tensor([entity.id for entity in block]) - self._counts[table]
        terms, best = self._own_terms(table, block)
        for _ in range(MAX_ROUNDS):
            best, is_open = better_rows(best, [*terms, self._training_term(table)])
            rows[places] = best.float()
            if not is_open.any():
                break
            # Few take much longer than the rest: they go on by themselves.
            open_places = is_open.nonzero()[:, 0]
            block, places, best = [block[at] for at in open_places], places[open_places], best[open_places]
            terms, _ = self._own_terms(table, block)
        if self._max_norm:
            limit_norms(rows.numpy(), self._max_norm)

    def _own_terms(self, table: str, block: Sequence[_EntityTriples]) -> tuple[list[Term], Tensor]:
        """Return terms of the triples of E entities, and for each the candidate (E, D) that answers best."""
        triples = np.concatenate([entity.triples for entity in block])
        sizes = torch.tensor([len(entity.triples) for entity in block])
        owners = torch.arange(len(block)).repeat_interleave(sizes)
        ids = torch.tensor([entity.id for entity in block])[owners]
        shares = torch.tensor([entity.share for entity in block], dtype=torch.float64)
        weights = shares[owners] * self._weights[triples[:, 1]]
        types, number = list(self._counts), list(self._counts).index(table)
        is_end = {
            side: (self._types[side][triples[:, 1]] == number) & (triples[:, side.column] == ids.numpy())
            for side in Side
        }
        anchored, answered = dict[str, list[_Part]](), list[_Part]()
        for side in self._sides:
            is_anchor, ends = is_end[side.other], (side, side.other)
            other_types = np.where(is_anchor, *(self._types[end][triples[:, 1]] for end in ends))
            for kind, at in places_by_id(2 * other_types + is_anchor).items():
                other, relations = types[kind // 2], self._relation_rows(triples[at])
                part = _Part(side, other, triples[at], owners[at], ids[at], weights[at], *relations)
                (anchored.setdefault(other, []) if kind % 2 else answered).append(part)
        terms = [self._anchor_term(parts, table) for parts in anchored.values()]
        candidates = self._candidates(table).rows
        start = candidates.mean(0).repeat(len(block), 1)
        if answered:
            term, scores = self._answer_term(answered, table, len(block))
            terms.append(term)
            answered_best = scores.any(1)
            start[answered_best] = candidates[scores[answered_best].argmax(1)]
        if self._regularizer is not None and self._penalizes_rows:
            regularizer, num_ends = self._regularizer, torch.from_numpy(sum(is_end.values(), 0))
            factor = torch.zeros_like(shares).index_add(0, owners, len(self._sides) * weights * num_ends)
            terms.append(lambda rows: factor * regularizer(rows))
        return terms, start

    def _anchor_term(self, parts: Sequence[_Part], table: str) -> Term:
        """Return the term of queries of entities, with answers of one type."""
        other = parts[0].other
        model, loss, (owners, ids, weights) = self._model, self._candidates(other), _joined(parts)
        answer_ids = torch.cat([torch.from_numpy(part.triples[:, part.side.column]) for part in parts])
        answers = self._gather(other, answer_ids)
        is_loop = ((answer_ids == ids) & (other == table)).unsqueeze(1)
        ignored = answer_ids.unsqueeze(1) == loss.ids
        # Triples of one entity and relation have the same query.
        numbers = [torch.from_numpy(2 * part.triples[:, 1] + part.side.column // 2) for part in parts]
        pairs, inverse = torch.stack([owners, torch.cat(numbers)]).unique(dim=1, return_inverse=True)
        first = torch.empty_like(pairs[0]).scatter_(0, inverse, torch.arange(len(inverse)))

        def term(rows: Tensor) -> Tensor:
            anchors = rows[owners]
            query = self._queries(parts, anchors)
            true_answers = torch.where(is_loop, anchors, answers)
            negative = model.compare(query[first].float(), loss.rows)[inverse]
            losses = loss(model.compare_pairs(query, true_answers).float(), negative, ignored)
            losses = losses + self._penalties(parts, anchors, true_answers, query)
            return rows.new_zeros(len(rows)).index_add(0, owners, losses * weights)

        return term

    def _answer_term(self, parts: Sequence[_Part], table: str, count: int) -> tuple[Term, Tensor]:
        """Return the term of queries that E entities answer, and weighted scores (E, M) of candidates."""
        model, loss, (owners, ids, weights) = self._model, self._candidates(table), _joined(parts)
        rows_of_parts = [self._gather(part.other, part.triples[:, part.side.anchor_column]) for part in parts]
        anchors = torch.cat(rows_of_parts)
        query = self._queries(parts, anchors)
        scores = model.compare(query.float(), loss.rows)
        against = loss.against(scores, ids.unsqueeze(1) == loss.ids)

        def term(rows: Tensor) -> Tensor:
            answers = rows[owners]
            losses = against(model.compare_pairs(query, answers).float())
            losses = losses + self._penalties(parts, anchors, answers, query)
            return rows.new_zeros(len(rows)).index_add(0, owners, losses * weights)

        weighted = scores * weights.float().unsqueeze(1)
        return term, scores.new_zeros(count, len(loss.ids)).index_add_(0, owners, weighted)

    def _relation_rows(self, triples: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return the rows (U, Dr) of the relations of triples (B, 3), and the place (B,) of each one's."""
        ids, places = torch.from_numpy(triples[:, 1]).unique(return_inverse=True)
        return self._checkpoint.gather(RELATION, ids).double(), places

    def _queries(self, parts: Sequence[_Part], anchors: Tensor) -> Tensor:
        query, pairs = self._model.query, _pieces(parts, anchors)
        return torch.cat([query(rows, part.relations, part.side, places=part.places) for part, rows in pairs])

    def _penalties(self, parts: Sequence[_Part], *rows: Tensor) -> Tensor | float:
        """Return the penalty of each query with its answer, where it is not the sum of those of rows.

        The rows are those of the anchors, the answers and the queries.
        """
        if self._regularizer is None or self._penalizes_rows:
            return 0.0
        penalties = self._regularizer.penalties
        blocks = [
            penalties(self._model, anchor, part.relations, answer, part.side, query, part.places)
            for part, anchor, answer, query in _pieces(parts, *rows)
        ]
        return torch.cat(blocks)

    def _term_of_training(self, table: str) -> Term:
        """Return the term of training queries whose answers are of a type."""
        loss, model = self._candidates(table), self._model
        parts = [(torch.empty(0, model.query_dim), torch.empty(0), torch.empty(0))]
        number = list(self._counts).index(table)
        for side in self._sides:
            answered = self._train[self._types[side][self._train[:, 1]] == number]
            for anchor_number, at in places_by_id(self._types[side.other][answered[:, 1]]).items():
                triples = answered[at]
                anchors = self._gather(list(self._counts)[anchor_number], triples[:, side.anchor_column])
                relations, places = self._relation_rows(triples)
                query = model.query(anchors, relations, side, places=places)
                answer_ids = torch.from_numpy(triples[:, side.column])
                positive = model.compare_pairs(query, self._gather(table, answer_ids)).float()
                negative = model.compare(query.float(), loss.rows)
                references = loss.references(positive, negative, answer_ids.unsqueeze(1) == loss.ids)
                weights = self._share * self._weights[triples[:, 1]]
                parts.append((query.float(), references, weights.float()))
        query, references, weights = map(torch.cat, zip(*parts))

        def term(rows: Tensor) -> Tensor:
            return weights @ loss.negative_change(references, model.compare(query, rows.float()))

        return term

    def _gather(self, table: str, ids: Tensor | np.ndarray) -> Tensor:
        """Return rows (n, D) of known and of new entities in float64."""
        ids = torch.as_tensor(ids)
        is_new = ids >= self._counts[table]
        rows = self._checkpoint.gather(table, ids.where(~is_new, 0)).double()
        if is_new.any():
            rows[is_new] = self._new[table][ids[is_new] - self._counts[table]].double()
        return rows

    def _candidate_loss(self, table: str) -> CandidateLoss:
        """Return the loss over a type's entities, or over a sample of them."""
        ids = self._sample(self._counts[table], NUM_CANDIDATES)
        return CandidateLoss(self._loss, self._counts[table], ids, self._checkpoint.gather(table, ids))

    def _sample(self, count: int, most: int) -> Tensor:
        """Return all numbers below a count, or some that depend on the run's seed alone."""
        if count <= most:
            return torch.arange(count)
        generator = torch.Generator().manual_seed(self._checkpoint.meta.seed)
        return torch.randperm(count, generator=generator)[:most].sort().values
