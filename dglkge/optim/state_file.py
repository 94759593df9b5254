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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from dglkge.optim.alltoall import Alltoall
from dglkge.optim.dgl_tables import key_of, state_array, write_back
from dglkge.optim.links import Options, RuleStep
from dglkge.optim.step_exchange import StepExchange
from dglkge.optim.table import Table

logger = logging.getLogger(__name__)

#: Keys of the dictionary, as DGL names them.
PARAMS, EMB_STATES, WORLD_SIZE, IDS, STATES = "params", "emb_states", "world_size", "ids", "states"

#: Key of the parameter groups in ``params``, which DGL's files lack.
GROUPS = "param_groups"

#: torch's names of state tensors.
_NAME_IN_TORCH = {"mem": "exp_avg", "power": "exp_avg_sq"}


class SavedRows(NamedTuple):
    """Checked state rows of a table from one file.

    Attributes
    ----------
    table : Table
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

    def rows(self, tensor: Any, selected: ndarray) -> ndarray:
        """Selected rows of a state tensor, in its type."""
        rows = self.states[tensor.name][torch.from_numpy(selected)].to(tensor.dtype)
        return (rows.square() if self.are_roots else rows).numpy()

    def write_here(self, place: int = 0, num_places: int = 1) -> None:
        """Write rows place, place + num_places, ... of this machine to its state tensors."""
        start, stop = self.table.own_range
        places = self.ids - start
        selected = np.flatnonzero((places >= 0) & (self.ids < stop) & (places % num_places == place))
        for tensor in self.table.state.values():
            state_array(tensor)[places[selected]] = self.rows(tensor, selected)

    def write_away(self, timeout_seconds: float) -> None:
        """Write the rows of other machines through the kvstore."""
        (start, stop), tensors = self.table.own_range, list(self.table.state.values())
        away = np.flatnonzero((self.ids < start) | (self.ids >= stop))
        if len(away):
            rows = [self.rows(tensor, away) for tensor in tensors]
            write_back(tensors, self.ids[away], rows, timeout_seconds)


def _table_of(label: str, params: Mapping[str, Any], tables: Sequence[Table]) -> Table | None:
    """Table of a name in a file: by its name in the kvstore if the file has it, else by a unique name."""
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


def _node_ids(
    table: Table, label: str, ids: Tensor, params: Mapping[str, Any], maps: Mapping[str, Any]
) -> ndarray:
    """Node ids of the rows of a file, "(n,) int64"; ValueError if table or partitioning is another one."""
    array = ids.numpy().astype(np.int64)
    if len(array) and not 0 <= array.min() <= array.max() < table.num_rows:
        wrong = array.min() if array.min() < 0 else array.max()
        raise ValueError(
            f"state of {table.label!r}: the file has row {wrong}, the table has {table.num_rows} rows"
        )
    if params.get("id_space", {}).get(label) == "original":
        original_ids = maps.get(table.label)
        if original_ids is None:
            message = f"state of {table.label!r} is saved by original ids: give original_ids to load it"
            raise ValueError(message)
        inverse = np.empty(len(original_ids), np.int64)
        inverse[np.asarray(original_ids)] = np.arange(len(original_ids))
        return inverse[array]
    starts = params.get("starts", {}).get(label)
    if starts is not None and list(starts) != table.starts.tolist():
        raise ValueError(
            f"state of {table.label!r} is saved by node ids of another partitioning (ranges {list(starts)}, "
            f"now {table.starts.tolist()}): save and load it with original_ids"
        )
    return array


def file_of(path: str | bytes | os.PathLike[str], rank: int) -> Path:
    """File of a trainer: ``<path>_<rank>``."""
    return Path(f"{os.fsdecode(path)}_{rank}")


def read_files(path: str | bytes | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read all files of one save that this machine can see, in the order of ranks."""
    prefix = str(file_of(path, 0))[:-1]  # as glob writes it
    endings = [name.removeprefix(prefix) for name in glob.glob(f"{glob.escape(prefix)}*")]
    ranks = sorted(int(ending) for ending in endings if ending.isdigit())
    contents = [_read_file(file_of(path, rank)) for rank in ranks]
    world_size = contents[0][PARAMS].get(WORLD_SIZE, len(ranks)) if contents else 0
    if stale := [rank for rank in ranks if rank >= world_size]:
        message = "ignored the files of trainers %s: trainer %d's was written by %d trainers"
        logger.warning(message, stale, ranks[0], world_size)
    return [content for rank, content in zip(ranks, contents) if rank < world_size]


