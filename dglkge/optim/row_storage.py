"""Rows of a table and of its optimizer state: in the machine's shared memory, or else through the kvstore."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

#: Types in which rows are updated in place; others are fetched, updated in float32 and written back.
IN_PLACE_DTYPES = (torch.float32, torch.float64)


def local_array(tensor: Any) -> np.ndarray | None:
    """This machine's rows of a ``DistTensor`` as an array that can be written in place.

    Parameters
    ----------
    tensor : dgl.distributed.DistTensor
        A distributed tensor.

    Returns
    -------
    np.ndarray or None
        "(n, ...)", or None where the servers share no memory with this process or the type is no float of 32
        or 64 bits.
    """
    rows = tensor.kvstore.data_store.get(tensor.kvstore_key)
    if rows is None or rows.dtype not in IN_PLACE_DTYPES:
        return None
    return rows.numpy()


def state_array(tensor: Any) -> np.ndarray:
    """This machine's rows of a state tensor, which DGL always keeps in shared memory.

    Raises
    ------
    RuntimeError
        They are not there.
    """
    array = local_array(tensor)
    if array is None:
        raise RuntimeError(f"the rows of {tensor.name!r} are not in this machine's shared memory")
    return array


def fetch(tensors: Sequence[Any], ids: np.ndarray) -> list[np.ndarray]:
    """Copies of the given rows of some distributed tensors, float32 where they are narrower."""
    wanted = torch.from_numpy(ids)
    fetched = [tensor[wanted] for tensor in tensors]
    return [(rows if rows.dtype in IN_PLACE_DTYPES else rows.float()).numpy().copy() for rows in fetched]


def write_back(
    tensors: Sequence[Any], ids: np.ndarray, rows: Sequence[np.ndarray], timeout_seconds: float | None
) -> None:
    """Write rows through the kvstore and wait until they can be read again.

    DGL acknowledges no push, and of several servers on a machine any may answer the next pull; as each row
    has one owner, reading back what was written shows that the servers are done. Where rows have several
    writers (Hogwild), what is read back may be another's: there nobody waits.

    Parameters
    ----------
    tensors : sequence of DistTensor
        Where to write.
    ids : np.ndarray
        "(n,) int64" ids of the rows.
    rows : sequence of np.ndarray
        "(n, ...)" for each tensor.
    timeout_seconds : float, optional
        Limit of waiting; None: do not wait.

    Raises
    ------
    TimeoutError
        The rows cannot be read back in time.
    """
    wanted = torch.from_numpy(ids)
    deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    for tensor, new_rows in zip(tensors, rows):
        value = torch.from_numpy(new_rows).to(tensor.dtype)
        tensor[wanted] = value
        while deadline is not None and not torch.allclose(
            tensor[wanted], value, rtol=0, atol=0, equal_nan=True
        ):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"optimizer step: the servers did not take {len(ids)} rows of {tensor.name!r} "
                    f"within {timeout_seconds:g} s"
                )
