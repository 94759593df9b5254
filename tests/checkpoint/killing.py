"""Ending a process at the n-th of its steps, as power cuts do."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any


def die_at_step(step: int, functions: Sequence[tuple[Any, str]]) -> None:
    """Let this process end by SIGKILL before the call of that number among all calls of some functions.

    Parameters
    ----------
    step : int
        Counted from 1.
    functions : sequence of (module or class, str)
        Where each function is looked up, and its name there.
    """
    done = 0

    def deadly(function):
        def wrapped(*arguments, **options):
            nonlocal done
            done += 1
            if done == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return wrapped

    for place, name in functions:
        setattr(place, name, deadly(getattr(place, name)))
