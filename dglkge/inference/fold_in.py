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

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dglkge.checkpoint.conversion import saved_entity_ids, saved_types
from dglkge.checkpoint.reader import Checkpoint
from dglkge.config.schema import value_at
from dglkge.data.dataset import Dataset
from dglkge.data.dataset_files import TRAIN
from dglkge.data.text_format import ROLES
from dglkge.errors import InputError
from dglkge.inference.fold_in_loss import (
    CandidateLoss,
    Term,
    better_rows,
    run_loss,
    run_regularizer,
)
from dglkge.inference.frames import triple_columns, triple_parts
from dglkge.kernels.rules import limit_norms
from dglkge.model.kge_model import KgeModel
from dglkge.registry import deferred
from dglkge.typing import RELATION, Side

if TYPE_CHECKING:
    import pandas as pd

    from dglkge.data import named_triples
else:
    # Imported at first use: pandas takes half a second.
    pd, named_triples = deferred("pandas"), deferred("dglkge.data.named_triples")

Entity = tuple[str, int]
"""Type and id."""

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
        new = {one for one in (head, tail) if not any(one in names for names in vocabularies.values())}
        fitting = [
            one
            for one in relations
            if all(end in new or end in vocabularies[of] for end, of in ((head, one.lhs), (tail, one.rhs)))
        ]
        for name, side in ((head, Side.HEAD), (tail, Side.TAIL)):
            if name in new:
                types = {one.candidate_type(side) for one in fitting}
                possible[name] = possible.get(name, types) & types
    found: dict[str, list[str]] = {}
    for name, types in possible.items():
        if len(types) != 1:
            labels = ", ".join(map(repr, checkpoint.relations.labels.names))
            raise InputError(
                f"the relations of the new entity {name!r} must give it one type, and give it "
                f"{' or '.join(sorted(types)) or 'none'}; relations: {labels}"
            )
        found.setdefault(types.pop(), []).append(name)
    return found


def lacking_triples(checkpoint: Checkpoint, dataset: Dataset) -> pd.DataFrame:
    """Return the training triples of a data set, by name, with an entity that a checkpoint lacks."""
    types = saved_types(checkpoint.entity_types, dataset.entity_types)
    names = {name: dataset.vocabulary(name) for name in dataset.entity_types}
    lacks = {name: saved_entity_ids(checkpoint, types[name], names[name]) < 0 for name in names}
    train, relations = dataset.split(TRAIN), dataset.relations.relations
    found = []
    for id_ in np.unique(train[:, 1]).tolist():
        one, triples = relations[id_], train[train[:, 1] == id_]
        triples = triples[lacks[one.lhs][triples[:, 0]] | lacks[one.rhs][triples[:, 2]]]
        heads, tails = names[one.lhs], names[one.rhs]
        found += [(heads[head], one.name, tails[tail]) for head, _, tail in triples.tolist()]
    return pd.DataFrame(found, columns=list(ROLES))


class _Given:
    """Triples (n, 3) of a new entity, at most so many of them; of more, some that are evenly spaced."""

    def __init__(self, id_: int, triples: np.ndarray, most: int) -> None:
        count = min(len(triples), most)
        self.id, self.share = id_, len(triples) / count
        self.triples = triples[np.linspace(0, len(triples) - 1, count).astype(np.int64)]


class _Part(NamedTuple):
    """Triples (B, 3) of a block of new entities: number there and id of the entity of each, and weights."""

    triples: np.ndarray
    owners: Tensor
    ids: Tensor
    weights: Tensor

    def chosen(self, places: np.ndarray) -> _Part:
        return _Part(self.triples[places], self.owners[places], self.ids[places], self.weights[places])


