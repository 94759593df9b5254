"""What the process that partitions the graph is told, and when it ends."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dglkge.data.dataset_files import PARTITIONS
from dglkge.data.json_file import load_json

_FILE = "job.json"

NO_ROOM_STATUS = 28
"""Exit status of the process where the disk is full; its log may have had no room for a message."""


@dataclass(frozen=True)
class GraphJob:
    """A graph to be partitioned; the triples lie in the folder's ``train.npy``.

    Attributes
    ----------
    graph_name : str
        Name of the graph in DGL.
    num_parts, method, seed
        How to partition it: ``"metis"`` or ``"random"``.
    entity_types : dict of str to int
        Number of entities of each type.
    edge_types : list of [lhs, rhs, first_triple_id, end_triple_id]
        The range of triples of each pair of types.
    num_relations : int
        Number of relations.
    has_weights : bool
        Whether ``train_weights.npy`` lies there.
    """

    graph_name: str
    num_parts: int
    method: str
    seed: int
    entity_types: dict[str, int]
    edge_types: list[list[Any]]
    num_relations: int
    has_weights: bool

    def save(self, dataset: Path) -> None:
        """Write the job into a dataset folder that is being built."""
        folder = dataset / PARTITIONS
        folder.mkdir()
        (folder / _FILE).write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def take(cls, dataset: Path) -> GraphJob:
        """Read the job and remove its file."""
        path = dataset / PARTITIONS / _FILE
        job = cls(**load_json(path))
        path.unlink()
        return job


def end_with_parent(parent: int) -> None:
    """Ask Linux to end this process when its parent dies, even by ``kill -9``; end now if it has died."""
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG in <linux/prctl.h>
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the parent has ended")
