"""What a process writes: whole lines to its log, lines and progress bars for people."""

from __future__ import annotations

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
        The log, written anew.

    Attributes
    ----------
    tail : deque of str
        The last lines.
    progress : str
        The present state of an unfinished line that has returned to its start; empty where there is none.
    """

    def __init__(self, log_path: Path) -> None:
        self.log_path = log_path
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.progress = ""
        self._partial = b""
        self._log = log_path.open("w", encoding="utf-8", buffering=1)

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
        self._log.close()
        return last

    def _keep(self, line: bytes) -> str:
        """Write one line to the log."""
        text = line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
        self.tail.append(text)
        self._log.write(text + "\n")
        return text
