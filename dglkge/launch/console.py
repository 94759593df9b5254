"""Output of all processes: a log file for each, and one console with prefixed lines."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import select
import shutil
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from dglkge.distributed.world import JSON, TEXT, json_line, parse_line, timestamp

_NOISE = re.compile(
    r"\[[\d:]+\] .*/rpc/rpc\.cc:\d+: (Sender|Receiver) with NetType~\w+ is created\."
    r"|load \w+|start graph service on server \d+ for part \d+|Client \[\d+\] waits on [\d.:]+"
    r"|Start to create specified graph formats which may take non-trivial time\."
    r"|Finished creating specified graph formats\.|Finished loading (partition|node data|edge data)\."
    r"|Machine \(\d+\) group \(\d+\) client \(\d+\) connect to server successfuly!"
    r"|Warning! Interface: \S+ ?|IP address not available for interface\."
    r"|Server is waiting for connections (non-blockingly )?on \[.*\]\.\.\."
    r"|Client ?\[\d+\] in group ?\[\d+\] is exiting\.\.\.|Server ?\(\d+\) shutdown\.|Server is exiting\.\.\."
    r"|Initialize the distributed services with graphbolt: (True|False)"
    r"|Start to load partition from .* which is \d+ bytes\. It may take non-trivial time for \w+ partition\."
    # Whole lines: a user's line that begins alike is kept. To this warning of torch details are appended.
    r"|\[W.* socket\.cpp:\d+\] \[c10d\] The hostname of the client socket cannot be retrieved\..*"
)


def is_noise(line: str) -> bool:
    """Whether a line is a routine message of DGL or torch: hidden on the console, kept in the logs."""
    return _NOISE.fullmatch(line) is not None


MOST_WAITING_TEXTS = 1 << 15
"""Most texts that are queued for a blocked console (Ctrl-S, a pager); more are dropped."""

FLUSH_SECONDS = 5.0
"""Timeout at the end of a job for a blocked console."""

POLL_SECONDS = 0.01


class BackgroundStream:
    """Text stream that never blocks its writer: a daemon thread writes it, which does not delay the exit.

    Raises OSError or ValueError if the stream has no file descriptor, or is closed.
    """

    def __init__(self, stream: TextIO) -> None:
        # Python's buffer is emptied first: later text bypasses it and must not overtake.
        stream.flush()
        self._descriptor = stream.fileno()
        self._texts: queue.Queue[bytes] = queue.Queue(MOST_WAITING_TEXTS)
        self._num_dropped = self._num_written = 0
        threading.Thread(target=self._run, name="dglkge-console", daemon=True).start()

    def write(self, text: str) -> int:
        """Queue some text, or count its lines as dropped; the next text is preceded by that count."""
        words = f"[launcher] {self._num_dropped} lines are missing here: this console was blocked\n"
        data = (words if self._num_dropped else "") + text
        try:
            # Dropping is better than blocking: timeouts depend on the loop that writes here.
            self._texts.put_nowait(data.encode(errors="replace"))
            self._num_dropped = 0
        except queue.Full:
            self._num_dropped += text.count("\n")
        return len(text)

    def flush(self) -> None:
        """Do nothing: the thread writes without delay."""

    def finish(self, seconds: float = FLUSH_SECONDS) -> bool:
        """Wait until all is written, or `seconds` pass without progress; return whether all is written.

        If the last lines were dropped, their number is written instead.
        """
        # A slow terminal is waited for as long as it accepts text.
        num_written, since = self._num_written, time.monotonic()
        while self._texts.unfinished_tasks or self._num_dropped:
            if not self._texts.unfinished_tasks:
                self.write("")
            if self._num_written != num_written:
                num_written, since = self._num_written, time.monotonic()
            elif time.monotonic() - since > seconds:
                return False
            time.sleep(POLL_SECONDS)
        return True

    def _run(self) -> None:
        """Write what waits without end; the body of the thread."""
        while True:
            data = self._texts.get()
            while data:
                try:
                    # A terminal that is shared with other programs may be non-blocking: the thread waits for
                    # room, without a busy loop.
                    select.select([], [self._descriptor], [])
                    count = os.write(self._descriptor, data)
                except BlockingIOError:
                    count = 0
                except (OSError, ValueError):  # a closed pipe or a full disk
                    count = len(data)
                data = data[count:]
                self._num_written += count
            self._texts.task_done()


def in_background(stream: Any) -> Any:
    """Return a stream that never blocks; the stream itself where it has no descriptor, or is closed."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return BackgroundStream(stream)
    return stream


