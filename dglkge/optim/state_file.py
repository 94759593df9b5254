"""Saving and loading optimizer state: one file for each trainer, readable with any number of trainers.

Files of DGL's optimizers and state dictionaries of torch's are read too.

A file is a dictionary as ``dgl.distributed.optim`` writes it, ``{"params": {...}, "emb_states": {name:
{"ids": ids, "states": {tensor name: rows}}}}``, with these additions in ``params``: ``param_groups``,
``num_steps``, ``keys`` (names in the kvstore), ``id_space`` ("node" or "original") and ``starts``, the
boundaries of the partitions. It is read with ``weights_only=True``.

A file without these additions was written by DGL. DGL's Adagrad, where it updates on the CPU, keeps the root
of the sum of squares (see ``tests/optim/test_beside_dgl.py``); with gradients on a GPU it keeps the sum.
The file does not record which, and DGL's distributed training updates on the CPU unless rows were read to a
GPU; so the numbers are squared unless ``dgl_keeps_roots=False``.
"""

from __future__ import annotations

import abc
import glob
import logging
import os
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from dglkge.optim.alltoall import Alltoall
from dglkge.optim.dgl_tables import state_array, write_back
from dglkge.optim.links import RuleStep
from dglkge.optim.step_exchange import StepExchange
from dglkge.optim.table import Table

logger = logging.getLogger(__name__)

#: Keys of the dictionary, as DGL names them.
PARAMS, EMB_STATES, WORLD_SIZE, IDS, STATES = "params", "emb_states", "world_size", "ids", "states"

#: Key of the parameter groups in ``params``, which DGL's files lack.
GROUPS = "param_groups"


def file_of(path: str | bytes | os.PathLike, rank: int) -> Path:
    """File of a trainer: ``<path>_<rank>``."""
    return Path(f"{os.fsdecode(path)}_{rank}")


def file_content(
    tables: Sequence[Table],
    groups: Sequence[tuple[Sequence[str], Mapping[str, Any]]],
    params: dict[str, Any],
    maps: Mapping[str, Any],
    place: int,
    num_places: int,
) -> dict[str, Any]:
    """Content of one trainer's file.

    Parameters
    ----------
    tables : sequence of Table
        The optimizer's tables.
    groups : sequence of (sequence of str, mapping)
        Its parameter groups, each with the keys of its tables.
    params : dict
        Hyper-parameters and the number of trainers under DGL's names.
    maps : mapping
        Original ids by the label of the table, for tables that are to be saved by original ids.
    place, num_places : int
        The trainer saves rows place, place + num_places, ... of the machine.
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
        tensor.name: torch.from_numpy(state_array(tensor)[place::num_places].copy())
        for tensor in table.state.values()
    }
    if original_ids is not None:
        ids = torch.from_numpy(np.asarray(original_ids)[ids.numpy()].astype(np.int64))
    return {IDS: ids, STATES: states}


def is_of_dgl(params: Mapping[str, Any]) -> bool:
    """Whether DGL's optimizer wrote a file with these ``params``."""
    return GROUPS not in params


class SavedRows(NamedTuple):
    """Checked state rows of a table from one file.

    Attributes
    ----------
    table : Table
        The table.
    ids : ndarray
        "(n,) int64" node ids.
    states : mapping of str to Tensor
        Rows "(n, ...)" of each state tensor by its name; may be mapped from the file.
    are_roots : bool
        The state is the square of the saved rows.
    """

    table: Table
    ids: ndarray
    states: Mapping[str, Tensor]
    are_roots: bool

    def rows(self, tensor: Any, chosen: ndarray) -> ndarray:
        """Chosen rows of a state tensor, in its type."""
        rows = self.states[tensor.name][torch.from_numpy(chosen)].to(tensor.dtype)
        return (rows.square() if self.are_roots else rows).numpy()


