"""Options of :class:`SparseOptimizer` that hold for all of its tables."""

from __future__ import annotations

from dataclasses import dataclass

import torch

#: Types in which gradient rows may be sent.
WIRE_DTYPES = (None, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Options:
    """How gradients of a row are merged, sent and applied.

    Attributes
    ----------
    duplicates : {"sum", "mean"}
        Merging of several gradients for one row in a step, those of other trainers included. "sum" is torch's
        rule: a hub that is read often moves as far as its gradients say. Divide the loss by the size of the
        global batch, and the result depends on that batch alone, not on how it was split between trainers. If
        instead each trainer takes the mean over its own share, which ``DistributedDataParallel`` would
        average, the sum over n trainers is n times the gradient of one process, and a triple of a small share
        weighs more. "mean" is DGL's rule: every touched row gets one average gradient, so hubs learn more
        slowly, and adding trainers (a larger global batch) does not make a step longer.
    wire_dtype : torch.dtype, optional
        Type in which gradient rows are sent between trainers: ``torch.bfloat16`` or ``torch.float16`` (which
        overflows beyond 65504). Default: the type in which they are computed. Rows and state keep their type.
    overlap : bool
        Run exchange and update in the background; they are finished before rows are read or written through
        the embedding, or by :meth:`finish`. Code that reads the kvstore's memory directly must call
        :meth:`finish` first.
    nonfinite : {"raise", "skip"}
        A row whose gradient has a NaN or an infinity is never updated. "raise": every trainer then raises
        ``FloatingPointError`` at the end of the step; "skip": it is counted in ``num_skipped_rows``.
    timeout_seconds : float
        Limit of each wait for the other trainers in a step.
    synchronous : bool
        False: asynchronous updates as in Hogwild (Niu et al. 2011): a trainer applies its own gradients to
        the shared rows at once and waits for no other trainer. Trainers of one machine only; simultaneous
        updates of a row may be lost, runs are not reproducible, and ``extra_sum`` of a step is the trainer's
        own number.
    kernels : {"auto", "reference"}
        "auto": merge and update rows with compiled loops; "reference": with their plain numpy and torch
        twins, slower and easier to read: the same results but for rounding.

    Raises
    ------
    ValueError
        With the name of the option, its value and the allowed values.
    """

    duplicates: str = "sum"
    wire_dtype: torch.dtype | None = None
    overlap: bool = False
    nonfinite: str = "raise"
    timeout_seconds: float = 1800.0
    synchronous: bool = True
    kernels: str = "auto"

    def __post_init__(self) -> None:
        if self.duplicates not in ("sum", "mean"):
            raise ValueError(f"duplicates must be 'sum' or 'mean', got {self.duplicates!r}")
        if self.wire_dtype not in WIRE_DTYPES:
            raise ValueError(f"wire_dtype must be torch.float32, bfloat16 or float16, got {self.wire_dtype}")
        if self.nonfinite not in ("raise", "skip"):
            raise ValueError(f"nonfinite must be 'raise' or 'skip', got {self.nonfinite!r}")
        if not self.timeout_seconds > 0:
            raise ValueError(f"timeout_seconds must be positive, got {self.timeout_seconds}")
        if self.kernels not in ("auto", "reference"):
            raise ValueError(f"kernels must be 'auto' or 'reference', got {self.kernels!r}")
