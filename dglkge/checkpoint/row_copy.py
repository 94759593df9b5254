"""A consistent copy of live rows, written to the disk while training changes the rows themselves."""

from __future__ import annotations

import torch

from dglkge.typing import TablePart


class RowCopy:
    """Copies parts into memory that is used again for the next copy.

    It holds the rows and the optimizer's state of one machine once, from the first copy to the end of the
    run: 8·n·D bytes for n rows of D float32 with element-wise Adagrad.
    """

    def __init__(self) -> None:
        self._memory: dict[tuple[str, int, str], torch.Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """Memory that the copies take."""
        return sum(values.numel() * values.element_size() for values in self._memory.values())

    def of(self, part: TablePart) -> TablePart:
        """Return a copy of a part; the copy made before of the same part is overwritten."""
        state = {name: self._copy(part, f"state {name}", values) for name, values in part.state.items()}
        rows = self._copy(part, "rows", part.rows)
        return TablePart(part.table, part.part, part.original_ids, rows, state)

    def _copy(self, part: TablePart, name: str, values: torch.Tensor) -> torch.Tensor:
        values = values.detach()
        key = (part.table, part.part, name)
        memory = self._memory.get(key)
        if memory is None or memory.shape != values.shape or memory.dtype != values.dtype:
            memory = self._memory[key] = torch.empty(values.shape, dtype=values.dtype)
        return memory.copy_(values)
