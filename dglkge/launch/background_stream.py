"""Text streams that never block their writer: a thread writes, and a full queue drops text."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections import deque
from typing import TextIO

MOST_WAITING_BYTES = 4 << 20
"""Text that waits for a blocked console (Ctrl-S, a pager); more is dropped."""

FLUSH_SECONDS = 5.0
"""How long the end of a job waits for a console that takes nothing."""

BLOCK_BYTES = 65536


class _Writer:
    """A daemon thread that writes what a queue holds, in order; a blocked one keeps nothing alive."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: deque[tuple[int, bytes]] = deque()
        self._num_bytes = 0
        self._num_dropped = 0
        self._last_progress = time.monotonic()
        threading.Thread(target=self._run, name="dglkge-console", daemon=True).start()

    def put(self, descriptor: int, data: bytes) -> None:
        """Queue some bytes, or count them as dropped; once there is room again, say so in their place."""
        with self._changed:
            if self._num_bytes + len(data) > MOST_WAITING_BYTES:
                self._num_dropped += data.count(b"\n")
                return
            if self._num_dropped:
                words = f"[launcher] {self._num_dropped} lines are missing here: this console was blocked\n"
                data = words.encode() + data
                self._num_dropped = 0
            if not self._queue:
                self._last_progress = time.monotonic()
            self._queue.append((descriptor, data))
            self._num_bytes += len(data)
            self._changed.notify_all()

    def flush(self, descriptor: int, seconds: float) -> bool:
        """Wait until all is written, or nothing has been for so long; return whether all is written.

        If the last lines were dropped, their number comes in their place.
        """
        if self._await_empty(seconds) and self._num_dropped:
            self.put(descriptor, b"")
        return self._await_empty(seconds)

    def _await_empty(self, seconds: float) -> bool:
        """Wait until the queue is empty, or nothing was written for so long."""
        with self._changed:
            while self._queue:
                left = self._last_progress + seconds - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(left)
        return True

    def _run(self) -> None:
        """Write for ever."""
        while True:
            with self._changed:
                while not self._queue:
                    self._changed.wait()
                descriptor, data = self._queue[0]
            num_written = _write_some(descriptor, data[:BLOCK_BYTES])
            with self._changed:
                self._last_progress = time.monotonic()
                self._num_bytes -= num_written
                if num_written < len(data):
                    self._queue[0] = (descriptor, data[num_written:])
                else:
                    self._queue.popleft()
                self._changed.notify_all()


def _write_some(descriptor: int, data: bytes) -> int:
    """Write what a descriptor takes; all counts as written where its reader has gone or its disk is full."""
    try:
        return os.write(descriptor, data)
    except BlockingIOError:
        with contextlib.suppress(OSError, ValueError):
            select.select([], [descriptor], [])
        return 0
    except OSError:
        return len(data)


class BackgroundStream:
    """A stream of text in front of a file descriptor; streams of the same file keep the order of their text.

    Parameters
    ----------
    stream : TextIO
        Its descriptor is written to; a stream that has none (in a test) is written to directly.
    shared : BackgroundStream, optional
        A stream that may end in the same file, such as stdout for stderr.
    """

    def __init__(self, stream: TextIO, shared: BackgroundStream | None = None) -> None:
        self._stream = stream
        self._descriptor = _descriptor_of(stream)
        self._writer: _Writer | None = None
        if shared is not None and _is_same_file(self._descriptor, shared._descriptor):
            self._writer = shared._writer
        elif self._descriptor is not None:
            self._writer = _Writer()

    def isatty(self) -> bool:
        """Whether a terminal shows it."""
        with contextlib.suppress(OSError, ValueError):
            return self._stream.isatty()
        return False

    def write(self, text: str) -> int:
        """Take some text; returns at once."""
        if self._writer is None or self._descriptor is None:
            return self._stream.write(text)
        self._writer.put(self._descriptor, text.encode(errors="replace"))
        return len(text)

    def flush(self) -> None:
        """Do nothing: the thread writes as soon as it can."""

    def finish(self, seconds: float = FLUSH_SECONDS) -> bool:
        """Wait until all is written, or nothing has been for so long; return whether all is written."""
        if self._writer is None or self._descriptor is None:
            return True
        return self._writer.flush(self._descriptor, seconds)


def _descriptor_of(stream: TextIO) -> int | None:
    """Return the file descriptor of a stream; None if it has none, as a closed one."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        stream.flush()
        return stream.fileno()
    return None


def _is_same_file(one: int | None, other: int | None) -> bool:
    """Whether two descriptors end in the same terminal, pipe or file."""
    if one is None or other is None:
        return False
    try:
        return os.path.sameopenfile(one, other)
    except OSError:
        return False
