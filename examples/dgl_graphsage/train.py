"""Distributed GraphSAGE with a learnable embedding for each node, as DGL's users write it.

    python examples/dgl_graphsage/make_graph.py --output demo/graphsage
    dglkge-launch --ip_config ip_config.txt --num_trainers 2 --part_config demo/graphsage/communities.json \\
        examples/dgl_graphsage/train.py

DGL's optimizer and ours are exchanged by one import; ``--optimizer dgl`` takes DGL's, for comparison.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

import dgl
import torch
import torch.distributed as dist
from torch.nn import functional

EMBEDDING_DIM, HIDDEN_DIM, FANOUTS = 16, 32, [5, 5]


def initial_rows(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return the initial embeddings; servers call it inside ``initialize``, so it is defined before that."""
    return torch.zeros(shape, dtype=dtype).normal_(0, 0.1)


def sparse_optimizer(source: str) -> Any:
    """Return the optimizer of the embeddings: the one line that differs."""
    if source == "dgl":
        from dgl.distributed.optim import SparseAdagrad
    else:
        from dglkge.optim import SparseAdagrad
    return SparseAdagrad


class GraphSage(torch.nn.Module):
    """Two layers of mean aggregation (Hamilton et al. 2017)."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            [
                dgl.nn.SAGEConv(EMBEDDING_DIM, HIDDEN_DIM, "mean"),
                dgl.nn.SAGEConv(HIDDEN_DIM, num_classes, "mean"),
            ]
        )

    def forward(self, blocks: list[Any], rows: torch.Tensor) -> torch.Tensor:
        """Return the scores of each class."""
        for layer, block in zip(self.layers, blocks):
            rows = layer(block, rows)
            if layer is not self.layers[-1]:
                rows = functional.relu(rows)
        return rows


def loader(graph: Any, nodes: torch.Tensor, shuffle: bool) -> Any:
    """Return batches of nodes with their sampled neighbourhoods."""
    sampler = dgl.dataloading.NeighborSampler(FANOUTS)
    return dgl.dataloading.DistNodeDataLoader(graph, nodes, sampler, batch_size=250, shuffle=shuffle)


def accuracy(graph: Any, nodes: torch.Tensor, model: torch.nn.Module, embedding: Any) -> float:
    """Return the accuracy over the nodes of all trainers."""
    counts = torch.zeros(2)
    with torch.no_grad():
        for input_nodes, seeds, blocks in loader(graph, nodes, shuffle=False):
            found = model(blocks, embedding(input_nodes)).argmax(1)
            counts += torch.tensor([(found == graph.ndata["label"][seeds]).sum(), len(seeds)])
    dist.all_reduce(counts)
    return float(counts[0] / counts[1])


def train_epoch(
    graph: Any, nodes: torch.Tensor, model: Any, embedding: Any, dense: Any, sparse: Any
) -> float:
    """Train one epoch; return the mean loss of all trainers."""
    total = torch.zeros(2)
    for input_nodes, seeds, blocks in loader(graph, nodes, shuffle=True):
        scores = model(blocks, embedding(input_nodes))
        loss = functional.cross_entropy(scores, graph.ndata["label"][seeds])
        dense.zero_grad()
        sparse.zero_grad()
        loss.backward()
        dense.step()
        sparse.step()
        total += torch.tensor([loss.item(), 1.0])
    dist.all_reduce(total)
    return float(total[0] / total[1])


def main() -> None:
    """Train, and print the loss of each epoch and the accuracy at the end."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--optimizer", choices=("dglkge", "dgl"), default="dglkge")
    parser.add_argument("--num-epochs", type=int, default=10)
    parser.add_argument("--json", help="file for the curve")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    # A server process runs in this call until all trainers have left, and then exits.
    dgl.distributed.initialize(os.environ.get("DGL_IP_CONFIG", "ip_config.txt"))
    dist.init_process_group("gloo")
    graph = dgl.distributed.DistGraph("communities")
    book = graph.get_partition_book()
    # force_even: DistributedDataParallel needs equally many batches on each trainer, or a collective blocks.
    train_nodes = dgl.distributed.node_split(graph.ndata["train_mask"], book, force_even=True)
    test_nodes = dgl.distributed.node_split(graph.ndata["test_mask"], book, force_even=True)
    labels = graph.ndata["label"][torch.arange(graph.num_nodes())]
    model = torch.nn.parallel.DistributedDataParallel(GraphSage(int(labels.max()) + 1))
    embedding = dgl.distributed.DistEmbedding(
        graph.num_nodes(), EMBEDDING_DIM, name="nodes", init_func=initial_rows
    )
    dense = torch.optim.Adam(model.parameters(), lr=0.01)
    sparse = sparse_optimizer(arguments.optimizer)([embedding], lr=0.1)
    losses = []
    for epoch in range(arguments.num_epochs):
        losses.append(train_epoch(graph, train_nodes, model, embedding, dense, sparse))
        if dist.get_rank() == 0:
            print(f"{arguments.optimizer} epoch {epoch + 1}: loss {losses[-1]:.4f}", flush=True)
    found = accuracy(graph, test_nodes, model.module, embedding)
    if dist.get_rank() == 0:
        print(f"{arguments.optimizer} test accuracy {found:.4f}", flush=True)
        if arguments.json:
            with open(arguments.json, "w", encoding="utf-8") as file:
                json.dump({"optimizer": arguments.optimizer, "losses": losses, "accuracy": found}, file)
    # No trainer may leave while another one still pulls rows from its machine.
    dist.barrier()


if __name__ == "__main__":
    main()
