"""Messages and sums between trainers that are all on one machine, through shared memory.

A trainer writes its message to its outbox (:mod:`dglkge.optim.outboxes`) with the place of each reader's
piece, and counts it as written; the others copy their pieces and count the message as read. Before the next
message a trainer waits until all have read the last one.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy import ndarray

from dglkge.optim.alltoall import Alltoall
from dglkge.optim.outboxes import Neighbours, Outbox, open_neighbours, usable

_WRITTEN, _READ, _FIRST_PLACE = range(3)


class SharedAlltoall(Alltoall):
    """The default process group; through shared memory where all trainers can read one another's.

    Its constructor is a collective, with the parameters of :class:`Alltoall`.
    """

    def __init__(self, timeout_seconds: float, purpose: str, duty: str) -> None:
        super().__init__(timeout_seconds, purpose=purpose, duty=duty)
        self._near: Neighbours | None = None
        self._round = 0
        if self.size == 1:
            return
        outbox = Outbox(_FIRST_PLACE + 2 * self.size) if usable() and self.device.type == "cpu" else None
        addresses = enumerate(self.gather(outbox.address if outbox else None))
        others = open_neighbours([(rank, address) for rank, address in addresses if rank != self.rank])
        # All trainers must take the same path.
        if all(self.gather(others is not None)) and outbox is not None and others is not None:
            self._near = Neighbours(outbox, others, timeout_seconds, purpose, duty)

    @property
    def is_near(self) -> bool:
        """Whether messages go through shared memory."""
        return self._near is not None

    def counts(self, counts: ndarray) -> ndarray:
        if self._near is None:
            return super().counts(counts)
        sent, received = np.ascontiguousarray(counts), np.empty_like(counts)
        row_bytes = [sent[0].nbytes] * self.size
        self.messages(
            sent.view(np.uint8).reshape(-1), row_bytes, received.view(np.uint8).reshape(-1), row_bytes
        )
        return received

    def messages(
        self, sent: ndarray, sent_bytes: list[int], received: ndarray, received_bytes: list[int]
    ) -> None:
        if self._near is None:
            super().messages(sent, sent_bytes, received, received_bytes)
            return
        ends = np.cumsum(sent_bytes)
        self._write(self._near, sent, ends - sent_bytes, ends)
        self._read(self._near, received, received_bytes)

    def share(self, message: ndarray, received: ndarray, received_bytes: list[int]) -> None:
        if self._near is None:
            super().share(message, received, received_bytes)
            return
        self._write(self._near, message, np.zeros(self.size, np.int64), np.full(self.size, len(message)))
        self._read(self._near, received, received_bytes)

    def sum_rows(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of float32 numbers (n,) of all trainers, added in float64 in the order of ranks.

        In shared memory each trainer adds a slice, and float32 goes both ways.
        """
        if self._near is None:
            total = values.double()
            if self.size > 1:
                self._wait(torch.distributed.all_reduce(total, async_op=True))
            return total
        near, numbers = self._near, values.detach().contiguous().numpy()
        bounds = np.array([len(numbers) * rank // self.size for rank in range(self.size + 1)])
        own = slice(int(bounds[self.rank]), int(bounds[self.rank + 1]))
        self._write(near, numbers.view(np.uint8), 4 * bounds[:-1], 4 * bounds[1:])
        near.wait(_WRITTEN, self._round)
        total_slice = np.zeros(own.stop - own.start)
        for piece in self._pieces(near):
            total_slice += piece.view(np.float32)
        near.outbox.fields[_READ] = self._round
        total = torch.empty(len(numbers))
        sizes = (4 * np.diff(bounds)).tolist()
        self.share(total_slice.astype(np.float32).view(np.uint8), total.numpy().view(np.uint8), sizes)
        return total

    def _write(self, near: Neighbours, message: ndarray, starts: ndarray, ends: ndarray) -> None:
        """Write a message, with the place of each rank's piece, once the last one was read."""
        near.wait(_READ, self._round)
        self._round += 1
        near.outbox.reserve(len(message))
        near.outbox.body[: len(message)] = message
        places = near.outbox.fields[_FIRST_PLACE:]
        places[: self.size], places[self.size : 2 * self.size] = starts, ends
        near.outbox.fields[_WRITTEN] = self._round

    def _pieces(self, near: Neighbours) -> list[ndarray]:
        """Return the piece for this trainer of every rank's message, as they lie in their outboxes."""
        boxes = {box.rank: box for box in near.others}
        pieces = []
        for rank in range(self.size):
            box = boxes.get(rank, near.outbox)
            start, end = box.fields[_FIRST_PLACE + self.rank :: self.size][:2].tolist()
            pieces.append(box.body[start:end])
        return pieces

    def _read(self, near: Neighbours, received: ndarray, received_bytes: list[int]) -> None:
        """Copy the pieces of all messages one after another."""
        near.wait(_WRITTEN, self._round)
        np.concatenate(self._pieces(near), out=received[: sum(received_bytes)])
        near.outbox.fields[_READ] = self._round
