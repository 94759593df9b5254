"""Tables on a machine that holds a part of the rows: where rows come from, and who owns them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dglkge.data.dataset import Dataset
from dglkge.data.partition_layout import PartitionLayout
from dglkge.distributed.dgl_compat import dgl
from dglkge.embeddings.table_set import TableSet
from dglkge.evaluation.evaluator import RankingEvaluator
from dglkge.evaluation.metrics import Protocol
from dglkge.model.kge_model import build_model
from dglkge.typing import RELATION
from tests.toy_kg import toy_dataset

DIM = 4


class Kvstore:
    """Stands for DGL's: rows of all machines by node id, those of one machine as a view."""

    def __init__(self, rows: torch.Tensor, start: int, end: int) -> None:
        self.rows, self.local_partition, self.pulled = rows, rows[start:end], []

    def __getitem__(self, ids: torch.Tensor) -> torch.Tensor:
        self.pulled += ids.tolist()
        return self.rows[ids]


@pytest.fixture(scope="module")
def layout() -> PartitionLayout:
    return Dataset.open(toy_dataset(num_parts=2)).layout()


@pytest.fixture
def tables(layout: PartitionLayout, monkeypatch: pytest.MonkeyPatch) -> list[TableSet]:
    """The tables as each of two machines sees them; rows hold their original id."""
    rows = {name: expected(torch.from_numpy(layout.original_ids(name).copy())) for name in layout.ntypes}
    graph = SimpleNamespace(get_node_partition_policy=str)

    class Embedding:
        def __init__(self, count: int, dim: int, name: str, part_policy: str) -> None:
            assert (count, dim) == rows[part_policy].shape and name == f"{part_policy}_rows"
            self._tensor = Kvstore(rows[part_policy], *layout.node_range(part_policy, machine))

    monkeypatch.setattr(dgl.distributed, "DistEmbedding", Embedding)
    made = []
    for machine in range(2):  # the class above reads it
        made.append(TableSet(graph, layout, {"entity": DIM}, DIM, machine))
    return made


def expected(ids: torch.Tensor) -> torch.Tensor:
    return ids[:, None].float() + torch.arange(DIM) / 10


def test_rows_are_found_by_original_id_and_only_those_of_others_are_pulled(tables: list[TableSet]) -> None:
    for machine in tables:
        for name, ids in (("entity", torch.tensor([5, 0, 59, 5, 31, 12])), (RELATION, torch.tensor([3, 0]))):
            torch.testing.assert_close(machine.gather(name, ids), expected(ids))
        table = machine["entity"]
        kvstore: Any = table.embedding._tensor
        local = range(table.first_node_id, table.end_node_id)
        kvstore.pulled.clear()
        table.gather(torch.arange(len(table)))
        assert sorted(kvstore.pulled) == [node for node in range(len(table)) if node not in local]
        kvstore.pulled.clear()
        out = torch.zeros(len(local), DIM)
        assert table.gather(torch.tensor(local), out=out) is out
        assert kvstore.pulled == []
        torch.testing.assert_close(out, table.local_rows)


def test_shards_of_all_machines_hold_every_row_once(tables: list[TableSet]) -> None:
    shards = [machine["entity"].shard(index, 3) for machine in tables for index in range(3)]
    assert sorted(torch.cat([shard.original_ids for shard in shards]).tolist()) == list(range(60))
    all_ids = torch.arange(60)
    places = torch.stack([shard.locate(all_ids) for shard in shards])
    assert ((places >= 0).sum(0) == 1).all()
    for shard, place in zip(shards, places):
        torch.testing.assert_close(shard.rows[place[place >= 0]], expected(all_ids[place >= 0]))
        torch.testing.assert_close(shard.rows, expected(shard.original_ids))


def test_ranking_pulls_the_rows_of_its_queries_and_no_table(tables, layout):
    data = Dataset.open(toy_dataset(num_parts=2))
    triples = np.asarray(data.split("test")[:3])
    shards = {"entity": [machine["entity"].shard(0, 1) for machine in tables]}
    model = build_model("complex", DIM, reciprocal=False)
    evaluator = RankingEvaluator(model, data.relations.relations, Protocol(filtered=False))
    evaluator.evaluate(triples, None, tables[0], shards)
    queried = {"entity": np.unique(triples[:, [0, 2]]), RELATION: np.unique(triples[:, 1])}
    for name, ids in queried.items():
        table: Any = tables[0][name]
        node_ids = layout.node_ids(name)[ids]
        elsewhere = node_ids[node_ids >= table.end_node_id]
        assert set(table.embedding._tensor.pulled) == set(elsewhere.tolist()), name
        assert table.pulled_bytes == len(table.embedding._tensor.pulled) * (8 + 4 * DIM)
