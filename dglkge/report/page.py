"""The HTML of a report: tables of the collected figures, plots, and a template that escapes every value."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

from dglkge import __version__
from dglkge.data.dataset_files import SPLITS, Field
from dglkge.distributed.process_memory import human_bytes
from dglkge.errors import import_extra
from dglkge.evaluation.metrics import CATEGORIES, SIDES, UNSEEN
from dglkge.inference.run import model_text
from dglkge.report import plots
from dglkge.report.figures import OUTPUT_FIELDS
from dglkge.report.learning_curves import duration

HERE = Path(__file__).resolve().parent

MOST_TABLE_RELATIONS = 1000
"""Relations in the table, the most frequent: a page of a hundred thousand rows opens in no browser."""

NONE = "–"

METRICS = ("mrr", "hits@1", "hits@3", "hits@10", "mr")
RELATION_METRICS = ("mrr", "MRR heads", "MRR tails", "hits@10")
METRIC_TITLES = {"mrr": "MRR", "mr": "MR"}
LOWER_IS_BETTER = ("mr",)

SIDE_TITLES = {"both": "both sides", "head": "heads", "tail": "tails"}

CURVES = (
    ("loss", "loss", "Loss of training, and of the valid split"),
    ("valid", "MRR", "MRR of the valid split"),
    ("edges_per_second", "edges/s", "Training speed"),
)
"""Learning curves: the figures, the title of the axis, and the heading."""

MAP_NOTES = {
    "pca": "the two main components of their rows (PCA)",
    "tsne": "their rows placed by t-SNE: near points are similar, distances between groups say little",
}

Number = int | float | None
Entry = Mapping[str, Any]
"""A part of the collected figures."""


@dataclass(frozen=True)
class Cell:
    """A cell of a table: its text, the number it is sorted by, and how it looks."""

    text: str
    value: float | None = None
    css: str = ""
    title: str = ""


@dataclass(frozen=True)
class Column:
    """A column of a table; its kind is ``text`` or ``number``, and it may belong to one of several runs."""

    title: str
    kind: str = "number"
    run: str = ""


@dataclass(frozen=True)
class Table:
    """A table; the first cell of a row is its heading."""

    id: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    sortable: bool = True

    @property
    def has_titles(self) -> bool:
        """Whether any column has a title."""
        return any(column.title for column in self.columns)


def render(figures: Entry) -> str:
    """Return the page as HTML.

    Parameters
    ----------
    figures : mapping
        As of :func:`dglkge.report.figures.collect`.

    Raises
    ------
    InputError
        If plotly or jinja2 is not installed.
    """
    jinja2, plotly = packages()
    page = _Page(figures["runs"], figures["datasets"])
    view = {
        **page.head(),
        "overview": page.overview(),
        "datasets": [page.dataset(number, data) for number, data in enumerate(page.datasets)],
        "curves": page.curves(),
        "curve_note": "Loss and speed are those between two reports, about 20 in an epoch. "
        "Curves of more than 400 points show means of neighbours.",
        **page.ranking(),
        "examples": page.runs,
        "example_note": "Queries of the ranked triples, with the five best answers. A tag names the split of "
        "an answer that the data set has; filtered ranking leaves these out, so the rank may be better than "
        "the place in the list. The true answer is bold.",
        **page.maps(),
        "time": page.time(),
        "tables": page.tables(),
        "has_completions": page.add("plot-completions", plots.completion_curves(page.runs)),
        "has_phases": page.add("plot-phases", plots.phase_bars(page.runs)),
        "buckets": page.buckets(),
        "partitions": [page.partitions(number, data) for number, data in enumerate(page.datasets)],
        **page.configuration(figures["configuration"]),
    }
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE), autoescape=True, undefined=jinja2.StrictUndefined
    )
    # In a script no character reference is read, and the text "</script>" would end it.
    text = json.dumps(page.plots, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    trusted = {
        "css": (HERE / "page.css").read_text(encoding="utf-8"),
        "script": (HERE / "page.js").read_text(encoding="utf-8"),
        "plotly": plotly.get_plotlyjs(),
        "plots": text,
    }
    # Marked, so that they are not escaped; nothing else of the page is.
    safe = {name: environment.filters["safe"](text) for name, text in trusted.items()}
    return environment.get_template("page.html").render(version=__version__, **view, **safe)


def packages() -> tuple[ModuleType, ModuleType]:
    """Return jinja2 and plotly, which a page needs; without one, an InputError has the command."""
    return import_extra("a report", "jinja2", "report"), import_extra("a report", "plotly.offline", "report")


class _Page:
    """The sections of a page about runs; plots are collected on the way."""

    def __init__(self, runs: Sequence[Entry], datasets: Sequence[Entry]) -> None:
        self.runs = runs
        self.datasets = datasets
        self.plots: dict[str, plots.Figure] = {}
        self._labels = [run["label"] for run in runs]
        self._is_comparison = len(runs) > 1
        # With several data sets no run is the best.
        self._is_comparable = len(datasets) == 1

    def add(self, id_: str, figure: plots.Figure) -> bool:
        """Add a figure unless it is empty; tell whether it was added."""
        if figure:
            self.plots[id_] = figure
        return bool(figure)

    def head(self) -> dict[str, Any]:
        run, data = self.runs[0], self.datasets[0]
        protocol, best = run["ranking"]["protocol"], run["ranking"]["sides"]["both"]
        warnings = []
        if not self._is_comparable:
            warnings.append(
                "The runs were trained on different data sets; their metrics cannot be compared: "
                + "; ".join(f"{other['name']}: {', '.join(other['runs'])}" for other in self.datasets)
            )
        headings = {
            "overview": "Overview",
            "data": "Data",
            "curves": "Learning curves",
            "ranking": "Ranking",
            "examples": "Best and worst",
            "map": "Map",
            "time": "Time and memory",
            "partitions": "Partitions",
            "configuration": "Configuration",
        }
        if "map" not in run:
            del headings["map"]
        tiles = [
            (f"{best['mrr']:.4f}", f"MRR, {protocol['split']} split"),
            (f"{best['hits@10']:.4f}", "Hits@10"),
            counted(sum(data["entities"].values()), "entity", "entities").rsplit(" ", 1),
            counted(data["num_relations"], "relation").rsplit(" ", 1),
            counted(sum(data["triples"].values()), "triple").rsplit(" ", 1),
            (_spent(run["training"]["seconds"]), "training"),
        ]
        return {
            "title": f"Report of {', '.join(self._labels)}",
            "protocol": f"Ranking: {protocol['split']} split, {protocol['filtering']}, "
            f"{protocol['candidates']} candidates, {protocol['ties']} ties.",
            "warnings": warnings,
            "headings": headings,
            "tiles": [] if self._is_comparison else tiles,
        }

    def overview(self) -> Table:
        names = {data["fingerprint"]: data["name"] for data in self.datasets}
        rows = [
            self._facts("Model", lambda run: model_text(run["model"])),
            self._facts("Data set", lambda run: names[run["dataset"]]),
            self._facts("Epochs", lambda run: f"{run['finished_epochs']}, version {run['version']}"),
            self._facts("Optimizer", lambda run: _options(run["optimizer"])),
            self._facts("Seed", lambda run: str(run["seed"])),
            self._facts("Parameters", lambda run: f"{run['parameters']:,}", "numbers in all rows"),
        ]
        # Those of a single run are above this table, and in that of the ranking.
        for name in METRICS if self._is_comparison else ():
            cells = self._metric_cells([run["ranking"]["sides"]["both"] for run in self.runs], name)
            left = [dataclasses.replace(cell, css=cell.css.removeprefix("n").strip()) for cell in cells]
            rows.append([Cell(_metric_title(name)), *left])
        rows.append(self._facts("Ranked triples", _ranked))
        for split in SPLITS:
            if any(_is_news(run, split) for run in self.runs):
                title = f"MRR at the end of training, {split} split"
                rows.append(self._facts(title, lambda run, split=split: _recorded(run, split)))  # type: ignore[misc]
        rows += [
            self._facts("Time in training", lambda run: _spent(run["training"]["seconds"])),
            self._facts("Checkpoint", lambda run: run["path"]),
        ]
        return self._fact_table("table-overview", rows, "text")

    def _facts(
        self, title: str, text: Callable[[Entry], str | None], hint: str = "", css: str = ""
    ) -> list[Cell]:
        """Return a row with a fact of every run."""
        return [Cell(title, title=hint), *(Cell(text(run) or NONE, css=css) for run in self.runs)]

    def _fact_table(self, id_: str, rows: Sequence[Sequence[Cell]], kind: str) -> Table:
        """Return a table with a column for every run."""
        columns = [Column("", "text"), *(Column(label, kind) for label in self._labels)]
        return Table(id_, columns, rows, sortable=False)

    def dataset(self, number: int, data: Entry) -> dict[str, Any]:
        entities, unseen, degrees = data["entities"], data["unseen"], data["degrees"]
        facts = {"Relations": f"{data['num_relations']:,}", "Entities": f"{sum(entities.values()):,}"}
        if len(entities) > 1:
            facts |= {f"Entities of type {name}": f"{count:,}" for name, count in entities.items()}
        for split, count in data["triples"].items():
            repeated = (data["duplicates"] or {}).get(split)
            facts[f"Triples, {split}"] = f"{count:,}" + (f" ({repeated:,} repeated)" if repeated else "")
        if unseen and unseen["triples"]:
            facts["Not seen in training"] = (
                f"{counted(unseen['entities'], 'entity', 'entities')} and "
                f"{counted(unseen['relations'], 'relation')}, in {counted(unseen['triples'], 'triple')} of "
                "valid and test"
            )
        facts |= {
            "Degree of an entity": f"mean {degrees['mean']:,.1f}, median {degrees['median']:,.0f}, largest "
            f"{degrees['largest']:,}",
            "Entities without training triple": f"{degrees['without_triples']:,}",
            "Weights": "yes" if data["has_weights"] else "no",
            "Folder": data["path"],
            "Fingerprint": data["fingerprint"][:12],
            "Runs": ", ".join(data["runs"]),
        }
        rows = [[Cell(name), Cell(text)] for name, text in facts.items()]
        table = Table(f"table-data-{number}", [Column("", "text")] * 2, rows, sortable=False)
        id_ = f"plot-degrees-{number}"
        self.add(id_, plots.degree_bars(degrees["histogram"]))
        return {"name": data["name"], "figures": table, "degrees": id_}

    def curves(self) -> list[tuple[str, str]]:
        headings = []
        for what, title, heading in CURVES:
            is_log = what == "loss" and plots.is_log_better(self.runs, what)
            if self.add(f"plot-{what}", plots.curves(self.runs, what, title, is_log)):
                headings.append((f"plot-{what}", heading))
        return headings

    def ranking(self) -> dict[str, Any]:
        self.add("plot-categories", plots.by_category(self.runs))
        rankings = [run["ranking"] for run in self.runs]
        sides = [
            ([Cell(SIDE_TITLES[side])], [ranking["sides"][side] for ranking in rankings]) for side in SIDES
        ]
        categories = [
            (
                [Cell(f"{category}, {SIDE_TITLES[side]}")],
                [ranking["categories"].get(category, {}).get(side) for ranking in rankings],
            )
            for category in (*CATEGORIES, UNSEEN)
            if any(category in ranking["categories"] for ranking in rankings)
            for side in SIDES
        ]
        text = "Every triple of the split was ranked, its head and its tail."
        sampled = [
            f"{_ranked(run)} ({run['label']})"
            for run in self.runs
            if run["ranking"]["num_triples"] < run["ranking"]["num_triples_of_split"]
        ]
        if sampled:
            text = (
                "The heads and tails of a sample of the split's triples were ranked, so metrics of rare "
                f"relations are uncertain: {'; '.join(sampled)}. More with --limit."
            )
        text += " 1-N: one head, many tails, by the training triples. MR: mean rank."
        if self._is_comparison and self._is_comparable:
            text += " The best run of a row is bold."
        return {
            "sides": self._metric_table("table-sides", [Column("Side", "text")], METRICS, sides),
            "categories": self._metric_table(
                "table-categories", [Column("Category", "text")], METRICS, categories
            ),
            "relations": [self._relations(number, data) for number, data in enumerate(self.datasets)],
            "ranked": text,
        }

    def _metric_table(
        self,
        id_: str,
        headings: Sequence[Column],
        names: Sequence[str],
        lines: Iterable[tuple[Sequence[Cell], Sequence[Mapping[str, float] | None]]],
        labels: Sequence[str] | None = None,
    ) -> Table:
        """Return a table with a row for each line, and a column for each metric and run."""
        labels = (labels or self._labels) if self._is_comparison else [""]
        columns = [*headings, Column("Queries")]
        columns += [Column(_metric_title(name), run=label) for name in names for label in labels]
        rows = []
        for cells, results in lines:
            count = max(result["num_queries"] for result in results if result)
            metrics = [cell for name in names for cell in self._metric_cells(results, name)]
            rows.append([*cells, number_cell(count, f"{count:,.0f}"), *metrics])
        return Table(id_, columns, rows)

    def _metric_cells(self, results: Sequence[Mapping[str, float] | None], name: str) -> list[Cell]:
        """Return the cells of one metric of all runs; the best of several is marked."""
        values = [result[name] if result else None for result in results]
        known = {value for value in values if value is not None}
        best = None
        if self._is_comparable and len(known) > 1:
            best = min(known) if name in LOWER_IS_BETTER else max(known)
        digits = 1 if name in LOWER_IS_BETTER else 4
        return [
            Cell(NONE, css="n")
            if value is None
            else Cell(f"{value:.{digits}f}", value, "n best" if value == best else "n")
            for value in values
        ]

    def _relations(self, number: int, data: Entry) -> dict[str, Any]:
        """Return the table and the plot of the relations of a data set, the most frequent first."""
        runs = [run for run in self.runs if run["label"] in data["runs"]]
        rankings = [run["ranking"]["relations"] for run in runs]
        categories = runs[0]["ranking"]["relation_categories"]
        frequent = sorted(data["relations"], key=lambda label: -data["relations"][label]["train"])
        ranked = [label for label in frequent if any(label in ranking for ranking in rankings)]
        shown = ranked[:MOST_TABLE_RELATIONS]

        def num_queries(label: str) -> int:
            return max(ranking[label]["both"]["num_queries"] for ranking in rankings if label in ranking)

        lines = []
        for label in shown:
            category = categories.get(label, {}).get("category", UNSEEN)
            cells = [Cell(label), Cell(category), number_cell(data["relations"][label]["train"])]
            by_side = [ranking.get(label) for ranking in rankings]
            heads_and_tails = [
                {**sides["both"], "MRR heads": sides["head"]["mrr"], "MRR tails": sides["tail"]["mrr"]}
                if sides
                else None
                for sides in by_side
            ]
            lines.append((cells, heads_and_tails))
        headings = [Column("Relation", "text"), Column("Category", "text"), Column("Train")]
        labels = [run["label"] for run in runs]
        note = f"{len(ranked):,} of {len(frequent):,} relations have ranked triples."
        if len(shown) < len(ranked):
            note += f" The table has the {len(shown):,} most frequent in training; --json has all."
        if len(ranked) > plots.MOST_RELATIONS:
            note = f"The plot shows the {plots.MOST_RELATIONS} relations with the most queries. {note}"
        by_queries = sorted(ranked, key=lambda label: -num_queries(label))
        id_ = f"plot-relations-{number}"
        self.add(id_, plots.by_relation(runs, by_queries[: plots.MOST_RELATIONS]))
        table = self._metric_table(f"table-relations-{number}", headings, RELATION_METRICS, lines, labels)
        return {"name": data["name"], "plot": id_, "note": note, "table": table}

    def maps(self) -> dict[str, Any]:
        maps = []
        for number, run in enumerate(self.runs):
            if "map" in run:
                self.add(f"plot-map-{number}", plots.map_points(run["map"]))
                maps.append((run["label"], f"plot-map-{number}"))
        if not maps:
            return {"maps": [], "map_note": ""}
        first = self.runs[0]["map"]
        note = (
            f"The {first['num_entities']:,} entities with the most training triples (at least one of each "
            f"type), by {MAP_NOTES[first['method']]}. Hover or tap for the name."
        )
        return {"maps": maps, "map_note": note}

    def time(self) -> Table:
        def add(title: str, text: Callable[[Entry], str], hint: str = "") -> list[Cell]:
            return self._facts(title, lambda run: text(run["training"]), hint, css="n")

        rows = [
            add(
                "Time in training loops",
                lambda training: _spent(training["seconds"]),
                "without start, ranking and commits",
            ),
            add("Epochs recorded", lambda training: f"{len(training['epochs']):,}"),
            add(
                "Time of an epoch, median",
                lambda training: _spent(median(_of_epochs("seconds", training) or [0])),
            ),
            add("Edges/s, median", _speed),
            add(
                "Bytes sent to other machines",
                lambda training: human_bytes(sum(_of_epochs("bytes_sent", training))),
            ),
            add(
                "Trainers",
                lambda training: ", ".join(
                    f"{number:g}" for number in sorted(set(_of_epochs("num_trainers", training)))
                ),
            ),
            add(
                "Memory of the trainers, largest",
                lambda training: human_bytes(max(_of_epochs("trainer_memory_bytes", training), default=0)),
                "shares of shared pages summed over trainers, at the end of an epoch; servers are not in it",
            ),
            self._facts("Checkpoint on disk", lambda run: human_bytes(run["checkpoint_bytes"] or 0), css="n"),
        ]
        return self._fact_table("table-time", rows, "number")

    def tables(self) -> Table:
        columns = [Column("Run", "text")] if self._is_comparison else []
        columns += [Column("Table", "text"), Column("Rows"), Column("Width"), Column("Rows in memory")]
        columns += [Column("Files"), Column("On disk"), Column("Optimizer state", "text")]
        rows = []
        for run in self.runs:
            for table in run["tables"]:
                row_bytes = 4 * table["num_rows"] * table["width"]
                rows.append(
                    [
                        *([Cell(run["label"])] if self._is_comparison else []),
                        Cell(table["name"]),
                        number_cell(table["num_rows"]),
                        number_cell(table["width"]),
                        number_cell(row_bytes, human_bytes(row_bytes)),
                        number_cell(table["num_parts"]),
                        number_cell(table["size_bytes"], human_bytes(table["size_bytes"])),
                        Cell(", ".join(table["optimizer_state"]) or NONE),
                    ]
                )
        return Table("table-tables", columns, rows)

    def partitions(self, number: int, data: Entry) -> dict[str, Any]:
        graph = data["partitions"]
        parts, balance, edge_cut = graph[Field.PARTS], graph["balance"], graph["edge_cut"]
        types = list(data["entities"]) if len(data["entities"]) > 1 else []
        columns = [Column("Partition", "text"), Column("Entities")]
        columns += [Column(f"of type {name}") for name in types]
        columns += [Column("Relations"), Column("Edges"), Column("Cut edges"), Column("Cut share")]
        rows = []
        for part in parts:
            cut, nodes = part[Field.CUT_EDGES], part["nodes"]
            share = cut / part["num_edges"] if part["num_edges"] else 0.0
            counts = [part["num_entities"], *map(nodes.get, types), nodes["relation"], part["num_edges"], cut]
            cells = [*map(number_cell, counts), number_cell(share, f"{share:.1%}")]
            rows.append([Cell(str(part["part"])), *cells])
        note = f"{counted(len(parts), 'partition')} by {graph['method']}."
        if balance and edge_cut and len(parts) > 1:
            note += (
                f" The largest has {balance['entities']:.3f} times the mean of entities and "
                f"{balance['edges']:.3f} times that of edges. {edge_cut['edges']:,} edges "
                f"({edge_cut['fraction']:.1%}) are cut: their "
                "head lies in another partition."
            )
        id_ = f"plot-parts-{number}" if len(parts) > 1 else ""
        if id_:
            self.add(id_, plots.part_bars(parts))
        table = Table(f"table-parts-{number}", columns, rows)
        return {"name": data["name"], "note": note, "plot": id_, "table": table}

    def buckets(self) -> list[tuple[str, Table]]:
        """Return a table of the buckets of the last epoch of each run with ranges, and the run's label."""
        tables = []
        for number, run in enumerate(self.runs):
            rows = [_bucket_facts(one) for one in run["training"]["buckets"]]
            if rows:
                cells = [[number_cell(value, text) for value, text in row.values()] for row in rows]
                table = Table(f"table-buckets-{number}", [*map(Column, rows[0])], cells)
                tables.append((run["label"] if self._is_comparison else "", table))
        return tables

    def configuration(self, fields: Sequence[Entry]) -> dict[str, Any]:
        changed = [field for field in fields if field["differs"] or any(field["is_changed"])]
        note = "Fields that differ from their defaults (marked)"
        note += " or between the runs." if self._is_comparison else "."
        return {
            "configuration_note": f"{note} Hover over a field for its help.",
            "changed": self._field_table("table-changed", changed),
            "all_fields": self._field_table("table-fields", fields),
        }

    def _field_table(self, id_: str, fields: Sequence[Entry]) -> Table:
        columns = [Column(title, "text") for title in ("Field", "Default", *self._labels)]
        rows = []
        for field in fields:
            # The default of a place is empty, and no run can keep it.
            is_place = field["field"] in OUTPUT_FIELDS
            cells = [
                Cell(_setting(value), css="changed" if is_changed and not is_place else "")
                for value, is_changed in zip(field["values"], field["is_changed"])
            ]
            rows.append([Cell(field["field"], title=field["help"]), Cell(_setting(field["default"])), *cells])
        return Table(id_, columns, rows)


