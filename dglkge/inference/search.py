"""Search for the best-scored candidates: answers to queries (h, r, ?) and (?, r, t), and similar entities.

Also queries by name, as written on the command line or in a file, their ids, and answers by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import normalize

from dglkge.data.known_triples import KnownTriples
from dglkge.data.vocabulary import RelationVocabulary, Vocabulary
from dglkge.errors import InputError, unknown_name
from dglkge.evaluation.queries import Bonus
from dglkge.inference.choices import ALL, CANDIDATES, SEEN, Known
from dglkge.model.kge_model import KgeModel
from dglkge.typing import RELATION, Relation, RowShard, RowSource, Side

BLOCK_BYTES = 64 << 20
"""Most bytes of candidate rows, and of their scores, at a time."""

QUERIES_AT_A_TIME = 256
"""Queries of one matmul. Together with :data:`BLOCK_BYTES` it bounds the memory of a search."""

KnownAnswers = dict[str, tuple[np.ndarray, np.ndarray]]
"""By split: query index (M,) and id (M,) of each known answer to a batch of queries."""


class TopAnswers:
    """The k best-scored candidates of each query, collected over blocks of candidates.

    Parameters
    ----------
    num_queries : int
        Q.
    k : int
        k.
    """

    def __init__(self, num_queries: int, k: int) -> None:
        self._k = k
        self._scores = torch.empty((num_queries, 0))
        self._ids = torch.empty((num_queries, 0), dtype=torch.int64)

    def add(self, scores: torch.Tensor, ids: torch.Tensor) -> None:
        """Add a block of candidates.

        Parameters
        ----------
        scores : (Q, n) tensor
            -inf for an excluded candidate.
        ids : (n,) int64 tensor
        """
        # Only the block's own best k can be among the best k of all, so at most 2 k candidates are sorted.
        best, places = scores.topk(min(self._k, scores.shape[1]), dim=1)
        all_scores = torch.cat([self._scores, best], dim=1)
        all_ids = torch.cat([self._ids, ids[places]], dim=1)
        # Two stable sorts order by score, and by id among equal scores, whatever the blocks were.
        by_id = all_ids.argsort(dim=1, stable=True)
        by_score = all_scores.gather(1, by_id).argsort(dim=1, descending=True, stable=True)
        order = by_id.gather(1, by_score)[:, : self._k]
        self._scores, self._ids = all_scores.gather(1, order), all_ids.gather(1, order)

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores (Q, k) in descending order and the ids (Q, k).

        With fewer than k candidates the last scores are -inf, or k is smaller. If several candidates have
        exactly the score of place k, which of them is returned is undefined.
        """
        return self._scores, self._ids


@dataclass(frozen=True)
class LinkQuery:
    """A triple with one entity missing, in original ids.

    Attributes
    ----------
    side : Side
        The missing side.
    entity_id : int
        The given entity: the head for ``Side.TAIL``, the tail for ``Side.HEAD``.
    relation_id : int
    """

    side: Side
    entity_id: int
    relation_id: int


@dataclass(frozen=True)
class Answer:
    """One candidate found.

    Attributes
    ----------
    entity_id : int
        Original id; the type is the relation's on the missing side.
    score : float
        Higher is better. Only scores of the same query are comparable.
    known : str or None
        First split of the data set that contains the triple; None if no split does, or if known answers
        were not marked.
    """

    entity_id: int
    score: float
    known: str | None = None


