"""Make a graph of papers, authors and fields whose papers' classes follow from their links, and partition it.

python examples/dgl_rgcn/make_graph.py --output demo/rgcn
"""

from __future__ import annotations

import argparse

import dglkge  # noqa: F401  before dgl, which then loads with any torch

import dgl  # isort: skip
import torch

NUM_CLASSES, NUM_PAPERS, NUM_AUTHORS, NUM_FIELDS = 4, 800, 400, 40


def links(source: torch.Tensor, num_targets: int, per_source: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return links to random targets, four of five of which have the class of their source."""
    tails = torch.randint(0, num_targets, (len(source) * per_source,))
    heads = torch.arange(len(source)).repeat_interleave(per_source)
    same = tails - tails % NUM_CLASSES + source[heads]
    return heads, torch.where(torch.rand(len(tails)) < 0.8, same, tails)


def main() -> None:
    """Write the partitions."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", required=True, help="folder for the partitions")
    parser.add_argument("--num-parts", type=int, default=1, help="partitions, one for each machine")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    papers = torch.arange(NUM_PAPERS) % NUM_CLASSES
    written, about = links(papers, NUM_AUTHORS, 3), links(papers, NUM_FIELDS, 2)
    edges = {
        ("paper", "written_by", "author"): written,
        ("author", "writes", "paper"): written[::-1],
        ("paper", "is_about", "field"): about,
        ("field", "has", "paper"): about[::-1],
    }
    sizes = {"paper": NUM_PAPERS, "author": NUM_AUTHORS, "field": NUM_FIELDS}
    graph = dgl.heterograph(edges, num_nodes_dict=sizes)
    graph.nodes["paper"].data["label"] = papers
    graph.nodes["paper"].data["train_mask"] = torch.rand(NUM_PAPERS) < 0.5
    for kind in graph.ntypes:
        # The ids before partitioning, by which rows are saved.
        graph.nodes[kind].data["orig_id"] = torch.arange(graph.num_nodes(kind))
    dgl.distributed.partition_graph(graph, "papers", arguments.num_parts, arguments.output)


if __name__ == "__main__":
    main()
