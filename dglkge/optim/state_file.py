"""Saving and loading optimizer state: one file for each trainer, readable at any number of trainers and
machines.

A file is a dictionary as ``dgl.distributed.optim`` writes it, ``{"params": {...}, "emb_states": {name:
{"ids": ids, "states": {tensor name: rows}}}}``, with these additions in ``params``: ``param_groups``,
``num_steps``, ``keys`` (names in the kvstore), ``id_space`` ("node" or "original") and ``starts``, the
boundaries of the partitions. It is read with ``weights_only=True``.

A file without these additions was written by DGL. DGL's Adagrad, where it updates on the CPU, keeps the root
of the sum of squares (see ``tests/optim/test_dgl_defects.py``); with gradients on a GPU it keeps the sum.
Nothing in the file tells which, and DGL's distributed training updates on the CPU unless rows were read to a
GPU; so the numbers are squared unless the caller says that they are sums.
"""

from __future__ import annotations

import glob
import logging
import os
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from dglkge.optim import row_storage
from dglkge.optim.hyper_parameters import check_group
from dglkge.optim.table import Table

logger = logging.getLogger(__name__)

#: Keys of the dictionary, as DGL names them.
PARAMS, EMB_STATES, WORLD_SIZE, IDS, STATES = "params", "emb_states", "world_size", "ids", "states"

#: Key of the parameter groups in ``params``, which DGL's files lack.
GROUPS = "param_groups"


def file_of(path: str | bytes | os.PathLike, rank: int) -> Path:
    """File of a trainer: ``<path>_<rank>``."""
    return Path(f"{os.fsdecode(path)}_{rank}")


def content(
    tables: Sequence[Table],
    groups: Sequence[tuple[Sequence[str], Mapping[str, Any]]],
    params: dict[str, Any],
    maps: Mapping[str, Any],
    place: int,
    num_places: int,
) -> dict[str, Any]:
    """What one trainer saves.

    Parameters
    ----------
    tables : sequence of Table
        The optimizer's tables.
    groups : sequence of (sequence of str, mapping)
        Its parameter groups, each with the keys of its tables.
    params : dict
        Hyper-parameters and the number of trainers under DGL's names.
    maps : mapping
        Original ids by the label of the table, where state is to be saved by them.
    place, num_places : int
        The trainer saves the machine's rows number place, place + num_places, ...
    """
    label_of = {table.key: table.label for table in tables}
    named = [{**group, "params": [label_of[key] for key in keys]} for keys, group in groups]
    extra = {
        GROUPS: named,
        "num_steps": {table.label: table.num_steps for table in tables},
        "keys": {table.label: table.key for table in tables},
        "id_space": {table.label: "original" if table.label in maps else "node" for table in tables},
        "starts": {table.label: table.starts.tolist() for table in tables},
    }
    states = {table.label: _table_state(table, place, num_places, maps.get(table.label)) for table in tables}
    return {PARAMS: {**params, **extra}, EMB_STATES: states}


def _table_state(table: Table, place: int, num_places: int, original_ids: Any) -> dict[str, Any]:
    """One trainer's share of the state of one table."""
    start = int(table.starts[table.part_id])
    num_rows = int(table.starts[table.part_id + 1]) - start
    ids = torch.arange(start + place, start + num_rows, num_places)
    states = {
        tensor.name: torch.from_numpy(row_storage.state_array(tensor)[place::num_places].copy())
        for tensor in table.state.values()
    }
    if original_ids is not None:
        ids = torch.from_numpy(np.asarray(original_ids)[ids.numpy()].astype(np.int64))
    return {IDS: ids, STATES: states}


def is_of_dgl(params: Mapping[str, Any]) -> bool:
    """Whether DGL's optimizer wrote a file with these ``params``."""
    return GROUPS not in params


class SavedRows(NamedTuple):
    """State rows of a table out of one file, checked: ids "(n,) int64" and rows of each state tensor, which
    may be mapped from the file; ``are_roots`` says that the state is their square."""

    table: Table
    ids: np.ndarray
    states: Mapping[str, torch.Tensor]
    are_roots: bool

    def rows(self, tensor: Any, chosen: np.ndarray) -> np.ndarray:
        """Some rows of a state tensor, in its type."""
        rows = self.states[tensor.name][torch.from_numpy(chosen)].to(tensor.dtype)
        return (rows.square() if self.are_roots else rows).numpy()


