"""Starting a new run with the rows of another: ``checkpoint.init_path``."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from dglkge.checkpoint import conversion
from dglkge.checkpoint.manifest import MODEL_FIELDS, CheckpointMeta
from dglkge.checkpoint.reader import Checkpoint, open_checkpoint
from dglkge.checkpoint.storage import check_files
from dglkge.config import Config
from dglkge.data.vocabulary import Vocabulary
from dglkge.errors import CheckpointError, InputError
from dglkge.kernels.rules import limit_norms
from dglkge.step.dense_parameters import DenseParameters
from dglkge.training.job import Job
from dglkge.typing import RELATION

logger = logging.getLogger(__name__)

ROWS_A_BLOCK = 65536
"""Rows that are changed at a time, where they have to be copied."""


def limit_rows(rows: torch.Tensor, max_norm: float) -> None:
    """Scale rows that are longer than ``max_norm`` to that length; 16 bits are rounded to the nearest."""
    for block in rows.split(ROWS_A_BLOCK):
        wide = block.float()  # the same memory where it is float32
        limit_norms(wide.numpy(), max_norm)
        if wide.dtype != block.dtype:
            block.copy_(wide)


def warm_start(job: Job, meta: CheckpointMeta, names: Mapping[str, Vocabulary]) -> None:
    """Fill the tables of a new run from another checkpoint, where one is configured; a collective.

    Entities, relations and entity types are matched by name; two types without another on their side are the
    same. Rows that the checkpoint has keep their values and their optimizer state; the others stay as they
    were initialised. So do the rows of times, which are matched by name. The numbers are logged.

    Parameters
    ----------
    job : Job
        Its dense parameters take the checkpoint's values, on every trainer, and their optimizer the state of
        an equal one. Global vectors take Adagrad's sums.
    meta : CheckpointMeta
        Of the new run.
    names : mapping of str to Vocabulary
        The run's entities by type, on the trainers that lead a machine.
    """
    config, cluster, dense = job.config, job.cluster, job.dense
    path = config.checkpoint.init_path
    if not path:
        return
    checkpoint = open_checkpoint(path)
    # Only the texts here: take_over checks the rows as it reads them, so large files are read once.
    check_files(checkpoint.folder, checkpoint.manifest.all_texts.values())
    # The data set may be another one: rows are matched by name.
    # So are the rows of times, of which a run may have others.
    num_times = {name: value for name, value in meta.score_options.items() if name == "num_times"}
    options = {**checkpoint.meta.score_options, **num_times}
    if differs := replace(checkpoint.meta, score_options=options).difference(meta, (*MODEL_FIELDS, "dims")):
        raise CheckpointError(f"{checkpoint.path} has {differs}: its rows cannot be taken over")
    keeps = _keeps_projections(config, checkpoint)
    times = conversion.saved_times(checkpoint, meta)
    if dense is not None:
        with dense.whole():
            untrained = {} if job.features is None else dict(job.features.projections.named_parameters())
            projections = checkpoint.feature_parameters() if keeps else untrained
            values, live = checkpoint.dense_parameters(), dict(dense.module.named_parameters())
            if times is not None:
                values = {name: conversion.at_times(times, values[name], live[name]) for name in values}
            dense.take({**projections, **values}, str(checkpoint.path))
        _take_dense_state(job, dense, checkpoint, times)
    types = conversion.saved_types(checkpoint.entity_types, list(meta.entity_types))
    relation_ids = conversion.saved_relation_ids(checkpoint, meta, types)
    for relation, operator, id_ in zip(meta.relations, meta.operators, relation_ids.tolist()):
        if id_ >= 0 and checkpoint.meta.operators[id_] != operator:
            other = f"the operator {checkpoint.meta.operators[id_]} for the relation {relation.name!r}"
            problem = f"{checkpoint.path} has {other}, this run has {operator}"
            raise CheckpointError(f"{problem}: its rows cannot be taken over")
    if job.global_vectors is not None:
        with checkpoint.open_model() as file:
            job.global_vectors.take_sums(file, types)
    num_taken = np.zeros(len(meta.entity_types) + 1, dtype=np.int64)
    if cluster.world.is_machine_leader:
        for place, part in enumerate(job.own_parts()):
            saved, saved_ids = types.get(part.table, RELATION), relation_ids
            if part.table != RELATION:
                saved_ids = conversion.saved_entity_ids(checkpoint, saved, names[part.table])
            num_taken[place] = conversion.take_over(checkpoint, part, saved_ids, saved, keeps)
            if config.model.max_norm and part.table != RELATION:
                limit_rows(part.rows, config.model.max_norm)
    cluster.barrier(sum(entry.size_bytes for entry in checkpoint.manifest.files))
    # The sum is also a barrier: no trainer starts before all rows are there.
    num_taken = cluster.sum(num_taken)
    if cluster.world.rank == 0:
        counts = {**meta.entity_types, RELATION: len(meta.relations)}
        for (table, count), old in zip(counts.items(), num_taken.tolist()):
            logger.info("warm start from %s: %s: %d rows taken over, %d new", path, table, old, count - old)


def _take_dense_state(
    job: Job, dense: DenseParameters, checkpoint: Checkpoint, times: np.ndarray | None
) -> None:
    """Take the state of dense parameters, if optimizer and options are those of the checkpoint."""

    def at_times(saved: Any) -> Any:
        if times is None or not saved.shape:
            return saved
        values = torch.from_numpy(saved[()])
        return conversion.at_times(times, values, values.new_zeros(len(times), *values.shape[1:]))

    now = job.config.dense.optimizer.model_dump(mode="json")
    saved = (checkpoint.config.get("dense") or {}).get("optimizer")
    if saved == now:
        with checkpoint.open_model() as file:
            dense.take_state(file, at_times)
    elif job.world.rank == 0:
        reason = f"dense.optimizer is {now}, and {saved} in {checkpoint.path}"
        logger.info("warm start: the state of dense parameters starts anew: %s", reason)


def _keeps_projections(config: Config, checkpoint: Checkpoint) -> bool:
    """Return whether a run goes on with the projections of features of a checkpoint."""
    settings = config.features
    if settings is None:
        return False  # the new run starts with the rows as they were scored
    if not checkpoint.feature_parameters():
        if settings.use == "alone":
            problem = f"features.use is alone and checkpoint.init_path is {config.checkpoint.init_path}"
            raise InputError(f"{problem}, which has trained rows and no features; allowed: added")
        return False
    saved, now = checkpoint.config.get("features") or {}, settings.model_dump(mode="json")
    for name in ("use", "mlp"):
        if name in saved and saved[name] != now[name]:
            there = f"{saved[name]!r} in the checkpoint of checkpoint.init_path {config.checkpoint.init_path}"
            raise InputError(f"features.{name} is {now[name]!r}, and {there}; allowed: the same")
    return True
