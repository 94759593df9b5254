"""Lines, the moving bar and the launcher's words on a terminal and on a pipe."""

from __future__ import annotations

import io

import pytest

from dglkge.launch.console import CLEAR_LINE, Console


def screen(text: str) -> list[str]:
    """What a terminal shows: CR returns, ESC[K clears to the end of the line."""
    rows, column = [""], 0
    index = 0
    while index < len(text):
        if text.startswith("\x1b[K", index):
            rows[-1] = rows[-1][:column]
            index += 3
            continue
        if text[index] == "\n":
            rows.append("")
            column = 0
        elif text[index] == "\r":
            column = 0
        else:
            rows[-1] = rows[-1][:column] + text[index] + rows[-1][column + 1 :]
            column += 1
        index += 1
    return rows


def test_pipe_gets_lines_only() -> None:
    """Without a terminal there is no colour, no bar, no control character."""
    out, err = io.StringIO(), io.StringIO()
    console = Console.of(out, err)
    console.line("trainer 0", 1, "hello")
    console.progress("trainer 0", "50%")
    console.line("server 0", 0, "")
    console.message("two\nlines")
    assert out.getvalue() == "[trainer 0] hello\n[server 0] \n"
    assert err.getvalue() == "[launcher] two\n[launcher] lines\n"


def test_bar_stays_below_the_lines() -> None:
    """All lines and the launcher's words come above the bar, which is never torn or doubled."""
    both = io.StringIO()
    console = Console(both, both, is_terminal=True, is_coloured=False)
    console.progress("trainer 0", "10% of the first epoch")
    console.line("server 0", 0, "serving")
    assert screen(both.getvalue()) == ["[server 0] serving", "[trainer 0] 10% of the first epoch"]
    console.progress("trainer 0", "50%")
    console.message("careful")
    assert screen(both.getvalue()) == ["[server 0] serving", "[launcher] careful", "[trainer 0] 50%"]
    console.progress("trainer 0", "")
    console.line("trainer 0", 1, "100%")
    expected = ["[server 0] serving", "[launcher] careful", "[trainer 0] 100%", ""]
    assert screen(both.getvalue()) == expected


def test_bar_fits_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bar that is wider than the terminal would leave its first row behind."""
    monkeypatch.setenv("COLUMNS", "20")
    out = io.StringIO()
    Console(out, out, is_terminal=True, is_coloured=False).progress("t", "x" * 100)
    assert len(out.getvalue()) == 19


def test_unchanged_bar_is_not_written_again() -> None:
    """The bar costs nothing while it does not move."""
    out = io.StringIO()
    console = Console(out, out, is_terminal=True, is_coloured=False)
    console.progress("t", "1%")
    console.progress("t", "1%")
    assert out.getvalue() == "[t] 1%"
    console.progress("t", "2%")
    assert out.getvalue() == f"[t] 1%{CLEAR_LINE}[t] 2%"


def test_colours() -> None:
    """Prefixes are coloured in turn, texts are not."""
    out = io.StringIO()
    console = Console(out, out, is_terminal=True, is_coloured=True)
    console.line("a", 0, "x")
    console.line("g", 6, "x")
    console.line("b", 1, "x")
    assert out.getvalue() == "\x1b[36m[a]\x1b[0m x\n\x1b[36m[g]\x1b[0m x\n\x1b[33m[b]\x1b[0m x\n"


class _Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        """Say so."""
        return True


@pytest.mark.parametrize(("no_color", "is_coloured"), [("", True), ("1", False)])
def test_no_color(monkeypatch: pytest.MonkeyPatch, no_color: str, is_coloured: bool) -> None:
    """NO_COLOR is heeded."""
    monkeypatch.setenv("NO_COLOR", no_color)
    out = _Terminal()
    Console.of(out, io.StringIO()).line("a", 0, "x")
    assert ("\x1b[36m" in out.getvalue()) is is_coloured


def test_reader_gone() -> None:
    """A closed stream (``| head``) is no failure."""
    out, err = io.StringIO(), io.StringIO()
    console = Console.of(out, err)
    out.close()
    console.line("a", 0, "x")
    console.message("still here")
    assert err.getvalue() == "[launcher] still here\n"
