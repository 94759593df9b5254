"""Stopping on request: a signal is only noted, and all trainers of the job then leave together."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

logger = logging.getLogger(__name__)

RESTART_STATUS = 143
"""Exit status of a process that has committed its state and may be started again; 128 + SIGTERM."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

SAME_REQUEST_SECONDS = 1.0
"""Signals within this time are one request: a scheduler signals all, and the launcher passes its own on."""


class Preempted(SystemExit):
    """Raised on every trainer once the state is committed; a script that does not catch it ends with 143."""

    def __init__(self) -> None:
        super().__init__(RESTART_STATUS)


class StopRequest:
    """Whether this process was asked to stop."""

    def __init__(self) -> None:
        self._noted_at: float | None = None
        self._before: dict[int, object] = {}
        self._at_once = False

    @property
    def is_noted(self) -> bool:
        """Whether SIGTERM, SIGINT or SIGHUP has come."""
        return self._noted_at is not None

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Note SIGTERM, SIGINT and SIGHUP instead of ending; a second one ends the process after all.

        Signals that were ignored stay ignored (``nohup``, background jobs of a shell), and outside the
        main thread, where Python takes no signals, nothing changes. The handlers before come back at the end.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        for number, handler in self._before.items():
            if handler != signal.SIG_IGN:
                signal.signal(number, self._note)
        try:
            yield
        finally:
            self._restore()

    def ignore_from_now_on(self) -> None:
        """Ignore these signals until the process ends, where :meth:`listening` has changed their handlers.

        For the shutdown of DGL, for which all trainers wait: one that a signal ends there, in a handler of
        DGL's own, would keep the others waiting until their limit. SIG_IGN, and no handler that does nothing:
        that would still interrupt system calls of DGL's.
        """
        for number, handler in self._before.items():
            if handler != signal.SIG_IGN:
                signal.signal(number, signal.SIG_IGN)
        self._before = {}

    @contextlib.contextmanager
    def leaving_at_once(self) -> Iterator[None]:
        """Leave wherever a request comes: for work before the first batch, when there is nothing to commit.

        Raises
        ------
        Preempted
            In the main thread, also where another trainer has left and a collective has failed for that.
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
        """Note the first request; pass the second one on to whoever was listening before."""
        now = time.monotonic()
        if self._noted_at is None:
            self._noted_at = now
            if self._at_once:
                logger.info("%s: leaving before the first batch", signal.Signals(number).name)
                raise Preempted
            logger.info("%s: stopping at the next batch boundary", signal.Signals(number).name)
        elif now - self._noted_at > SAME_REQUEST_SECONDS:
            self._restore()
            os.kill(os.getpid(), number)

    def _restore(self) -> None:
        """Put the handlers back."""
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)  # type: ignore[arg-type]
