"""The HTML of a report: tables of the collected figures, plots, and a template that escapes every value."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any, NamedTuple

from dglkge import __version__
from dglkge.data.dataset_files import SPLITS, Field
from dglkge.distributed.jobs import human_bytes
from dglkge.errors import import_extra
from dglkge.evaluation.metrics import CATEGORIES, SIDES, UNSEEN
from dglkge.inference.run import model_text
from dglkge.report import plots
from dglkge.report.figures import OUTPUT_FIELDS
from dglkge.report.run_state import duration

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

Entry = Mapping[str, Any]
"""A part of the collected figures."""


class Cell(NamedTuple):
    """A cell of a table: its text, the number it is sorted by, and how it looks: ``n`` for numbers."""

    text: str
    value: float | None = None
    css: str = ""
    title: str = ""


class Column(NamedTuple):
    """A column of a table; its kind is ``text`` or ``number``, and it may belong to one of several runs."""

    title: str
    kind: str = "number"
    run: str = ""


class Table(NamedTuple):
    """A table; the first cell of a row is its heading."""

    id: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    sortable: bool = True


def render(figures: Entry) -> str:
    """Return the page of the figures of :func:`dglkge.report.figures.collect` as HTML."""
    jinja2, plotly = packages()
    page = _Page(figures["runs"], figures["datasets"])
    view = {
        **page.head(),
        "overview": page.overview(),
        "datasets": [page.dataset(number, data) for number, data in enumerate(page.datasets)],
        "curves": page.curves(),
        **page.ranking(),
        "examples": page.runs,
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
            aligned = [cell._replace(css=cell.css.removeprefix("n").strip()) for cell in cells]
            rows.append([Cell(_metric_title(name)), *aligned])
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
        for measure, title, heading in CURVES:
            is_log = measure == "loss" and plots.is_log_better(self.runs, measure)
            if self.add(f"plot-{measure}", plots.curves(self.runs, measure, title, is_log)):
                headings.append((f"plot-{measure}", heading))
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
            rows.append([*cells, number_cell(count, ",.0f"), *metrics])
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
        def of(run: Entry, name: str) -> list[float]:
            """Return a figure of all epochs that have it."""
            return [epoch[name] for epoch in run["training"]["epochs"] if epoch[name] is not None]

        def trainers(run: Entry) -> str:
            return ", ".join(f"{number:g}" for number in sorted(set(of(run, "num_trainers"))))

        def speed(run: Entry) -> str:
            values = [value for _, value in run["training"]["edges_per_second"] if value is not None]
            return f"{median(values):,.0f}" if values else ""

        memory = "shares of shared pages summed over trainers, at the end of an epoch; servers are not in it"
        facts: list[tuple[str, Callable[[Entry], str], str]] = [
            (
                "Time in training loops",
                lambda run: _spent(run["training"]["seconds"]),
                "without start, ranking and commits",
            ),
            ("Epochs recorded", lambda run: f"{len(run['training']['epochs']):,}", ""),
            ("Time of an epoch, median", lambda run: _spent(median(of(run, "seconds") or [0])), ""),
            ("Edges/s, median", speed, ""),
            ("Bytes sent to other machines", lambda run: human_bytes(sum(of(run, "bytes_sent"))), ""),
            ("Trainers", trainers, ""),
            (
                "Memory of the trainers, largest",
                lambda run: human_bytes(max(of(run, "trainer_memory_bytes"), default=0)),
                memory,
            ),
            ("Checkpoint on disk", lambda run: human_bytes(run["checkpoint_bytes"] or 0), ""),
        ]
        rows = [self._facts(title, text, hint, css="n") for title, text, hint in facts]
        return self._fact_table("table-time", rows, "number")

    def tables(self) -> Table:
        rows = [
            {
                **({"Run": Cell(run["label"])} if self._is_comparison else {}),
                "Table": Cell(table["name"]),
                "Rows": number_cell(table["num_rows"]),
                "Width": number_cell(table["width"]),
                "Rows in memory": number_cell(4 * table["num_rows"] * table["width"], human_bytes),
                "Files": number_cell(table["num_parts"]),
                "On disk": number_cell(table["size_bytes"], human_bytes),
                "Optimizer state": Cell(", ".join(table["optimizer_state"]) or NONE),
            }
            for run in self.runs
            for table in run["tables"]
        ]
        return _table("table-tables", rows)

    def partitions(self, number: int, data: Entry) -> dict[str, Any]:
        graph = data["partitions"]
        parts, balance, edge_cut = graph[Field.PARTS], graph["balance"], graph["edge_cut"]
        types = list(data["entities"]) if len(data["entities"]) > 1 else []
        rows = []
        for part in parts:
            cut, nodes = part[Field.CUT_EDGES], part["nodes"]
            counts = {
                "Entities": part["num_entities"],
                **{f"of type {name}": nodes.get(name) for name in types},
            }
            counts |= {"Relations": nodes["relation"], "Edges": part["num_edges"], "Cut edges": cut}
            row = {title: number_cell(count) for title, count in counts.items()}
            share = number_cell(cut / part["num_edges"] if part["num_edges"] else 0.0, ".1%")
            rows.append({"Partition": Cell(str(part["part"])), **row, "Cut share": share})
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
        return {
            "name": data["name"],
            "note": note,
            "plot": id_,
            "table": _table(f"table-parts-{number}", rows),
        }

    def buckets(self) -> list[tuple[str, Table]]:
        """Return a table of the buckets of the last epoch of each run with ranges, and the run's label."""
        tables = []
        for number, run in enumerate(self.runs):
            rows = [_bucket_cells(bucket) for bucket in run["training"]["buckets"]]
            if rows:
                label = run["label"] if self._is_comparison else ""
                tables.append((label, _table(f"table-buckets-{number}", rows)))
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
    number, split_count = ranking["num_triples"], ranking["num_triples_of_split"]
    if number == split_count:
        return f"all {number:,}"
    return f"{number:,} of {split_count:,}, drawn with seed {ranking['seed']}"


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


