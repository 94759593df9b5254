"""Ctrl-C, SIGTERM and SIGHUP to the launcher: recorded while a job runs, raised as an exception otherwise.

While processes of a job run, the supervisor's loop decides what a signal means, so a handler only records it.
Before and after, the launcher connects, copies files or sleeps: an exception ends that at once, and
``finally`` blocks release machines and leases.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Mapping
from types import FrameType

from dglkge.distributed.preemption import STOP_SIGNALS, handled
from dglkge.errors import FAILURE_STATUS, exit_status_of
from dglkge.launch.background import Report

_received: list[int] = []
"""Stop signals that this process has received while one of the handlers was installed."""


class StoppedBySignal(KeyboardInterrupt):
    """SIGTERM or SIGHUP to the launcher while no process of a job runs.

    A KeyboardInterrupt, because it must pass every handler of ordinary errors as Ctrl-C does.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def status_of_stop(number: int) -> int:
    """Return the launcher's exit status after a signal, where no trainer has committed.

    128 + the number, as shells have it; but 1 after SIGTERM, because 143 means that the state is committed.
    """
    return FAILURE_STATUS if number == signal.SIGTERM else 128 + number


def describe_stop(error: BaseException) -> tuple[str, int]:
    """Return words for a message, and the exit status, for an exception that ends the launcher."""
    if isinstance(error, StoppedBySignal):
        return f"stopped by {error}", status_of_stop(error.number)
    return "interrupted" if isinstance(error, KeyboardInterrupt) else str(error), exit_status_of(error)


FORWARD_SECONDS = 2.0
"""Pause before a node's stop signal counts: a scheduler that signals all nodes reaches this launcher too."""


def forward_stop(report: Report, name: str, number: int) -> None:
    """Give this launcher a stop signal that a node has received, unless it has one already.

    It is called on an event loop.
    """

    def send() -> None:
        # A second signal to the launcher would end the trainers before they have committed.
        if not _received:
            _received.append(number)  # its handler runs later, in the main thread
            report(f"{name} received {signal.Signals(number).name}: stopping the job")
            signal.pthread_kill(threading.main_thread().ident or 0, number)

    if number in STOP_SIGNALS:
        asyncio.get_running_loop().call_later(FORWARD_SECONDS, send)


def stop_signals_raised() -> contextlib.AbstractContextManager[object]:
    """Raise :class:`StoppedBySignal` in the main thread on SIGTERM and SIGHUP inside the block.

    Ctrl-C raises KeyboardInterrupt as always. Ignored signals stay ignored (``nohup``).
    """

    def stop(number: int) -> None:
        raise StoppedBySignal(number)

    return _received_by({signal.SIGTERM: stop, signal.SIGHUP: stop})


def signals_recorded(recorded: list[int]) -> contextlib.AbstractContextManager[object]:
    """Append the numbers of Ctrl-C, SIGTERM and SIGHUP to a list inside the block.

    Ignored signals stay ignored (``nohup``).
    """
    return _received_by(dict.fromkeys(STOP_SIGNALS, recorded.append))


def _received_by(handlers: Mapping[int, Callable[[int], None]]) -> contextlib.AbstractContextManager[object]:
    """Record the signals of some handlers, and call these, inside the block."""

    def handle(number: int, _frame: FrameType | None) -> None:
        _received.append(number)
        handlers[number](number)

    return handled(handlers, handle)
