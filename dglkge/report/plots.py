"""The plots of a report as plotly's figures, without colours of text and background: the page sets these."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from dglkge.data.dataset_files import VALID, Field
from dglkge.evaluation.metrics import CATEGORIES, SIDES, UNSEEN

PALETTE = "#3b82f6 #e8710a #16a34a #db2777 #8b5cf6 #0891b2 #b8860b #64748b #dc2626 #a16207".split()
"""Contrast of at least 3 with the page's white and with its black, so one list serves both."""

DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
SYMBOLS = ("circle", "diamond", "square", "triangle-up", "cross", "triangle-down", "star", "hexagon")
"""Differ where colours may not: in grey print, and for colour-blind readers."""

MOST_RELATIONS = 40
"""Relations in a plot: those with the most queries."""

MOST_NAMES = 25
"""Names on a map."""

HEIGHT, MAP_HEIGHT, ROW_HEIGHT = 300, 560, 20

Figure = dict[str, Any]
Values = Sequence[Any]
Runs = Sequence[Mapping[str, Any]]


def shown(text: str) -> str:
    """Return a text as plotly shows it literally: plotly reads some HTML in texts."""
    return html.escape(text, quote=False)


def figure(traces: Sequence[Figure], height: int = HEIGHT, **layout: Any) -> Figure:
    """Return a figure as JSON has it: ``data`` and ``layout``; empty if there are no traces."""
    if not traces:
        return {}
    common = {
        "height": height,
        "margin": {"l": 56, "r": 12, "t": 12, "b": 48},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        "hovermode": "closest",
        "dragmode": False,
        "showlegend": len(traces) > 1,
    }
    return {"data": list(traces), "layout": {**common, **layout}}


def _of(choices: Sequence[str], number: int) -> str:
    """Return the colour, dash or symbol of a run or of an entity type."""
    return choices[number % len(choices)]


def _axis(title: str, **more: Any) -> Figure:
    return {"title": {"text": title}, **more}


def _bars(
    x: Values, y: Values, hover: str, number: int = 0, name: str = "", is_hatched: bool = False, **more: Any
) -> Figure:
    """Return the bars of a run, or of a part of it, which may be hatched."""
    marker = {
        "color": _of(PALETTE, number),
        "pattern": {"shape": "/" if is_hatched else "", "fillmode": "replace"},
        "line": {"color": _of(PALETTE, number), "width": 1},
    }
    return _trace("bar", x, y, hover, name, marker=marker, **more)


def _trace(kind: str, x: Values, y: Values, hover: str, name: str, **more: Any) -> Figure:
    return {"type": kind, "x": x, "y": y, "hovertemplate": hover, "name": shown(name), **more}


def curves(runs: Runs, measure: str, title: str) -> Figure:
    """Return the plot of a learning curve of all runs that have it; empty if none has."""
    traces = []
    for number, run in enumerate(runs):
        valid, label = run["training"][VALID], run["label"]
        points = valid.get("mrr", []) if measure == VALID else run["training"][measure]
        lines = [(label, points, _of(SYMBOLS, number))]
        if measure == "loss" and valid.get("loss"):
            lines = [(f"{label}, train", *lines[0][1:]), (f"{label}, valid", valid["loss"], "x")]
        for name, points, symbol in lines:
            if points:
                style = {
                    "mode": "lines+markers" if len(points) <= 60 else "lines",
                    "line": {"color": _of(PALETTE, number), "dash": _of(DASHES, number), "width": 2},
                    "marker": {"size": 8 if symbol == "x" else 5, "symbol": symbol},
                }
                x, y = map(list, zip(*points))
                traces.append(_trace("scatter", x, y, "epoch %{x:.2f}: %{y:.4~g}", name, **style))
    # On a logarithmic axis there is no 0 to begin at.
    vertical = {"type": "log"} if measure == "loss" and is_log_better(runs) else {"rangemode": "tozero"}
    return figure(traces, xaxis=_axis("epochs", rangemode="tozero"), yaxis=_axis(title, **vertical))


