"""Ranking of edge sets bucket by bucket, with the averages afterwards: results as they come.

The sequence is PyTorch-BigGraph's (``do_eval_and_report_stats``): every bucket of an edge set, the edge set,
and at the end all edge sets together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from dglkge.data.dataset import Dataset
from dglkge.data.dataset_files import SPLITS, TRAIN
from dglkge.data.range_walk import range_bounds, ranges_of
from dglkge.errors import InputError, require_known
from dglkge.evaluation.metrics import Protocol, RankingResult
from dglkge.inference.trained_model import Arrays, TrainedModel
from dglkge.inference.whole_tables import Tables
from dglkge.typing import Side

EdgeSets = str | Sequence[str] | Mapping[str, np.ndarray]


class BucketResult(NamedTuple):
    """Ranks of an edge set, or of all, and of a bucket: the ranges of heads and of tails, or of all."""

    edge_set: str | None
    bucket: tuple[int, int] | None
    result: RankingResult


def evaluate_buckets(
    run: TrainedModel, edge_sets: EdgeSets, protocol: Protocol, num_ranges: int, added: Arrays, **options: Any
) -> Iterator[BucketResult]:
    """Rank edge sets bucket by bucket; see :meth:`dglkge.inference.run.Run.evaluate_buckets`.

    Options are those of :meth:`dglkge.inference.trained_model.TrainedModel.rank`, added triples known ones.

    Mistakes are errors before anything is ranked: a generator would raise at its first value only.
    """
    if protocol.given:
        raise InputError("given candidates are ranked in the order of a split, not bucket by bucket")
    if num_ranges < 1:
        raise InputError(f"num_ranges must be at least 1, got {num_ranges}")
    sets = _triples_of(run.dataset, edge_sets)
    # Triples of the caller are true as well: none of them is a wrong answer to another's query.
    known = run.known_triples([*sets.values(), *added]) if protocol.filtered else None

    def results() -> Iterator[BucketResult]:
        results_of_sets = []
        for name, triples in sets.items():
            set_protocol = replace(protocol, split=name)
            buckets = _buckets(run.tables, triples, num_ranges)
            results = []
            for bucket in np.unique(buckets).tolist():
                bucket_triples = triples[buckets == bucket]
                results.append(run.rank(set_protocol, bucket_triples, known, **options))
                yield BucketResult(name, divmod(bucket, num_ranges), results[-1])
            results_of_sets.append(RankingResult.joined(results, np.argsort(buckets, kind="stable")))
            yield BucketResult(name, None, results_of_sets[-1])
        together = RankingResult.joined(results_of_sets)
        yield BucketResult(None, None, replace(together, protocol=replace(protocol, split="+".join(sets))))

    return results()


def _triples_of(dataset: Dataset, edge_sets: EdgeSets) -> dict[str, np.ndarray]:
    """Return the triples of each edge set by name."""
    if isinstance(edge_sets, Mapping):
        by_name = {str(name): np.ascontiguousarray(triples, np.int64) for name, triples in edge_sets.items()}
    else:
        names = [edge_sets] if isinstance(edge_sets, str) else edge_sets
        by_name = {name: _named(dataset, name) for name in names}
    if not by_name:
        raise InputError("there is no edge set to rank; expected at least one")
    for name, triples in by_name.items():
        if not len(triples):
            raise InputError(f"the edge set {name!r} has no triples to rank")
    return by_name


def _named(dataset: Dataset, name: str) -> np.ndarray:
    """Return the triples of a split, or of an edge set of the training triples."""
    sets, numbers = dataset.edge_set_names, dataset.edge_set_of_triples()
    # With several sets "train" is the first of them, as in training.edge_sets.
    if numbers is not None and name in sets:
        return dataset.split(TRAIN)[np.flatnonzero(numbers == sets.index(name))]
    require_known("edge set", name, {*SPLITS, *sets})
    return dataset.split(name)


def _buckets(tables: Tables, triples: np.ndarray, num_ranges: int) -> np.ndarray:
    """Return the bucket (n,) of each triple: the head's range times the number of ranges, plus the tail's."""
    buckets = np.zeros(len(triples), np.int64)
    for side in Side:
        types = np.array([relation.candidate_type(side) for relation in tables.relations.relations])
        buckets *= num_ranges
        for entity_type, count in tables.meta.entity_types.items():
            here = (types == entity_type)[triples[:, 1]]
            bounds = range_bounds(np.array([0, count]), num_ranges)
            buckets[here] += ranges_of(triples[here, side.column], bounds, num_ranges)
    return buckets
