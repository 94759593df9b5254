"""Entry of a script into its job. Separate from the rest of training, which servers do not import."""

from __future__ import annotations

import contextlib
import importlib
import logging
import secrets
from collections.abc import Iterator
from pathlib import Path

from dglkge.config import Config
from dglkge.data.dataset import Dataset
from dglkge.distributed.dgl_memory import standalone_tables
from dglkge.distributed.runtime import Cluster, is_server, use_log_format, verifies_dataset
from dglkge.distributed.runtime import join_cluster as join_graph
from dglkge.distributed.world import World
from dglkge.launch.table_storage import TableFolder, roomy_folder, usual_folders
from dglkge.planning.memory import plan_memory
from dglkge.training.epochs import JOB

logger = logging.getLogger(__name__)

_opened: dict[str, Dataset] = {}
"""The data set of the job that this process is in, by the path in the configuration."""


def opened_dataset(config: Config) -> Dataset:
    """Return the data set that :func:`join_cluster` opened, or open it outside of a job."""
    return _opened.get(config.dataset) or Dataset.open(config.dataset)


@contextlib.contextmanager
def join_cluster(config: Config) -> Iterator[Cluster]:
    """Join the job that ``dglkge-launch`` started, or train alone where nothing was launched.

    In a server process this serves the graph and the tables, and does not return.

    Raises
    ------
    InputError
        If the configuration cannot be trained, the data set cannot be read, has not as many partitions as
        there are machines, its tables do not fit into the machine, or this process is in a job already.
    """
    use_log_format()
    if not is_server():
        world = World.detect()
        # Imported here, not above: servers skip it, and trainers import while the servers load the graph.
        build = importlib.import_module("dglkge.training.build")
        build.check_config(config, world)
    # Kept for build_trainer, so that the descriptions are read once.
    dataset = _opened[config.dataset] = Dataset.open(config.dataset)
    try:
        if verifies_dataset():
            dataset.verify()
        if not is_server():
            build.check_dataset(config, dataset, world)
        part_config = str(dataset.graph_config_path)
        joined = join_graph(dataset.graph_name, part_config, dataset.num_parts)
        with own_tables(config), joined as cluster:
            try:
                yield cluster
            finally:
                # Drops a loop that an exception left open, and the listener, which refers to the trainer and
                # its tables.
                JOB.forget()
    finally:
        _opened.clear()


@contextlib.contextmanager
def own_tables(config: Config) -> Iterator[None]:
    """Let a process alone keep its tables as files, where that is configured: no launcher made a folder."""
    if config.tables.storage != "disk" or is_server() or World.detect().launched:
        yield
        return
    planned = plan_memory(config, opened_dataset(config).size(), 1, 0)[0]
    chosen = config.tables.folder
    folders = [Path(chosen)] if chosen else usual_folders(on_disk=True)
    base = roomy_folder(folders, planned.file_bytes, "tables.storage is disk; ")
    folder = TableFolder(base, secrets.token_hex(8))
    try:
        with standalone_tables(str(folder.path)):
            yield
    finally:
        folder.remove()
