"""Commands that are scripts of ``partition_tools`` too: SIGTERM, and the status and line of an error."""

from __future__ import annotations

import argparse
import contextlib
import logging
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import Any


def _terminate(signal_number: int, frame: object) -> None:
    raise SystemExit(128 + signal_number)


@contextlib.contextmanager
def sigterm_raises() -> Iterator[None]:
    """Let SIGTERM raise inside the block, so that temporary folders are removed and child processes end."""
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run_script(name: str, command: Any, argv: Sequence[str] | None = None) -> int:
    """Run a command's module as a script of its own.

    Parameters
    ----------
    name : str
        Of the script, for its help and messages.
    command : module
        Has ``DESCRIPTION``, ``EXAMPLES``, ``add_arguments`` and ``run``, as the commands of ``dglkge``.
    argv : sequence of str, optional
        Arguments instead of ``sys.argv[1:]``.

    Returns
    -------
    int
        What ``run`` returns; with one line on stderr 2 for bad input, 1 for another failure, 130 after
        Ctrl-C.
    """
    parser = argparse.ArgumentParser(
        prog=name,
        description=command.DESCRIPTION,
        epilog=command.EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_arguments(parser)
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format=f"{name}: %(message)s")
    # After the arguments are parsed, so that --help needs no package.
    from dglkge.errors import DglkgeError, InputError

    try:
        return int(command.run(args))
    except InputError as error:
        sys.stderr.write(f"{name}: {error}\n")
        return 2
    except DglkgeError as error:
        sys.stderr.write(f"{name}: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write(f"{name}: interrupted; nothing was left behind\n")
        return 130