def _setting(value: Any) -> str:
    """Return the value of a field as text, near to YAML's."""
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)


def _metric_title(name: str) -> str:
    return METRIC_TITLES.get(name, name if name.startswith("MRR") else name.capitalize())


def _table(id_: str, rows: Sequence[Mapping[str, Cell]]) -> Table:
    """Return a table of rows, which are cells by the title of their column."""
    columns = [Column(title, "number" if cell.css else "text") for title, cell in rows[0].items()]
    return Table(id_, columns, [list(row.values()) for row in rows])


def number_cell(value: Any, form: str | Callable[[Any], str] = ",") -> Cell:
    """Return the cell of a figure that may be missing."""
    if value is None:
        return Cell(NONE, css="n")
    return Cell(form(value) if callable(form) else format(value, form), value, "n")


def _bucket_cells(record: Entry) -> dict[str, Cell]:
    """Return what a table of buckets shows of a record, by title."""
    held_out = record.get("eval_stats_after", {}).get("metrics", {}).get("mrr")
    return {
        "Machine": number_cell(record.get("machine", 0)),
        "Head range": number_cell(record["lhs_partition"]),
        "Tail range": number_cell(record["rhs_partition"]),
        "Triples": number_cell(record["stats"]["count"]),
        "Loss": number_cell(record["stats"]["metrics"]["loss"], ".4f"),
        "Held-out MRR": number_cell(held_out, ".4f"),
        "Seconds": number_cell(record["seconds"], ",.2f"),
        "MB read": number_cell(record["bytes_read"] / 1e6, ",.1f"),
        "MB written": number_cell(record["bytes_written"] / 1e6, ",.1f"),
        "MB/s": number_cell(record["mb_per_second"], ",.1f"),
        "Major faults": number_cell(record["major_faults"]),
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
    for factor, unit in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= max(factor, 10_000):
            return f"{count / factor:.1f} {unit}"
    return f"{count:,}"
