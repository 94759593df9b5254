"""When :func:`dglkge.elastic` commits."""

from __future__ import annotations

import pytest

from dglkge.errors import InputError
from dglkge.training import elastic
from dglkge.training.elastic import Cadence


def test_units_of_the_cadence(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(elastic.time, "monotonic", lambda: clock[0])
    cadence = Cadence.of({"epochs": 2, "batches": 3, "minutes": 0.5})
    cadence.committed()
    assert [epochs for epochs in range(1, 7) if cadence.is_due_after(epochs)] == [2, 4, 6]
    assert [batches for batches in range(1, 8) if cadence.is_due(batches)] == [3, 6]
    clock[0] = 30.0
    assert cadence.is_due(1)
    cadence.committed()
    clock[0] = 59.0
    assert not cadence.is_due(1)
    never = Cadence.of({})
    never.committed()
    clock[0] = 1e9
    assert not never.is_due(1) and not never.is_due_after(1)


@pytest.mark.parametrize(
    ("every", "message"),
    [
        ({"batches": 1.5}, "elastic: every batches is 1.5; expected a number of at least 0"),
        ({"minutes": -1}, "elastic: every minutes is -1; expected"),
        ({"epochs": True}, "elastic: every epochs is True; expected"),
        ({"steps": 1}, "unknown unit in every 'steps'"),
    ],
)
def test_what_is_no_cadence(every: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Cadence.of(every)
