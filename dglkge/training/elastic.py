"""Elastic epochs for any script on DGL's distributed engine: commits, stops, and goes on at another size."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import itertools
import logging
import os
import random
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from dglkge.checkpoint.layout import Progress
from dglkge.checkpoint.manifest import CheckpointMeta, check_same_run
from dglkge.config.schema import CheckpointConfig, Config
from dglkge.distributed.dgl_compat import dgl
from dglkge.distributed.runtime import Cluster
from dglkge.distributed.world import World
from dglkge.errors import InputError, require_known
from dglkge.optim import SparseOptimizer
from dglkge.optim.dgl_tables import key_of, policy_of, range_starts
from dglkge.optim.narrow_rows import NarrowEmbedding
from dglkge.training.cadence import Cadence, falls_on
from dglkge.training.learning_rates import plain_group
from dglkge.training.script import JOB
from dglkge.training.state import TrainingState, new_run, open_checkpoints, progress_at
from dglkge.typing import RELATION, TablePart

logger = logging.getLogger(__name__)

Item = TypeVar("Item")

LOOPS_DONE, ORDER = "loops_done", "order"
"""Fields of a version's progress beside those of :class:`dglkge.checkpoint.layout.Progress`."""

UNITS = ("epochs", "batches", "minutes")


def elastic(
    folder: str | os.PathLike[str],
    embeddings: Sequence[Any] = (),
    optimizer: Any = None,
    objects: Mapping[str, Any] | None = None,
    *,
    every: Mapping[str, float] = MappingProxyType({"epochs": 1}),
    seed: int | None = 0,
    original_ids: Mapping[str, Any] | None = None,
    storage: str = "",
) -> Elastic:
    """Make a script elastic: go on from its last commit, and commit from now on. A collective.

    Call it on every trainer, after ``dgl.distributed.initialize``, ``torch.distributed.init_process_group``
    and the construction of all that is trained, and before the loop over epochs. It fills the embeddings, the
    optimizer's state and the objects from the newest version in the folder. SIGTERM, SIGINT and SIGHUP are
    recorded from then on: at the next batch or epoch all trainers commit and exit with status 143.

    Parameters
    ----------
    folder : path
        For the versions; :func:`dglkge.open_checkpoint` reads the rows.
    embeddings : sequence of dgl.distributed.DistEmbedding
        Those without an optimizer of this call.
    optimizer : SparseOptimizer or sequence of them
        Of ``dglkge.optim``: its embeddings, their state, its hyper-parameters.
    objects : mapping of str to object
        Objects with ``state_dict`` and ``load_state_dict`` (modules, torch optimizers, schedulers), equal on
        all trainers: rank 0's state is saved.
    every : mapping of str to number
        When to commit: after so many ``epochs``, after so many ``batches`` of an epoch's loop, or at the
        first batch so many ``minutes`` after the last commit. The last epoch is committed in any case.
    seed : int or None
        All random generators of Python, numpy, torch and DGL are seeded before each batch as a function of
        seed, epoch, batch and rank, so a restart goes on inside an epoch with the batches that are left.
        None: they are left alone, and a restart begins the open epoch anew, from the rows of the commit.
    original_ids : mapping of str to (N,) tensor or DistTensor, optional
        Original id of each node or edge by the name of its embedding, for instance ``graph.ndata["orig_id"]``
        if the graph had that before it was partitioned. With it the job may go on after the graph was
        partitioned again, for another number of machines.
    storage : str
        URL of a store (``s3://...``) to which every version is copied.

    Returns
    -------
    Elastic
        ``batches(loader)``, ``commit()`` and ``stop_if_asked()``.

    Raises
    ------
    InputError
        For an object or a value that is not allowed.
    CheckpointError
        If the folder has a checkpoint of other tables, or a damaged one.

    Examples
    --------
    ::

        job = dglkge.elastic("run", optimizer=sparse_adagrad, objects={"model": model, "adam": adam})
        for epoch in dglkge.remaining_epochs_until(30):
            for batch in job.batches(loader):
                ...
    """
    several = [] if optimizer is None else [optimizer]
    optimizers = list(optimizer) if isinstance(optimizer, (list, tuple)) else several
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or seed < 0):
        raise InputError(f"elastic: seed is {seed!r}; expected a whole number of at least 0, or None")
    tables = ElasticTables(embeddings, optimizers, original_ids or {})
    settings = _settings_of(every).changed(storage=storage)
    world = World.detect()
    if world.world_size > 1 and (not dist.is_initialized() or "gloo" not in str(dist.get_backend_config())):
        first = "call torch.distributed.init_process_group first, with a backend for tensors on the CPU"
        raise InputError(f"elastic: {first}: gloo, or cpu:gloo,cuda:nccl")
    if world.has_own_disk and not storage:
        raise InputError("elastic: the machines share no disk; give storage=URL, a store that all reach")
    return Elastic(Path(folder), tables, objects or {}, settings, seed)


