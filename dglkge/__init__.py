"""dglkge: knowledge-graph embeddings trained on DGL's own distributed engine.

The names below are what a training script needs. They are imported when they are first used, so that
``from dglkge.optim import SparseAdagrad`` in another project loads nothing but the optimizers. Import dglkge
before DGL: it lets ``import dgl`` work with any torch (``dglkge/distributed/dgl_import.py``).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dglkge.distributed import dgl_import

__version__ = "1.0.0"

if TYPE_CHECKING:
    from dglkge.checkpoint.reader import open_checkpoint as open_checkpoint
    from dglkge.cli.common import run_command as run_command
    from dglkge.config import load_config as load_config
    from dglkge.errors import InputError as InputError
    from dglkge.errors import JobError as JobError
    from dglkge.evaluation.metrics import format_table as format_table
    from dglkge.inference.run import open_run as open_run
    from dglkge.train_job import train as train
    from dglkge.training.elastic import elastic as elastic
    from dglkge.training.script import current_epoch as current_epoch
    from dglkge.training.script import finished_epochs as finished_epochs
    from dglkge.training.script import join_cluster as join_cluster
    from dglkge.training.script import remaining_epochs_until as remaining_epochs_until
    from dglkge.training.trainer import build_trainer as build_trainer

_HOME = {
    "InputError": "dglkge.errors",
    "JobError": "dglkge.errors",
    "build_trainer": "dglkge.training.trainer",
    "current_epoch": "dglkge.training.script",
    "elastic": "dglkge.training.elastic",
    "finished_epochs": "dglkge.training.script",
    "format_table": "dglkge.evaluation.metrics",
    "join_cluster": "dglkge.training.script",
    "load_config": "dglkge.config",
    "open_checkpoint": "dglkge.checkpoint.reader",
    "open_run": "dglkge.inference.run",
    "remaining_epochs_until": "dglkge.training.script",
    "run_command": "dglkge.cli.common",
    "train": "dglkge.train_job",
}

__all__ = [*_HOME]

dgl_import.install()


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'dglkge' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
