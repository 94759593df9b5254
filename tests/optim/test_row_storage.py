"""Rows that are written through the kvstore, with servers that answer late or never."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dglkge.optim.dgl_tables import fetch, local_array, state_array, write_back


class LateTensor:
    """A distributed tensor whose servers show a write only after some reads."""

    def __init__(self, rows: torch.Tensor, num_stale_reads: int) -> None:
        self.rows, self.dtype, self.name = rows, rows.dtype, "late"
        self.kvstore, self.kvstore_key, self.data_store = self, "late", {"late": rows}
        self.num_stale_reads, self.pending = num_stale_reads, []

    def __getitem__(self, ids: torch.Tensor) -> torch.Tensor:
        self.num_stale_reads -= 1
        if self.num_stale_reads < 0:
            for rows, values in self.pending:
                self.rows[rows] = values
        return self.rows[ids]

    def __setitem__(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        self.pending.append((ids, rows))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_write_is_over_when_it_can_be_read(dtype: torch.dtype) -> None:
    """Stale answers are asked again; NaN equals itself; 16-bit rows are rounded."""
    tensor = LateTensor(torch.zeros(5, 2, dtype=dtype), 4)
    rows = np.array([[1.001, 2], [np.nan, 4]], np.float32)
    write_back([tensor], np.array([3, 1]), [rows], 10.0)
    expected = torch.from_numpy(rows).to(dtype)
    torch.testing.assert_close(tensor.rows[[3, 1]], expected, rtol=0, atol=0, equal_nan=True)
    fetched = fetch([tensor], np.array([3]))[0]
    assert fetched.dtype == (np.float64 if dtype == torch.float64 else np.float32)
    fetched += 1
    torch.testing.assert_close(tensor.rows[3], expected[0], rtol=0, atol=0)  # fetch copies
    tensor = LateTensor(torch.zeros(5, 2, dtype=dtype), 10**9)
    with pytest.raises(TimeoutError, match="the servers did not take 1 rows of 'late' within 0.05 s"):
        write_back([tensor], np.array([2]), [np.ones((1, 2), np.float32)], 0.05)


def test_which_rows_can_be_written_in_place() -> None:
    """32 and 64 bits in shared memory; a state tensor that is not there is an error."""
    wide, narrow = LateTensor(torch.zeros(3, 2), 0), LateTensor(torch.zeros(3, 2).half(), 0)
    local_array(wide)[1] = 5
    assert wide.rows[1].tolist() == [5, 5]
    assert local_array(narrow) is None
    wide.data_store.clear()
    assert local_array(wide) is None
    with pytest.raises(RuntimeError, match="the rows of 'late' are not in this machine's shared memory"):
        state_array(wide)
