"""What the explorer asks of a run: names, known triples, predictions, similar entities; no HTTP.

Names are indexed by their text, and similar entities by faiss, their cosines exact.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice, takewhile
from typing import Any

import numpy as np
import pandas as pd
import torch

from dglkge.data.dataset_files import SPLITS
from dglkge.data.known_triples import KnownTriples
from dglkge.data.text_format import ROLES
from dglkge.errors import InputError
from dglkge.inference.attributes import best_numbers
from dglkge.inference.choices import ALL, Known
from dglkge.inference.frames import Query
from dglkge.inference.links.approximate import SPARE, RowIndex
from dglkge.inference.links.completion import find_links, plan_completion
from dglkge.inference.questions import Asked
from dglkge.inference.run import Run
from dglkge.inference.search import check_k, most_similar
from dglkge.inference.trained_model import UnknownEntityError
from dglkge.inference.whole_tables import Tables
from dglkge.typing import Side

SAMPLE = 100
"""Entities that the recall is measured on."""

RECALL_AT = 10
"""Neighbours of each that are compared."""


class Neighbours(RowIndex):
    """Approximate nearest entities of one type by cosine; the cosines of the best candidates are exact.

    Attributes
    ----------
    recall : float
        Share of the exact 10 nearest that a search found, over a sample of entities.
    """

    is_normalized = True

    def __init__(
        self, tables: Tables, entity_type: str, threads: int = 1, show_progress: bool = False
    ) -> None:
        super().__init__(tables, entity_type, threads, show_progress)
        num_rows = len(tables[entity_type])
        sample = np.random.default_rng(1).choice(num_rows, min(num_rows, SAMPLE), replace=False)
        exact = most_similar(tables, entity_type, torch.from_numpy(sample), RECALL_AT)
        nearest = [dict(answers).keys() for answers in exact]

        def recall() -> tuple[int, int]:
            neighbours = (dict(self.search(int(entity), RECALL_AT)) for entity in sample)
            hits = sum(len(right & approximate.keys()) for right, approximate in zip(nearest, neighbours))
            return hits, sum(map(len, nearest))

        self.recall = self.tune(recall)

    def describe(self) -> dict[str, Any]:
        """Return the recall, and how many lists there are and are searched."""
        return {"method": "faiss", "recall_at_10": self.recall, **self.counts}

    def search(self, entity_id: int, k: int) -> list[tuple[int, float]]:
        """Return (id, cosine) of the nearest entities, the best first, without the entity itself."""
        query = self.rows(np.array([entity_id]))
        (candidates,) = self.nearest(query, SPARE * k + 1)
        ids = np.sort(candidates[(candidates >= 0) & (candidates != entity_id)])
        cosines = self.rows(ids) @ query[0]
        # Equal cosines in the order of ids, as in exact search.
        best = np.argsort(-cosines, kind="stable")[:k]
        return list(zip(ids[best].tolist(), cosines[best].tolist()))


END = b"\n"
"""Ends each name in the searched text; no name contains it, because names are lines of a file."""


class NameIndex:
    """Names of one entity type by id, searched without regard to case."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        folded = [name.casefold() for name in names]
        # Ids in the order of names, 8 bytes each. A sorted copy of the names would need ten times that.
        self._order = np.array(sorted(range(len(names)), key=folded.__getitem__), dtype=np.int64)
        encoded = [name.encode("utf-8", "surrogatepass") for name in folded]
        # One text of UTF-8: a str would take 4 bytes for each character if one name has a rare one.
        self._text = END.join([*encoded, b""])
        self._starts = np.cumsum([0, *(len(name) + 1 for name in encoded)], dtype=np.int64)

    def starting(self, prefix: str) -> Iterator[int]:
        """Return the ids of the names that begin with a text, in alphabetical order."""
        start = prefix.casefold()
        first = bisect.bisect_left(self._order, start, key=lambda id_: self._names[id_].casefold())
        # Names that begin alike are neighbours in this order.
        ids = map(int, self._order[first:])
        return takewhile(lambda id_: self._names[id_].casefold().startswith(start), ids)

    def containing(self, text: str) -> Iterator[int]:
        """Yield the ids of the names that contain a text but do not begin with it, in the order of ids."""
        part = text.casefold().encode("utf-8", "surrogatepass")
        if not part or END in part:
            return
        # UTF-8 of a character is never found inside that of others, so bytes may be searched.
        # After each hit the search goes on at the next name.
        place = self._text.find(part)
        while place >= 0:
            id_ = int(np.searchsorted(self._starts, place, side="right")) - 1
            if place != self._starts[id_]:
                yield id_
            place = self._text.find(part, int(self._starts[id_ + 1]))


