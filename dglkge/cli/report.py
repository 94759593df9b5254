"""``dglkge report``: one HTML page about a run, or several side by side."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path

from tqdm import tqdm

from dglkge.cli.common import (
    DATASET,
    IMPORT,
    JSON,
    NO_VERIFY,
    OVERWRITE,
    Command,
    human_bytes,
    num_candidates,
    option,
    print_json,
    print_text,
    write_text,
)
from dglkge.data.dataset_files import SPLITS, TEST
from dglkge.errors import InputError

PAGE = "report.html"


def report(args: argparse.Namespace) -> int:
    """Collect, render and write."""
    from dglkge.report.figures import Choices, collect  # here: torch takes a second, which --help need not
    from dglkge.report.page import packages, render

    choices = Choices(
        split=args.split,
        limit=args.limit,
        num_candidates=args.candidates,
        seed=args.seed,
        points=args.points,
        projection=args.projection,
    )
    target = None if args.json and args.output is None else _target(args)
    if target is not None:
        packages()
    bars: dict[str, tqdm] = {}

    with contextlib.ExitStack() as stack:

        def show(what: str, done: int, total: int) -> None:
            if what not in bars:
                # disable=None shows the bar only on a terminal.
                disable = True if args.json else None
                bars[what] = stack.enter_context(tqdm(total=total, desc=what, disable=disable))
            bars[what].update(done - bars[what].n)

        figures = collect(args.runs, choices, args.dataset, not args.no_verify, show)
    if target is not None:
        page = render(figures)
        write_text(target, page)
    if args.json:
        print_json(figures)
    elif target is not None:
        print_text(f"written to {target}, {human_bytes(target.stat().st_size)}")
    return 0


def _target(args: argparse.Namespace) -> Path:
    """Return the path of the page, which may be written."""
    from dglkge.report.learning_curves import records_folder  # here: it imports numpy

    if args.output is None and len(args.runs) > 1:
        raise InputError(f"a page of {len(args.runs)} runs belongs to none of them: say with --output where")
    run = Path(args.runs[0])
    if args.output is None and not run.is_dir():
        raise InputError(f"{run} does not exist; expected the folder of a run")
    # Beside a checkpoint, not in it: its files are listed in a manifest.
    target = records_folder(run) / PAGE if args.output is None else Path(args.output)
    if not target.parent.is_dir():
        raise InputError(f"cannot write {target}: there is no folder {target.parent}")
    if target.is_dir():
        raise InputError(f"cannot write {target}: it is a folder; --output takes the name of a file")
    if target.exists() and not args.overwrite:
        raise InputError(f"{target} exists; --overwrite replaces it")
    return target


REPORT = Command(
    description="""Write one HTML page about a run, or about several side by side: data set, learning curves,
ranking by relation, side and category, best and worst relations with predictions, a map of the entities, time
and memory, partitions, configuration. The page needs no network; a phone and a printer show it too.
Needs: pip install 'dglkge[report]'""",
    examples="""examples:
  dglkge report runs/demo                                  writes runs/demo/report.html
  dglkge report runs/a runs/b --output compare.html        side by side
  dglkge report runs/demo --limit 0 --overwrite            rank the whole test split
  dglkge report runs/demo --projection tsne --points 1000  the map by t-SNE
  dglkge report runs/demo --json > figures.json            the figures of the page, and no page""",
    options=[
        option(
            "runs",
            "folder of a run, or a checkpoint folder in it (RUN/checkpoint/best)",
            nargs="+",
            metavar="RUN",
        ),
        option("--output", f"the page (default for one run: RUN/{PAGE})", metavar="FILE.html"),
        OVERWRITE,
        option("--split", "triples to rank (default: %(default)s)", choices=SPLITS, default=TEST),
        option(
            "--limit",
            "rank N triples, drawn from the split; 0: all (default: at most 2000, and fewer, but at least "
            "100, where there are very many entities, so that the time is bounded; the page says how many)",
            least=0,
            metavar="N",
        ),
        option(
            "--candidates",
            "rank among all entities of the type, or N sampled ones for each query (default: all)",
            type=num_candidates,
            metavar="N",
        ),
        option("--seed", "seed of drawn triples and candidates (default: %(default)s)", type=int, default=0),
        option(
            "--points",
            "entities of the map, those with the most training triples; 0: no map (default: %(default)s)",
            least=0,
            default=2000,
            metavar="N",
        ),
        option("--projection", "of the map (default: %(default)s)", choices=("pca", "tsne"), default="pca"),
        DATASET,
        NO_VERIFY,
        IMPORT,
        JSON,
    ],
    run=report,
)
