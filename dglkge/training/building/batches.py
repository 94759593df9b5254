"""The batches of a run, as configured."""

from __future__ import annotations

from typing import Any

import numpy as np

from dglkge.data.dataset import Dataset
from dglkge.data.dataset_files import TRAIN
from dglkge.data.partition_layout import PartitionLayout
from dglkge.model.choices import K_VS_ALL
from dglkge.sampling.query_batches import TrainingBatches
from dglkge.training.building.bucket_order import build_bucket_batches, prefetch_ranges
from dglkge.training.building.candidates import build_query_batches
from dglkge.training.building.components import relation_weights
from dglkge.training.building.edge_sets import build_edge_batches, configured_order
from dglkge.training.job import Job
from dglkge.typing import RELATION


def build_batches(job: Job) -> TrainingBatches:
    """Make the batches of queries or edges; a collective.

    Raises
    ------
    InputError
        If the data set has no edge set of a name, or weights that the objective does not take.
    """
    config, dataset, layout, world = job.config, job.dataset, job.layout, job.world
    if config.training.objective.name == K_VS_ALL:
        return build_query_batches(config, dataset, world)
    options: dict[str, Any] = {
        "pair_of_relation": _pair_of_relation(dataset, layout, job.pairs),
        "num_triples": len(dataset.split(TRAIN)),
        "batch_size": config.training.batch_size,
        "chunk_size": config.negatives.chunk_size,
        "local_rank": world.local_rank,
        "trainers_per_machine": world.trainers_per_machine,
        "seed": config.seed,
        "relation_weights": _by_node(relation_weights(config, dataset), layout),
        "has_confidences": config.loss.has_confidences,
    }
    if config.sampling.num_ranges == 1:
        return build_edge_batches(config, dataset, layout, job.cluster, options)
    order = configured_order(config, dataset)
    batches = build_bucket_batches(config, layout, job.cluster, job.pairs, order, options)
    prefetch_ranges(batches, job.tables, job.optimizer, job.cluster)
    return batches


def _pair_of_relation(dataset: Dataset, layout: PartitionLayout, pairs: list[tuple[str, str]]) -> np.ndarray:
    """Return the number of each relation's edge type, by node id; -1 where no training triple has it."""
    number = {pair: index for index, pair in enumerate(pairs)}
    # Batches have node ids of relations, the data set lists relations by original id.
    by_original = np.array(
        [number.get((relation.lhs, relation.rhs), -1) for relation in dataset.relations.relations],
        dtype=np.int64,
    )
    return by_original[layout.original_ids(RELATION)]


def _by_node(weights: np.ndarray | None, layout: PartitionLayout) -> np.ndarray | None:
    """Return weights of relations by node id, given by original id."""
    return None if weights is None else weights[layout.original_ids(RELATION)]
