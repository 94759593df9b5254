"""R-GCN (Schlichtkrull et al. 2018) by DGL's own layers. Nothing here is dglkge's."""

from __future__ import annotations

from typing import Any

import dgl
import torch
from torch.nn.functional import relu

DIM, NUM_CLASSES = 16, 4


class Rgcn(torch.nn.Module):
    """Two layers with weights for each relation."""

    def __init__(self, relations: list[str]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            dgl.nn.HeteroGraphConv({name: dgl.nn.GraphConv(DIM, size, "right") for name in relations})
            for size in (DIM, NUM_CLASSES)
        )

    def forward(self, blocks: list[Any], rows: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the scores of the classes of papers."""
        hidden = {name: relu(values) for name, values in self.layers[0](blocks[0], rows).items()}
        scores: torch.Tensor = self.layers[1](blocks[1], hidden)["paper"]
        return scores


def initial_rows(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return the initial embeddings."""
    return torch.zeros(shape, dtype=dtype).normal_(0, 0.1, generator=torch.Generator().manual_seed(0))


def loader(graph: Any, papers: torch.Tensor) -> Any:
    """Return batches of papers; a new loader for each epoch: it shuffles what it has shuffled before."""
    sampler = dgl.dataloading.NeighborSampler([5, 5])
    nodes = {"paper": papers}
    return dgl.dataloading.DistNodeDataLoader(graph, nodes, sampler, batch_size=100, shuffle=True)


def count_right(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return how many classes are predicted right, and how many there are."""
    return torch.tensor([float((scores.argmax(1) == labels).sum()), float(len(labels))])
