"""Versioned checkpoints in PyTorch-BigGraph's layout, by original entity ids."""

from __future__ import annotations

from dglkge.checkpoint.manager import CheckpointManager
from dglkge.checkpoint.manifest import CheckpointMeta, check_same_run
from dglkge.checkpoint.reader import Checkpoint, open_checkpoint

__all__ = ["Checkpoint", "CheckpointManager", "CheckpointMeta", "check_same_run", "open_checkpoint"]