TAIL_LINES = 20
LONGEST_LINE_BYTES = 65536
TRACEBACK = "Traceback (most recent call last):"


class ProcessOutput:
    """Splits the output of one process into lines and writes its log.

    A progress bar returns to the start of its line with CR and overwrites it. The log gets its last state. If
    the log cannot be written (full disk, removed folder), the job goes on: lost lines are counted, each
    further line is a new attempt, and the count precedes the first line that succeeds.

    Attributes
    ----------
    problem : str or None
        First reason why the log could not be written.
    tail : deque of str
        The last lines.
    progress : str
        Present state of a progress bar; empty if there is none.
    raised_at : float or None
        ``time.monotonic()`` of the last traceback's first line.
    """

    def __init__(self, log_path: Path, name: str = "", log_format: str = TEXT) -> None:
        self.log_path = log_path
        self._name = name
        self._is_json = log_format == JSON
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.progress = ""
        self.problem: str | None = None
        self.raised_at: float | None = None
        self._partial = b""
        self._log: BinaryIO | None = None
        self._num_lost = 0
        self._is_cut = False  # whether the log ends in the middle of a line that did not fit
        with contextlib.suppress(OSError):
            open(log_path, "wb").close()  # emptied, and not removed: it may be a link
        self._write("")

    def feed(self, data: bytes) -> list[str]:
        """Process some output; return the lines that it completes."""
        *complete, self._partial = (self._partial + data).split(b"\n")
        if b"\r" in self._partial:
            # a progress bar: only its last state is kept
            before, _, after = self._partial.rpartition(b"\r")
            # A bar that ends in CR has an empty last piece: its state is the piece before.
            shown = after if after.strip() else before.rpartition(b"\r")[2]
            self.progress = shown.decode(errors="replace")
            self._partial = b"\r" + shown + (b"" if after.strip() else b"\r" + after)
        elif complete:
            self.progress = ""
        # A process may write without line ends (binary data): memory stays bounded.
        if len(self._partial) > LONGEST_LINE_BYTES:
            complete.append(self._partial)
            self._partial = b""
        return [self._keep(line) for line in complete]

    def finish(self) -> list[str]:
        """Close the log; return the last line if it has no line end."""
        last = self.feed(b"\n") if self._partial.strip() else []
        self._partial, self.progress = b"", ""
        if self._log is not None:
            with contextlib.suppress(OSError):  # a network disk may report that it is full only now
                self._log.close()
            self._log = None
        return last

    def _keep(self, line: bytes) -> str:
        """Write one line to the log."""
        text = line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
        self.tail.append(text)
        if text == TRACEBACK:
            self.raised_at = time.monotonic()
        self._write((as_json(self._name, text) if self._is_json else text) + "\n")
        return text

    def _write(self, text: str) -> None:
        """Write to the log without a buffer, which could fail later; record the reason of a failure."""
        num_lines = text.count("\n")
        if self._num_lost:
            text = f"({self._num_lost} lines are missing here: {self.problem})\n{text}"
        if self._is_cut:
            text = "\n" + text
        data = text.encode(errors="replace")
        try:
            if self._log is None:
                # Appended: a log that an administrator truncates in mid-run goes on at its new end.
                self._log = open(self.log_path, "ab", 0)
            while data:
                data = data[self._log.write(data) :]
                self._is_cut = bool(data)
            self._num_lost = 0
        except OSError as error:
            self._num_lost += num_lines
            self.problem = self.problem or (error.strerror or str(error))


LAUNCHER = "launcher"
LAUNCHER_LOG = "launcher.log"
"""File of the launcher's own messages, each with its time, in the folder of the logs."""


def as_json(name: str, text: str) -> str:
    """Return a line of a process as JSON; one that is such an object already stays as it is."""
    # Routine messages are in the logs, with a level that readers usually leave out.
    return text if parse_line(text) else json_line(name, "debug" if is_noise(text) else "info", text)


