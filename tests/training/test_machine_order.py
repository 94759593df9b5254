"""The order of the machines as it is built: where it is chosen, and by what partitions are recognized."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dglkge.config import load_config
from dglkge.data.dataset import Dataset
from dglkge.planning.memory import batch_rows, order_bytes
from dglkge.sampling.edge_batches import EdgeBatches, EdgeOptions
from dglkge.sampling.machine_batches import MachineBatches
from dglkge.training.building.batches import build_edge_batches, configured_order
from tests.toy_kg import toy_dataset

NUM_PARTS = 2


def build(
    folder: Path, part: int, total: Callable[[Any], Any], *settings: str, trainer: int = 0
) -> EdgeBatches:
    """Build the batches of a trainer of two on a machine."""
    dataset = Dataset.open(folder)
    config = load_config(None, [f"dataset={folder}", "training.batch_size=20", *settings])
    world = SimpleNamespace(
        machine=part,
        num_machines=dataset.num_parts,
        is_machine_leader=trainer == 0,
        local_rank=trainer,
        trainers_per_machine=2,
    )
    cluster: Any = SimpleNamespace(world=world, sum=total)
    job: Any = SimpleNamespace(config=config, dataset=dataset, layout=dataset.layout(), cluster=cluster)
    order = configured_order(job)
    sizes = (len(dataset.split("train")), config.training.batch_size, 7)
    options = EdgeOptions(np.zeros(dataset.num_relations, np.int64), *sizes, trainer, 2, 0, order=order)
    return build_edge_batches(job, order, options)


def build_all(folder: Path, *settings: str) -> list[EdgeBatches]:
    """Build those of all trainers, which add what each of them gives."""
    given: list[np.ndarray] = []
    places = [(part, trainer) for part in range(NUM_PARTS) for trainer in (0, 1)]
    for part, trainer in places:
        build(folder, part, lambda values: given.append(values.copy()) or values, *settings, trainer=trainer)
    total = np.sum(given, axis=0)
    return [
        build(folder, part, lambda _: total.copy(), *settings, trainer=trainer) for part, trainer in places
    ]


def refuse(_: Any) -> None:
    """Fail where nothing has to be summed."""
    raise AssertionError


@pytest.mark.parametrize("settings", [(), ("evaluation.held_out.fraction=0.1",)], ids=["all", "held out"])
def test_all_trainers_have_one_mark_and_an_epoch_has_each_triple_once(settings: tuple[str, ...]) -> None:
    trainers = build_all(toy_dataset(2), *settings)
    assert all(type(one) is MachineBatches for one in trainers)
    (mark,) = {one.order_mark for one in trainers}
    assert 0 < mark < 1 << 63
    order = trainers[0].order
    seen = [
        id_
        for one in trainers
        for index in range(len(one))
        for id_ in one.batch(1, index).triple_ids.tolist()
    ]
    expected = set(range(len(Dataset.open(toy_dataset(2)).split("train")))) - set(order.held_out(0).tolist())
    assert len(seen) == len(set(seen)) and set(seen) == expected
    assert build_all(toy_dataset(2, method="metis"), *settings)[0].order_mark != mark


@pytest.mark.parametrize(
    ("num_parts", "settings"),
    [
        (1, ("sampling.order=machine",)),
        (1, ()),
        (2, ("sampling.order=global",)),
        (2, ("training.objective=one_vs_all",)),
    ],
)
def test_elsewhere_the_order_is_that_of_the_whole_graph(num_parts: int, settings: tuple[str, ...]) -> None:
    batches = build(toy_dataset(num_parts), 0, refuse, *settings)
    assert type(batches) is EdgeBatches and batches.order_mark == 0


def test_one_vs_all_takes_the_order_of_the_machines_if_asked() -> None:
    settings = ("training.objective=one_vs_all", "sampling.order=machine")
    assert type(build_all(toy_dataset(2), *settings)[0]) is MachineBatches


def test_the_plan_counts_negatives_of_a_machines_chunks() -> None:
    size: Any = SimpleNamespace(parts=[None] * 4)
    sets = ["training.batch_size=4000", "negatives.chunk_size=1000", "negatives.num_uniform=100"]
    found = [
        batch_rows(load_config(None, ["dataset=x", *sets, f"sampling.order={order}"]), 4, size)[0]
        for order in ("machine", "global")
    ]
    assert found == [2 * 1000 + 100, 2 * 1000 + 400]
    part: Any = SimpleNamespace(num_edges=50)
    held = load_config(None, ["dataset=x", "evaluation.held_out.fraction=0.1"])
    assert order_bytes(held, part, 4) == 200 and order_bytes(held, part, 1) == 0
    assert order_bytes(load_config(None, ["dataset=x"]), part, 4) == 0