def saved_rows(
    contents: Sequence[Mapping[str, Any]],
    tables: Sequence[Table],
    maps: Mapping[str, Any],
    dgl_keeps_roots: bool = True,
) -> list[SavedRows]:
    """Rows of some files that belong to these tables; nothing is written yet.

    Tables of the files that this optimizer does not have are ignored, and logged.

    Raises
    ------
    ValueError
        Rows do not fit: they are those of another optimizer, table or partitioning.
    """
    found, unknown = [], set()
    for saved in contents:
        params = saved.get(PARAMS, {})
        for label, state in saved[EMB_STATES].items():
            table = _table_of(label, params, tables)
            if table is None:
                unknown.add(label)
                continue
            ids = _node_ids(table, label, state[IDS], params, maps)
            _check_states(table, len(ids), state[STATES])
            are_roots = is_of_dgl(params) and dgl_keeps_roots and set(table.state) == {"sum"}
            if are_roots:
                logger.info("%r: the roots that DGL's Adagrad keeps are squared", label)
            found.append(SavedRows(table, ids, state[STATES], are_roots))
    if unknown:
        logger.warning(
            "ignored the saved state of %s: not among this optimizer's embeddings", sorted(unknown)
        )
    return found


def _table_of(label: str, params: Mapping[str, Any], tables: Sequence[Table]) -> Table | None:
    """The table that a name in a file means: by the name in the kvstore if the file has it, or else by the
    embedding's, if only one table has that."""
    key = params.get("keys", {}).get(label, label)
    by_key = [table for table in tables if table.key == key]
    by_name = [table for table in tables if table.name == label]
    return by_key[0] if by_key else by_name[0] if len(by_name) == 1 else None


def _check_states(table: Table, num_ids: int, states: Mapping[str, torch.Tensor]) -> None:
    """Refuse rows of state tensors that do not fit.

    Raises
    ------
    ValueError
        They are those of another optimizer or another table.
    """
    shapes = {tensor.name: (num_ids, *tensor.shape[1:]) for tensor in table.state.values()}
    if set(states) != set(shapes):
        raise ValueError(
            f"state of {table.label!r}: the file has {sorted(states)}, this optimizer {sorted(shapes)}"
        )
    for name, shape in shapes.items():
        if tuple(states[name].shape) != shape:
            raise ValueError(
                f"state {name!r}: expected rows {shape[1:]} for {num_ids} ids, the file has "
                f"{tuple(states[name].shape[1:])} for {len(states[name])}"
            )


def write_share(found: Sequence[SavedRows], place: int, num_places: int) -> None:
    """Write the machine's rows number place, place + num_places, ... to its state tensors."""
    for saved in found:
        start, end = _own_range(saved.table)
        places = saved.ids - start
        is_mine = (places >= 0) & (places < end - start) & (places % num_places == place)
        _write_local(saved, np.flatnonzero(is_mine))


def write_all(found: Sequence[SavedRows], timeout_seconds: float) -> None:
    """Write all rows, those of other machines through the kvstore."""
    for saved in found:
        start, end = _own_range(saved.table)
        is_here = (saved.ids >= start) & (saved.ids < end)
        _write_local(saved, np.flatnonzero(is_here))
        away = np.flatnonzero(~is_here)
        if len(away):
            tensors = list(saved.table.state.values())
            rows = [saved.rows(tensor, away) for tensor in tensors]
            row_storage.write_back(tensors, saved.ids[away], rows, timeout_seconds)


def _own_range(table: Table) -> tuple[int, int]:
    """First id of this machine's rows, and the id behind the last."""
    return int(table.starts[table.part_id]), int(table.starts[table.part_id + 1])


def _write_local(saved: SavedRows, chosen: np.ndarray) -> None:
    """Write the chosen ones of some rows to this machine's state tensors."""
    for tensor in saved.table.state.values():
        array = row_storage.state_array(tensor)
        array[saved.ids[chosen] - _own_range(saved.table)[0]] = saved.rows(tensor, chosen)


def num_missing(
    found: Sequence[SavedRows], tables: Sequence[Table], place: int, num_places: int
) -> np.ndarray:
    """How many of the machine's rows number place, place + num_places, ... of each table are in no file."""
    numbers = []
    for table in tables:
        start, end = _own_range(table)
        is_missing = np.ones(end - start, bool)
        for saved in found:
            if saved.table is table:
                is_missing[saved.ids[(saved.ids >= start) & (saved.ids < end)] - start] = False
        numbers.append(int(is_missing[place::num_places].sum()))
    return np.array(numbers, np.int64)


