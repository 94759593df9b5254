"""Training steps: commits by the clock, tables in files, lookup, dropout of rows."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from dglkge.config import load_config
from dglkge.distributed.runtime import Cluster
from dglkge.step.row_transforms import RowDropout
from dglkge.training import cadence
from dglkge.training.job import choose_lookup
from dglkge.training.trainer import Trainer
from tests.toy_kg import toy_dataset
from tests.training.live import assert_same_tables, opened, rows_by_node, settings, train
from tests.training.test_dense_loops import dropout_mask


@pytest.mark.parametrize("synchronous", ["true", "false"])
def test_commits_by_the_clock_take_no_message_of_their_own(synchronous, tmp_path, monkeypatch):
    """Counts sums over trainers with and without the clock; a due commit comes with a step or a report."""
    monkeypatch.setattr(cadence, "TRIPLES_A_REPORT", 8)
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
    still = itertools.repeat(0)
    for minutes, clock in ((0, still), (1000, still), (1, itertools.count(0, 61))):
        more = ("training.batch_size=4", f"training.synchronous={synchronous}", "checkpoint.background=false")
        run = settings(toy_dataset(), tmp_path / str(minutes), *more, f"checkpoint.every_minutes={minutes}")
        with opened(load_config(None, run)) as trainer:
            monkeypatch.setattr(trainer._cadence, "clock", clock.__next__)
            trainer._cadence.committed()
            sums.clear()
            places.clear()
            train(trainer, 1)
            counts.append(len(sums))
            commits.append([place for place in places if place])
            num_batches = len(trainer._edge_batches)
    interval = 1 if synchronous == "true" else cadence.reports_apart(num_batches, batch_size=4)
    assert (interval > 1) == (synchronous == "false") and num_batches > 2 * interval
    assert commits == [[], [], list(range(interval, num_batches, interval))]
    assert counts[0] == counts[1]


@pytest.mark.parametrize("optimizer", ["sparse_adagrad", "sparse_adam"])
def test_alone_neither_tables_in_files_nor_waiting_change_a_bit(tmp_path: Path, optimizer: str) -> None:
    """Rows and state are mapped from a folder that goes with the job."""
    rows, losses, files = [], [], tmp_path / "files"
    for storage, synchronous in (("memory", "true"), ("disk", "false")):
        more = (f"tables.storage={storage}", f"tables.folder={files}", f"optimizer.name={optimizer}")
        more += (f"training.synchronous={synchronous}", "checkpoint.every_batches=2")
        run = settings(toy_dataset(typed=True), tmp_path / storage, *more)
        with opened(load_config(None, run)) as trainer:
            losses.append(train(trainer, 2))
            rows.append(rows_by_node(trainer))
            states = [trainer.optimizer.state_tensors(table.embedding) for table in trainer.tables.values()]
            num_tensors = len(trainer.tables) + sum(map(len, states))
            num_mapped = Path("/proc/self/maps").read_text().count(str(files))
            assert num_mapped == (num_tensors if storage == "disk" else 0)
            del states
    assert not list(files.iterdir())
    assert losses[0] == losses[1]
    assert_same_tables(*rows)


@pytest.mark.parametrize(("num_machines", "sets", "exchanges"), [
    (1, ["training.staleness=1", "training.wire=bfloat16"], []),
    (2, [], [(torch.float32, 0)]),
    (2, ["training.staleness=1", "training.wire=bfloat16"], [(torch.bfloat16, 1)]),
    (2, ["training.lookup=kvstore"], []),
])  # fmt: skip
def test_several_machines_exchange_rows_unless_told_otherwise(num_machines, sets, exchanges):
    job_tables: Any = mock.Mock()
    choose_lookup(load_config(None, ["dataset=toy", *sets]), job_tables, num_machines)
    assert [call.args[1:] for call in job_tables.use_exchange.call_args_list] == exchanges


@pytest.mark.parametrize(("dim", "rate"), [(1, 0.3), (4, 1.0 - 2**-17), (7, 1.0 - 2**-17), (100, 0.3)])
def test_masks_of_the_loop_and_its_plain_twin_are_those_of_the_formula(dim: int, rate: float) -> None:
    random = torch.Generator().manual_seed(2)
    ids, places = torch.randperm(500, generator=random), torch.randint(500, (900,), generator=random)
    rows = torch.randn(900, dim + 3, generator=random)
    rows[5, :] = torch.nan
    rows[6:9, 0], rows[9, 0] = torch.inf, -0.0
    probability = min(round(rate * 2**16), 2**16 - 1) / 2**16
    expected = rows[:, :dim] * dropout_mask("person", 9, 500, dim, probability, seed=7)[ids[places]]
    results = []
    for kernels in ("auto", "reference"):
        rates = {"person": rate, "town": 0.0}
        dropout = RowDropout(rates, {"person": ids, "town": ids}, seed=7, kernels=kernels)
        assert dropout.tables == ["person"]
        dropout.start_batch(9)
        whole, part = rows[:, :dim].clone(), rows.clone()
        dropout.forward("person", places, whole)
        dropout.backward("person", places, part[:, :dim])  # columns of wider rows
        assert torch.equal(part[:, dim:].nan_to_num(7), rows[:, dim:].nan_to_num(7))
        assert part[:, :dim].numpy().tobytes() == whole.numpy().tobytes()
        torch.testing.assert_close(whole.double(), expected, equal_nan=True)
        results.append(whole.numpy().tobytes())
    assert results[0] == results[1] != rows[:, :dim].numpy().tobytes()
