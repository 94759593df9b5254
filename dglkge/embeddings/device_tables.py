"""Tables on devices: rows and optimizer state sharded over the trainers of one machine (``tables.storage``).

Each trainer holds one of equal runs of the machine's rows of every table on its device. A batch takes this
way:

1. While the batch before computes: each trainer's distinct node ids go to the owners of the rows, over the
   host (:meth:`DeviceTables.routes`). No row is read.
2. Owners send the rows, device to device: NCCL on GPUs, gloo on CPUs (:meth:`DeviceTables.fetch`).
3. Merged gradients go back the same way. The owner sums those of equal rows in a fixed order, its own first
   and then trainer by trainer, and updates rows and state there (:meth:`DeviceTables.step_rows`).

The kvstore's shared memory gets the rows at commits and rankings (:meth:`DeviceTables.store`), and is read at
the start and where a version was restored (:meth:`DeviceTables.load`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dglkge.embeddings.embedding_table import EmbeddingTable
from dglkge.embeddings.row_exchange import exchange_counts
from dglkge.optim.alltoall import Alltoall
from dglkge.optim.links import UpdateResult
from dglkge.optim.row_chains import clipped_squares
from dglkge.optim.table import DeviceRows
from dglkge.typing import Ids


@dataclass
class OnDevice:
    """An array on the device; ``tensor`` is None until its upload was sent."""

    tensor: Any = None


@dataclass(frozen=True)
class Route:
    """Way of one table's rows and gradients between the trainers of a batch.

    Attributes
    ----------
    num_requested, num_served : list of int
        Rows that this trainer asks of each rank, and that each rank asks of this trainer.
    positions, targets, places : (n,), (m,), (n,) int64, on the device
        Rows of this trainer's shard that are asked for, rank by rank; the distinct ones; and the place of
        each position among these.
    is_active : bool
        Whether any trainer asks for rows of the table.
    repeats : (U,) int64 on the device, optional
        How often each row is asked for, one after another: a relation at several times has one row.
    """

    num_requested: list[int]
    num_served: list[int]
    positions: OnDevice
    targets: OnDevice
    places: OnDevice
    is_active: bool
    repeats: OnDevice | None = None


@dataclass
class DeviceTables:
    """Rows and state of all tables on the devices of one machine's trainers; every method is a collective.

    It takes the place of the optimizer in a train step: the update rules, their hyper-parameters and the
    memory in the kvstore are those of the optimizer.

    Attributes
    ----------
    tables : mapping of str to EmbeddingTable
        In the order of the optimizer's tables; all rows on this machine.
    optimizer : SparseOptimizer
    local_rank, num_trainers : int
        Number of this trainer on its machine, and how many these are.
    device : torch.device
    timeout_seconds : float
        Limit of every wait for the other trainers.
    is_compiled : bool
        Update rows by torch.compile.

    network_bytes : int
        Bytes of gradients sent to other machines: 0, the tables are those of one machine.
    """

    network_bytes = 0

    tables: Mapping[str, EmbeddingTable]
    optimizer: Any
    local_rank: int
    num_trainers: int
    device: torch.device
    timeout_seconds: float
    is_compiled: bool = False

    def __post_init__(self) -> None:
        duty = "train every batch, also with no triples of its own"
        self._host = Alltoall(self.timeout_seconds, purpose="exchange of rows", duty=duty)
        self._network = Alltoall(
            self.timeout_seconds, own_group=True, purpose="exchange of rows", duty=duty, device=self.device
        )
        self._enter: Callable[[str], None] = lambda phase: None
        self._names = {id(table.embedding): name for name, table in self.tables.items()}
        self._shards: dict[str, DeviceRows] = {}
        self._starts: dict[str, Ids] = {}
        for (name, table), optimizer_table in zip(self.tables.items(), self.optimizer.tables):
            shards = [table.shard(rank, self.num_trainers) for rank in range(self.num_trainers)]
            starts = [*(shard.first_node_id for shard in shards), table.end_node_id]
            self._starts[name] = np.array(starts, np.int64)
            own_rows = slice(*(self._starts[name] - table.first_node_id)[self.local_rank :][:2].tolist())
            self._shards[name] = DeviceRows(optimizer_table, own_rows, self.device)
        self._open: dict[str, Route] = {}
        self._is_changed = False

    def when_phase(self, enter: Callable[[str], None]) -> None:
        """Set the function that is called with the name of each phase of a step as it begins."""
        self._enter = enter

    def load(self) -> None:
        """Read this trainer's rows and state from shared memory, where all trainers must have written."""
        for shard in self._shards.values():
            shard.load()
        self._is_changed = False

    def store(self) -> None:
        """Write this trainer's rows and state to shared memory, if a step changed them.

        Other trainers may read them after the next barrier.
        """
        if self._is_changed:
            for shard in self._shards.values():
                shard.store()
        self._is_changed = False

    def owned_rows(self, name: str) -> Tensor:
        """Return the rows (R, D) of a table that this trainer owns, on the device."""
        return self._shards[name].rows

    def routes(
        self, batch: int, node_ids: Mapping[str, Tensor], add: Callable[[Ids], OnDevice]
    ) -> dict[str, Route]:
        """Exchange the node ids of a batch's rows; no row is read.

        Parameters
        ----------
        batch : int
            Number of the batch, which must be the same on every trainer.
        node_ids : mapping of str to (U,) int64 tensor
            For each table, in the same order on every trainer: distinct node ids, ascending.
        add : callable
            Adds an array to what is copied to the device.
        """
        if self._host.size == 1:
            return {name: self._own_route(name, ids, add) for name, ids in node_ids.items()}
        num_ranks, num_tables = self._host.size, len(node_ids)
        by_rank = [
            np.split(ids.numpy(), np.searchsorted(ids.numpy(), self._starts[name][1:-1]))
            for name, ids in node_ids.items()
        ]
        # For each rank: rows of each table that it shall give, and rows of each that are asked for in all.
        counts = np.empty((num_ranks, 2 * num_tables + 1), np.int64)
        for place, pieces in enumerate(by_rank):
            counts[:, place] = [len(piece) for piece in pieces]
            counts[:, num_tables + place] = counts[:, place].sum()
        received = exchange_counts(self._host, counts, batch, "exchange of rows")
        num_requested, num_served = counts[:, :num_tables], received[:, :num_tables]
        is_active: list[bool] = np.any(received[:, num_tables:-1], axis=0).tolist()
        sent = np.concatenate([pieces[rank] for rank in range(num_ranks) for pieces in by_rank])
        arrived = np.empty(int(num_served.sum()), np.int64)
        out_bytes, in_bytes = (8 * num_requested.sum(1)).tolist(), (8 * num_served.sum(1)).tolist()
        self._host.messages(sent.view(np.uint8), out_bytes, arrived.view(np.uint8), in_bytes)
        # Rank by rank and, in it, table by table.
        requests = np.split(arrived, np.cumsum(num_served.ravel())[:-1])
        routes = {}
        for place, name in enumerate(node_ids):
            positions = np.concatenate(requests[place::num_tables]) - self._starts[name][self.local_rank]
            targets, places = np.unique(positions, return_inverse=True)
            numbers = num_requested[:, place].tolist(), num_served[:, place].tolist()
            routes[name] = Route(*numbers, add(positions), add(targets), add(places), is_active[place])
        return routes

    def _own_route(self, name: str, ids: Tensor, add: Callable[[Ids], OnDevice]) -> Route:
        """Return the route of distinct rows that all are this trainer's; the ids may be on the device."""
        positions = ids - int(self._starts[name][0])
        there = add(positions.numpy()) if ids.device.type == "cpu" else OnDevice(positions)
        return Route([len(ids)], [len(ids)], there, there, there, len(ids) > 0)

    def fetch(self, name: str, route: Route) -> Tensor:
        """Return the rows of a route on the device, as often as asked for; the next step updates along it."""
        self._open[name] = route
        rows = self._shards[name].rows.index_select(0, route.positions.tensor)
        if self._host.size > 1:
            rows = self._network.rows(rows, route.num_served, route.num_requested)
        return rows if route.repeats is None else rows.repeat_interleave(route.repeats.tensor, dim=0)

    @torch.no_grad()
    def step_rows(
        self,
        gradients: Sequence[tuple[Any, Tensor, Tensor]],
        extra: int = 0,
        other_squares: float = 0.0,
        number: int = 0,
    ) -> UpdateResult:
        """Apply the gradients of the rows that were fetched last, see :meth:`SparseOptimizer.step_rows`.

        `gradients` are on the device. For each table that is trained, the same ones on all trainers:
        embedding, ids, and gradients of what its open route fetched. Then, where all rows of a table have
        one: embedding, the ids that this trainer owns, and gradients (R, D), which are changed.
        """
        self._enter("exchange")
        fetched: dict[str, Tensor] = {}
        owned: dict[str, Tensor] = {}
        for embedding, _, rows in gradients:
            name = self._names[id(embedding)]
            (owned if name in fetched else fetched)[name] = rows
        sums = {name: self._summed(name, rows, owned.get(name)) for name, rows in fetched.items()}
        factor = 1.0
        if (clipping := self.optimizer.clipping) is not None:
            merged = [rows for _, rows in sums.values()]
            squares = sum(clipped_squares(rows, clipping.value) for rows in merged)
            factor = clipping.scale(merged, squares, other_squares, self._host.sum)
        self._enter("update")
        active = [name in sums and (name in owned or self._open[name].is_active) for name in self._shards]
        steps = self.optimizer.count_step(active, number)
        none = torch.zeros((), dtype=torch.int64, device=self.device)
        num_bad = [
            shard.update(step, *sums[name], self.is_compiled) if name in sums else none
            for step, (name, shard) in zip(steps, self._shards.items())
        ]
        self._is_changed = True
        self._enter("waiting")
        # Until here nothing has waited for the device.
        numbers = np.array([*torch.stack(num_bad).tolist(), extra], np.int64)
        *all_bad, extra_sum = self._host.sum(numbers).tolist()
        self.optimizer.report_nonfinite(np.array(all_bad, np.int64))
        return UpdateResult(extra_sum, factor)

    def _summed(self, name: str, gradients: Tensor, owned: Tensor | None) -> tuple[Tensor, Tensor]:
        """Send the gradients of a route to the owners of its rows; return this trainer's rows and their sums.

        `owned` has gradients of all rows that this trainer owns, to which the others are added.
        """
        route = self._open[name]
        if route.repeats is not None and len(gradients):
            # In the order of the times, on every device.
            lengths = route.repeats.tensor
            gradients = torch.segment_reduce(gradients, "sum", lengths=lengths, axis=0, unsafe=True)
        if self._host.size == 1 and owned is None:
            return route.targets.tensor, gradients
        if self._host.size > 1:
            gradients = self._network.rows(gradients, route.num_requested, route.num_served)
        if owned is None:
            targets, places = route.targets.tensor, route.places.tensor
            sums = gradients.new_zeros((len(targets), gradients.shape[1]))
        else:
            sums, places = owned, route.positions.tensor
            targets = torch.arange(len(owned), device=owned.device)
        ends = np.cumsum([0, *route.num_served]).tolist()
        # No row occurs twice in what one trainer sent, so the order of the sums is that of this loop, on
        # every device: this trainer's first.
        for rank in sorted(range(self._network.size), key=lambda rank: rank != self._network.rank):
            run = slice(ends[rank], ends[rank + 1])
            sums.index_add_(0, places[run], gradients[run])
        return targets, sums
