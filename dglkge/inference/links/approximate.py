"""Approximate search by faiss: rows with the greatest inner products, likely tails of queries, the recall."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize
from tqdm import tqdm

from dglkge.errors import import_extra
from dglkge.evaluation.queries import exact_scores
from dglkge.inference.links.missing_links import PAIR, best_links
from dglkge.inference.search import candidate_blocks
from dglkge.inference.whole_tables import Tables
from dglkge.model.kge_model import KgeModel

RECALL_WANTED = 0.95
"""The number of searched lists is doubled until a sample has this recall."""

ROWS_PER_LIST = 50
"""Rows that the centre of each list is trained on."""

SPARE = 4
"""Candidates that are scored exactly, for each answer: 8-bit rows confuse the order of close neighbours."""


class RowIndex:
    """Rows quantized to 8 bits and sorted into lists (inverted file), of which a search scans the nearest.

    Attributes
    ----------
    num_lists, num_searched : int
        Lists of the index, and those that a search scans.
    threads : int
        Of a search.

    option : str
        What needs faiss, for the error without it.
    is_normalized : bool
        Divide each row by its norm: inner products of such rows are cosines.
    """

    option, is_normalized = "--faiss", False

    def __init__(self, tables: Tables, table: str, threads: int = 1, show_progress: bool = False) -> None:
        self._faiss = faiss = import_extra(self.option, "faiss", "faiss", "faiss-cpu")
        self._tables, self._type, self.threads = tables, table, threads
        faiss.omp_set_num_threads(threads)
        num_rows, width = tables[table].shape
        self.num_lists = max(1, min(num_rows // ROWS_PER_LIST, 2 * math.isqrt(num_rows)))
        self.num_searched = 1
        # Owned by Python: the index only points to it.
        self._quantizer = faiss.IndexFlatIP(width)
        self._index = faiss.IndexIVFScalarQuantizer(
            self._quantizer, width, self.num_lists, faiss.ScalarQuantizer.QT_8bit, faiss.METRIC_INNER_PRODUCT
        )
        self._index.cp.min_points_per_centroid = 1  # no warning: a type of few rows has one list
        draws = np.random.default_rng(0)
        training = draws.choice(num_rows, min(num_rows, ROWS_PER_LIST * self.num_lists), replace=False)
        self._index.train(self.rows(np.sort(training)))
        with tqdm(total=num_rows, desc="faiss", unit="row", disable=None if show_progress else True) as bar:
            for shard, block in candidate_blocks(1, tables.shards(table)):
                rows = self._prepared(shard.rows[block])
                self._index.add_with_ids(rows, shard.original_ids[block].numpy())
                bar.update(len(rows))

    @property
    def counts(self) -> dict[str, int]:
        """How many lists there are and are searched."""
        return {"lists": self.num_lists, "lists_searched": self.num_searched}

    def rows(self, ids: np.ndarray) -> np.ndarray:
        """Return the rows (n, D) of original ids, float32, as they are indexed."""
        return self._prepared(self._tables.gather(self._type, torch.from_numpy(ids)))

    def _prepared(self, rows: Tensor) -> np.ndarray:
        return (normalize(rows) if self.is_normalized else rows).float().numpy()

    def nearest(self, queries: np.ndarray, k: int) -> np.ndarray:
        """Return the ids (n, k) of candidates of queries (n, D), -1 where the lists have no more."""
        # A setting of the calling thread, which is not the one that built the index.
        self._faiss.omp_set_num_threads(self.threads)
        # Rows may be narrower than queries: they have zeros at their end.
        _, ids = self._index.search(np.ascontiguousarray(queries[:, : self._index.d]), k)
        nearest: np.ndarray = ids
        return nearest

    def tune(self, recall: Callable[[], tuple[int, int]]) -> float:
        """Double the number of searched lists until enough of some links are found; return their share."""
        while True:
            self._index.nprobe = self.num_searched
            hits, total = recall()
            share = hits / max(1, total)
            if share >= RECALL_WANTED or self.num_searched == self.num_lists:
                return share
            self.num_searched = min(2 * self.num_searched, self.num_lists)


SAMPLED_RELATIONS, SAMPLED_HEADS = 20, 50
"""Queries that the recall is measured on: of so many draws of a relation, so many heads each."""

RECALL_AT = 10
"""Tails of each query that the number of searched lists is chosen on."""

FIRST_CANDIDATES = 64
"""Candidates of a query; four times as many as long as all are above the limit."""

CANDIDATES_AT_A_TIME = 1 << 17

Sample = list[tuple[int, np.ndarray]]
"""Relations and heads of queries."""


class TailIndex(RowIndex):
    """Index of a type that relations have as tails, built with all threads, searched with one.

    Scores of links are exact; what is approximate is which links are found.
    """

    option = "--candidates faiss"

    def __init__(self, model: KgeModel, tables: Tables, entity_type: str) -> None:
        super().__init__(tables, entity_type, torch.get_num_threads())
        self._model, self.threads = model, 1

    def search(self, query: Tensor, known: Sequence[np.ndarray], least: float, k: int | None) -> np.ndarray:
        """Return the links found; the arguments are those of :class:`.missing_links.LinkSearch`."""
        base = len(self._tables[self._type])
        known_keys = np.sort(known[0] * base + known[1])
        most_known = int(np.bincount(known[0]).max()) if len(known[0]) else 0
        count = FIRST_CANDIDATES if k is None else SPARE * k + most_known
        parts, open_queries = [np.empty(0, PAIR)], np.arange(len(query))
        while len(open_queries):
            count, again = min(count, base), []
            step = max(1, CANDIDATES_AT_A_TIME // count)
            for places in np.split(open_queries, range(step, len(open_queries), step)):
                links, has_more = self._scored(query, places, count)
                if k is None and count < base:
                    lowest = np.full(len(query), np.inf)
                    np.minimum.at(lowest, links["query"], links["score"])
                    again.append(places[has_more & (lowest[places] >= least)])
                    links = links[~np.isin(links["query"], again[-1])]
                keys = links["query"] * base + links["candidate"]
                parts.append(best_links(links[(links["score"] >= least) & ~np.isin(keys, known_keys)], k))
            open_queries, count = np.concatenate([np.empty(0, np.int64), *again]), 4 * count
        return np.concatenate(parts)

    def _scored(self, query: Tensor, places: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the candidates of some queries with exact scores, and which queries may have more."""
        ids = self.nearest(query[places].float().numpy(), count)
        place, column = np.nonzero(ids >= 0)
        links = np.empty(len(place), PAIR)
        links["query"], links["candidate"] = places[place], ids[place, column]
        distinct, row = np.unique(links["candidate"], return_inverse=True)
        rows = self._tables.gather(self._type, torch.from_numpy(distinct))
        query_ids = torch.from_numpy(np.ascontiguousarray(links["query"]))
        links["score"] = exact_scores(self._model, query, query_ids, rows, torch.from_numpy(row))
        return links, np.asarray(ids.min(axis=1) >= 0)


