"""Embeddings of any script as tables of a checkpoint: rows and optimizer state by original id."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dglkge import __version__
from dglkge.checkpoint.layout import Progress
from dglkge.checkpoint.manifest import CheckpointMeta
from dglkge.distributed.dgl_compat import dgl
from dglkge.errors import InputError, require_known
from dglkge.optim import SparseOptimizer
from dglkge.optim.dgl_tables import key_of, policy_of, range_starts
from dglkge.optim.narrow_rows import NarrowEmbedding
from dglkge.typing import RELATION, TablePart

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
    """

    def __init__(
        self,
        embeddings: Sequence[Any],
        optimizers: Sequence[SparseOptimizer],
        original_ids: Mapping[str, Any],
    ) -> None:
        for optimizer in optimizers:
            if not isinstance(optimizer, SparseOptimizer):
                raise InputError(
                    f"elastic: optimizer is a {type(optimizer).__name__}; allowed: SparseAdagrad, "
                    "RowAdagrad, SparseAdam and SparseOptimizer of dglkge.optim; a torch optimizer belongs "
                    "into objects"
                )
        for embedding in embeddings:
            if not isinstance(embedding, dgl.distributed.DistEmbedding):
                kind = type(embedding).__name__
                raise InputError(
                    f"elastic: embeddings has a {kind}; allowed: dgl.distributed.DistEmbedding; a module or "
                    "another object with state_dict belongs into objects"
                )
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
        self._original_ids = dict(original_ids)
        self._own_ids: dict[str, torch.Tensor] = {}

    @property
    def num_parts(self) -> int:
        """Partitions of the graph."""
        first = next(iter(self._embeddings.values()))
        return int(policy_of(first).partition_book.num_partitions())

    def finish(self) -> None:
        """Wait for the updates of this trainer."""
        for optimizer in self.optimizers:
            optimizer.drain()

    def describe(self) -> CheckpointMeta:
        """Return the description that a version of the checkpoint holds."""
        widths = {name: embedding.embedding_dim for name, embedding in self._embeddings.items()}
        counts = {name: int(embedding.num_embeddings) for name, embedding in self._embeddings.items()}
        ids = {
            name: "original" if name in self._original_ids else f"of {self.num_parts} partitions"
            for name in counts
        }
        dim = next(iter(widths.values()))
        return CheckpointMeta(
            config={"elastic": {"ids": ids}},
            dataset_name=", ".join(counts),
            dataset_path="",
            # Equal tables are all that a resume needs.
            dataset_fingerprint=", ".join(f"{name}: {count} rows" for name, count in counts.items()),
            entity_types=counts,
            relations=[],
            progress={Progress.FINISHED_EPOCHS: 0, Progress.BATCHES_DONE: 0, Progress.GLOBAL_BATCH_SIZE: 1},
            seed=0,
            score_function="",
            dim=dim,
            reciprocal=False,
            optimizer={"name": ", ".join(type(optimizer).__name__ for optimizer in self.optimizers)},
            versions={"dglkge": __version__, "dgl": dgl.__version__, "torch": torch.__version__},
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
        groups = [
            {name: value for name, value in group.items() if name != "params"}
            for group in self._optimizer.param_groups
        ]
        steps = [table.num_steps for table in self._optimizer.tables]
        return {"param_groups": groups, "num_steps": steps, "num_started": self._optimizer.num_started}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; the optimizer has the same groups and embeddings."""
        for group, saved in zip(self._optimizer.param_groups, state["param_groups"], strict=True):
            group.update(saved)
        for table, num_steps in zip(self._optimizer.tables, state["num_steps"], strict=True):
            table.num_steps = num_steps
        self._optimizer.num_started = state["num_started"]
