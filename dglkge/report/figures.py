"""The figures of a report, collected from the files of runs and ready for JSON. Nothing is written here.

The map of entities is a sample of rows, projected to two dimensions by scikit-learn.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dglkge.checkpoint import layout
from dglkge.checkpoint.layout import RUN_STATS_FILE
from dglkge.config.schema import DECIDED_FIELDS, field_table, fields, value_at
from dglkge.data import dataset_files
from dglkge.data.dataset import Dataset
from dglkge.data.dataset_files import SPLITS, TEST, Field
from dglkge.errors import InputError, import_extra
from dglkge.evaluation.metrics import BOTH, PROTOCOL, SIDES, Protocol, RankingResult, rankings
from dglkge.inference.run import Run, open_run
from dglkge.inference.search import LinkQuery
from dglkge.inference.whole_tables import Tables
from dglkge.report.run_state import finite, learning_curves, read_lines, records_folder
from dglkge.typing import Side

METHODS = ("pca", "tsne")
PERPLEXITY = 30
"""Of t-SNE, its usual value; smaller where there are fewer than 91 entities, of which it takes a third."""


def frequent_entities(entity_degrees: Mapping[str, np.ndarray], most: int) -> dict[str, np.ndarray]:
    """Return the ids of the entities with the highest degrees over all types, by type; one of each at least.

    Examples
    --------
    >>> frequent_entities({"a": np.array([1, 9, 3]), "b": np.array([2])}, 3)
    {'a': array([1, 2]), 'b': array([0])}
    """
    counts = np.concatenate(list(entity_degrees.values()))
    owner = np.repeat(np.arange(len(entity_degrees)), list(map(len, entity_degrees.values())))
    best = np.argsort(-counts, kind="stable")[:most]
    taken = np.bincount(owner[best], minlength=len(entity_degrees))
    return {
        name: np.argsort(-degrees, kind="stable")[: max(1, number)]
        for (name, degrees), number in zip(entity_degrees.items(), taken.tolist())
    }


def project(rows: np.ndarray, method: str, seed: int = 0) -> tuple[np.ndarray, list[float]]:
    """Project (n, D) rows to (n, 2) points; with the variance's share along each axis, none for t-SNE."""
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE

    if not np.isfinite(rows).all():
        raise InputError(
            "rows of entities are not finite: the run has diverged; --points 0 leaves the map out"
        )
    rows = rows.astype(np.float64)
    # Equal rows, or one alone, have no direction that PCA could find.
    if len(rows) < 3 or rows.shape[1] < 2 or not rows.var(axis=0).any():
        points = np.zeros((len(rows), 2))
        points[:, : rows.shape[1]] = (rows - rows.mean(axis=0))[:, :2]
        return points, []
    if method == "tsne":
        perplexity = min(PERPLEXITY, (len(rows) - 1) / 3)
        return TSNE(2, perplexity=perplexity, init="pca", random_state=seed).fit_transform(rows), []
    pca = PCA(2, svd_solver="full")
    return pca.fit_transform(rows), pca.explained_variance_ratio_.tolist()


def entity_map(
    tables: Tables, entity_degrees: Mapping[str, np.ndarray], most: int, method: str
) -> dict[str, Any]:
    """Return the map of the entities with the highest degrees: by type their names, degrees, x and y."""
    ids_by_type = frequent_entities(entity_degrees, most)
    rows = [tables.gather(name, torch.from_numpy(ids)).float().numpy() for name, ids in ids_by_type.items()]
    points, explained = project(np.concatenate(rows), method)
    types: dict[str, dict[str, Sequence[Any]]] = {}
    points_by_type = np.split(points, np.cumsum(list(map(len, rows)))[:-1])
    for (name, ids), type_points in zip(ids_by_type.items(), points_by_type):
        vocabulary, (x, y) = tables.vocabulary(name), type_points.T.round(5).tolist()
        names = [vocabulary[id_] for id_ in ids.tolist()]
        types[name] = {"names": names, "degrees": entity_degrees[name][ids].tolist(), "x": x, "y": y}
    return {"method": method, "explained": explained, "num_entities": len(points), "types": types}


