"""DGL's standalone mode for tests in this process."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import dgl
import pytest
import torch

from dglkge.distributed.dgl_compat import disconnect
from dglkge.optim import SparseAdagrad
from tests.optim.cluster import partitions
from tests.optim.oracle import NUM_ROWS, start_rows

TABLE_NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def standalone_graph() -> Iterator[Any]:
    """A graph of 50 nodes in standalone mode, of one module: others train in this process too."""
    os.environ["DGL_DIST_MODE"] = "standalone"
    folder = partitions(1, (("thing", NUM_ROWS), ("other", 7)))
    dgl.distributed.initialize("unused")
    yield dgl.distributed.DistGraph("toy", part_config=str(folder / "toy.json"))
    disconnect()


@pytest.fixture
def make_table(standalone_graph: Any) -> Callable[..., Any]:
    """Make an embedding of 50 things, 7 others, or 51 edges next_thing, with the rows of ``start_rows``."""

    def make(dim: int = 4, dtype: torch.dtype = torch.float32, ntype: str = "thing", name: str = "") -> Any:
        name = name or f"table{next(TABLE_NUMBERS)}"
        of = "edge" if ntype in standalone_graph.etypes else "node"
        policy = getattr(standalone_graph, f"get_{of}_partition_policy")(ntype)
        num_rows = getattr(standalone_graph, f"num_{of}s")(ntype)
        table = dgl.distributed.DistEmbedding(num_rows, dim, name, part_policy=policy)
        if dtype != torch.float32:
            shape = (num_rows, dim)
            table._tensor = dgl.distributed.DistTensor(shape, dtype, name + "_rows", part_policy=policy)
        table.weight[torch.arange(num_rows)] = start_rows(num_rows, dim).to(dtype)
        return table

    return make


@pytest.fixture
def adagrad(make_table: Callable[..., Any]) -> tuple[Any, SparseAdagrad]:
    """A table of 50 rows, and its optimizer."""
    table = make_table()
    return table, SparseAdagrad([table], lr=0.1)
