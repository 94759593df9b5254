"""Versioned checkpoints in PyTorch-BigGraph's layout, by original entity ids.

The names below are imported when they are first used: the launcher and node programs read the file names in
``dglkge.checkpoint.layout`` without torch and h5py.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dglkge.checkpoint.manager import CheckpointManager, TrainerGroup
    from dglkge.checkpoint.manifest import CheckpointMeta, check_same_run
    from dglkge.checkpoint.reader import Checkpoint, open_checkpoint

_HOME = {
    "Checkpoint": "reader",
    "CheckpointManager": "manager",
    "CheckpointMeta": "manifest",
    "TrainerGroup": "manager",
    "check_same_run": "manifest",
    "open_checkpoint": "reader",
}
__all__ = [
    "Checkpoint",
    "CheckpointManager",
    "CheckpointMeta",
    "TrainerGroup",
    "check_same_run",
    "open_checkpoint",
]


def __getattr__(name: str) -> Any:
    # PEP 562: a module's __getattr__ is called for names that are not found otherwise.
    if name not in _HOME:
        raise AttributeError(f"module 'dglkge.checkpoint' has no attribute {name!r}")
    return getattr(importlib.import_module(f"dglkge.checkpoint.{_HOME[name]}"), name)
