"""How a script joins its job. Apart from the rest of training, which servers have no use for."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator

from dglkge.config import Config
from dglkge.data.dataset import Dataset
from dglkge.distributed.runtime import Cluster, is_server
from dglkge.distributed.runtime import join_cluster as join_graph


@contextlib.contextmanager
def join_cluster(config: Config) -> Iterator[Cluster]:
    """Join the job that ``dglkge-launch`` started, or train alone where nothing was launched.

    In a server process this serves the graph and the tables, and does not return.

    Raises
    ------
    InputError
        If the data set cannot be read, or has not as many partitions as there are machines.
    """
    dataset = Dataset.open(config.dataset)
    if not is_server():
        importlib.import_module("dglkge.training.build")  # now, while the servers load the graph
    part_config = str(dataset.graph_config_path)
    with join_graph(dataset.graph_name, part_config, dataset.num_parts) as cluster:
        yield cluster
