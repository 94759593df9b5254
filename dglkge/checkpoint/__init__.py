"""Versioned checkpoints in PyTorch-BigGraph's layout, by original entity ids.

The names below are imported when they are first used: the launcher and node programs read the file names in
``dglkge.checkpoint.layout`` without torch and h5py.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dglkge.checkpoint.manager import CheckpointManager, TrainerGroup
    from dglkge.checkpoint.manifest import CheckpointMeta
    from dglkge.checkpoint.reader import open_checkpoint

__all__ = ["CheckpointManager", "CheckpointMeta", "TrainerGroup", "open_checkpoint"]


def __getattr__(name: str) -> Any:
    # PEP 562: a module's __getattr__ is called for names that are not found otherwise.
    if name not in __all__:
        raise AttributeError(f"module 'dglkge.checkpoint' has no attribute {name!r}")
    home = {"CheckpointMeta": "manifest", "open_checkpoint": "reader"}.get(name, "manager")
    return getattr(importlib.import_module(f"dglkge.checkpoint.{home}"), name)
