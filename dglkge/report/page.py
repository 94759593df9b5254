"""The HTML of a report: a template that escapes every value, plots, and the words that the template needs."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from dglkge import __version__
from dglkge.data.dataset_files import SPLITS
from dglkge.distributed.jobs import human_bytes
from dglkge.errors import import_extra
from dglkge.evaluation.metrics import CATEGORIES, SIDES, UNSEEN
from dglkge.inference.run import model_text
from dglkge.report import plots
from dglkge.report.figures import OUTPUT_FIELDS
from dglkge.report.run_state import NONE, duration, number

HERE = Path(__file__).resolve().parent

MOST_TABLE_RELATIONS = 1000
"""Relations in the table, the most frequent: a page of a hundred thousand rows opens in no browser."""

METRIC_TITLES = {"mrr": "MRR", "mr": "MR"}
LOWER_IS_BETTER = ("mr",)

SIDE_TITLES = {"both": "both sides", "head": "heads", "tail": "tails"}

CURVES = {
    "loss": ("loss", "Loss of training, and of the valid split"),
    "valid": ("MRR", "MRR of the valid split"),
    "edges_per_second": ("edges/s", "Training speed"),
}
"""Learning curves: the figures, the title of the axis, and the heading."""

Entry = Mapping[str, Any]
"""A part of the collected figures."""


def render(figures: Entry) -> str:
    """Return the page of the figures of :func:`dglkge.report.figures.collect` as HTML."""
    jinja2, plotly = packages()
    runs, datasets = figures["runs"], figures["datasets"]
    relations = [relations_of(data, runs) for data in datasets]
    plots_by_id = plots_of(runs, datasets, relations)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE), autoescape=True, undefined=jinja2.StrictUndefined
    )
    filters = (human_bytes, number, spent, setting, median, metric, best_of, metric_title, epoch_values)
    environment.filters |= {function.__name__: function for function in (*filters, model_text)}
    environment.tests["is_news"] = is_news
    functions = (counted, ranked, headings, metric_headings)
    environment.globals |= {function.__name__: function for function in functions}
    # In a script no character reference is read, and the text "</script>" would end it.
    text = json.dumps(plots_by_id, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    trusted = {
        "css": (HERE / "page.css").read_text(encoding="utf-8"),
        "script": (HERE / "page.js").read_text(encoding="utf-8"),
        "plotly": plotly.get_plotlyjs(),
        "plots_as_json": text,
    }
    # Marked, so that they are not escaped; nothing else of the page is.
    safe = {name: environment.filters["safe"](text) for name, text in trusted.items()}
    view = {**figures, "plots": plots_by_id, "relations": relations, "categories": categories_of(runs)}
    fields = figures["configuration"]
    view["changed"] = [field for field in fields if field["differs"] or any(field["is_changed"])]
    view |= {"NONE": NONE, "CURVES": CURVES, "SIDE_TITLES": SIDE_TITLES, "OUTPUT_FIELDS": OUTPUT_FIELDS}
    view |= {"SPLITS": SPLITS, "version": __version__}
    return environment.get_template("page.html").render(**view, **safe)


def packages() -> tuple[ModuleType, ModuleType]:
    """Return jinja2 and plotly, which a page needs; without one, an InputError has the command."""
    return import_extra("a report", "jinja2", "report"), import_extra("a report", "plotly.offline", "report")


def plots_of(
    runs: Sequence[Entry], datasets: Sequence[Entry], relations: Sequence[Entry]
) -> dict[str, plots.Figure]:
    """Return the plots by the id of their place in the page, those that have something to show."""
    figures = {
        "plot-categories": plots.by_category(runs),
        "plot-completions": plots.completion_curves(runs),
        "plot-phases": plots.phase_bars(runs),
        **{f"plot-{measure}": plots.curves(runs, measure, title) for measure, (title, _) in CURVES.items()},
    }
    for place, (data, ranked) in enumerate(zip(datasets, relations)):
        figures[f"plot-degrees-{place}"] = plots.degree_bars(data["degrees"]["histogram"])
        figures[f"plot-relations-{place}"] = plots.by_relation(ranked["runs"], ranked["plotted"])
        parts = data["partitions"]["parts"]
        figures[f"plot-parts-{place}"] = plots.part_bars(parts) if len(parts) > 1 else {}
    for place, run in enumerate(runs):
        figures[f"plot-map-{place}"] = plots.map_points(run["map"]) if "map" in run else {}
    return {id_: figure for id_, figure in figures.items() if figure}


def categories_of(runs: Sequence[Entry]) -> list[tuple[str, list[Entry | None]]]:
    """Return the metrics of each category and side that some run has, of all runs, with a title."""
    categories = [run["ranking"]["categories"] for run in runs]
    return [
        (f"{name}, {SIDE_TITLES[side]}", [metrics.get(name, {}).get(side) for metrics in categories])
        for name in (*CATEGORIES, UNSEEN)
        if any(name in metrics for metrics in categories)
        for side in SIDES
    ]


def relations_of(data: Entry, all_runs: Sequence[Entry]) -> dict[str, Any]:
    """Return the ranked relations of a data set with the metrics of its runs, and those of the plot.

    Lines are the label, the category, the number of training triples, and the metrics of each run; the most
    frequent relations first.
    """
    runs = [run for run in all_runs if run["label"] in data["runs"]]
    rankings = [run["ranking"]["relations"] for run in runs]
    categories = runs[0]["ranking"]["relation_categories"]
    frequent = sorted(data["relations"], key=lambda label: -data["relations"][label]["train"])
    ranked = [label for label in frequent if any(label in ranking for ranking in rankings)]

    def num_queries(label: str) -> int:
        return max(ranking[label]["both"]["num_queries"] for ranking in rankings if label in ranking)

    lines = []
    for label in ranked[:MOST_TABLE_RELATIONS]:
        results = [
            {**sides["both"], "MRR heads": sides["head"]["mrr"], "MRR tails": sides["tail"]["mrr"]}
            if (sides := ranking.get(label))
            else None
            for ranking in rankings
        ]
        category = categories.get(label, {}).get("category", UNSEEN)
        lines.append((label, category, data["relations"][label]["train"], results))
    note = f"{len(ranked):,} of {len(frequent):,} relations have ranked triples."
    if len(lines) < len(ranked):
        note += f" The table has the {len(lines):,} most frequent in training; --json has all."
    if len(ranked) > plots.MOST_RELATIONS:
        note = f"The plot shows the {plots.MOST_RELATIONS} relations with the most queries. {note}"
    plotted = sorted(ranked, key=lambda label: -num_queries(label))[: plots.MOST_RELATIONS]
    return {"name": data["name"], "runs": runs, "lines": lines, "plotted": plotted, "note": note}


def headings(titles: Sequence[str], kind: str = "number", prefix: str = "") -> list[tuple[str, str]]:
    """Return the headings of columns, each with its kind: text or number."""
    return [(prefix + title, kind) for title in titles]


def metric_headings(names: Sequence[str], runs: Sequence[str]) -> list[tuple[str, str, str]]:
    """Return the headings of the number of queries, and of each metric of each run."""
    titles = [(metric_title(name), "number", run) for name in names for run in runs]
    return [("Queries", "number", ""), *titles]


def ranked(run: Entry) -> str:
    """Return how many triples were ranked."""
    ranking = run["ranking"]
    count, split_count = ranking["num_triples"], ranking["num_triples_of_split"]
    if count == split_count:
        return f"all {count:,}"
    return f"{count:,} of {split_count:,}, drawn with seed {ranking['seed']}"


def is_news(run: Entry, split: str) -> bool:
    """Return whether a run has recorded another MRR of a split than the report's."""
    if split not in run["recorded"]:
        return False
    mrr, ranking = run["recorded"][split]["both"]["mrr"], run["ranking"]
    is_same = f"{mrr:.4f}" == f"{ranking['sides']['both']['mrr']:.4f}"
    return not (is_same and ranking["protocol"]["split"] == split)


