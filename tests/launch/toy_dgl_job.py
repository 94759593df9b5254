"""A training script as DGL's users write it: partitions a ring of 64 nodes, or trains an embedding of it."""

from __future__ import annotations

import argparse
import os

import dgl
import torch
import torch.distributed as dist

NUM_NODES = 64
DIM = 4


def partition(folder: str) -> None:
    nodes = torch.arange(NUM_NODES)
    graph = dgl.graph((nodes.repeat(2), torch.cat([nodes + 1, nodes + 2]) % NUM_NODES), num_nodes=NUM_NODES)
    graph.ndata["feature"] = nodes.float().reshape(-1, 1)
    dgl.distributed.partition_graph(graph, "ring", 1, folder, part_method="random")


def zeros(shape: tuple, dtype: torch.dtype) -> torch.Tensor:
    """Initial rows; importable by the server, as DGL demands."""
    return torch.zeros(shape, dtype=dtype)


def train(args: argparse.Namespace) -> None:
    dgl.distributed.initialize(args.ip_config)
    dist.init_process_group(backend="gloo")
    graph = dgl.distributed.DistGraph("ring", part_config=args.part_config)
    mine = dgl.distributed.node_split(torch.ones(NUM_NODES, dtype=torch.bool), graph.get_partition_book())
    embedding = dgl.distributed.DistEmbedding(NUM_NODES, DIM, name="emb", init_func=zeros)
    optimizer = dgl.distributed.optim.SparseAdam([embedding], lr=0.1)
    for step in range(args.steps):
        optimizer.zero_grad()
        loss = ((embedding(mine) - graph.ndata["feature"][mine]) ** 2).mean()
        loss.backward()
        optimizer.step()
        if step == 0:
            print(f"rank {dist.get_rank()} of {dist.get_world_size()} has begun", flush=True)
            if args.raise_on_rank == dist.get_rank():
                raise RuntimeError(f"rank {dist.get_rank()} was asked to fail")
    if args.sample:
        sampler = dgl.dataloading.NeighborSampler([2])
        batches = dgl.dataloading.DistNodeDataLoader(graph, mine, sampler, batch_size=16)
        num_sampled = sum(len(seeds) for _, seeds, _ in batches)
        print(f"rank {dist.get_rank()} sampled {num_sampled} of {len(mine)}", flush=True)
    total = torch.tensor(float(len(mine)))
    dist.all_reduce(total)
    dist.barrier()
    moved = bool((embedding.weight[mine[mine > 0]].abs() > 0).all())
    threads = os.environ["OMP_NUM_THREADS"]
    print(f"rank {dist.get_rank()} nodes {int(total)} moved {moved} threads {threads}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--partition")
    parser.add_argument("--ip_config")
    parser.add_argument("--part_config")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--raise_on_rank", type=int)
    parser.add_argument("--sample", action="store_true")
    arguments = parser.parse_args()
    if arguments.partition:
        partition(arguments.partition)
    else:
        train(arguments)
