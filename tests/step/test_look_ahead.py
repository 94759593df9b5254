"""The next batch is made and planned while one computes, once, and only where its ids travel."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from dglkge.step.contracts import PhaseClock
from dglkge.step.planning import Plan, number_of
from dglkge.step.train_step import LookAhead


class Parts:
    """Batches, objective and row store in one that note what is asked of them."""

    order_mark = 0

    def __init__(self, num_ahead: int) -> None:
        self.num_ahead = num_ahead
        self.calls: list[str] = []

    def __len__(self) -> int:
        return 3

    def begin(self, epoch: int, index: int) -> None:
        self.calls.append(f"begin {index}")

    def batch(self, epoch: int, index: int, enter: Any) -> Any:
        self.calls.append(f"batch {index}")
        return SimpleNamespace(epoch=epoch, index=index)

    def plan(self, batch: Any) -> Plan:
        self.calls.append(f"plan {batch.index}")
        return Plan(number_of(batch), 1, {}, [])

    def planning(self) -> AbstractContextManager[None]:
        return nullcontext()

    def prepare(self, plan: Plan) -> Plan:
        return plan

    def announce(self, plan: Plan) -> None:
        self.calls.append(f"announce {plan.number}")


@pytest.mark.parametrize(("num_ahead", "calls"), [
    (0, "begin 1, batch 1, plan 1, begin 2, batch 2, plan 2"),
    (1, "batch 1, plan 1, announce 1, begin 1, batch 2, plan 2, announce 2, begin 2"),
    (9, "batch 1, plan 1, announce 1, batch 2, plan 2, announce 2, begin 1, begin 2"),
])  # fmt: skip
def test_each_batch_is_made_and_planned_once(num_ahead: int, calls: str) -> None:
    """While the batch that many places before computes, and begun when the loop asks for it."""
    parts: Any = Parts(num_ahead)
    ahead = LookAhead(parts, parts, parts, PhaseClock())
    for index in range(3):
        batch = ahead.batch(0, index, None)
        assert ahead.plan(batch).number == index
        ahead.look(batch)
    assert ", ".join(parts.calls) == f"begin 0, batch 0, plan 0, {calls}"


def test_another_batch_than_the_next_is_planned_anew() -> None:
    parts: Any = Parts(1)
    ahead = LookAhead(parts, parts, parts, PhaseClock())
    ahead.look(ahead.batch(0, 0, None))
    assert ahead.plan(ahead.batch(1, 2, None)).number == (1 << 32) + 2
    # What was planned in vain is dropped.
    ahead.plan(ahead.batch(0, 1, None))
    assert [call for call in parts.calls if call.startswith("plan")] == ["plan 1", "plan 2", "plan 1"]
