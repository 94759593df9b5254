"""Scripts in the manner of DGL's own examples, and a graph that DGL partitioned, on two hosts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import dgl.distributed
import numpy as np
import pytest

from cluster_hosts import ClusterHost
from cluster_jobs import LAUNCHER_LOG, REPOSITORY, environment, launch
from dglkge.checkpoint import open_checkpoint
from dglkge.partition.make_dataset import partition_triples
from dglkge.partition.options import Options
from tests.cluster.conftest import end_all

EXAMPLES = REPOSITORY / "examples"
GRAPHS = {"dgl_graphsage": "communities", "dgl_rgcn": "papers"}

pytestmark = pytest.mark.usefixtures("warm_runners")


def make_graph(example: str, folder: Path, *options: str) -> Path:
    """Partition the graph of an example for two machines; returns DGL's description of it."""
    line = [sys.executable, str(EXAMPLES / example / "make_graph.py"), "--output", str(folder / "graph")]
    done = [*line, "--num-parts", "2", *options]
    subprocess.run(done, check=True, timeout=120, capture_output=True, env=environment())
    return folder / "graph" / f"{GRAPHS[example]}.json"


def run(hosts: list[ClusterHost], folder: Path, options: list[str], script: list[str | Path]) -> None:
    job = launch(hosts, folder, ["--num_trainers", "1", "--log_dir", str(folder / "logs"), *options], script)
    try:
        status = job.wait(200)
    finally:
        end_all(hosts, job)
    assert status == 0, (folder / LAUNCHER_LOG).read_text()


def test_graphsage_trains(two_hosts: list[ClusterHost], tmp_path: Path) -> None:
    graph = make_graph("dgl_graphsage", tmp_path, "--num-nodes", "400")
    script = [EXAMPLES / "dgl_graphsage" / "train.py", "--num-epochs", "6", "--output", tmp_path / "run"]
    run(two_hosts, tmp_path, ["--part_config", str(graph)], script)
    losses = json.loads((tmp_path / "run" / "curve.json").read_text())["losses"]
    assert len(losses) == 6 and losses[-1] < 0.7 * losses[0]


def test_rgcn_trains_and_goes_on(two_hosts: list[ClusterHost], tmp_path: Path) -> None:
    """The second job begins after the epochs of the first, with the hosts' rows: it ends with less errors."""
    graph = make_graph("dgl_rgcn", tmp_path)
    script = [EXAMPLES / "dgl_rgcn" / "train.py", "--output", tmp_path / "run", "--num-epochs"]
    rights: list[float] = []
    for num_epochs in (2, 8):
        run(two_hosts, tmp_path, ["--part_config", str(graph)], [*script, str(num_epochs)])
        lines = (tmp_path / LAUNCHER_LOG).read_text().splitlines()
        accuracies = [
            line.partition("training accuracy ")[2] for line in lines if "training accuracy" in line
        ]
        rights += map(float, accuracies)
    assert len(rights) == 8 and rights[-1] > max(0.7, rights[0])
    version = open_checkpoint(tmp_path / "run")
    parts = [version.part("paper", part) for part in range(2)]
    ids = np.concatenate([original_ids for _, original_ids in parts])
    assert np.array_equal(np.sort(ids), np.arange(800)) and all(len(rows) for rows, _ in parts)


def test_a_graph_that_dgl_partitioned_is_trained_in_its_partitions(two_hosts, tmp_path):
    graph = make_graph("dgl_rgcn", tmp_path)
    partition_triples(graph.parent, tmp_path / "data", Options(split=(0.9, 0.05, 0.05)))
    settings = {"dataset": tmp_path / "data", "output": tmp_path / "run", "training.num_epochs": 2}
    settings |= {"model.dimension": 16, "negatives.num_uniform": 20, "training.batch_size": 200}
    script = [
        EXAMPLES / "train.py",
        *(word for key in settings for word in ("--set", f"{key}={settings[key]}")),
    ]
    run(two_hosts, tmp_path, [], script)
    result = json.loads((tmp_path / "run" / "metrics.json").read_text())["test"]
    assert result["both"]["num_queries"] == 2 * result["num_triples"] > 0
    for part in range(2):
        _, features, *_ = dgl.distributed.load_partition(str(graph), part)
        names = features["paper/orig_id"].numpy()
        assert np.array_equal(
            np.sort(open_checkpoint(tmp_path / "run").part("paper", part)[1]), np.sort(names)
        )
