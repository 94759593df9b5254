"""Types that all packages share."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

# The launcher and `dglkge plan` import this file, and must not load torch.
if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    Ids = npt.NDArray[np.int64]
    Floats = npt.NDArray[np.float32]
    Doubles = npt.NDArray[np.float64]
    Mask = npt.NDArray[np.bool_]
else:  # for annotations only
    Ids = Floats = Doubles = Mask = Any

# One name for both, as relations are a node type of the graph: the same code serves, updates and saves them.
RELATION = "relation"
"""Name of the node type, and of the table, that holds the relations."""

TRAINED_ROWS = "trained_rows"
"""Name of the rows that train, beside the optimizer's state, where the rows of a version are averages."""

DEVICE_STORAGE = "device"
"""``tables.storage`` of rows and optimizer state that train on the devices of a machine's trainers."""

AUTO_DEVICE, CPU_DEVICE, CUDA_DEVICE, STAGED_CPU_DEVICE = ("auto", "cpu", "cuda", "cpu_staged")
Device = Literal["auto", "cpu", "cuda", "cpu_staged"]
DEVICES: tuple[str, ...] = get_args(Device)
"""Names of devices; see :class:`dglkge.model.device.ComputeDevice`."""


class Side(enum.Enum):
    """The side of a triple that is corrupted or predicted.

    ``Side.TAIL`` stands for (h, r, ?) and ``Side.HEAD`` for (?, r, t).
    """

    HEAD = "head"
    TAIL = "tail"

    # By identity: enum's own hashes the name, in Python, at each use as a key.
    __hash__ = object.__hash__

    @property
    def other(self) -> Side:
        """The side of the entity that is given."""
        return Side.HEAD if self is Side.TAIL else Side.TAIL

    @property
    def column(self) -> int:
        """Column of the missing entity in a (n, 3) array of head, relation, tail."""
        # Columns of triples are fixed everywhere: head 0, relation 1, tail 2.
        return 0 if self is Side.HEAD else 2

    @property
    def anchor_column(self) -> int:
        """Column of the entity that is given."""
        return 2 if self is Side.HEAD else 0


@dataclass(frozen=True)
class Relation:
    """A relation and the entity types that it joins.

    A name that joins several pairs of types is several relations, so that the candidates of a
    query always have one type (PyTorch-BigGraph's rule).
    """

    name: str
    lhs: str
    rhs: str

    def candidate_type(self, side: Side) -> str:
        """Entity type of the answers to a query for that side."""
        return self.lhs if side is Side.HEAD else self.rhs

    def anchor_type(self, side: Side) -> str:
        """Entity type of the entity given in a query for that side."""
        return self.rhs if side is Side.HEAD else self.lhs


@dataclass(frozen=True)
class TablePart:
    """Rows of one embedding table that one machine owns.

    Attributes
    ----------
    table : str
        An entity type, or ``"relation"``.
    part : int
        The partition.
    original_ids : (n,) int64 tensor
        Original id of each local row.
    rows : (n, D) float32 tensor
        The rows; may be a view on the machine's shared memory.
    state : mapping of str to tensor
        Optimizer state by name; the first dimension of each is n.
    shared : mapping of str to tensor
        Tensors of the whole model that are stored with the relations, by dataset.
    """

    table: str
    part: int
    original_ids: torch.Tensor
    rows: torch.Tensor
    state: Mapping[str, torch.Tensor] = field(default_factory=dict)
    shared: Mapping[str, torch.Tensor] = field(default_factory=dict)


class RowSource(Protocol):
    """Lookup of rows of any table by original id: live tables, or a checkpoint's files."""

    def gather(self, table: str, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows (n, D) of the original ids (n,) of a table."""


class RowShard(Protocol):
    """Some rows of one table, each with its original id."""

    @property
    def original_ids(self) -> torch.Tensor:
        """Original ids of the rows, (n,) int64."""

    @property
    def rows(self) -> torch.Tensor:
        """The rows, (n, D)."""

    def locate(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the place of each original id among the rows, -1 where it is not here; (m,) int64."""
