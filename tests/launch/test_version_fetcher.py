"""Bringing versions while a job runs: it ends when it is told to, and leaves no agent."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import psutil

from dglkge.launch.connection import NodeConnection
from dglkge.launch.remote.synced_site import VersionFetcher
from tests.launch.conftest import ROOT, TIMEOUT_SECONDS


def agents() -> list[psutil.Process]:
    """The agents that this process has started."""
    return [
        child for child in psutil.Process().children() if "launch.node_program" in " ".join(child.cmdline())
    ]


def open_session() -> NodeConnection:
    """Start an agent on this machine."""
    return NodeConnection("here", None, sys.executable, {"PYTHONPATH": str(ROOT)})


def test_the_end_does_not_wait_for_an_answer() -> None:
    """An agent that is at work is ended; nothing is said of it."""
    asked = threading.Event()
    said: list[str] = []

    def bring(session: NodeConnection, is_cancelled: Callable[[], bool]) -> None:
        session.call("describe")
        (agent,) = agents()
        agent.suspend()
        asked.set()
        session.call("describe", TIMEOUT_SECONDS)

    fetcher = VersionFetcher(open_session, bring, said.append, 0.01)
    fetcher.start()
    assert asked.wait(TIMEOUT_SECONDS)
    fetcher.stop()
    assert not fetcher._thread.is_alive()
    assert agents() == [] and said == []


def test_an_agent_that_comes_too_late_is_let_go() -> None:
    """The end came while it was being started: nothing is asked of it."""
    is_opening, may_go_on = threading.Event(), threading.Event()
    brought: list[NodeConnection] = []

    def connect() -> NodeConnection:
        is_opening.set()
        may_go_on.wait(TIMEOUT_SECONDS)
        return open_session()

    fetcher = VersionFetcher(connect, lambda session, _: brought.append(session), print, 0.01)
    fetcher.start()
    assert is_opening.wait(TIMEOUT_SECONDS)
    threading.Timer(0.5, may_go_on.set).start()
    fetcher.stop()
    assert not fetcher._thread.is_alive()
    assert agents() == [] and brought == []
