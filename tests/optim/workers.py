"""What the trainers of a test cluster do, each with the graph and the arguments of ``run_cluster``."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dgl
import torch
import torch.distributed as dist

from dglkge import optim
from dglkge.optim import step_exchange
from dglkge.optim.rules import Adagrad
from tests.optim.oracle import CASES, batch, share, start_rows


def rank_and_size() -> tuple[int, int]:
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def make_table(graph: Any, kind: str, dim: int, name: str) -> Any:
    """An embedding for the nodes or edges of a type; its rows are :func:`start_rows`, by id."""
    of = "edge" if kind in graph.etypes else "node"
    num_rows, policy = getattr(graph, f"num_{of}s")(kind), getattr(graph, f"get_{of}_partition_policy")(kind)
    table = dgl.distributed.DistEmbedding(num_rows, dim, name, part_policy=policy)
    first, rows = local_rows(table.weight)
    rows.copy_(start_rows(num_rows, dim)[first : first + len(rows)])
    barrier()
    return table


def local_rows(tensor: Any) -> tuple[int, torch.Tensor]:
    """First id of this machine's rows of a distributed tensor, and the rows in its memory."""
    parts = tensor.part_policy.to_partid(torch.arange(len(tensor))).tolist()
    return parts.index(tensor.part_policy.part_id), tensor.kvstore.data_store[tensor.kvstore_key]


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def read(table: Any) -> torch.Tensor:
    with torch.no_grad():
        return table(torch.arange(table.num_embeddings)).clone()


def read_state(optimizer: Any, table: Any) -> dict[str, torch.Tensor]:
    ids = torch.arange(table.num_embeddings)
    return {key: tensor[ids].clone() for key, tensor in optimizer.state_tensors(table).items()}


def train_by_trace(optimizer: Any, tables: list[Any], step: int, zero_first: bool) -> None:
    """One step the way users write it; the first table is read twice."""
    rank, size = rank_and_size()
    losses = []
    if zero_first:
        optimizer.zero_grad()
    for number, table in enumerate(tables):
        ids, gradients = batch(step, table.num_embeddings, table.embedding_dim)
        mine = share(step, rank, size)
        for part in [mine[:5], mine[5:]] if number == 0 else [mine]:
            if len(part):
                losses.append((table(ids[part]) * gradients[part]).sum())
    if not zero_first:
        optimizer.zero_grad()
    if losses:
        sum(losses).backward()
    optimizer.step()


def train_by_rows(optimizer: Any, tables: list[Any], step: int) -> None:
    """The same step through the direct entry, with ids of 32 and 64 bits in turn."""
    rank, size = rank_and_size()
    gradients = []
    for table in tables:
        ids, rows = batch(step, table.num_embeddings, table.embedding_dim)
        mine = share(step, rank, size)
        if len(mine):
            gradients.append((table, ids[mine].int() if step % 2 else ids[mine], rows[mine]))
    optimizer.step_rows(gradients)