def _node_ids(
    table: Table, label: str, ids: torch.Tensor, params: Mapping[str, Any], maps: Mapping[str, Any]
) -> np.ndarray:
    """Node ids of the rows of a file, "(n,) int64".

    Raises
    ------
    ValueError
        The table has no such rows, or the file was written under another partitioning and there is no map of
        ids.
    """
    array = ids.numpy().astype(np.int64)
    if len(array) and not 0 <= array.min() <= array.max() < table.num_rows:
        wrong = array.min() if array.min() < 0 else array.max()
        raise ValueError(
            f"state of {table.label!r}: the file has row {wrong}, the table has {table.num_rows} rows"
        )
    if params.get("id_space", {}).get(label) == "original":
        original_ids = maps.get(table.label)
        if original_ids is None:
            raise ValueError(
                f"state of {table.label!r} is saved by original ids: give original_ids to load it"
            )
        forward = np.asarray(original_ids)
        inverse = np.empty(len(forward), np.int64)
        inverse[forward] = np.arange(len(forward))
        return inverse[array]
    starts = params.get("starts", {}).get(label)
    if starts is not None and list(starts) != table.starts.tolist():
        raise ValueError(
            f"state of {table.label!r} is saved by node ids of another partitioning (ranges {list(starts)}, "
            f"now {table.starts.tolist()}): save and load it with original_ids"
        )
    return array


def take_over(
    params: Mapping[str, Any],
    tables: Sequence[Table],
    groups: Sequence[tuple[Sequence[str], dict[str, Any]]],
) -> None:
    """Take over saved hyper-parameters and numbers of steps; what changes is logged.

    Raises
    ------
    ValueError
        A hyper-parameter is out of range; nothing has changed then.
    """
    saved_of = {}
    for saved in params.get(GROUPS, []):
        for label in saved["params"]:
            table = _table_of(label, params, tables)
            if table is not None:
                saved_of[table.key] = {key: value for key, value in saved.items() if key != "params"}
    plain = {key[1:]: params[key] for key in ("_lr", "_eps") if key in params} if is_of_dgl(params) else {}
    if "_beta1" in params and is_of_dgl(params):
        plain["betas"] = (params["_beta1"], params["_beta2"])
    taken = [
        {key: value for key, value in saved_of.get(keys[0], plain).items() if key in {*group, "initial_lr"}}
        for keys, group in groups
    ]
    for (_, group), saved in zip(groups, taken):
        if "betas" in saved:
            saved["betas"] = tuple(saved["betas"])
        check_group({**group, **saved})
    for (_, group), saved in zip(groups, taken):
        for key, value in saved.items():
            if key in group and group[key] != value:
                logger.info("%s was %s, the file says %s", key, group[key], value)
        group.update(saved)
    for label, num_steps in params.get("num_steps", {}).items():
        table = _table_of(label, params, tables)
        if table is not None:
            table.num_steps = num_steps


def saved_files(path: str | bytes | os.PathLike) -> list[dict[str, Any]]:
    """Contents of all files of one save that this machine can see, in the order of ranks."""
    prefix = file_of(path, 0).with_name(file_of(path, 0).name[:-1])
    ranks = sorted(
        int(file.name[len(prefix.name) :])
        for file in prefix.parent.glob(glob.escape(prefix.name) + "*")
        if file.name[len(prefix.name) :].isdigit()
    )
    contents = [_read_file(file_of(path, rank)) for rank in ranks]
    world_size = contents[0][PARAMS].get(WORLD_SIZE, len(ranks)) if contents else 0
    stale = [rank for rank in ranks if rank >= world_size]
    if stale:
        logger.warning(
            "ignored the files of trainers %s: trainer %d's was written by %d trainers",
            stale,
            ranks[0],
            world_size,
        )
    return [content for rank, content in zip(ranks, contents) if rank < world_size]


def _read_file(path: Path) -> dict[str, Any]:
    """Contents of one file.

    Raises
    ------
    ValueError
        It cannot be read, or holds something else.
    """
    try:
        found = torch.load(str(path), weights_only=True, mmap=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{path} is no optimizer state: {reason}") from error
    if not isinstance(found, dict) or not {PARAMS, EMB_STATES} <= set(found):
        raise ValueError(f"{path} is no optimizer state: it lacks {PARAMS!r} and {EMB_STATES!r}")
    return found


def write_file(content: Mapping[str, Any], path: Path) -> None:
    """Write a file so that it appears only when it is complete."""
    unfinished = path.with_name(path.name + ".unfinished")
    torch.save(content, unfinished)
    os.replace(unfinished, path)
