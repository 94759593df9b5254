"""DGL's standalone mode for tests in this process."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any, Callable

import dgl
import pytest
import torch

from .cluster import partitions
from .oracle import start_rows

NUM_ROWS = 50
_NUMBERS = itertools.count()


@pytest.fixture(scope="session")
def standalone_graph() -> Iterator[Any]:
    """A graph of 50 nodes in standalone mode."""
    os.environ["DGL_DIST_MODE"] = "standalone"
    folder = partitions(1, (("thing", NUM_ROWS), ("other", 7)))
    dgl.distributed.initialize("unused")
    yield dgl.distributed.DistGraph("toy", part_config=str(folder / "toy.json"))


@pytest.fixture
def make_table(standalone_graph: Any) -> Callable[..., Any]:
    """A function that makes an embedding of 50 rows that start as ``start_rows``."""

    def make(dim: int = 4, dtype: torch.dtype = torch.float32) -> Any:
        policy = standalone_graph.get_node_partition_policy("thing")
        name = f"table{next(_NUMBERS)}"
        table = dgl.distributed.DistEmbedding(NUM_ROWS, dim, name, part_policy=policy)
        if dtype != torch.float32:
            table._tensor = dgl.distributed.DistTensor(
                (NUM_ROWS, dim), dtype, name + "_rows", part_policy=policy
            )
        table.weight[torch.arange(NUM_ROWS)] = start_rows(NUM_ROWS, dim).to(dtype)
        return table

    return make
