"""Progress while files are read, and the figures of a partitioned data set and of its quality."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Column, Table
from tqdm import tqdm

from dglkge.data.dataset import Dataset
from dglkge.data.dataset_files import SPLITS, Field
from dglkge.partition.ingest import Watch
from dglkge.partition.rows import pieces
from dglkge.typing import RELATION


def shows(progress: bool | None) -> bool:
    """Return the setting, or for None whether stderr is a terminal."""
    return sys.stderr.isatty() if progress is None else progress


def show_line(progress: bool | None, message: str) -> None:
    """Write a line to stderr if progress is shown."""
    if shows(progress):
        sys.stderr.write(message + "\n")


@contextmanager
def reading_progress(files: Sequence[Path], progress: bool | None) -> Iterator[Watch]:
    """Show one bar over the bytes of all files; None: where stderr is a terminal.

    Yields the function to call with a file and the number of its bytes read so far.
    """
    total = sum(path.stat().st_size for path in files if path.is_file())
    done: dict[Path, int] = {}
    with tqdm(total=total, unit="B", unit_scale=True, desc="reading", disable=not shows(progress)) as bar:

        def watch(path: Path, position: int) -> None:
            done[path] = position
            # tqdm counts increments, while readers report positions.
            bar.update(sum(done.values()) - bar.n)

        yield watch


_DESCRIBED = [Field.NAME, Field.NUM_PARTS, Field.SEED, Field.ENTITY_TYPES, Field.NUM_RELATIONS]
_DESCRIBED += [Field.NUM_TIMES, Field.SPLITS, Field.DUPLICATES, Field.UNSEEN]
"""Fields of the description that the report has too."""


def partition_figures(dataset: Dataset) -> dict[str, Any]:
    """Count the nodes, edges and cut edges of each partition.

    Returns
    -------
    dict
        ``parts``: for each partition its nodes by type, ``num_entities``, ``num_edges`` and ``cut_edges``
        (edges whose head lies elsewhere). ``balance``: the largest partition over the mean, of entities and
        of edges. ``edge_cut``: number and fraction of cut edges. Further fields describe the data set.
    """
    layout = dataset.layout()
    parts: list[dict[str, Any]] = []
    for part_id in range(layout.num_parts):
        table = layout.edge_table(part_id)
        cut = 0
        for lhs, _, first, end in dataset.edge_types:
            rows = slice(*np.searchsorted(table.triple_ids, [first, end]).tolist())
            lower, upper = layout.node_range(lhs, part_id)
            # The partition owns the tail of each of its edges, so only the head can lie elsewhere.
            for _, (edges,) in pieces(table.edges[rows]):
                cut += int(((edges[:, 0] < lower) | (edges[:, 0] >= upper)).sum())
        nodes = {ntype: int(np.diff(layout.range_starts(ntype))[part_id]) for ntype in layout.ntypes}
        num_entities = sum(map(nodes.__getitem__, dataset.entity_types))
        part = {"part": part_id, "nodes": nodes, "num_entities": num_entities}
        parts.append({**part, "num_edges": len(table.triple_ids), Field.CUT_EDGES: cut})
    sizes = {noun: [part[f"num_{noun}"] for part in parts] for noun in ("entities", "edges")}
    num_cut = sum(part[Field.CUT_EDGES] for part in parts)
    return {
        **{field: dataset.description[field] for field in _DESCRIBED if field in dataset.description},
        "method": dataset.part_method,
        Field.PARTS: parts,
        "balance": {noun: max(counts) * len(counts) / sum(counts) for noun, counts in sizes.items()},
        "edge_cut": {"edges": num_cut, "fraction": num_cut / sum(sizes["edges"])},
    }


def print_figures(figures: dict[str, Any], console: Console) -> None:
    """Print the figures as a table."""
    counts = figures[Field.ENTITY_TYPES]
    types = f" of {len(counts)} types" if len(counts) > 1 else ""
    splits = ", ".join(f"{count:,} {split}" for split, count in figures[Field.SPLITS].items())
    say = _plain(console)
    times = f", {figures[Field.NUM_TIMES]:,} times" if Field.NUM_TIMES in figures else ""
    entities, relations = f"{sum(counts.values()):,} entities", f"{figures[Field.NUM_RELATIONS]:,} relations"
    say(f"{figures[Field.NAME]}: {entities}{types}, {relations}{times}\ntriples: {splits}")
    numbers = ("partition", "entities", "relations", "edges", "edges / mean", "cut edges")
    table = _table(f"partitions ({figures['method']}, seed {figures[Field.SEED]})", *numbers)
    mean = sum(part["num_edges"] for part in figures[Field.PARTS]) / figures[Field.NUM_PARTS]
    for part in figures[Field.PARTS]:
        counts = (part["part"], part["num_entities"], part["nodes"][RELATION], part["num_edges"])
        ratio, cut = f"{part['num_edges'] / mean:.3f}", f"{part[Field.CUT_EDGES]:,}"
        table.add_row(*(f"{count:,}" for count in counts), ratio, cut)
    console.print(table)
    cut = figures["edge_cut"]
    balance = "entities {entities:.3f}, edges {edges:.3f}".format(**figures["balance"])
    say(f"largest / mean: {balance}; edge cut: {cut['edges']:,} ({cut['fraction']:.1%})")


_LEAKS = {
    "in_train": "stand in train",
    "in_valid": "stand in valid",
    "reverse_in_train": "reversed in train, any relation",
    "other_relation_in_train": "in train under another relation",
    "implied": "implied by train",
}
_UNSEEN = {"triples": "have a name", "entities": "entities", "relations": "relations"}
_KINDS = {"symmetric": "is symmetric", "inverse": "is the inverse of {}", "duplicate": "is a duplicate of {}"}
_NUM_PAIRS = 10


def print_quality(quality: dict[str, Any], console: Console) -> None:
    """Print the figures of a data set's quality, which docs/data-quality.md explains."""
    table = _table("quality of the data", Column(), *SPLITS)
    table.add_row("triples", *(f"{quality['triples'][split]:,}" for split in SPLITS))
    table.add_row("repeat an earlier one", *(f"{quality['duplicates'][split]:,}" for split in SPLITS))
    for leak, text in _LEAKS.items():
        row = [quality["leaks"].get(split, {}).get(leak) for split in SPLITS]
        table.add_row(text, *("{triples:,} ({share:.1%})".format(**cell) if cell else "" for cell in row))
    for noun, text in _UNSEEN.items():
        row = [quality["unseen"].get(split) for split in SPLITS]
        table.add_row(f"{text} unseen in train", *(f"{cell[noun]:,}" if cell else "" for cell in row))
    console.print(table)
    say = _plain(console)
    _print_relations(quality, say)
    degrees = quality["degrees"]
    spread = "{min:,} to {max:,}, median {median:g}, mean {mean:.1f}".format(**degrees)
    rare = "{entities_of_degree_1:,} entities have one, {entities_of_degree_0:,} none".format(**degrees)
    say(f"training triples of an entity: {spread}; {rare}")
    hubs = ", ".join(f"{hub['entity']} {hub['degree']:,}" for hub in quality["hubs"][:5])
    largest = "{largest:,} entities ({largest_share:.1%})".format(**quality["components"])
    count = quality["components"]["count"]
    say(f"entities with most: {hubs}\nconnected components of train: {count:,}; the largest has {largest}")


def _print_relations(quality: dict[str, Any], say: Any) -> None:
    """Print near-inverse and near-duplicate relations, and those with one triple."""
    pairs = quality["relation_pairs"]
    if pairs["count"]:
        some = f"{pairs['count']:,}" + (f", the largest {_NUM_PAIRS}" if pairs["count"] > _NUM_PAIRS else "")
        say(f"pairs of relations that share {pairs['least_share']:.0%} or more of their triples: {some}")
    for pair in pairs["largest"][:_NUM_PAIRS]:
        first, second = pair["relations"]
        say(f"  {pair['share']:6.1%} {pair['overlap']:>11,}  {first} {_KINDS[pair['kind']].format(second)}")
    single = quality["single_triple_relations"]
    if single["count"]:
        some = ", ".join(single["examples"]) + (", ..." if single["count"] > len(single["examples"]) else "")
        say(f"relations with one training triple: {single['count']:,} ({some})")


def _table(title: str, *columns: str | Column) -> Table:
    headers = (Column(name, justify="right") if isinstance(name, str) else name for name in columns)
    return Table(*headers, title=title, title_justify="left")


def _plain(console: Console) -> Any:
    return lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True)