def _settings_of(intervals: Mapping[str, float]) -> CheckpointConfig:
    """Read the argument of :func:`elastic`."""
    for name, value in intervals.items():
        require_known("unit in every", name, UNITS)
        is_whole = isinstance(value, int) or (name == "minutes" and isinstance(value, float))
        if isinstance(value, bool) or not is_whole or not 0 <= value <= sys.float_info.max:
            raise InputError(f"elastic: every {name} is {value!r}; expected a finite number of at least 0")
    units: dict[str, Any] = {f"every_{name}": intervals.get(name, 0) for name in UNITS}
    return CheckpointConfig(**units)


NO_RELATIONS = TablePart(RELATION, 0, torch.empty(0, dtype=torch.int64), torch.empty(0, 1))
"""The relations of tables without a model."""


class ElasticTables:
    """The embeddings of a script, and the optimizers that update them.

    Parameters
    ----------
    embeddings : sequence of dgl.distributed.DistEmbedding
        Beside those of the optimizers.
    original_ids : mapping of str to (N,) tensor or DistTensor
        Original id of each node or edge by the name of its embedding; rows of the others are saved by the ids
        that they have in this partitioning.

    Attributes
    ----------
    num_parts : int
        Partitions of the graph.
    """

    def __init__(
        self, embeddings: Sequence[Any], optimizers: Sequence[Any], original_ids: Mapping[str, Any]
    ) -> None:
        sparse = "SparseAdagrad, RowAdagrad, SparseAdam and SparseOptimizer of dglkge.optim; a torch one"
        other = "dgl.distributed.DistEmbedding; a module or another object with state_dict"
        for verb, items, kind, allowed in (
            ("optimizer is", optimizers, SparseOptimizer, sparse),
            ("embeddings has", embeddings, dgl.distributed.DistEmbedding, other),
        ):
            for item in items:
                if not isinstance(item, kind):
                    got = f"elastic: {verb} a {type(item).__name__}"
                    raise InputError(f"{got}; allowed: {allowed} belongs into objects")
        self.optimizers = optimizers
        owned = [table.embedding for optimizer in optimizers for table in optimizer.tables]
        by_key = {key_of(embedding): embedding for embedding in [*owned, *embeddings]}
        if not by_key:
            raise InputError("elastic: there is no embedding; give embeddings=[...] or optimizer=...")
        names = [embedding.name for embedding in by_key.values()]
        # The kvstore's key has the node type too; "/" separates folders.
        self._embeddings = {
            embedding.name if names.count(embedding.name) == 1 else key.replace("/", "_"): embedding
            for key, embedding in by_key.items()
        }
        for name in original_ids:
            require_known("embedding in original_ids", name, self._embeddings)
        self._original_ids, self._own_ids = original_ids, dict[str, torch.Tensor]()
        first = policy_of(next(iter(self._embeddings.values())))
        self.num_parts = int(first.partition_book.num_partitions())

    def finish(self) -> None:
        """Wait for the updates of this trainer."""
        for optimizer in self.optimizers:
            optimizer.drain()

    def describe(self) -> CheckpointMeta:
        """Return the description that a version of the checkpoint holds."""
        widths = {name: embedding.embedding_dim for name, embedding in self._embeddings.items()}
        counts = {name: int(embedding.num_embeddings) for name, embedding in self._embeddings.items()}
        ids = dict.fromkeys(counts, f"of {self.num_parts} partitions")
        ids |= dict.fromkeys(self._original_ids, "original")
        dim = next(iter(widths.values()))
        return CheckpointMeta(
            config={"elastic": {"ids": ids}},
            dataset_name=", ".join(counts),
            # Equal tables are all that a resume needs.
            dataset_fingerprint=", ".join(f"{name}: {count} rows" for name, count in counts.items()),
            entity_types=counts,
            relations=[],
            score_function="",
            dim=dim,
            reciprocal=False,
            optimizer={"name": ", ".join(type(optimizer).__name__ for optimizer in self.optimizers)},
            **new_run(1),
            dims={name: width for name, width in widths.items() if width != dim},
        )

    def parts(self) -> list[TablePart]:
        """Return this machine's rows of each embedding, with the optimizer's state; views on its memory."""
        return [self._part(name, embedding) for name, embedding in self._embeddings.items()]

    def _part(self, name: str, embedding: Any) -> TablePart:
        policy = policy_of(embedding)
        # Views on the memory of this machine's servers.
        rows = embedding.weight.local_partition
        if isinstance(embedding, NarrowEmbedding):
            rows = rows.view(embedding.row_dtype)
        if name not in self._own_ids:
            start = int(range_starts(policy)[policy.part_id])
            ids = torch.arange(start, start + len(rows))
            if name in self._original_ids:
                ids = torch.as_tensor(self._original_ids[name][ids], dtype=torch.int64)
            self._own_ids[name] = ids
        state = {
            key: tensor.local_partition
            for optimizer in self.optimizers
            if any(table.embedding is embedding for table in optimizer.tables)
            for key, tensor in optimizer.state_tensors(embedding).items()
        }
        return TablePart(name, int(policy.part_id), self._own_ids[name], rows, state)