def draw_queries(relation_ids: Sequence[int], head_ids: Callable[[int], np.ndarray], seed: int) -> Sample:
    """Draw relations in proportion to their queries, and heads of each."""
    draws = np.random.default_rng(seed)
    counts = np.array([len(head_ids(id_)) for id_ in relation_ids], np.float64)
    if not counts.sum():
        return []
    drawn = draws.choice(relation_ids, SAMPLED_RELATIONS, p=counts / counts.sum())
    sample = []
    for relation_id, times in zip(*(column.tolist() for column in np.unique(drawn, return_counts=True))):
        heads = head_ids(relation_id)
        count = min(len(heads), SAMPLED_HEADS * times)
        sample.append((relation_id, np.sort(draws.choice(heads, count, replace=False))))
    return sample


Search = Callable[[int, np.ndarray], Iterator[np.ndarray]]
"""Takes a relation and heads (n,), and yields links."""


def recall_of(sample: Sample, exact: Search, approximate: Search) -> tuple[int, int]:
    """Return how many links of the exact search of a sample another one has found, and how many there are."""
    ids = ["relation", "head", "tail"]
    exact_links, approximate_links = (
        {link for query in sample for links in search(*query) for link in links[ids].tolist()}
        for search in (exact, approximate)
    )
    return len(exact_links & approximate_links), len(exact_links)
