"""Distributed GraphSAGE with a learnable row for each node; it stops, commits and goes on at another size.

    python examples/dgl_graphsage/make_graph.py --output demo/graphsage
    dglkge-launch --ip-config ip_config.txt --num-trainers 2 --part-config demo/graphsage/communities.json \\
        --max-restarts 3 examples/dgl_graphsage/train.py --output demo/graphsage/run

A server process runs in initialize() until all trainers have left, and then exits.
"""

from __future__ import annotations

import argparse
import os

import dglkge  # before dgl

import dgl.distributed  # isort: skip
import torch
import torch.distributed as dist

from dglkge.optim import SparseAdagrad
from sage import EMBEDDING_DIM, GraphSage, accuracy, loader, train_epoch
from state import Losses, initial_rows

parser = argparse.ArgumentParser()
parser.add_argument("--optimizer", choices=("dglkge", "dgl"), default="dglkge")
parser.add_argument("--num-epochs", type=int, default=10)
parser.add_argument("--output", default="demo/graphsage/run", help="folder for what is committed")
arguments = parser.parse_args()
torch.manual_seed(0)
dgl.distributed.initialize(os.environ.get("DGL_IP_CONFIG", "ip_config.txt"))
dist.init_process_group("gloo")
graph = dgl.distributed.DistGraph("communities")
book = graph.get_partition_book()
# force_even: DistributedDataParallel needs equally many batches on each trainer, or a collective blocks.
# rank: DGL's own follows the order in which trainers connect; a restart would give them other nodes.
train_nodes, test_nodes = (
    dgl.distributed.node_split(graph.ndata[mask], book, rank=dist.get_rank(), force_even=True)
    for mask in ("train_mask", "test_mask")
)
num_classes = int(graph.ndata["label"][torch.arange(graph.num_nodes())].max()) + 1
model = torch.nn.parallel.DistributedDataParallel(GraphSage(num_classes))
rows = dgl.distributed.DistEmbedding(graph.num_nodes(), EMBEDDING_DIM, name="nodes", init_func=initial_rows)
adagrad = dgl.distributed.optim.SparseAdagrad if arguments.optimizer == "dgl" else SparseAdagrad
sparse, adam = adagrad([rows], lr=0.1), torch.optim.Adam(model.parameters(), lr=0.01)
losses = Losses()
elastic_optimizer = sparse if arguments.optimizer == "dglkge" else None
objects = {"model": model, "adam": adam, "losses": losses}
job = dglkge.elastic(arguments.output, [rows], elastic_optimizer, objects)
for _ in dglkge.remaining_epochs_until(arguments.num_epochs):
    batches = job.batches(loader(graph, train_nodes, shuffle=True))
    losses.values.append(train_epoch(graph, batches, model, rows, [adam, sparse]))
share = accuracy(graph, test_nodes, model.module, rows)
if dist.get_rank() == 0:
    losses.write(arguments.output, share)
# No trainer may leave while another one still pulls rows from its machine.
dist.barrier()
