"""Starts the launcher's agent on a machine, with the environment of the job.

This file is a program of its own, sent to other machines as text: standard library only. One line of JSON
on stdin (``command``, ``environment``) becomes the process itself, which inherits the rest of stdin.
"""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    """Replace this process by the requested command."""
    line = b""
    while not line.endswith(b"\n"):
        # One byte at a time, without a buffer: further bytes on stdin belong to the agent.
        byte = os.read(0, 1)
        if not byte:
            sys.exit(1)
        line += byte
    request = json.loads(line)
    os.chdir("/")  # else a folder named dglkge in the home folder would be imported as the package
    try:
        # The same process: ssh's pipes, its process number and its exit status stay those of the agent.
        os.execve(request["command"][0], request["command"], {**os.environ, **request["environment"]})
    except OSError as error:
        sys.exit(f"cannot start {request['command'][0]}: {error.strerror}")


if __name__ == "__main__":
    main()