def _options(optimizer: Entry) -> str:
    rest = "".join(f", {name} {value}" for name, value in optimizer.items() if name != "name")
    return f"{optimizer.get('name', NONE)}{rest}"


def _ranked(run: Entry) -> str:
    ranking = run["ranking"]
    number, of_split = ranking["num_triples"], ranking["num_triples_of_split"]
    if number == of_split:
        return f"all {number:,}"
    return f"{number:,} of {of_split:,}, drawn with seed {ranking['seed']}"


def _is_news(run: Entry, split: str) -> bool:
    """Return whether a run has recorded another MRR of a split than the report's."""
    if split not in run["recorded"]:
        return False
    mrr, ranking = run["recorded"][split]["both"]["mrr"], run["ranking"]
    is_same = f"{mrr:.4f}" == f"{ranking['sides']['both']['mrr']:.4f}"
    return not (is_same and ranking["protocol"]["split"] == split)


def _recorded(run: Entry, split: str) -> str | None:
    if split not in run["recorded"]:
        return None
    protocol, both = run["recorded"][split]["protocol"], run["recorded"][split]["both"]
    how = f"{protocol['filtering']}, {protocol['candidates']} candidates"
    return f"{both['mrr']:.4f} ({both['num_queries']:,} queries, {how})"


def _of_epochs(name: str, training: Entry) -> list[float]:
    """Return a figure of all epochs that have it."""
    return [epoch[name] for epoch in training["epochs"] if epoch[name] is not None]


