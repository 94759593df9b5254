"""The HTML of a report: tables of the collected figures, plots, and a template that escapes every value."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from dglkge import __version__
from dglkge.data.dataset_files import SPLITS, Field
from dglkge.distributed.process_memory import human_bytes
from dglkge.errors import import_extra
from dglkge.evaluation.metrics import CATEGORIES, SIDES, UNSEEN
from dglkge.report.figures import OUTPUT_FIELDS

HERE = Path(__file__).resolve().parent

MOST_TABLE_RELATIONS = 1000
"""Relations in the table, the most frequent: a page of a hundred thousand rows opens in no browser."""

NONE = "–"

METRICS = ("mrr", "hits@1", "hits@3", "hits@10", "mr")
METRIC_TITLES = {"mrr": "MRR", "mr": "MR", "auc": "AUC"}
LOWER_IS_BETTER = ("mr",)


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


Number = int | float | None


def render(figures: Mapping[str, Any]) -> str:
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
    from dglkge.report import plots

    runs, datasets = figures["runs"], figures["datasets"]
    drawn: dict[str, Any] = {}
    view = {
        **_head(runs, datasets),
        "overview": _overview(runs, datasets),
        "datasets": [_dataset(number, one, drawn, plots) for number, one in enumerate(datasets)],
        "curves": _curves(runs, drawn, plots),
        "curve_note": "Loss and speed are those between two reports, about 20 in an epoch. "
        "Curves of more than 400 points show means of neighbours.",
        **_ranking(runs, datasets, drawn, plots),
        "examples": _examples(runs),
        "example_note": "Queries of the ranked triples, with the five best answers. A tag names the split of "
        "an answer that the data set has; filtered ranking leaves these out, so the rank may be better than "
        "the place in the list. The true answer is bold.",
        **_maps(runs, drawn, plots),
        "time": _time(runs),
        "tables": _tables(runs),
        "has_phases": _add(drawn, "plot-phases", plots.phase_bars(runs)),
        "partitions": [_partitions(number, one, drawn, plots) for number, one in enumerate(datasets)],
        **_configuration(figures["configuration"], runs),
    }
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE), autoescape=True, undefined=jinja2.StrictUndefined
    )
    # In a script no character reference is read, and the text "</script>" would end it.
    text = json.dumps(drawn, ensure_ascii=False, allow_nan=False, default=_plain).replace("<", "\\u003c")
    trusted = {
        "css": (HERE / "page.css").read_text(encoding="utf-8"),
        "script": (HERE / "page.js").read_text(encoding="utf-8"),
        "plotly": plotly.get_plotlyjs(),
        "plots": text,
    }
    # Marked, so that they are not escaped; nothing else of the page is.
    return environment.get_template("page.html").render(
        version=__version__,
        **view,
        **{name: environment.filters["safe"](one) for name, one in trusted.items()},
    )


def packages() -> tuple[ModuleType, ModuleType]:
    """Return jinja2 and plotly, which a page needs; without one, an InputError has the command."""
    return import_extra("a report", "jinja2", "report"), import_extra("a report", "plotly.offline", "report")


def _plain(value: Any) -> Any:
    """Return an array of plotly's as a list."""
    return value.tolist() if isinstance(value, np.ndarray) else list(value)


def _add(drawn: dict[str, Any], id_: str, figure: dict[str, Any]) -> bool:
    """Add a figure unless it is empty; tell whether it was added."""
    if figure:
        drawn[id_] = figure
    return bool(figure)