MOST_TRIPLES, FEWEST_TRIPLES = 2000, 100
MOST_PRODUCTS = 10**12
"""Multiplications of the ranking; beyond it fewer triples are ranked, see :func:`default_limit`."""

EXAMPLE_RELATIONS, EXAMPLE_TRIPLES, EXAMPLE_ANSWERS = 3, 2, 5
FEWEST_FOR_EXAMPLES = 3
"""Ranked triples of a relation that may be called the best or the worst; one alone says little."""

OUTPUT_FIELDS = ("output", "dataset")
"""Fields that say where files are, and differ between any two runs."""

Progress = Callable[[str, int, int], object]
"""Called with what is being done, the number just done and the total."""


@dataclass(frozen=True)
class Choices:
    """What a report covers, as the options of ``dglkge report`` say; limit: see :func:`default_limit`."""

    split: str = TEST
    limit: int | None = None
    num_candidates: int | None = None
    seed: int = 0
    points: int = 2000
    projection: str = METHODS[0]


def default_limit(num_entities: int, dim: int) -> int:
    """Return how many triples are ranked by default: the fewer, the more entities each is compared with.

    Examples
    --------
    >>> default_limit(14_541, 400), default_limit(5_000_000, 400), default_limit(86_000_000, 400)
    (2000, 250, 100)
    """
    # Two queries for each triple, and a product for each number of each entity's row.
    affordable = MOST_PRODUCTS // (2 * max(1, num_entities) * dim)
    return int(min(MOST_TRIPLES, max(FEWEST_TRIPLES, affordable)))


def collect(
    paths: Sequence[str],
    choices: Choices,
    dataset: str | None = None,
    verify: bool = True,
    progress: Progress = lambda stage, number, total: None,
) -> dict[str, Any]:
    """Return all figures of runs: ``runs``, ``datasets`` and ``configuration``.

    Raises
    ------
    InputError
        If a run or its data set cannot be opened, or two of the paths are the same.
    """
    labels = run_labels(paths)
    if choices.points:
        import_extra("the map of entities (--points 0 leaves it out)", "sklearn", "report", "scikit-learn")
    # All are opened before the first is ranked, which may take minutes: a wrong path is found at once.
    runs = [open_run(path, dataset, verify) for path in paths]
    datasets: dict[str, dict[str, Any]] = {}
    for label, run in zip(labels, runs):
        key = run.dataset.fingerprint
        if key not in datasets:
            datasets[key] = {**dataset_figures(run.dataset, run.degrees), "runs": []}
        datasets[key]["runs"].append(label)
    figures = {
        "runs": [run_figures(run, choices, label, progress) for label, run in zip(labels, runs)],
        "datasets": [*datasets.values()],
        "configuration": configuration([run.checkpoint.config for run in runs]),
    }
    return finite(figures)


def run_labels(paths: Sequence[str]) -> list[str]:
    """Return a short name for each run: the last part of its path, or more where that is not enough.

    Examples
    --------
    >>> run_labels(["old/a", "new/a", "runs/b/checkpoint/best"])
    ['old/a', 'new/a', 'best']
    """
    parts = [Path(path).resolve().parts for path in paths]
    if len(set(parts)) < len(parts):
        raise InputError(f"the same run is given twice: {', '.join(paths)}")
    labels = []
    for folder in parts:
        other_paths = [other for other in parts if other != folder]
        length = 1
        while any(other[-length:] == folder[-length:] for other in other_paths):
            length += 1
        labels.append("/".join(folder[-length:]))
    return labels