def saved_rows(
    contents: Sequence[Mapping[str, Any]],
    tables: Sequence[Table],
    maps: Mapping[str, Any],
    dgl_keeps_roots: bool = True,
) -> list[SavedRows]:
    """Read the rows of these tables from some files; nothing is written yet.

    Tables in the files that this optimizer does not have are ignored with a warning.

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
            states = _states_of(table, len(ids), state[STATES])
            are_roots = is_of_dgl(params) and dgl_keeps_roots and set(table.state) == {"sum"}
            if are_roots:
                logger.info("%r: the roots that DGL's Adagrad keeps are squared", label)
            found.append(SavedRows(table, ids, states, are_roots))
    if unknown:
        logger.warning(
            "ignored the saved state of %s: not among this optimizer's embeddings", sorted(unknown)
        )
    return found


def _table_of(label: str, params: Mapping[str, Any], tables: Sequence[Table]) -> Table | None:
    """Table of a name in a file: by the kvstore's name if the file has it, else by a unique embedding name.

    Returns None if there is no such table.
    """
    key = params.get("keys", {}).get(label, label)
    by_key = [table for table in tables if table.key == key]
    by_name = [table for table in tables if table.name == label]
    return by_key[0] if by_key else by_name[0] if len(by_name) == 1 else None


def _states_of(table: Table, num_ids: int, states: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the saved state tensors of a table; ValueError if they are another optimizer's or table's."""
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
    return {name: states[name] for name in shapes}


def write_share(found: Sequence[SavedRows], place: int, num_places: int) -> None:
    """Write rows place, place + num_places, ... of the machine to its state tensors."""
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
            write_back(tensors, saved.ids[away], rows, timeout_seconds)


def _own_range(table: Table) -> tuple[int, int]:
    """First id of this machine's rows, and the id after the last."""
    return int(table.starts[table.part_id]), int(table.starts[table.part_id + 1])


def _write_local(saved: SavedRows, chosen: ndarray) -> None:
    """Write chosen saved rows to this machine's state tensors."""
    for tensor in saved.table.state.values():
        array = state_array(tensor)
        array[saved.ids[chosen] - _own_range(saved.table)[0]] = saved.rows(tensor, chosen)


def count_missing(
    found: Sequence[SavedRows], tables: Sequence[Table], place: int, num_places: int
) -> ndarray:
    """Number of rows place, place + num_places, ... of the machine that are in no file, for each table."""
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
    table: Table, label: str, ids: Tensor, params: Mapping[str, Any], maps: Mapping[str, Any]
) -> ndarray:
    """Node ids of the rows of a file, "(n,) int64".

    Raises
    ------
    ValueError
        The table has no such rows, or the file was written under another partitioning and there are no
        original ids.
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
    params: Mapping[str, Any], tables: Sequence[Table], groups: Sequence[tuple[Sequence[str], dict[str, Any]]]
) -> None:
    """Take over saved hyper-parameters and numbers of steps; log changes.

    Raises
    ------
    ValueError
        A hyper-parameter is out of range; nothing is changed then.
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
    rule_of = {table.key: table.rule for table in tables}
    for (keys, group), saved in zip(groups, taken):
        if "betas" in saved:
            saved["betas"] = tuple(saved["betas"])
        for rule in {rule_of[key] for key in keys}:
            RuleStep.of(rule, {**group, **saved})  # a ValueError names what is out of range
    for (_, group), saved in zip(groups, taken):
        for key, value in saved.items():
            if key in group and group[key] != value:
                logger.info("%s was %s, the file says %s", key, group[key], value)
        group.update(saved)
    for label, num_steps in params.get("num_steps", {}).items():
        table = _table_of(label, params, tables)
        if table is not None:
            table.num_steps = num_steps