def _speed(training: Entry) -> str:
    values = [value for _, value in training["edges_per_second"] if value is not None]
    return f"{median(values):,.0f}" if values else ""


def _setting(value: Any) -> str:
    """Return the value of a field as text, near to YAML's."""
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)


def _metric_title(name: str) -> str:
    return METRIC_TITLES.get(name, name if name.startswith("MRR") else name.capitalize())


def number_cell(value: Number, text: str | None = None) -> Cell:
    """Return the cell of a figure that may be missing."""
    if value is None:
        return Cell(NONE, css="n")
    return Cell(f"{value:,}" if text is None else text, value, "n")


def _bucket_facts(record: Entry) -> dict[str, tuple[Number, str]]:
    """Return what a table of buckets shows of a record: value and text by title."""
    held_out = record.get("eval_stats_after", {}).get("metrics", {}).get("mrr")
    megabytes = {name: record[name] / 1e6 for name in ("bytes_read", "bytes_written")}
    numbers: dict[str, tuple[Number, str]] = {
        "Machine": (record.get("machine", 0), ","),
        "Head range": (record["lhs_partition"], ","),
        "Tail range": (record["rhs_partition"], ","),
        "Triples": (record["stats"]["count"], ","),
        "Loss": (record["stats"]["metrics"]["loss"], ".4f"),
        "Held-out MRR": (held_out, ".4f"),
        "Seconds": (record["seconds"], ",.2f"),
        "MB read": (megabytes["bytes_read"], ",.1f"),
        "MB written": (megabytes["bytes_written"], ",.1f"),
        "MB/s": (record["mb_per_second"], ",.1f"),
        "Major faults": (record["major_faults"], ","),
    }
    return {
        title: (value, "" if value is None else format(value, form))
        for title, (value, form) in numbers.items()
    }


def _spent(seconds: float) -> str:
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
    if count < 10_000:
        return f"{count:,}"
    for factor, unit in ((10**9, "G"), (10**6, "M")):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count / 1000:.1f} k"
