"""``training_stats.json``: what training measured, as JSON lines in PyTorch-BigGraph's shape."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dglkge.checkpoint import layout
from dglkge.checkpoint.storage import CheckpointStorage


def epoch_record(epoch: int, num_triples: int, mean_loss: float) -> dict[str, Any]:
    """Describe an epoch as PyTorch-BigGraph describes a pass over one bucket.

    Parameters
    ----------
    epoch : int
        From 0 on.
    num_triples : int
        Triples trained, those before a restart among them.
    mean_loss : float
        Per triple.
    """
    return {
        "lhs_partition": 0,
        "rhs_partition": 0,
        "index": epoch,
        "stats": {"count": num_triples, "metrics": {"loss": mean_loss}},
        "epoch_idx": epoch,
        "edge_path_idx": 0,
        "edge_chunk_idx": 0,
    }


def append(storage: CheckpointStorage, records: Sequence[Mapping[str, Any]]) -> None:
    """Add lines, in one step; lines of the same epochs, which an interrupted save left, are replaced.

    Without any, the file is made where there is none: PyTorch-BigGraph's readers expect one.
    """
    if not records:
        if not (storage.path / layout.STATS_FILE).exists():
            storage.write_text(layout.STATS_FILE, "")
        return
    first = min(int(record["epoch_idx"]) for record in records)
    kept = [record for record in read(storage.path) if _epoch_of(record) < first]
    storage.write_text(layout.STATS_FILE, "".join(json.dumps(record) + "\n" for record in [*kept, *records]))


def _epoch_of(record: Mapping[str, Any]) -> int:
    """Return the epoch of a line, which another program may have written."""
    epoch = record.get("epoch_idx", -1)
    return epoch if isinstance(epoch, int) else -1


def read(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a checkpoint's statistics, PyTorch-BigGraph's or ours, apart from torn ones."""
    path = folder / layout.STATS_FILE
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records
