"""What every command does around its own work: one line for bad input, and the exit status."""

from __future__ import annotations

import os
import sys
from typing import Callable

from dglkge.errors import INPUT_ERROR_STATUS, InputError

INTERRUPTED_STATUS = 130
BROKEN_PIPE_STATUS = 141


def run_command(name: str, body: Callable[[], int]) -> int:
    """Run a command's work.

    Parameters
    ----------
    name : str
        The command, for messages.
    body : callable
        Does the work and returns the exit status.

    Returns
    -------
    int
        The body's status; 2 for bad input, told in one line on stderr; 130 when interrupted from the
        keyboard; 141 when whoever reads the output has gone (as with ``| head``). Any other failure keeps
        its traceback.
    """
    try:
        status = body()
        sys.stdout.flush()
        return status
    except InputError as error:
        print(f"{name}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return INPUT_ERROR_STATUS
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return INTERRUPTED_STATUS
    except BrokenPipeError:
        # Python flushes stdout once more at exit, which would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE_STATUS
