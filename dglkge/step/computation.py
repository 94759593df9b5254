"""How an objective computes: where, in which numbers, and by which of two codes."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from dglkge.model.device import HOST, ComputeDevice
from dglkge.step.clock import PhaseClock


@dataclass(frozen=True)
class Computation:
    """How an objective computes.

    Attributes
    ----------
    device : ComputeDevice
        Device of the rows.
    matmul_dtype : torch.dtype
        Type of the matmuls that score negatives and candidates, ``torch.float32`` or ``torch.bfloat16``.
        Queries and the scores of true answers are float32 in any case.
    is_reference : bool
        Compute by plain torch and numpy: no compiled loop, no gradient that is written by hand.
    is_compiled : bool
        Compile scores and losses by ``torch.compile``.
    clock : PhaseClock
    """

    device: ComputeDevice = HOST
    matmul_dtype: torch.dtype = torch.float32
    is_reference: bool = False
    is_compiled: bool = False
    clock: PhaseClock = field(default_factory=PhaseClock)
