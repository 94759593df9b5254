"""Training steps: stops, commits by the clock, tables in files, lookup, dropout of rows."""

from __future__ import annotations

import itertools
import signal
from collections import UserDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import dglkge
from dglkge.config import load_config
from dglkge.distributed.dgl_compat import request_timeout_seconds, set_request_timeout
from dglkge.distributed.runtime import Cluster
from dglkge.errors import InputError
from dglkge.step.row_transforms import RowDropout
from dglkge.training.building import step as building
from dglkge.training.building import tables
from dglkge.training.building.tables import build_optimizer, choose_lookup
from dglkge.training.cadence import reports_apart
from dglkge.training.trainer import Trainer
from dglkge.typing import RELATION
from tests.toy_kg import toy_dataset
from tests.training.dense_loops import dropout_mask
from tests.training.live import assert_same_tables, opened, rows_by_node, settings, train


def test_a_step_tells_that_a_trainer_was_asked_to_stop(tmp_path: Path) -> None:
    with opened(load_config(None, settings(toy_dataset(typed=True), tmp_path / "run"))) as trainer:
        trained = []
        with pytest.raises(SystemExit) as stopped:
            for _ in dglkge.remaining_epochs_until(1):
                for batch in trainer.batches():
                    if batch.index == 1:
                        trainer.cluster.stop._note(signal.SIGTERM, None)
                    trainer.step(batch)
                    trained.append(batch.index)
        assert stopped.value.code == 143 and trained == [0, 1]


@pytest.mark.parametrize("synchronous", ["true", "false"])
def test_commits_by_the_clock_take_no_message_of_their_own(synchronous, tmp_path, monkeypatch):
    """Counts sums over trainers with and without the clock; a due commit comes with a step or a report."""
    sums: list[int] = []
    own_sum = Cluster.sum
    monkeypatch.setattr(Cluster, "sum", lambda self, values: sums.append(1) or own_sum(self, values))
    places: list[int] = []
    commit = Trainer._commit

    def noted(trainer: Trainer) -> None:
        places.append(trainer._position.batches_done)
        commit(trainer)

    monkeypatch.setattr(Trainer, "_commit", noted)
    counts, commits = [], []
    # In the last case each look at the clock finds it a minute later.
    for minutes, clock in (
        (0, itertools.repeat(0)),
        (1000, itertools.repeat(0)),
        (1, itertools.count(0, 61)),
    ):
        more = ("training.batch_size=4", f"training.synchronous={synchronous}", "checkpoint.background=false")
        run = settings(toy_dataset(), tmp_path / str(minutes), *more, f"checkpoint.every_minutes={minutes}")
        config = load_config(None, run)
        with opened(config) as trainer:
            monkeypatch.setattr(trainer._cadence, "clock", clock.__next__)
            trainer._cadence.committed()
            sums.clear()
            places.clear()
            train(trainer, 1)
            counts.append(len(sums))
            commits.append([place for place in places if place])
            num_batches = len(trainer._edge_batches)
    interval = 1 if synchronous == "true" else reports_apart(num_batches)
    assert (interval > 1) == (synchronous == "false") and num_batches > 2 * interval
    assert commits == [[], [], list(range(interval, num_batches, interval))]
    assert counts[0] == counts[1]


@pytest.mark.parametrize("optimizer", ["sparse_adagrad", "sparse_adam"])
def test_a_process_alone_keeps_tables_in_files(tmp_path: Path, optimizer: str) -> None:
    """Rows and state are mapped from a folder that goes with the job; rows are those of memory."""
    rows: list[dict[str, torch.Tensor]] = []
    files = tmp_path / "files"
    for storage in ("memory", "disk"):
        more = (f"tables.storage={storage}", f"tables.folder={files}", f"optimizer.name={optimizer}")
        with opened(
            load_config(None, settings(toy_dataset(typed=True), tmp_path / storage, *more))
        ) as trainer:
            train(trainer, 2)
            rows.append(rows_by_node(trainer))
            places = Path("/proc/self/maps").read_text()
            tensors = [table.local_rows for table in trainer.tables.values()]
            states = [trainer.optimizer.state_tensors(table.embedding) for table in trainer.tables.values()]
            num_tensors = len(tensors) + sum(len(state) for state in states)
            assert places.count(str(files)) == (num_tensors if storage == "disk" else 0)
            del tensors, states
    assert not list(files.iterdir())
    assert_same_tables(*rows)


def test_alone_it_does_not_matter_whether_trainers_wait(tmp_path: Path) -> None:
    totals = []
    for synchronous in ("true", "false"):
        more = (f"training.synchronous={synchronous}", "checkpoint.every_batches=2")
        with opened(
            load_config(None, settings(toy_dataset(typed=True), tmp_path / synchronous, *more))
        ) as trainer:
            totals.append(train(trainer, 2))
    assert totals[0] == totals[1]


