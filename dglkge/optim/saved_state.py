"""Saving and loading, the part of an optimizer that every rule shares."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from . import state_file
from .alltoall import Alltoall
from .dgl_attributes import DglAttributes
from .step_exchange import StepExchange
from .table import Table

logger = logging.getLogger(__name__)


class SavedState(DglAttributes):
    """Methods of :class:`SparseOptimizer` that write its state to files and read it again."""

    _tables: list[Table]
    _group: Alltoall
    _rank: int
    _world_size: int

    @property
    def _exchange(self) -> StepExchange:
        """The ways to the other trainers."""
        raise NotImplementedError

    def local_state_dict(self, original_ids: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """This trainer's share of the state: every n-th of its machine's rows, n trainers being on the
        machine.

        Parameters
        ----------
        original_ids : mapping, optional
            For each embedding "(N,)" original id of each node id; the state is then saved by original ids and
            can be loaded under another partitioning.
        """
        self.finish()
        return state_file.content(
            self._tables,
            self.param_groups,
            {"world_size": self._world_size, **self._defaults},
            original_ids or {},
            self._exchange.place,
            self._exchange.num_places,
        )

    def load_local_state_dict(
        self, local_state_dict: Mapping[str, Any], original_ids: Mapping[str, Any] | None = None
    ) -> None:
        """Take over the rows of a saved state that are this trainer's to write, and the hyper-parameters.

        Learning rates are never lowered; what is ignored is logged.

        Parameters
        ----------
        local_state_dict : mapping
            From :meth:`local_state_dict`, of this optimizer or of DGL's.
        original_ids : mapping, optional
            Needed where the state was saved by original ids.
        """
        self._load([local_state_dict], original_ids)

    def save(self, f: str | bytes | os.PathLike, original_ids: Mapping[str, Any] | None = None) -> None:
        """Write this trainer's state to ``<f>_<rank>``; every trainer calls it. Arguments:
        :meth:`local_state_dict`."""
        content = self.local_state_dict(original_ids)
        self._barrier()
        state_file.write_file(content, state_file.file_of(f, self._rank))
        self._barrier()

    def load(self, f: str | bytes | os.PathLike, original_ids: Mapping[str, Any] | None = None) -> None:
        """Read the state from the files that :meth:`save` wrote with any number of trainers; every trainer
        calls it.

        Every machine must see the files that hold its rows: all of them, where the partitioning changed.

        Raises
        ------
        FileNotFoundError
            No trainer finds a file.
        ValueError
            The files are of another optimizer, or of another partitioning without ``original_ids``.
        """
        self._barrier()
        contents = state_file.saved_files(f)
        found = self._group.sum(np.array([len(contents)]))
        if found[0] == 0:
            raise FileNotFoundError(f"no file {os.fsdecode(f)}_<rank> to load optimizer state from")
        num_rows = self._group.sum(self._load(contents, original_ids))
        for table, number in zip(self._tables, num_rows):
            if number < table.num_rows:
                logger.warning(
                    "the files hold %d of the %d rows of %r: the state of the others stays as it was",
                    number,
                    table.num_rows,
                    table.name,
                )

    def _load(
        self, contents: Sequence[Mapping[str, Any]], original_ids: Mapping[str, Any] | None
    ) -> np.ndarray:
        """Write this trainer's rows of some saved states; returns how many of each table "(num_tables,)
        int64"."""
        self.finish()
        num_rows = state_file.load_states(
            contents, self._tables, original_ids or {}, self._exchange.place, self._exchange.num_places
        )
        if contents:
            state_file.merge_groups(self.param_groups, contents[0][state_file.PARAMS])
        return num_rows

    def _barrier(self) -> None:
        """Wait for all trainers."""
        self._group.sum(np.zeros(1, np.int64))

    def state_dict(self) -> dict[str, Any]:
        """The same as :meth:`local_state_dict`."""
        return self.local_state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """The same as :meth:`load_local_state_dict`."""
        self.load_local_state_dict(state_dict)
