"""Ranking of edge sets bucket by bucket, with the averages afterwards: results as they come.

The sequence is PyTorch-BigGraph's (``do_eval_and_report_stats``): every bucket of an edge set, the edge set,
and at the end all edge sets together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from dglkge.data.dataset import Dataset
from dglkge.data.dataset_files import SPLITS, TRAIN
from dglkge.data.known_triples import KnownTriples
from dglkge.data.range_walk import range_bounds, ranges_of
from dglkge.errors import InputError, unknown_name
from dglkge.evaluation.evaluator import RankingEvaluator
from dglkge.evaluation.metrics import Protocol, RankingResult, relation_categories
from dglkge.inference.trained_model import TrainedModel
from dglkge.model.device import ComputeDevice, open_device
from dglkge.typing import AUTO_DEVICE, Relation, Side

EdgeSets = str | Sequence[str] | Mapping[str, np.ndarray]


class BucketResult(NamedTuple):
    """Ranks of some triples.

    Attributes
    ----------
    edge_set : str or None
        None: all edge sets together.
    bucket : (int, int) or None
        Range of the heads and range of the tails; None: all buckets of the edge set.
    result : RankingResult
    """

    edge_set: str | None
    bucket: tuple[int, int] | None
    result: RankingResult


def evaluate_buckets(
    run: TrainedModel,
    edge_sets: EdgeSets,
    protocol: Protocol | None = None,
    num_ranges: int = 1,
    progress: Callable[[int], object] | None = None,
    also_known: Sequence[np.ndarray] = (),
    device: str = AUTO_DEVICE,
) -> Iterator[BucketResult]:
    """Rank edge sets bucket by bucket; yields each result when it is there, then the averages.

    Candidates come from all ranges, so that results do not depend on the buckets: those of an edge set are
    those of :meth:`dglkge.inference.run.Run.evaluate` for its triples. Only sampled candidates
    (``num_candidates``) are drawn by a triple's place in its bucket.

    Parameters
    ----------
    run : TrainedModel
    edge_sets : str, sequence of str, or mapping of str to (n, 3) int64 array
        Names of splits and of edge sets of the training triples; or triples by a name of your choice, as
        original ids.
    protocol : Protocol, optional
        By default filtered ranking among all entities; its split is not used.
    num_ranges : int
        The ids of each entity type are cut into so many equal ranges; a bucket is a pair of them.
    progress : callable, optional
        Called with the number of queries just ranked.
    also_known, device
        As for :meth:`dglkge.inference.run.Run.evaluate`.

    Yields
    ------
    BucketResult
        Of each bucket with triples, in the order of ranges; of the edge set, with ``bucket`` None; at the end
        of all edge sets, with ``edge_set`` None as well.

    Raises
    ------
    InputError
        Before anything is ranked: if a name is unknown, an edge set is empty, ``num_ranges`` is below 1, or
        the protocol has given candidates.
    """
    if protocol is not None and protocol.given:
        raise InputError("given candidates are ranked in the order of a split, not bucket by bucket")
    if num_ranges < 1:
        raise InputError(f"num_ranges must be at least 1, got {num_ranges}")
    # A generator would raise at its first value only.
    triples, place = _triples_of(run.dataset, edge_sets), open_device(device, "device")
    protocol = protocol or Protocol()
    # Triples of the caller are true as well: none of them is a wrong answer to another's query.
    known = run.known_triples([*triples.values(), *also_known]) if protocol.filtered else None
    return _evaluate(run, triples, protocol, num_ranges, progress, known, place)


def _evaluate(
    run: TrainedModel,
    edge_sets: Mapping[str, np.ndarray],
    protocol: Protocol,
    num_ranges: int,
    progress: Callable[[int], object] | None,
    known: KnownTriples | None,
    device: ComputeDevice,
) -> Iterator[BucketResult]:
    dataset, relations = run.dataset, run.tables.relations.relations
    shards = run.shards(run.tables.entity_types)
    categories = relation_categories(dataset.split(TRAIN), dataset.num_relations)
    results_of_sets = []
    for name, triples in edge_sets.items():
        protocol_of_set = replace(protocol, split=name)
        evaluator = RankingEvaluator(run.model, relations, protocol_of_set, device=device, bonus=run.bonus)
        buckets = _buckets(relations, run.tables.meta.entity_types, triples, num_ranges)
        results, places = [], []
        for bucket in np.unique(buckets).tolist():
            here = np.flatnonzero(buckets == bucket)
            result = evaluator.evaluate(triples[here], known, run.tables, shards, progress=progress)
            results.append(replace(result, categories=categories))
            places.append(here)
            lhs, rhs = divmod(bucket, num_ranges)
            yield BucketResult(name, (lhs, rhs), results[-1])
        results_of_sets.append(RankingResult.joined(results, np.concatenate(places)))
        yield BucketResult(name, None, results_of_sets[-1])
    together = RankingResult.joined(results_of_sets)
    names = replace(protocol, split="+".join(edge_sets))
    yield BucketResult(None, None, replace(together, protocol=names))


def _triples_of(dataset: Dataset, edge_sets: EdgeSets) -> dict[str, np.ndarray]:
    """Return the triples of each edge set by name.

    Raises
    ------
    InputError
        If there is no such edge set, or it is empty.
    """
    if isinstance(edge_sets, Mapping):
        by_name = {str(name): np.ascontiguousarray(own, np.int64) for name, own in edge_sets.items()}
    else:
        names = [edge_sets] if isinstance(edge_sets, str) else list(edge_sets)
        by_name = {name: _named(dataset, name) for name in names}
    if not by_name:
        raise InputError("there is no edge set to rank; expected at least one")
    for name, triples in by_name.items():
        if not len(triples):
            raise InputError(f"the edge set {name!r} has no triples to rank")
    return by_name


def _named(dataset: Dataset, name: str) -> np.ndarray:
    """Return the triples of a split, or of an edge set of the training triples."""
    sets = dataset.edge_set_names
    numbers = dataset.edge_set_of_triples()
    # With several sets "train" is the first of them, as in training.edge_sets.
    if numbers is not None and name in sets:
        return dataset.split(TRAIN)[np.flatnonzero(numbers == sets.index(name))]
    if name not in SPLITS:
        raise unknown_name("edge set", name, dict.fromkeys([*SPLITS, *sets]))
    return dataset.split(name)


def _buckets(
    relations: Sequence[Relation], counts: Mapping[str, int], triples: np.ndarray, num_ranges: int
) -> np.ndarray:
    """Return the bucket (n,) of each triple: the head's range times the number of ranges, plus the tail's."""
    buckets = np.zeros(len(triples), np.int64)
    for column, weight, side in ((0, num_ranges, Side.HEAD), (2, 1, Side.TAIL)):
        types = np.array([relation.candidate_type(side) for relation in relations])[triples[:, 1]]
        for entity_type in np.unique(types).tolist():
            here = types == entity_type
            bounds = range_bounds(np.array([0, counts[entity_type]]), num_ranges)
            buckets[here] += weight * ranges_of(triples[here, column], bounds, num_ranges)
    return buckets
