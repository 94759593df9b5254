"""Questions and answers of a trained model as pandas data frames.

:class:`dglkge.inference.run.Run` has these functions as methods.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from dglkge.data.known_triples import KnownTriples
from dglkge.data.named_triples import find_triples
from dglkge.data.text_format import ROLES
from dglkge.errors import InputError
from dglkge.evaluation.calibration import Curve
from dglkge.evaluation.queries import score_triples
from dglkge.inference.choices import ALL, MISSING, Known
from dglkge.inference.search import LinkQuery, NamedQuery, resolve
from dglkge.inference.trained_model import TrainedModel
from dglkge.typing import Side

HEAD, RELATION_COLUMN, TAIL = ROLES
ANSWER_COLUMNS = ("query", "missing", "rank", "type", *ROLES, "score", "probability", "known_from", "problem")

TRIPLES_AT_A_TIME = 1 << 18
"""Triples made of pairs and all their relations that are in memory at a time."""


def predict(
    run: TrainedModel,
    queries: pd.DataFrame,
    k: int = 10,
    known: Known | str | None = None,
    strict: bool = False,
    candidates: str = ALL,
) -> pd.DataFrame:
    """Complete triples with one part missing.

    Parameters
    ----------
    run : Run
    queries : DataFrame
        Columns head, relation and tail. In each row one part is missing: it is None, NaN or ``"?"``, or its
        column is absent.
    k : int
        Answers to each query; fewer if there are fewer candidates.
    known : Known or str, optional
        As in :meth:`dglkge.inference.run.Run.answer`.
    strict : bool
        Whether a query that cannot be answered is an error. Otherwise its row of the result says why.
    candidates : str
        As in :meth:`dglkge.inference.run.Run.answer`; relations are predicted from all that fit.

    Returns
    -------
    DataFrame
        A row for each answer: ``query`` (label of the query's row), ``missing`` (head, relation or tail),
        ``rank`` from 1, ``type`` (of the entities found; None for relations), the completed triple ``head``,
        ``relation``, ``tail``, ``score``, ``probability`` (a column only if calibrated for this version),
        ``known_from`` (the first split that has the triple, or None) and ``problem`` (None, or the reason of
        a query's only row).

    Raises
    ------
    InputError
        If no query has two of the columns, or ``strict`` and a query has a problem.
    """
    triples = _parts(queries)
    found = _Answers(run)
    entity_queries: dict[int, NamedQuery] = {}
    resolved: list[LinkQuery] = []
    pairs: dict[int, list[tuple[int, int, int]]] = {}
    for place, parts in enumerate(triples):
        missing = [role for role, part in zip(ROLES, parts) if part is None]
        head, relation, tail = parts
        try:
            if len(missing) != 1:
                raise InputError(
                    f"a query has two of head, relation and tail; {_shown(parts)} has {3 - len(missing)}"
                )
            if relation is None:
                pairs[place] = fitting_relations(run, str(head), str(tail))
            else:
                side = Side.TAIL if tail is None else Side.HEAD
                query = NamedQuery(side, head or tail or "", relation)
                resolved.append(resolve(query, run.tables.relations, run.tables.vocabulary))
                entity_queries[place] = query
        except InputError as error:
            if strict:
                where = f"row {queries.index[place]}: " if len(queries) > 1 else ""
                raise InputError(f"{where}{error}") from None
            found.add_problem(place, parts, str(error))
    places = list(entity_queries)
    predictions = run.answer_resolved(
        list(entity_queries.values()), resolved, k, known, candidates=candidates
    )
    for place, prediction in zip(places, predictions):
        query = prediction.query
        answers = [
            (*_completed(query, prediction.relation, answer.name), answer.score, answer.known)
            for answer in prediction.answers
        ]
        found.add(place, query.side.value, answers, prediction.answer_type)
    if pairs:
        for place, of_pair in zip(pairs, _relations_of_pairs(run, list(pairs.values()), k, known)):
            head, _, tail = triples[place]
            answers = [(str(head), label, str(tail), value, split) for label, value, split in of_pair]
            found.add(place, RELATION_COLUMN, answers)
    return found.frame(queries.index)


def score(run: TrainedModel, triples: pd.DataFrame, strict: bool = False) -> pd.DataFrame:
    """Score given triples.

    Parameters
    ----------
    run : Run
    triples : DataFrame
        Columns head, relation and tail; others are ignored.
    strict : bool
        Whether a triple that cannot be scored is an error. Otherwise its row of the result says why.

    Returns
    -------
    DataFrame
        With the index of ``triples``: ``head``, ``relation``, ``tail``, ``score`` (the mean of the scores as
        an answer to (h, r, ?) and to (?, r, t), which differ only with reciprocal relations; NaN with a
        problem), ``probability`` (as above), ``known_from`` and ``problem`` as in :func:`predict`.

    Raises
    ------
    InputError
        If a column is missing, or ``strict`` and a triple has a problem.
    """
    absent = [role for role in ROLES if role not in triples.columns]
    if absent:
        have = ", ".join(map(str, triples.columns))
        raise InputError(f"the triples have no column {' and no column '.join(absent)}; they have {have}")
    parts = _parts(triples)
    ids, problems = np.full((len(parts), 3), -1, np.int64), dict[int, str]()
    complete = [place for place, part in enumerate(parts) if None not in part]
    if complete:
        frame = pd.DataFrame([parts[place] for place in complete], columns=list(ROLES), dtype="category")
        found, faults = find_triples(frame, run.tables.relations, run.tables.vocabulary)
        ids[complete] = found
        problems = {complete[row]: fault for row, fault in faults.items()}
    for place in sorted(set(range(len(parts))) - set(complete)):
        problems[place] = f"a triple has head, relation and tail; got {_shown(parts[place])}"
    if strict and problems:
        first = min(problems)
        raise InputError(f"row {triples.index[first]}: {problems[first]}")
    good = np.array([place for place in range(len(parts)) if place not in problems], dtype=np.int64)
    curve = calibrated_curve(run)
    scores, probabilities = np.full(len(parts), np.nan), np.full(len(parts), np.nan)
    known_from = np.full(len(parts), None, dtype=object)
    if len(good):
        by_side = score_triples(run.model, ids[good], run.tables.meta.relations, run.tables)
        scores[good] = (by_side[Side.HEAD] + by_side[Side.TAIL]) / 2
        if curve is not None:
            # Fitted on the scores of single queries, so each side has a probability of its own.
            probabilities[good] = (curve(by_side[Side.HEAD]) + curve(by_side[Side.TAIL])) / 2
        known_from[good] = splits_of(run.known_treatment(None)[1], ids[good])
    frame = triples[list(ROLES)].copy()
    frame["score"] = scores
    if curve is not None:
        frame["probability"] = probabilities
    # Of type object: pandas 3 would make texts of them, and NaN of None.
    frame["known_from"] = pd.Series(known_from, frame.index, dtype=object)
    of_rows = [problems.get(place) for place in range(len(parts))]
    frame["problem"] = pd.Series(of_rows, frame.index, dtype=object)
    return frame


def predict_one(
    run: TrainedModel,
    parts: tuple[str | None, str | None, str | None],
    k: int,
    known: Known | str | None,
    candidates: str = ALL,
) -> pd.DataFrame:
    """Complete one triple; a frame with rank, the missing part, score, probability and known_from."""
    query = pd.DataFrame([parts], columns=list(ROLES), dtype=object)
    frame = predict(run, query, k, known, strict=True, candidates=candidates)
    missing = ROLES[parts.index(None)]
    name = missing if missing == RELATION_COLUMN else "entity"
    columns = frame.filter(["rank", missing, "score", "probability", "known_from"])
    return columns.rename(columns={missing: name}).astype({"rank": np.int64})


def similar(run: TrainedModel, entity: str, k: int = 10, entity_type: str | None = None) -> pd.DataFrame:
    """Return the entities of the same type with the greatest cosines: rank, entity, cosine."""
    found = run.nearest(entity, run.type_of(entity, entity_type), k)
    return pd.DataFrame(
        {
            "rank": np.arange(1, len(found) + 1),
            "entity": np.array([answer.name for answer in found], dtype=object),
            "cosine": np.array([answer.score for answer in found], dtype=np.float64),
        }
    )


def embeddings(
    run: TrainedModel, names: Sequence[str] | None = None, entity_type: str | None = None
) -> pd.DataFrame:
    """Return the rows of entities by name.

    Parameters
    ----------
    run : Run
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
    import torch

    types = run.tables.entity_types
    if names is None:
        if entity_type is None and len(types) > 1:
            raise InputError(f"there are several entity types: say which of {', '.join(types)}")
        table = run.type_of("", entity_type or list(types)[0])
        names = list(run.tables.vocabulary(table).names)
        whole = run.tables.gather(table, torch.arange(len(names)))
        return pd.DataFrame(whole.numpy(), index=pd.Index(names, name="entity"))
    if isinstance(names, str):
        raise InputError(f"names are a list of texts; got the text {names!r}")
    places: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        places.setdefault(run.type_of(name, entity_type), []).append(place)
    rows = np.empty((len(names), run.tables.meta.dim), np.float32)
    for table, chosen in places.items():
        ids = run.tables.vocabulary(table).ids(names[place] for place in chosen)
        rows[chosen] = run.tables.gather(table, torch.from_numpy(ids)).numpy()
    return pd.DataFrame(rows, index=pd.Index(list(names), name="entity"))


def fitting_relations(run: TrainedModel, head: str, tail: str) -> list[tuple[int, int, int]]:
    """Return (head id, relation id, tail id) of every relation whose entity types have both names.

    Raises
    ------
    InputError
        If there is none; the message has the nearest names.
    """
    tables = run.tables
    found = [
        (tables.vocabulary(relation.lhs).id(head), id_, tables.vocabulary(relation.rhs).id(tail))
        for id_, relation in enumerate(tables.relations.relations)
        if head in tables.vocabulary(relation.lhs) and tail in tables.vocabulary(relation.rhs)
    ]
    if not found:
        for name in (head, tail):
            # Raises for a name that is unknown.
            tables.vocabulary(run.type_of(name)).id(name)
        raise InputError(f"no relation joins the types of {head!r} and {tail!r}")
    return found


def calibrated_curve(run: TrainedModel) -> Curve | None:
    """Return the curve of probabilities of a run's version; None if none was fitted for it."""
    try:
        return run.calibration.curve
    except InputError:
        return None


def splits_of(known: Mapping[str, KnownTriples], triples: np.ndarray) -> np.ndarray:
    """Return the first split (n,) that has each triple (n, 3), None where no split has it."""
    found = np.full(len(triples), None, dtype=object)
    # The last split first, so that the first one stays.
    for split, of_split in reversed(list(known.items())):
        index, tails = of_split.answers(Side.TAIL, triples[:, 0], triples[:, 1])
        found[index[tails == triples[index, 2]]] = split
    return found


def _relations_of_pairs(
    run: TrainedModel, pairs: Sequence[Sequence[tuple[int, int, int]]], k: int, known: Known | str | None
) -> list[list[tuple[str, float, str | None]]]:
    """Return the best relations of pairs: label, score, known from.

    ``pairs`` has the triples of all fitting relations of each, as of :func:`fitting_relations`.
    """
    if k < 1:
        raise InputError(f"the number of answers must be at least 1, got {k}")
    treatment, of_splits = run.known_treatment(known)
    labels = run.tables.relations.labels
    answers: list[list[tuple[str, float, str | None]]] = []
    for start, stop in _blocks([len(triples) for triples in pairs]):
        triples = np.array([triple for of_pair in pairs[start:stop] for triple in of_pair], dtype=np.int64)
        by_side = score_triples(run.model, triples, run.tables.meta.relations, run.tables)
        scores = (by_side[Side.HEAD] + by_side[Side.TAIL]) / 2
        splits = splits_of(of_splits, triples)
        first = 0
        for of_pair in pairs[start:stop]:
            places = np.arange(first, first + len(of_pair))
            first += len(of_pair)
            if treatment is Known.DROP:
                places = np.array([place for place in places if splits[place] is None], dtype=np.int64)
            # Equal scores in the order of ids.
            best = places[np.argsort(-scores[places], kind="stable")[:k]]
            answers.append([(labels[int(triples[one, 1])], float(scores[one]), splits[one]) for one in best])
    return answers


def _blocks(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of runs whose sizes sum to :data:`TRIPLES_AT_A_TIME` at most, or of one alone."""
    start = total = 0
    for place, size in enumerate(sizes):
        if total and total + size > TRIPLES_AT_A_TIME:
            yield start, place
            start, total = place, 0
        total += size
    yield start, len(sizes)


class _Answers:
    """Collects the rows of the result of :func:`predict`."""

    def __init__(self, run: TrainedModel) -> None:
        self._run = run
        self._rows: dict[int, list[tuple[Any, ...]]] = {}

    def add(
        self, place: int, missing: str, answers: Sequence[tuple[Any, ...]], type_: str | None = None
    ) -> None:
        """Add the answers (head, relation, tail, score, known from) to a query, the best first."""
        self._rows[place] = [
            (missing, rank, type_, *answer, None) for rank, answer in enumerate(answers, start=1)
        ]

    def add_problem(self, place: int, parts: Sequence[str | None], problem: str) -> None:
        """Add the only row of a query that has no answers."""
        missing = next((role for role, part in zip(ROLES, parts) if part is None), None)
        self._rows[place] = [(missing, None, None, *parts, np.nan, None, problem)]

    def frame(self, index: pd.Index) -> pd.DataFrame:
        """Return all rows in the order of the queries."""
        rows = [(place, *row) for place in sorted(self._rows) for row in self._rows[place]]
        names = ["query", "missing", "rank", "type", *ROLES, "score", "known_from", "problem"]
        frame = pd.DataFrame(rows, columns=names).astype({"score": np.float64, "rank": "Int64"})
        frame["query"] = index.take(frame["query"].to_numpy(np.int64))
        curve = calibrated_curve(self._run)
        if curve is not None:
            frame["probability"] = curve(frame["score"].to_numpy())
        for name in ("type", "known_from", "problem"):
            frame[name] = frame[name].astype(object).where(frame[name].notna(), None)
        return frame.filter(list(ANSWER_COLUMNS))


def _completed(query: NamedQuery, relation: str, answer: str) -> tuple[str, str, str]:
    if query.side is Side.TAIL:
        return query.entity, relation, answer
    return answer, relation, query.entity


def _parts(frame: pd.DataFrame) -> list[tuple[str | None, ...]]:
    """Return head, relation and tail of each row, None for a missing one."""
    columns: list[list[str | None]] = []
    for role in ROLES:
        if role not in frame.columns:
            columns.append([None] * len(frame))
            continue
        values, is_missing = frame[role].tolist(), frame[role].isna().tolist()
        columns.append(
            [None if gone or value == MISSING else str(value) for value, gone in zip(values, is_missing)]
        )
    return list(zip(*columns))


def _shown(parts: Sequence[str | None]) -> str:
    return "(" + ", ".join(MISSING if part is None else part for part in parts) + ")"
