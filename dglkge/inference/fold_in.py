"""Fold-in: rows for new entities from their triples alone; all other rows stay.

The row of a new entity minimizes the run's own loss and regularizer by L-BFGS (Liu and Nocedal 1989). It
starts at the known entity that answers the entity's queries best. Where scores are inner products of queries
that are linear in the entity (ComplEx, DistMult, RESCAL), softmax, cross entropy and the norms of rows are
convex in the row, which then is the one minimum.

The loss has the queries of the own triples, as the entity given and as the answer, with their penalties; and
the queries of other triples, in which it is one negative more. Without the latter nothing keeps a row from
being a good answer to everything. Scores are float32, the row and the sum are float64. Where a type has more
entities, and the training more triples, than are taken, fixed samples stand for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

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
    best_row,
    run_loss,
    run_regularizer,
)
from dglkge.inference.frames import triple_columns
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

NUM_CANDIDATES = 1 << 12
"""Entities of a type that are candidates, where it has more."""

NUM_TRIPLES = 1 << 12
"""Training triples in whose queries a new entity is a negative, where there are more."""

MAX_SCORES = 1 << 23
"""Scores of an entity's queries for a side; of an entity with more, triples that are evenly spaced count."""


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
        self._new: Mapping[str, Tensor] = {}
        self._losses: dict[str, CandidateLoss] = {}
        train = dataset.split(TRAIN)
        sample = self._sample(len(train), NUM_TRIPLES).numpy()
        self._train, self._share = np.asarray(train[sample]), len(train) / max(1, len(sample))
        self._others: dict[str, list[Term]] = {}

    def with_entities(self, frame: pd.DataFrame) -> tuple[Checkpoint, np.ndarray]:
        """Return the checkpoint with the new entities of triples, and the triples by id, (n, 3) int64.

        The ids of new entities follow the last one of their type.
        """
        frame = triple_columns(frame).astype(str)
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

        A triple of two new ones counts as soon as the other one has a row. Then their rows are found once
        more.
        """
        self._new = new
        ends = [self._ends(triple) for triple in triples]
        triples_of: dict[Entity, list[int]] = {}
        for place, pair in enumerate(ends):
            for entity in dict.fromkeys(pair):
                if self._is_new(entity):
                    triples_of.setdefault(entity, []).append(place)
        missing = set(triples_of)
        joined = {one for pair in ends if pair[0] != pair[1] and all(map(self._is_new, pair)) for one in pair}
        for entities in (list(triples_of), [one for one in triples_of if one in joined]):
            for entity in entities:
                usable = [place for place in triples_of[entity] if not missing & ({*ends[place]} - {entity})]
                if usable:
                    new[entity[0]][entity[1] - self._counts[entity[0]]] = self._row(entity, triples[usable])
                    missing.discard(entity)
        return [entity for entity in triples_of if entity in missing]

    def _ends(self, triple: np.ndarray) -> tuple[Entity, Entity]:
        relation = self._relations[triple[1]]
        return (relation.lhs, int(triple[0])), (relation.rhs, int(triple[2]))

    def _is_new(self, entity: Entity) -> bool:
        return entity[1] >= self._counts[entity[0]]

    def _row(self, entity: Entity, triples: np.ndarray) -> Tensor:
        """Return the best row (D,) of an entity for its triples."""
        own, scores = self._own_terms(entity, triples)
        candidates = self._candidates(entity[0]).rows
        start = candidates[torch.stack(scores).sum(0).argmax()] if scores else candidates.mean(0)
        row = best_row(start, [*own, *self._other_terms(entity[0])])
        if self._max_norm:
            limit_norms(row.unsqueeze(0).numpy(), self._max_norm)
        return row

    def _own_terms(self, entity: Entity, triples: np.ndarray) -> tuple[list[Term], list[Tensor]]:
        """Return terms of an entity's triples, and scores of the candidates where it is an answer."""
        ends = [self._ends(triple) for triple in triples]
        terms, scores = [], []
        for side in self._sides:
            # By whether it is given, and by the type of the other entity.
            groups: dict[tuple[bool, str], list[int]] = {}
            for place, pair in enumerate(ends):
                given, answer = pair if side is Side.TAIL else pair[::-1]
                is_given = given == entity
                groups.setdefault((is_given, (answer if is_given else given)[0]), []).append(place)
            for (is_given, other), places in groups.items():
                term, of_candidates = self._own_term(entity, side, is_given, other, triples[places])
                terms.append(term)
                scores += [] if of_candidates is None else [of_candidates]
        return terms, scores

    def _own_term(
        self, entity: Entity, side: Side, is_given: bool, other: str, triples: np.ndarray
    ) -> tuple[Term, Tensor | None]:
        """Return the term of triples for one side, in all of which the entity has the same part."""
        model, loss = self._model, self._candidates(other if is_given else entity[0])
        count = min(len(triples), max(1, MAX_SCORES // len(loss.ids)))
        share = len(triples) / count
        triples = triples[np.linspace(0, len(triples) - 1, count).astype(np.int64)]
        other_ids = torch.from_numpy(triples[:, side.column if is_given else side.anchor_column])
        relation_ids, places = torch.from_numpy(triples[:, 1]).unique(return_inverse=True)
        relations = self._checkpoint.gather(RELATION, relation_ids).double()
        fixed_rows = self._gather(other, other_ids)
        is_own = ((other_ids == entity[1]) & (other == entity[0])).unsqueeze(1)
        weights = share * self._weights[relation_ids][places]
        ignored = torch.from_numpy(triples[:, [side.column]]) == loss.ids
        fixed = None
        if not is_given:  # the row has no part in the queries
            fixed = model.compare(model.query(fixed_rows, relations, side, places=places).float(), loss.rows)

        def term(row: Tensor) -> Tensor:
            others, own = torch.where(is_own, row, fixed_rows), row.expand_as(fixed_rows)
            given, answers = (own, others) if is_given else (others, own)
            query = model.query(given, relations, side, places=places)
            negative = fixed
            if negative is None:
                # Triples of one relation ask the same.
                distinct = model.query(row.expand(len(relations), -1), relations, side)
                negative = model.compare(distinct.float(), loss.rows)[places]
            losses = loss(model.compare_pairs(query, answers).float(), negative, ignored)
            if self._regularizer is not None:
                losses = losses + self._regularizer.penalties(
                    model, given, relations, answers, side, query, places
                )
            return (losses * weights).sum()

        return term, None if fixed is None else weights.float() @ fixed

    def _other_terms(self, table: str) -> list[Term]:
        """Return terms of queries of the training whose answers are of a type."""
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
        relation_ids, places = torch.from_numpy(triples[:, 1]).unique(return_inverse=True)
        relations = self._checkpoint.gather(RELATION, relation_ids).double()
        query = model.query(anchors, relations, side, places=places)
        answer_ids = torch.from_numpy(triples[:, side.column])
        positive = model.compare_pairs(query, self._gather(table, answer_ids)).float()
        negative = model.compare(query.float(), loss.rows)
        references = loss.references(positive, negative, answer_ids.unsqueeze(1) == loss.ids)
        query, weights = query.float(), self._share * self._weights[relation_ids][places]

        def term(row: Tensor) -> Tensor:
            scores = model.compare(query, row.float().unsqueeze(0)).squeeze(1)
            return (loss.of_negative(references, scores) * weights).sum()

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
