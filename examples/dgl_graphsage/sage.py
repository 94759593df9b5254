"""GraphSAGE on a distributed graph: model, batches, an epoch. Nothing here is dglkge's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import dgl
import torch
import torch.distributed as dist
from torch.nn import functional

EMBEDDING_DIM = 16


class GraphSage(torch.nn.Module):
    """Two layers of mean aggregation (Hamilton et al. 2017)."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.first = dgl.nn.SAGEConv(EMBEDDING_DIM, 32, "mean")
        self.second = dgl.nn.SAGEConv(32, num_classes, "mean")

    def forward(self, blocks: list[Any], rows: torch.Tensor) -> torch.Tensor:
        """Return the scores of each class."""
        return self.second(blocks[1], functional.relu(self.first(blocks[0], rows)))


def loader(graph: Any, nodes: torch.Tensor, shuffle: bool) -> Any:
    """Return batches of nodes with their sampled neighbourhoods."""
    sampler = dgl.dataloading.NeighborSampler([5, 5])
    return dgl.dataloading.DistNodeDataLoader(graph, nodes, sampler, batch_size=250, shuffle=shuffle)


def train_epoch(graph: Any, batches: Iterable[Any], model: Any, rows: Any, optimizers: list[Any]) -> float:
    """Train one epoch; return the mean loss of all trainers."""
    total = torch.zeros(2)
    for input_nodes, seeds, blocks in batches:
        loss = functional.cross_entropy(model(blocks, rows(input_nodes)), graph.ndata["label"][seeds])
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        total += torch.tensor([loss.item(), 1.0])
    dist.all_reduce(total)
    return float(total[0] / total[1])


def accuracy(graph: Any, nodes: torch.Tensor, model: torch.nn.Module, embedding: Any) -> float:
    """Return the accuracy over the nodes of all trainers."""
    counts = torch.zeros(2)
    with torch.no_grad():
        for input_nodes, seeds, blocks in loader(graph, nodes, shuffle=False):
            hits = model(blocks, embedding(input_nodes)).argmax(1) == graph.ndata["label"][seeds]
            counts += torch.tensor([hits.sum(), len(seeds)])
    dist.all_reduce(counts)
    return float(counts[0] / counts[1])
