"""What a process writes: whole lines to its log, lines and progress bars for people."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from pathlib import Path

TAIL_LINES = 20
LONGEST_LINE_BYTES = 65536


class ProcessOutput:
    """Cuts the output of one process into lines and keeps its log.

    A progress bar returns to the start of its line with CR before it writes itself anew; a line of the log is
    what stood there last.

    Parameters
    ----------
    log_path : Path
        The log, written anew. A log that cannot be written (its disk is full, its folder is gone) does not
        disturb the job: its lines are counted, each further line tries again, and once one gets through the
        log says how many are missing.

    Attributes
    ----------
    problem : str or None
        Why the log could not be written, from the first time on.
    tail : deque of str
        The last lines.
    progress : str
        The present state of an unfinished line that has returned to its start; empty where there is none.
    """

    def __init__(self, log_path: Path) -> None:
        self.log_path = log_path
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.progress = ""
        self.problem: str | None = None
        self._partial = b""
        self._log: int | None = None
        self._num_lost = 0
        self._is_cut = False  # whether the log ends in the middle of a line that did not fit
        self._open_flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_TRUNC
        self._write("")

    def feed(self, data: bytes) -> list[str]:
        """Take what the process wrote.

        Returns
        -------
        list of str
            The lines that it completed.
        """
        *complete, self._partial = (self._partial + data).split(b"\n")
        if b"\r" in self._partial:
            # a bar in motion; what it showed before is of no more use
            before, _, after = self._partial.rpartition(b"\r")
            shown = after if after.strip() else before.rpartition(b"\r")[2]
            self.progress = shown.decode(errors="replace")
            self._partial = b"\r" + shown + (b"" if after.strip() else b"\r" + after)
        elif complete:
            self.progress = ""
        if len(self._partial) > LONGEST_LINE_BYTES:
            complete.append(self._partial)
            self._partial = b""
        return [self._keep(line) for line in complete]

    def finish(self) -> list[str]:
        """Close the log; return the last line if it had no end."""
        last = [self._keep(self._partial)] if self._partial.strip() else []
        self._partial = b""
        self.progress = ""
        if self._log is not None:
            with contextlib.suppress(OSError):  # a full disk may tell so only now
                os.close(self._log)
            self._log = None
        return last

    def _keep(self, line: bytes) -> str:
        """Write one line to the log."""
        text = line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
        self.tail.append(text)
        self._write(text + "\n")
        return text

    def _write(self, text: str) -> None:
        """Write to the log, past all buffers, so that nothing is left to fail later; note why it fails."""
        num_lines = text.count("\n")
        if self._num_lost:
            text = f"({self._num_lost} lines are missing here: {self.problem})\n{text}"
        if self._is_cut:
            text = "\n" + text
        data = text.encode(errors="replace")
        try:
            if self._log is None:
                self._log = os.open(self.log_path, self._open_flags, 0o666)
                self._open_flags &= ~os.O_TRUNC
            while data:
                data = data[os.write(self._log, data) :]
                self._is_cut = bool(data)
            self._num_lost = 0
        except OSError as error:
            self._num_lost += num_lines
            self.problem = self.problem or (error.strerror or str(error))
