"""Saving and loading optimizer state: one file for each trainer, readable at any number of trainers and
machines.

A file is a dictionary as ``dgl.distributed.optim`` writes it, ``{"params": {...}, "emb_states": {name:
{"ids": ids, "states": {tensor name: rows}}}}``, with these additions in ``params``: ``param_groups``,
``num_steps``, ``id_space`` ("node" or "original") and ``starts``, the boundaries of the partitions. It is
read with ``weights_only=True``.
"""

from __future__ import annotations

import glob
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from . import row_storage
from .table import Table

logger = logging.getLogger(__name__)

#: Keys of the dictionary, as DGL names them.
PARAMS, EMB_STATES, WORLD_SIZE, IDS, STATES = "params", "emb_states", "world_size", "ids", "states"


def file_of(path: str | bytes | os.PathLike, rank: int) -> Path:
    """File of a trainer: ``<path>_<rank>``."""
    return Path(f"{os.fsdecode(path)}_{rank}")


def content(
    tables: Sequence[Table],
    groups: Sequence[Mapping[str, Any]],
    params: dict[str, Any],
    maps: Mapping[str, Any],
    place: int,
    num_places: int,
) -> dict[str, Any]:
    """What one trainer saves.

    Parameters
    ----------
    tables, groups : sequence
        The optimizer's tables and parameter groups.
    params : dict
        Hyper-parameters and the number of trainers under DGL's names.
    maps : mapping
        Original ids by the name of the embedding, where state is to be saved by them.
    place, num_places : int
        The trainer saves the machine's rows number place, place + num_places, ...
    """
    named = [{**group, "params": [embedding.name for embedding in group["params"]]} for group in groups]
    extra = {
        "param_groups": named,
        "num_steps": {table.name: table.num_steps for table in tables},
        "id_space": {table.name: "original" if table.name in maps else "node" for table in tables},
        "starts": {table.name: table.starts.tolist() for table in tables},
    }
    states = {table.name: _table_state(table, place, num_places, maps.get(table.name)) for table in tables}
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


def load_states(
    contents: Sequence[Mapping[str, Any]],
    tables: Sequence[Table],
    maps: Mapping[str, Any],
    place: int,
    num_places: int,
) -> np.ndarray:
    """Write the rows that fall to this trainer; returns how many of each table, "(num_tables,) int64".

    Tables of the files that this optimizer does not have are ignored, and logged.
    """
    num_rows = np.zeros(len(tables), np.int64)
    unknown = {name for saved in contents for name in saved[EMB_STATES]} - {table.name for table in tables}
    if unknown:
        logger.warning(
            "ignored the saved state of %s: not among this optimizer's embeddings", sorted(unknown)
        )
    for saved in contents:
        for number, table in enumerate(tables):
            state = saved[EMB_STATES].get(table.name)
            if state is not None:
                ids = _node_ids(table, state[IDS], saved[PARAMS], maps.get(table.name))
                num_rows[number] += _write_table_state(table, ids, state[STATES], place, num_places)
                table.num_steps = saved[PARAMS].get("num_steps", {}).get(table.name, table.num_steps)
    return num_rows


def _write_table_state(
    table: Table, ids: np.ndarray, states: Mapping[str, torch.Tensor], place: int, num_places: int
) -> int:
    """Write the rows that fall to this trainer into the machine's state; returns how many these were.

    Parameters
    ----------
    table : Table
        The table.
    ids : np.ndarray
        "(n,) int64" node ids.
    states : mapping of str to Tensor
        Rows of each state tensor, "(n, ...)".
    place, num_places : int
        This trainer takes the machine's rows number place, place + num_places, ...

    Raises
    ------
    ValueError
        The states are those of another optimizer or another table.
    """
    tensors = {tensor.name: tensor for tensor in table.state.values()}
    if set(states) != set(tensors):
        raise ValueError(
            f"state of {table.name!r}: the file has {sorted(states)}, this optimizer {sorted(tensors)}"
        )
    start, end = table.starts[table.part_id], table.starts[table.part_id + 1]
    mine = np.flatnonzero((ids >= start) & (ids < end) & ((ids - start) % num_places == place))
    for name, tensor in tensors.items():
        if tuple(states[name].shape) != (len(ids), *tensor.shape[1:]):
            raise ValueError(
                f"state {name!r}: expected rows {tensor.shape[1:]}, the file has "
                f"{tuple(states[name].shape[1:])}"
            )
        array = row_storage.state_array(tensor)
        array[ids[mine] - start] = states[name][torch.from_numpy(mine)].to(tensor.dtype).numpy()
    return len(mine)


