"""Requests of rows to DGL's servers that are answered, in any order, while a trainer goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dglkge.distributed.dgl_compat import dgl, request_timeout
from dglkge.embeddings.embedding_table import EmbeddingTable
from dglkge.embeddings.row_exchange import Ids


class ServerRequests:
    """Sends requests and receives their answers; until all are received nothing else may be asked.

    DGL's own pull takes any answer that comes for its own.

    Attributes
    ----------
    num_bytes : int
        Bytes of ids and rows so far.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._answers: dict[int, Tensor] = {}

    def send(self, table: EmbeddingTable, ids_by_machine: Sequence[Ids]) -> list[int]:
        """Ask machines for rows of a table; returns at once, with the number of each request."""
        kvstore = dgl.distributed.kvstore
        name = table.embedding._tensor._name
        requests = [
            (machine, kvstore.PullRequest(name, torch.from_numpy(ids)))
            for machine, ids in enumerate(ids_by_machine)
            if len(ids)
        ]
        self.num_bytes += sum(ids.nbytes for ids in ids_by_machine)
        # A dict from numbers to places, in the order of the requests.
        return list(dgl.distributed.rpc.send_requests_to_machine(requests))

    def receive(self, table: EmbeddingTable, numbers: Sequence[int]) -> Tensor:
        """Wait for the answers to some requests; returns their rows (n, D) as float32, in this order."""
        with request_timeout():
            while not all(number in self._answers for number in numbers):
                self._receive_one()
        found = [self._answers.pop(number) for number in numbers]
        self.num_bytes += sum(rows.nbytes for rows in found)
        return (
            torch.cat([table.typed(rows).float() for rows in found]) if found else torch.empty(0, table.dim)
        )

    def _receive_one(self) -> None:
        rpc = dgl.distributed.rpc
        message: Any = rpc.recv_rpc_message()
        answer = rpc.deserialize_from_payload(
            dgl.distributed.kvstore.PullResponse, message.data, message.tensors
        )
        self._answers[message.msg_seq] = answer.data_tensor
