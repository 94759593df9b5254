"""Which machine holds a row, and which trainer updates it.

A machine is a partition id. DGL gives partition k one contiguous range of the ids of every node or edge type,
so a table is described by the boundaries of those ranges; which trainer runs on which machine is learnt from
the trainers themselves, never derived from their ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def range_starts(policy: Any) -> np.ndarray:
    """First id of each partition, then the number of ids: "(num_parts + 1,) int64".

    Found by bisection on ``policy.to_partid``, the only public way that does not list all ids.

    Parameters
    ----------
    policy : dgl.distributed.PartitionPolicy
        Policy of a distributed tensor.
    """
    num_parts = policy.partition_book.num_partitions()
    num_ids = policy.get_size()
    parts = torch.arange(1, num_parts)
    low = torch.zeros(num_parts - 1, dtype=torch.int64)
    high = torch.full((num_parts - 1,), num_ids, dtype=torch.int64)
    while bool((low < high).any()):
        middle = (low + high) // 2
        reached = torch.as_tensor(policy.to_partid(middle.clamp(max=num_ids - 1))) >= parts
        open_ = low < high
        high = torch.where(open_ & reached, middle, high)
        low = torch.where(open_ & ~reached, middle + 1, low)
    return np.concatenate([[0], low.numpy(), [num_ids]]).astype(np.int64)


def ranks_by_machine(part_ids: Sequence[int], num_parts: int) -> list[np.ndarray]:
    """Ranks of the trainers on each machine, from the partition id that each rank reported.

    Raises
    ------
    ValueError
        A machine has no trainer (DGL cannot place distributed tensors there either).

    Examples
    --------
    >>> [ranks.tolist() for ranks in ranks_by_machine([1, 0, 1], 2)]
    [[1], [0, 2]]
    """
    reported = np.asarray(part_ids)
    machines = [np.flatnonzero(reported == part) for part in range(num_parts)]
    empty = [part for part, ranks in enumerate(machines) if len(ranks) == 0]
    if empty:
        raise ValueError(f"no trainer runs on the machines of partitions {empty}: every machine needs one")
    return machines


def owner_ranks(ids: np.ndarray, starts: np.ndarray, machines: Sequence[np.ndarray]) -> np.ndarray:
    """Rank of the trainer that updates each row when rows travel over the network.

    It is a trainer of the row's machine, chosen by the row's place in that machine's range.

    Parameters
    ----------
    ids : np.ndarray
        "(n,) int64" ids.
    starts : np.ndarray
        "(num_parts + 1,) int64" boundaries of the machines' ranges.
    machines : sequence of np.ndarray
        Ranks on each machine, none empty.

    Returns
    -------
    np.ndarray
        "(n,) int32".

    Examples
    --------
    >>> machines = [np.array([0, 2]), np.array([1])]
    >>> owner_ranks(np.array([0, 1, 2, 5, 6]), np.array([0, 5, 9]), machines).tolist()
    [0, 2, 0, 1, 1]
    """
    owners = np.empty(len(ids), np.int32)
    for part, ranks in enumerate(machines):
        here: Any = slice(None)
        if len(machines) > 1:
            here = np.flatnonzero((ids >= starts[part]) & (ids < starts[part + 1]))
        owners[here] = ranks[(ids[here] - starts[part]) % len(ranks)]
    return owners