def test_the_limit_of_waiting_reaches_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainers of one machine wait for each other in its exchange, and not longer than anywhere else."""
    monkeypatch.setattr(tables, "SparseOptimizer", lambda params, rule, lr, **options: options)
    before = request_timeout_seconds()
    set_request_timeout(7.5)
    try:
        options = build_optimizer(load_config(None, ["dataset=toy"]), [], num_machines=1)
    finally:
        set_request_timeout(before)
    assert options["timeout_seconds"] == 7.5


class Tables:
    used: tuple[Any, ...] | None = None

    def use_exchange(self, *arguments: Any) -> None:
        self.used = arguments


def choose(num_machines: int, *settings: str) -> Any:
    """Return what is chosen: nothing, or the arguments of the exchange."""
    tables: Any = Tables()
    choose_lookup(load_config(None, ["dataset=toy", *settings]), tables, num_machines)
    return tables.used


def test_one_machine_exchanges_nothing() -> None:
    assert choose(1) is None
    assert choose(1, "training.staleness=1", "training.wire=bfloat16") is None


def test_several_machines_exchange_unless_told_otherwise() -> None:
    group, *rest = choose(2)
    assert rest == [torch.float32, 0] and group.size == 1
    _, *rest = choose(2, "training.staleness=1", "training.wire=bfloat16")
    assert rest == [torch.bfloat16, 1]
    assert choose(2, "training.lookup=kvstore") is None


def test_masks_are_those_of_the_formula_and_do_not_depend_on_the_place() -> None:
    ids = torch.tensor([2, 0, 1, 3])
    dropout = RowDropout({"person": 0.5, "town": 0.0}, {"person": ids, "town": ids}, seed=7)
    dropout.start_batch(9)
    expected = dropout_mask("person", 9, 4, 6, 0.5, seed=7)[ids]
    rows = torch.ones(4, 6)
    dropout.forward("person", torch.arange(4), rows)
    torch.testing.assert_close(rows.double(), expected)
    some = torch.ones(3, 6)
    dropout.backward("person", torch.tensor([3, 1, 3]), some)
    torch.testing.assert_close(some, rows[[3, 1, 3]])
    assert dropout.tables == ["person"]
    dropout.start_batch(10)
    other = torch.ones(4, 6)
    dropout.forward("person", torch.arange(4), other)
    assert not torch.equal(other, rows)


@pytest.mark.parametrize(("dim", "rate"), [(1, 0.3), (4, 1.0 - 2**-17), (7, 1.0 - 2**-17), (100, 0.3)])
def test_the_loop_and_its_plain_twin_are_equal_bit_for_bit(dim: int, rate: float) -> None:
    ids = torch.randperm(500, generator=torch.Generator().manual_seed(2))
    places = torch.from_numpy(np.random.default_rng(4).integers(0, 500, 900))
    rows = torch.randn(900, dim + 3, generator=torch.Generator().manual_seed(3))
    rows[5, :] = torch.nan
    rows[6:9, 0], rows[9, 0] = torch.inf, -0.0
    results = []
    for kernels in ("auto", "reference"):
        dropout = RowDropout({"person": rate}, {"person": ids}, seed=1, kernels=kernels)
        dropout.start_batch(3)
        whole, part = rows[:, :dim].clone(), rows.clone()
        dropout.forward("person", places, whole)
        dropout.forward("person", places, part[:, :dim])  # columns of wider rows
        assert torch.equal(part[:, dim:].nan_to_num(7), rows[:, dim:].nan_to_num(7))
        assert part[:, :dim].numpy().tobytes() == whole.numpy().tobytes()
        results.append(whole.numpy().tobytes())
    assert results[0] == results[1] != rows[:, :dim].numpy().tobytes()


@pytest.mark.parametrize("rate", [0.1, 0.9])
def test_the_mean_stays_and_the_share_is_dropped(rate: float) -> None:
    """Of 2,000,000 numbers the share is within 5 standard deviations, in all columns of a word."""
    dropout = RowDropout({"person": rate}, {"person": torch.arange(20_000)}, seed=1)
    dropout.start_batch(3)
    rows = torch.ones(20_000, 100)
    dropout.forward("person", torch.arange(20_000), rows)
    is_dropped = (rows == 0).double()
    assert float(is_dropped.mean()) == pytest.approx(rate, abs=5 * (rate * (1 - rate) / 2e6) ** 0.5)
    for column in range(4):
        share = float(is_dropped[:, column::4].mean())
        assert share == pytest.approx(rate, abs=5 * (rate * (1 - rate) / 5e5) ** 0.5)
    assert float(rows.double().mean()) == pytest.approx(1, abs=0.02)
    assert float(rows.max()) == pytest.approx(1 / (1 - rate), rel=1e-3)


def test_a_transform_of_a_table_that_does_not_exist_is_refused(monkeypatch):
    kind = SimpleNamespace(load=lambda: lambda *_: SimpleNamespace(tables=["person", "persn"]))
    monkeypatch.setattr(building, "NO_TRANSFORM", "another")
    monkeypatch.setattr(building, "ROW_TRANSFORMS", {"none": kind})
    job_tables = UserDict(dict.fromkeys(["person", RELATION]))
    job_tables.entity_types = ["person"]
    layout = SimpleNamespace(original_edge_ids=lambda name: np.arange(3))
    job = SimpleNamespace(
        config=load_config(None, ["dataset=d"]),
        tables=job_tables,
        layout=layout,
        global_vectors=None,
        features=None,
    )
    with pytest.raises(InputError) as error:
        building.build_transforms(job)
    assert str(error.value) == (
        "unknown table of model.row_transform none 'persn'; did you mean 'person'? "
        "known: 'person', 'relation'"
    )
