"""Lookup of the rows of a batch: from shared memory, DGL's kvstore, or the trainers' own exchange."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dglkge.distributed.dgl_compat import dgl, request_timeout
from dglkge.embeddings.embedding_table import EmbeddingTable
from dglkge.embeddings.row_exchange import RowExchange, RowRequests
from dglkge.kernels.rows import copy_rows
from dglkge.optim.narrow_rows import is_narrow
from dglkge.typing import Floats, Ids


@dataclass(frozen=True)
class FoundRows:
    """Rows of one table, one for each time that a batch has the id.

    Compiled loops take the addresses (n,) of the rows, of `dim` float32 numbers each: a choice between two
    arrays for every row costs them as much as reading it. `arrays` keeps the memory alive.
    """

    addresses: Ids
    dim: int
    arrays: tuple[Floats, ...]

    @classmethod
    def in_array(cls, rows: Floats, places: Ids | None = None) -> FoundRows:
        """Find rows (N, D) of one array: those at some places (n,), or all in their order."""
        if places is None:
            places = np.arange(len(rows))
        return cls(_addresses(rows, places), rows.shape[1], (rows,))

    @classmethod
    def in_either(cls, local: Floats, remote: Floats, places: Ids) -> FoundRows:
        """Find rows of two arrays, (N, D) and (U, D): places (n,) in ``local``, -1 - i in ``remote``."""
        # Both are computed for all places; addresses are only numbers until a loop reads the chosen ones.
        addresses = np.where(places >= 0, _addresses(local, places), _addresses(remote, -1 - places))
        return cls(addresses, local.shape[1], (local, remote))

    def part(self, place: slice) -> FoundRows:
        """Return some of the rows."""
        return FoundRows(self.addresses[place], self.dim, self.arrays)

    def in_place(self, room: object) -> FoundRows:
        """Return the rows themselves: they are readable where they are."""
        return self

    def copied(self, out: Tensor | None = None) -> Tensor:
        """Return a copy (n, D) float32, in ``out`` if given."""
        rows = torch.empty(len(self.addresses), self.dim) if out is None else out
        copy_rows(self.addresses, rows.numpy())
        return rows


def _addresses(rows: Floats, places: Ids) -> Ids:
    """Return the addresses of rows of an array."""
    # Addresses stay valid only as long as the array: FoundRows.arrays holds a reference.
    base: int = rows.__array_interface__["data"][0]
    return base + places * rows.strides[0]


TableIds = Mapping[str, Tensor]
"""Node ids (n,) int64 to look up in some tables, by name; ids may repeat."""


Room = Callable[[], Tensor]
"""Returns room (n, D) float32 for copies."""


class RowLookup:
    """Fetches the rows of one batch after the other; what is said of reading ahead does nothing here.

    Attributes
    ----------
    num_ahead : int
        Batches that should be announced, each once, before rows are fetched for the first of them.
    """

    num_ahead = 0

    @property
    def sent_bytes(self) -> int:
        """Bytes that this trainer sent to other machines, or that their servers sent to it."""
        raise NotImplementedError

    def announce(self, batch: int, table_ids: TableIds) -> None:
        """Start the lookup of a batch that ``rows`` is called for next, or after those announced before."""

    def rows(self, batch: int, table_ids: TableIds) -> Mapping[str, FoundRows | DirectRows]:
        """Locate the rows (n, D) of each table's ids (n,), to be read until the next lookup.

        ``in_place(room)`` returns them where they are stored, or copies of those that cannot be read there;
        ``copied(out)`` copies them as float32.
        """
        raise NotImplementedError

    def before_update(self) -> None:
        """Wait until the rows of this machine have been read for the announced batch."""

    def finish(self) -> None:
        """Wait for the work in the background, before this trainer exits."""


@dataclass
class DirectLookup(RowLookup):
    """Rows from this machine's shared memory, and remote rows through DGL's kvstore."""

    tables: Mapping[str, EmbeddingTable]

    @property
    def sent_bytes(self) -> int:
        return sum(table.pulled_bytes for table in self.tables.values())

    def rows(self, batch: int, table_ids: TableIds) -> dict[str, DirectRows]:
        return {name: DirectRows(self.tables[name], ids) for name, ids in table_ids.items()}


@dataclass(frozen=True)
class DirectRows:
    """Rows (n, D) of a table's node ids (n,), which are read when they are used."""

    table: EmbeddingTable
    ids: Tensor

    def in_place(self, room: Room) -> FoundRows:
        """Return the rows in shared memory, or copies where some are elsewhere or of 16 bits."""
        rows = self.table.local_rows
        # Compiled loops take addresses of float32.
        if self.table.is_whole and not is_narrow(rows):
            return FoundRows.in_array(rows.numpy(), self.ids.numpy())
        return FoundRows.in_array(self.copied(room()).numpy())

    def copied(self, out: Tensor) -> Tensor:
        """Copy the rows; those of other machines come through the kvstore."""
        return self.table.gather(self.ids, out)


