"""The console: lines and bar, what is hidden, logs of processes, and streams that block nobody."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dglkge.launch import console as console_module
from dglkge.launch.console import LONGEST_LINE_BYTES, BackgroundStream, Console, ProcessOutput, is_noise
from tests.launch.conftest import ROOT


def screen(text: str) -> list[str]:
    """What a terminal shows of text that moves the cursor with CLEAR_LINE only."""
    rows = [row.rpartition("\r\x1b[K")[2] for row in text.split("\n")]
    assert not any(set(row) & {"\r", "\x1b"} for row in rows)
    return rows


def test_pipe_gets_lines_only() -> None:
    """Without a terminal there is no colour, no bar, no control character; a closed stream is no failure."""
    out, err = io.StringIO(), io.StringIO()
    console = Console(out, err)
    console.line("trainer 0", 1, "hello")
    console.progress("trainer 0", "50%")
    console.line("server 0", 0, "")
    console.message("two\nlines")
    assert out.getvalue() == "[trainer 0] hello\n[server 0] \n"
    out.close()
    console.line("a", 0, "x")
    console.message("still here")
    assert err.getvalue() == "[launcher] two\n[launcher] lines\n[launcher] still here\n"


def test_bar_stays_below_the_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is never torn or doubled, written when it changes, and cut where the terminal ends."""
    both = io.StringIO()
    console = Console(both, both, is_terminal=True)
    console.progress("trainer 0", "10% of the first epoch")
    console.line("server 0", 0, "serving")
    assert screen(both.getvalue()) == ["[server 0] serving", "[trainer 0] 10% of the first epoch"]
    console.progress("trainer 0", "50%")
    console.message("careful")
    assert screen(both.getvalue()) == ["[server 0] serving", "[launcher] careful", "[trainer 0] 50%"]
    before = both.getvalue()
    console.progress("trainer 0", "50%")
    monkeypatch.setenv("COLUMNS", "20")
    console.progress("trainer 0", "x" * 100)
    assert both.getvalue() == f"{before}{console_module.CLEAR_LINE}[trainer 0] {'x' * 7}"
    console.progress("trainer 0", "")
    console.line("trainer 0", 1, "100%")
    assert screen(both.getvalue()) == ["[server 0] serving", "[launcher] careful", "[trainer 0] 100%", ""]


def test_prefixes_are_coloured_in_turn_unless_no_color_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: True, raising=False)
    for no_color, name, colour in (("", "a", 0), ("", "g", 6), ("", "b", 1), ("1", "c", 0)):
        monkeypatch.setenv("NO_COLOR", no_color)
        Console.in_background(out, io.StringIO()).line(name, colour, "x")
    assert out.getvalue() == "\x1b[36m[a]\x1b[0m x\n\x1b[36m[g]\x1b[0m x\n\x1b[33m[b]\x1b[0m x\n[c] x\n"


NOISE = """
[00:11:44] /opt/dgl/src/rpc/rpc.cc:141: Sender with NetType~socket is created.
[W1121 socket.cpp:207] [c10d] The hostname of the client socket cannot be retrieved. err=-3
start graph service on server 0 for part 0
Server is waiting for connections non-blockingly on [127.0.0.1:30050]...
Warning! Interface: ifb0\x20
Warning! Interface: br-1f2e.5@if7\x20
IP address not available for interface.
Client [7961] waits on 127.0.0.1:58971
Machine (0) group (0) client (1) connect to server successfuly!
Client[1] in group[0] is exiting...
Server (0) shutdown.
Initialize the distributed services with graphbolt: False
Start to load partition from /d/graph.dgl which is 11744 bytes. It may take non-trivial time for large partition.
Finished loading node data.
Finished loading partition."""  # noqa: E501

SHOWN = """
Traceback (most recent call last):
Server is on fire
Warning! Interface: down and out
[00:11:44] /opt/dgl/src/rpc/rpc.cc:390: cannot reach 10.0.0.1
  Server (0) shutdown. Check failed
terminate called after throwing an instance of 'std::bad_alloc'
Command: make train
Finished loading my data.
[W1121 socket.cpp:207] [c10d] The client socket has timed out"""


def test_what_dgl_always_writes_is_noise_and_nothing_else() -> None:
    assert [line for line in NOISE.split("\n") if not is_noise(line)] == [""]
    assert [line for line in SHOWN.split("\n") if is_noise(line)] == []


LINES = [
    (b"", []),
    (b"a\nb", ["a", "b"]),
    (b"a\r\nb\r\n", ["a", "b"]),
    (b"\n\na\n", ["", "", "a"]),
    (b"start\n\r 10%\r 50%\r100%\nend\n", ["start", "100%", "end"]),
    (b"epoch 1\r 10%\r      \repoch 1 done\n", ["epoch 1 done"]),
    ("h\u00e9llo \u2588\n".encode(), ["h\u00e9llo \u2588"]),
    (b"bad \xff byte\n", ["bad \ufffd byte"]),
]