class LinkPredictor:
    """Answers queries against rows that may be live tables or a checkpoint's files.

    Parameters
    ----------
    model : KgeModel
    relations : sequence of Relation
        By relation id.
    rows : RowSource
        Looks up the rows of given entities and relations.
    shards : mapping of str to sequence of RowShard
        All rows of each entity type.
    known_triples : mapping of str to KnownTriples, optional
        Known triples by split; required to mark or drop known answers.
    bonus : Bonus, optional
        What is added to scores of the model.
    """

    def __init__(
        self,
        model: KgeModel,
        relations: Sequence[Relation],
        rows: RowSource,
        shards: Mapping[str, Sequence[RowShard]],
        known_triples: Mapping[str, KnownTriples] | None = None,
        bonus: Bonus | None = None,
    ) -> None:
        self._model = model
        self._relations = relations
        self._rows = rows
        self._shards = shards
        self._known_triples = known_triples or {}
        self._bonus = bonus

    def predict(
        self, queries: Sequence[LinkQuery], k: int = 10, known: Known = Known.KEEP, candidates: str = ALL
    ) -> list[list[Answer]]:
        """Return the best answers to each query, the best first.

        Parameters
        ----------
        queries : sequence of LinkQuery
        k : int
            Answers to each query; fewer if there are fewer candidates.
        known : Known
        candidates : str
            ``"all"`` of the type, or ``"seen"``: only those that a known triple has on that side of the
            relation.

        Returns
        -------
        list of list of Answer
            One list for each query. Equal scores are in the order of ids.

        Raises
        ------
        InputError
            If ``k`` is less than 1, ``candidates`` is another word, or known triples are needed and absent.
        """
        check_k(k)
        if candidates not in CANDIDATES:
            raise unknown_name("choice of candidates", candidates, CANDIDATES)
        if (known is not Known.KEEP or candidates == SEEN) and not self._known_triples:
            raise InputError("seen candidates, and marks or drops of known answers, need known triples")
        answers: list[list[Answer]] = [[] for _ in queries]
        # One matmul needs queries of one side, against candidates of one type.
        for side, anchor_type, candidate_type, places in self._groups(queries):
            for start in range(0, len(places), QUERIES_AT_A_TIME):
                batch = places[start : start + QUERIES_AT_A_TIME]
                entity_ids = torch.tensor([queries[place].entity_id for place in batch])
                relation_ids = torch.tensor([queries[place].relation_id for place in batch])
                with torch.no_grad():
                    query = self._model.query(
                        self._rows.gather(anchor_type, entity_ids),
                        self._rows.gather(RELATION, relation_ids),
                        side,
                        relation_ids,
                    )
                answered = (
                    self._known_answers(side, entity_ids, relation_ids) if known is not Known.KEEP else {}
                )
                seen = self._seen(side, relation_ids) if candidates == SEEN else []
                added = [
                    (index, ids, np.full(len(ids), -np.inf, np.float32))
                    for index, ids in (answered.values() if known is Known.DROP else ())
                ]
                if self._bonus is not None:
                    index, ids, bonus = self._bonus(side, entity_ids.numpy(), relation_ids.numpy())
                    added.append((index, ids, bonus.astype(np.float32)))
                best = self._search(query, candidate_type, k, added, seen)
                for place, row in zip(batch, _to_answers(*best, answered if known is Known.MARK else {})):
                    answers[place] = row
        return answers

    def _groups(self, queries: Sequence[LinkQuery]) -> Iterator[tuple[Side, str, str, list[int]]]:
        """Yield (side, type of the given entity, type of the answers, places of the queries)."""
        groups: dict[tuple[Side, str, str], list[int]] = {}
        for place, query in enumerate(queries):
            relation = self._relations[query.relation_id]
            key = (query.side, relation.anchor_type(query.side), relation.candidate_type(query.side))
            groups.setdefault(key, []).append(place)
        for (side, anchor_type, candidate_type), places in groups.items():
            yield side, anchor_type, candidate_type, places

    def _known_answers(
        self, side: Side, entity_ids: torch.Tensor, relation_ids: torch.Tensor
    ) -> KnownAnswers:
        """Look up the known answers to a batch of queries."""
        return {
            split: triples.answers(side, entity_ids.numpy(), relation_ids.numpy())
            for split, triples in self._known_triples.items()
        }

    def _seen(self, side: Side, relation_ids: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the queries of each relation, and the entities that its known triples have on a side."""
        return [
            (
                torch.nonzero(relation_ids == relation_id)[:, 0],
                torch.from_numpy(
                    np.concatenate(
                        [triples.seen(side, relation_id) for triples in self._known_triples.values()]
                    )
                ),
            )
            for relation_id in relation_ids.unique().tolist()
        ]

    def _search(
        self,
        query: torch.Tensor,
        candidate_type: str,
        k: int,
        added: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]],
        seen: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Score queries (Q, D) against all rows of a type, block by block; return scores and ids (Q, k)."""
        best = TopAnswers(len(query), k)
        with torch.no_grad():
            for shard in self._shards[candidate_type]:
                for start, stop in candidate_blocks(len(query), shard):
                    scores = self._model.compare(query, shard.rows[start:stop])
                    for index, ids, values in added:
                        # Candidates of other shards and blocks have places outside [0, stop - start).
                        places = shard.locate(torch.from_numpy(ids)) - start
                        here = (places >= 0) & (places < stop - start)
                        scores[torch.from_numpy(index)[here], places[here]] += torch.from_numpy(values)[here]
                    for rows, seen_ids in seen:
                        places = shard.locate(seen_ids) - start
                        is_unseen = torch.ones(stop - start, dtype=torch.bool)
                        is_unseen[places[(places >= 0) & (places < stop - start)]] = False
                        scores[rows] = scores[rows].masked_fill(is_unseen, -torch.inf)
                    best.add(scores, shard.original_ids[start:stop])
        return best.result()


def most_similar(
    rows: RowSource, shards: Sequence[RowShard], table: str, ids: torch.Tensor, k: int = 10
) -> list[list[Answer]]:
    """Return the entities of a type with the greatest cosine to given ones.

    Parameters
    ----------
    rows : RowSource
        Looks up the given entities.
    shards : sequence of RowShard
        All rows of the type.
    table : str
        The entity type.
    ids : (Q,) int64 tensor
        The given entities.
    k : int

    Returns
    -------
    list of list of Answer
        One list for each given entity, without the entity itself, the most similar first. The score is the
        cosine; 0 if either row is all zeros.

    Raises
    ------
    InputError
        If ``k`` is less than 1.
    """
    check_k(k)
    best = TopAnswers(len(ids), k)
    with torch.no_grad():
        anchors = normalize(rows.gather(table, ids))
        for shard in shards:
            for start, stop in candidate_blocks(len(ids), shard):
                # Normalized block by block: a normalized copy of the table would double the memory.
                cosines = anchors @ normalize(shard.rows[start:stop]).T
                candidate_ids = shard.original_ids[start:stop]
                cosines[ids[:, None] == candidate_ids] = -torch.inf
                best.add(cosines, candidate_ids)
    return list(_to_answers(*best.result(), {}))


def candidate_blocks(num_queries: int, shard: RowShard) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of blocks of a shard whose rows and scores take :data:`BLOCK_BYTES` at most."""
    num_rows, width = shard.rows.shape
    # 4 bytes for each float32 of the rows (n, width) and of the scores (queries, n).
    step = max(1, BLOCK_BYTES // (4 * max(num_queries, width)))
    for start in range(0, num_rows, step):
        yield start, min(num_rows, start + step)


def check_k(k: int) -> None:
    """Refuse a number of answers below 1."""
    if k < 1:
        raise InputError(f"the number of answers must be at least 1, got {k}")


def _to_answers(scores: torch.Tensor, ids: torch.Tensor, known: KnownAnswers) -> Iterator[list[Answer]]:
    """Turn scores and ids (Q, k) into answers, excluded candidates left out."""
    split_of: dict[tuple[int, int], str] = {}
    for split, (index, known_ids) in known.items():
        for key in zip(index.tolist(), known_ids.tolist()):
            split_of.setdefault(key, split)  # the first of several splits
    for row, (row_scores, row_ids) in enumerate(zip(scores.tolist(), ids.tolist())):
        yield [
            Answer(id_, score, split_of.get((row, id_)))
            for id_, score in zip(row_ids, row_scores)
            if score != -torch.inf
        ]


@dataclass(frozen=True)
class NamedQuery:
    """A triple with one entity missing, by names.

    Attributes
    ----------
    side : Side
        The missing side.
    entity : str
        The given entity.
    relation : str
        A relation's name or label.
    """

    side: Side
    entity: str
    relation: str


@dataclass(frozen=True)
class NamedAnswer:
    """One candidate found, by name.

    Attributes
    ----------
    name : str
    score : float
        Higher is better; a cosine for similar entities.
    known : str or None
        First split of the data set that contains the triple; None if no split does, or if known answers
        were not marked.
    """

    name: str
    score: float
    known: str | None = None


@dataclass(frozen=True)
class Prediction:
    """The best answers to one query.

    Attributes
    ----------
    query : NamedQuery
    relation : str
        The relation's label, which names its entity types if several relations share the name.
    answer_type : str
        Entity type of the answers.
    answers : list of NamedAnswer
        The best first.
    """

    query: NamedQuery
    relation: str
    answer_type: str
    answers: list[NamedAnswer]


def resolve(
    query: NamedQuery, relations: RelationVocabulary, vocabulary: Callable[[str], Vocabulary]
) -> LinkQuery:
    """Look up the ids of a query's names.

    A relation's name may join several pairs of entity types. It then stands for the one pair whose type on
    the given side has the entity.

    Parameters
    ----------
    query : NamedQuery
    relations : RelationVocabulary
    vocabulary : callable
        Returns the names of an entity type.

    Raises
    ------
    InputError
        If a name is unknown (the message lists the nearest ones), or the relation is ambiguous.
    """
    # Relations of one name are tried first by the given entity: users rarely give the types' names.
    fitting = [
        id_
        for id_, relation in enumerate(relations.relations)
        if relation.name == query.relation and query.entity in vocabulary(relation.anchor_type(query.side))
    ]
    # Otherwise the vocabulary decides; its error lists the labels, which name the types.
    relation_id = fitting[0] if len(fitting) == 1 else relations.id(query.relation)
    anchor_type = relations[relation_id].anchor_type(query.side)
    return LinkQuery(query.side, vocabulary(anchor_type).id(query.entity), relation_id)
