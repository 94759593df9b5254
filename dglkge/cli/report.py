"""``dglkge report`` and ``job watch``: what a run's files tell, as one HTML page and on the terminal."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dglkge.checkpoint.layout import Progress
from dglkge.cli import common
from dglkge.cli.common import cell, command, flag, option, print_text, write_text
from dglkge.data.dataset_files import SPLITS, TEST
from dglkge.distributed.jobs import human_bytes
from dglkge.errors import InputError

if TYPE_CHECKING:
    from rich.console import RenderableType

PAGE = "report.html"


@command(
    option("runs RUN", "folder of a run, or a checkpoint folder in it", nargs="+"),
    option("-o --output FILE.html", f"the page (default for one run: RUN/{PAGE})"),
    common.OVERWRITE,
    option("--split", "triples to rank", choices=SPLITS, default=TEST),
    option(
        "--limit",
        "rank N triples, drawn from the split; 0: all (default: 2000, down to 100 where there are very "
        "many entities; the page says how many)",
        least=0,
    ),
    option("--candidates N", "N sampled ones for each query (default: all)", type=common.num_candidates),
    common.SEED,
    option("--points", "entities of the map, the most frequent; 0: no map", least=0, default=2000),
    option("--projection", "of the map", choices=("pca", "tsne"), default="pca"),
    common.DATASET,
    common.NO_VERIFY,
    common.IMPORT,
)
def report(args: argparse.Namespace) -> Any:
    """Write one HTML page about a run, or about several side by side: data set, learning curves, ranking by
    relation, side and category, best and worst relations with predictions, a map of the entities, time and
    memory, partitions, configuration. The page needs no network; a phone and a printer show it too.

    Needs: pip install 'dglkge[report]'

    Examples
    --------
      dglkge report runs/demo                                  writes runs/demo/report.html
      dglkge report runs/a runs/b -o compare.html              side by side
      dglkge report runs/demo --limit 0 --overwrite            rank the whole test split
      dglkge report runs/demo --projection tsne --points 1000  the map by t-SNE
      dglkge report runs/demo --json > figures.json            the figures of the page, and no page
    """
    from dglkge.report.figures import Choices, collect  # here: torch takes a second, which --help need not
    from dglkge.report.page import packages, render

    choices = Choices(args.split, args.limit, args.candidates, args.seed, args.points, args.projection)
    target = None if args.json and args.output is None else _target(args)
    if target is not None:
        packages()
    bars: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:

        def show(section: str, number: int, total: int) -> None:
            if section not in bars:
                bars[section] = stack.enter_context(common.progress_bar(args, total, desc=section))
            bars[section].update(number)

        figures = collect(args.runs, choices, args.dataset, not args.no_verify, show)
    if target is not None:
        write_text(target, render(figures))
    if args.json or target is None:
        return figures
    print_text(f"written to {target}, {human_bytes(target.stat().st_size)}")
    return 0


def _target(args: argparse.Namespace) -> Path:
    """Return the path of the page, which may be written."""
    from dglkge.report.run_state import records_folder  # here: it imports numpy

    if args.output is None and len(args.runs) > 1:
        raise InputError(f"a page of {len(args.runs)} runs belongs to none of them: say with --output where")
    # Beside a checkpoint, not in it: its files are listed in a manifest.
    target = records_folder(Path(args.runs[0])) / PAGE if args.output is None else Path(args.output)
    if not target.parent.is_dir():
        raise InputError(f"cannot write {target}: there is no folder {target.parent}")
    if target.is_dir():
        raise InputError(f"cannot write {target}: it is a folder; --output takes the name of a file")
    if target.exists() and not args.overwrite:
        raise InputError(f"{target} exists; --overwrite replaces it")
    return target


@command(
    option("run RUN", "folder of a run"),
    flag("--once", "look once, and end"),
    option("--prometheus FILE", "replace FILE by metrics in Prometheus' text format"),
    option("--interval S", "seconds between two looks", least=0.1, most=86400, default=2.0),
    option("--logs FOLDER", "folder of the logs (default: that of the run, or RUN/logs)"),
    option("--lines", "events and lines of the log", least=0, most=100, default=10),
)
def watch(args: argparse.Namespace) -> Any:
    """Follow a run: progress, edges per second, loss, metrics of the valid split, memory and sent bytes of
    each process, last events. All of it is read from the files in the run's folder and from its logs. So it
    works for a run that has ended, and for one of other machines whose files are copied here (dglkge-launch
    --sync). It ends with Ctrl-C, or once the run is finished.

    Examples
    --------
      dglkge job watch runs/demo
      dglkge job watch runs/demo --once                      one look
      dglkge job watch runs/demo --json | jq .edges_per_second
      dglkge job watch runs/demo --logs logs/20261122-101500-4711
      dglkge job watch runs/demo --prometheus /var/lib/node_exporter/textfile/demo.prom --interval 15

    With --prometheus nothing is shown: FILE is replaced at each interval, atomically, in the text format that
    node_exporter's textfile collector reads. docs/watching.md lists the metrics.

    exit status: 0 at the end of the run, with --once, or after Ctrl-C; 2 for bad input; 1 for a full disk.
    """
    from dglkge.report.run_state import finite, prometheus_text, run_state

    def look() -> dict[str, Any]:
        state = run_state(Path(args.run), None if args.logs is None else Path(args.logs), args.lines)
        if args.prometheus is not None:
            write_text(Path(args.prometheus), prometheus_text(state))
        return state

    if args.json or args.once:
        state = look()
        return 0 if args.prometheus and not args.json else finite(state)
    with contextlib.suppress(KeyboardInterrupt):
        _follow(look, args.interval, is_shown=args.prometheus is None)
    return 0


@watch.shows
def _print_state(state: dict[str, Any], _args: argparse.Namespace) -> None:
    common.print_rich(_frame(state))


def _follow(look: Any, interval: float, is_shown: bool) -> None:
    """Look until the run is finished, and show the state on the terminal."""
    from rich import progress_bar, table  # noqa: F401
    from rich.console import Console
    from rich.live import Live

    from dglkge.report.run_state import FINISHED

    # All imports come before the first look, those of _frame too. They make classes by exec, and CPython ends
    # by the signal if Ctrl-C interrupts an exec, though the exception is caught.
    console = Console(quiet=not is_shown)
    state = look()
    # Another screen, as in less: the terminal is restored at the end. In a pipe the last frame is written.
    try:
        with Live(_frame(state), console=console, screen=console.is_terminal, auto_refresh=False) as live:
            while state["state"] != FINISHED:
                time.sleep(interval)
                state = look()
                live.update(_frame(state), refresh=console.is_terminal)
    finally:
        if is_shown and console.is_terminal:
            common.print_rich(_frame(state))


def _frame(state: Mapping[str, Any]) -> RenderableType:
    """Return what is shown of a state."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    from dglkge.report.run_state import NONE, duration, number

    progress, valid = state["progress"], state["valid"]
    head = Table.grid(padding=(0, 2))
    quiet = "" if state["quiet_seconds"] is None else f", last line {duration(state['quiet_seconds'])} ago"
    head.add_row("run", cell(state["run"]))
    head.add_row("state", f"{state['state']}{quiet}")
    epoch = [f"{progress['epoch']} of {number(progress['num_epochs'], 'd')}"]
    if progress["num_batches"]:
        epoch.append(f"batch {progress[Progress.BATCHES_DONE]:,} of {progress['num_batches']:,}")
    if state["seconds_left"] is not None:
        epoch.append(f"{duration(state['seconds_left'])} left")
    head.add_row("epoch", ", ".join(epoch))
    head.add_row("", ProgressBar(total=1.0, completed=progress["fraction"] or 0.0, width=50))
    head.add_row("speed", f"{number(state['edges_per_second'], ',.0f')} edges/s")
    loss, of_epoch = (number(state[name], ".4f") for name in ("loss", Progress.EPOCH_LOSS))
    head.add_row("loss", f"{loss}, {of_epoch} in this epoch")
    last, best = valid["last"], valid["best"]
    rankings = [] if last is None else [last] if best["epoch"] == last["epoch"] else [last, best]
    texts = [f"{number(r.get('mrr'), '.4f')} after epoch {r['epoch']}" for r in rankings]
    head.add_row("valid MRR", "; best ".join(texts) or NONE)
    if state["test"]:
        head.add_row("test MRR", number(state["test"].get("mrr"), ".4f"))
    head.add_row("checkpoint", NONE if state["version"] is None else f"version {state['version']}")
    parts: list[RenderableType] = [head]
    if state["processes"]:
        table = Table(box=None, padding=(0, 2), pad_edge=False)
        for title in ("process", "machine", "memory", "shared", "sent in this epoch"):
            table.add_column(title, justify="left" if title == "process" else "right")
        for name, numbers in state["processes"].items():
            sizes = map(numbers.get, ("memory_bytes", "shared_bytes", "bytes_sent"))
            table.add_row(name, str(numbers.get("machine", NONE)), *(number(size, "bytes") for size in sizes))
        parts += [Text(), table]
    if state["events"]:
        parts += [Text(), Text("events")]
        for event in state["events"]:
            first = event["message"].splitlines()[0] if event["message"] else ""
            parts.append(cell(f"  {event['time'][:19].replace('T', ' ')}  {event['process']}: {first}"))
    if state["log"]:
        parts += [Text(), Text("log of trainer 0"), *(cell(f"  {line}") for line in state["log"])]
    return Group(*parts)
