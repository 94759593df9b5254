"""Distributed GraphSAGE with a learnable row for each node: the optimizer is one import.

    python examples/dgl_graphsage/make_graph.py --output demo/graphsage
    dglkge-launch --ip-config ip_config.txt --num-trainers 2 --part-config demo/graphsage/communities.json \\
        examples/dgl_graphsage/train.py

A server process runs in initialize() until all trainers have left, and then exits.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import dgl.distributed
import torch
import torch.distributed as dist

from sage import EMBEDDING_DIM, GraphSage, accuracy, train_epoch


def initial_rows(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return the initial embeddings; servers call it inside ``initialize``, so it is defined before that."""
    return torch.zeros(shape, dtype=dtype).normal_(0, 0.1)


parser = argparse.ArgumentParser()
parser.add_argument("--optimizer", choices=("dglkge", "dgl"), default="dglkge")
parser.add_argument("--num-epochs", type=int, default=10)
parser.add_argument("--json", help="file for the losses and the accuracy")
arguments = parser.parse_args()
if arguments.optimizer == "dgl":
    from dgl.distributed.optim import SparseAdagrad
else:
    from dglkge.optim import SparseAdagrad
torch.manual_seed(0)
dgl.distributed.initialize(os.environ.get("DGL_IP_CONFIG", "ip_config.txt"))
dist.init_process_group("gloo")
graph = dgl.distributed.DistGraph("communities")
book = graph.get_partition_book()
# force_even: DistributedDataParallel needs equally many batches on each trainer, or a collective blocks.
train_nodes, test_nodes = (
    dgl.distributed.node_split(graph.ndata[mask], book, force_even=True)
    for mask in ("train_mask", "test_mask")
)
num_classes = int(graph.ndata["label"][torch.arange(graph.num_nodes())].max()) + 1
model = torch.nn.parallel.DistributedDataParallel(GraphSage(num_classes))
rows = dgl.distributed.DistEmbedding(graph.num_nodes(), EMBEDDING_DIM, name="nodes", init_func=initial_rows)
optimizers = [torch.optim.Adam(model.parameters(), lr=0.01), SparseAdagrad([rows], lr=0.1)]
losses = [train_epoch(graph, train_nodes, model, rows, optimizers) for _ in range(arguments.num_epochs)]
share = accuracy(graph, test_nodes, model.module, rows)
if dist.get_rank() == 0:
    print(f"{arguments.optimizer}: losses {losses}, test accuracy {share:.4f}", flush=True)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"losses": losses, "accuracy": share}), encoding="utf-8")
# No trainer may leave while another one still pulls rows from its machine.
dist.barrier()