def dataset_figures(dataset: Dataset, entity_degrees: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return what a data set and its partitions hold."""
    description = dataset.description
    all_degrees = np.concatenate(list(entity_degrees.values()))
    split_counts = {
        split: np.bincount(dataset.split(split)[:, 1], minlength=dataset.num_relations) for split in SPLITS
    }
    graph = dataset_files.load_json(dataset.path / dataset_files.PARTITIONS / dataset_files.REPORT)
    return {
        "name": dataset.name,
        "path": str(dataset.path),
        "fingerprint": dataset.fingerprint,
        "entities": {name: dataset.num_entities(name) for name in dataset.entity_types},
        "num_relations": dataset.num_relations,
        "triples": dict(description[Field.SPLITS]),
        "has_weights": dataset.has_weights,
        "duplicates": description.get(Field.DUPLICATES),
        "unseen": description.get(Field.UNSEEN, {}).get("valid_and_test"),
        "degrees": {
            "mean": float(all_degrees.mean()),
            "median": float(np.median(all_degrees)),
            "largest": int(all_degrees.max()),
            "without_triples": int((all_degrees == 0).sum()),
            "histogram": degree_histogram(all_degrees),
        },
        "relations": {
            label: {split: int(counts[id_]) for split, counts in split_counts.items()}
            for id_, label in enumerate(dataset.relations.labels.names)
        },
        "partitions": {
            "method": dataset.part_method,
            "parts": graph[Field.PARTS],
            "balance": graph.get("balance"),
            "edge_cut": graph.get("edge_cut"),
        },
    }


def degree_histogram(entity_degrees: np.ndarray) -> list[list[int]]:
    """Return [lowest degree, highest degree, entities] of classes that double: 0, 1, 2-3, 4-7, ...

    Examples
    --------
    >>> degree_histogram(np.array([0, 1, 1, 3, 5]))
    [[0, 0, 1], [1, 1, 2], [2, 3, 1], [4, 7, 1]]
    """
    # frexp's exponent is 0 of 0, 1 of 1, 2 of 2 and 3, 3 of 4 to 7.
    counts = np.bincount(np.frexp(entity_degrees)[1]).tolist()
    return [[2**exponent // 2, 2**exponent - 1, count] for exponent, count in enumerate(counts)]


def run_figures(run: Run, choices: Choices, label: str, progress: Progress) -> dict[str, Any]:
    """Return the figures of one run."""
    checkpoint, described = run.checkpoint, run.inspect()
    curves = learning_curves(read_lines(records_folder(checkpoint.run_folder) / RUN_STATS_FILE))
    result, triples = ranking(run, choices, functools.partial(progress, f"{label}: rank"))
    metrics = result.to_dict()
    entity_maps = {}
    if choices.points:
        progress(f"{label}: map", 0, 1)
        entity_maps["map"] = entity_map(run.tables, run.degrees, choices.points, choices.projection)
    progress(f"{label}: examples", 0, 1)
    recorded = {
        split: {name: result[name] for name in (PROTOCOL, BOTH)}
        for split, result in rankings(run.metrics).items()
    }
    return {
        "label": label,
        "path": str(checkpoint.path),
        **{name: described[name] for name in ("version", "model", "optimizer", "seed", "versions", "tables")},
        "finished_epochs": checkpoint.meta.progress.get(layout.Progress.FINISHED_EPOCHS),
        "dataset": run.dataset.fingerprint,
        "parameters": sum(table["num_rows"] * table["width"] for table in described["tables"]),
        "checkpoint_bytes": described["size_bytes"],
        "training": curves,
        "recorded": recorded,  # at the end of the training job
        "completions": completions(run),
        "ranking": {
            "protocol": metrics["protocol"],
            "num_triples": len(triples),
            "num_triples_of_split": len(run.dataset.split(choices.split)),
            "seed": choices.seed,
            "sides": {side: metrics[side] for side in SIDES},
            "categories": metrics["per_category"],
            "relations": metrics["per_relation"],
            "relation_categories": metrics["relation_categories"],
        },
        "examples": examples(run, result, triples),
        **entity_maps,
    }


def completions(run: Run) -> dict[str, list[dict[str, float]]]:
    """Return the precision and the recall of ``dglkge complete --held-out`` by split, for this version."""
    curves = {}
    for path in sorted(run.checkpoint.run_folder.glob(layout.COMPLETION_PATTERN)):
        result, checkpoint = dataset_files.load_json(path), run.checkpoint
        if (result["run_id"], result["version"]) == (checkpoint.manifest.run_id, checkpoint.version):
            curves[result["held_out"]] = result["curve"]
    return curves


def ranking(
    run: Run, choices: Choices, progress: Callable[[int, int], object]
) -> tuple[RankingResult, np.ndarray]:
    """Rank triples of a split, all or a sample, and return the result with the triples."""
    triples = run.dataset.split(choices.split)
    limit = choices.limit
    if limit is None:
        # Each query is compared with all entities of one type, or with the sampled ones.
        widest = max(run.dataset.num_entities(name) for name in run.dataset.entity_types)
        limit = default_limit(min(widest, choices.num_candidates or widest), run.tables.meta.dim)
    if 0 < limit < len(triples):
        # Not the first ones: files are often sorted by relation.
        places = np.random.default_rng(choices.seed).choice(len(triples), limit, replace=False)
        triples = triples[np.sort(places)]
    protocol = Protocol(split=choices.split, num_candidates=choices.num_candidates, seed=choices.seed)
    return run.evaluate(protocol, triples, lambda number: progress(number, 2 * len(triples))), triples


def examples(run: Run, result: RankingResult, triples: np.ndarray) -> dict[str, list[dict[str, Any]]]:
    """Return the best and the worst relations by MRR, each with the answers to some of its queries."""
    both = {label: sides["both"] for label, sides in result.per_relation().items()}
    enough = [label for label, metrics in both.items() if metrics.num_queries >= 2 * FEWEST_FOR_EXAMPLES]
    ordered = sorted(enough or both, key=lambda label: -both[label].mrr)
    # A relation is not both: with few of them, the better half is best.
    number = min(EXAMPLE_RELATIONS, max(1, len(ordered) // 2))
    groups = {"best": ordered[:number], "worst": ordered[max(number, len(ordered) - number) :][::-1]}
    by_label: dict[str, dict[str, Any]] = {}
    for label in chain.from_iterable(groups.values()):
        mrr, num_queries = both[label].mrr, both[label].num_queries
        by_label[label] = {"relation": label, "mrr": mrr, "num_queries": num_queries, "queries": []}
    relations, vocabulary = run.dataset.relations, run.dataset.vocabulary
    queries = [
        (place, LinkQuery(side, int(triples[place, side.anchor_column]), id_))
        for id_ in map(relations.labels.id, by_label)
        for place in np.flatnonzero(triples[:, 1] == id_)[:EXAMPLE_TRIPLES]
        for side in Side
    ]
    # All at once: each call reads the rows of all candidates.
    answers_of_queries = run.answer([query for _, query in queries], EXAMPLE_ANSWERS)
    for (place, query), answers in zip(queries, answers_of_queries):
        side, relation = query.side, relations[query.relation_id]
        names = vocabulary(relation.candidate_type(side))
        by_label[relations.labels[query.relation_id]]["queries"].append(
            {
                "side": side.value,
                "given": vocabulary(relation.anchor_type(side))[query.entity_id],
                "true": names[int(triples[place, side.column])],
                "rank": float(result.ranks[side][place]),
                "answers": [
                    {"name": names[answer.entity_id], "score": answer.score, "known": answer.known}
                    for answer in answers
                ],
            }
        )
    return {kind: [by_label[label] for label in labels] for kind, labels in groups.items()}


def configuration(configs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return every field of a configuration with its default and runs' values, the default if unrecorded."""
    rows = []
    for field, (key, _, default, text) in zip(fields(), field_table()):
        plain = list(default) if isinstance(default, tuple) else default
        recorded_values = (value_at(config, field.path) for config in configs)
        values = [plain if value is None else value for value in recorded_values]
        rows.append(
            {
                "field": key,
                "default": plain,
                "help": text,
                "values": values,
                "is_changed": [value != plain and key not in DECIDED_FIELDS for value in values],
                "differs": any(value != values[0] for value in values[1:]),
            }
        )
    return rows
