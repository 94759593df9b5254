"""All likely missing triples of a graph: what is asked, the work in units, and the sorted result."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from dglkge.data.dataset_files import SPLITS, replacing
from dglkge.data.known_triples import KnownTriples
from dglkge.errors import InputError, require_known, write_errors
from dglkge.evaluation.calibration import Calibration, Curve
from dglkge.evaluation.queries import full_float32_matmuls
from dglkge.inference.choices import ALL, FAISS, SEARCHES, SEEN
from dglkge.inference.links.approximate import RECALL_AT, TailIndex, draw_queries, recall_of
from dglkge.inference.links.missing_links import CANDIDATE_PANEL, LinkSearch, check_finite, has_fast_bfloat16
from dglkge.inference.search import check_k
from dglkge.inference.trained_model import TrainedModel
from dglkge.typing import Relation, Side

QUERY_NUMBERS = 1 << 23
"""Most numbers of the queries that a thread searches at a time, in float64."""

UNIT_PAIRS = 1 << 28
"""Pairs of a query and a candidate from which a unit of work is not joined with the next."""

RUN_ROWS = 1 << 21
"""Links of a unit that are in memory before they are sorted and written."""

WORK_SUFFIX, PLAN_FILE = ".parts", "plan.json"

LINK = np.dtype([("probability", "f8"), ("score", "f8"), ("head", "i8"), ("tail", "i8"), ("relation", "i8")])
"""A link in original ids, as the files of a unit have it; without calibration its probability is 0."""

MERGED_ROWS = 1 << 21
"""Rows of all files that are in memory during a merge."""

Progress = Callable[[int], object]
"""Takes the number of queries just searched."""

POINTS_A_DECADE = 10
"""Ranks of the precision-recall curve, evenly spaced by their logarithm."""


Task = tuple[int, int, int]
"""Queries (head, relation, ?): a relation, and the first place and the end of some of its heads."""


@dataclass(frozen=True)
class Completion:
    """A question for missing triples.

    Attributes
    ----------
    heads : mapping of str to (n,) int64 array, optional
        Ids by type, ascending; by default all entities.
    k : int, optional
        Most tails of each (head, relation).
    candidates : str
        ``"all"``; ``"seen"``: heads and tails that a known triple has on that side of the relation; or
        ``"faiss"``: tails that an index finds.
    held_out : str, optional
        A split that counts as unknown.
    """

    run: TrainedModel
    relation_ids: tuple[int, ...]
    heads: dict[str, np.ndarray] | None = None
    min_probability: float | None = None
    k: int | None = None
    candidates: str = ALL
    held_out: str | None = None

    def identity(self) -> dict[str, Any]:
        """Return what must be the same where parts of an interrupted search are used."""
        identity = {"run_id": self.run.checkpoint.manifest.run_id, "version": self.run.checkpoint.version}
        heads = {name: hashlib.sha256(ids.tobytes()).hexdigest() for name, ids in (self.heads or {}).items()}
        names = ("relation_ids", "min_probability", "least_scores", "k", "candidates", "held_out")
        return {**identity, "heads": heads or None, **{name: getattr(self, name) for name in names}}

    @cached_property
    def known(self) -> KnownTriples:
        """Triples that are left out."""
        return self.run.known_triples(splits=tuple(split for split in SPLITS if split != self.held_out))

    @cached_property
    def calibration(self) -> Calibration | None:
        """Probabilities of scores; None if there are none and none are needed."""
        return self.run.calibration_if_any if self.min_probability is None else self.run.calibration

    @cached_property
    def least_scores(self) -> list[float]:
        """Least score with the least probability, by place of the relation; -inf without one."""
        if self.calibration is None or self.min_probability is None:
            return [-np.inf] * len(self.relation_ids)
        curves = [self.calibration.curve_of(id_, Side.TAIL) for id_ in self.relation_ids]
        # Most relations share a curve.
        distinct = {id(curve): curve for curve in curves}
        least_of = {key: least_score(curve, self.min_probability) for key, curve in distinct.items()}
        return [least_of[id(curve)] for curve in curves]

    def relation(self, relation_id: int) -> Relation:
        """Return a relation with its entity types."""
        return self.run.tables.relations[relation_id]

    def head_ids(self, relation_id: int) -> np.ndarray:
        """Return the heads of a relation's queries, ascending (n,)."""
        type_ = self.relation(relation_id).lhs
        heads = None if self.heads is None else self.heads.get(type_, np.empty(0, np.int64))
        if self.candidates == SEEN:
            known_heads = self.known.seen(Side.HEAD, relation_id)
            return known_heads if heads is None else np.intersect1d(heads, known_heads)
        return np.arange(len(self.run.tables.vocabulary(type_))) if heads is None else heads

    def num_tails(self, relation_id: int) -> int:
        """Return the number of candidates of a relation's queries."""
        if self.candidates == SEEN:
            return len(self.known.seen(Side.TAIL, relation_id))
        return len(self.run.tables.vocabulary(self.relation(relation_id).rhs))

    def units(self) -> list[list[Task]]:
        """Divide all queries into units of work; the same for the same question."""
        most = max(1, QUERY_NUMBERS // self.run.model.query_dim)
        units: list[list[Task]] = [[]]
        pairs = 0
        for relation_id in self.relation_ids:
            num_heads, num_tails = len(self.head_ids(relation_id)), self.num_tails(relation_id)
            for start in range(0, num_heads, most):
                if pairs >= UNIT_PAIRS:
                    units.append([])
                    pairs = 0
                stop = min(start + most, num_heads)
                units[-1].append((relation_id, start, stop))
                pairs += (stop - start) * num_tails
        return units

    @property
    def num_queries(self) -> int:
        """Number of pairs (head, relation)."""
        return sum(len(self.head_ids(id_)) for id_ in self.relation_ids)

    @torch.no_grad()
    def links(self, relation_id: int, head_ids: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the missing links of a relation and some heads (n,), in no order."""
        relation = self.relation(relation_id)
        query = self.run.queries(Side.TAIL, head_ids, relation_id, torch.float64)
        known = self.known.answers(Side.TAIL, head_ids, np.full(len(head_ids), relation_id))
        least = self.least_scores[self.relation_ids.index(relation_id)]

        def named(links: np.ndarray) -> np.ndarray:
            table = np.empty(len(links), LINK)
            table["head"], table["tail"] = head_ids[links["query"]], links["candidate"]
            table["score"], table["relation"], table["probability"] = links["score"], relation_id, 0
            if self.calibration is not None:
                table["probability"] = self.calibration.curve_of(relation_id, Side.TAIL)(links["score"])
            return table

        if self.candidates == FAISS:
            check_finite(query.float())
            yield named(self.indexed[relation.rhs].search(query, known, least, self.k))
            return
        places = torch.from_numpy(known[0]), torch.from_numpy(known[1])
        norm = self.run.max_norm(relation.rhs)
        search = LinkSearch(self.run.model, query, norm, places, least, self.k, self.is_narrow)
        for ids, rows in self._panels(relation_id):
            search.add(ids, rows)
            if sum(map(len, search.links)) > RUN_ROWS:
                yield named(search.take(is_last=False))
        yield named(search.take())

    @cached_property
    def indexed(self) -> dict[str, TailIndex]:
        """Indexes of the types of tails, which find the best tails of a sample of queries."""
        indexed = {}
        best = replace(self, k=RECALL_AT, min_probability=None, candidates=ALL)
        for type_ in dict.fromkeys(self.relation(id_).rhs for id_ in self.relation_ids):
            ids = [id_ for id_ in self.relation_ids if self.relation(id_).rhs == type_]
            check_finite(torch.tensor(self.run.max_norm(type_)))
            indexed[type_] = TailIndex(self.run.model, self.run.tables, type_)
            tuned = replace(best, relation_ids=tuple(ids), candidates=FAISS)
            tuned.__dict__["indexed"] = indexed
            sample = draw_queries(tuned.relation_ids, tuned.head_ids, seed=0)
            indexed[type_].tune(partial(recall_of, sample, best.links, tuned.links))
        return indexed

    @cached_property
    def recall(self) -> dict[str, Any]:
        """Share of the links of all candidates that the index finds, over a sample of this one's queries.

        It is not the sample that the number of searched lists was chosen on. None if the sample has no link.
        """
        sample = draw_queries(self.relation_ids, self.head_ids, seed=1)
        with full_float32_matmuls():
            hits, total = recall_of(sample, replace(self, candidates=ALL).links, self.links)
        queries = sum(len(heads) for _, heads in sample)
        measured = {"recall": hits / total if total else None, "links": total, "queries": queries}
        indexes = {type_: index.counts for type_, index in self.indexed.items()}
        return {**measured, "indexes": indexes}

    @cached_property
    def is_narrow(self) -> bool:
        """Whether panels are compared in bfloat16 first: if that is faster and a least score skips most."""
        return self.k is None and self.min_probability is not None and has_fast_bfloat16(self.run.model)

    def _panels(self, relation_id: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the ids, ascending, and rows of the candidates of a relation, panel by panel."""
        type_ = self.relation(relation_id).rhs
        if self.candidates == SEEN:
            for ids in torch.from_numpy(self.known.seen(Side.TAIL, relation_id)).split(CANDIDATE_PANEL):
                yield ids, self.run.tables.gather(type_, ids)
            return
        for shard in self.run.tables.shards(type_):
            yield from zip(shard.original_ids.split(CANDIDATE_PANEL), shard.rows.split(CANDIDATE_PANEL))

    def num_held_out(self) -> int:
        """Return the number of distinct triples of the held-out split that the search can find."""
        if self.held_out is None:
            return 0
        triples, count = np.unique(self.run.dataset.split(self.held_out), axis=0), 0
        for relation_id in self.relation_ids:
            heads, relations, tails = triples[triples[:, 1] == relation_id].T
            is_unknown = ~self.known.contain(Side.TAIL, heads, relations, tails)
            if self.candidates == SEEN:
                is_unknown &= np.isin(tails, self.known.seen(Side.TAIL, relation_id))
            count += int((is_unknown & np.isin(heads, self.head_ids(relation_id))).sum())
        return count


def least_score(curve: Curve, probability: float) -> float:
    """Return the least float64 score whose probability is not below one; inf if there is none."""
    low, high = -1e30, 1e30
    if curve(np.array([high]))[0] < curve(np.array([low]))[0]:
        raise InputError("the calibrated probability falls with the score: the model tells nothing apart")
    if curve(np.array([low]))[0] >= probability:
        return -np.inf
    if curve(np.array([high]))[0] < probability:
        return np.inf
    while low < (middle := low / 2 + high / 2) < high:
        low, high = (low, middle) if curve(np.array([middle]))[0] >= probability else (middle, high)
    return float(high)


def plan_completion(
    run: TrainedModel,
    relations: Sequence[str] | None = None,
    heads: Sequence[str] | None = None,
    head_types: Sequence[str] | None = None,
    min_probability: float | None = None,
    k: int | None = None,
    candidates: str = ALL,
    held_out: str | None = None,
) -> Completion:
    """Check a question for missing triples, and look its names up; see :meth:`Run.complete`."""
    if run.bonus is not None:
        raise InputError("missing triples are searched by the scores of the model alone: ask without rules")
    tables = run.tables
    require_known("choice of candidates", candidates, SEARCHES)
    if candidates == FAISS and not run.model.score_function.is_product:
        name = tables.meta.score_function
        raise InputError(f"an index finds the greatest inner products, and scores of {name} are none")
    if held_out is not None:
        require_known("split", held_out, SPLITS)
    if k is not None:
        check_k(k)
    elif min_probability is None:
        min_probability = 0.5
    if min_probability is not None and not 0 < min_probability <= 1:
        raise InputError(f"the least probability must be above 0 and at most 1, got {min_probability:g}")
    relation_ids = set(range(len(tables.relations)))
    if relations is not None:
        relation_ids = {id_ for name in relations for id_ in tables.relations.ids_of(name)}
    if head_types is not None:
        types = {run.type_of("", name) for name in head_types}
        relation_ids = {id_ for id_ in relation_ids if tables.relations[id_].lhs in types}
    ids = tuple(sorted(relation_ids))
    head_ids = None if heads is None else _ids_by_type(run, heads, {tables.relations[id_].lhs for id_ in ids})
    completion = Completion(run, ids, head_ids, min_probability, k, candidates, held_out)
    completion.is_narrow  # noqa: B018  measured here, before threads take the cores
    completion.known  # noqa: B018  an error now if the data set cannot be opened
    completion.least_scores  # noqa: B018  or if no probabilities were fitted
    return completion


def _ids_by_type(run: TrainedModel, names: Sequence[str], types: Collection[str]) -> dict[str, np.ndarray]:
    """Look up heads in all types that relations have on that side."""
    ids_by_type = {type_: run.tables.vocabulary(type_).find(names) for type_ in types}
    for place, name in enumerate(names):
        if all(ids[place] < 0 for ids in ids_by_type.values()):
            type_ = run.type_of(name)
            run.tables.vocabulary(type_).id(name)
            raise InputError(f"{name!r} is of type {type_}, and no chosen relation has heads of that type")
    return {type_: np.unique(ids[ids >= 0]) for type_, ids in ids_by_type.items()}


def _search(completion: Completion, folder: Path, progress: Progress | None = None) -> list[Path]:
    """Search the units that have no folder yet, one a thread; return the sorted files of links of all."""
    identity = json.loads(json.dumps(completion.identity()))
    plan, stop, progress = folder / PLAN_FILE, threading.Event(), progress or (lambda _count: None)
    threads, units = torch.get_num_threads(), completion.units()
    with write_errors(f"cannot write {folder}"):
        if plan.exists() and json.loads(plan.read_text()) != identity:
            raise InputError(f"{folder} has parts of another completion; remove it, or choose another output")
        with full_float32_matmuls():
            if completion.candidates == FAISS:
                completion.indexed  # noqa: B018  built before threads take the cores, and once nothing is refused
            folder.mkdir(parents=True, exist_ok=True)
            with replacing(plan) as file:
                file.write(json.dumps(identity).encode())
            todo = {folder / f"{number:06d}": tasks for number, tasks in enumerate(units)}
            for done in [path for path in todo if path.is_dir()]:
                progress(_num_queries(todo.pop(done)))
            workers = max(1, min(threads, len(todo)))
            pool = ThreadPoolExecutor(workers, "complete", torch.set_num_threads, (1,))
            try:
                searches = {pool.submit(_search_unit, completion, *unit, stop): unit for unit in todo.items()}
                for search in as_completed(searches):
                    search.result()
                    progress(_num_queries(searches[search][1]))
            finally:
                stop.set()
                pool.shutdown(cancel_futures=True)
                torch.set_num_threads(threads)
    return sorted(folder.glob("*/*.links"))


def _num_queries(tasks: Sequence[Task]) -> int:
    return sum(stop - start for _, start, stop in tasks)


def _search_unit(completion: Completion, folder: Path, tasks: Sequence[Task], stop: threading.Event) -> None:
    """Write the links of a unit in sorted files, to a folder that has its name when all are there."""
    unfinished = folder.with_suffix(".partial")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    pending: list[np.ndarray] = []

    def flush(least: int) -> None:
        if sum(map(len, pending)) > least:
            number = len(list(unfinished.iterdir()))
            # On the disk before the folder has its name: after a power failure none may be cut off.
            with replacing(unfinished / f"{number:04d}.links") as file:
                _sorted(np.concatenate(pending)).tofile(file)
            pending.clear()

    for relation_id, start, end in tasks:
        for links in completion.links(relation_id, completion.head_ids(relation_id)[start:end]):
            if stop.is_set():
                return
            pending.append(links)
            flush(RUN_ROWS)
    flush(0)
    os.replace(unfinished, folder)


def _sorted(links: np.ndarray) -> np.ndarray:
    """Return links by descending probability and score, and by relation, head and tail among equal ones."""
    ids = links["tail"], links["head"], links["relation"]
    return links[np.lexsort((*ids, -links["score"], -links["probability"]))]


def _order(links: np.ndarray) -> np.ndarray:
    """Return ascending numbers (n,) for sorted links: complex ones are compared by both parts in turn."""
    order = np.empty(len(links), complex)
    order.real, order.imag = -links["probability"], -links["score"]
    return order


def _merged(paths: Sequence[Path]) -> Iterator[np.ndarray]:
    """Yield the links of sorted files in one order, in blocks."""
    # Read piece by piece and not mapped: a mapped file stays open, and there may be thousands.
    chunk = max(1024, MERGED_ROWS // max(1, len(paths)))
    num_rows = {path: path.stat().st_size // LINK.itemsize for path in paths}
    places, unmerged = dict.fromkeys(paths, 0), dict.fromkeys(paths, np.empty(0, LINK))
    while unmerged:
        for path in [path for path, rows in unmerged.items() if not len(rows)]:
            unmerged[path] = np.fromfile(path, LINK, chunk, offset=places[path] * LINK.itemsize)
            places[path] += len(unmerged[path])
        # What a file still has is not above its last row in memory.
        unread = {path for path in unmerged if places[path] < num_rows[path]}
        last = np.array([complex(np.inf), *(_order(unmerged[path][-1:])[0] for path in unread)]).min()
        ends = {path: np.searchsorted(_order(rows), last, "right") for path, rows in unmerged.items()}
        yield _sorted(np.concatenate([rows[: ends[path]] for path, rows in unmerged.items()]))
        unmerged = {path: rows[ends[path] :] for path, rows in unmerged.items()}
        unmerged = {path: rows for path, rows in unmerged.items() if len(rows) or path in unread}


def _curve(hits: np.ndarray, num_links: int, num_held_out: int) -> list[dict[str, float]]:
    """Return precision and recall of the best links, at ranks of a logarithmic scale and at the last one.

    ``hits`` are the ranks of held-out triples, ascending.
    """
    if not num_links:
        return []
    powers = np.arange(POINTS_A_DECADE * np.log10(num_links)) / POINTS_A_DECADE
    ranks = np.unique(np.append(np.round(10.0**powers).astype(np.int64), num_links))
    counts = np.searchsorted(hits, ranks, side="right")
    columns = {"rank": ranks, "precision": counts / ranks, "recall": counts / max(1, num_held_out)}
    return pa.table(columns).to_pylist()


def as_table(completion: Completion, links: np.ndarray) -> pa.Table:
    """Return links by name: head, relation, tail, score; probability and held_out where there are some."""
    labels = completion.run.tables.relations.labels
    columns = {
        "head": _names(completion, links, Side.HEAD),
        "relation": pa.array([labels[id_] for id_ in links["relation"].tolist()], pa.string()),
        "tail": _names(completion, links, Side.TAIL),
        "score": links["score"],
    }
    if completion.calibration is not None:
        columns["probability"] = links["probability"]
    if completion.held_out is not None:
        known = completion.run.known_triples(splits=(completion.held_out,))
        columns["held_out"] = known.contain(Side.TAIL, links["head"], links["relation"], links["tail"])
    return pa.table(columns)


def _names(completion: Completion, links: np.ndarray, side: Side) -> pa.Array:
    """Look up the names of heads or tails, each distinct one once."""
    tables, names = completion.run.tables, np.empty(len(links), object)
    types = [relation.candidate_type(side) for relation in tables.relations.relations]
    for type_ in {types[id_] for id_ in np.unique(links["relation"]).tolist()}:
        rows = np.array([type_ == other for other in types])[links["relation"]]
        ids, index = np.unique(links[side.value][rows], return_inverse=True)
        vocabulary = tables.vocabulary(type_)
        names[rows] = np.array([vocabulary[id_] for id_ in ids.tolist()], object)[index]
    return pa.array(names, pa.string())


def write_completion(
    completion: Completion, path: Path, overwrite: bool = False, progress: Progress | None = None
) -> dict[str, Any]:
    """Write the missing triples to a Parquet file, the most probable first, and return a summary.

    An interrupted call leaves ``PATH.parts``, and the same call goes on from there.
    """
    if path.exists() and not overwrite:
        raise InputError(f"{path} exists; choose another output, or overwrite it")
    folder = path.with_name(path.name + WORK_SUFFIX)
    files = _search(completion, folder, progress)
    num_links, num_held_out, hits = 0, completion.num_held_out(), [np.empty(0, np.int64)]
    temporary = folder / "sorted.parquet"
    with write_errors(f"cannot write {path}"):
        with pq.ParquetWriter(temporary, as_table(completion, np.empty(0, LINK)).schema) as writer:
            for links in _merged(files):
                table = as_table(completion, links)
                writer.write_table(table)
                if completion.held_out is not None:
                    hits.append(np.flatnonzero(table["held_out"].to_numpy()) + num_links + 1)
                num_links += len(links)
        os.replace(temporary, path)
    shutil.rmtree(folder)
    pairs = sum(len(completion.head_ids(id_)) * completion.num_tails(id_) for id_ in completion.relation_ids)
    least = min(filter(np.isfinite, completion.least_scores), default=None)
    summary: dict[str, Any] = {"path": str(path), "triples": num_links, "queries": completion.num_queries}
    summary |= {"pairs": pairs, "least_score": least}
    if completion.candidates == FAISS:
        summary["recall"] = completion.recall
    if completion.held_out is not None:
        summary |= {"held_out": completion.held_out, "held_out_triples": num_held_out}
        summary |= {"curve": _curve(np.concatenate(hits), num_links, num_held_out)}
    return summary


def find_links(completion: Completion, limit: int | None = None) -> pa.Table:
    """Return the missing triples, or the best ones of them, the most probable first; see :func:`as_table`."""
    with tempfile.TemporaryDirectory() as folder:
        blocks = [np.empty(0, LINK)]
        for links in _merged(_search(completion, Path(folder))):
            blocks.append(links)
            if limit is not None and sum(map(len, blocks)) >= limit:
                break
        return as_table(completion, np.concatenate(blocks)[:limit])
