"""What a training starts with, and what it keeps: initial embeddings, the losses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch


def initial_rows(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return the initial embeddings; servers call it inside ``initialize``."""
    return torch.zeros(shape, dtype=dtype).normal_(0, 0.1, generator=torch.Generator().manual_seed(0))


class Losses:
    """The losses of the epochs: an object of the job."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        """Return what is saved."""
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what was saved."""
        self.values = state["values"]

    def write(self, folder: str, accuracy: float) -> None:
        """Print the curve, and write it into a folder."""
        print(f"losses {self.values}, test accuracy {accuracy:.4f}", flush=True)
        text = json.dumps({"losses": self.values, "accuracy": accuracy})
        Path(folder, "curve.json").write_text(text, encoding="utf-8")
