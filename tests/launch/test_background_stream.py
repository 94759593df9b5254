"""Text for a console that blocks, drops nothing that fits, and says what is missing."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Iterator

import pytest

from dglkge.launch import console as background_stream
from dglkge.launch.console import BackgroundStream, Console


@pytest.fixture
def pipe() -> Iterator[tuple[int, io.TextIOWrapper]]:
    """A pipe: where to read, and a text stream to write to."""
    reader, writer = os.pipe()
    stream = os.fdopen(writer, "w")
    yield reader, stream
    os.close(reader)
    stream.close()


def read_until(reader: int, end: str) -> str:
    """Read until a text has come."""
    data = b""
    while end.encode() not in data:
        data += os.read(reader, 65536)
    return data.decode()


def test_text_arrives_in_order(pipe) -> None:
    """Two streams of one pipe keep the order of their text; what stood in the buffer comes first."""
    reader, stream = pipe
    stream.write("before\n")
    out = BackgroundStream(stream)
    err = BackgroundStream(stream, out)
    for i in range(100):
        (out, err)[i % 2].write(f"{i}\n")
    assert out.finish() and err.finish()
    assert read_until(reader, "99\n") == "before\n" + "".join(f"{i}\n" for i in range(100))


def test_a_blocked_reader_blocks_nobody(pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not fit into the queue is dropped line by line, counted, and told once there is room."""
    monkeypatch.setattr(background_stream, "MOST_WAITING_BYTES", 200_000)
    reader, stream = pipe
    out = BackgroundStream(stream)
    lines = [f"{i:08d} {'x' * 90}\n" for i in range(10_000)]  # 100 bytes each; the pipe takes 64 KB
    for line in lines:
        out.write(line)
    assert not out.finish(0.2)
    text = read_until(reader, lines[1999])  # the queue holds as many, and some have fitted into the pipe
    out.write("the end\n")
    shown = (text + read_until(reader, "the end\n")).splitlines(keepends=True)
    position = num_missing = 0
    for line in shown[:-1]:
        if line.startswith("[launcher] "):
            number = int(line.split()[1])
            assert line == f"[launcher] {number} lines are missing here: this console was blocked\n"
            position += number
            num_missing += number
        else:
            assert line == lines[position]
            position += 1
    assert (position, shown[-1]) == (10_000, "the end\n")
    assert 2000 <= 10_000 - num_missing < 4000
    assert out.finish()


def test_a_reader_that_is_slow_gets_everything(pipe) -> None:
    """The end waits as long as anything moves."""
    reader, stream = pipe
    out = BackgroundStream(stream)
    out.write("x" * 300_000 + "\nend\n")
    found = []
    thread = threading.Thread(target=lambda: found.append(read_until(reader, "end\n")))
    thread.start()
    assert out.finish()
    thread.join()
    assert len(found[0]) == 300_005


def test_a_summary_is_not_dropped(pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads slowly may miss lines of processes, is told so, and gets the line for programs."""
    monkeypatch.setattr(background_stream, "MOST_WAITING_BYTES", 200_000)
    reader, stream = pipe
    console = Console.in_background(stream, io.StringIO())
    for i in range(10_000):
        console.line("trainer 0", 0, f"{i:08d} {'x' * 90}")
    found = []
    thread = threading.Timer(0.3, lambda: found.append(read_until(reader, "end\n")))
    thread.start()
    words = "{" + "x" * 5000 + "}"
    console.summary(words)
    console.finish()
    stream.write("end\n")
    stream.flush()
    thread.join()
    *lines, summary, _ = found[0].splitlines()
    notices = [line for line in lines if line.startswith("[launcher] ")]
    num_missing = sum(int(line.split()[1]) for line in notices)
    assert num_missing == 10_000 - (len(lines) - len(notices)) > 0
    assert summary == words


def test_the_end_says_that_the_last_lines_are_missing(pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nothing is written after them."""
    monkeypatch.setattr(background_stream, "MOST_WAITING_BYTES", 1000)
    reader, stream = pipe
    out = BackgroundStream(stream)
    out.write("x" * 900 + "\n")
    out.write("y" * 2000 + "\nz\n")
    assert out.finish()
    stream.write("end\n")
    stream.flush()
    notice = "[launcher] 2 lines are missing here: this console was blocked\n"
    assert read_until(reader, "end\n") == "x" * 900 + "\n" + notice + "end\n"


def test_a_reader_that_has_gone() -> None:
    """Text for nobody is no failure, and nothing waits for it."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as gone:
        out = BackgroundStream(gone)
        out.write("x\n" * 100_000)
        assert out.finish()


def test_streams_without_a_descriptor() -> None:
    """They are written to directly."""
    stream = io.StringIO()
    out = BackgroundStream(stream)
    out.write("x")
    assert stream.getvalue() == "x" and out.finish() and not out.isatty()
