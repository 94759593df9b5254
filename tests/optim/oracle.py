"""The optimizers written out in float64 on dense tensors, and the random batches that all tests share."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from dglkge import optim

NUM_ROWS = 50
EVERYTHING = torch.arange(NUM_ROWS)  # ids of the rows of a table in standalone mode


@dataclass
class Case:
    """An optimizer with its arguments; the oracle understands ``options`` and ``max_norm`` too."""

    label: str
    optimizer: str
    lr: float = 0.1
    options: dict[str, Any] = field(default_factory=dict)
    transport: dict[str, Any] = field(default_factory=dict)
    max_norm: float = math.inf

    def optimizer_of(self, tables: list[Any], **more: Any) -> Any:
        make = getattr(optim, self.optimizer)
        optimizer = make(tables, lr=self.lr, timeout_seconds=60, **self.options, **self.transport, **more)
        for table in tables:
            optimizer.limit_norms(table, self.max_norm)
        return optimizer


BFLOAT16, FLOAT16, OVERLAP = {"wire_dtype": torch.bfloat16}, {"wire_dtype": torch.float16}, {"overlap": True}
CLIPPED = {"max_row_norm": 1.5, "weight_decay": 0.02, "eps": 1e-3}
MEAN_OF_ROWS = {"row_wise": True, "duplicates": "mean", "max_row_norm": 1.0, "weight_decay": 0.01}
DECOUPLED = {"weight_decay": 0.5, "decoupled_weight_decay": True}

#: Every option of every optimizer at least once.
CASES = [
    Case("adagrad", "SparseAdagrad"),
    Case("adagrad_mean_bfloat16", "SparseAdagrad", options={"duplicates": "mean"}, transport=BFLOAT16),
    Case("adagrad_clip_decay_overlap", "SparseAdagrad", options=CLIPPED, transport=OVERLAP),
    Case("adagrad_limited", "SparseAdagrad", lr=0.3, max_norm=0.75),
    Case("row_adagrad", "RowAdagrad"),
    Case("row_adagrad_float16", "RowAdagrad", transport=FLOAT16),
    Case("adam", "SparseAdam", lr=0.01),
    Case("adam_global", "SparseAdam", lr=0.01, options={"bias_correction": "global", "betas": (0.8, 0.95)}),
    Case("adam_row_wise_mean_clip_decay", "SparseAdam", lr=0.01, options=MEAN_OF_ROWS),
    Case("adam_decoupled_decay", "SparseAdam", lr=0.01, options=DECOUPLED),
]


def batch(step: int, num_rows: int, dim: int, num_ids: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids with duplicates and a hub, and multiples of 1/8, sums of which are exact on any wire."""
    generator = torch.Generator().manual_seed(1000 * dim + step)
    ids = torch.randint(num_rows, (num_ids,), generator=generator)
    ids[:6] = num_rows // 2
    gradients = torch.randint(-8, 9, (num_ids, dim), generator=generator) / 8
    return ids, gradients


def share(step: int, rank: int, world_size: int, num_ids: int = 40) -> torch.Tensor:
    """Places of a trainer in a batch: uneven, and every fifth step nothing for the last trainer."""
    generator = torch.Generator().manual_seed(7 + step)
    readers = torch.randint(world_size, (num_ids,), generator=generator)
    if step % 5 == 0:
        readers[readers == world_size - 1] = 0
    return torch.nonzero(readers == rank).flatten()


class Oracle:
    """One table under an update rule, in float64."""

    def __init__(self, case: Case, num_rows: int, dim: int) -> None:
        self.case, self.options = case, case.options
        self.rows = start_rows(num_rows, dim).double()
        wide, narrow = torch.zeros(num_rows, dim).double(), torch.zeros(num_rows).double()
        if case.optimizer == "SparseAdam":
            power = narrow.clone() if self.options.get("row_wise") else wide.clone()
            self.state = {"step": narrow.clone(), "mem": wide.clone(), "power": power}
        else:
            self.state = {"sum": narrow if case.optimizer == "RowAdagrad" else wide}
        self.num_steps = 0

    def step(self, ids: torch.Tensor, gradients: torch.Tensor) -> None:
        """Apply the gradients of a whole global batch."""
        if len(ids) == 0:
            return
        self.num_steps += 1
        touched, inverse, counts = ids.unique(return_inverse=True, return_counts=True)
        merged = torch.zeros(len(touched), gradients.shape[1]).double()
        merged.index_add_(0, inverse, gradients.double())
        if self.options.get("duplicates") == "mean":
            merged = merged / counts[:, None]
        limit = self.options.get("max_row_norm")
        if limit is not None:
            norms = merged.norm(dim=1, keepdim=True)
            merged = torch.where(norms > limit, merged * (limit / norms.clamp(min=1e-30)), merged)
        if self.options.get("decoupled_weight_decay"):
            self.rows[touched] *= 1 - self.case.lr * self.options["weight_decay"]
        else:
            merged = merged + self.options.get("weight_decay", 0.0) * self.rows[touched]
        getattr(self, self.case.optimizer)(touched, merged)
        lengths = self.rows[touched].norm(dim=1, keepdim=True).clamp(min=1e-30)
        self.rows[touched] *= (self.case.max_norm / lengths).clamp(max=1)

    def SparseAdagrad(self, touched: torch.Tensor, gradient: torch.Tensor) -> None:
        total = self.state["sum"]
        total[touched] += gradient**2 if total.ndim == 2 else (gradient**2).mean(1)
        root = total[touched].reshape(len(touched), -1).sqrt() + self.options.get("eps", 1e-10)
        self.rows[touched] -= self.case.lr * gradient / root

    RowAdagrad = SparseAdagrad

    def SparseAdam(self, touched: torch.Tensor, gradient: torch.Tensor) -> None:
        """Adam, lazily on touched rows."""
        beta1, beta2 = self.options.get("betas", (0.9, 0.999))
        eps = self.options.get("eps", 1e-8)
        step, mem, power = self.state["step"], self.state["mem"], self.state["power"]
        is_global = self.options.get("bias_correction") == "global"
        step[touched] = self.num_steps if is_global else step[touched] + 1
        square = (gradient**2).mean(1) if self.options.get("row_wise") else gradient**2
        mem[touched] = beta1 * mem[touched] + (1 - beta1) * gradient
        power[touched] = beta2 * power[touched] + (1 - beta2) * square
        second = power[touched][:, None] if self.options.get("row_wise") else power[touched]
        first_bias = 1 - beta1 ** step[touched][:, None]
        second_bias = 1 - beta2 ** step[touched][:, None]
        if is_global:  # torch.optim.SparseAdam: epsilon is added to the uncorrected root
            moved = second_bias.sqrt() / first_bias * mem[touched] / (second.sqrt() + eps)
        else:
            moved = mem[touched] / first_bias / ((second / second_bias).sqrt() + eps)
        self.rows[touched] -= self.case.lr * moved


def start_rows(num_rows: int, dim: int) -> torch.Tensor:
    """Rows at the start, "(num_rows, dim) float32"."""
    return (torch.arange(num_rows * dim).reshape(num_rows, dim) % 11 - 5) / 10
