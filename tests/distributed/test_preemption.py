"""Signals are noted, once; a second one ends the process; nothing stays changed."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from dglkge.distributed.preemption import STOP_SIGNALS, Preempted, StopRequest


@pytest.fixture(autouse=True)
def ordinary_handlers() -> Iterator[None]:
    """Python's own handlers: DGL, which other tests start in this process, takes SIGINT for itself."""
    before = dict.fromkeys(STOP_SIGNALS, signal.SIG_DFL) | {signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in before.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in STOP_SIGNALS]


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_is_noted_and_the_handlers_come_back(number: int) -> None:
    before, stop = handlers(), StopRequest()
    with stop.listening():
        assert not stop.is_noted
        signal.raise_signal(number)
        assert stop.is_noted
        signal.raise_signal(number)  # the launcher's, on top of the scheduler's
    assert handlers() == before and stop.is_noted


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_second_request_ends_a_process(number: int) -> None:
    code = (
        "import signal, sys; from dglkge.distributed import preemption\n"
        "preemption.SAME_REQUEST_SECONDS = -1.0\n"
        "with preemption.StopRequest().listening():\n"
        f"    signal.raise_signal({int(number)}); print('noted', flush=True)\n"
        f"    signal.raise_signal({int(number)})\n"
        "    print('goes on')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (-number, "noted\n"), done.stderr


def test_leaving_at_once() -> None:
    before, stop = signal.getsignal(signal.SIGINT), StopRequest()
    with stop.listening():
        with pytest.raises(RuntimeError, match="a failure"), stop.leaving_at_once():
            raise RuntimeError("a failure of its own")
    with pytest.raises(Preempted) as caught, stop.listening(), stop.leaving_at_once():
        signal.raise_signal(signal.SIGTERM)
    assert caught.value.code == 143 and signal.getsignal(signal.SIGINT) is before
    with pytest.raises(Preempted), stop.leaving_at_once():
        raise ValueError("not reached: the request was noted before")
    stop = StopRequest()
    with stop.listening(), pytest.raises(Preempted) as caught, stop.leaving_at_once():
        stop._noted_at = 0.0  # the signal came while gloo waited, where Python runs no handlers
        raise RuntimeError("Connection closed by peer")
    assert caught.value.code == 143


def test_signals_that_stay_ignored() -> None:
    for number in STOP_SIGNALS:
        before, stop = signal.signal(number, signal.SIG_IGN), StopRequest()
        try:
            with stop.listening():
                signal.raise_signal(number)
            assert not stop.is_noted and signal.getsignal(number) == signal.SIG_IGN
        finally:
            signal.signal(number, before)
    with stop.listening():
        stop.ignore_from_now_on()
    for number in STOP_SIGNALS:
        assert signal.getsignal(number) == signal.SIG_IGN
        signal.raise_signal(number)
    assert not stop.is_noted


def test_a_process_whose_parent_died_first() -> None:
    code = "from dglkge.distributed.preemption import end_with_parent; end_with_parent(1); print('goes on')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, ""), done.stderr


def test_another_thread_than_the_main_one_changes_nothing() -> None:
    def listen() -> list[object]:
        with StopRequest().listening():
            return handlers()

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(listen).result() == handlers()
