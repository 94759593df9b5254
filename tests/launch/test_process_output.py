"""Output cut into lines: by newline, with a progress bar's last state, at any boundary of reads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dglkge.launch.console import LONGEST_LINE_BYTES, TAIL_LINES, ProcessOutput
from tests.launch.conftest import ROOT


def lines_of(path: Path, chunks: list[bytes]) -> list[str]:
    """Feed chunks; return all lines."""
    output = ProcessOutput(path / "log")
    lines = [line for chunk in chunks for line in output.feed(chunk)]
    return lines + output.finish()


CASES = [
    (b"", []),
    (b"a\nb\n", ["a", "b"]),
    (b"a\nb", ["a", "b"]),
    (b"a\r\nb\r\n", ["a", "b"]),
    (b"\n\na\n", ["", "", "a"]),
    (b"\r 10%\r 50%\r100%\n", ["100%"]),
    (b"start\n\r 10%\r 50%\r100%\nend\n", ["start", "100%", "end"]),
    (b"epoch 1\r 10%\r      \repoch 1 done\n", ["epoch 1 done"]),
    ("h\u00e9llo \u2588\n".encode(), ["h\u00e9llo \u2588"]),
    (b"bad \xff byte\n", ["bad \ufffd byte"]),
    (b"\r 10%\r 20%", [" 20%"]),
]


@pytest.mark.parametrize(("data", "expected"), CASES)
def test_lines_at_any_boundary(tmp_path: Path, data: bytes, expected: list[str]) -> None:
    """One read, reads of one byte, and every cut in two give the same lines and the same log."""
    cuts = [[data], [data[i : i + 1] for i in range(len(data))]]
    cuts += [[data[:i], data[i:]] for i in range(len(data))]
    for chunks in cuts:
        assert lines_of(tmp_path, chunks) == expected
        assert (tmp_path / "log").read_text().splitlines() == expected


def test_progress(tmp_path: Path) -> None:
    """An unfinished line that has returned to its start is progress; a plain unfinished line is not."""
    output = ProcessOutput(tmp_path / "log")
    states = []
    for chunk in (
        b"plain",
        b" text\n",
        b"\r 10%",
        b"\r 20",
        b"%",
        b"\r",
        b" 30%",
        b"\r      \r",
        b"40%",
        b"\n",
    ):
        output.feed(chunk)
        states.append(output.progress)
    assert states == ["", "", " 10%", " 20", " 20%", " 20%", " 30%", "      ", "40%", ""]
    assert list(output.tail) == ["plain text", "40%"]
    output.finish()


def test_progress_needs_little_memory(tmp_path: Path) -> None:
    """However long a bar moves, only its present state is kept."""
    output = ProcessOutput(tmp_path / "log")
    for step in range(20000):
        assert output.feed(b"\r%6d of 20000 steps" % step) == []
        assert len(output._partial) < 100
    assert output.finish() == [" 19999 of 20000 steps"]


def test_endless_line_is_cut(tmp_path: Path) -> None:
    """A line without end does not fill the launcher's memory."""
    output = ProcessOutput(tmp_path / "log")
    lines = [line for _ in range(4) for line in output.feed(b"x" * LONGEST_LINE_BYTES)]
    lines += output.finish()
    assert "".join(lines) == "x" * (4 * LONGEST_LINE_BYTES)
    assert len(lines) > 1


def test_tail_and_log_are_there_while_it_runs(tmp_path: Path) -> None:
    """The log can be read during the job; the tail holds the last lines."""
    output = ProcessOutput(tmp_path / "log")
    output.feed(b"".join(b"%d\n" % i for i in range(100)))
    assert (tmp_path / "log").read_text().splitlines() == [str(i) for i in range(100)]
    assert list(output.tail) == [str(i) for i in range(100 - TAIL_LINES, 100)]
    output.finish()


def test_a_log_that_cannot_be_written_does_not_disturb(tmp_path: Path) -> None:
    """Lines come through and are counted; once the log can be written it says how many are missing."""
    path = tmp_path / "gone" / "log"
    output = ProcessOutput(path)
    assert output.feed(b"one\ntwo\nthree") == ["one", "two"]
    assert output.problem == "No such file or directory"
    path.parent.mkdir()
    assert output.feed(b"\nfour\n") == ["three", "four"]
    assert list(output.tail) == ["one", "two", "three", "four"]
    assert output.finish() == []
    text = "(2 lines are missing here: No such file or directory)\nthree\nfour\n"
    assert path.read_text() == text


FULL = """
import resource, sys
from pathlib import Path
from dglkge.launch.console import ProcessOutput
output = ProcessOutput(Path(sys.argv[1]))
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (14, hard))
shown = output.feed(b"12345\\nabcde\\nlost in the middle\\nlost\\n")
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
shown += output.feed(b"again\\n") + output.finish()
print(shown, output.problem)
"""


def test_a_full_disk_is_borne_by_any_user(tmp_path: Path) -> None:
    """A file may not grow beyond 14 bytes, as on a full disk; then it may."""
    log = tmp_path / "log"
    command = [sys.executable, "-c", FULL, str(log)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    shown = ["12345", "abcde", "lost in the middle", "lost", "again"]
    assert (done.returncode, done.stdout) == (0, f"{shown} File too large\n"), done.stderr
    assert log.read_text() == "12345\nabcde\nlo\n(2 lines are missing here: File too large)\nagain\n"
