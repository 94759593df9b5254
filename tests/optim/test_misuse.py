"""What an optimizer refuses; owners of embeddings; embeddings of several node types."""

from __future__ import annotations

import signal

import numpy as np
import pytest
import torch

from dglkge.optim import SparseAdagrad, SparseAdam
from dglkge.optim.dgl_tables import range_starts
from dglkge.optim.network_exchange import owner_ranks, ranks_by_machine
from tests.optim.cluster import run_cluster
from tests.optim.oracle import Case, Oracle, batch, start_rows

NUM_NODES = {"item": 24, "user": 60}


@pytest.mark.parametrize("num_machines", [1, 2])
def test_every_trainer_hears_of_misuse(num_machines: int) -> None:
    """Non-finite gradients and a trainer that leaves out a step; through shared memory and through the
    network."""
    results = run_cluster(
        "tests.optim.workers:misuse", 3, num_machines=num_machines, num_nodes=NUM_NODES, expected_status={}
    )
    start = start_rows(60, 3)
    for rank, caught in enumerate(results):
        assert caught["skipped"] == 1
        torch.testing.assert_close(caught["rows after skip"], torch.stack([start[1] - 0.1, start[4]]))
        kind, message = caught["nonfinite"]
        assert kind == "FloatingPointError"
        assert message == "the gradient is not finite for 1 rows of 'raising'; these rows were not updated"
        assert caught["after nonfinite"] is None
        if rank == 0:
            assert "late" not in caught
            continue
        kind, message = caught["late"]
        assert kind == "TimeoutError"
        assert "trainers [0] did not come within 1.5 s" in message


def test_a_trainer_that_gives_up_is_named() -> None:
    """An impossible id on one trainer ends the step of the others at once."""
    messages = run_cluster("tests.optim.workers:give_up", 2, num_nodes=NUM_NODES)
    assert messages[1] == "ValueError: gradient of 'given_up': id 1000 is not in [0, 60)"
    assert messages[0].startswith("ConnectionError: optimizer step 2: trainer 1 (process ")
    assert messages[0].endswith(") gave up")


@pytest.mark.parametrize("num_machines", [1, 2])
def test_a_dead_trainer_is_no_hang(num_machines: int) -> None:
    """The others raise as soon as a trainer is gone, long before the time limit."""
    results = run_cluster(
        "tests.optim.workers:die",
        2,
        num_machines=num_machines,
        num_nodes=NUM_NODES,
        expected_status={1: 9},
        timeout_seconds=60,
    )
    assert (
        "trainer 1 (process" in results[0]["message"] or "trainers [1] did not come" in results[0]["message"]
    )


def test_a_stopped_trainer_with_the_store_is_no_hang() -> None:
    """torch's store lives in trainer 0: where it is stopped, a question to the store has no answer."""
    results = run_cluster(
        "tests.optim.workers:freeze",
        2,
        num_machines=2,
        num_nodes=NUM_NODES,
        expected_status={0: -signal.SIGKILL},
        timeout_seconds=90,
    )
    assert results[1]["message"] == (
        "optimizer step: trainer 0, which holds torch's store, did not answer within 4 s: every trainer "
        "must call step() equally often, also without gradients"
    )


