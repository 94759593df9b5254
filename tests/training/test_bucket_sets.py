"""Bucket order as it is built: edge sets, held-out triples, and by what an order is recognized."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dglkge.config import load_config
from dglkge.data.dataset import Dataset
from dglkge.sampling.bucket_batches import BucketBatches
from dglkge.sampling.edge_batches import EdgeOptions
from dglkge.training.building.batches import build_bucket_batches, configured_order
from tests.toy_kg import toy_dataset

NUM_PARTS = 2


def build(
    folder: Path, output: Path, part: int, total: Callable[[Any], Any], *settings: str
) -> BucketBatches:
    """Build the batches of the one trainer of a machine."""
    dataset = Dataset.open(folder)
    config = load_config(None, [f"dataset={folder}", f"output={output}", "sampling.num_ranges=3", *settings])
    world = SimpleNamespace(machine=part, is_machine_leader=True)
    cluster: Any = SimpleNamespace(world=world, sum=total, agree=lambda work, num_bytes: work())
    pairs = [(lhs, rhs) for lhs, rhs, *_ in dataset.edge_types]
    job: Any = SimpleNamespace(
        config=config, dataset=dataset, layout=dataset.layout(), cluster=cluster, pairs=pairs, output=output
    )
    order, pair_of_relation = configured_order(job), np.zeros(dataset.num_relations, np.int64)
    num_triples = len(dataset.split("train"))
    options = EdgeOptions(pair_of_relation, num_triples, 20, 7, 0, 1, config.seed, order=order)
    return build_bucket_batches(job, order, options)


def build_all(output: Path, *settings: str, folder: Path | None = None) -> list[BucketBatches]:
    """Build those of all machines, which add what each of them gives."""
    folder = toy_dataset(NUM_PARTS) if folder is None else folder
    given: list[np.ndarray] = []
    for part in range(NUM_PARTS):
        build(folder, output, part, lambda values: given.append(values.copy()) or values, *settings)
    total = np.sum(given, axis=0)
    return [build(folder, output, part, lambda _: total.copy(), *settings) for part in range(NUM_PARTS)]


def trained(trainers: list[BucketBatches], epoch: int) -> list[int]:
    """Return the triples of an epoch."""
    return [
        id_
        for one in trainers
        for index in range(len(one))
        for id_ in one.batch(epoch, index).triple_ids.tolist()
    ]


@pytest.mark.parametrize("buckets", ["mixed", "directed"])
@pytest.mark.parametrize("share", [0.0, 0.1])
def test_an_epoch_has_each_triple_once_but_for_those_held_out(
    tmp_path: Path, buckets: str, share: float
) -> None:
    settings = (f"sampling.buckets={buckets}",)
    settings += (f"evaluation.held_out.fraction={share}",) if share else ()
    trainers = build_all(tmp_path, *settings)
    (mark,) = {one.order_mark for one in trainers}
    assert 0 < mark < 1 << 63
    num_triples = len(Dataset.open(toy_dataset(NUM_PARTS)).split("train"))
    held_out = set(trainers[0].order.held_out(0).tolist())
    assert len(held_out) == round(share * num_triples + 0.49)
    for epoch in (0, 1):
        seen = trained(trainers, epoch)
        assert len(seen) == len(set(seen)) and set(seen) == set(range(num_triples)) - held_out
    other = "mixed" if buckets == "directed" else "directed"
    for changed in (f"sampling.buckets={other}", f"evaluation.held_out.fraction={share + 0.1:.1f}", "seed=5"):
        marks = {one.order_mark for one in build_all(tmp_path, *settings, changed)}
        assert (marks == {mark}) == (changed == "seed=5" and not share), changed
