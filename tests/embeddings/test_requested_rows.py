"""Rows that DGL's servers are asked for some batches before they are used."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dglkge.distributed.dgl_compat import dgl
from dglkge.embeddings.row_lookup import RequestedLookup
from tests.embeddings.memory_tables import Machines, draw

rpc = dgl.distributed.rpc
AHEAD = 3


class Servers:
    """DGL's servers: read rows when they are asked, and answer in any order."""

    def __init__(self, machines: Machines) -> None:
        self.machines = machines
        self.answers: list[Any] = []
        self.num_asked = 0
        self._random = np.random.default_rng(3)

    def ask(self, requests: list[tuple[int, Any]]) -> dict[int, int]:
        """Take requests; returns the place of each by its number."""
        places = {}
        for place, (machine, request) in enumerate(requests):
            ids, name = request.id_tensor, request.name
            assert self.machines.is_local(name, ids, machine).all() and len(ids.unique()) == len(ids) > 0
            self.num_asked += len(ids)
            self.answers.append((len(self.answers), self.machines.rows[name][ids]))
            places[len(self.answers) - 1] = place
        return places

    def answer(self) -> Any:
        """Return an answer that was not returned before."""
        waiting = [place for place, answer in enumerate(self.answers) if answer is not None]
        place = self._random.choice(waiting)
        number, rows = self.answers[place]
        self.answers[place] = None
        return SimpleNamespace(msg_seq=number, data=None, tensors=rows)


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Servers:
    made = Servers(Machines(3))
    monkeypatch.setattr(rpc, "send_requests_to_machine", made.ask)
    monkeypatch.setattr(rpc, "recv_rpc_message", made.answer)
    monkeypatch.setattr(
        rpc, "deserialize_from_payload", lambda _, __, rows: SimpleNamespace(data_tensor=rows)
    )
    return made


def lookup_of(machines: Machines, machine: int) -> RequestedLookup:
    tables = machines.tables(machine)
    for name, table in tables.items():
        table.embedding = SimpleNamespace(_tensor=SimpleNamespace(_name=name))
        table.typed = lambda rows: rows
    return RequestedLookup(tables, AHEAD)


@pytest.mark.parametrize("machine", [0, 1, 2])
def test_remote_rows_are_those_of_the_request_and_own_rows_of_now(servers: Servers, machine: int) -> None:
    """The oracle keeps all tables as they were at each step; a batch is asked for three steps before."""
    machines, seen, asked_at = servers.machines, [], {}
    lookup, away = lookup_of(machines, machine), 0
    for step in range(12):
        seen.append({name: rows.clone() for name, rows in machines.rows.items()})
        table_ids = draw(machines, step, machine)
        located = lookup.rows(step, table_ids)
        assert located.keys() == table_ids.keys()
        for name, ids in table_ids.items():
            local = machines.is_local(name, ids, machine)[:, None]
            then = seen[asked_at.get(step, step)][name]
            expected = torch.where(local, machines.rows[name][ids], then[ids])
            assert torch.equal(located[name].copied(), expected)
            away += len(ids[~local[:, 0]].unique())
        for number in range(step + 1, step + 1 + AHEAD):
            if number not in asked_at:
                lookup.announce(number, draw(machines, number, machine))
                asked_at[number] = step
        if step == 6:  # as before a commit: nothing is on its way, and what comes next is asked for anew
            lookup.finish()
            assert all(answer is None for answer in servers.answers)
            away = servers.num_asked
            asked_at = {}
        for rows in machines.rows.values():
            rows += 1 + step
    lookup.finish()
    assert servers.num_asked >= away > 0
