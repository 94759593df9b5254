"""Completes triples: the best tails of (h, r, ?) and the best heads of (?, r, t)."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dglkge.data.known_triples import KnownTriples
from dglkge.errors import InputError
from dglkge.model.kge_model import KgeModel
from dglkge.typing import RELATION, Relation, RowShard, RowSource, Side


class TopAnswers:
    """Keeps the k best-scored candidates of each query.

    Parameters
    ----------
    num_queries : int
        Q.
    topk : int
        k.
    """

    def __init__(self, num_queries: int, topk: int) -> None:
        self._topk = topk
        self._scores = torch.empty((num_queries, 0))
        self._ids = torch.empty((num_queries, 0), dtype=torch.int64)

    def add(self, scores: torch.Tensor, ids: torch.Tensor) -> None:
        """Let a block of candidates compete.

        Parameters
        ----------
        scores : (Q, n) tensor
            -inf for a candidate that is out of the question.
        ids : (n,) int64 tensor
        """
        best, places = scores.topk(min(self._topk, scores.shape[1]), dim=1)
        all_scores = torch.cat([self._scores, best], dim=1)
        all_ids = torch.cat([self._ids, ids[places]], dim=1)
        # Two stable sorts: by score, and by id among equal scores, whatever the blocks were.
        by_id = all_ids.argsort(dim=1, stable=True)
        by_score = all_scores.gather(1, by_id).argsort(dim=1, descending=True, stable=True)
        order = by_id.gather(1, by_score)[:, : self._topk]
        self._scores, self._ids = all_scores.gather(1, order), all_ids.gather(1, order)

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores (Q, k) in descending order and the ids (Q, k).

        Where fewer than k candidates were in question, the last scores are -inf or k is smaller. Which of
        several candidates with exactly equal scores makes it to place k is not defined.
        """
        return self._scores, self._ids


BLOCK_BYTES = 64 << 20
QUERIES_AT_A_TIME = 256

KnownAnswers = dict[str, tuple[np.ndarray, np.ndarray]]
"""By split: query index (M,) and id (M,) of each known answer to a batch of queries."""


class Known(enum.Enum):
    """What to do with answers that stand in the dataset already."""

    MARK = "mark"
    DROP = "drop"
    KEEP = "keep"


@dataclass(frozen=True)
class LinkQuery:
    """A triple with one entity missing, in original ids.

    Attributes
    ----------
    side : Side
        What is asked for.
    entity_id : int
        The entity given: the head for ``Side.TAIL``, the tail for ``Side.HEAD``.
    relation_id : int
    """

    side: Side
    entity_id: int
    relation_id: int


@dataclass(frozen=True)
class Answer:
    """One proposed entity.

    Attributes
    ----------
    entity_id : int
        Its original id; its type is the relation's on the side that was asked for.
    score : float
        The model's score; higher is better, and only scores of one query compare.
    known : str or None
        The split of the dataset in which the triple stands, the first of several; None where it stands in
        none, or nobody looked.
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
        What is known, by split; needed to mark it or leave it out.
    """

    def __init__(
        self,
        model: KgeModel,
        relations: Sequence[Relation],
        rows: RowSource,
        shards: Mapping[str, Sequence[RowShard]],
        known_triples: Mapping[str, KnownTriples] | None = None,
    ) -> None:
        self._model = model
        self._relations = relations
        self._rows = rows
        self._shards = shards
        self._known_triples = known_triples or {}

    def predict(
        self, queries: Sequence[LinkQuery], topk: int = 10, known: Known = Known.KEEP
    ) -> list[list[Answer]]:
        """Return the best answers to each query, the best first.

        Parameters
        ----------
        queries : sequence of LinkQuery
        topk : int
            Answers wanted for each; fewer where there are not so many candidates.
        known : Known

        Returns
        -------
        list of list of Answer
            One list for each query. Equal scores stand in the order of ids.

        Raises
        ------
        InputError
            If ``topk`` is less than 1, or known triples are needed and there are none.
        """
        if topk < 1:
            raise InputError(f"the number of answers must be at least 1, got {topk}")
        if known is not Known.KEEP and not self._known_triples:
            raise InputError("to mark or drop known answers, the known triples are needed")
        answers: list[list[Answer]] = [[] for _ in queries]
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
                    )
                found = self._known_answers(side, entity_ids, relation_ids) if known is not Known.KEEP else {}
                best = self._search(query, candidate_type, topk, found if known is Known.DROP else {})
                for place, row in zip(batch, _to_answers(*best, found if known is Known.MARK else {})):
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
        """Look up what is known of each query of a batch."""
        return {
            split: triples.answers(side, entity_ids.numpy(), relation_ids.numpy())
            for split, triples in self._known_triples.items()
        }

    def _search(
        self,
        query: torch.Tensor,
        candidate_type: str,
        topk: int,
        dropped: KnownAnswers,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Score queries (Q, D) against all rows of a type, block by block; return scores and ids (Q, k)."""
        best = TopAnswers(len(query), topk)
        with torch.no_grad():
            for shard in self._shards[candidate_type]:
                for start, stop in candidate_blocks(len(query), shard):
                    scores = self._model.compare(query, shard.rows[start:stop])
                    for index, ids in dropped.values():
                        places = shard.locate(torch.from_numpy(ids)) - start
                        here = (places >= 0) & (places < stop - start)
                        scores[torch.from_numpy(index)[here], places[here]] = -torch.inf
                    best.add(scores, shard.original_ids[start:stop])
        return best.result()


def candidate_blocks(num_queries: int, shard: RowShard) -> Iterator[tuple[int, int]]:
    """Cut a shard's rows into (start, stop) so that neither rows nor scores of a block exceed some memory."""
    num_rows, width = shard.rows.shape
    step = max(1, BLOCK_BYTES // (4 * max(num_queries, width)))
    for start in range(0, num_rows, step):
        yield start, min(num_rows, start + step)


def _to_answers(scores: torch.Tensor, ids: torch.Tensor, known: KnownAnswers) -> Iterator[list[Answer]]:
    """Turn scores and ids (Q, k) into answers, leaving out what was out of the question."""
    split_of: dict[tuple[int, int], str] = {}
    for split, (index, known_ids) in known.items():
        for key in zip(index.tolist(), known_ids.tolist()):
            split_of.setdefault(key, split)
    for row, (row_scores, row_ids) in enumerate(zip(scores.tolist(), ids.tolist())):
        yield [
            Answer(id_, score, split_of.get((row, id_)))
            for id_, score in zip(row_ids, row_scores)
            if score != -torch.inf
        ]
