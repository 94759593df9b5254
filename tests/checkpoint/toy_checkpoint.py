"""A small run whose tables are known, cut into any number of parts, for tests."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import h5py
import torch

from dglkge.checkpoint.manager import CheckpointManager
from dglkge.checkpoint.manifest import CheckpointMeta
from dglkge.checkpoint.reader import open_checkpoint
from dglkge.data.vocabulary import Vocabulary
from dglkge.evaluation.calibration import Calibration, Platt
from dglkge.model.functions.bigraph_operators import OPERATORS
from dglkge.model.score_functions import SCORE_FUNCTIONS
from dglkge.typing import RELATION, Relation, TablePart

ONE_PAIR = (Relation("likes", "person", "person"), Relation("knows", "person", "person"))
TWO_PAIRS = (ONE_PAIR[0], Relation("made", "person", "film"), Relation("likes", "person", "film"))

RELATION_WIDTH = {
    "complex": 1.0, "distmult": 1.0, "transe_l1": 1.0, "transe_l2": 1.0, "rotate": 0.5, "rescal": 6.0,
    "simple": 1.0, "keci": 1.0, "pairre": 2.0, "triplere": 3.0, "transr": 7.0, "transr_l1": 7.0,
}  # fmt: skip
"""Numbers of a relation's row for each of an entity's 6."""


def toy_meta(
    score_function: str = "complex",
    relations: Sequence[Relation] = ONE_PAIR,
    reciprocal: bool = True,
    num_people: int = 23,
    optimizer: str = "sparse_adagrad",
    **changes: object,
) -> CheckpointMeta:
    """Describe the toy run; films are 5 where a relation has them."""
    types = {"person": num_people}
    if any("film" in (relation.lhs, relation.rhs) for relation in relations):
        types["film"] = 5
    fields: dict = {
        "config": {"training": {"num_epochs": 9}, "model": {"dimension": 6}},
        "dataset_name": "toy", "dataset_path": "/nowhere/toy", "dataset_fingerprint": "f00d",
        "entity_types": types, "relations": list(relations),
        "progress": {"finished_epochs": 2, "batches_done": 17, "global_batch_size": 100},
        "seed": 3, "score_function": score_function, "dim": 6, "reciprocal": reciprocal,
        "optimizer": {"name": optimizer, "lr": 0.1},
        "versions": {"dglkge": "0.1.0", "dgl": "1.1.3", "torch": "2.13.0"},
    }  # fmt: skip
    return CheckpointMeta(**{**fields, **changes})


META = toy_meta()
"""The usual toy run."""


@dataclass(frozen=True)
class ToyTable:
    """A whole table by original id."""

    rows: torch.Tensor
    state: Mapping[str, torch.Tensor]


def toy_tables(meta: CheckpointMeta, seed: int = 0, finite: bool = False) -> dict[str, ToyTable]:
    """Draw every table of a run; special values among them, to be kept bit for bit, unless all are finite."""
    generator = torch.Generator().manual_seed(seed)
    one_side = SCORE_FUNCTIONS.get(meta.score_function)().relation_dim(meta.dim)
    if meta.score_function in RELATION_WIDTH:
        one_side = int(meta.dim * RELATION_WIDTH[meta.score_function])
    relation_width = one_side * (2 if meta.reciprocal else 1)
    tables = {}
    for table, count in {**meta.entity_types, RELATION: len(meta.relations)}.items():
        width = relation_width if table == RELATION else meta.dims.get(table, meta.dim)
        rows = torch.randn(count, width, generator=generator)
        rows[0, 0], rows[0, 1 % width], rows[-1, 0], rows[-1, -1] = -0.0, float("nan"), float("inf"), 1e-42
        if finite:
            rows.nan_to_num_(posinf=1.0)
        if table == RELATION and meta.operators:
            set_operators(rows, meta)
        tables[table] = ToyTable(rows, _state(meta, rows, generator))
    return tables


def set_operators(rows: torch.Tensor, meta: CheckpointMeta) -> None:
    """Make rows those of relations that differ in their operators: 0 after the parameters, then a number."""
    for half in rows.chunk(2, dim=1) if meta.reciprocal else [rows]:
        for row, operator in zip(half, meta.operators):
            row[sum(map(math.prod, OPERATORS[operator].shapes(meta.dim))) :] = 0
            row[-1] = list(OPERATORS).index(operator)


def _state(meta: CheckpointMeta, rows: torch.Tensor, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Draw the state that the run's optimizer keeps for rows."""
    if meta.optimizer["name"] == "row_adagrad":
        return {"sum": torch.rand(len(rows), generator=generator)}
    if meta.optimizer["name"] == "sparse_adam":
        moments = torch.rand(2, *rows.shape, generator=generator)
        steps = torch.randint(0, 100, (len(rows),), generator=generator)
        return {"exp_avg": moments[0], "exp_avg_sq": moments[1], "step": steps}
    return {"sum": torch.rand(rows.shape, generator=generator)}


def cut(table: str, whole: ToyTable, num_parts: int, seed: int = 0) -> list[TablePart]:
    """Cut a table into parts at random, the rows of each in no order."""
    generator = torch.Generator().manual_seed(seed)
    shuffled = torch.randperm(len(whole.rows), generator=generator)
    parts = []
    for part, ids in enumerate(torch.tensor_split(shuffled, num_parts)):
        state = {name: values[ids] for name, values in whole.state.items()}
        parts.append(TablePart(table, part, ids, whole.rows[ids], state))
    return parts


