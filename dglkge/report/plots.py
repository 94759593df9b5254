"""The plots of a report as plotly's figures, without colours of text and background: the page sets these."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import plotly.graph_objects as go

from dglkge.data.dataset_files import VALID, Field
from dglkge.evaluation.metrics import CATEGORIES, SIDES, UNSEEN

PALETTE = (
    *("#3b82f6", "#e8710a", "#16a34a", "#db2777", "#8b5cf6"),
    *("#0891b2", "#b8860b", "#64748b", "#dc2626", "#a16207"),
)
"""Contrast of at least 3 with the page's white and with its black, so one list serves both."""

DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
SYMBOLS = ("circle", "diamond", "square", "triangle-up", "cross", "triangle-down", "star", "hexagon")
"""Differ where colours may not: in grey print, and for colour-blind readers."""

MOST_RELATIONS = 40
"""Relations in a plot: those with the most queries."""

MOST_NAMES = 25
"""Names on a map."""

HEIGHT, MAP_HEIGHT, ROW_HEIGHT = 300, 560, 20


def shown(text: str) -> str:
    """Return a text as plotly shows it literally: plotly reads some HTML in texts."""
    return html.escape(text, quote=False)


def colour(number: int) -> str:
    """Return the colour of a run or of an entity type."""
    return PALETTE[number % len(PALETTE)]


def figure(traces: Sequence[Any], height: int = HEIGHT, **layout: Any) -> dict[str, Any]:
    """Return a figure as JSON has it: ``data`` and ``layout``."""
    common = {
        "height": height,
        "margin": {"l": 56, "r": 12, "t": 12, "b": 48},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        "hovermode": "closest",
        "dragmode": False,
    }
    made = go.Figure(data=list(traces), layout={**common, **layout})
    # plotly's default template would set colours, and add 6 kB to each figure.
    made.layout.template = None
    plain: dict[str, Any] = made.to_plotly_json()
    plain["layout"].pop("template", None)
    return plain


def curves(runs: Sequence[Mapping[str, Any]], what: str, title: str, is_log: bool = False) -> dict[str, Any]:
    """Return the plot of a learning curve of all runs that have it; empty if none has."""
    traces = []
    for number, run in enumerate(runs):
        points = run["training"][VALID].get("mrr", []) if what == VALID else run["training"][what]
        if not points:
            continue
        traces.append(
            go.Scatter(
                x=[point[0] for point in points],
                y=[point[1] for point in points],
                name=shown(run["label"]),
                mode="lines+markers" if len(points) <= 60 else "lines",
                line={"color": colour(number), "dash": DASHES[number % len(DASHES)], "width": 2},
                marker={"size": 5, "symbol": SYMBOLS[number % len(SYMBOLS)]},
                hovertemplate="epoch %{x:.2f}: %{y:.4~g}",
            )
        )
    if not traces:
        return {}
    # On a logarithmic axis there is no 0 to begin at.
    vertical = {"type": "log"} if is_log else {"rangemode": "tozero"}
    return figure(
        traces,
        showlegend=len(traces) > 1,
        xaxis={"title": {"text": "epochs"}, "rangemode": "tozero"},
        yaxis={"title": {"text": title}, **vertical},
    )


def is_log_better(runs: Sequence[Mapping[str, Any]], what: str) -> bool:
    """Return whether a curve's positive values span more than a factor of 20."""
    values = [point[1] for run in runs for point in run["training"][what] if point[1] is not None]
    return bool(values) and min(values) > 0 and max(values) / min(values) > 20