def completion_curves(runs: Runs) -> Figure:
    """Return precision by recall of held-out triples among the missing ones; empty if no run has them."""
    traces = []
    for number, run in enumerate(runs):
        for split, points in run["completions"].items():
            style = {"mode": "lines+markers", "line": {"color": _of(PALETTE, number), "width": 2}}
            hover = "best %{text}: precision %{y:.4f}, recall %{x:.4f}"
            x, y = ([point[name] for point in points] for name in ("recall", "precision"))
            ranks = [f"{point['rank']:,}" for point in points]
            traces.append(_trace("scatter", x, y, hover, f"{run['label']}, {split}", text=ranks, **style))
    recall, precision = (_axis(title, rangemode="tozero") for title in ("recall", "precision"))
    return figure(traces, xaxis=recall, yaxis=precision)


def is_log_better(runs: Runs) -> bool:
    """Return whether the positive values of losses span more than a factor of 20."""
    points = [run["training"]["loss"] + run["training"][VALID].get("loss", []) for run in runs]
    values = [value for _, value in chain(*points) if value is not None]
    return bool(values) and min(values) > 0 and max(values) / min(values) > 20


def by_category(runs: Runs) -> Figure:
    """Return the plot of MRR by category of relations and side: colours are runs, hatched bars are tails."""
    used = {name for run in runs for name in run["ranking"]["categories"]}
    names = ["all relations", *(name for name in (*CATEGORIES, UNSEEN) if name in used)]
    traces = []
    for number, run in enumerate(runs):
        groups = {names[0]: run["ranking"]["sides"], **run["ranking"]["categories"]}
        for side in SIDES[1:]:
            results = [groups[name][side] if name in groups else {} for name in names]
            mrr, counts = ([result.get(key) for result in results] for key in ("mrr", "num_queries"))
            title = f"{run['label']}, {side}" if len(runs) > 1 else side
            hover = "%{x}: MRR %{y:.4f}, %{customdata:,} queries"
            traces.append(_bars(names, mrr, hover, number, title, side == "tail", customdata=counts))
    return figure(traces, barmode="group", xaxis={"type": "category"}, yaxis=_axis("MRR", range=[0, 1]))


def by_relation(runs: Runs, labels: Sequence[str]) -> Figure:
    """Return the plot of MRR by some relations of runs on one data set, the best at the top."""
    first = runs[0]["ranking"]["relations"]
    ordered = sorted(labels, key=lambda label: first[label]["both"]["mrr"] if label in first else -1.0)
    traces = []
    for number, run in enumerate(runs):
        metrics = run["ranking"]["relations"]
        places = [place for place, label in enumerate(ordered) if label in metrics]
        results = [metrics[ordered[place]]["both"] for place in places]
        # Open after the first run's, which equal values would hide.
        marker = {
            "color": _of(PALETTE, number),
            "size": 9,
            "symbol": _of(SYMBOLS, number) + ("-open" if number else ""),
            "line": {"width": 2, "color": _of(PALETTE, number)},
        }
        style = {
            "mode": "markers",
            "marker": marker,
            "text": [shown(ordered[place]) for place in places],
            "customdata": [result["num_queries"] for result in results],
        }
        hover, mrr = "%{text}: MRR %{x:.4f}, %{customdata:,} queries", [result["mrr"] for result in results]
        traces.append(_trace("scatter", mrr, places, hover, run["label"], **style))
    return figure(
        traces,
        height=110 + ROW_HEIGHT * len(ordered),
        xaxis=_axis("MRR", range=[-0.02, 1.02]),
        # Two long names may be cut to the same text, so places are numbers and the texts are their ticks.
        yaxis={
            "tickvals": list(range(len(ordered))),
            "ticktext": [shown(_cut(label)) for label in ordered],
            "automargin": True,
            "range": [-0.7, len(ordered) - 0.3],
        },
    )


