"""Which lookup the configuration chooses."""

from __future__ import annotations

from typing import Any

import torch

from dglkge.config import load_config
from dglkge.training.building.tables import choose_lookup


class Tables:
    used: tuple[Any, ...] | None = None

    def use_exchange(self, *arguments: Any) -> None:
        self.used = arguments


def choose(num_machines: int, *settings: str) -> Any:
    """Return what is chosen: nothing, or the arguments of the exchange."""
    tables: Any = Tables()
    choose_lookup(load_config(None, ["dataset=toy", *settings]), tables, num_machines)
    return tables.used


def test_one_machine_exchanges_nothing() -> None:
    assert choose(1) is None
    assert choose(1, "training.staleness=1", "training.wire=bfloat16") is None


def test_several_machines_exchange_unless_told_otherwise() -> None:
    group, *others = choose(2)
    assert others == [torch.float32, 0] and group.size == 1
    _, *others = choose(2, "training.staleness=1", "training.wire=bfloat16")
    assert others == [torch.bfloat16, 1]
    assert choose(2, "training.lookup=kvstore") is None
