"""Client of one channel to a node: runs a command there with three pipes, as an ssh client does.

This file is a program of its own: standard library only, run by its path as ``channel.py NAME RANK WORDS``.
It asks the launcher, by the abstract Unix socket NAME, for a connection to the node. The launcher passes an
authenticated TCP connection, and this process then relays stdin, stdout and stderr, until the command ends
there (exit status: that of the command) or the connection is lost (255, with a line on stderr).

Both ends send frames: one byte that gives the kind, four bytes of length, the data.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import sys
import threading

COMMAND, STDIN, STDOUT, STDERR, EXIT = range(5)
"""Kinds of frames: the words of the command in JSON, the three pipes (no data: end of file), the status."""

OPEN_SECONDS = 30.0
"""Timeout of the launcher's reply."""

LOST_STATUS = 255
BLOCK_BYTES = 65536
LONGEST_FRAME_BYTES = 1 << 20

_HEAD = struct.Struct("!BI")


class Frames:
    """Frames over a connected socket; sending is safe from several threads, receiving from one.

    Parameters
    ----------
    connection : socket.socket
    received : bytes
        Bytes that were read from it before.
    """

    def __init__(self, connection: socket.socket, received: bytes = b"") -> None:
        self._connection = connection
        self._received = received
        self._sending = threading.Lock()

    def send(self, kind: int, data: bytes) -> None:
        """Send one frame.

        Raises
        ------
        OSError
            If the connection is lost.
        """
        with self._sending:
            self._connection.sendall(_HEAD.pack(kind, len(data)) + data)

    def receive(self) -> tuple[int, bytes] | None:
        """Return the kind and data of the next frame; None at the end of the connection.

        Raises
        ------
        OSError
            If the connection is lost, or what arrives is no frame.
        """
        head = self._read(_HEAD.size)
        if head is None:
            return None
        kind, size = _HEAD.unpack(head)
        if size > LONGEST_FRAME_BYTES:
            raise OSError(f"a frame of {size} bytes")
        data = self._read(size)
        return None if data is None else (kind, data)

    def _read(self, size: int) -> bytes | None:
        """Read a number of bytes; None if the connection ends before."""
        while len(self._received) < size:
            data = self._connection.recv(BLOCK_BYTES)
            if not data:
                return None
            self._received += data
        data, self._received = self._received[:size], self._received[size:]
        return data


def request_connection(name: str, rank: int) -> socket.socket:
    """Get an authenticated connection to a node from the launcher.

    Raises
    ------
    OSError
        If the launcher has ended, or the node is not connected; the text gives the reason.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as launcher:
        launcher.settimeout(OPEN_SECONDS)
        launcher.connect(f"\0{name}")
        launcher.sendall(b"%d\n" % rank)
        text, descriptors, _, _ = socket.recv_fds(launcher, BLOCK_BYTES, 1)
    if not descriptors:
        raise OSError(text.decode(errors="replace") or "the launcher has ended")
    return socket.socket(fileno=descriptors[0])


def write_all(descriptor: int, data: bytes) -> None:
    """Write all bytes to a pipe."""
    while data:
        data = data[os.write(descriptor, data) :]


def relay(connection: socket.socket, words: list[str]) -> int:
    """Run a command on the node; return its exit status."""
    frames = Frames(connection)
    frames.send(COMMAND, json.dumps(words).encode())
    # A thread of its own for each direction: neither waits for the other.
    threading.Thread(target=_send_stdin, args=(frames,), daemon=True).start()
    while True:
        frame = frames.receive()
        if frame is None:
            raise OSError("the connection ended")
        kind, data = frame
        if kind == EXIT:
            return int(data)
        write_all(1 if kind == STDOUT else 2, data)


def _send_stdin(frames: Frames) -> None:
    """Send stdin to its end; the body of a thread."""
    with contextlib.suppress(OSError):  # the other thread finds the end of the connection
        while True:
            data = os.read(0, BLOCK_BYTES)
            frames.send(STDIN, data)
            if not data:
                return


def main() -> None:
    """Relay one command. Ends without clean-up, since a thread may be blocked in a read of stdin."""
    name, rank, *words = sys.argv[1:]
    status = LOST_STATUS
    try:
        status = relay(request_connection(name, int(rank)), words)
    except BrokenPipeError:  # the launcher has closed the pipes, or has been killed
        pass
    except OSError as error:
        with contextlib.suppress(OSError):
            write_all(2, f"{error.strerror or error}\n".encode())
    os._exit(status)


if __name__ == "__main__":
    main()