def _cut(text: str, most: int = 30) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def degree_bars(histogram: Sequence[Sequence[int]]) -> Figure:
    """Return the plot of the entities by degree."""
    names = [str(low) if low == high else f"{low:,}–{high:,}" for low, high, _ in histogram]
    bars = _bars(names, [count for _, _, count in histogram], "degree %{x}: %{y:,} entities")
    axis = _axis("training triples of an entity", type="category", automargin=True, tickangle=-45)
    return figure([bars], xaxis=axis, yaxis=_axis("entities"))


def part_bars(parts: Sequence[Mapping[str, Any]]) -> Figure:
    """Return the plot of the edges of each partition: inside it, and cut."""
    names = [f"part {part['part']}" for part in parts]
    cut = [part[Field.CUT_EDGES] for part in parts]
    inside = [part["num_edges"] - number for part, number in zip(parts, cut)]
    hover = "%{x}: %{y:,} edges"
    traces = [_bars(names, inside, hover, 0, "both ends inside"), _bars(names, cut, hover, 1, "cut", True)]
    return figure(traces, barmode="stack", xaxis={"type": "category"}, yaxis=_axis("edges"))


def phase_bars(runs: Runs) -> Figure:
    """Return the plot of the share of each phase in the trainers' time; empty if none was measured."""
    traces = []
    for number, run in enumerate(runs):
        if seconds := run["training"]["phase_seconds"]:
            total = sum(seconds.values()) or 1.0
            shares = [value / total for value in seconds.values()]
            traces.append(_bars(list(seconds), shares, "%{x}: %{y:.1%}", number, run["label"]))
    axis = _axis("share of trainers' time", tickformat=".0%")
    return figure(traces, barmode="group", yaxis=axis)


def map_points(entities: Mapping[str, Any]) -> Figure:
    """Return the plot of a map: a colour for each type, or for one type alone by degree."""
    types = entities["types"]
    traces = []
    for number, (name, map_) in enumerate(types.items()):
        symbol, colour = _of(SYMBOLS, number), _of(PALETTE, number)
        marker: Figure = {"size": 6, "opacity": 0.75, "symbol": symbol, "color": colour}
        if len(types) == 1:
            logarithms = [math.log10(max(1, degree)) for degree in map_["degrees"]]
            ticks = list(range(math.ceil(max(logarithms, default=0)) + 1))
            bar = _axis("degree", thickness=12, tickvals=ticks, ticktext=[f"{10**tick:,}" for tick in ticks])
            marker |= {"color": logarithms, "colorscale": "Viridis", "colorbar": bar}
        style = {"mode": "markers", "marker": marker, "customdata": map_["degrees"]}
        hover, texts = "%{text}<br>degree %{customdata:,}", [shown(entity) for entity in map_["names"]]
        traces.append(_trace("scatter", map_["x"], map_["y"], hover, name, text=texts, **style))
    titles = [f"component {i + 1} ({share:.1%})" for i, share in enumerate(entities["explained"])] or ["", ""]
    x, y = (_axis(title, zeroline=False, showticklabels=bool(title)) for title in titles)
    return figure(
        traces,
        height=MAP_HEIGHT,
        margin={"l": 56, "r": 12, "t": 40, "b": 48},  # room for the buttons above the plot
        annotations=_map_names(types.values()),
        xaxis=x,
        yaxis=y,
    )


def _map_names(types: Iterable[Mapping[str, Any]]) -> list[Figure]:
    """Return the names of the entities with the highest degrees, but for those that would lie on others."""
    columns = [zip(*(map_[key] for key in ("degrees", "x", "y", "names"))) for map_ in types]
    points = sorted(chain.from_iterable(columns), key=lambda point: -point[0])
    if not points:
        return []
    _, xs, ys, _ = zip(*points)
    width, height = (max(max(values) - min(values), 1e-9) for values in (xs, ys))
    names: list[Figure] = []
    for _, x, y, name in points:
        places = ((other["x"], other["y"]) for other in names)
        if all(abs(x - at) > 0.15 * width or abs(y - above) > 0.05 * height for at, above in places):
            style = {"showarrow": False, "yshift": 10, "font": {"size": 11}}
            names.append({"x": x, "y": y, "text": shown(_cut(name)), **style})
            if len(names) == MOST_NAMES:
                break
    return names
