"""Markdown tables of measured figures."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from measuring.run_figures import RunFigures, medians

HEADER = (
    "| run | edges/s | : peer | first epoch | over the wall | GFLOP/s | of the products' limit "
    "| start to first batch, s | peak memory, GB | CPU s per million edges | peer : ours | test MRR |"
)
# Derived from the header, so that a new column cannot be forgotten here.
RULE = "|---|" + "--:|" * (HEADER.count("|") - 2)


def run_row(
    name: str, runs: Sequence[RunFigures], peer: Sequence[RunFigures], flops: int, limits: Sequence[float]
) -> str:
    """Return the row of a run: medians over its repeats.

    Parameters
    ----------
    name : str
    runs : sequence of RunFigures
        The repeats.
    peer : sequence of RunFigures
        Repeats of the run to compare with; empty for none.
    flops : int
        Operations of one positive's products.
    limits : sequence of float
        Operations per second that the products alone reach, for each repeat; empty if they were not measured.
    """
    middle = medians(runs)
    speed, cost = middle["edges_per_second"] or 0.0, middle["processor_seconds_per_million"]
    rate = speed * flops
    shares = [run.edges_per_second * flops / limit for run, limit in zip(runs, limits)]
    ratio = saving = None
    if peer and runs is not peer:
        ratio = speed / statistics.median(run.edges_per_second for run in peer)
        peer_cost = statistics.median(run.processor_seconds_per_million for run in peer)
        saving = peer_cost / cost if cost and peer_cost else None
    cells = [
        name,
        f"{speed:,.0f}",
        "" if ratio is None else f"{ratio:.2f}×",
        f"{middle['first_edges_per_second']:,.0f}",
        f"{middle['wall_edges_per_second']:,.0f}",
        f"{rate / 1e9:,.0f}" if shares else "",
        f"{100 * statistics.median(shares):.0f}%" if shares else "",
        f"{middle['first_batch_seconds']:.1f}",
        f"{(middle['peak_bytes'] or 0) / 1e9:.2f}",
        f"{cost:.1f}" if cost else "",
        "" if saving is None else f"{saving:.2f}×",
        "" if middle["mrr"] is None else f"{middle['mrr']:.4f}",
    ]
    return "| " + " | ".join(cells) + " |"


def run_table(
    runs: Mapping[str, Sequence[RunFigures]],
    peer: str | None,
    flops: int,
    limits: Mapping[str, Sequence[float]],
) -> str:
    """Return a table of runs, each with the limits of its name; the peer, which has none, comes last."""
    reference = runs.get(peer, []) if peer else []
    rows = [run_row(name, repeats, reference, flops, limits.get(name, ())) for name, repeats in runs.items()]
    return "\n".join([HEADER, RULE, *rows])


def columns_table(title: str, columns: Mapping[str, Mapping[str, float]], factor: float, digits: int) -> str:
    """Return a table of numbers with a column for each run and a row for each name that one of them has.

    Parameters
    ----------
    title : str
        Heading of the names.
    columns : mapping of mapping
        Numbers by name, for each run.
    factor : float
        Factor of the numbers.
    digits : int
        Digits after the point.
    """
    names = list(dict.fromkeys(name for numbers in columns.values() for name in numbers))
    lines = [f"| {title} | " + " | ".join(columns) + " |", "|---|" + "--:|" * len(columns)]
    for name in names:
        cells = [
            f"{factor * numbers[name]:,.{digits}f}" if name in numbers else "" for numbers in columns.values()
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
