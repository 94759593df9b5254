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


def count_right(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return how many classes are predicted right, and how many there are."""
    return torch.tensor([float((scores.argmax(1) == labels).sum()), float(len(labels))])
