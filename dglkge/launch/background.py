"""Event loop of the launcher in a thread of its own, and threads for what may block."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

SIGNAL_POLL_SECONDS = 0.5
"""Time after which a signal is noticed that another thread received."""

STOP_SECONDS = 10.0
"""Time for work to end that a signal has cancelled."""

Result = TypeVar("Result")

Report = Callable[[str], None]
"""Takes messages for the user."""


@functools.cache
def launcher_loop() -> asyncio.AbstractEventLoop:
    """Return the loop, which runs to the end of the process, whatever the main thread waits for."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="dglkge-launcher", daemon=True).start()
    return loop


def wait(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine on the launcher's loop; return its result.

    If a signal raises an exception here, the coroutine is cancelled and has STOP_SECONDS to end.
    """
    has_ended = threading.Event()

    async def run() -> Result:
        try:
            return await work
        finally:
            has_ended.set()

    future = asyncio.run_coroutine_threadsafe(run(), launcher_loop())
    try:
        # A timeout: the kernel may give a signal to another thread, which does not wake this one, and only
        # this one runs Python's handlers.
        while not concurrent.futures.wait([future], SIGNAL_POLL_SECONDS).done:
            pass
        return future.result()
    except BaseException:
        future.cancel()
        has_ended.wait(STOP_SECONDS)
        raise


_tasks: set[asyncio.Task[Any]] = set()


def spawn(work: Coroutine[Any, Any, Any]) -> None:
    """Run a coroutine as a task of the running loop, which by itself keeps no reference to it."""
    task = asyncio.get_running_loop().create_task(work)
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)


async def in_thread(function: Callable[..., Result], *arguments: Any) -> Result:
    """Call a function that may block, in a daemon thread: a dead disk must not keep the process from exiting.

    ``asyncio.to_thread`` would keep it.
    """
    future: concurrent.futures.Future[Result] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()  # a thread cannot be cancelled

    def run() -> None:
        try:
            future.set_result(function(*arguments))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(future)
