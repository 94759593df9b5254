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
from collections.abc import Callable, Iterator, Mapping
from types import FrameType

from dglkge.distributed.preemption import STOP_SIGNALS, handled
from dglkge.errors import FAILURE_STATUS, INTERRUPTED_STATUS
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


def describe_stop(error: KeyboardInterrupt) -> tuple[str, int]:
    """Return words for a message, and the exit status, for an exception of Ctrl-C, SIGTERM or SIGHUP."""
    if isinstance(error, StoppedBySignal):
        return f"stopped by {error}", status_of_stop(error.number)
    return "interrupted", INTERRUPTED_STATUS


FORWARD_SECONDS = 2.0
"""Pause before a node's stop signal counts: a scheduler that signals all nodes reaches this launcher too."""


def stop_forwarder(report: Report) -> Callable[[str, int], None]:
    """Return a function that gives this launcher the first stop signal of a node, by name and number.

    Not if the launcher has received one itself. It is called on an event loop.
    """
    forwarded: list[int] = []

    def send(name: str, number: int) -> None:
        # A second signal to the launcher would end the trainers before they have committed.
        if not _received:
            report(f"{name} received {signal.Signals(number).name}: stopping the job")
            signal.pthread_kill(threading.main_thread().ident or 0, number)

    def forward(name: str, number: int) -> None:
        if not forwarded and number in STOP_SIGNALS:
            forwarded.append(number)
            asyncio.get_running_loop().call_later(FORWARD_SECONDS, send, name, number)

    return forward


def stop_signals_raised() -> contextlib.AbstractContextManager[None]:
    """Raise :class:`StoppedBySignal` in the main thread on SIGTERM and SIGHUP inside the block.

    Ctrl-C raises KeyboardInterrupt as always. Ignored signals stay ignored (``nohup``).
    """

    def stop(number: int) -> None:
        raise StoppedBySignal(number)

    return _received_by({signal.SIGTERM: stop, signal.SIGHUP: stop})


def signals_recorded(recorded: list[int]) -> contextlib.AbstractContextManager[None]:
    """Append the numbers of Ctrl-C, SIGTERM and SIGHUP to a list inside the block.

    Ignored signals stay ignored (``nohup``).
    """
    return _received_by(dict.fromkeys(STOP_SIGNALS, recorded.append))


@contextlib.contextmanager
def _received_by(handlers: Mapping[int, Callable[[int], None]]) -> Iterator[None]:
    """Record the signals of some handlers, and call these, inside the block."""

    def handle(number: int, _frame: FrameType | None) -> None:
        _received.append(number)
        handlers[number](number)

    with handled(handlers, handle):
        yield