class Policy:
    """A partition policy of given ranges that answers only what DGL's public interface answers."""

    def __init__(self, sizes: list[int]) -> None:
        self.ends = torch.tensor(sizes).cumsum(0)
        self.num_calls = 0
        self.partition_book = self

    def num_partitions(self) -> int:
        return len(self.ends)

    def get_size(self) -> int:
        return int(self.ends[-1])

    def to_partid(self, ids: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return torch.searchsorted(self.ends, ids, right=True)


def test_ranges_are_found_by_asking() -> None:
    """Also empty ranges, with few questions."""
    for sizes in ([7], [1, 1], [5, 0, 3], [0, 4], [4, 0], [1_000_000, 3, 2_000_000, 0]):
        policy = Policy(sizes)
        assert range_starts(policy).tolist() == [0, *np.cumsum(sizes)]
        assert policy.num_calls <= 23


def test_owners_are_on_the_rows_machine() -> None:
    """Whatever the order of ranks, every row goes to a trainer of its machine, evenly."""
    machines = ranks_by_machine([1, 0, 2, 1, 1], 3)
    starts = np.array([0, 30, 90, 93])
    owners = owner_ranks(np.arange(93), starts, machines)
    for part, ranks in enumerate(machines):
        counts = np.bincount(owners[starts[part] : starts[part + 1]], minlength=5)
        assert np.flatnonzero(counts).tolist() == ranks.tolist()
        assert np.ptp(counts[ranks]) <= 1


def test_a_machine_without_a_trainer_is_refused() -> None:
    """DGL could not place tensors there."""
    with pytest.raises(ValueError, match=r"no trainer runs on the machines of partitions \[1\]"):
        ranks_by_machine([0, 0], 2)


def test_embeddings_of_one_name_have_their_own_state(make_table) -> None:
    """Each table moves by its own gradients, by both entries of a step, and keeps its own sums."""
    tables = [make_table(3, ntype=ntype, name="shared") for ntype in ("thing", "other")]
    cases = [Case("", "SparseAdagrad", lr=0.5), Case("", "SparseAdagrad", lr=0.1)]
    groups = [{"params": [table], "lr": case.lr} for table, case in zip(tables, cases)]
    optimizer = SparseAdagrad(groups, lr=0.1)
    oracles = [Oracle(case, table.num_embeddings, 3) for case, table in zip(cases, tables)]
    for step in range(4):
        batches = [batch(step, table.num_embeddings, 3) for table in tables]
        gradients = [(table, *pair) for table, pair in zip(tables, batches)]
        if step % 2:
            optimizer.step_rows(gradients)
        else:
            sum((table(ids) * values).sum() for table, ids, values in gradients).backward()
            optimizer.step()
        for oracle, pair in zip(oracles, batches):
            oracle.step(*pair)
    for table, oracle in zip(tables, oracles):
        everything = torch.arange(table.num_embeddings)
        for tensor, expected in (
            (table.weight, oracle.rows),
            (optimizer.state_tensors(table)["sum"], oracle.state["sum"]),
        ):
            torch.testing.assert_close(tensor[everything].double(), expected, rtol=1e-5, atol=1e-6)


def test_state_of_one_name_is_saved_and_loaded_apart(make_table, tmp_path) -> None:
    """Names in the kvstore tell the tables apart in files and in dictionaries."""
    tables = [make_table(2, ntype=ntype, name="apart") for ntype in ("thing", "other")]
    optimizer = SparseAdam([{"params": [tables[0]], "lr": 0.5}, {"params": [tables[1]], "lr": 0.1}], lr=0.1)
    for number, table in enumerate(tables):
        optimizer.step_rows([(table, torch.tensor([2]), torch.full((1, 2), 1.0 + number))])
    assert sorted(optimizer._state) == ["node~other~apart", "node~thing~apart"]
    optimizer.save(tmp_path / "state")
    memory = [optimizer.state_tensors(table)["mem"][torch.tensor([2])].clone() for table in tables]
    assert memory[0][0, 0] == pytest.approx(0.1) and memory[1][0, 0] == pytest.approx(0.2)
    for table in tables:
        optimizer.step_rows([(table, torch.tensor([2]), torch.ones(1, 2))])
    for group in optimizer.param_groups:
        group["lr"] = 0.9
    optimizer.load(tmp_path / "state")
    for table, rows, group, lr in zip(tables, memory, optimizer.param_groups, (0.5, 0.1)):
        assert torch.equal(optimizer.state_tensors(table)["mem"][torch.tensor([2])], rows)
        assert group["lr"] == lr
    del optimizer
    alone = SparseAdam([tables[1]], lr=0.9)
    alone.load(tmp_path / "state")
    assert torch.equal(alone.state_tensors(tables[1])["mem"][torch.tensor([2])], memory[1])
    assert alone._lr == 0.1