def plain_text(text: str) -> str:
    """Return the message of a line of JSON; any other line as it is."""
    record = parse_line(text)
    return text if record is None else str(record["message"])


COLOURS = (36, 33, 32, 35, 34, 31)
"""ANSI foreground colours, given to the processes in turn."""

CLEAR_LINE = "\r\x1b[K"


class Console:
    """Writes prefixed lines and, on a terminal, one progress bar below them.

    Closed streams are ignored: the logs have everything.
    """

    log_format = TEXT
    """``json``: every line is an object, and there is no bar."""

    log_path: Path | None = None
    """A file to which the launcher's messages are appended as well."""

    def __init__(self, out: TextIO, err: TextIO, is_terminal: bool = False, has_colour: bool = False) -> None:
        self._out = out
        self._err = err
        self._is_terminal = is_terminal
        self._has_colour = has_colour
        self._bar = ""

    @classmethod
    def in_background(cls, out: TextIO, err: TextIO) -> Console:
        """Build a console whose methods never block; without colours if NO_COLOR is set (no-color.org)."""
        is_terminal, first = out.isatty(), in_background(out)
        with contextlib.suppress(OSError, ValueError, AttributeError):
            # One queue keeps the order of lines of stdout and stderr. With two threads they would mix.
            if os.path.sameopenfile(out.fileno(), err.fileno()):
                err.flush()
                err = first
        second = first if err is first else in_background(err)
        return cls(first, second, is_terminal, is_terminal and not os.environ.get("NO_COLOR"))

    def line(self, name: str, colour: int, text: str) -> None:
        """Write one whole line of a process above the bar."""
        if self.log_format == JSON:
            self._write(self._out, as_json(name, text) + "\n")
            return
        prefix = f"[{name}]"
        if self._has_colour:
            prefix = f"\x1b[{COLOURS[colour % len(COLOURS)]}m{prefix}\x1b[0m"
        self._write(self._out, f"{self._clear()}{prefix} {text}\n{self._bar}")

    def progress(self, name: str, text: str) -> None:
        """Show the bar of a process as the last line; an empty text removes it."""
        if not self._is_terminal or self.log_format == JSON:
            return
        bar = f"[{name}] {text}"[: shutil.get_terminal_size().columns - 1] if text else ""
        if bar != self._bar:
            clear = self._clear()
            self._bar = bar
            self._write(self._out, clear + bar)

    def message(self, text: str, level: str = "info") -> None:
        """Write a message of the launcher; in JSON the words ``warning:`` and ``error:`` set its level."""
        is_json = self.log_format == JSON
        level = next((word for word in ("warning", "error") if text.startswith(f"{word}: ")), level)
        record = json_line(LAUNCHER, level, text)
        if self.log_path is not None:
            logged = [record] if is_json else [f"{timestamp()} {line}" for line in text.splitlines()]
            # A full disk does not disturb the job.
            with contextlib.suppress(OSError), self.log_path.open("a", encoding="utf-8") as log:
                log.write("\n".join(logged) + "\n")
        if is_json:
            self._write(self._err, record + "\n")
            return
        # The bar is on stdout and messages are on stderr, which may be the same terminal: it is removed and
        # written again.
        self._write(self._out, self._clear())
        self._write(self._err, "".join(f"[launcher] {line}\n" for line in text.splitlines()))
        self._write(self._out, self._bar)

    def summary(self, text: str) -> None:
        """Write a line for programs, without a prefix; waits for the queue, so that it is not dropped."""
        self.finish()
        self._write(self._out, f"{self._clear()}{text}\n")

    def error(self, text: str) -> None:
        """Write an error message without a prefix."""
        line = json_line(LAUNCHER, "error", text) if self.log_format == JSON else text
        self._write(self._err, line + "\n")

    def finish(self) -> None:
        """Wait until all text is written, with a timeout for blocked streams."""
        for stream in (self._out, self._err):
            if isinstance(stream, BackgroundStream):
                stream.finish()

    def _clear(self) -> str:
        """Return the control sequence that removes the bar."""
        return CLEAR_LINE if self._bar else ""

    def _write(self, stream: TextIO, text: str) -> None:
        """Write and flush; ignores a closed stream."""
        with contextlib.suppress(OSError, ValueError):
            stream.write(text)
            stream.flush()
