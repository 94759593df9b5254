"""``dglkge job watch``: the state of a run in the terminal, as JSON, or for Prometheus."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dglkge.checkpoint.layout import Progress
from dglkge.cli.common import JSON, Command, flag, human_bytes, option, print_json, print_rich, write_text

if TYPE_CHECKING:
    from rich.console import RenderableType

NONE = "–"
PIPE_COLUMNS = 1000


def watch(args: argparse.Namespace) -> int:
    """Look at the run until it is finished."""
    from dglkge.report.learning_curves import finite
    from dglkge.report.run_state import FINISHED, prometheus_text, run_state

    def look() -> dict[str, Any]:
        return run_state(Path(args.run), None if args.logs is None else Path(args.logs), args.lines)

    is_single = args.once or args.json
    if args.prometheus is not None:
        target = Path(args.prometheus)
        try:
            while True:
                state = look()
                write_text(target, prometheus_text(state))
                if args.json:
                    print_json(finite(state))
                if is_single or state["state"] == FINISHED:
                    return 0
                time.sleep(args.interval)
        except KeyboardInterrupt:
            return 0
    if is_single:
        state = look()
        if args.json:
            print_json(finite(state))
        else:
            _print(state)
        return 0
    return _follow(look, args.interval, FINISHED)


def _follow(look: Any, interval: float, finished: str) -> int:
    """Show the state on the terminal until the run is finished."""
    from rich.console import Console
    from rich.live import Live

    console = Console()
    state = look()
    # Another screen, as in less: the terminal is restored at the end. In a pipe the last frame is written.
    with Live(_frame(state), console=console, screen=console.is_terminal, auto_refresh=False) as live:
        try:
            while state["state"] != finished:
                time.sleep(interval)
                state = look()
                live.update(_frame(state), refresh=console.is_terminal)
        except KeyboardInterrupt:
            pass
    if console.is_terminal:
        _print(state)
    return 0


def _print(state: Mapping[str, Any]) -> None:
    """Print a frame, as wide as the terminal; elsewhere no line is broken."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    width = None if is_terminal else PIPE_COLUMNS
    print_rich(_frame(state), width=width, is_terminal=is_terminal or None)


def _frame(state: Mapping[str, Any]) -> RenderableType:
    """Return what is shown of a state."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    progress, valid = state["progress"], state["valid"]
    head = Table.grid(padding=(0, 2))
    quiet = "" if state["quiet_seconds"] is None else f", last line {_duration(state['quiet_seconds'])} ago"
    head.add_row("run", Text(state["run"]))
    head.add_row("state", f"{state['state']}{quiet}")
    of = NONE if progress["num_epochs"] is None else progress["num_epochs"]
    batches = (
        f"batch {progress[Progress.BATCHES_DONE]:,} of {progress['num_batches']:,}"
        if progress["num_batches"]
        else ""
    )
    left = "" if state["seconds_left"] is None else f"{_duration(state['seconds_left'])} left"
    head.add_row("epoch", ", ".join(filter(None, [f"{progress['epoch']} of {of}", batches, left])))
    head.add_row("", ProgressBar(total=1.0, completed=progress["fraction"] or 0.0, width=50))
    head.add_row("speed", f"{_number(state['edges_per_second'], ',.0f')} edges/s")
    head.add_row(
        "loss", f"{_number(state['loss'], '.4f')}, {_number(state[Progress.EPOCH_LOSS], '.4f')} in this epoch"
    )
    head.add_row("valid MRR", _ranking(valid))
    if state["test"]:
        head.add_row("test MRR", _number(state["test"].get("mrr"), ".4f"))
    head.add_row("checkpoint", NONE if state["version"] is None else f"version {state['version']}")
    parts: list[RenderableType] = [head]
    if state["processes"]:
        table = Table(box=None, padding=(0, 2), pad_edge=False)
        for title in ("process", "machine", "memory", "shared", "sent in this epoch"):
            table.add_column(title, justify="left" if title == "process" else "right")
        for name, numbers in state["processes"].items():
            sizes = (_bytes(numbers.get(key)) for key in ("memory_bytes", "shared_bytes", "bytes_sent"))
            table.add_row(name, str(numbers.get("machine", NONE)), *sizes)
        parts += [Text(), table]
    if state["events"]:
        parts += [Text(), Text("events")]
        for event in state["events"]:
            first = event["message"].splitlines()[0] if event["message"] else ""
            parts.append(Text(f"  {event['time'][:19].replace('T', ' ')}  {event['process']}: {first}"))
    if state["log"]:
        parts += [Text(), Text("log of trainer 0"), *(Text(f"  {line}") for line in state["log"])]
    return Group(*parts)


def _ranking(valid: Mapping[str, Any]) -> str:
    """Describe the last and the best ranking of the valid split."""
    last, best = valid["last"], valid["best"]
    if last is None:
        return NONE
    text = f"{_number(last.get('mrr'), '.4f')} after epoch {last['epoch']}"
    if best["epoch"] == last["epoch"]:
        return text
    return f"{text}; best {_number(best.get('mrr'), '.4f')} after epoch {best['epoch']}"


def _number(value: float | None, form: str) -> str:
    return NONE if value is None else format(value, form)


def _bytes(value: int | None) -> str:
    return NONE if value is None else human_bytes(value)


def _duration(seconds: float) -> str:
    """Return a time in its two largest units.

    Examples
    --------
    >>> _duration(59.6), _duration(3720), _duration(200000)
    ('1 min 0 s', '1 h 2 min', '2 d 7 h')
    """
    left = round(seconds)
    for size, large, unit, small in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if left >= size:
            return f"{left // size} {large} {left % size // unit} {small}"
    return f"{left} s"


WATCH = Command(
    description="""Follow a run: progress, edges per second, loss, metrics of the valid split, memory and sent
bytes of each process, last events. All of it is read from the files in the run's folder and from its logs. So
it works for a run that has ended, and for one of other machines whose files are copied here
(dglkge-launch --sync). It ends with Ctrl-C, or once the run is finished.""",
    examples="""examples:
  dglkge job watch runs/demo
  dglkge job watch runs/demo --once                      one look
  dglkge job watch runs/demo --json | jq .edges_per_second
  dglkge job watch runs/demo --logs logs/20261122-101500-4711
  dglkge job watch runs/demo --prometheus /var/lib/node_exporter/textfile/demo.prom --interval 15

With --prometheus nothing is shown: FILE is replaced at each interval, atomically, in the text format that
node_exporter's textfile collector reads. docs/watching.md lists the metrics.

exit status: 0 at the end of the run, with --once, or after Ctrl-C; 2 for bad input; 1 for a full disk.""",
    options=[
        option("run", "folder of a run", metavar="RUN"),
        flag("--once", "look once, and end"),
        JSON,
        option(
            "--prometheus",
            "replace FILE by metrics in Prometheus' text format at each interval",
            metavar="FILE",
        ),
        option(
            "--interval",
            "seconds between two looks (default: %(default)g)",
            type=float,
            least=0.1,
            most=86400,
            unit=" seconds",
            default=2.0,
            metavar="S",
        ),
        option(
            "--logs",
            "folder of the logs (default: the one that the run names, or RUN/logs)",
            metavar="FOLDER",
        ),
        option(
            "--lines",
            "events and lines of the log (default: %(default)d)",
            least=0,
            most=100,
            default=10,
            metavar="N",
        ),
    ],
    run=watch,
)