def median(values: Sequence[float]) -> float:
    """Return the median; 0 of none."""
    return statistics.median(values or [0])


def best_of(results: Sequence[Mapping[str, float] | None], name: str) -> float | None:
    """Return the best value of a metric; None if all are the same."""
    values = {result[name] for result in results if result}
    if len(values) < 2:
        return None
    return min(values) if name in LOWER_IS_BETTER else max(values)


def metric(value: float, name: str) -> str:
    """Return the value of a metric with its digits."""
    return f"{value:.1f}" if name in LOWER_IS_BETTER else f"{value:.4f}"


def metric_title(name: str) -> str:
    """Return the name of a metric as a title."""
    return METRIC_TITLES.get(name, name if name.startswith("MRR") else name.capitalize())


def epoch_values(run: Entry, name: str) -> list[float]:
    """Return a figure of all epochs that have it."""
    return [epoch[name] for epoch in run["training"]["epochs"] if epoch[name] is not None]


def setting(value: Any) -> str:
    """Return the value of a field as text, near to YAML's."""
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)


def spent(seconds: float) -> str:
    """Return a time; nothing for 0."""
    return duration(seconds) if seconds else ""


def counted(count: int, word: str, plural: str = "") -> str:
    """Return a count with its noun.

    Examples
    --------
    >>> counted(1, "entity", "entities"), counted(0, "triple"), counted(56_414, "triple")
    ('1 entity', '0 triples', '56.4 k triples')
    """
    return f"{short(count)} {word if count == 1 else plural or word + 's'}"


def short(count: int) -> str:
    """Return a count with at most four digits.

    Examples
    --------
    >>> short(9999), short(56_414), short(12_345_678)
    ('9,999', '56.4 k', '12.3 M')
    """
    for factor, unit in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= max(factor, 10_000):
            return f"{count / factor:.1f} {unit}"
    return f"{count:,}"
