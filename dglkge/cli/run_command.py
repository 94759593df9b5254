"""What every command does around its own work: one line for bad input, and the exit status."""

from __future__ import annotations

import os
import sys
from typing import Callable

from dglkge.errors import InputError, JobError, exit_status_of

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
        The body's status; 2 for bad input and 1 for a failure of the job, both told in one line on stderr;
        130 when interrupted from the keyboard; 141 when whoever reads the output has gone (as with
        ``| head``). Any other failure keeps its traceback.
    """
    try:
        status = body()
        sys.stdout.flush()
        return status
    except (InputError, JobError) as error:
        print(f"{name}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return exit_status_of(error)
    except KeyboardInterrupt as error:
        print(f"{name}: interrupted", file=sys.stderr)
        return exit_status_of(error)
    except BrokenPipeError:
        # Python flushes stdout once more at exit, which would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE_STATUS
