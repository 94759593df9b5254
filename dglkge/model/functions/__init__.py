"""Score functions by family, with comparators and operators; ``model.score_functions`` registers them.

Files that declare components take torch and numba from here: they are imported when they are used first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dglkge.registry import deferred

__all__ = ["Tensor", "autograd_functions", "functional", "hashing", "torch"]

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn import functional

    from dglkge.kernels import hashing
    from dglkge.model.functions import autograd as autograd_functions
else:
    torch, functional, Tensor = deferred("torch"), deferred("torch.nn.functional"), Any
    autograd_functions = deferred("dglkge.model.functions.autograd")
    hashing = deferred("dglkge.kernels.hashing")  # numba takes a fifth of a second
