"""A limit on requests that have none: DGL waits for ever for a server that does not answer.

DGL waits in C++ and keeps Python's lock, so no thread of Python could end it; the watchdog of
``faulthandler`` is a thread of C. When the limit passes it prints where each thread waits and ends the
process with status 1; the launcher then ends the job.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
from collections.abc import Iterator

STANDARD_ERROR = 2
_limit_seconds = [600.0]


def set_request_limit(seconds: float) -> None:
    """Set how long a request of this process may take."""
    _limit_seconds[0] = seconds


def request_limit_seconds() -> float:
    """Return how long a request of this process may take."""
    return _limit_seconds[0]


@contextlib.contextmanager
def limited_requests() -> Iterator[None]:
    """End this process if the block, which asks DGL's servers for something, takes longer than the limit.

    Blocks do not nest: the end of the inner one would be the end of the limit.
    """
    _arm()
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def limit_farewell() -> None:
    """Limit DGL's farewell too, for which every trainer waits; call it after DGL has been started."""
    atexit.register(_arm)  # handlers run in reverse order, so this one before DGL's


def _arm() -> None:
    """Start the clock."""
    faulthandler.dump_traceback_later(request_limit_seconds(), exit=True, file=STANDARD_ERROR)
