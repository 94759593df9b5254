"""The type of matmuls: measured once, kept for the life of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dglkge.config import Config, load_config
from dglkge.distributed.runtime import Cluster
from dglkge.distributed.world import World
from dglkge.model import device
from dglkge.model.device import faster_type
from dglkge.training.building.computing import with_matmul_dtype


def rates(monkeypatch: pytest.MonkeyPatch, speedup: float) -> list[torch.dtype]:
    """Make matmuls in bfloat16 so many times as fast; returns the types that are measured."""
    measured = []

    def seconds(left: torch.Tensor, right: torch.Tensor) -> float:
        assert left.dtype == right.dtype and left.shape[1] == right.shape[1]
        measured.append(left.dtype)
        return 1.0 if left.dtype == torch.float32 else 1 / speedup

    monkeypatch.setattr(device, "matmul_seconds", seconds)
    return measured


def decided(output: Path, *more: str, cluster: Cluster | None = None) -> Config:
    config = load_config(None, ["dataset=toy", f"output={output}", *more])
    return with_matmul_dtype(config, cluster or Cluster(World(), None))


@pytest.mark.parametrize(
    ("speedup", "named", "expected"),
    [(0.1, "", "float32"), (1.4, "", "float32"), (1.6, "", "bfloat16"), (10, "float32", "float32"),
     (0.1, "bfloat16", "bfloat16")],
)  # fmt: skip
def test_bfloat16_is_taken_where_it_is_faster(tmp_path, monkeypatch, caplog, speedup, named, expected):
    """A type that is named is not measured."""
    caplog.set_level("INFO")
    measured = rates(monkeypatch, speedup)
    more = [f"training.matmul_dtype={named}"] if named else []
    assert decided(tmp_path, *more).training.matmul_dtype == expected
    is_told = f"matmuls in {expected}: float32 reaches" in caplog.text
    assert is_told == bool(measured) == (not named)


def test_a_later_start_keeps_the_choice_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates(monkeypatch, 10)
    (tmp_path / "config.json").write_text(json.dumps(decided(tmp_path).to_dict()), encoding="utf-8")
    measured = rates(monkeypatch, 0.1)
    assert decided(tmp_path).training.matmul_dtype == "bfloat16" and measured == []
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    assert decided(tmp_path).training.matmul_dtype == "float32"


def test_small_matmuls_are_taken_in_float32_and_large_ones_measured_in_part(monkeypatch):
    measured = rates(monkeypatch, 10)
    assert faster_type((48, 20, 16)) == "float32" and measured == []
    assert faster_type((10**9, 10**9, 100)) == "bfloat16" and len(measured) == 2


def test_rank_0_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = rates(monkeypatch, 0.1)
    cluster = Cluster(World(1, 2, 1, 2, launched=True), None)
    # This rank adds 0, and rank 0 adds 1.
    monkeypatch.setattr(Cluster, "sum", lambda self, values: values + (values.tolist() == [0]))
    assert decided(tmp_path, cluster=cluster).training.matmul_dtype == "bfloat16"
    assert measured == []


def test_a_real_measurement() -> None:
    ones = torch.ones(3, 4)
    assert 0 < device.matmul_seconds(ones, ones) < 10
    assert faster_type((512, 512, 64)) in ("float32", "bfloat16")