class OptimizerState:
    """What an optimizer keeps beside rows, with torch's methods: hyper-parameters and numbers of steps."""

    def __init__(self, optimizer: SparseOptimizer) -> None:
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        groups = list(map(plain_group, self._optimizer.param_groups))
        steps = [table.num_steps for table in self._optimizer.tables]
        return {"param_groups": groups, "num_steps": steps, "num_started": self._optimizer.num_started}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; the optimizer has the same groups and embeddings."""
        for group, saved in zip(self._optimizer.param_groups, state["param_groups"], strict=True):
            group.update(saved)
        for table, num_steps in zip(self._optimizer.tables, state["num_steps"], strict=True):
            table.num_steps = num_steps
        self._optimizer.num_started = state["num_started"]


class Elastic(contextlib.AbstractContextManager["Elastic"]):
    """A script's job, made by :func:`elastic`; as a context manager it commits what is left at its end."""

    def __init__(
        self, folder: Path, tables: ElasticTables, objects: Any, settings: CheckpointConfig, seed: int | None
    ) -> None:
        # Its group is the script's own. The graph is not needed.
        self._cluster = cluster = Cluster(World.detect(), None)
        self._tables, self._seed, self._resources = tables, seed, contextlib.ExitStack()
        self._cadence = Cadence(Config().changed(checkpoint=settings), cluster)
        states = {f"optimizer {n}": OptimizerState(item) for n, item in enumerate(tables.optimizers)}
        self._state = TrainingState(states, door="elastic: objects")
        for name, item in objects.items():
            self._state.register(name, item)
        self._meta = tables.describe()
        # Epoch, batch loops of it that are over, and batches done in the next one.
        self._place = (0, 0, 0)
        self._num_loops = self._ended = 0
        self._committed: tuple[int, int, int] | None = None
        atexit.register(self._end_of_process)  # runs before DGL's own handler, which waits for all trainers
        try:
            options: Any = (settings, cluster, self._check_same, {}, tables.num_parts)
            self._checkpoints = open_checkpoints(folder, *options)
            self._restore()
        except BaseException:
            self.close()
            raise
        self._resources.enter_context(cluster.stop.listening())
        JOB.when_finished(self._end_epoch)

    def _check_same(self, saved: CheckpointMeta, where: str = "") -> None:
        """Refuse a version of other tables or optimizers, or of ids that mean other nodes here."""
        check_same_run(saved, self._meta)
        if saved.optimizer != self._meta.optimizer:
            problem = f"elastic: the checkpoint is of {saved.optimizer}, this job has {self._meta.optimizer}"
            raise InputError(f"{problem}; take another folder, or the same optimizers")
        before, now = saved.config["elastic"]["ids"], self._meta.config["elastic"]["ids"]
        for name in now:
            if before[name] != now[name]:
                problem = f"elastic: the checkpoint has the rows of {name!r} by ids {before[name]}"
                remedy = "to go on with other partitions give original_ids from the first commit on"
                raise InputError(f"{problem}, this job by ids {now[name]}; {remedy}")

    def _restore(self) -> None:
        """Fill everything from the newest version, if there is one; a collective."""
        cluster, saved = self._cluster, self._checkpoints.latest()
        self._tables.finish()
        cluster.barrier()  # all trainers have written their initial rows
        finished = 0
        if saved is not None:
            cluster.agree(lambda: self._check_same(saved))
            cluster.agree(self._fill, self._checkpoints.num_bytes())
            finished = saved.progress[Progress.FINISHED_EPOCHS]
            loops, batches = saved.progress[LOOPS_DONE], saved.progress[Progress.BATCHES_DONE]
            if (loops or batches) and (saved.progress[ORDER] != self._order or self._seed is None):
                text = "the seed is None" if self._seed is None else "seed or number of trainers have changed"
                logger.warning("epoch %d, which was open, begins anew: %s", finished, text)
                loops = batches = 0
            self._place = self._committed = (finished, loops, batches)
            within = f", at batch {batches} of its loop {loops + 1}" if loops or batches else ""
            if cluster.world.rank == 0:
                logger.info("resumed: %d epochs are finished%s", finished, within)
        self._ended = finished
        JOB.restore(finished)

    def _fill(self) -> None:
        """Read this machine's rows, on one trainer of it, and the state, on every trainer."""
        if self._cluster.world.is_machine_leader:
            self._checkpoints.restore(self._tables.parts())
        self._state.load(self._checkpoints.read_state(), str(self._checkpoints.storage.path))

    @property
    def _order(self) -> int:
        """A number for what the order of batches depends on beside the epoch; 0: it is unknown."""
        known = f"{self._seed} {self._cluster.world.world_size}"
        return 0 if self._seed is None else zlib.crc32(known.encode()) | 1

    def batches(self, loader: Iterable[Item]) -> Iterator[Item]:
        """Yield the batches of a loader that the open epoch has left; a collective between batches.

        A batch counts as done when the loop requests the next one. The loader must give every trainer equally
        many batches, in an order that follows from the random generators, or from ``set_epoch`` of the loader
        or its sampler. Batches that were done before a restart are drawn again and dropped. An epoch may have
        several loops over batches.

        Raises
        ------
        RuntimeError
            Outside of ``for epoch in dglkge.remaining_epochs_until(n)``.
        Preempted
            On all trainers, after the commit, if one of them received a signal to stop.
        """
        epoch = JOB.require_current()
        self._end_epoch()  # that before, if it was left by `break`
        number, self._num_loops = self._num_loops, self._num_loops + 1
        _, loops_done, batches_done = self._place
        if number < loops_done:
            return
        if number > loops_done:  # the loop before was left by `break`
            self._place, batches_done = (epoch, number, 0), 0
        self._seed_for(epoch, number, -1)
        for source in (loader, getattr(loader, "sampler", None)):
            if callable(getattr(source, "set_epoch", None)):
                source.set_epoch(epoch)  # type: ignore[union-attr]
        self.stop_if_asked()
        batches, nothing = iter(loader), object()
        for index in itertools.count(1):
            self._seed_for(epoch, number, index - 1)
            batch: Any = next(batches, nothing)
            if batch is nothing:
                break
            if index <= batches_done:
                continue
            yield batch
            self._place = epoch, number, index
            must_stop, must_commit = self._cadence.after_batch(index)
            if must_stop:
                self._stop()
            if must_commit:
                self.commit()
        self._place = epoch, number + 1, 0

    def _seed_for(self, epoch: int, loop: int, index: int) -> None:
        """Seed every random generator for what comes next."""
        if self._seed is None:
            return
        key = [self._seed, epoch, loop, index + 1, self._cluster.world.rank]
        number = int(np.random.SeedSequence(key).generate_state(1)[0]) >> 1  # DGL takes 31 bits
        random.seed(number)
        np.random.seed(number)  # noqa: NPY002  what scripts of DGL use
        torch.manual_seed(number)
        dgl.seed(number)

    def stop_if_asked(self) -> None:
        """Commit and stop if one of the trainers received a signal; a collective, for long code of your own.

        Raises
        ------
        Preempted
            On every trainer, after the commit.
        """
        if self._cluster.must_stop():
            self._stop()

    def _stop(self) -> None:
        self.commit()
        JOB.preempt(self._place[0], self._place[-1], self._cluster.world.rank == 0)

    def _end_epoch(self) -> None:
        """Commit after a finished epoch at the cadence, and stop if asked; once an epoch, a collective."""
        done = JOB.finished
        if self._ended >= done:
            return
        self._ended = done
        self._place, self._num_loops = (done, 0, 0), 0
        if done >= JOB.goal or falls_on(self._cadence.settings.every_epochs, done):
            self.commit()
        self.stop_if_asked()

    def commit(self) -> None:
        """Write a version, unless one was written at this place; a collective. It is published on return.

        Places are epochs, and batches of :meth:`batches`.
        """
        if self._place == self._committed:
            return
        self._tables.finish()
        self._cluster.barrier()  # all updates are in the tables
        finished, loops, batches = self._place
        progress = {**progress_at(finished, batches, 1), LOOPS_DONE: loops, ORDER: self._order}
        meta = dataclasses.replace(self._meta, progress=progress)
        parts = self._tables.parts() if self._cluster.world.is_machine_leader else []
        self._checkpoints.save(parts, NO_RELATIONS, meta, state=self._state.to_bytes())
        self._committed = self._place
        self._cadence.committed()

    def close(self) -> None:
        """Release the folder and restore the signal handlers."""
        atexit.unregister(self._end_of_process)
        self._resources.close()
        self._cluster.end()

    def _end_of_process(self) -> None:
        """Close, and ignore signals from now on: DGL's shutdown is a barrier of all trainers."""
        self.close()
        if self._cluster.world.launched:
            self._cluster.stop.ignore_from_now_on()

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        if kind is None:
            self._end_epoch()
        self.close()