def _node_ids(table: Table, ids: torch.Tensor, params: Mapping[str, Any], original_ids: Any) -> np.ndarray:
    """Node ids of the rows of a file, "(n,) int64".

    Raises
    ------
    ValueError
        The file was written under another partitioning and there is no map of ids.
    """
    array = ids.numpy()
    if params.get("id_space", {}).get(table.name) == "original":
        if original_ids is None:
            raise ValueError(
                f"state of {table.name!r} is saved by original ids: give original_ids to load it"
            )
        forward = np.asarray(original_ids)
        inverse = np.empty(len(forward), np.int64)
        inverse[forward] = np.arange(len(forward))
        return inverse[array]
    starts = params.get("starts", {}).get(table.name)
    if starts is not None and list(starts) != table.starts.tolist():
        raise ValueError(
            f"state of {table.name!r} is saved by node ids of another partitioning (ranges {list(starts)}, "
            f"now {table.starts.tolist()}): save and load it with original_ids"
        )
    return array


def merge_groups(groups: Sequence[dict[str, Any]], params: Mapping[str, Any]) -> None:
    """Take over saved hyper-parameters; a learning rate is never lowered, and what is ignored is logged."""
    saved_groups = {name: saved for saved in params.get("param_groups", []) for name in saved["params"]}
    plain = {key[1:]: params[key] for key in ("_lr", "_eps") if key in params}
    if "_beta1" in params:
        plain["betas"] = (params["_beta1"], params["_beta2"])
    for group in groups:
        saved = dict(saved_groups.get(group["params"][0].name, plain))
        saved.pop("params", None)
        if float(saved.get("lr", group["lr"])) < float(group["lr"]):
            logger.warning(
                "kept the learning rate %g: the file has a lower one, %g", group["lr"], saved.pop("lr")
            )
        for key, value in saved.items():
            if key in group and group[key] != value:
                logger.info("%s was %s, the file says %s", key, group[key], value)
            group[key] = value


def saved_files(path: str | bytes | os.PathLike) -> list[dict[str, Any]]:
    """Contents of all files of one save that this machine can see, in the order of ranks."""
    prefix = file_of(path, 0).with_name(file_of(path, 0).name[:-1])
    ranks = sorted(
        int(file.name[len(prefix.name) :])
        for file in prefix.parent.glob(glob.escape(prefix.name) + "*")
        if file.name[len(prefix.name) :].isdigit()
    )
    contents = [torch.load(str(file_of(path, rank)), weights_only=True, mmap=True) for rank in ranks]
    world_size = contents[0][PARAMS][WORLD_SIZE] if contents else 0
    stale = [rank for rank in ranks if rank >= world_size]
    if stale:
        logger.warning(
            "ignored the files of trainers %s: trainer %d's was written by %d trainers",
            stale,
            ranks[0],
            world_size,
        )
    return [content for rank, content in zip(ranks, contents) if rank < world_size]


def write_file(content: Mapping[str, Any], path: Path) -> None:
    """Write a file so that it appears only when it is complete."""
    unfinished = path.with_name(path.name + ".unfinished")
    torch.save(content, unfinished)
    os.replace(unfinished, path)
