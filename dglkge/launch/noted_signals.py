"""Signals to the launcher that are noted instead of ending it."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

NOTED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def signals_noted(noted: list[int]) -> Iterator[None]:
    """Append the numbers of Ctrl-C, SIGTERM and SIGHUP to a list instead of dying of them.

    Signals that are ignored (``nohup``) stay ignored; the handlers before come back at the end.
    """

    def note(number: int, _frame: FrameType | None) -> None:
        noted.append(number)

    before = {number: signal.getsignal(number) for number in NOTED_SIGNALS}
    for number in NOTED_SIGNALS:
        if before[number] != signal.SIG_IGN:
            signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
