"""Questions by name and their answers as pandas data frames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dglkge.data.known_triples import KnownTriples
from dglkge.data.text_format import ROLES, TIME
from dglkge.data.vocabulary import RelationVocabulary, label_at
from dglkge.errors import InputError
from dglkge.evaluation.calibration import Calibration
from dglkge.inference.choices import ALL, MISSING, Known
from dglkge.inference.search import LinkQuery, check_k
from dglkge.inference.trained_model import TrainedModel
from dglkge.registry import deferred
from dglkge.typing import Side

if TYPE_CHECKING:
    import pandas as pd

    from dglkge.data import named_triples
else:
    # Imported at first use: pandas takes half a second.
    pd, named_triples = deferred("pandas"), deferred("dglkge.data.named_triples")

HEAD, RELATION_COLUMN, TAIL = ROLES
ANSWER_COLUMNS = ("query", "missing", "rank", "type", *ROLES, "score", "probability", "known_from", "problem")

Triple = tuple[int, int, int]
Ranked = tuple[str, float, str | None] | tuple[str, float, str | None, float | None]
"""Name, score and split of an answer, and of a relation the probability."""


class Query(NamedTuple):
    """A triple with one part missing: None. Make one with :meth:`of`.

    ``relation`` is a label, at its time where triples have times; ``name`` and ``time`` are its parts.
    """

    head: str | None
    relation: str | None
    tail: str | None
    name: str | None
    time: str | None

    @classmethod
    def of(cls, head: str | None, name: str | None, tail: str | None, *time: str | None) -> Query:
        """Return the query of texts; a missing one is None or ``"?"``."""
        head, name, tail, *times = [None if part == MISSING else part for part in (head, name, tail, *time)]
        if not times:
            return cls(head, name, tail, name, None)
        label = None if name is None or times[0] is None else label_at(name, times[0])
        return cls(head, label, tail, name, times[0])


class Questions(TrainedModel):
    """A trained model that answers questions by name with data frames."""

    def predict_tails(
        self, head: str, relation: str, k: int = 10, known: str | None = None, candidates: str = ALL
    ) -> pd.DataFrame:
        """Return the best tails of (head, relation, ?).

        ``k``, ``known`` and ``candidates`` are those of :meth:`predict`.

        Returns
        -------
        DataFrame
            rank, entity, score, probability (a column only if ``dglkge calibrate`` has fitted some for
            this version) and known_from (the first split that has the triple, or None).

        Raises
        ------
        InputError
            If a name is unknown or ambiguous.
        """
        return self._predict_one(TAIL, k, known, candidates, head=head, relation=relation)

    def predict_heads(
        self, relation: str, tail: str, k: int = 10, known: str | None = None, candidates: str = ALL
    ) -> pd.DataFrame:
        """Return the best heads of (?, relation, tail); see :meth:`predict_tails`."""
        return self._predict_one(HEAD, k, known, candidates, relation=relation, tail=tail)

    def predict_relations(self, head: str, tail: str, k: int = 10, known: str | None = None) -> pd.DataFrame:
        """Return the best relations of (head, ?, tail), by the mean of the scores of both sides.

        As :meth:`predict_tails`, with a column relation instead of entity.
        """
        return self._predict_one(RELATION_COLUMN, k, known, head=head, tail=tail)

    def predict_times(
        self, head: str, relation: str, tail: str, k: int = 10, known: str | None = None
    ) -> pd.DataFrame:
        """Return the times at which a triple is most plausible, by the mean of the scores of both sides.

        As :meth:`predict_tails`, with a column time instead of entity.
        """
        if not self.tables.relations.times:
            raise InputError("the relations of the run have no times")
        parts = {"head": head, "relation": relation, "tail": tail, TIME: MISSING}
        frame, relations = self._predict_one(RELATION_COLUMN, k, known, **parts), self.tables.relations
        numbers = [relations.labels.id(label) % relations.num_times for label in frame[RELATION_COLUMN]]
        times = pd.Series([relations.times[number] for number in numbers], frame.index, dtype=object)
        return frame.assign(**{RELATION_COLUMN: times}).rename(columns={RELATION_COLUMN: TIME})

    def _predict_one(
        self, missing: str, k: int, known: str | None, candidates: str = ALL, **parts: str
    ) -> pd.DataFrame:
        """Complete one triple; a frame with rank, the missing part, score, probability and known_from."""
        frame = self.predict(pd.DataFrame([parts], dtype=object), k, known, True, candidates)
        columns = frame.filter(["rank", missing, "score", "probability", "known_from"])
        return columns.rename(columns={HEAD: "entity", TAIL: "entity"}).astype({"rank": np.int64})

    def predict(
        self,
        queries: pd.DataFrame,
        k: int = 10,
        known: str | None = None,
        strict: bool = False,
        candidates: str = ALL,
    ) -> pd.DataFrame:
        """Complete triples with one part missing.

        Parameters
        ----------
        queries : DataFrame
            Columns head, relation and tail. In each row one part is missing: it is None, NaN or ``"?"``, or
            its column is absent. With a column time, of relations at these times; where the time is missing
            and nothing else, the answers are the relation at the best times.
        k : int
            Answers to each query; fewer if there are fewer candidates.
        known : Known or str, optional
            Treatment of answers that the data set contains: mark, drop or keep. None marks them if the data
            set can be opened, and otherwise logs a warning and marks none.
        strict : bool
            Whether a query that cannot be answered is an error. Otherwise its row of the result says why.
        candidates : str
            ``"all"`` entities of the type, or ``"seen"``: only those that a triple of the data set has on
            that side of the relation. Relations are predicted from all that fit.

        Returns
        -------
        DataFrame
            A row for each answer: ``query`` (label of the query's row), ``missing`` (head, relation or
            tail), ``rank`` from 1, ``type`` (of the answers; None for relations), the completed triple
            ``head``, ``relation``, ``tail``, ``score``, ``probability`` (a column only if calibrated for this
            version), ``known_from`` (the first split that has the triple, or None) and ``problem`` (None, or
            the reason of a query's only row).

        Raises
        ------
        InputError
            If no query has two of the columns, or ``strict`` and a query has a problem.
        """
        asked, rows = _queries(queries, self.tables.relations), list[dict[str, Any]]()
        labels = queries.index if strict else None
        for place, group in enumerate(self.answer_queries(asked, k, known, candidates, labels)):
            problem = [dict(zip(ROLES, asked[place]))] if group["problem"] else []
            answers = group.pop("answers") or problem
            rows += [{"query": place, **group, **answer} for answer in answers]
        frame = pd.DataFrame(rows, columns=list(ANSWER_COLUMNS))
        frame = frame.astype({"score": np.float64, "probability": np.float64, "rank": "Int64"})
        frame["query"] = queries.index.take(frame["query"].to_numpy(np.int64))
        if self.calibration_if_any is None:
            del frame["probability"]
        for name in ("missing", "type", "known_from", "problem"):
            frame[name] = frame[name].astype(object).where(frame[name].notna(), None)
        return frame

    def answer_queries(
        self,
        queries: Sequence[Query],
        k: int = 10,
        known: str | None = None,
        candidates: str = ALL,
        labels: Sequence[Any] | None = None,
    ) -> list[dict[str, Any]]:
        """Return the answers to each query, ready for JSON, as :meth:`predict` and without pandas.

        Of each the missing part, the type of the answers, these (rank, head, relation, tail, score,
        probability and known_from), and the problem that prevented them or None. With labels of the queries a
        problem is an error, before anything is answered.
        """
        groups: list[dict[str, Any]] = []
        resolved: dict[int, LinkQuery] = {}
        pairs: dict[int, list[Triple]] = {}
        for place, (head, relation, tail, *within) in enumerate(queries):
            parts = (head, relation, tail)
            missing = ROLES[parts.index(None)] if None in parts else None
            groups.append({"missing": missing, "type": None, "answers": [], "problem": None})
            try:
                if parts.count(None) != 1:
                    given = f"{_shown(parts)} has {3 - parts.count(None)}"
                    raise InputError(f"a query has two of head, relation and tail; {given}")
                if relation is None:
                    pairs[place] = self._fitting_relations(str(head), str(tail), *within)
                else:
                    side = Side.TAIL if tail is None else Side.HEAD
                    resolved[place] = self.link_query(side, head or tail or "", relation)
            except InputError as error:
                if labels is not None:
                    where = f"row {labels[place]}: " if len(labels) > 1 else ""
                    raise InputError(f"{where}{error}") from None
                groups[place]["problem"] = str(error)
        named: dict[int, list[Ranked]] = {}
        answers_of_queries = self.answer(list(resolved.values()), k, known, candidates)
        for (place, (side, _, relation_id)), answers in zip(resolved.items(), answers_of_queries):
            type_ = self.tables.relations[relation_id].candidate_type(side)
            names = self.tables.vocabulary(type_)
            groups[place]["type"] = type_ if answers else None
            named[place] = [(names[answer.entity_id], answer.score, answer.known) for answer in answers]
        if pairs:
            named |= zip(pairs, self._relations_of_pairs(list(pairs.values()), k, known))
        for place, answers_by_name in named.items():
            triple: dict[str, str | None] = dict(zip(ROLES, queries[place]))
            if place in resolved:
                triple[RELATION_COLUMN] = self.tables.relations.labels[resolved[place].relation_id]
            groups[place]["answers"] = [
                {"rank": rank, **triple, groups[place]["missing"]: name}
                | {"score": score, "probability": next(iter(probability), None), "known_from": split}
                for rank, (name, score, split, *probability) in enumerate(answers_by_name, start=1)
            ]
        if (calibration := self.calibration_if_any) is not None:
            self._add_probabilities(groups, calibration)
        return groups

    def _add_probabilities(self, groups: Sequence[dict[str, Any]], calibration: Calibration) -> None:
        """Add the probabilities of heads and tails; those of relations are there."""
        groups = [group for group in groups if group["missing"] != RELATION_COLUMN]
        answers = [answer for group in groups for answer in group["answers"]]
        missing = np.array([group["missing"] for group in groups for _ in group["answers"]], object)
        ids = self.tables.relations.labels.ids(answer[RELATION_COLUMN] for answer in answers)
        scores = np.array([answer["score"] for answer in answers], np.float64)
        head, tail = (calibration.probabilities(scores, ids, side) for side in Side)
        for answer, value in zip(answers, np.where(missing == HEAD, head, tail).tolist()):
            answer["probability"] = value

    def score(self, triples: pd.DataFrame, strict: bool = False) -> pd.DataFrame:
        """Score given triples.

        Parameters
        ----------
        triples : DataFrame
            Columns head, relation and tail, and time where relations have one; others are ignored.
        strict : bool
            Whether a triple that cannot be scored is an error. Otherwise its row of the result says why.

        Returns
        -------
        DataFrame
            With the index of ``triples``: ``head``, ``relation``, ``tail``, ``score`` (the mean of the scores
            as an answer to (h, r, ?) and to (?, r, t), which differ only with reciprocal relations; NaN with
            a problem), ``probability``, ``known_from`` and ``problem`` as in :meth:`predict`.

        Raises
        ------
        InputError
            If a column is missing, or ``strict`` and a triple has a problem.
        """
        parts, frame = triple_parts(triples, self.tables.relations), triples[list(ROLES)].copy()
        ids, complete = np.full((len(parts), 3), -1, np.int64), [None not in part for part in parts]
        problems = {
            place: f"a triple has head, relation and tail; got {_shown(parts[place])}"
            for place in np.flatnonzero(np.logical_not(complete)).tolist()
        }
        if any(complete):
            named = pd.DataFrame(parts, columns=list(ROLES), dtype="category")[complete]
            names = (self.tables.relations, self.tables.vocabulary)
            ids[complete], faults = named_triples.find_triples(named, *names)
            problems |= {int(named.index[row]): fault for row, fault in faults.items()}
        if strict and problems:
            first = min(problems)
            raise InputError(f"row {triples.index[first]}: {problems[first]}")
        good = np.flatnonzero(ids[:, 0] >= 0)
        by_side = self.scores(ids[good])
        measures = {"score": (by_side[Side.HEAD] + by_side[Side.TAIL]) / 2}
        if (calibration := self.calibration_if_any) is not None:
            measures["probability"] = calibration.triple_probabilities(by_side, ids[good])
        for name, measure in measures.items():
            frame[name] = np.nan
            frame.iloc[good, -1] = measure
        known_from = np.full(len(parts), None, dtype=object)
        known_from[good] = splits_of(self.known_treatment(None)[1], ids[good])
        # Of type object: pandas 3 would make texts of them, and NaN of None.
        frame["known_from"] = pd.Series(known_from, frame.index, dtype=object)
        frame["problem"] = pd.Series(map(problems.get, range(len(parts))), frame.index, dtype=object)
        return frame

    def similar(self, entity: str, k: int = 10, entity_type: str | None = None) -> pd.DataFrame:
        """Return the entities of the same type whose rows have the greatest cosines with an entity's.

        Returns
        -------
        DataFrame
            rank, entity, cosine; without the entity itself.
        """
        answers = self.nearest(entity, self.type_of(entity, entity_type), k)
        rows = [(rank, *answer) for rank, answer in enumerate(answers, start=1)]
        frame = pd.DataFrame(rows, columns=["rank", "entity", "cosine"])
        return frame.astype({"rank": np.int64, "entity": object, "cosine": np.float64})

    def embeddings(self, names: Sequence[str] | None = None, entity_type: str | None = None) -> pd.DataFrame:
        """Return the rows of entities by name.

        Parameters
        ----------
        names : sequence of str, optional
            By default all entities of the type.
        entity_type : str, optional
            Needed if several types have a name, or if no names are given and there are several types.

        Returns
        -------
        DataFrame
            float32, one row for each name, with the names as index.

        Raises
        ------
        InputError
            If a name is unknown or ambiguous.
        """
        types = self.tables.entity_types
        if names is None:
            if entity_type is None and len(types) > 1:
                raise InputError(f"there are several entity types: say which of {', '.join(types)}")
            table = self.type_of("", entity_type or types[0])
            whole, index = self.tables[table][:].numpy(), list(self.tables.vocabulary(table).names)
            return pd.DataFrame(whole, index=pd.Index(index, name="entity"))
        if isinstance(names, str):
            raise InputError(f"names are a list of texts; got the text {names!r}")
        names = list(names)
        places: dict[str, list[int]] = {}
        for place, name in enumerate(names):
            places.setdefault(self.type_of(name, entity_type), []).append(place)
        widths = {table: self.tables[table].shape[1] for table in places}
        if len(set(widths.values())) > 1:
            described = ", ".join(f"{table} {width}" for table, width in widths.items())
            raise InputError(f"names have rows of several widths: {described}; allowed: one width")
        rows = np.empty((len(names), *set(widths.values())), np.float32)
        for table, rows_of_table in places.items():
            rows[rows_of_table] = self.tables[table][[names[place] for place in rows_of_table]].numpy()
        return pd.DataFrame(rows, index=pd.Index(names, name="entity"))

    def _fitting_relations(self, head: str, tail: str, name: str | None, time: str | None) -> list[Triple]:
        """Return (head id, relation id, tail id) of every relation whose entity types have both names.

        Of those of a name or a time, where these are given.
        """
        relations, vocabulary = self.tables.relations, self.tables.vocabulary
        triples = [
            (vocabulary(relation.lhs).id(head), id_, vocabulary(relation.rhs).id(tail))
            for id_, relation in ((id_, relations[id_]) for id_ in relations.at(name, time))
            if head in vocabulary(relation.lhs) and tail in vocabulary(relation.rhs)
        ]
        if not triples:
            for name in (head, tail):
                # Raises for a name that is unknown.
                vocabulary(self.type_of(name)).id(name)
            raise InputError(f"no relation joins the types of {head!r} and {tail!r}")
        return triples

    def _relations_of_pairs(self, pairs: list[list[Triple]], k: int, known: str | None) -> list[list[Ranked]]:
        """Return the best of the fitting relations of each pair: label, score, known from, probability."""
        check_k(k)
        treatment, by_split = self.known_treatment(known)
        triples = np.array(list(chain.from_iterable(pairs)), dtype=np.int64)
        by_side, splits = self.scores(triples), splits_of(by_split, triples)
        scores, probabilities = (by_side[Side.HEAD] + by_side[Side.TAIL]) / 2, np.full(len(triples), None)
        if (calibration := self.calibration_if_any) is not None:
            probabilities = calibration.triple_probabilities(by_side, triples)
        ends = np.cumsum([len(triples_of_pair) for triples_of_pair in pairs])
        labels, answers = self.tables.relations.labels, []
        for places in np.split(np.arange(len(triples)), ends[:-1]):
            if treatment is Known.DROP:
                places = places[[split is None for split in splits[places]]]
            # Equal scores in the order of ids.
            best = places[np.argsort(-scores[places], kind="stable")[:k]]
            names = [labels[id_] for id_ in triples[best, 1].tolist()]
            columns = scores[best].tolist(), splits[best], probabilities[best].tolist()
            answers.append(list[Ranked](zip(names, *columns)))
        return answers


def splits_of(known: Mapping[str, KnownTriples], triples: np.ndarray) -> np.ndarray:
    """Return the first split (n,) that has each triple (n, 3), None where no split has it."""
    splits = np.full(len(triples), None, dtype=object)
    # The last split first, so that the first one stays.
    for split, known_triples in reversed(list(known.items())):
        splits[known_triples.contain(Side.TAIL, *triples.T)] = split
    return splits


def triple_parts(frame: pd.DataFrame, relations: RelationVocabulary) -> list[tuple[str | None, ...]]:
    """Return head, relation (at its time) and tail of each row, None for a missing one.

    That a column is absent is an error.
    """
    absent = [role for role in ROLES if role not in frame.columns]
    if absent:
        have = ", ".join(map(str, frame.columns))
        raise InputError(f"the triples have no column {' and no column '.join(absent)}; they have {have}")
    return [query[:3] for query in _queries(frame, relations)]


def _queries(frame: pd.DataFrame, relations: RelationVocabulary) -> list[Query]:
    """Return the query of each row; all of an absent column is missing."""
    names = [*ROLES, *([TIME] if relations.times and TIME in frame.columns else [])]
    # Other columns may share a name.
    columns = frame.loc[:, frame.columns.isin(names)].reindex(columns=names)
    rows = columns.itertuples(index=False, name=None)
    return [Query.of(*(None if pd.isna(value) else str(value) for value in row)) for row in rows]


def _shown(parts: Sequence[str | None]) -> str:
    return "(" + ", ".join(MISSING if part is None else part for part in parts) + ")"
