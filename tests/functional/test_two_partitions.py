"""One checkpoint, the data cut in one part and in two: the same evaluation, in one process and in two."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dglkge.checkpoint.reader import open_checkpoint
from dglkge.data.dataset import Dataset
from dglkge.data.known_triples import KnownTriples
from dglkge.distributed.process_group import end_process_group
from dglkge.embeddings.embedding_table import TableShard
from dglkge.evaluation.evaluator import RankingEvaluator
from dglkge.evaluation.metrics import Protocol
from dglkge.model.kge_model import build_model
from tests.functional import job as commands
from tests.optim.cluster import forked
from tests.surroundings import free_ports
from tests.toy_kg import toy_dataset

DIM = 16


@pytest.fixture(scope="module", params=[False, True], ids=["one type", "three types"])
def trained(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[Path]]:
    """A run on one partition, and the data set in one and in two partitions."""
    folder = tmp_path_factory.mktemp("parts")
    one = toy_dataset(typed=request.param)
    cut = [toy_dataset(2, request.param, method) for method in ("metis", "random")]
    settings = [
        f"dataset={one}",
        f"output={folder / 'run'}",
        f"model.dimension={DIM}",
        "training.num_epochs=8",
    ]
    commands.train_alone(*settings, "negatives.num_uniform=20", "training.batch_size=50")
    return folder / "run", [one, *cut]


def part_shards(dataset: Dataset, run: Path, part: int) -> dict[str, list[TableShard]]:
    """Return what the machine with one part scores against: its rows, in the order of node ids."""
    layout, checkpoint = dataset.layout(), open_checkpoint(run)
    shards = {}
    for name in dataset.entity_types:
        first, end = layout.node_range(name, part)
        ids = torch.from_numpy(layout.original_ids(name)[first:end].copy())
        node_ids = torch.from_numpy(layout.node_ids(name).copy())
        shards[name] = [TableShard(first, checkpoint.gather(name, ids), ids, node_ids)]
    return shards


def rank(folder: Path, run: Path, parts: list[int], in_group: bool) -> dict[str, dict[str, float]]:
    """Rank the test split against the rows of some parts, summing over the process group if there is one."""
    dataset = Dataset.open(folder)
    shards: dict[str, list[TableShard]] = {name: [] for name in dataset.entity_types}
    for part in parts:
        for name, found in part_shards(dataset, run, part).items():
            shards[name] += found

    def total(counts: np.ndarray) -> np.ndarray:
        summed = torch.from_numpy(counts.copy())
        if in_group:
            dist.all_reduce(summed)
        return summed.numpy()

    known = KnownTriples([dataset.split(name) for name in ("train", "valid", "test")], dataset.num_relations)
    evaluator = RankingEvaluator(build_model("complex", DIM, True), dataset.relations.relations, Protocol())
    result = evaluator.evaluate(dataset.split("test"), known, open_checkpoint(run), shards, total)
    return result.to_dict()


def rank_in_group(process: int, port: int, folder: Path, run: Path, output: Path) -> None:
    """Be one of two processes with a part each; process 0 writes the result."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=process, world_size=2)
    result = rank(folder, run, [process], in_group=True)
    if process == 0:
        output.write_text(json.dumps(result), encoding="utf-8")
    end_process_group()


def assert_equal_metrics(left: dict[str, dict[str, float]], right: dict[str, dict[str, float]]) -> None:
    """Hold two results equal to 1e-6."""
    for side in ("both", "head", "tail"):
        for name, value in left[side].items():
            assert right[side][name] == pytest.approx(value, abs=1e-6), (side, name)


def test_two_partitions_rank_as_one(trained: tuple[Path, list[Path]], tmp_path: Path) -> None:
    run, (one, *cut) = trained
    expected = rank(one, run, [0], in_group=False)
    live = json.loads((run / "metrics.json").read_text(encoding="utf-8"))["test"]
    assert_equal_metrics(live, expected)
    for folder in cut:
        assert Dataset.open(folder).num_parts == 2
        assert_equal_metrics(rank(folder, run, [0, 1], in_group=False), expected)
    output = tmp_path / "result.json"
    port = free_ports()
    processes = [forked(rank_in_group, process, port, cut[0], run, output) for process in range(2)]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
        assert [process.exitcode for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert_equal_metrics(json.loads(output.read_text(encoding="utf-8")), expected)
