"""Saving and loading, the part of an optimizer that every rule shares."""

from __future__ import annotations

import abc
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dglkge.optim import state_file, torch_state
from dglkge.optim.alltoall import Alltoall
from dglkge.optim.dgl_attributes import DglAttributes
from dglkge.optim.step_exchange import StepExchange
from dglkge.optim.table import Table

logger = logging.getLogger(__name__)


class SavedState(DglAttributes, abc.ABC):
    """Methods of :class:`SparseOptimizer` that write its state to files and read it again."""

    _tables: list[Table]
    _group: Alltoall
    _rank: int
    _world_size: int
    _timeout_seconds: float
    _exchange: StepExchange

    @abc.abstractmethod
    def _keyed_groups(self) -> list[tuple[list[str], dict[str, Any]]]:
        """Each parameter group with the keys of its tables."""

    def local_state_dict(self, original_ids: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """This trainer's share of the state: every n-th of its machine's rows, n trainers being on the
        machine. No collective.

        Parameters
        ----------
        original_ids : mapping, optional
            For each embedding "(N,)" original id of each node id; the state is then saved by original ids and
            can be loaded under another partitioning.
        """
        self.finish()
        return state_file.content(
            self._tables,
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
            Needed where the state was saved by original ids.
        dgl_keeps_roots : bool
            Square the state of DGL's SparseAdagrad, which keeps roots where it updates on the CPU. False for
            a state that DGL kept with gradients on a GPU.

        Raises
        ------
        ValueError
            The rows do not fit; nothing is written then.
        """
        self.finish()
        found = state_file.saved_rows([local_state_dict], self._tables, original_ids or {}, dgl_keeps_roots)
        state_file.take_over(local_state_dict[state_file.PARAMS], self._tables, self._keyed_groups())
        state_file.write_all(found, self._timeout_seconds)

    def save(self, f: str | bytes | os.PathLike, original_ids: Mapping[str, Any] | None = None) -> None:
        """Write this trainer's state to ``<f>_<rank>``; every trainer calls it. Arguments:
        :meth:`local_state_dict`. What one trainer raises, all of them raise."""
        self.finish()
        self._barrier()  # no trainer changes rows any more, also where steps are not synchronous
        problem: Exception | None = None
        try:
            state_file.write_file(self.local_state_dict(original_ids), state_file.file_of(f, self._rank))
        except Exception as error:  # a full disk, no such folder: the others wait for word of it
            problem = error
        self._agree(problem, "save", OSError)

    def load(
        self,
        f: str | bytes | os.PathLike,
        original_ids: Mapping[str, Any] | None = None,
        dgl_keeps_roots: bool = True,
    ) -> None:
        """Read the state from the files that :meth:`save` wrote with any number of trainers; every trainer
        calls it. Files of DGL's optimizers are read too. Other arguments: :meth:`load_local_state_dict`.

        Every machine must see the files that hold its rows: all of them, where the partitioning changed.

        Raises
        ------
        FileNotFoundError
            No trainer finds a file.
        ValueError
            The files are of another optimizer, or of another partitioning without ``original_ids``; nothing
            is written then, by any trainer.
        """
        self.finish()
        self._barrier()
        found: list[state_file.SavedRows] = []
        params: Any = None
        problem: Exception | None = None
        try:
            contents = state_file.saved_files(f)
            params = contents[0][state_file.PARAMS] if contents else None
            found = state_file.saved_rows(contents, self._tables, original_ids or {}, dgl_keeps_roots)
        except Exception as error:  # whatever it is, the others wait for word of it
            problem = error
        self._agree(problem, "load", ValueError)
        # Where machines share no disk, some may see no file: all take the same hyper-parameters.
        seen = [each for each in self._group.gather(params) if each is not None]
        if not seen:
            raise FileNotFoundError(f"no file {os.fsdecode(f)}_<rank> to load optimizer state from")
        state_file.take_over(seen[0], self._tables, self._keyed_groups())
        state_file.write_share(found, self._exchange.place, self._exchange.num_places)
        self._warn_of_missing_rows(found)

    def _warn_of_missing_rows(self, found: Sequence[state_file.SavedRows]) -> None:
        """Log how many rows no file had, for each table; a collective."""
        num_missing = self._group.sum(
            state_file.num_missing(found, self._tables, self._exchange.place, self._exchange.num_places)
        )
        for table, number in zip(self._tables, num_missing):
            if number:
                logger.warning(
                    "the files hold %d of the %d rows of %r: the state of the others stays as it was",
                    table.num_rows - number,
                    table.num_rows,
                    table.label,
                )

    def _agree(self, problem: Exception | None, task: str, kind: type[Exception]) -> None:
        """Wait for all trainers; raise this one's problem, or say which other trainer has one."""
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
        """This trainer's share of the state under torch's keys ``state`` and ``param_groups`` and under those
        of :meth:`local_state_dict`; both name the same tensors. No collective."""
        content = self.local_state_dict()
        return {**content, **torch_state.to_torch(content, self._tables)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As :meth:`load_local_state_dict`; also for states in the form of ``torch.optim``, such as that of a
        ``torch.optim.Adagrad`` or ``SparseAdam`` over whole tables."""
        if torch_state.is_of_torch(state_dict):
            state_dict = torch_state.from_torch(state_dict, self._tables, self._keyed_groups())
        self.load_local_state_dict(state_dict)


def _describe(error: Exception) -> str:
    """Say what an error is: by its text alone where that is written for people."""
    return str(error) if isinstance(error, (ValueError, OSError)) else f"{type(error).__name__}: {error}"