def _head(runs: Sequence[Mapping[str, Any]], datasets: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    labels = [run["label"] for run in runs]
    one = runs[0]
    protocol = one["ranking"]["protocol"]
    warnings = []
    if len(datasets) > 1:
        warnings.append(
            "The runs were trained on different data sets; their metrics cannot be compared: "
            + "; ".join(f"{found['name']}: {', '.join(found['runs'])}" for found in datasets)
        )
    headings = [
        ("overview", "Overview"),
        ("data", "Data"),
        ("curves", "Learning curves"),
        ("ranking", "Ranking"),
        ("examples", "Best and worst"),
        *([("map", "Map")] if any("map" in run for run in runs) else []),
        ("time", "Time and memory"),
        ("partitions", "Partitions"),
        ("configuration", "Configuration"),
    ]
    best = one["ranking"]["sides"]["both"]
    data = datasets[0]
    tiles = [
        (f"{best['mrr']:.4f}", f"MRR, {protocol['split']} split"),
        (f"{best['hits@10']:.4f}", "Hits@10"),
        counted(sum(data["entities"].values()), "entity", "entities").rsplit(" ", 1),
        counted(data["num_relations"], "relation").rsplit(" ", 1),
        counted(sum(data["triples"].values()), "triple").rsplit(" ", 1),
        (duration(one["training"]["seconds"]), "training"),
    ]
    return {
        "title": f"Report of {', '.join(labels)}",
        "protocol": f"Ranking: {protocol['split']} split, {protocol['filtering']}, "
        f"{protocol['candidates']} candidates, {protocol['ties']} ties.",
        "warnings": warnings,
        "headings": headings,
        "tiles": tiles if len(runs) == 1 else [],
    }


def _overview(runs: Sequence[Mapping[str, Any]], datasets: Sequence[Mapping[str, Any]]) -> Table:
    names = {one["fingerprint"]: one["name"] for one in datasets}
    rows: list[list[Cell]] = []

    def add(title: str, texts: Iterable[str | None], hint: str = "") -> None:
        rows.append([Cell(title, title=hint), *(Cell(NONE if text is None else text) for text in texts)])

    add("Model", (_model(run["model"]) for run in runs))
    add("Data set", (names[run["dataset"]] for run in runs))
    add("Epochs", (f"{run['finished_epochs']}, version {run['version']}" for run in runs))
    add("Optimizer", (_options(run["optimizer"]) for run in runs))
    add("Seed", (str(run["seed"]) for run in runs))
    add("Parameters", (f"{run['parameters']:,}" for run in runs), "numbers in all rows")
    # Those of a single run are above this table, and in that of the ranking.
    for name in METRICS if len(runs) > 1 else ():
        values = [run["ranking"]["sides"]["both"][name] for run in runs]
        # With several data sets none is the best.
        cells = metric_cells(values, name, len(datasets) == 1)
        cells = [dataclasses.replace(cell, css=cell.css.removeprefix("n").strip()) for cell in cells]
        rows.append([Cell(METRIC_TITLES.get(name, name.capitalize())), *cells])
    add("Ranked triples", (_ranked(run) for run in runs))
    for split in SPLITS:
        if any(_is_news(run, split) for run in runs):
            add(f"MRR at the end of training, {split} split", (_recorded(run, split) for run in runs))
    add("Time in training", (duration(run["training"]["seconds"]) for run in runs))
    add("Checkpoint", (run["path"] for run in runs))
    columns = [Column("", "text"), *(Column(run["label"], "text") for run in runs)]
    return Table("table-overview", columns, rows, sortable=False)


def _model(model: Mapping[str, Any]) -> str:
    known = ("score_function", "dimension", "reciprocal_relations")
    options = "".join(f", {name} {value}" for name, value in model.items() if name not in known)
    reciprocal = ", reciprocal relations" if model["reciprocal_relations"] else ""
    return f"{model['score_function']}, dimension {model['dimension']}{options}{reciprocal}"


def _options(optimizer: Mapping[str, Any]) -> str:
    rest = "".join(f", {name} {value}" for name, value in optimizer.items() if name != "name")
    return f"{optimizer.get('name', NONE)}{rest}"


def _ranked(run: Mapping[str, Any]) -> str:
    found = run["ranking"]
    number, of_split = found["num_triples"], found["num_triples_of_split"]
    if number == of_split:
        return f"all {number:,}"
    return f"{number:,} of {of_split:,}, drawn with seed {found['seed']}"


def _is_news(run: Mapping[str, Any], split: str) -> bool:
    """Return whether a run has recorded another MRR of a split than the report's."""
    recorded, ranking = run["recorded"].get(split), run["ranking"]
    is_same = (
        recorded is not None and f"{recorded['both']['mrr']:.4f}" == f"{ranking['sides']['both']['mrr']:.4f}"
    )
    return recorded is not None and not (is_same and ranking["protocol"]["split"] == split)


def _recorded(run: Mapping[str, Any], split: str) -> str | None:
    found = run["recorded"].get(split)
    if found is None:
        return None
    protocol, both = found["protocol"], found["both"]
    how = f"{protocol['filtering']}, {protocol['candidates']} candidates"
    return f"{both['mrr']:.4f} ({both['num_queries']:,} queries, {how})"


def _dataset(number: int, one: Mapping[str, Any], drawn: dict[str, Any], plots: ModuleType) -> dict[str, Any]:
    pairs = [("Relations", f"{one['num_relations']:,}")]
    entities = one["entities"]
    pairs += [("Entities", f"{sum(entities.values()):,}")]
    if len(entities) > 1:
        pairs += [(f"Entities of type {name}", f"{count:,}") for name, count in entities.items()]
    for split, count in one["triples"].items():
        repeated = (one["duplicates"] or {}).get(split)
        pairs.append((f"Triples, {split}", f"{count:,}" + (f" ({repeated:,} repeated)" if repeated else "")))
    unseen = one["unseen"]
    if unseen and unseen["triples"]:
        pairs.append(
            (
                "Not seen in training",
                f"{counted(unseen['entities'], 'entity', 'entities')} and "
                f"{counted(unseen['relations'], 'relation')}, in {counted(unseen['triples'], 'triple')} of "
                "valid and test",
            )
        )
    degrees = one["degrees"]
    pairs += [
        (
            "Degree of an entity",
            f"mean {degrees['mean']:,.1f}, median {degrees['median']:,.0f}, largest {degrees['largest']:,}",
        ),
        ("Entities without training triple", f"{degrees['without_triples']:,}"),
        ("Weights", "yes" if one["has_weights"] else "no"),
        ("Folder", one["path"]),
        ("Fingerprint", one["fingerprint"][:12]),
        ("Runs", ", ".join(one["runs"])),
    ]
    rows = [[Cell(name), Cell(text)] for name, text in pairs]
    columns = [Column("", "text"), Column("", "text")]
    id_ = f"plot-degrees-{number}"
    _add(drawn, id_, plots.degree_bars(degrees["histogram"]))
    table = Table(f"table-data-{number}", columns, rows, sortable=False)
    return {"name": one["name"], "figures": table, "degrees": id_}


def _curves(
    runs: Sequence[Mapping[str, Any]], drawn: dict[str, Any], plots: ModuleType
) -> list[tuple[str, str]]:
    wanted = (
        ("loss", "loss", "Loss"),
        ("valid", "MRR", "MRR of the valid split"),
        ("edges_per_second", "edges/s", "Training speed"),
    )
    found = []
    for what, title, heading in wanted:
        is_log = what == "loss" and plots.is_log_better(runs, what)
        if _add(drawn, f"plot-{what}", plots.curves(runs, what, title, is_log)):
            found.append((f"plot-{what}", heading))
    return found


def _ranking(
    runs: Sequence[Mapping[str, Any]],
    datasets: Sequence[Mapping[str, Any]],
    drawn: dict[str, Any],
    plots: ModuleType,
) -> dict[str, Any]:
    comparable = len(datasets) == 1
    _add(drawn, "plot-categories", plots.by_category(runs))
    groups = [{side: run["ranking"]["sides"][side] for side in SIDES} for run in runs]
    names = {"both": "both sides", "head": "heads", "tail": "tails"}
    sides = _metric_table(
        "table-sides",
        "Side",
        runs,
        [(names[side], [group[side] for group in groups]) for side in SIDES],
        comparable,
    )
    lines = []
    for category in (*CATEGORIES, UNSEEN):
        of_runs = [run["ranking"]["categories"].get(category) for run in runs]
        if any(of_runs):
            for side in SIDES:
                found = [None if one is None else one[side] for one in of_runs]
                lines.append((f"{category}, {names[side]}", found))
    categories = _metric_table("table-categories", "Category", runs, lines, comparable)
    relations = []
    for number, data in enumerate(datasets):
        relations.append(_relations(number, data, [run for run in runs if run["label"] in data["runs"]]))
        id_, shown = relations[-1]["plot"], relations[-1].pop("shown")
        of_data = [run for run in runs if run["label"] in data["runs"]]
        _add(drawn, id_, plots.by_relation(of_data, shown[: plots.MOST_RELATIONS]))
        if len(shown) > plots.MOST_RELATIONS:
            text = f"The plot shows the {plots.MOST_RELATIONS} relations with the most queries. "
            relations[-1]["note"] = text + relations[-1]["note"]
    ranked = "Every triple of the split was ranked, its head and its tail."
    sampled = [
        f"{_ranked(run)} ({run['label']})"
        for run in runs
        if run["ranking"]["num_triples"] < run["ranking"]["num_triples_of_split"]
    ]
    if sampled:
        ranked = (
            "The heads and tails of a sample of the split's triples were ranked, so metrics of rare "
            f"relations are uncertain: {'; '.join(sampled)}. More with --limit."
        )
    text = (
        "1-N: one head, many tails, by the training triples. MR: mean rank. "
        "The best run of a row is bold." if len(runs) > 1 and comparable
        else "1-N: one head, many tails, by the training triples. MR: mean rank."
    )  # fmt: skip
    return {"sides": sides, "categories": categories, "relations": relations, "ranked": f"{ranked} {text}"}


def _metric_table(
    id_: str,
    heading: str,
    runs: Sequence[Mapping[str, Any]],
    lines: Sequence[tuple[str, Sequence[Mapping[str, float] | None]]],
    comparable: bool,
) -> Table:
    """Return a table with a row for each line, and a column for each metric and run."""
    columns = [Column(heading, "text"), Column("Queries")]
    for name in METRICS:
        title = METRIC_TITLES.get(name, name.capitalize())
        columns += [Column(title, run=run["label"] if len(runs) > 1 else "") for run in runs]
    rows = []
    for label, found in lines:
        counts = [one["num_queries"] for one in found if one is not None]
        row = [Cell(label), number_cell(max(counts), f"{max(counts):,.0f}")]
        for name in METRICS:
            row += metric_cells([None if one is None else one[name] for one in found], name, comparable)
        rows.append(row)
    return Table(id_, columns, rows)


def _relations(number: int, data: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the table of the relations of a data set, the most frequent first."""
    found = [run["ranking"]["relations"] for run in runs]
    known = runs[0]["ranking"]["relation_categories"]
    frequent = sorted(data["relations"], key=lambda label: -data["relations"][label]["train"])
    ranked = [label for label in frequent if any(label in of_run for of_run in found)]
    kept = ranked[:MOST_TABLE_RELATIONS]
    columns = [Column("Relation", "text"), Column("Category", "text"), Column("Train"), Column("Queries")]
    names = (("both", "mrr"), ("head", "mrr"), ("tail", "mrr"), ("both", "hits@10"))
    titles = ("MRR", "MRR heads", "MRR tails", "Hits@10")
    for title in titles:
        columns += [Column(title, run=run["label"] if len(runs) > 1 else "") for run in runs]
    rows = []
    for label in kept:
        counts = [of_run[label]["both"]["num_queries"] for of_run in found if label in of_run]
        row = [
            Cell(label),
            Cell(known.get(label, {}).get("category", UNSEEN)),
            number_cell(data["relations"][label]["train"]),
            number_cell(max(counts)),
        ]
        for side, name in names:
            values = [of_run[label][side][name] if label in of_run else None for of_run in found]
            row += metric_cells(values, name)
        rows.append(row)
    note = f"{len(ranked):,} of {len(frequent):,} relations have ranked triples."
    if len(kept) < len(ranked):
        note += f" The table has the {len(kept):,} most frequent in training; --json has all."
    by_queries = sorted(
        ranked,
        key=lambda label: -max(of_run[label]["both"]["num_queries"] for of_run in found if label in of_run),
    )
    return {
        "name": data["name"],
        "plot": f"plot-relations-{number}",
        "note": note,
        "table": Table(f"table-relations-{number}", columns, rows),
        "shown": by_queries,
    }


def _examples(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    titles = {"best": "Best", "worst": "Worst"}
    found = []
    for run in runs:
        kinds = []
        for kind, relations in run["examples"].items():
            shown = []
            for one in relations:
                queries = [{**query, "shown_rank": f"{query['rank']:g}"} for query in one["queries"]]
                shown.append({**one, "queries": queries})
            kinds.append((titles[kind], shown))
        found.append({"label": run["label"], "kinds": kinds})
    return found


def _maps(runs: Sequence[Mapping[str, Any]], drawn: dict[str, Any], plots: ModuleType) -> dict[str, Any]:
    maps = []
    for number, run in enumerate(runs):
        if "map" in run:
            _add(drawn, f"plot-map-{number}", plots.map_points(run["map"]))
            maps.append((run["label"], f"plot-map-{number}"))
    if not maps:
        return {"maps": [], "map_note": ""}
    found = next(run["map"] for run in runs if "map" in run)
    how = {
        "pca": "the two main components of their rows (PCA)",
        "tsne": "their rows placed by t-SNE: near points are similar, distances between groups say little",
    }
    note = (
        f"The {found['num_entities']:,} entities with the most training triples (at least one of each type), "
        f"by {how[found['method']]}. Hover or tap for the name."
    )
    return {"maps": maps, "map_note": note}


def _time(runs: Sequence[Mapping[str, Any]]) -> Table:
    rows: list[list[Cell]] = []

    def add(title: str, of_run: Any, hint: str = "") -> None:
        rows.append(
            [Cell(title, title=hint), *(Cell(of_run(run["training"]) or NONE, css="n") for run in runs)]
        )

    def ends(name: str, training: Mapping[str, Any]) -> list[float]:
        return [epoch[name] for epoch in training["epochs"] if epoch[name] is not None]

    def middle(name: str, training: Mapping[str, Any]) -> float | None:
        return float(np.median(ends(name, training))) if ends(name, training) else None

    add("Time in training loops", lambda one: duration(one["seconds"]), "without start, ranking and commits")
    add("Epochs recorded", lambda one: f"{len(one['epochs']):,}")
    add("Time of an epoch, median", lambda one: duration(middle("seconds", one)))
    add("Edges/s, median", lambda one: _figure(_median(one["edges_per_second"])))
    add("Bytes sent to other machines", lambda one: human_bytes(sum(ends("bytes_sent", one))))
    add("Trainers", lambda one: ", ".join(f"{n:g}" for n in sorted(set(ends("num_trainers", one)))))
    add(
        "Memory of the trainers, largest",
        lambda one: human_bytes(max(ends("trainer_memory_bytes", one), default=0)),
        "shares of shared pages summed over trainers, at the end of an epoch; servers are not in it",
    )
    of_run = [run["checkpoint_bytes"] for run in runs]
    rows.append([Cell("Checkpoint on disk"), *(Cell(human_bytes(value or 0), css="n") for value in of_run)])
    columns = [Column("", "text"), *(Column(run["label"]) for run in runs)]
    return Table("table-time", columns, rows, sortable=False)


def _median(pairs: Sequence[Sequence[Any]]) -> float | None:
    values = [value for _, value in pairs if value is not None]
    return float(np.median(values)) if values else None


def _tables(runs: Sequence[Mapping[str, Any]]) -> Table:
    columns = [
        *([Column("Run", "text")] if len(runs) > 1 else []),
        *(Column("Table", "text"), Column("Rows"), Column("Width"), Column("Rows in memory")),
        *(Column("Files"), Column("On disk"), Column("Optimizer state", "text")),
    ]
    rows = []
    for run in runs:
        for one in run["tables"]:
            row_bytes = 4 * one["num_rows"] * one["width"]
            row = [
                Cell(one["name"]),
                number_cell(one["num_rows"]),
                number_cell(one["width"]),
                number_cell(row_bytes, human_bytes(row_bytes)),
                number_cell(one["num_parts"]),
                number_cell(one["size_bytes"], human_bytes(one["size_bytes"])),
                Cell(", ".join(one["optimizer_state"]) or NONE),
            ]
            rows.append([Cell(run["label"]), *row] if len(runs) > 1 else row)
    return Table("table-tables", columns, rows)


def _partitions(
    number: int, one: Mapping[str, Any], drawn: dict[str, Any], plots: ModuleType
) -> dict[str, Any]:
    found = one["partitions"]
    parts = found[Field.PARTS]
    types = list(one["entities"])
    columns = [Column("Partition", "text"), Column("Entities")]
    columns += [Column(f"of type {name}") for name in types] if len(types) > 1 else []
    columns += [Column("Relations"), Column("Edges"), Column("Cut edges"), Column("Cut share")]
    rows = []
    for part in parts:
        row = [Cell(str(part["part"])), number_cell(part["num_entities"])]
        row += [number_cell(part["nodes"][name]) for name in types] if len(types) > 1 else []
        cut = part[Field.CUT_EDGES]
        share = cut / part["num_edges"] if part["num_edges"] else 0.0
        row += [number_cell(part["nodes"]["relation"]), number_cell(part["num_edges"]), number_cell(cut)]
        rows.append([*row, number_cell(share, f"{share:.1%}")])
    count = f"{counted(len(parts), 'partition')} by {found['method']}."
    balance, edge_cut = found["balance"], found["edge_cut"]
    if balance and edge_cut and len(parts) > 1:
        count += (
            f" The largest has {balance['entities']:.3f} times the mean of entities and "
            f"{balance['edges']:.3f} times that of edges. {edge_cut['edges']:,} edges "
            f"({edge_cut['fraction']:.1%}) are cut: their "
            "head lies in another partition."
        )
    id_ = f"plot-parts-{number}" if len(parts) > 1 else ""
    if id_:
        _add(drawn, id_, plots.part_bars(parts))
    table = Table(f"table-parts-{number}", columns, rows)
    return {"name": one["name"], "note": count, "plot": id_, "table": table}


def _configuration(fields: Sequence[Mapping[str, Any]], runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    def table(id_: str, chosen: Iterable[Mapping[str, Any]]) -> Table:
        columns = [Column("Field", "text"), Column("Default", "text")]
        columns += [Column(run["label"], "text") for run in runs]
        rows = []
        for one in chosen:
            # Its default is empty, and no run can keep it.
            is_place = one["field"] in OUTPUT_FIELDS
            cells = [
                Cell(_setting(value), css="changed" if is_changed and not is_place else "")
                for value, is_changed in zip(one["values"], one["is_changed"])
            ]
            rows.append([Cell(one["field"], title=one["help"]), Cell(_setting(one["default"])), *cells])
        return Table(id_, columns, rows)

    different = [one for one in fields if one["differs"] or any(one["is_changed"])]
    note = "Fields that differ from their defaults (marked)"
    note += " or between the runs." if len(runs) > 1 else "."
    return {
        "configuration_note": f"{note} Hover over a field for its help.",
        "changed": table("table-changed", different),
        "all_fields": table("table-fields", fields),
    }


def _setting(value: Any) -> str:
    """Return the value of a field as text, near to YAML's."""
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)


def number_cell(value: Number, text: str | None = None) -> Cell:
    """Return the cell of a figure that may be missing."""
    if value is None:
        return Cell(NONE, css="n")
    return Cell(f"{value:,}" if text is None else text, value, "n")


def metric_cells(values: Sequence[Number], name: str, comparable: bool = True) -> list[Cell]:
    """Return the cells of one metric of all runs; the best of several is marked."""
    there = [value for value in values if value is not None]
    best = None
    if comparable and len(there) > 1 and len(set(there)) > 1:
        best = min(there) if name in LOWER_IS_BETTER else max(there)
    cells = []
    for value in values:
        text = NONE if value is None else f"{value:.1f}" if name in LOWER_IS_BETTER else f"{value:.4f}"
        cells.append(Cell(text, value, "n best" if value is not None and value == best else "n"))
    return cells


def _figure(value: Number) -> str:
    return "" if value is None else f"{value:,.0f}"


def duration(seconds: float | None) -> str:
    """Return a time as text; empty for none.

    Examples
    --------
    >>> duration(4.32), duration(75.0), duration(7325.0)
    ('4.3 s', '1 min 15 s', '2 h 2 min')
    """
    if not seconds:
        return ""
    if seconds < 60:
        return f"{seconds:.3g} s" if seconds < 1 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


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
