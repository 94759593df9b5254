"""Scripts in the manner of DGL's own examples, and a graph that DGL partitioned, on two hosts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import dgl.distributed
import numpy as np
import pytest

from cluster_hosts import ClusterHost
from cluster_jobs import LAUNCHER_LOG, REPOSITORY, environment, launch
from dglkge.checkpoint.reader import open_checkpoint
from dglkge.partition.make_dataset import partition_triples
from dglkge.partition.options import Options
from tests.cluster.conftest import finish, sets

EXAMPLES = REPOSITORY / "examples"

pytestmark = pytest.mark.usefixtures("warm_runners")


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    """DGL's description of the example's graph, partitioned for two machines."""
    command = [sys.executable, str(EXAMPLES / "dgl_rgcn" / "make_graph.py"), "--num-parts", "2"]
    command += ["--output", str(tmp_path / "graph")]
    subprocess.run(command, check=True, timeout=120, capture_output=True, env=environment())
    return tmp_path / "graph" / "papers.json"


def run(hosts: list[ClusterHost], folder: Path, options: list[str], script: list[str | Path]) -> None:
    job = launch(hosts, folder, ["--num_trainers", "1", "--log_dir", str(folder / "logs"), *options], script)
    assert finish(hosts, job) == [0], (folder / LAUNCHER_LOG).read_text()


def test_rgcn_trains_and_goes_on(two_hosts: list[ClusterHost], graph: Path, tmp_path: Path) -> None:
    script = [EXAMPLES / "dgl_rgcn" / "train.py", "--output", tmp_path / "run", "--num-epochs"]
    rights: list[float] = []
    for num_epochs in (2, 8):
        run(two_hosts, tmp_path, ["--part_config", str(graph)], [*script, str(num_epochs)])
        rights += map(float, re.findall("training accuracy (.*)", (tmp_path / LAUNCHER_LOG).read_text()))
    assert len(rights) == 8 and rights[-1] > max(0.7, rights[0])
    version = open_checkpoint(tmp_path / "run")
    parts = [version.part("paper", part) for part in range(2)]
    ids = np.concatenate([original_ids for _, original_ids in parts])
    assert np.array_equal(np.sort(ids), np.arange(800)) and all(len(rows) for rows, _ in parts)


def test_a_graph_that_dgl_partitioned_is_trained_in_its_partitions(two_hosts, graph, tmp_path):
    partition_triples(graph.parent, tmp_path / "data", Options(split=(0.9, 0.05, 0.05)))
    settings = {"dataset": tmp_path / "data", "output": tmp_path / "run", "training.num_epochs": 2}
    settings |= {"model.dimension": 16, "negatives.num_uniform": 20, "training.batch_size": 200}
    run(two_hosts, tmp_path, [], [EXAMPLES / "train.py", *sets(settings)])
    result = json.loads((tmp_path / "run" / "metrics.json").read_text())["test"]
    assert result["both"]["num_queries"] == 2 * result["num_triples"] > 0
    for part in range(2):
        _, features, *_ = dgl.distributed.load_partition(str(graph), part)
        _, ids = open_checkpoint(tmp_path / "run").part("paper", part)
        assert np.array_equal(np.sort(ids), np.sort(features["paper/orig_id"].numpy()))
