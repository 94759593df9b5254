"""Stop requests, with which all trainers leave together at a batch boundary; and the death of a parent.

A trainer that left on its own would leave the others blocked in a collective. So a signal handler only
records the request; the trainers agree on it at a batch boundary, commit, and raise :class:`Preempted`
together.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

logger = logging.getLogger(__name__)

RESTART_STATUS = 143
"""Exit status of a process that has committed its state and can be started again; 128 + SIGTERM."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

SAME_REQUEST_SECONDS = 1.0
"""Signals within this time count as one request: a scheduler signals every process of a job, and the launcher
forwards the one that it received."""


_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


def end_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Let the kernel send this process a signal when its parent dies; exit with 1 if it has died already.

    Call it in the new process: the kernel resets it at a fork.
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:  # it died before prctl took effect
        os._exit(1)


Handlers = dict[int, Any]
"""Handlers of signals as of ``signal.getsignal``."""


def _restore(handlers: Handlers) -> None:
    for number, handler in handlers.items():
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextlib.contextmanager
def handled(numbers: Iterable[int], handle: Callable[[int, FrameType | None], None]) -> Iterator[Handlers]:
    """Handle signals inside the block but those that are ignored: ``nohup``, background jobs of a shell.

    Yields the earlier handlers, which are restored at the end; those that the caller takes out are not.
    """
    before: Handlers = {number: signal.getsignal(number) for number in numbers}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, handle)
    try:
        yield before
    finally:
        _restore(before)


class Preempted(SystemExit):
    """Raised on every trainer once the state is committed; a script that does not catch it exits with 143."""

    def __init__(self) -> None:
        super().__init__(RESTART_STATUS)


class StopRequest:
    """Signals that request a stop of this process: SIGTERM, SIGINT, SIGHUP."""

    def __init__(self) -> None:
        self._noted_at: float | None = None
        self._before: Handlers = {}
        self._at_once = False

    @property
    def is_noted(self) -> bool:
        """Whether SIGTERM, SIGINT or SIGHUP was received."""
        return self._noted_at is not None

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Record SIGTERM, SIGINT and SIGHUP inside the block; a second request has its usual effect.

        Ignored signals stay ignored. Outside the main thread, where Python handles no signals, nothing
        changes. The earlier handlers are restored at the end.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        with handled(STOP_SIGNALS, self._note) as self._before:
            yield

    def ignore_from_now_on(self) -> None:
        """Ignore the signals that :meth:`listening` handles until the process ends.

        DGL's shutdown is a barrier of all trainers: if a signal ended one of them there, the others would
        wait until their timeout. SIG_IGN is used because an empty handler would still interrupt DGL's system
        calls.
        """
        for number, handler in self._before.items():
            if handler != signal.SIG_IGN:
                signal.signal(number, signal.SIG_IGN)
        self._before.clear()

    @contextlib.contextmanager
    def leaving_at_once(self) -> Iterator[None]:
        """Raise Preempted on a request inside the block: before the first batch there is nothing to commit.

        It is raised too if a collective fails because another trainer has left on the request.
        """
        self._at_once = True
        try:
            if self.is_noted:
                raise Preempted
            yield
        except RuntimeError as error:
            if self.is_noted:
                raise Preempted from error
            raise
        finally:
            self._at_once = False

    def _note(self, number: int, _frame: FrameType | None) -> None:
        """Record the first request; restore the earlier handlers and raise the signal again on the second."""
        now = time.monotonic()
        if self._noted_at is None:
            self._noted_at = now
            if self._at_once:
                logger.info("%s: leaving before the first batch", signal.Signals(number).name)
                raise Preempted
            logger.info("%s: stopping at the next batch boundary", signal.Signals(number).name)
        elif now - self._noted_at > SAME_REQUEST_SECONDS:
            # Raised again under the earlier handler: by default the process then ends with the status of that
            # signal.
            _restore(self._before)
            os.kill(os.getpid(), number)
