"""Distributed R-GCN (Schlichtkrull et al. 2018) on nodes without features: a learnable row for each.

python examples/dgl_rgcn/make_graph.py --output demo/rgcn
dglkge-launch --ip-config ip_config.txt --num-trainers 2 --part-config demo/rgcn/papers.json \\
        --max-restarts 3 examples/dgl_rgcn/train.py --output demo/rgcn/run
"""

from __future__ import annotations

import argparse
import os

import dglkge  # before dgl

import dgl.distributed  # isort: skip
import torch
import torch.distributed as dist
from rgcn import DIM, Rgcn, count_right, initial_rows, loader
from torch.nn.functional import cross_entropy

from dglkge.optim import SparseAdam

parser = argparse.ArgumentParser()
parser.add_argument("--num-epochs", type=int, default=20)
parser.add_argument("--output", default="demo/rgcn/run", help="folder for what is committed")
arguments = parser.parse_args()
torch.manual_seed(0)
dgl.distributed.initialize(os.environ.get("DGL_IP_CONFIG", "ip_config.txt"))
dist.init_process_group("gloo")
graph = dgl.distributed.DistGraph("papers")
mask, labels = graph.nodes["paper"].data["train_mask"], graph.nodes["paper"].data["label"]
# rank: DGL's own follows the order in which trainers connect, so a restart would give them other nodes.
papers = dgl.distributed.node_split(mask, graph.get_partition_book(), "paper", dist.get_rank())
rows = {
    kind: dgl.distributed.DistEmbedding(
        graph.num_nodes(kind), DIM, kind, initial_rows, graph.get_node_partition_policy(kind)
    )
    for kind in graph.ntypes
}
model = torch.nn.parallel.DistributedDataParallel(Rgcn(graph.etypes), find_unused_parameters=True)
sparse, adam = SparseAdam(list(rows.values()), lr=0.05), torch.optim.Adam(model.parameters(), lr=0.02)
job = dglkge.elastic(
    arguments.output, optimizer=sparse, objects={"model": model, "adam": adam},
    original_ids={kind: graph.nodes[kind].data["orig_id"] for kind in graph.ntypes},
)  # fmt: skip
for epoch in dglkge.remaining_epochs_until(arguments.num_epochs):
    right = torch.zeros(2)
    for input_nodes, seeds, blocks in job.batches(loader(graph, papers)):
        scores = model(blocks, {kind: rows[kind](nodes) for kind, nodes in input_nodes.items()})
        adam.zero_grad()
        cross_entropy(scores, labels[seeds["paper"]]).backward()
        adam.step()
        sparse.step()
        right += count_right(scores, labels[seeds["paper"]])
    dist.all_reduce(right)
    if dist.get_rank() == 0:
        print(f"epoch {epoch + 1}: training accuracy {float(right[0] / right[1]):.3f}", flush=True)
dist.barrier()