def by_category(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the plot of MRR by category of relations and side: colours are runs, hatched bars are tails."""
    names = ["all relations"]
    names += [
        name for name in (*CATEGORIES, UNSEEN) if any(name in run["ranking"]["categories"] for run in runs)
    ]
    traces = []
    for number, run in enumerate(runs):
        groups = {names[0]: run["ranking"]["sides"], **run["ranking"]["categories"]}
        for side in SIDES[1:]:
            found = [groups[name][side] if name in groups else None for name in names]
            title = f"{run['label']}, {side}" if len(runs) > 1 else side
            traces.append(
                go.Bar(
                    x=names,
                    y=[None if one is None else one["mrr"] for one in found],
                    customdata=[None if one is None else one["num_queries"] for one in found],
                    name=shown(title),
                    marker={
                        "color": colour(number),
                        "pattern": {"shape": "/" if side == "tail" else "", "fillmode": "replace"},
                        "line": {"color": colour(number), "width": 1},
                    },
                    hovertemplate="%{x}: MRR %{y:.4f}, %{customdata:,} queries",
                )
            )
    axis = {"title": {"text": "MRR"}, "range": [0, 1]}
    return figure(traces, barmode="group", xaxis={"type": "category"}, yaxis=axis)


def by_relation(runs: Sequence[Mapping[str, Any]], labels: Sequence[str]) -> dict[str, Any]:
    """Return the plot of MRR by relation, the best at the top.

    Parameters
    ----------
    runs : sequence of mapping
        Runs on one data set.
    labels : sequence of str
        The relations to show.
    """
    found = runs[0]["ranking"]["relations"]
    ordered = sorted(labels, key=lambda label: found[label]["both"]["mrr"] if label in found else -1.0)
    # Two long names may be cut to the same text, so places are numbers and the texts are their ticks.
    ticks = [shown(_cut(label)) for label in ordered]
    traces = []
    for number, run in enumerate(runs):
        metrics = run["ranking"]["relations"]
        places = [place for place, label in enumerate(ordered) if label in metrics]
        traces.append(
            go.Scatter(
                x=[metrics[ordered[place]]["both"]["mrr"] for place in places],
                y=places,
                text=[shown(ordered[place]) for place in places],
                customdata=[metrics[ordered[place]]["both"]["num_queries"] for place in places],
                mode="markers",
                name=shown(run["label"]),
                # Open after the first run's, which equal values would hide.
                marker={
                    "color": colour(number),
                    "size": 9,
                    "symbol": SYMBOLS[number % len(SYMBOLS)] + ("-open" if number else ""),
                    "line": {"width": 2, "color": colour(number)},
                },
                hovertemplate="%{text}: MRR %{x:.4f}, %{customdata:,} queries",
            )
        )
    return figure(
        traces,
        height=110 + ROW_HEIGHT * len(ordered),
        showlegend=len(runs) > 1,
        xaxis={"title": {"text": "MRR"}, "range": [-0.02, 1.02]},
        yaxis={
            "tickvals": list(range(len(ordered))),
            "ticktext": ticks,
            "automargin": True,
            "range": [-0.7, len(ordered) - 0.3],
        },
    )


def _cut(text: str, most: int = 30) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def degree_bars(histogram: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return the plot of the entities by degree."""
    names = [str(low) if low == high else f"{low:,}–{high:,}" for low, high, _ in histogram]
    bars = go.Bar(
        x=names,
        y=[count for _, _, count in histogram],
        marker={"color": colour(0)},
        hovertemplate="degree %{x}: %{y:,} entities",
    )
    return figure(
        [bars],
        xaxis={
            "type": "category",
            "title": {"text": "training triples of an entity"},
            "automargin": True,
            "tickangle": -45,
        },
        yaxis={"title": {"text": "entities"}},
    )


def part_bars(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the plot of the edges of each partition: inside it, and cut."""
    names = [f"part {part['part']}" for part in parts]
    cut = [part[Field.CUT_EDGES] for part in parts]
    inside = [part["num_edges"] - number for part, number in zip(parts, cut)]
    traces = [
        go.Bar(
            x=names,
            y=values,
            name=name,
            marker={"color": colour(number), "pattern": {"shape": "/" if number else ""}},
            hovertemplate="%{x}: %{y:,} edges",
        )
        for number, (name, values) in enumerate((("both ends inside", inside), ("cut", cut)))
    ]
    return figure(traces, barmode="stack", xaxis={"type": "category"}, yaxis={"title": {"text": "edges"}})


def phase_bars(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the plot of the share of each phase in the trainers' time; empty if none was measured."""
    measured = [(number, run) for number, run in enumerate(runs) if run["training"]["phase_seconds"]]
    traces = []
    for number, run in measured:
        seconds = run["training"]["phase_seconds"]
        total = sum(seconds.values()) or 1.0
        traces.append(
            go.Bar(
                x=list(seconds),
                y=[value / total for value in seconds.values()],
                name=shown(run["label"]),
                marker={"color": colour(number)},
                hovertemplate="%{x}: %{y:.1%}",
            )
        )
    if not traces:
        return {}
    axis = {"title": {"text": "share of trainers' time"}, "tickformat": ".0%"}
    return figure(traces, barmode="group", showlegend=len(traces) > 1, yaxis=axis)


def map_points(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plot of a map: a colour for each type, or for one type alone by degree."""
    types = found["types"]
    traces = []
    for number, (name, of_type) in enumerate(types.items()):
        marker: dict[str, Any] = {"size": 6, "opacity": 0.75, "symbol": SYMBOLS[number % len(SYMBOLS)]}
        if len(types) > 1:
            marker["color"] = colour(number)
        else:
            logarithms = [math.log10(max(1, degree)) for degree in of_type["degrees"]]
            ticks = list(range(math.ceil(max(logarithms, default=0)) + 1))
            marker |= {
                "color": logarithms,
                "colorscale": "Viridis",
                "colorbar": {
                    "title": {"text": "degree"},
                    "tickvals": ticks,
                    "ticktext": [f"{10**tick:,}" for tick in ticks],
                    "thickness": 12,
                },
            }
        traces.append(
            go.Scatter(
                x=of_type["x"],
                y=of_type["y"],
                text=[shown(entity) for entity in of_type["names"]],
                customdata=of_type["degrees"],
                mode="markers",
                name=shown(name),
                marker=marker,
                hovertemplate="%{text}<br>degree %{customdata:,}",
            )
        )
    titles = ["", ""]
    if found["explained"]:
        titles = [f"component {i + 1} ({share:.1%})" for i, share in enumerate(found["explained"])]
    axes = {
        f"{axis}axis": {"title": {"text": title}, "zeroline": False, "showticklabels": bool(title)}
        for axis, title in zip("xy", titles)
    }
    return figure(
        traces,
        height=MAP_HEIGHT,
        margin={"l": 56, "r": 12, "t": 40, "b": 48},  # room for the buttons above the plot
        showlegend=len(types) > 1,
        annotations=_map_names(types.values()),
        **axes,
    )


def _map_names(types: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the names of the entities with the highest degrees, but for those that would lie on others."""
    columns = [zip(*(of_type[key] for key in ("degrees", "x", "y", "names"))) for of_type in types]
    points = sorted(chain.from_iterable(columns), key=lambda point: -point[0])
    if not points:
        return []
    _, xs, ys, _ = zip(*points)
    width, height = (max(max(values) - min(values), 1e-9) for values in (xs, ys))
    places: list[tuple[float, float]] = []
    names = []
    for _, x, y, name in points:
        is_free = all(abs(x - a) > 0.15 * width or abs(y - b) > 0.05 * height for a, b in places)
        if is_free and len(places) < MOST_NAMES:
            places.append((x, y))
            style = {"showarrow": False, "yshift": 10, "font": {"size": 11}}
            names.append({"x": x, "y": y, "text": shown(_cut(name)), **style})
    return names
