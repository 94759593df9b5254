"""A script of another project that is elastic: node and 16-bit edge embeddings, dropout, two batch loops.

Rank 0 writes a line for each batch, and obeys each line ``EPOCH LOOP INDEX kill`` of a file ``order`` once;
``stop``: SIGTERM. ``--leave-in``: commit in the body of an epoch, and leave with status 5.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import signal
import sys
from pathlib import Path

import dglkge

import dgl.distributed  # isort: skip
import torch
import torch.distributed as dist

from dglkge.optim import NarrowEmbedding, RowAdagrad, SparseAdam

NUM_NODES, NUM_EDGES, NUM_EPOCHS = 60, 300, 4


def initial(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return initial rows."""
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(3))


def obey(folder: Path, epoch: int, loop: int, index: int) -> None:
    """Do what the file says, once."""
    order = folder / "order"
    if not order.exists() or (dist.is_initialized() and dist.get_rank()):
        return
    (*place, word), *rest = map(str.split, order.read_text().splitlines() or ["never none"])
    if place == [str(epoch), str(loop), str(index)]:
        order.write_text("".join(" ".join(line) + "\n" for line in rest))
        os.kill(os.getpid(), signal.SIGKILL if word == "kill" else signal.SIGTERM)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--leave-in", type=int, default=-1)
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--without", action="store_true")
    parser.add_argument("--options", type=json.loads, default={})
    parser.add_argument("--mistakes", type=json.loads, default=[])
    arguments = parser.parse_args()
    folder = arguments.folder
    logging.basicConfig(format="%(levelname)s %(message)s", level=logging.INFO)
    torch.manual_seed(0)
    dgl.distributed.initialize(os.environ.get("DGL_IP_CONFIG", "unused"))
    if not arguments.alone:
        dist.init_process_group("gloo")
    graph = dgl.distributed.DistGraph("own", part_config=str(folder.parent / "own.json"))
    policies = graph.get_node_partition_policy("_N"), graph.get_edge_partition_policy("_E")
    nodes = dgl.distributed.DistEmbedding(NUM_NODES, 4, "nodes", initial, policies[0])
    edges = NarrowEmbedding(NUM_EDGES, 3, "edges", policies[1])  # the rounding depends on the step
    model = torch.nn.Linear(4, 3)
    sparse = SparseAdam([nodes], lr=0.1, bias_correction="global"), RowAdagrad([edges], lr=0.1)
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    decay = torch.optim.lr_scheduler.ExponentialLR(sparse[0], 0.9)
    objects = {"model": model, "adam": adam, "decay": decay}
    if not arguments.without:
        fields = {
            "optimizer": sparse,
            "objects": objects,
            "every": {"epochs": 1, "batches": 2},
            **arguments.options,
        }
        for options in arguments.mistakes:
            if "optimizer" in options:
                options["optimizer"] = RowAdagrad([nodes], lr=0.1), sparse[1]
            try:
                dglkge.elastic(folder / "run", **{**fields, **options})
            except dglkge.InputError as error:
                print(f"refused: {error}")
        if arguments.mistakes:
            return
        job = dglkge.elastic(folder / "run", **fields)
    rank, size = (0, 1) if arguments.alone else (dist.get_rank(), dist.get_world_size())
    share = torch.arange(rank, NUM_EDGES, size)
    heads, tails = graph.find_edges(share)
    data = torch.utils.data.TensorDataset(share, heads, tails)
    loader = torch.utils.data.DataLoader(data, batch_size=60 // size, shuffle=True)
    print(f"epochs before: {dglkge.finished_epochs()} {dglkge.current_epoch()}", flush=True)
    if arguments.without:
        return
    with job if arguments.alone else contextlib.nullcontext():
        for epoch in dglkge.remaining_epochs_until(NUM_EPOCHS):
            assert dglkge.current_epoch() == dglkge.finished_epochs() == epoch
            if epoch == arguments.leave_in:
                job.commit()
                sys.exit(5)
            for loop in range(2):
                for index, (ids, head, tail) in enumerate(job.batches(loader)):
                    obey(folder, epoch, loop, index)
                    hidden = torch.nn.functional.dropout(model(nodes(head) - nodes(tail)), 0.2)
                    loss = (hidden - edges(ids)).square().sum()
                    adam.zero_grad()
                    loss.backward()
                    for parameter in model.parameters() if size > 1 else ():
                        dist.all_reduce(parameter.grad)
                    for optimizer in (adam, *sparse):
                        optimizer.step()
                    if rank == 0:
                        with (folder / "batches.txt").open("a") as lines:
                            lines.write(f"{epoch} {loop} {ids.tolist()}\n")
                    if (epoch, loop, index) == (1, 0, 3):
                        break  # the second loop is a whole one
            decay.step()
    if not arguments.alone:
        dist.barrier()


if __name__ == "__main__":
    main()
