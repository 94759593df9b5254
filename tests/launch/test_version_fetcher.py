"""Bringing versions while a job runs: it ends when it is told to."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import psutil

from dglkge.errors import InputError
from dglkge.launch.connection import open_node
from dglkge.launch.remote.synced_site import VersionFetcher
from tests.launch.conftest import ROOT, TIMEOUT_SECONDS


def test_the_end_does_not_wait_for_an_answer() -> None:
    """A call of a node program that is at work is given up; nothing is said of it."""
    asked = threading.Event()
    said: list[str] = []
    session = open_node("here", None, sys.executable, {"PYTHONPATH": str(ROOT)})
    session.call("describe")
    (program,) = [each for each in psutil.Process().children() if "node_program" in " ".join(each.cmdline())]

    def bring(is_cancelled: Callable[[], bool]) -> None:
        asked.set()
        session.call("describe", TIMEOUT_SECONDS, is_cancelled)

    try:
        program.suspend()
        fetcher = VersionFetcher(bring, said.append, 0.01)
        fetcher.start()
        assert asked.wait(TIMEOUT_SECONDS)
        fetcher.stop()
        assert not fetcher._thread.is_alive() and said == []
    finally:
        program.resume()
        session.close()


def test_a_problem_is_told_once() -> None:
    """The next poll tries again."""
    said: list[str] = []
    outcomes = [InputError("no room"), InputError("no room"), None, InputError("no way")]
    is_done = threading.Event()

    def bring(is_cancelled: Callable[[], bool]) -> None:
        if not outcomes:
            is_done.set()
            return
        outcome = outcomes.pop(0)
        if outcome is not None:
            raise outcome

    fetcher = VersionFetcher(bring, said.append, 0.01)
    fetcher.start()
    assert is_done.wait(TIMEOUT_SECONDS)
    fetcher.stop()
    assert [text.rpartition(": ")[2] for text in said] == ["no room", "no way"]