class RequestedLookup(RowLookup):
    """Rows of other machines from DGL's servers, which are asked for them some batches before.

    Rows of this machine are always read when they are needed. Nothing else may be asked of the servers
    before :meth:`finish`: DGL's own pull takes any answer that comes for its own.

    Parameters
    ----------
    tables : mapping of str to EmbeddingTable
    num_ahead : int
        Batches between the request and the use of a row.
    """

    def __init__(self, tables: Mapping[str, EmbeddingTable], num_ahead: int) -> None:
        self._tables, self.num_ahead = tables, num_ahead
        self._num_bytes = 0
        self._answers: dict[int, Tensor] = {}
        self._announced: dict[int, dict[str, tuple[_Route, list[int]]]] = {}

    @property
    def sent_bytes(self) -> int:
        return self._num_bytes

    def announce(self, batch: int, table_ids: TableIds) -> None:
        requests = self._announced[batch] = {}
        for name, ids in table_ids.items():
            table = self._tables[name]
            ends = table.range_starts[1:]
            route = _Route(table, ids, functools.partial(np.searchsorted, ends, side="right"), len(ends))
            requests[name] = route, self._send(table, route.by_rank)

    def rows(self, batch: int, table_ids: TableIds) -> dict[str, FoundRows]:
        if batch not in self._announced:
            self.announce(batch, table_ids)
        return {
            name: route.located(self._receive(self._tables[name], numbers))
            for name, (route, numbers) in self._announced.pop(batch).items()
        }

    def finish(self) -> None:
        for batch in list(self._announced):
            self.rows(batch, {})

    def _send(self, table: EmbeddingTable, ids_by_machine: Sequence[Ids]) -> list[int]:
        """Ask machines for rows of a table; returns at once, with the number of each request."""
        name = table.embedding._tensor._name
        requests = [
            (machine, dgl.distributed.kvstore.PullRequest(name, torch.from_numpy(ids)))
            for machine, ids in enumerate(ids_by_machine)
            if len(ids)
        ]
        self._num_bytes += sum(ids.nbytes for ids in ids_by_machine)
        # A dict from numbers to places, in the order of the requests.
        return list(dgl.distributed.rpc.send_requests_to_machine(requests))

    def _receive(self, table: EmbeddingTable, numbers: Sequence[int]) -> Tensor:
        """Wait for the answers to some requests; returns their rows (n, D) as float32, in this order."""
        rpc = dgl.distributed.rpc
        with request_timeout():
            while not all(number in self._answers for number in numbers):
                message: Any = rpc.recv_rpc_message()
                kind = dgl.distributed.kvstore.PullResponse
                answer = rpc.deserialize_from_payload(kind, message.data, message.tensors)
                self._answers[message.msg_seq] = answer.data_tensor
        answers = [self._answers.pop(number) for number in numbers]
        self._num_bytes += sum(rows.nbytes for rows in answers)
        return torch.cat([torch.empty(0, table.dim), *(table.typed(rows).float() for rows in answers)])


