"""An update rule of a user's own in the library: one class, registered, and nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import dglkge
from dglkge.config import load_config
from dglkge.data.dataset_files import PartSize
from dglkge.evaluation.metrics import Protocol
from dglkge.model.choices import OPTIMIZERS
from dglkge.planning.shared_memory import state_bytes
from tests.optim.test_new_rule import MomentumRule
from tests.toy_kg import toy_dataset
from tests.training import live


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPTIMIZERS._members, "momentum", MomentumRule)


def train(folder: Path, num_epochs: int, *more: str) -> tuple[dict[str, np.ndarray], float]:
    """Train, or resume, until so many epochs are finished; return rows and MRR."""
    settings = [
        *(f"dataset={toy_dataset(typed=True)}", f"output={folder}", f"training.num_epochs={num_epochs}"),
        *("model.dimension=8", "training.batch_size=20", "negatives.chunk_size=20", "optimizer.lr=0.02"),
        *("optimizer.name=momentum", "training.matmul_dtype=float32", "evaluation.max_triples=0", *more),
    ]
    with live.opened(load_config(None, settings)) as trainer:
        live.train(trainer, num_epochs)
        trainer.commit()
        rows = {name: own.numpy() for name, own in live.rows_by_node(trainer).items()}
        mrr = trainer.evaluate("test").both.mrr
    return rows, mrr


@pytest.mark.parametrize("more", [(), ("optimizer.weight_decay=0.01", "optimizer.clip_norm=0.5")])
def test_it_trains_saves_loads_and_resumes(tmp_path: Path, more: tuple[str, ...]) -> None:
    expected, mrr = train(tmp_path / "at_once", 2, *more)
    half_way, _ = train(tmp_path / "run", 1, *more)
    # Equal only if the velocities went on too.
    found, found_mrr = train(tmp_path / "run", 2, *more)
    for name, rows in expected.items():
        np.testing.assert_array_equal(found[name], rows, err_msg=name)
        assert (rows != half_way[name]).any()
    assert found_mrr == mrr
    assert dglkge.open_run(tmp_path / "run").evaluate(Protocol(split="test")).both.mrr == mrr


def test_its_state_counts_in_the_plan() -> None:
    """One number for each of a row: as Adagrad's."""
    part = PartSize({"entity": 1000}, 5000)
    sizes = [
        state_bytes(part, load_config(None, ["dataset=toy", f"optimizer.name={name}", "model.dimension=64"]))
        for name in ("momentum", "sparse_adagrad")
    ]
    assert sizes[0] == sizes[1] > 1000 * 64 * 4