def all_cases(graph: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Run every case; the first and last rows are read in every step, so that a stale read would be seen."""
    results = {}
    rank, _ = rank_and_size()
    kernels = arguments.get("kernels", ["auto"])
    if not arguments.get("shared_memory", True):
        step_exchange.usable = lambda: False
    for case in CASES[: arguments.get("num_cases")]:
        tables = [make_table(graph, kind, dim, f"{case.label}_{kind}") for kind, dim in arguments["tables"]]
        optimizer = case.optimizer_of(tables, kernels=kernels[rank % len(kernels)])
        for step in range(arguments["num_steps"]):
            if step % 3 == 0:
                train_by_trace(optimizer, tables, step, zero_first=step % 2 == 0)
            else:
                train_by_rows(optimizer, tables, step)
        optimizer.finish()
        barrier()
        results[case.label] = [(read(table), read_state(optimizer, table)) for table in tables]
        results["leaks", case.label] = [len(table._trace) for table in tables]
        barrier()
    results["sent_bytes"] = optimizer.sent_bytes
    return results


def save_state(graph: Any, arguments: dict[str, Any]) -> Any:
    """Train some steps, save by original ids and by node ids; returns the state by original id."""
    rank, size = rank_and_size()
    table = make_table(graph, "user", 5, "saved")
    optimizer = optim.SparseAdam([table], lr=0.05)
    node_of = torch.argsort(arguments["original_ids"])
    for step in range(4):
        ids, rows = batch(step, table.num_embeddings, 5)
        mine = share(step, rank, size)
        optimizer.step_rows([(table, node_of[ids[mine]], rows[mine])])
    optimizer.save(arguments["folder"] / "by_original", original_ids={"saved": arguments["original_ids"]})
    optimizer.save(str(arguments["folder"] / "by_node"))
    return {key: rows[node_of] for key, rows in read_state(optimizer, table).items()}


def load_state(graph: Any, arguments: dict[str, Any]) -> Any:
    """Load what another cluster saved; returns for each file an error, or the state and the learning rate."""
    table = make_table(graph, "user", 5, "saved")
    node_of = torch.argsort(arguments["original_ids"])
    maps = {"original_ids": {"saved": arguments["original_ids"]}}
    results: list[Any] = []
    for name, options in (("by_original", maps), ("by_node", {}), ("by_original", {}), ("nothing", {})):
        optimizer = optim.SparseAdam([table], lr=arguments["lr"], eps=1e-3)
        try:
            optimizer.load(arguments["folder"] / name, **options)
        except (ValueError, FileNotFoundError) as error:
            results.append(str(error))
        else:
            barrier()
            state = {key: rows[node_of] for key, rows in read_state(optimizer, table).items()}
            results.append((state, optimizer._lr, optimizer._eps))
        barrier()
        del optimizer  # and its state with it
        barrier()
    return results


def fail_alone(graph: Any, arguments: dict[str, Any]) -> list[str]:
    """Load own files, of which trainer 1's has no ids; save, where trainer 1 has no folder: the errors."""
    rank, _ = rank_and_size()
    table = make_table(graph, "user", 2, "damaged")
    optimizer = optim.SparseAdagrad([table], lr=0.1, timeout_seconds=20)
    path = arguments["folder"] / str(rank)
    content = optimizer.local_state_dict()
    content["params"]["world_size"] = 1
    if rank == 1:
        del content["emb_states"]["damaged"]["ids"]
    torch.save(content, f"{path}_0")
    errors, target = [], path.parent / "none" / "a" if rank else path
    for call, place in ((optimizer.load, path), (optimizer.save, target)):
        try:
            call(place)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors


def several(graph: Any, arguments: Any) -> list[Any]:
    return [globals()[name](graph, arguments) for name in arguments["workers"]]


def saved_ids(graph: Any, arguments: Any) -> Any:
    """Ids of the rows that this trainer saves: trainer 0 alone, then all, where steps are not synchronous."""
    table, other = make_table(graph, "user", 2, "lone"), make_table(graph, "user", 2, "hogwild")
    optimizer = optim.SparseAdagrad([table], lr=0.1)
    is_first = rank_and_size()[0] == 0
    alone = optimizer.state_dict()["emb_states"]["lone"]["ids"].tolist() if is_first else None
    barrier()
    hogwild = optim.SparseAdagrad([other], lr=0.1, synchronous=False)
    barrier()
    return alone, hogwild.local_state_dict()["emb_states"]["hogwild"]["ids"].tolist()


def overflow(graph: Any, arguments: Any) -> Any:
    """Three scaled steps; in the second a gradient of trainer 1 is infinite, and trainer 2 has none."""
    rank, _ = rank_and_size()
    table = make_table(graph, "user", 2, "scaled")
    optimizer = optim.SparseAdagrad([table], lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scales = []
    for factor in (1.0, 2.0, 3.0):
        scaler.scale(torch.zeros(()))  # every trainer scales its loss, also where it depends on no row
        if rank == 0 or (rank == 1 and factor == 2.0):
            loss = (table(torch.tensor([5])) * factor).sum()
            scaler.scale(loss * float("inf") if rank == 1 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        optimizer.zero_grad()
    barrier()
    return read(table), scales


def misuse(graph: Any, arguments: dict[str, Any]) -> None:
    rank, size = rank_and_size()
    caught: dict[str, Any] = {}

    def catch(name: str, call: Any) -> None:
        try:
            call()
            caught[name] = None
        except Exception as error:
            caught[name] = (type(error).__name__, str(error))

    table = make_table(graph, "user", 3, "misused")
    skipping, raising = make_table(graph, "user", 3, "skipping"), make_table(graph, "user", 3, "raising")
    rows = torch.ones(2, 3)
    rows[1, 2] = float("nan") if rank == size - 1 else 1.0
    ids = torch.tensor([1, 4])
    optimizer = optim.SparseAdagrad([skipping], lr=0.1, nonfinite="skip")
    optimizer.step_rows([(skipping, ids, rows)])
    caught["skipped"] = optimizer.num_skipped_rows
    barrier()
    caught["rows after skip"] = read(skipping)[ids]
    strict = optim.SparseAdagrad([raising], lr=0.1)
    catch("nonfinite", lambda: strict.step_rows([(raising, ids, rows)]))
    catch("after nonfinite", lambda: strict.step_rows([(raising, ids, torch.ones(2, 3))]))
    late = optim.SparseAdagrad([table], lr=0.1, timeout_seconds=1.5)
    late.step_rows([])
    if rank != 0:  # trainer 0 leaves out this step
        catch("late", lambda: late.step_rows([]))
    leave(caught, together=True)


def give_up(graph: Any, arguments: dict[str, Any]) -> str:
    """Trainer 1 passes an impossible id; the others learn at once that it gave up."""
    rank, _ = rank_and_size()
    table = make_table(graph, "user", 3, "given_up")
    optimizer = optim.RowAdagrad([table], lr=0.1, timeout_seconds=100)
    optimizer.step_rows([])
    ids = torch.tensor([0, 1000 if rank == 1 else 2])
    try:
        optimizer.step_rows([(table, ids, torch.ones(2, 3))])
    except (ValueError, ConnectionError) as error:
        message = f"{type(error).__name__}: {error}"
    barrier()
    return message


def stop(graph: Any, arguments: dict[str, Any]) -> str:
    """Trainer 1 ends without a word, or trainer 0 is stopped, and torch's store with it; none hangs."""
    rank, _ = rank_and_size()
    is_ending = arguments["is_ending"]
    table = make_table(graph, "user", 3, "orphan")
    optimizer = optim.RowAdagrad([table], lr=0.1, timeout_seconds=100 if is_ending else 4)
    optimizer.step_rows([(table, torch.tensor([1]), torch.ones(1, 3))])
    pids = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
    torch.distributed.all_gather(pids, torch.tensor([os.getpid()]))
    if is_ending and rank == 1:
        os._exit(9)
    if not is_ending:
        if rank == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        # The store of these tests is no thread of trainer 0, as that of a job is.
        silent = SimpleNamespace(add=lambda *_: time.sleep(3600))
        torch.distributed.distributed_c10d._get_default_store = lambda: silent
    try:
        optimizer.step_rows([])
    except (ConnectionError, TimeoutError) as error:
        if not is_ending:
            os.kill(int(pids[0]), signal.SIGKILL)
        leave(f"{type(error).__name__}: {error}")
    return ""


def leave(result: Any, together: bool = False) -> None:
    """Write the result and end without DGL's shutdown; ``together``: not before all have written theirs."""
    rank, size = rank_and_size()
    folder = Path(os.environ["TEST_FOLDER"])
    torch.save(result, folder / f"unfinished{rank}.pt")
    os.replace(folder / f"unfinished{rank}.pt", folder / f"result{rank}.pt")
    deadline = time.monotonic() + 60
    while together and len([*folder.glob("result*.pt")]) < size and time.monotonic() < deadline:
        time.sleep(0.02)
    os._exit(0)


def clipped(graph: Any, arguments: dict[str, Any]) -> list[Any]:
    """Train two tables, the second with a rule of its own, with both limits; returns the rows."""
    rank, _ = rank_and_size()
    tables = [make_table(graph, ntype, dim, f"clipped_{ntype}") for ntype, dim in arguments["tables"]]
    groups = [{"params": tables[:1]}, {"params": tables[1:], "rule": Adagrad(), "lr": 0.05}]
    optimizer = optim.RowAdagrad(groups, lr=0.1, timeout_seconds=60, kernels=["auto", "reference"][rank % 2])
    optimizer.clip_gradients(arguments["norm"], arguments["value"])
    for step in range(arguments["num_steps"]):
        train_by_rows(optimizer, tables, step)
    barrier()
    rows = [read(table) for table in tables]
    barrier()
    return rows


OPTIONS: dict[str, dict[str, Any]] = {
    "SparseAdagrad": {"lr": 0.1, "eps": 0.05},
    "SparseAdam": {"lr": 0.01, "eps": 1e-3, "betas": (0.8, 0.95)},
}


def beside(graph: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Rows and state of DGL's optimizers (Adagrad's roots are undone after each step) and of ours."""
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
        places = torch.isin(torch.arange(first, first + len(rows)), touched)
        rows[places] = (rows[places] - eps).square()
    barrier()


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
    part = torch.load(arguments["folder"] / f"part{(rank + 1) % size}", weights_only=True)
    optimizer.load_local_state_dict(part)
    barrier()
    return trained._state["twin"][torch.arange(60)], read_state(optimizer, table)["sum"], optimizer._lr
