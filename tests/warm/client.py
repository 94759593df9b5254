"""Stands for a process that :mod:`tests.warm.server` runs: same standard streams, signals and status.

Has arguments as ``python``, or ``--serve SOCKET``; imports the standard library only. A node program is an
ordinary process, whose servers and trainers are clients.
"""

from __future__ import annotations

import array
import json
import os
import signal
import socket
import sys

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGQUIT)
ACTIONS = ("-c", "-m", "--serve")
"""What is no flag of the interpreter, which a copy has from the process that it is a copy of."""
FORK_SERVER = "from multiprocessing.forkserver import main;"
"""How the program begins that multiprocessing starts for processes that are copies of one another."""


def main() -> int:
    if "DGLKGE_FORK_SERVER" in os.environ:
        # Its processes, which import nothing, become clients.
        sys.path.insert(0, os.path.dirname(sys.argv[1]))
        import fork_server

        sys.path.pop(0)
        fork_server.serve(lambda environment: None)
    arguments = sys.argv[1:]
    # METIS repeats itself with variables that glibc reads at a start: it is a copy only where asked for.
    if arguments[0].endswith("/build_graph.py") and "DGLKGE_TEST_COPIED_BUILD" not in os.environ:
        os.execv(sys.executable, [sys.executable, *arguments])
    if arguments[0] in ("-c", "-m") and "dglkge.launch.node_program" in arguments[1]:
        site = os.path.join(os.path.dirname(os.environ["DGLKGE_TEST_WARM_SOCKET"]), "site")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [site, os.environ.get("PYTHONPATH")]))
        os.execv(sys.executable, [sys.executable, *arguments])
    options = [word for word in arguments[:1] if word == "--plain"]
    del arguments[: len(options)]
    while arguments[0].startswith("-") and arguments[0] not in ACTIONS:
        del arguments[0]
    streams = [0, 1, 2]
    if arguments[0] == "-c" and arguments[1].startswith(FORK_SERVER):
        # But for the one that has listed them.
        numbers = map(int, os.listdir("/proc/self/fd"))
        streams += [number for number in numbers if number > 2 and os.path.exists(f"/proc/self/fd/{number}")]
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(os.environ["DGLKGE_TEST_WARM_SOCKET"])
    ignored = [number for number in FORWARDED if signal.getsignal(number) == signal.SIG_IGN]
    request = {
        "arguments": options + arguments,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "ignored": ignored,
        "streams": streams,
    }
    for number in set(FORWARDED) - set(ignored):
        signal.signal(number, lambda number, _: connection.sendall(b"%d\n" % number))
    descriptors = array.array("i", streams)
    connection.sendmsg([b"r"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
    connection.sendall(json.dumps(request).encode() + b"\n")
    # Only the process itself shall keep pipes open: a reader waits for their end.
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in streams:
        os.dup2(null, descriptor)
    answer = b""
    while not answer.endswith(b"\n"):
        data = connection.recv(64)
        if not data:
            return 1  # the server was killed, and what it ran with it
        answer += data
    status = int(answer)
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


if __name__ == "__main__":
    sys.exit(main())