@pytest.mark.parametrize(("data", "expected"), LINES)
def test_lines_at_any_boundary(tmp_path: Path, data: bytes, expected: list[str]) -> None:
    cuts = [[data[:i], data[i:]] for i in range(len(data) + 1)]
    cuts += [[data[i : i + 1] for i in range(len(data))]]
    for chunks in cuts:
        output = ProcessOutput(tmp_path / "log")
        lines = [line for chunk in chunks for line in output.feed(chunk)]
        assert lines + output.finish() == expected
        assert (tmp_path / "log").read_text().splitlines() == expected


def test_progress_and_the_last_lines(tmp_path: Path) -> None:
    """An unfinished line that has returned to its start is progress; a plain unfinished line is not."""
    output = ProcessOutput(tmp_path / "log")
    chunks = (b"plain", b" text\n", b"\r 10%", b"\r 20", b"%", b"\r", b" 30%", b"\r      \r", b"40%", b"\n")
    states = [output.feed(chunk) is not None and output.progress for chunk in chunks]
    assert states == ["", "", " 10%", " 20", " 20%", " 20%", " 30%", "      ", "40%", ""]
    assert list(output.tail) == ["plain text", "40%"]
    numbers = [str(i) for i in range(100)]
    output.feed("".join(f"{number}\n" for number in numbers).encode())
    assert (tmp_path / "log").read_text().splitlines() == ["plain text", "40%", *numbers]
    assert list(output.tail) == numbers[-console_module.TAIL_LINES :]


def test_neither_a_long_bar_nor_an_endless_line_fills_the_memory(tmp_path: Path) -> None:
    output = ProcessOutput(tmp_path / "log")
    for step in range(20000):
        assert output.feed(b"\r%6d of 20000 steps" % step) == []
        assert len(output._partial) < 100
    assert output.feed(b"\n") == [" 19999 of 20000 steps"]
    lines = [line for _ in range(4) for line in output.feed(b"x" * LONGEST_LINE_BYTES)]
    assert len(lines) > 1 and "".join(lines + output.finish()) == "x" * (4 * LONGEST_LINE_BYTES)


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
    log = tmp_path / "log"
    command = [sys.executable, "-c", FULL, str(log)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    shown = ["12345", "abcde", "lost in the middle", "lost", "again"]
    assert (done.returncode, done.stdout) == (0, f"{shown} File too large\n"), done.stderr
    assert log.read_text() == "12345\nabcde\nlo\n(2 lines are missing here: File too large)\nagain\n"


@pytest.fixture
def pipe() -> Iterator[tuple[int, io.TextIOWrapper]]:
    """A pipe: where to read, and a text stream to write to."""
    reader, writer = os.pipe()
    stream = os.fdopen(writer, "w")
    yield reader, stream
    os.close(reader)
    stream.close()


def read_until(reader: int, end: str) -> str:
    data = b""
    while end.encode() not in data:
        data += os.read(reader, 65536)
    return data.decode()


def test_text_arrives_in_order(pipe) -> None:
    reader, stream = pipe
    stream.write("before\n")
    console = Console.in_background(stream, stream)
    for i in range(0, 100, 2):
        console.line("t", 0, f"{i}")
        console.error(f"[t] {i + 1}")
    console.finish()
    assert read_until(reader, "99\n") == "before\n" + "".join(f"[t] {i}\n" for i in range(100))


def test_a_blocked_reader_blocks_nobody(pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console_module, "MOST_WAITING_TEXTS", 2000)
    reader, stream = pipe
    out = BackgroundStream(stream)
    lines = [f"{i:08d} {'x' * 90}\n" for i in range(10_000)]  # 100 bytes each; the pipe takes 64 KB
    for line in lines:
        out.write(line)
    assert not out.finish(0.2)
    text = read_until(reader, lines[1999])  # the queue holds as many, and some have fitted into the pipe
    out.write("the end\n")
    shown = (text + read_until(reader, "the end\n")).splitlines(keepends=True)
    position = 0
    for line in shown[:-1]:
        if line.startswith("[launcher] "):
            number = int(line.split()[1])
            assert line == f"[launcher] {number} lines are missing here: this console was blocked\n"
            position += number
        else:
            assert line == lines[position]
            position += 1
    assert (position, shown[-1]) == (10_000, "the end\n") and 2000 <= len(shown) < 4000
    assert out.finish()


def test_the_end_says_that_the_last_lines_are_missing(pipe, monkeypatch: pytest.MonkeyPatch) -> None:

    def read_late() -> str:
        time.sleep(0.2)
        return read_until(reader, "end\n")

    monkeypatch.setattr(console_module, "MOST_WAITING_TEXTS", 1)
    reader, stream = pipe
    console = Console.in_background(stream, io.StringIO())
    for _ in range(4):  # the pipe takes the first one, the thread and the queue one each
        console._out.write("x" * 65535 + "\n")
        console._out.finish(0.1)
    console._out.write("y\nz\n")
    with ThreadPoolExecutor(1) as pool:
        text = pool.submit(read_late)
        console.summary("{}")
        console.finish()
        print("end", file=stream, flush=True)
    words = "x\n[launcher] 3 lines are missing here: this console was blocked\n{}\nend\n"
    assert text.result().endswith(words)
