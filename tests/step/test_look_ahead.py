"""The next batch is made and planned while one computes, once, and only where its ids travel."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dglkge.step.contracts import PhaseClock
from dglkge.step.planning import Plan, number_of
from dglkge.step.train_step import LookAhead

NUM_BATCHES = 3


class Parts:
    """Batches, objective and row store that note what is asked of them."""

    order_mark = 0
    sent_bytes = 0

    def __init__(self, num_ahead: int) -> None:
        self.num_ahead = num_ahead
        self.calls: list[tuple[str, int]] = []

    def __len__(self) -> int:
        return NUM_BATCHES

    def begin(self, epoch: int, index: int) -> None:
        self.calls.append(("begin", index))

    def batch(self, epoch: int, index: int, enter: Any) -> Any:
        self.calls.append(("batch", index))
        return SimpleNamespace(epoch=epoch, index=index)

    def plan(self, batch: Any) -> Plan:
        self.calls.append(("plan", batch.index))
        return Plan(number_of(batch), 1, {}, [])

    def prepare(self, plan: Plan) -> Plan:
        """Prepare its rows: nothing."""
        return plan

    def announce(self, plan: Plan) -> None:
        self.calls.append(("announce", plan.number))


@pytest.mark.parametrize("num_ahead", [0, 1, 2, 9])
def test_each_batch_is_made_and_planned_once(num_ahead: int) -> None:
    parts: Any = Parts(num_ahead)
    ahead = LookAhead(parts, parts, parts, PhaseClock())
    ignored: Any = None
    for index in range(NUM_BATCHES):
        batch = ahead.batch(0, index, ignored)
        assert ahead.plan(batch).number == index
        ahead.look(batch)
    for name in ("begin", "batch", "plan"):
        assert [index for call, index in parts.calls if call == name] == [0, 1, 2]
    announced = [index for call, index in parts.calls if call == "announce"]
    assert announced == ([1, 2] if num_ahead else [])
    # Announced after the batch that many batches before, or after the first.
    begun = [parts.calls[: parts.calls.index(("announce", index))].count(("begin", 0)) for index in announced]
    assert begun == [1] * len(begun)
    if num_ahead > 1:
        assert parts.calls.index(("announce", 2)) < parts.calls.index(("begin", 1))
    if num_ahead:
        # Made while the batch before computes, and begun when the loop asks for it.
        assert parts.calls.index(("batch", 1)) < parts.calls.index(("begin", 1))


def test_another_batch_than_the_next_is_planned_anew() -> None:
    parts: Any = Parts(1)
    ahead = LookAhead(parts, parts, parts, PhaseClock())
    ignored: Any = None
    ahead.look(ahead.batch(0, 0, ignored))
    other = ahead.batch(1, 2, ignored)
    assert ahead.plan(other).number == (1 << 32) + 2
    # What was planned in vain is dropped.
    ahead.plan(ahead.batch(0, 1, ignored))
    assert [index for call, index in parts.calls if call == "plan"] == [1, 2, 1]
