"""Orders of machines and of buckets as they are built, their marks, and the rows that are trained."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from dglkge.config import load_config
from dglkge.data.dataset import Dataset
from dglkge.data.partition_layout import EdgeTable
from dglkge.distributed.world import World
from dglkge.embeddings.mapped_rows import MappedRows, is_on_disk
from dglkge.planning.memory import batch_rows, order_bytes
from dglkge.sampling.edge_batches import EdgeBatches, EdgeOptions, MachineBatches
from dglkge.sampling.triple_order import EdgeSet, TripleOrder
from dglkge.training.building import batches as batch_building
from dglkge.training.building.batches import build_bucket_batches, build_edge_batches, configured_order
from dglkge.typing import RELATION
from tests.sampling.toy_buckets import NUM_TRIPLES, toy_buckets, toy_trainers
from tests.toy_kg import toy_dataset

NUM_PARTS = 2


def build(
    folder: Path, output: Path, place: tuple[int, int, int], total: Callable[[Any], Any], *settings: str
) -> EdgeBatches:
    """Build the batches of a trainer; its place is machine, number there, and trainers of a machine."""
    dataset, (part, trainer, num_trainers) = Dataset.open(folder), place
    sets = [f"dataset={folder}", f"output={output}", "training.batch_size=20", *settings]
    config = load_config(None, sets)
    world_size = dataset.num_parts * num_trainers
    world = World(part * num_trainers + trainer, world_size, trainer, num_trainers)
    cluster: Any = SimpleNamespace(world=world, sum=total, agree=lambda work, num_bytes: work())
    pairs = [(lhs, rhs) for lhs, rhs, *_ in dataset.edge_types]
    job: Any = SimpleNamespace(
        config=config, dataset=dataset, layout=dataset.layout(), cluster=cluster, pairs=pairs, output=output
    )
    order, pair_of_relation = configured_order(job), np.zeros(dataset.num_relations, np.int64)
    sizes = (len(dataset.split("train")), config.training.batch_size, 7)
    options = EdgeOptions(pair_of_relation, *sizes, trainer, num_trainers, config.seed, order=order)
    make: Any = build_bucket_batches if config.sampling.num_ranges > 1 else build_edge_batches
    made: EdgeBatches = make(job, order, options)
    return made


def build_all(folder: Path, output: Path, num_trainers: int, *settings: str) -> list[EdgeBatches]:
    shares: list[np.ndarray] = []
    places = [(part, trainer, num_trainers) for part in range(NUM_PARTS) for trainer in range(num_trainers)]
    for place in places:
        build(folder, output, place, lambda values: shares.append(values.copy()) or values, *settings)
    total = np.sum(shares, axis=0)
    return [build(folder, output, place, lambda _: total.copy(), *settings) for place in places]


def mark_of(trainers: Sequence[EdgeBatches]) -> int:
    (mark,) = {trainer.order_mark for trainer in trainers}
    assert 0 < mark < 1 << 63
    return mark


def assert_each_once(trainers: Sequence[EdgeBatches], epoch: int) -> None:
    """Hold that an epoch has each triple once that is not held out."""
    batches = [trainer.batch(epoch, index) for trainer in trainers for index in range(len(trainer))]
    seen = np.sort(np.concatenate([batch.triple_ids for batch in batches]))
    num_triples = len(Dataset.open(toy_dataset(NUM_PARTS)).split("train"))
    np.testing.assert_array_equal(seen, np.setdiff1d(np.arange(num_triples), trainers[0].order.held_out(0)))


def refuse(_: Any) -> None:
    raise AssertionError


@pytest.mark.parametrize(
    "settings",
    [(), ("evaluation.held_out.fraction=0.1",), ("training.objective=one_vs_all", "sampling.order=machine")],
    ids=["all", "held out", "asked for"],
)
def test_order_of_machines(settings: tuple[str, ...], tmp_path: Path) -> None:
    trainers = build_all(toy_dataset(2), tmp_path, 2, *settings)
    assert all(type(trainer) is MachineBatches for trainer in trainers)
    assert_each_once(trainers, 1)
    other = build_all(toy_dataset(2, method="metis"), tmp_path, 2, *settings)
    assert mark_of(other) != mark_of(trainers)


@pytest.mark.parametrize(
    ("num_parts", "setting"),
    [(1, "sampling.order=machine"), (2, "sampling.order=global"), (2, "training.objective=one_vs_all")],
)
def test_elsewhere_the_order_is_that_of_the_whole_graph(num_parts, setting, tmp_path):
    batches = build(toy_dataset(num_parts), tmp_path, (0, 0, 2), refuse, setting)
    assert type(batches) is EdgeBatches and batches.order_mark == 0


@pytest.mark.parametrize(("buckets", "share"), [("mixed", 0.1), ("directed", 0.0)])
def test_order_of_buckets(tmp_path: Path, buckets: str, share: float) -> None:
    settings = ("sampling.num_ranges=3", f"sampling.buckets={buckets}")
    settings += (f"evaluation.held_out.fraction={share}",) if share else ()
    folder = toy_dataset(NUM_PARTS)
    trainers = build_all(folder, tmp_path, 1, *settings)
    num_triples = len(Dataset.open(folder).split("train"))
    assert len(trainers[0].order.held_out(0)) == round(share * num_triples + 0.49)
    for epoch in (0, 1):
        assert_each_once(trainers, epoch)
    other = "mixed" if buckets == "directed" else "directed"
    for changed in (f"sampling.buckets={other}", f"evaluation.held_out.fraction={share + 0.1:.1f}", "seed=5"):
        is_same = mark_of(build_all(folder, tmp_path, 1, *settings, changed)) == mark_of(trainers)
        assert is_same == (changed == "seed=5" and not share), changed


def test_the_plan_counts_negatives_of_a_machines_chunks() -> None:
    size: Any = SimpleNamespace(parts=[None] * 4)
    sets = ["training.batch_size=4000", "negatives.chunk_size=1000", "negatives.num_uniform=100"]
    for order, count in (("machine", 2 * 1000 + 100), ("global", 2 * 1000 + 400)):
        config = load_config(None, ["dataset=x", *sets, f"sampling.order={order}"])
        assert batch_rows(config, 4, size)[0] == count
    part: Any = SimpleNamespace(num_edges=50)
    held_out = load_config(None, ["dataset=x", "evaluation.held_out.fraction=0.1"])
    assert [order_bytes(held_out, part, num_machines) for num_machines in (4, 1)] == [200, 0]
    assert order_bytes(load_config(None, ["dataset=x"]), part, 4) == 0


@pytest.mark.parametrize("sets", [[range(40)], [range(10, 30), np.arange(41, 110, 9)]])
def test_marks_are_those_of_a_loop_over_triples_and_each_is_read_once(sets, monkeypatch):
    monkeypatch.setattr(batch_building, "TRIPLES_A_BLOCK", 7)
    dataset = Dataset.open(toy_dataset(typed=True))
    layout, relations, rows = dataset.layout(), dataset.relations.relations, dataset.split("train")
    order = TripleOrder([EdgeSet(str(n), ids) for n, ids in enumerate(sets)], seed=1)
    options = EdgeOptions(np.zeros(len(relations), np.int64), len(rows), 10, 10, 0, 1, seed=1, order=order)
    triples = MagicMock()
    triples.__getitem__.side_effect = rows.__getitem__
    job: Any = SimpleNamespace(
        config=load_config(None, ["dataset=x", "training.rows=touched"]),
        dataset=SimpleNamespace(split=lambda name: triples, relations=dataset.relations),
        layout=layout,
    )
    edges = EdgeTable(np.arange(len(rows)), np.array(rows), None)
    touched = batch_building.touched_rows(job, EdgeBatches(edges, options))
    expected = {name: np.zeros(layout.num_nodes(name), bool) for name in layout.ntypes}
    for head, number, tail in rows[np.concatenate([list(ids) for ids in sets])].tolist():
        relation = relations[number]
        for name, id_ in ((relation.lhs, head), (RELATION, number), (relation.rhs, tail)):
            expected[name][np.asarray(layout.original_ids(name)) == id_] = True
    assert touched is not None and list(touched) == list(expected)
    for name, marks in expected.items():
        assert np.array_equal(touched[name], marks)
    assert 0 < sum(map(np.sum, expected.values())) < sum(map(len, expected.values()))
    taken = [len(rows[call.args[0]]) for call in triples.__getitem__.call_args_list]
    assert max(taken) <= 7 and sum(taken) == sum(map(len, sets))
    queries: Any = SimpleNamespace(order=order)  # every row is trained
    assert batch_building.touched_rows(job, queries) == {}


@pytest.mark.parametrize("fits", [False, True])
def test_triples_are_dropped_from_memory_where_tables_do_not_fit(fits, tmp_path, monkeypatch):
    if not is_on_disk(str(tmp_path)):
        pytest.skip(f"{tmp_path} is in memory; set TMPDIR to a folder on a disk")
    (machine,) = toy_buckets(1, 4)
    columns = (machine.table.triple_ids, machine.table.edges, machine.table.weights)
    files = [str(tmp_path / f"{number}.npy") for number in range(3)]
    for path, array in zip(files, columns):
        np.save(path, array)
    machine = replace(machine, table=EdgeTable(*(np.load(path, mmap_mode="r") for path in files)))
    (batches,) = toy_trainers(1, 1, 4, batch_size=20, machines=[machine])
    rows = torch.from_file(str(tmp_path / "rows"), shared=True, size=300 * 64).view(300, 64)
    parts = [SimpleNamespace(table=name, rows=rows, state={}) for name in ("person", "place")]
    closing, world = contextlib.ExitStack(), SimpleNamespace(is_machine_leader=True)
    cluster = SimpleNamespace(world=world, sum=lambda numbers: numbers, on_exit=closing.callback)
    job: Any = SimpleNamespace(cluster=cluster, parts=lambda: parts)
    monkeypatch.setattr(batch_building, "available_memory", lambda: 1 << 40 if fits else 0)
    dropped, drop = set(), MappedRows.drop

    def noted(mapped: MappedRows, *piece: int) -> None:
        dropped.update(file.path for file in mapped._files)
        drop(mapped, *piece)

    monkeypatch.setattr(MappedRows, "drop", noted)
    trained = []
    with closing:
        batch_building.prefetch_ranges(job, batches)
        for index in range(len(batches)):
            batches.begin(0, index)
            trained.append(batches.batch(0, index).triple_ids)
    assert sorted(np.concatenate(trained).tolist()) == list(range(NUM_TRIPLES))
    assert dropped & {*files} == (set() if fits else {*files})