MAX_FREQUENT = 1000
"""Entities of a type in the list of those with most triples."""

MAX_OTHERS = 10_000
"""Entities in one answer of :meth:`Explorer.triples`; relations after that have counts only."""


MAX_COMPLETED = 10_000
"""Pairs of head and relation in one request for missing triples."""


class Explorer:
    """Questions to a run, answered with dictionaries and lists that are ready for JSON.

    Everything that is built once is built here, so that no request waits for it: the indexes of names and of
    known triples, and the model. Rows stay mapped from their files.

    Parameters
    ----------
    approximate_from : int, optional
        Number of entities from which a type's similarity is searched with faiss; by default never.
    threads : int
        Threads of faiss.

    Attributes
    ----------
    no_triples : str or None
        Reason why known triples are not available.
    relations : list of dict
        Label, name, entity types and number of known triples of each relation, by id.
    """

    def __init__(
        self, run: Run, approximate_from: int | None = None, threads: int = 1, show_progress: bool = False
    ) -> None:
        self.run = run
        tables = run.tables
        self._names: dict[str, NameIndex] = {}
        self._neighbours: dict[str, Neighbours] = {}
        for type_ in tables.entity_types:
            vocabulary = tables.vocabulary(type_)
            self._names[type_] = NameIndex(vocabulary.names)
            tables.shards(type_)  # opens the files and compares checksums
            if approximate_from is not None and len(vocabulary) >= approximate_from:
                self._neighbours[type_] = Neighbours(tables, type_, threads, show_progress)
        self._has_probabilities = run.calibration_if_any is not None
        self.no_triples: str | None = None
        self._known: Mapping[str, KnownTriples] = {}
        self._frequent: dict[str, np.ndarray] = {}
        try:
            self._known = run.known_treatment(Known.MARK)[1]
            for type_, counts in run.degrees.items():
                self._frequent[type_] = np.argsort(-counts, kind="stable")[:MAX_FREQUENT]
        except InputError as error:
            self.no_triples = str(error)
        self.relations = self._describe_relations()
        if self.relations:
            self._warm_up()

    def describe(self) -> dict[str, Any]:
        """Return the model, the numbers of names, and what is available."""
        tables = self.run.tables
        meta, types = tables.meta, tables.entity_types
        faiss = {type_: neighbours.describe() for type_, neighbours in self._neighbours.items()}
        return {
            "path": str(tables.path),
            "dataset": meta.dataset_name,
            "score_function": meta.score_function,
            "dimension": meta.dim,
            "reciprocal_relations": meta.reciprocal,
            "entities": {type_: len(tables.vocabulary(type_)) for type_ in types},
            "relations": len(tables.relations),
            "probabilities": self._has_probabilities,
            "rules": self.run.bonus is not None,
            "no_triples": self.no_triples,
            "similarity": {type_: faiss.get(type_, {"method": "exact"}) for type_ in types},
        }

    def _describe_relations(self) -> list[dict[str, Any]]:
        relations = self.run.tables.relations
        counts: list[int | None] = [None] * len(relations)
        if self.no_triples is None:
            used = np.concatenate([self.run.dataset.split(split)[:, 1] for split in self._known])
            counts = np.bincount(used, minlength=len(relations)).tolist()
        names = ("relation", "name", "head_type", "tail_type", "triples")
        rows = zip(relations.labels.names, relations.relations, counts)
        return [dict(zip(names, (label, r.name, r.lhs, r.rhs, count))) for label, r, count in rows]

    def entities(self, prefix: str, entity_type: str | None, k: int, anywhere: bool) -> list[dict[str, str]]:
        """Return k names that begin with a text in any case; without one, those with most training triples.

        ``anywhere`` fills up with names that contain the text elsewhere.
        """
        check_k(k)
        types = self.run.tables.entity_types if entity_type is None else [self.run.type_of("", entity_type)]

        def named(type_: str, ids: Iterable[int]) -> Iterator[dict[str, str]]:
            names = self.run.tables.vocabulary(type_)
            return ({"name": names[int(id_)], "type": type_} for id_ in ids)

        if not prefix and self._frequent:
            entries = [(type_, id_) for type_ in types for id_ in self._frequent.get(type_, [])]
            entries.sort(key=lambda entry: -self.run.degrees[entry[0]][entry[1]])
            return [name for type_, id_ in entries[:k] for name in named(type_, [id_])]
        starting = [named(type_, self._names[type_].starting(prefix)) for type_ in types]
        containing = [named(type_, self._names[type_].containing(prefix)) for type_ in types if anywhere]
        in_order = heapq.merge(*starting, key=lambda match: match["name"].casefold())
        return list(islice(chain(in_order, *containing), k))

    def _find(self, entity: str, entity_type: str | None = None) -> tuple[str, int]:
        """Return type and id of an entity; UnknownEntityError if no entity has the name."""
        type_ = self.run.type_of(entity, entity_type)
        try:
            return type_, self.run.tables.vocabulary(type_).id(entity)
        except InputError as error:  # its text has the nearest names
            raise UnknownEntityError(str(error)) from None

    def triples(
        self,
        entity: str,
        entity_type: str | None = None,
        relation: str | None = None,
        role: str | None = None,
        limit: int = 20,
        offset: int = 0,
    ) -> dict[str, Any]:
        """Return the known triples of an entity, by relation and by its role (head or tail) in them.

        Of each relation and role, ``limit`` triples after ``offset``; groups with most triples first.

        Raises
        ------
        InputError
            If a name is unknown, or there is no data set.
        """
        if self.no_triples is not None:
            raise InputError(f"known triples are not available: {self.no_triples}")
        type_, id_ = self._find(entity, entity_type)
        relations = self.run.tables.relations
        relation_ids = range(len(relations)) if relation is None else relations.ids_of(relation)
        groups: list[dict[str, Any]] = []
        page = slice(offset, offset + limit)
        for side in (Side.TAIL, Side.HEAD):
            if role not in (None, side.other.value):
                continue
            fitting = [number for number in relation_ids if relations[number].anchor_type(side) == type_]
            for relation_id, other_ids, splits in self._known_of(side, id_, np.array(fitting, np.int64)):
                other_type = relations[relation_id].candidate_type(side)
                names = self.run.tables.vocabulary(other_type)
                shown = zip(other_ids[page].tolist(), splits[page])
                others = [
                    {"name": names[other], "type": other_type, "split": split} for other, split in shown
                ]
                group = {"relation": relations.labels[relation_id], "role": side.other.value}
                groups.append({**group, "count": len(other_ids), "others": others})
        groups.sort(key=lambda group: (-group["count"], group["relation"]))
        remaining = MAX_OTHERS
        for group in groups:
            group["others"] = group["others"][:remaining]
            remaining -= len(group["others"])
        total = sum(group["count"] for group in groups)
        return {"entity": entity, "type": type_, "triples": total, "groups": groups}

    def _known_of(
        self, side: Side, entity_id: int, relation_ids: np.ndarray
    ) -> Iterator[tuple[int, np.ndarray, list[str]]]:
        """Yield (relation id, other entities, first split of each) for relations with known triples."""
        anchors = np.full(len(relation_ids), entity_id)
        runs = {split: known.runs(side, anchors, relation_ids) for split, known in self._known.items()}
        for place in np.flatnonzero(sum(count for _, count, _ in runs.values())):
            parts = {
                split: answers[first[place] : first[place] + count[place]].astype(np.int64)
                for split, (first, count, answers) in runs.items()
            }
            names = [split for split, part in parts.items() for _ in part]
            # A triple of several splits counts once, for the first of them.
            other_ids, places = np.unique(np.concatenate(list(parts.values())), return_index=True)
            yield int(relation_ids[place]), other_ids, [names[first] for first in places]

    def predict(
        self,
        queries: Sequence[Mapping[str, str | None]],
        k: int,
        known: str | None = None,
        candidates: str = ALL,
        run: Run | None = None,
    ) -> list[dict[str, Any]]:
        """Complete triples with one part missing, as :meth:`dglkge.inference.run.Run.predict` of a run."""
        asked = [Query.of(*(query[role] for role in ROLES)) for query in queries]
        if known is None and self.no_triples is not None:
            known = Known.KEEP.value  # else each request would log that it does not mark known answers
        groups = (run or self.run).answer_queries(asked, k, known, candidates=candidates)
        for answer in chain.from_iterable(group["answers"] for group in groups):
            answer |= {name: _number(answer[name]) for name in ("score", "probability")}
        return [{**query, **group} for query, group in zip(queries, groups)]

    def complete(self, limit: int, **question: Any) -> list[dict[str, Any]]:
        """Return likely missing triples, as :meth:`dglkge.inference.run.Run.complete`."""
        completion = plan_completion(self.run, **question)
        if completion.num_queries > MAX_COMPLETED:
            raise InputError(
                f"{completion.num_queries} pairs of head and relation are asked for; allowed: "
                f"{MAX_COMPLETED}. Give heads and relations, or use dglkge complete"
            )
        rows: list[dict[str, Any]] = find_links(completion, limit).to_pylist()
        return [{**row, "probability": row.get("probability")} for row in rows]

    def ask(self, question: str, k: int = 10, beam: int = 16) -> dict[str, Any]:
        """Answer a question of several hops by the best entities, each with the triples that led to it.

        E.g. ?x : (Alice, knows, ?y), (?y, likes, ?x), not (Bob, likes, ?x)
        """
        asked = Asked(self.run, question, beam, SPLITS, adapter=True)
        return {"type": asked.answer_type, "answers": asked.answer(k)}

    def explain(self, head: str, relation: str, tail: str, k: int = 5) -> dict[str, Any]:
        """Give reasons for a triple: others that raise its score, rules that imply it, similar known ones."""
        reasons = self.run.explain(head, relation, tail, k)
        return {**reasons, "score": _number(reasons["score"])}

    def attributes(
        self, values: Mapping[str, float], type: str | None, k: int, least: bool, known: bool
    ) -> dict[str, Any]:
        """Return predicted numbers, as :func:`dglkge.inference.attributes.best_numbers`."""
        return best_numbers(self.run.predict_numbers(values, type), k, least, known)

    def unseen(
        self,
        name: str,
        type: str | None = None,
        text: str | None = None,
        vector: Sequence[float] | None = None,
        triples: Sequence[Mapping[str, str]] | None = None,
        queries: Sequence[Mapping[str, str | None]] = (),
        k: int = 10,
    ) -> dict[str, Any]:
        """Return the entities that are near a new one, and answers to queries about it.

        Its row is made of a text about it, of a vector or of its triples, as by
        :meth:`dglkge.inference.run.Run.with_new_texts`, ``with_new_entities`` and ``add_entities``.

        Raises
        ------
        InputError
            As these do, or if not one of the three is given, or the name is known.
        """
        if sum(map(bool, (text, vector, triples))) != 1:
            raise InputError("give one of text, vector and triples of the new entity")
        if triples and type is not None:
            raise InputError("triples give the new entity its type; leave out type")
        if any(name in self.run.tables.vocabulary(known) for known in self.run.tables.entity_types):
            raise InputError(f"the entity {name!r} is known already; allowed: a new name")
        if triples and not any(name in triple.values() for triple in triples):
            raise InputError(f"no triple has the new entity {name!r}")
        if triples:
            run = self.run.add_entities(pd.DataFrame(list(triples)))
        elif text:
            run = self.run.with_new_texts({name: text}, type)
        else:
            run = self.run.with_new_entities([name], [vector], type)
        entity_type = run.type_of(name)
        answers = self.predict(queries, k, run=run) if queries else []
        near = run.nearest(name, entity_type, k)
        return {"entity": name, "type": entity_type, "similar": _ranked(near), "results": answers}

    def score(self, triples: Sequence[Mapping[str, str]]) -> list[dict[str, Any]]:
        """Score triples, as :meth:`dglkge.inference.run.Run.score`; an unknown name is a row's problem."""
        frame = pd.DataFrame([[triple[role] for role in ROLES] for triple in triples], columns=list(ROLES))
        rows: list[dict[str, Any]] = self.run.score(frame.astype(object)).to_dict("records")
        for row in rows:
            row["score"], row["probability"] = _number(row["score"]), _number(row.get("probability"))
        return rows

    def similar(self, entity: str, entity_type: str | None, k: int) -> dict[str, Any]:
        """Return the entities of the same type with the greatest cosines."""
        type_, id_ = self._find(entity, entity_type)
        index, names = self._neighbours.get(type_), self.run.tables.vocabulary(type_)
        if index is None:
            near = self.run.nearest(entity, type_, k)
        else:
            near = [(names[other], cosine) for other, cosine in index.search(id_, k)]
        method = "exact" if index is None else "faiss"
        return {"entity": entity, "type": type_, "method": method, "similar": _ranked(near)}

    def _warm_up(self) -> None:
        """Build what the first requests would build: ids of names, both orders of known triples."""
        tables = self.run.tables
        for type_ in tables.entity_types:
            tables.vocabulary(type_).find([""])
        for known in self._known.values():
            for side in Side:
                known.answers(side, np.zeros(1, np.int64), np.zeros(1, np.int64))
        head, label = tables.vocabulary(tables.relations[0].lhs)[0], tables.relations.labels[0]
        self.predict([{"head": head, "relation": label, "tail": None}], 1)


def _ranked(neighbours: Sequence[tuple[str, float]]) -> list[dict[str, Any]]:
    rows = enumerate(neighbours, start=1)
    return [{"rank": rank, "name": name, "cosine": _number(cosine)} for rank, (name, cosine) in rows]


def _number(value: float | None) -> float | None:
    """Return a number for JSON, which has neither NaN nor infinity."""
    return value if value is not None and math.isfinite(value) else None