def _read_file(path: Path) -> dict[str, Any]:
    """Read one file; ValueError if it is not one of optimizer state."""
    try:
        content = torch.load(str(path), weights_only=True, mmap=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{path} is no optimizer state: {reason}") from error
    if not isinstance(content, dict) or not {PARAMS, EMB_STATES} <= set(content):
        raise ValueError(f"{path} is no optimizer state: it lacks {PARAMS!r} and {EMB_STATES!r}")
    return content


def _torch_table_state(table: Table, saved: Mapping[str, Any]) -> dict[str, Any]:
    """State of one table in the form of ``torch.optim``, under the names of its tensors."""
    # Without ids: all rows in the order of their ids, as torch.optim.Adagrad and SparseAdam save them.
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
    _table_of_key: dict[str, Table]
    _group: Alltoall
    _rank: int
    _world_size: int
    _options: Options
    _exchange: StepExchange

    @abc.abstractmethod
    def finish(self) -> Any:
        """Wait for a step in the background."""

    def _groups_of_tables(self) -> list[tuple[list[Table], dict[str, Any]]]:
        """Each parameter group with its tables."""
        of_key = self._table_of_key
        return [
            ([of_key[key_of(entry.embedding)] for entry in group["params"]], group)
            for group in self.param_groups
        ]

    @property
    def _state(self) -> dict[str, Any]:
        """State of each embedding by name: a ``DistTensor``, or a tuple of them as in DGL."""
        self.finish()
        states = {table.label: tuple(table.state.values()) for table in self.tables}
        return {label: state[0] if len(state) == 1 else state for label, state in states.items()}

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
        tables, maps, states = self.tables, original_ids or {}, {}
        for table in tables:
            start, stop = table.own_range
            share = slice(self._exchange.place, None, self._exchange.num_places)
            ids = torch.arange(start, stop)[share]
            if table.label in maps:
                ids = torch.from_numpy(np.asarray(maps[table.label])[ids.numpy()].astype(np.int64))
            rows = {
                tensor.name: torch.from_numpy(state_array(tensor)[share].copy())
                for tensor in table.state.values()
            }
            states[table.label] = {IDS: ids, STATES: rows}
        of_dgl = [name for name in ("_lr", "_eps", "_beta1", "_beta2") if hasattr(self, name)]
        params = {
            WORLD_SIZE: self._world_size,
            **{name: getattr(self, name) for name in of_dgl},
            GROUPS: [
                {**group, "params": [table.label for table in grouped]}
                for grouped, group in self._groups_of_tables()
            ],
            "num_steps": {table.label: table.num_steps for table in tables},
            "keys": {table.label: table.key for table in tables},
            "id_space": {table.label: "original" if table.label in maps else "node" for table in tables},
            "starts": {table.label: table.starts.tolist() for table in tables},
        }
        return {PARAMS: params, EMB_STATES: states}

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
        saved_rows = self._saved_rows([local_state_dict], original_ids or {}, dgl_keeps_roots)
        self._take_over(local_state_dict[PARAMS])
        for part in saved_rows:
            part.write_here()
            part.write_away(self._options.timeout_seconds)

    def save(self, f: str | bytes | os.PathLike[str], original_ids: Mapping[str, Any] | None = None) -> None:
        """Write this trainer's state to ``<f>_<rank>``; a collective.

        Arguments as in :meth:`local_state_dict`. If one trainer fails, all of them raise.
        """

        def write() -> None:
            path = file_of(f, self._rank)
            # An incomplete file never has the name.
            unfinished = path.with_name(path.name + ".unfinished")
            torch.save(self.local_state_dict(original_ids), unfinished)
            os.replace(unfinished, path)

        self._together("save", OSError, write)

    def load(
        self,
        f: str | bytes | os.PathLike[str],
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

        def read() -> tuple[Any, list[SavedRows]]:
            contents = read_files(f)
            saved_rows = self._saved_rows(contents, original_ids or {}, dgl_keeps_roots)
            return contents[0][PARAMS] if contents else None, saved_rows

        params, saved_rows = self._together("load", ValueError, read)
        # Without a shared disk a machine may see no file: all trainers take the same hyper-parameters.
        hyper_parameters = [entry for entry in self._group.gather(params) if entry is not None]
        if not hyper_parameters:
            raise FileNotFoundError(f"no file {os.fsdecode(f)}_<rank> to load optimizer state from")
        self._take_over(hyper_parameters[0])
        for part in saved_rows:
            part.write_here(self._exchange.place, self._exchange.num_places)
        self._warn_of_missing_rows(saved_rows)

    def state_dict(self) -> dict[str, Any]:
        """Return this trainer's share of the state; no collective.

        It has torch's keys ``state`` and ``param_groups`` and those of :meth:`local_state_dict`; both refer
        to the same tensors. Embeddings are numbered through all groups.
        """
        content = self.local_state_dict()
        state: dict[int, dict[str, Tensor]] = {}
        groups = []
        for tables, group in self._groups_of_tables():
            numbers = range(len(state), len(state) + len(tables))
            for number, table in zip(numbers, tables):
                saved = content[EMB_STATES][table.label]
                rows = {
                    _NAME_IN_TORCH.get(key, key): saved[STATES][tensor.name]
                    for key, tensor in table.state.items()
                }
                state[number] = {IDS: saved[IDS], **rows}
            groups.append({**group, "params": list(numbers)})
        return {**content, "state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state of :meth:`local_state_dict`, or one in the form of ``torch.optim``.

        The latter may be that of a ``torch.optim.Adagrad`` or ``SparseAdam`` over whole tables.

        Raises
        ------
        ValueError
            The numbers of groups or of tables in a group differ, or rows do not fit.
        """
        if EMB_STATES not in state_dict and {"state", "param_groups"} <= set(state_dict):
            state_dict = self._from_torch(state_dict)
        self.load_local_state_dict(state_dict)

    def _from_torch(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Convert a state in the form of ``torch.optim`` to that of the optimizer's files."""
        saved_groups, groups = state_dict["param_groups"], [tables for tables, _ in self._groups_of_tables()]
        sizes, own_sizes = [len(group["params"]) for group in saved_groups], [*map(len, groups)]
        if sizes != own_sizes:
            raise ValueError(
                f"the saved state has groups of {sizes} parameters, this optimizer of {own_sizes}"
            )
        states, num_steps, named = {}, {}, []
        for tables, saved_group in zip(groups, saved_groups):
            for table, number in zip(tables, saved_group["params"]):
                saved = state_dict["state"].get(number)
                if saved is None:
                    continue  # torch saves nothing for a parameter that never had a gradient
                states[table.label] = _torch_table_state(table, saved)
                if "step" in saved:
                    num_steps[table.label] = int(torch.as_tensor(saved["step"]).max())
            named.append({**saved_group, "params": [table.label for table in tables]})
        keys_of = {table.label: table.key for table in self.tables}
        return {PARAMS: {GROUPS: named, "num_steps": num_steps, "keys": keys_of}, EMB_STATES: states}

    def _saved_rows(
        self, contents: Sequence[Mapping[str, Any]], maps: Mapping[str, Any], dgl_keeps_roots: bool
    ) -> list[SavedRows]:
        """Check the rows of some files; nothing is written yet. Tables that are not here are ignored."""
        saved_rows, unknown = [], set()
        for saved in contents:
            params = saved.get(PARAMS, {})
            for label, state in saved[EMB_STATES].items():
                table = _table_of(label, params, self.tables)
                if table is None:
                    unknown.add(label)
                    continue
                ids = _node_ids(table, label, state[IDS], params, maps)
                states = _states_of(table, len(ids), state[STATES])
                are_roots = GROUPS not in params and dgl_keeps_roots and set(table.state) == {"sum"}
                if are_roots:
                    logger.info("%r: the roots that DGL's Adagrad keeps are squared", label)
                saved_rows.append(SavedRows(table, ids, states, are_roots))
        if unknown:
            message = "ignored the saved state of %s: not among this optimizer's embeddings"
            logger.warning(message, sorted(unknown))
        return saved_rows

    def _take_over(self, params: Mapping[str, Any]) -> None:
        """Take over saved hyper-parameters and numbers of steps; nothing if a ValueError is raised."""
        saved_of = {}
        for saved in params.get(GROUPS, []):
            for label in saved["params"]:
                if (table := _table_of(label, params, self.tables)) is not None:
                    saved_of[table.key] = {key: value for key, value in saved.items() if key != "params"}
        plain: dict[str, Any] = {}
        if GROUPS not in params:  # DGL's
            plain = {key[1:]: params[key] for key in ("_lr", "_eps") if key in params}
            if "_beta1" in params:
                plain["betas"] = (params["_beta1"], params["_beta2"])
        taken = []
        for tables, group in self._groups_of_tables():
            saved = {
                key: tuple(value) if key == "betas" else value
                for key, value in saved_of.get(tables[0].key, plain).items()
                if key in {*group, "initial_lr"}
            }
            for table in tables:
                RuleStep.of(table.rule, {**group, **saved})  # a ValueError names what is out of range
            taken.append((group, saved))
        for group, saved in taken:
            group.update(saved)
        for label, num_steps in params.get("num_steps", {}).items():
            if (table := _table_of(label, params, self.tables)) is not None:
                table.num_steps = num_steps

    def _warn_of_missing_rows(self, saved_rows: Sequence[SavedRows]) -> None:
        """Log for each table how many rows are in no file; a collective."""
        missing = []
        for table in self.tables:
            start, stop = table.own_range
            is_missing = np.ones(stop - start, bool)
            for part in saved_rows:
                if part.table is table:
                    is_missing[part.ids[(part.ids >= start) & (part.ids < stop)] - start] = False
            missing.append(is_missing[self._exchange.place :: self._exchange.num_places].sum())
        for table, number in zip(self.tables, self._group.sum(np.array(missing, np.int64))):
            if number:
                message = "the files hold %d of the %d rows of %r: the state of the others stays as it was"
                logger.warning(message, table.num_rows - number, table.num_rows, table.label)

    def _together(self, task: str, kind: type[Exception], work: Callable[[], Any]) -> Any:
        """Call a function on every trainer; if it fails on one, all raise an error."""
        self.finish()
        self._group.sum(np.zeros(1, np.int64))  # with synchronous=False another trainer may be in a step
        result, problem, text = None, None, None
        try:
            result = work()
        except Exception as error:  # raised after the others have been informed
            problem, text = error, str(error)
            if not isinstance(error, (ValueError, OSError)):  # its text alone would not be clear
                text = f"{type(error).__name__}: {error}"
        texts = self._group.gather(text)
        if problem is not None:
            raise problem
        for rank, other in enumerate(texts):
            if other is not None:
                raise kind(f"trainer {rank} cannot {task} the optimizer state: {other}")
        return result