def whole_part(tables: Mapping[str, ToyTable], table: str) -> TablePart:
    """Return a table as one part."""
    return cut(table, tables[table], 1)[0]


def blank(part: TablePart) -> TablePart:
    """Return a part of the same ids with nothing in it."""
    state = {name: torch.zeros_like(values) for name, values in part.state.items()}
    return TablePart(part.table, part.part, part.original_ids, torch.zeros_like(part.rows), state)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compare tensors bit for bit: NaN equals itself, -0.0 is not 0.0."""
    return a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()


def flip(path: Path, place: int | None = None) -> None:
    """Change one bit of a file, by default in its middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if place is None else place] ^= 1
    path.write_bytes(content)


def holds(path: Path, tables_of_version: Mapping[int, Mapping[str, ToyTable]]) -> int:
    """Check that the published version is one of some, with its rows and checksums; return it."""
    checkpoint = open_checkpoint(path)
    checkpoint.verify()
    for table, whole in tables_of_version[checkpoint.version].items():
        assert same(checkpoint[table][:], whole.rows)
    return checkpoint.version


def datasets_in(group: h5py.Group) -> dict[str, h5py.Dataset]:
    """Return the datasets of an open file or group, by path."""
    names: list[str] = []
    group.visit(names.append)
    return {name: group[name] for name in names if isinstance(group[name], h5py.Dataset)}


def names_are_right(folder: Path) -> None:
    """Hold what PyTorch-BigGraph reads against the ids in the files of a version."""
    version = int((folder / "checkpoint_version.txt").read_text())
    parts = sorted(folder.glob(f"embeddings_person_*.v{version}.h5"))
    config = json.loads((folder / "config.json").read_text())
    assert config["entities"]["person"]["num_partitions"] == len(parts)
    for part, path in enumerate(parts):
        with h5py.File(path) as file:
            ids = file["original_ids"][:].tolist()
        names = json.loads((folder / f"entity_names_person_{part}.json").read_text())
        assert names == [f"person-{id_}" for id_ in ids]
        assert (folder / f"entity_count_person_{part}.txt").read_text() == f"{len(ids)}\n"
    for pattern in ("entity_names_*.json", "entity_count_*.txt"):
        assert len(list(folder.glob(pattern))) == len(parts)


def toy_names(meta: CheckpointMeta) -> dict[str, Vocabulary]:
    """Name every entity: person-0, person-1, ..."""
    return {
        entity_type: Vocabulary([f"{entity_type}-{id_}" for id_ in range(count)], "entity")
        for entity_type, count in meta.entity_types.items()
    }


def in_threads(count: int, work: Callable[[int], object]) -> None:
    """Do some work in a thread for each rank, within a limit."""
    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()


def save_toy(path, meta, tables, num_parts=1, names=None, kept=(), seed=0, **options):
    """Save the tables in parts, by one process, and keep the version by pointers; return its number."""
    manager = CheckpointManager(path, names=names or toy_names(meta), num_parts=num_parts, **options)
    parts = [part for name in meta.entity_types for part in cut(name, tables[name], num_parts, seed)]
    return manager.save(parts, whole_part(tables, RELATION), meta, {name: {} for name in kept})


def save_seed(path, seed, *kept, num_parts=1, cut_seed=0, **options):
    """Save a version of the usual toy run, its rows drawn by a seed; return its number."""
    return save_toy(path, META, toy_tables(META, seed), num_parts, None, kept, cut_seed, **options)


def saved_toy(path, num_parts=1, *names, **fields):
    """Save the tables of a toy run, see :func:`toy_meta`; return both."""
    meta = toy_meta(*names, **fields)
    tables = toy_tables(meta)
    save_toy(path, meta, tables, num_parts)
    return meta, tables


def calibrated(folder: Path, slope: float, offset: float) -> Platt:
    """Give a run probabilities, as ``dglkge calibrate`` writes them; returns the curve."""
    curve, opened = Platt(slope, offset), open_checkpoint(folder)
    fitted = Calibration("platt", curve, 0.5, 1, 0, 1, 1, opened.manifest.run_id, opened.version)
    (folder / "calibration.json").write_text(json.dumps(fitted.to_dict()))
    return curve


def save_toy_run(folder, dataset, *names_of_model, nan_in=None, **fields):
    """Save an untrained run of random rows in two parts; the entity type ``nan_in`` has a row of NaN."""
    meta = toy_meta(
        *names_of_model,
        relations=dataset.relations.timeless,
        times=tuple(dataset.relations.times),
        dataset_name=dataset.name,
        dataset_path=str(dataset.path),
        dataset_fingerprint=dataset.fingerprint,
        entity_types={name: dataset.num_entities(name) for name in dataset.entity_types},
        **fields,
    )
    tables = toy_tables(meta, finite=True)
    if nan_in is not None:
        tables[nan_in].rows[3] = torch.nan
    names = {name: dataset.vocabulary(name) for name in dataset.entity_types}
    save_toy(folder / "checkpoint", meta, tables, 2, names)
    return folder
