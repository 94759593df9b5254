"""Make a graph whose communities can be learned from its edges alone, and partition it for DGL.

python examples/dgl_graphsage/make_graph.py --output demo/graphsage
"""

from __future__ import annotations

import argparse

import dglkge  # noqa: F401  before dgl, which then loads with any torch

import dgl  # isort: skip
import torch


def community_graph(num_nodes: int, num_classes: int, degree: int, seed: int) -> dgl.DGLGraph:
    """Return a stochastic block model: nine of ten edges stay in a node's own community.

    Nodes have a label and masks, but no features: a model has to learn an embedding for each node.
    """
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(num_nodes) % num_classes
    tails = torch.arange(num_nodes).repeat_interleave(degree)
    anyone = torch.randint(0, num_nodes, (len(tails),), generator=generator)
    # A node of the same community: the multiple of the number of classes below a random node, plus the label.
    same = anyone - anyone % num_classes + labels[tails]
    same = torch.where(same < num_nodes, same, labels[tails])
    stays = torch.rand(len(tails), generator=generator) < 0.9
    graph = dgl.graph((torch.where(stays, same, anyone), tails), num_nodes=num_nodes)
    drawn = torch.rand(num_nodes, generator=generator)
    graph.ndata["label"] = labels
    graph.ndata["train_mask"] = drawn < 0.5
    graph.ndata["test_mask"] = drawn >= 0.5
    # Both directions, so that neighbours are sampled whichever way an edge was drawn.
    return dgl.to_bidirected(graph, copy_ndata=True)


def main() -> None:
    """Write the partitions."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", required=True, help="folder for the partitions")
    parser.add_argument("--num-parts", type=int, default=1, help="partitions, one for each machine")
    parser.add_argument("--num-nodes", type=int, default=4000)
    parser.add_argument("--num-classes", type=int, default=8)
    arguments = parser.parse_args()
    graph = community_graph(arguments.num_nodes, arguments.num_classes, degree=8, seed=0)
    dgl.distributed.partition_graph(graph, "communities", arguments.num_parts, arguments.output)


if __name__ == "__main__":
    main()
