"""What the trainers of a test cluster do with DGL's own optimizers beside ours, and as DGL's own tests do."""

from __future__ import annotations

from typing import Any

import dgl
import torch

from dglkge import optim
from tests.optim.oracle import batch
from tests.optim.workers import (
    barrier,
    leave,
    local_rows,
    make_table,
    rank_and_size,
    read,
    read_state,
    train_by_trace,
)

#: Arguments with which both are made: epsilons that show in every number.
OPTIONS: dict[str, dict[str, Any]] = {
    "SparseAdagrad": {"lr": 0.1, "eps": 0.05},
    "SparseAdam": {"lr": 0.01, "eps": 1e-3, "betas": (0.8, 0.95)},
}


def beside(graph: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Rows and state of DGL's optimizers and of ours after the same steps.

    DGL's Adagrad writes the root over the sum of squares; here the sum is put back after each step.
    """
    results = {}
    for name, options in OPTIONS.items():
        twin, table = (make_table(graph, "user", 3, f"{name}_{kind}") for kind in ("twin", "table"))
        dgls = getattr(dgl.distributed.optim, name)([twin], **options)
        optimizer = getattr(optim, name)([table], duplicates="mean", timeout_seconds=60, **options)
        for step in range(arguments["num_steps"]):
            train_by_trace(dgls, [twin], step, zero_first=False)
            train_by_trace(optimizer, [table], step, zero_first=False)
            if name == "SparseAdagrad":
                undo_root(dgls._state[twin.name], batch(step, 60, 3)[0], options["eps"])
        barrier()
        state = dgls._state[twin.name]
        tensors = state if isinstance(state, tuple) else (state,)
        dgl_state = [tensor[torch.arange(60)].clone() for tensor in tensors]
        results[name] = [(read(twin), dgl_state), (read(table), list(read_state(optimizer, table).values()))]
        barrier()
    return results


def undo_root(total: Any, touched: torch.Tensor, eps: float) -> None:
    """Replace root + epsilon by the sum of squares in this machine's touched rows; one trainer a machine."""
    barrier()
    first, rows = local_rows(total)
    if rank_and_size()[0] < dgl.distributed.get_num_machines():
        places = touched.unique() - first
        places = places[(places >= 0) & (places < len(rows))]
        rows[places] = (rows[places] - eps).square()
    barrier()


def roots(graph: Any, arguments: dict[str, Any]) -> list[torch.Tensor]:
    """Row and state of DGL's Adagrad and of ours after 200 steps with equal gradients; one trainer."""
    results = []
    for kind, module in (("dgl", dgl.distributed.optim), ("ours", optim)):
        table = make_table(graph, "user", 1, f"roots_{kind}")
        optimizer = module.SparseAdagrad([table], lr=0.1)
        for _ in range(200):
            optimizer.zero_grad()
            (table(torch.tensor([3])) * 2.5).sum().backward()
            optimizer.step()
        state = optimizer._state[table.name][torch.tensor([3])]
        results.append(torch.cat([read(table)[3], state[0]]))
    return results


def uneven(graph: Any, arguments: dict[str, Any]) -> None:
    """Three trainers and two servers: ours first, then DGL's, which fails."""
    rank, size = rank_and_size()
    results: dict[str, Any] = {}
    for name, module in (("ours", optim), ("dgl", dgl.distributed.optim)):
        table = make_table(graph, "user", 2, f"uneven_{name}")
        optimizer = module.SparseAdagrad([table], lr=0.1)
        rows = table(torch.tensor([rank, size]))
        rows.sum().backward()
        try:
            optimizer.step()
            results[name] = read(table)
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"
    leave(results)


def load_parts(graph: Any, arguments: dict[str, Any]) -> Any:
    """Train with DGL's Adagrad, load the next trainer's part of its state into ours; returns both states."""
    rank, size = rank_and_size()
    twin, table = make_table(graph, "user", 2, "twin"), make_table(graph, "user", 2, "table")
    trained = dgl.distributed.optim.SparseAdagrad([twin], lr=0.25)
    for step in range(3):
        trained.zero_grad()
        (twin(torch.arange(rank, 60, size)) * (2 + step)).sum().backward()
        trained.step()
    num_machines = dgl.distributed.get_num_machines()
    # DGL numbers trainers machine by machine; here they are dealt out to machines in turn.
    trained._rank = twin.part_policy.part_id * (size // num_machines) + rank // num_machines
    part = trained.local_state_dict()
    saved = part["emb_states"].pop("twin")
    states = {name.replace("twin", "table"): rows for name, rows in saved["states"].items()}
    part["emb_states"]["table"] = {"ids": saved["ids"], "states": states}
    torch.save(part, arguments["folder"] / f"part{rank}")
    barrier()
    optimizer = optim.SparseAdagrad([table], lr=0.1, timeout_seconds=60)
    optimizer.load_local_state_dict(
        torch.load(arguments["folder"] / f"part{(rank + 1) % size}", weights_only=True)
    )
    barrier()
    return trained._state["twin"][torch.arange(60)], read_state(optimizer, table)["sum"], optimizer._lr


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Start rows at zero, as DGL's ``init_func``."""
    return torch.zeros(shape, dtype=dtype)


def store(graph: Any, arguments: dict[str, Any]) -> Any:
    """Save state that trainer 0 writes into ``_state``, or load it with other hyper-parameters."""
    # Without a partition policy: DGL finds the one of so many rows.
    tables = [dgl.distributed.DistEmbedding(60, 1, f"stored{number}", zeros) for number in range(2)]
    optimizer = optim.SparseAdagrad(tables, lr=arguments["lr"], eps=arguments["eps"])
    if "states" in arguments:
        for table, values in zip(tables, arguments["states"]):
            if rank_and_size()[0] == 0:
                optimizer._state[table.name][torch.arange(60)] = values
        optimizer.save(str(arguments["folder"] / "state"))
    else:
        optimizer.load(str(arguments["folder"] / "state"))
    barrier()
    return [optimizer._state[table.name][torch.arange(60)] for table in tables], optimizer._lr, optimizer._eps


def embeddings(graph: Any, arguments: dict[str, Any]) -> list[torch.Tensor]:
    """One step of two embeddings, the second read twice; rows, and state as a tensor opened by its name."""
    everything, results = torch.arange(60), []
    for name, num_reads in (("emb1", 1), ("emb2", 2)):
        table = dgl.distributed.DistEmbedding(60, 1, name, zeros)
        assert not read(table).any()
        optimizer = optim.SparseAdagrad([table], lr=0.001)
        loss = (torch.cat([table(everything) for _ in range(num_reads)]) + 1).sum(0)
        loss.backward()
        optimizer.step()
        total = dgl.distributed.DistTensor(
            (60, 1), torch.float32, f"{name}_sum", None, table.weight.part_policy
        )
        results += [read(table), total[everything]]
        barrier()
    return results
