"""The streams of all processes on one terminal or pipe."""

from __future__ import annotations

import contextlib
import os
import shutil
from typing import TextIO, cast

from dglkge.launch.background_stream import BackgroundStream

COLOURS = (36, 33, 32, 35, 34, 31)
"""ANSI foreground colours, given to the processes in turn."""

CLEAR_LINE = "\r\x1b[K"


class Console:
    """Writes prefixed lines, and on a terminal one moving progress bar below them.

    A stream whose reader has gone is no failure: the logs hold everything.

    Parameters
    ----------
    out : TextIO
        Where the lines of the processes go.
    err : TextIO
        Where the launcher's own words go.
    is_terminal : bool
        Whether `out` shows a moving line.
    is_coloured : bool
        Whether prefixes are coloured.
    """

    def __init__(self, out: TextIO, err: TextIO, is_terminal: bool, is_coloured: bool) -> None:
        self._out = out
        self._err = err
        self._is_terminal = is_terminal
        self._is_coloured = is_coloured
        self._bar = ""

    @classmethod
    def of(cls, out: TextIO, err: TextIO) -> Console:
        """Build a console as two streams allow; https://no-color.org is heeded."""
        is_terminal = out.isatty()
        return cls(out, err, is_terminal, is_terminal and not os.environ.get("NO_COLOR"))

    @classmethod
    def in_background(cls, out: TextIO, err: TextIO) -> Console:
        """Build a console that takes text at once and writes it in a thread, as fast as it is read."""
        streams = BackgroundStream(out)
        return cls.of(cast(TextIO, streams), cast(TextIO, BackgroundStream(err, streams)))

    def line(self, name: str, colour: int, text: str) -> None:
        """Write one whole line of a process above the bar."""
        prefix = f"[{name}]"
        if self._is_coloured:
            prefix = f"\x1b[{COLOURS[colour % len(COLOURS)]}m{prefix}\x1b[0m"
        self._write(self._out, f"{self._clear()}{prefix} {text}\n{self._bar}")

    def progress(self, name: str, text: str) -> None:
        """Show the bar of a process as the last line; an empty text takes it away."""
        if not self._is_terminal:
            return
        columns = shutil.get_terminal_size().columns
        bar = f"[{name}] {text}"[: columns - 1] if text else ""
        if bar != self._bar:
            clear = self._clear()
            self._bar = bar
            self._write(self._out, clear + bar)

    def message(self, text: str) -> None:
        """Write the launcher's own words."""
        if self._bar:
            self._write(self._out, CLEAR_LINE)
        self._write(self._err, "".join(f"[launcher] {line}\n" for line in text.splitlines()))
        if self._bar:
            self._write(self._out, self._bar)

    def summary(self, text: str) -> None:
        """Write a line for programs, without a prefix, when there is room for it: it must not be dropped."""
        self.finish()
        self._write(self._out, f"{self._clear()}{text}\n")

    def error(self, text: str) -> None:
        """Write why nothing was started, without a prefix."""
        self._write(self._err, text + "\n")

    def finish(self) -> None:
        """Wait, not for ever, until all that was written has arrived."""
        for stream in (self._out, self._err):
            if isinstance(stream, BackgroundStream):
                stream.finish()

    def _clear(self) -> str:
        """Return what takes the bar away."""
        return CLEAR_LINE if self._bar else ""

    def _write(self, stream: TextIO, text: str) -> None:
        """Write at once, as far as anybody still reads."""
        with contextlib.suppress(OSError, ValueError):
            stream.write(text)
            stream.flush()