def read_files(path: str | bytes | os.PathLike) -> list[dict[str, Any]]:
    """Read all files of one save that this machine can see, in the order of ranks."""
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
    """Read one file.

    Raises
    ------
    ValueError
        It cannot be read, or is not a file of optimizer state.
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
    """Write a file under another name and rename it: an incomplete file never has the name."""
    unfinished = path.with_name(path.name + ".unfinished")
    torch.save(content, unfinished)
    os.replace(unfinished, path)


#: torch's names of state tensors.
_NAME_IN_TORCH = {"mem": "exp_avg", "power": "exp_avg_sq"}


def to_torch(content: Mapping[str, Any], tables: Sequence[Table]) -> dict[str, Any]:
    """Convert one trainer's saved state to the form of ``torch.optim``.

    Embeddings are numbered through all groups. The state of an embedding holds ``ids`` "(n,)" and the rows of
    each state tensor for them.
    """
    by_label = {table.label: table for table in tables}
    state: dict[int, dict[str, Tensor]] = {}
    groups = []
    for group in content[PARAMS][GROUPS]:
        numbers = range(len(state), len(state) + len(group["params"]))
        for number, label in zip(numbers, group["params"]):
            saved = content[EMB_STATES][label]
            state[number] = {
                IDS: saved[IDS],
                **{
                    _NAME_IN_TORCH.get(key, key): saved[STATES][tensor.name]
                    for key, tensor in by_label[label].state.items()
                },
            }
        groups.append({**group, "params": list(numbers)})
    return {"state": state, "param_groups": groups}


def from_torch(
    state_dict: Mapping[str, Any],
    tables: Sequence[Table],
    groups: Sequence[tuple[Sequence[str], Mapping[str, Any]]],
) -> dict[str, Any]:
    """Convert a state in the form of ``torch.optim`` to that of the optimizer's files.

    Without ``ids`` the rows of an embedding are all of its rows in the order of their ids, as
    ``torch.optim.Adagrad`` and ``torch.optim.SparseAdam`` save them.

    Parameters
    ----------
    state_dict : mapping
        In the form of ``torch.optim``.
    tables : sequence of Table
        The optimizer's tables.
    groups : sequence of (sequence of str, mapping)
        Its parameter groups, each with the keys of its tables.

    Raises
    ------
    ValueError
        The numbers of groups or of tables in a group differ, or a state tensor is missing.
    """
    saved_groups = state_dict["param_groups"]
    sizes, own_sizes = [len(group["params"]) for group in saved_groups], [len(keys) for keys, _ in groups]
    if sizes != own_sizes:
        raise ValueError(f"the saved state has groups of {sizes} parameters, this optimizer of {own_sizes}")
    by_key = {table.key: table for table in tables}
    states, num_steps, named = {}, {}, []
    for (keys, _), saved_group in zip(groups, saved_groups):
        for key, number in zip(keys, saved_group["params"]):
            table, saved = by_key[key], state_dict["state"].get(number)
            if saved is None:
                continue  # torch saves nothing for a parameter that never had a gradient
            states[table.label] = _torch_table_state(table, saved)
            if "step" in saved:
                num_steps[table.label] = int(torch.as_tensor(saved["step"]).max())
        named.append({**saved_group, "params": [by_key[key].label for key in keys]})
    params = {GROUPS: named, "num_steps": num_steps, "keys": {table.label: table.key for table in tables}}
    return {PARAMS: params, EMB_STATES: states}


def _torch_table_state(table: Table, saved: Mapping[str, Any]) -> dict[str, Any]:
    """The state of one table, under the names of its tensors."""
    ids = torch.as_tensor(saved[IDS]) if IDS in saved else torch.arange(table.num_rows)
    states = {}
    for key, tensor in table.state.items():
        name = _NAME_IN_TORCH.get(key, key)
        if name not in saved:
            raise ValueError(f"state of {table.label!r}: {name!r} is missing, the file has {sorted(saved)}")
        rows = torch.as_tensor(saved[name])
        states[tensor.name] = rows.expand(len(ids)) if key == "step" and rows.dim() == 0 else rows
    return {IDS: ids, STATES: states}


def _hyper_parameter(name: str, place: int | None = None) -> Any:
    """Property: a hyper-parameter of the first group; setting it sets that of all groups that have it."""

    def read(optimizer: SavedState) -> float:
        group = optimizer.param_groups[0]
        if name not in group:
            raise AttributeError(f"the rule of {type(optimizer).__name__} has no {name!r}")
        return float(group[name] if place is None else group[name][place])

    def write(optimizer: SavedState, value: float) -> None:
        for group in optimizer.param_groups:
            if name not in group:
                continue
            if place is None:
                group[name] = value
            else:
                group[name] = (*group[name][:place], value, *group[name][place + 1 :])

    return property(read, write)


class SavedState(abc.ABC):
    """Methods of :class:`SparseOptimizer` that save and load its state, and the attributes of DGL's."""

    param_groups: list[dict[str, Any]]
    tables: list[Table]
    _states: dict[str, Any]
    _group: Alltoall
    _rank: int
    _world_size: int
    _timeout_seconds: float
    _exchange: StepExchange

    @abc.abstractmethod
    def finish(self) -> Any:
        """Wait for a step in the background."""

    @abc.abstractmethod
    def _keyed_groups(self) -> list[tuple[list[str], dict[str, Any]]]:
        """Each parameter group with the keys of its tables."""

    @property
    def _state(self) -> dict[str, Any]:
        """State of each embedding by name: a ``DistTensor``, or a tuple of them."""
        self.finish()
        return self._states

    @property
    def _defaults(self) -> dict[str, float]:
        """Hyper-parameters of the first group under DGL's names."""
        names = ("_lr", "_eps", "_beta1", "_beta2")
        return {name: getattr(self, name) for name in names if hasattr(self, name)}

    _lr, _eps = _hyper_parameter("lr"), _hyper_parameter("eps")
    _beta1, _beta2 = _hyper_parameter("betas", 0), _hyper_parameter("betas", 1)

    def local_state_dict(self, original_ids: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return this trainer's share of the state; no collective.

        The trainers of a machine share its rows: the i-th of n saves rows i, i + n, ...

        Parameters
        ----------
        original_ids : mapping, optional
            For each embedding "(N,)" original id of each node id: the state is saved by original ids and can
            be loaded under another partitioning.
        """
        self.finish()
        return file_content(
            self.tables,
            self._keyed_groups(),
            {"world_size": self._world_size, **self._defaults},
            original_ids or {},
            self._exchange.place,
            self._exchange.num_places,
        )

    def load_local_state_dict(
        self,
        local_state_dict: Mapping[str, Any],
        original_ids: Mapping[str, Any] | None = None,
        dgl_keeps_roots: bool = True,
    ) -> None:
        """Take over all rows of a saved state, and the hyper-parameters; no collective.

        Rows that other trainers own are written too, so that together the trainers may load the parts of a
        save in any order and number.

        Parameters
        ----------
        local_state_dict : mapping
            From :meth:`local_state_dict`, of this optimizer or of DGL's.
        original_ids : mapping, optional
            As in :meth:`local_state_dict`; needed if the state was saved by original ids.
        dgl_keeps_roots : bool
            Square the state of DGL's SparseAdagrad, which keeps roots if it updates on the CPU. False: the
            state was kept with gradients on a GPU.

        Raises
        ------
        ValueError
            The rows do not fit this optimizer; nothing is written then.
        """
        self.finish()
        found = saved_rows([local_state_dict], self.tables, original_ids or {}, dgl_keeps_roots)
        take_over(local_state_dict[PARAMS], self.tables, self._keyed_groups())
        write_all(found, self._timeout_seconds)

    def save(self, f: str | bytes | os.PathLike, original_ids: Mapping[str, Any] | None = None) -> None:
        """Write this trainer's state to ``<f>_<rank>``; a collective.

        Arguments as in :meth:`local_state_dict`. If one trainer fails, all of them raise.
        """
        self.finish()
        self._barrier()  # with synchronous=False another trainer may still be in a step
        problem: Exception | None = None
        try:
            write_file(self.local_state_dict(original_ids), file_of(f, self._rank))
        except Exception as error:  # a full disk, no such folder: raised after the others have been informed
            problem = error
        self._agree(problem, "save", OSError)

    def load(
        self,
        f: str | bytes | os.PathLike,
        original_ids: Mapping[str, Any] | None = None,
        dgl_keeps_roots: bool = True,
    ) -> None:
        """Read the state from the files that :meth:`save` wrote with any number of trainers; a collective.

        Files of DGL's optimizers are read too. Other arguments as in :meth:`load_local_state_dict`. Every
        machine must see the files that hold its rows; all files if the partitioning changed.

        Raises
        ------
        FileNotFoundError
            No trainer finds a file.
        ValueError
            The files belong to another optimizer, or to another partitioning without ``original_ids``; no
            trainer writes anything then.
        """
        self.finish()
        self._barrier()
        found: list[SavedRows] = []
        params: Any = None
        problem: Exception | None = None
        try:
            contents = read_files(f)
            params = contents[0][PARAMS] if contents else None
            found = saved_rows(contents, self.tables, original_ids or {}, dgl_keeps_roots)
        except Exception as error:  # raised after the others have been informed
            problem = error
        self._agree(problem, "load", ValueError)
        # Without a shared disk a machine may see no file: all trainers take the same hyper-parameters.
        seen = [each for each in self._group.gather(params) if each is not None]
        if not seen:
            raise FileNotFoundError(f"no file {os.fsdecode(f)}_<rank> to load optimizer state from")
        take_over(seen[0], self.tables, self._keyed_groups())
        write_share(found, self._exchange.place, self._exchange.num_places)
        self._warn_of_missing_rows(found)

    def _warn_of_missing_rows(self, found: Sequence[SavedRows]) -> None:
        """Log for each table how many rows are in no file; a collective."""
        num_missing = self._group.sum(
            count_missing(found, self.tables, self._exchange.place, self._exchange.num_places)
        )
        for table, number in zip(self.tables, num_missing):
            if number:
                logger.warning(
                    "the files hold %d of the %d rows of %r: the state of the others stays as it was",
                    table.num_rows - number,
                    table.num_rows,
                    table.label,
                )

    def _agree(self, problem: Exception | None, task: str, kind: type[Exception]) -> None:
        """Exchange problems between all trainers; raise the own one, or an error that names the rank."""
        problems = self._group.gather(None if problem is None else _describe(problem))
        if problem is not None:
            raise problem
        for rank, text in enumerate(problems):
            if text is not None:
                raise kind(f"trainer {rank} cannot {task} the optimizer state: {text}")

    def _barrier(self) -> None:
        """Wait for all trainers."""
        self._group.sum(np.zeros(1, np.int64))

    def state_dict(self) -> dict[str, Any]:
        """Return this trainer's share of the state; no collective.

        It has torch's keys ``state`` and ``param_groups`` and those of :meth:`local_state_dict`; both refer
        to the same tensors.
        """
        content = self.local_state_dict()
        return {**content, **to_torch(content, self.tables)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state of :meth:`local_state_dict`, or one in the form of ``torch.optim``.

        The latter may be that of a ``torch.optim.Adagrad`` or ``SparseAdam`` over whole tables.
        """
        if EMB_STATES not in state_dict and {"state", "param_groups"} <= set(state_dict):
            state_dict = from_torch(state_dict, self.tables, self._keyed_groups())
        self.load_local_state_dict(state_dict)


def _describe(error: Exception) -> str:
    """Text of an error; with its type where the text alone would not be clear."""
    return str(error) if isinstance(error, (ValueError, OSError)) else f"{type(error).__name__}: {error}"
