"""Exchange of queries between trainers: every trainer scores the queries of all, each against its own rows.

Three rounds of messages a batch, none of which grows with the number of entities:

1. :meth:`QueryExchange.gather`: queries, keys and factors of every trainer to every trainer.
2. :meth:`QueryExchange.share`: three numbers a query of every shard to every trainer. A loss that reads the
   answers has two rounds, the first of which is :meth:`QueryExchange.gather_answers`.
3. :meth:`QueryExchange.return_gradients`: parts of the queries' gradients to the trainers of the queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from dglkge.model.full_losses import AnswerScores
from dglkge.optim.alltoall import Alltoall
from dglkge.optim.workspace import Scratch
from dglkge.typing import Floats, Ids


@dataclass(frozen=True)
class QueryBlock:
    """Queries (Q, D) float32 that are compared with the rows of one table, and the factor (Q,) of each one's
    loss.

    They are on the host, or where they were computed and shall be scored: of one trainer they do not travel.
    ``keys`` (Q,) determine the true answers: the node id of the only one, or the number of the query.
    """

    queries: torch.Tensor
    keys: Ids
    factors: Floats

    def __len__(self) -> int:
        return len(self.keys)


class QueryExchange:
    """Queries of all trainers, block by block, of a width each. Every method is a collective.

    ``sent_bytes`` are those sent to other machines since the start.
    """

    def __init__(self, group: Alltoall, dims: Sequence[int], trainers_per_machine: int) -> None:
        self._group = group
        # What a query is in a message.
        query_of = [("key", np.int64), ("factor", np.float32)]
        self._records = [np.dtype([*query_of, ("query", np.float32, (dim,))]) for dim in dims]
        # Ranks are numbered machine by machine; used for the count of sent bytes only.
        machines = np.arange(group.size) // trainers_per_machine
        self._is_remote = machines != machines[group.rank]
        self._scratch = Scratch()
        self.sent_bytes = 0

    def gather(self, blocks: Sequence[QueryBlock]) -> list[QueryBlock]:
        """Return each block with the queries of all trainers, rank after rank; valid until the next call."""
        size = self._group.size
        counts = np.array([len(block) for block in blocks], np.int64)
        # (size, blocks): all ranks need the counts of all, to cut the messages and to place the queries.
        self._counts = self._group.counts(np.tile(counts, (size, 1)))
        self._ends = np.cumsum(self._counts, axis=0)
        if size == 1:
            return list(blocks)
        in_bytes = (self._counts * [record.itemsize for record in self._records]).sum(1).tolist()
        received = self._scratch.bytes("received", sum(in_bytes))
        message = self._scratch.bytes("sent", in_bytes[self._group.rank])
        for block, records in zip(blocks, self._records_in(message, counts)):
            records["key"], records["factor"] = block.keys, block.factors
            records["query"] = block.queries.cpu().numpy()
        self._send(message, received, in_bytes)
        return self._unpack(np.split(received, np.cumsum(in_bytes)[:-1]))

    def _records_in(self, message: npt.NDArray[np.uint8], counts: Ids) -> list[np.ndarray]:
        """Return the records of each block in a message, which has so many of each."""
        ends = np.cumsum(counts * [record.itemsize for record in self._records])[:-1]
        return [part.view(record) for part, record in zip(np.split(message, ends), self._records)]

    def _unpack(self, messages: Sequence[npt.NDArray[np.uint8]]) -> list[QueryBlock]:
        """Sort the messages of all ranks by block."""
        gathered = []
        for number, (total, record) in enumerate(zip(self._ends[-1].tolist(), self._records)):
            queries = self._scratch.take(number, total, *record["query"].shape)
            gathered.append(QueryBlock(queries, np.empty(total, np.int64), np.empty(total, np.float32)))
        for rank, message in enumerate(messages):
            parts = self._records_in(message, self._counts[rank])
            for number, (block, records) in enumerate(zip(gathered, parts)):
                run = self._run(rank, number)
                block.keys[run], block.factors[run] = records["key"], records["factor"]
                block.queries.numpy()[run] = records["query"]
        return gathered

    def _run(self, rank: int, block: int) -> slice:
        """Return the run of a rank's queries in a block."""
        end = int(self._ends[rank, block])
        return slice(end - int(self._counts[rank, block]), end)

    def own_run(self, block: int) -> slice:
        """Return the run of this trainer's queries in a gathered block."""
        return self._run(self._group.rank, block)

    def gather_answers(self, blocks: Sequence[tuple[Ids, Floats]]) -> list[AnswerScores]:
        """Return the answers of all shards for each block, from query and score of each of this shard's."""
        counts = np.array([len(scores) for _, scores in blocks], np.int64)
        longest = self._group.counts(np.tile(counts, (self._group.size, 1))).max(0)
        # Padded to the longest of all ranks, with a query that there is not.
        padded = [np.full((2, length), -1.0) for length in longest]
        for array, (query_of, scores) in zip(padded, blocks):
            array[0, : len(scores)], array[1, : len(scores)] = query_of, scores
        gathered = []
        for shared, own_count in zip(self.share(padded), counts.tolist()):
            is_answer = shared[:, 0] >= 0
            query_of, scores = (shared[:, place][is_answer] for place in (0, 1))
            start = int(is_answer[: self._group.rank].sum())
            own_run = slice(start, start + own_count)
            gathered.append(AnswerScores(query_of.astype(np.int64), scores.astype(np.float32), own_run))
        return gathered

    def share(self, numbers: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the numbers (S, ...) of all shards for each block, from this shard's (...)."""
        size = self._group.size
        if size == 1:
            return [array[None] for array in numbers]
        message = np.concatenate([array.reshape(-1).view(np.uint8) for array in numbers])
        received = np.empty((size, len(message)), np.uint8)
        self._send(message, received.reshape(-1), [len(message)] * size)
        shared, start = [], 0
        for array in numbers:
            piece = received[:, start : start + array.nbytes]
            # A copy, as a slice of columns is not contiguous and cannot be viewed as numbers.
            shared.append(piece.copy().view(array.dtype).reshape(size, *array.shape))
            start += array.nbytes
        return shared

    def return_gradients(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the gradients (q, D) of this trainer's queries of each block, summed over all shards.

        ``parts`` (Q, D) float32 are this shard's for the queries of all trainers.
        """
        size, rank = self._group.size, self._group.rank
        if size == 1:
            return list(parts)
        runs = [[self._run(other, block) for block in range(len(parts))] for other in range(size)]
        pieces = [[part[run] for part, run in zip(parts, of_rank)] for of_rank in runs]
        num_bytes = np.array([sum(piece.nbytes for piece in of_rank) for of_rank in pieces])
        # The own part is added from `parts` directly.
        is_other = np.arange(size) != rank
        out_bytes, in_bytes = num_bytes * is_other, num_bytes[rank] * is_other
        message = self._scratch.bytes("sent", int(out_bytes.sum()))
        others = np.flatnonzero(is_other)
        sent = [piece.reshape(-1).numpy() for other in others for piece in pieces[other]]
        np.concatenate(sent, out=message.view(np.float32))
        received = self._scratch.bytes("received", int(in_bytes.sum()))
        self._group.messages(message, out_bytes.tolist(), received, in_bytes.tolist())
        self.sent_bytes += int(out_bytes[self._is_remote].sum())
        lengths = (size - 1) * [piece.numel() for piece in pieces[rank]]
        arrived = iter(torch.from_numpy(received.view(np.float32)).split(lengths))
        # Sums in the order of ranks, so that a repeated run has the same bits.
        sums = [torch.zeros(piece.shape) for piece in pieces[rank]]
        for other in range(size):
            for total, piece in zip(sums, pieces[rank]):
                total += piece if other == rank else next(arrived).view_as(total)
        return sums

    def _send(
        self, message: npt.NDArray[np.uint8], received: npt.NDArray[np.uint8], in_bytes: list[int]
    ) -> None:
        """Send one message to every trainer."""
        self._group.share(message, received, in_bytes)
        self.sent_bytes += len(message) * int(self._is_remote.sum())