class ExchangeLookup(RowLookup):
    """Rows of other machines through a :class:`RowExchange`; a collective, as is each of its methods.

    Rows of this machine are always read when they are needed. Ids of an announced batch travel in a
    thread while the caller computes. With ``staleness`` 0 the rows follow when they are requested; with
    1 they are read and travel right after the ids: those of other machines then are as they were before
    the update of the batch in between. Only one batch can be announced, and it may be dropped.

    Parameters
    ----------
    tables : mapping of str to EmbeddingTable
        In the order of the exchange's tables.
    exchange : RowExchange
    staleness : {0, 1}
    """

    num_ahead = 1

    def __init__(self, tables: Mapping[str, EmbeddingTable], exchange: RowExchange, staleness: int) -> None:
        self._tables = tables
        self._exchange = exchange
        self._reads_ahead = staleness > 0
        # One thread: exchanges are collectives, and two at once in one group could be paired wrongly.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="dglkge-lookup")
        self._announced: Future[_Prepared] | None = None
        # Set once the rows of this machine have been read for the announced batch.
        self._is_read = threading.Event()

    @property
    def sent_bytes(self) -> int:
        return self._exchange.sent_bytes

    def announce(self, batch: int, table_ids: TableIds) -> None:
        self._take_announced()
        self._is_read.clear()
        self._announced = self._thread.submit(self._prepare_ahead, batch, table_ids)

    def rows(self, batch: int, table_ids: TableIds) -> dict[str, FoundRows]:
        """Return the rows of each table's ids, for the announced batch or any other.

        Remote rows are valid until the next call, or the next announcement but one. RuntimeError if another
        trainer is at another batch, TimeoutError or ConnectionError if one did not take part.
        """
        # Also where another batch was announced: its exchange is finished first, so that the order of
        # collectives is the same on all trainers.
        prepared = self._take_announced(batch) or self._prepare(batch, table_ids)
        if prepared.rows is None:
            prepared.rows = self._exchange.send(prepared.requests, self._exchange.read(prepared.requests))
        received = zip(self._tables, prepared.routes, prepared.rows)
        return {name: route.located(rows) for name, route, rows in received if name in table_ids}

    def before_update(self) -> None:
        if self._announced is not None and self._reads_ahead:
            # Only the read matters: from then on the message holds the rows, and the update may change them.
            self._is_read.wait()

    def finish(self) -> None:
        self._take_announced()

    def _take_announced(self, batch: int | None = None) -> _Prepared | None:
        """Wait for the exchange of the announced batch; return its result if it is this batch.

        It is never cancelled, since the other trainers take part in it to its end.
        """
        announced, self._announced = self._announced, None
        prepared = None if announced is None else announced.result()
        return prepared if prepared is not None and prepared.batch == batch else None

    def _prepare(self, batch: int, table_ids: TableIds) -> _Prepared:
        """Exchange ids."""
        exchange, num_ranks = self._exchange, self._exchange.group.size
        routes = [
            _Route(table, table_ids.get(name), functools.partial(exchange.owners, number), num_ranks)
            for number, (name, table) in enumerate(self._tables.items())
        ]
        return _Prepared(batch, routes, exchange.exchange_ids([route.by_rank for route in routes], batch))

    @torch.no_grad()
    def _prepare_ahead(self, batch: int, table_ids: TableIds) -> _Prepared:
        """Exchange ids in the background, and with staleness 1 the rows as they are before the update."""
        try:
            prepared = self._prepare(batch, table_ids)
            if not self._reads_ahead:
                return prepared
            message = self._exchange.read(prepared.requests)
        finally:
            # Also after a failure: before_update must not block. The future's result raises it.
            self._is_read.set()
        prepared.rows = self._exchange.send(prepared.requests, message)
        return prepared


class _Route:
    """Requested ids of one table: places of rows, and distinct remote ids by rank or machine of the owner."""

    def __init__(
        self, table: EmbeddingTable, ids: Tensor | None, owners_of: Callable[[Ids], Any], count: int
    ) -> None:
        self._table = table
        all_ids: Ids = np.empty(0, np.int64) if ids is None else ids.numpy()
        away = np.flatnonzero((all_ids < table.first_node_id) | (all_ids >= table.end_node_id))
        # Each remote row travels once a batch, however often the batch has it.
        distinct, source = np.unique(all_ids[away], return_inverse=True)
        owners = owners_of(distinct)
        order = np.argsort(owners, kind="stable")
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        # As FoundRows takes them: a row of this machine, or -1 - i for the i-th of the rows that come.
        self._places = all_ids - table.first_node_id
        self._places[away] = -1 - place[source]
        self.by_rank = np.split(distinct[order], np.cumsum(np.bincount(owners, minlength=count))[:-1])

    def located(self, remote: Tensor) -> FoundRows:
        """Locate all rows: on this machine, and among the (U, D) received."""
        if not is_narrow(self._table.local_rows):
            return FoundRows.in_either(self._table.local_rows.numpy(), remote.numpy(), self._places)
        # Rows of 16 bits are copied: compiled loops take addresses of float32.
        here = np.flatnonzero(self._places >= 0)
        copies = self._table.widened(self._places[here])
        places = self._places.copy()
        places[here] = np.arange(len(here))
        return FoundRows.in_either(copies.numpy(), remote.numpy(), places)


@dataclass
class _Prepared:
    """A batch after the exchange of ids, with its remote rows where they may be stale."""

    batch: int
    routes: list[_Route]
    requests: RowRequests
    rows: list[Tensor] | None = None