class FoldIn:
    """Finds the rows of new entities of a run."""

    def __init__(self, checkpoint: Checkpoint, model: KgeModel, dataset: Dataset) -> None:
        self._checkpoint, self._model = checkpoint, model
        self._counts, self._relations = checkpoint.meta.entity_types, checkpoint.relations.relations
        self._loss, self._regularizer = run_loss(checkpoint), run_regularizer(checkpoint, model)
        weights = self._loss.settings.relation_weights
        of_relations = [weights.get(one.name, 1.0) for one in self._relations]
        self._weights = torch.tensor(of_relations, dtype=torch.float64)
        self._max_norm = float(value_at(checkpoint.config, ("model", "max_norm"), 0.0))
        fields = {side: ("negatives", f"num_for_{side.value}s") for side in Side}
        self._sides = [side for side, field in fields.items() if value_at(checkpoint.config, field, -1)]
        types = list(self._counts)
        self._types = {
            side: np.array([types.index(one.candidate_type(side)) for one in self._relations])
            for side in Side
        }
        """Number of the type of the head and of the tail of each relation."""
        self._new: Mapping[str, Tensor] = {}
        self._losses: dict[str, CandidateLoss] = {}
        self._others: dict[str, list[Term]] = {}
        train = dataset.split(TRAIN)
        sample = self._sample(len(train), NUM_TRIPLES).numpy()
        self._train, self._share = np.asarray(train[sample]), len(train) / max(1, len(sample))

    def with_entities(self, frame: pd.DataFrame) -> tuple[Checkpoint, np.ndarray]:
        """Return the checkpoint with the new entities of triples, and the triples by id, (n, 3) int64.

        The ids of new entities follow the last one of their type.
        """
        triple_columns(frame)  # raises if one is absent
        parts = triple_parts(frame)
        for row in [row for row, part in zip(frame.index, parts) if None in part][:1]:
            raise InputError(f"row {row}: head, relation, tail or time is missing")
        frame = pd.DataFrame(parts, frame.index, list(ROLES))
        names = new_names(self._checkpoint, frame)
        rows = {table: torch.zeros(len(new), self._checkpoint.meta.dim) for table, new in names.items()}

        def extended() -> Checkpoint:
            return self._checkpoint.with_new_rows({table: (names[table], rows[table]) for table in names})

        named = extended()
        categories = frame.astype("category")
        triples, faults = named_triples.find_triples(categories, named.relations, named.vocabulary)
        for row in sorted(faults)[:1]:
            raise InputError(f"row {frame.index[row]}: {faults[row]}")
        for table, id_ in self._fill(triples, rows):
            name = names[table][id_ - self._counts[table]]
            raise InputError(f"no triple joins the new entity {name!r} to one that has a row")
        return extended(), triples

    def _fill(self, triples: np.ndarray, new: Mapping[str, Tensor]) -> list[Entity]:
        """Fill the rows of new entities; return those that no chain of triples joins to known ones.

        First come those with triples of known ones, then what these are joined to, and so on. Then the rows
        of all that are joined to new ones are found once more.
        """
        self._new = new
        ends = [self._ends(triple) for triple in triples]
        triples_of: dict[Entity, list[int]] = {}
        for place, pair in enumerate(ends):
            for entity in dict.fromkeys(pair):
                if self._is_new(entity):
                    triples_of.setdefault(entity, []).append(place)
        missing = set(triples_of)
        while missing:
            usable = {
                entity: [place for place in triples_of[entity] if not missing & ({*ends[place]} - {entity})]
                for entity in triples_of
                if entity in missing
            }
            # A triple that joins an entity to itself gives it no place among the others.
            usable = {
                entity: places
                for entity, places in usable.items()
                if any(len({*ends[place]}) > 1 for place in places)
            }
            if not usable:
                return [entity for entity in triples_of if entity in missing]
            self._find(usable, triples)
            missing -= usable.keys()
        joined = {one for pair in ends if pair[0] != pair[1] and all(map(self._is_new, pair)) for one in pair}
        self._find({entity: places for entity, places in triples_of.items() if entity in joined}, triples)
        return []

    def _ends(self, triple: np.ndarray) -> tuple[Entity, Entity]:
        relation = self._relations[triple[1]]
        return (relation.lhs, int(triple[0])), (relation.rhs, int(triple[2]))

    def _is_new(self, entity: Entity) -> bool:
        return entity[1] >= self._counts[entity[0]]

    def _find(self, places_of: Mapping[Entity, Sequence[int]], triples: np.ndarray) -> None:
        """Write the best rows of entities for some of the triples, in blocks of one type."""
        for table, rows in self._new.items():
            num_candidates, block, total = len(self._candidates(table).ids), list[_Given](), 0
            for (of, id_), places in places_of.items():
                if of != table:
                    continue
                given = _Given(id_, triples[list(places)], max(1, MAX_SCORES // num_candidates))
                cost = 2 * (len(given.triples) * num_candidates + len(self._train))
                if block and total + cost > MAX_SCORES:
                    self._find_block(table, block, rows)
                    block, total = [], 0
                block.append(given)
                total += cost
            if block:
                self._find_block(table, block, rows)

    def _find_block(self, table: str, block: Sequence[_Given], rows: Tensor) -> None:
        places = torch.tensor([given.id for given in block]) - self._counts[table]
        own, found = self._own_terms(table, block)
        for _ in range(MAX_ROUNDS):
            found, is_open = better_rows(found, [*own, *self._other_terms(table)])
            rows[places] = found.float()
            if not is_open.any():
                break
            # Few take much longer than the rest: they go on by themselves.
            left = is_open.nonzero()[:, 0]
            block, places, found = [block[place] for place in left.tolist()], places[left], found[left]
            own, _ = self._own_terms(table, block)
        if self._max_norm:
            limit_norms(rows.numpy(), self._max_norm)

    def _own_terms(self, table: str, block: Sequence[_Given]) -> tuple[list[Term], Tensor]:
        """Return terms of the triples of E entities, and for each the candidate (E, D) that answers best."""
        counts = torch.tensor([len(given.triples) for given in block])
        triples = np.concatenate([given.triples for given in block])
        owners = torch.arange(len(block)).repeat_interleave(counts)
        shares = torch.tensor([given.share for given in block], dtype=torch.float64)
        own_ids = torch.tensor([given.id for given in block])[owners]
        part = _Part(triples, owners, own_ids, shares[owners] * self._weights[triples[:, 1]])
        candidates, number = self._candidates(table).rows, list(self._counts).index(table)
        scores, terms = torch.zeros(len(block), len(candidates)), []
        for side in self._sides:
            of_given, of_answer = (self._types[one][triples[:, 1]] for one in (side.other, side))
            is_given = (of_given == number) & (triples[:, side.anchor_column] == own_ids.numpy())
            kinds = 2 * np.where(is_given, of_answer, of_given) + is_given
            for kind in np.unique(kinds).tolist():
                asked = part.chosen(np.flatnonzero(kinds == kind)), table, side, list(self._counts)[kind // 2]
                if kind % 2:
                    terms.append(self._given_term(*asked))
                else:
                    term, of_candidates = self._answer_term(*asked)
                    terms.append(term)
                    scores.index_add_(0, asked[0].owners, of_candidates)
        start = candidates[scores.argmax(1)]
        start[~scores.any(1)] = candidates.mean(0)
        return terms, start

    def _given_term(self, part: _Part, table: str, side: Side, other: str) -> Term:
        """Return the term of triples for one side, in which the entities are those given."""
        model, loss, owners = self._model, self._candidates(other), part.owners
        answer_ids = torch.from_numpy(part.triples[:, side.column])
        answers = self._gather(other, answer_ids)
        is_own = ((answer_ids == part.ids) & (other == table)).unsqueeze(1)
        ignored = answer_ids.unsqueeze(1) == loss.ids
        relations, places = self._relation_rows(part.triples)
        # Triples of one entity and relation ask the same.
        pairs, asked = (owners * len(relations) + places).unique(return_inverse=True)
        first = torch.empty_like(pairs).scatter_(0, asked, torch.arange(len(asked)))

        def term(rows: Tensor) -> Tensor:
            own = rows[owners]
            query = model.query(own, relations, side, places=places)
            answering = torch.where(is_own, own, answers)
            negative = model.compare(query[first].float(), loss.rows)[asked]
            losses = loss(model.compare_pairs(query, answering).float(), negative, ignored)
            losses = losses + self._penalties(own, relations, answering, side, query, places)
            return rows.new_zeros(len(rows)).index_add(0, owners, losses * part.weights)

        return term

    def _answer_term(self, part: _Part, table: str, side: Side, other: str) -> tuple[Term, Tensor]:
        """Return the term of triples in which the entities answer, and weighted scores of candidates."""
        model, loss, owners = self._model, self._candidates(table), part.owners
        given = self._gather(other, torch.from_numpy(part.triples[:, side.anchor_column]))
        relations, places = self._relation_rows(part.triples)
        query = model.query(given, relations, side, places=places)
        scores = model.compare(query.float(), loss.rows)
        against = loss.against(scores, part.ids.unsqueeze(1) == loss.ids)

        def term(rows: Tensor) -> Tensor:
            own = rows[owners]
            losses = against(model.compare_pairs(query, own).float())
            losses = losses + self._penalties(given, relations, own, side, query, places)
            return rows.new_zeros(len(rows)).index_add(0, owners, losses * part.weights)

        return term, scores * part.weights.float().unsqueeze(1)

    def _relation_rows(self, triples: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return the rows (U, Dr) of the relations of triples (B, 3), and the place (B,) of each one's."""
        ids, places = torch.from_numpy(triples[:, 1]).unique(return_inverse=True)
        return self._checkpoint.gather(RELATION, ids).double(), places

    def _penalties(
        self, given: Tensor, relations: Tensor, answers: Tensor, side: Side, query: Tensor, places: Tensor
    ) -> Tensor | float:
        """Return the penalty of each query with its answer."""
        if self._regularizer is None:
            return 0.0
        return self._regularizer.penalties(self._model, given, relations, answers, side, query, places)

    def _other_terms(self, table: str) -> list[Term]:
        """Return terms of training queries whose answers are of a type."""
        if table not in self._others:
            self._others[table] = []
            for side in self._sides:
                types = [(one.candidate_type(side), one.anchor_type(side)) for one in self._relations]
                for given in self._counts:
                    fits = np.array([one == (table, given) for one in types])[self._train[:, 1]]
                    if fits.any():
                        self._others[table].append(self._training(table, side, given, self._train[fits]))
        return self._others[table]

    def _training(self, table: str, side: Side, given: str, triples: np.ndarray) -> Term:
        """Return the term of queries of training triples, of one side and one pair of entity types."""
        loss, model = self._candidates(table), self._model
        anchors = self._gather(given, torch.from_numpy(triples[:, side.anchor_column]))
        relations, places = self._relation_rows(triples)
        query = model.query(anchors, relations, side, places=places)
        answer_ids = torch.from_numpy(triples[:, side.column])
        positive = model.compare_pairs(query, self._gather(table, answer_ids)).float()
        negative = model.compare(query.float(), loss.rows)
        references = loss.references(positive, negative, answer_ids.unsqueeze(1) == loss.ids)
        query, weights = query.float(), (self._share * self._weights[triples[:, 1]]).float()

        def term(rows: Tensor) -> Tensor:
            return weights @ loss.of_negative(references, model.compare(query, rows.float()))

        return term

    def _gather(self, table: str, ids: Tensor) -> Tensor:
        """Return rows (n, D) of known and of new entities in float64."""
        is_new = ids >= self._counts[table]
        rows = self._checkpoint.gather(table, ids.where(~is_new, 0)).double()
        if is_new.any():
            rows[is_new] = self._new[table][ids[is_new] - self._counts[table]].double()
        return rows

    def _candidates(self, table: str) -> CandidateLoss:
        """Return the loss over a type's entities, or over a sample of them."""
        if table not in self._losses:
            ids = self._sample(self._counts[table], NUM_CANDIDATES)
            rows = self._checkpoint.gather(table, ids)
            self._losses[table] = CandidateLoss(self._loss, self._counts[table], ids, rows)
        return self._losses[table]

    def _sample(self, count: int, most: int) -> Tensor:
        """Return all numbers below a count, or some that depend on the run's seed alone."""
        if count <= most:
            return torch.arange(count)
        generator = torch.Generator().manual_seed(self._checkpoint.meta.seed)
        return torch.randperm(count, generator=generator)[:most].sort().values
