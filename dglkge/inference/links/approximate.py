"""Likely tails of queries among the candidates of an index: approximate, with measured recall."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dglkge.evaluation.queries import exact_scores
from dglkge.inference.links.missing_links import PAIR
from dglkge.inference.links.row_index import SPARE, RowIndex
from dglkge.inference.whole_tables import Tables
from dglkge.model.kge_model import KgeModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SAMPLED_RELATIONS, SAMPLED_HEADS = 20, 50
"""Queries that the recall is measured on: of so many draws of a relation, so many heads each."""

RECALL_AT = 10
"""Tails of each query that the number of searched lists is chosen on."""

FIRST_CANDIDATES = 64
"""Candidates of a query; four times as many as long as all are above the limit."""

CANDIDATES_AT_A_TIME = 1 << 17

Sample = list[tuple[int, np.ndarray]]
"""Relations and heads of queries."""


class IndexedTails:
    """Indexes of the types that relations have as tails, built at first use.

    Scores of links are exact; what is approximate is which links are found.
    """

    def __init__(self, model: KgeModel, tables: Tables) -> None:
        self._model, self._tables = model, tables
        self.indexes: dict[str, RowIndex] = {}

    def build(self, entity_type: str) -> None:
        """Build the index of a type, with all threads; it is searched with one."""
        index = RowIndex("--candidates faiss", self._tables, entity_type, torch.get_num_threads())
        index.threads = 1
        self.indexes[entity_type] = index

    def search(
        self,
        entity_type: str,
        query: Tensor,
        known: tuple[np.ndarray, np.ndarray],
        least: float,
        k: int | None,
    ) -> np.ndarray:
        """Return the links found; the arguments are those of :class:`.missing_links.LinkSearch`."""
        base = int(self._tables[entity_type].shape[0])
        known_keys = np.sort(known[0] * base + known[1])
        most_known = int(np.bincount(known[0]).max()) if len(known[0]) else 0
        count = FIRST_CANDIDATES if k is None else SPARE * k + most_known
        parts, open_queries = [np.empty(0, PAIR)], np.arange(len(query))
        while len(open_queries):
            count, again = min(count, base), []
            step = max(1, CANDIDATES_AT_A_TIME // count)
            for places in np.split(open_queries, range(step, len(open_queries), step)):
                links, has_more = self._nearest(entity_type, query, places, count)
                if k is None and count < base:
                    lowest = np.full(len(query), np.inf)
                    np.minimum.at(lowest, links["query"], links["score"])
                    again.append(places[has_more & (lowest[places] >= least)])
                    links = links[~np.isin(links["query"], again[-1])]
                keys = links["query"] * base + links["candidate"]
                links = links[(links["score"] >= least) & ~np.isin(keys, known_keys)]
                order = np.lexsort((links["candidate"], -links["score"], links["query"]))
                starts = np.searchsorted(links["query"][order], links["query"][order])
                parts.append(links[order[np.arange(len(order)) - starts < (k or base)]])
            open_queries, count = np.concatenate([np.empty(0, np.int64), *again]), 4 * count
        return np.concatenate(parts)

    def _nearest(
        self, entity_type: str, query: Tensor, places: np.ndarray, count: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the candidates of some queries with exact scores, and which queries may have more."""
        ids = self.indexes[entity_type].nearest(query[places].float().numpy(), count)
        place, column = np.nonzero(ids >= 0)
        links = np.empty(len(place), PAIR)
        links["query"], links["candidate"] = places[place], ids[place, column]
        distinct, row = np.unique(links["candidate"], return_inverse=True)
        rows = self._tables.gather(entity_type, torch.from_numpy(distinct))
        query_ids = torch.from_numpy(np.ascontiguousarray(links["query"]))
        links["score"] = exact_scores(self._model, query, query_ids, rows, torch.from_numpy(row.reshape(-1)))
        return links, np.asarray(ids.min(axis=1) >= 0)

    def describe(self) -> dict[str, Any]:
        """Return the lists of each type, and how many are searched."""
        return {
            type_: {"lists": index.num_lists, "lists_searched": index.num_searched}
            for type_, index in self.indexes.items()
        }


def draw_queries(num_heads: dict[int, int], head_ids: Callable[[int], np.ndarray], seed: int) -> Sample:
    """Draw relations in proportion to their queries, and heads of each."""
    draws = np.random.default_rng(seed)
    counts = np.array(list(num_heads.values()), np.float64)
    if not counts.sum():
        return []
    drawn = draws.choice(list(num_heads), SAMPLED_RELATIONS, p=counts / counts.sum())
    sample = []
    for relation_id in np.unique(drawn).tolist():
        heads = head_ids(relation_id)
        count = min(len(heads), SAMPLED_HEADS * int((drawn == relation_id).sum()))
        sample.append((relation_id, np.sort(draws.choice(heads, count, replace=False))))
    return sample


def recall_of(
    sample: Sample,
    exact: Callable[[int, np.ndarray], Iterator[np.ndarray]],
    approximate: Callable[[int, np.ndarray], Iterator[np.ndarray]],
) -> tuple[int, int]:
    """Return how many links of the exact search of a sample another one has found, and how many there are."""
    hits = total = 0
    for relation_id, heads in sample:
        exact_links, approximate_links = (
            {tuple(pair) for links in search(relation_id, heads) for pair in links[["head", "tail"]].tolist()}
            for search in (exact, approximate)
        )
        hits, total = hits + len(exact_links & approximate_links), total + len(exact_links)
    return hits, total
