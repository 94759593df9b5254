"""Brings published versions to the launcher while the job runs, in a thread of its own."""

from __future__ import annotations

import threading
from typing import Callable

from dglkge.errors import InputError
from dglkge.launch.host_session import HostSession

STOP_SECONDS = 20.0


class VersionBringer:
    """Looks from time to time for a new version on the first machine, and brings the newest.

    It has an agent of its own there, so it never keeps the job's waiting. What goes wrong is told once, and
    tried again: the job does not depend on it.

    Parameters
    ----------
    connect : callable
        Starts an agent on the first machine.
    bring : callable
        Given the agent and a test whether to give up, brings the newest version; returns its number, or None
        if there is nothing new.
    say : callable
        Takes messages for people.
    seconds : float
        Between two looks.
    """

    def __init__(
        self,
        connect: Callable[[], HostSession],
        bring: Callable[[HostSession, Callable[[], bool]], int | None],
        say: Callable[[str], None],
        seconds: float,
    ) -> None:
        self._connect = connect
        self._bring = bring
        self._say = say
        self._seconds = seconds
        self._session: HostSession | None = None
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dglkge-bring", daemon=True)

    def start(self) -> None:
        """Start to look."""
        self._thread.start()

    def stop(self) -> None:
        """End at once; a transfer is given up, and leaves what was here before."""
        self._is_stopped.set()
        session = self._session
        if session is not None:
            session.cut()  # what waits for an answer goes on; the thread itself closes what it reads from
        self._thread.join(STOP_SECONDS)

    def _run(self) -> None:
        """Look until stopped."""
        try:
            self._look()
        finally:
            self._close()

    def _look(self) -> None:
        """Bring what is new, from time to time."""
        is_told = False
        while not self._is_stopped.wait(self._seconds):
            try:
                if self._session is None:
                    self._session = self._connect()
                if self._is_stopped.is_set():  # it was too late to be cut
                    return
                self._bring(self._session, self._is_stopped.is_set)
                is_told = False
            except (InputError, OSError, ValueError) as error:
                if self._is_stopped.is_set():
                    return
                if not is_told:
                    self._say(f"warning: the newest version could not be brought here, trying again: {error}")
                is_told = True
                if self._session is not None and not self._session.is_alive:
                    self._close()

    def _close(self) -> None:
        """Let the agent go."""
        if self._session is not None:
            self._session.close()
            self._session = None
