"""Trainers that leave out a step, give up or end; owners of rows; state of tables of one name."""

from __future__ import annotations

import signal
from functools import partial
from unittest import mock

import pytest
import torch

from dglkge.optim import SparseAdam
from dglkge.optim.dgl_tables import range_starts
from dglkge.optim.network_exchange import ranks_by_machine
from dglkge.optim.rules import Adagrad
from tests.optim.cluster import run_cluster
from tests.optim.oracle import start_rows


@pytest.mark.parametrize("num_machines", [1, 2])
def test_every_trainer_hears_of_misuse(num_machines: int) -> None:
    """Non-finite gradients and a trainer that leaves out a step; through shared memory and the network."""
    results = run_cluster("misuse", 3, num_machines=num_machines, expected_status={})
    start = start_rows(60, 3)
    for rank, caught in enumerate(results):
        assert caught["skipped"] == 1
        torch.testing.assert_close(caught["rows after skip"], torch.stack([start[1] - 0.1, start[4]]))
        message = "the gradient is not finite for 1 rows of 'raising'; these rows were not updated"
        assert caught["nonfinite"] == ("FloatingPointError", message)
        assert caught["after nonfinite"] is None
        kind, message = caught.get("late", (None, ""))
        assert kind == ("TimeoutError" if rank else None)
        assert ("trainers [0] did not come within 1.5 s" in message) == bool(rank)


@pytest.mark.parametrize("num_machines", [1, 2])
def test_a_dead_trainer_is_no_hang(num_machines: int) -> None:
    """The others raise as soon as a trainer is gone, long before the time limit."""
    options = {"num_machines": num_machines, "expected_status": {1: 9}, "timeout_seconds": 60}
    message, _ = run_cluster("stop", 2, arguments={"is_ending": True}, **options)
    assert message.startswith("ConnectionError: ")
    assert "trainer 1 (process" in message or "trainers [1] did not come" in message


def test_a_stopped_trainer_with_the_store_is_no_hang() -> None:
    """torch's store lives in trainer 0: where it is stopped, a question to the store has no answer."""
    options = {"num_machines": 2, "expected_status": {0: -signal.SIGKILL}, "timeout_seconds": 90}
    _, message = run_cluster("stop", 2, arguments={"is_ending": False}, **options)
    cause = "TimeoutError: optimizer step: trainer 0, which holds torch's store, did not answer within 4 s: "
    assert message == cause + "every trainer must call step() equally often, also without gradients"


def test_ranges_are_found_by_asking() -> None:
    """Also empty ranges, with few questions, of DGL's public interface only."""
    for sizes in ([7], [1, 1], [5, 0, 3], [0, 4], [4, 0], [1_000_000, 3, 2_000_000, 0]):
        ends = torch.tensor(sizes).cumsum(0)
        policy = mock.Mock(spec=["partition_book", "num_partitions", "get_size", "to_partid"])
        policy.partition_book = policy
        policy.num_partitions.return_value, policy.get_size.return_value = len(sizes), sum(sizes)
        policy.to_partid.side_effect = partial(torch.searchsorted, ends, right=True)
        assert range_starts(policy).tolist() == [0, *ends.tolist()]
        assert policy.to_partid.call_count <= 23
    with pytest.raises(ValueError, match=r"no trainer runs on the machines of partitions \[1\]"):
        ranks_by_machine([0, 0], 2)


def test_state_of_one_name_is_saved_and_loaded_apart(make_table, tmp_path) -> None:
    """Names in the kvstore tell tables of nodes and edges apart; each has its group's rule and rate."""
    tables = [make_table(2, ntype=ntype, name="apart") for ntype in ("thing", "other", "next_thing")]
    groups = [{"params": [table], "lr": 0.1 * (number + 3)} for number, table in enumerate(tables)]
    groups[2]["rule"] = Adagrad()
    optimizer, row = SparseAdam(groups, lr=0.9), torch.tensor([2])

    def state_of(number: int) -> torch.Tensor:
        return optimizer.state_tensors(tables[number])["sum" if number == 2 else "mem"][row]

    gradients = [(table, row, torch.full((1, 2), 1.0 + number)) for number, table in enumerate(tables)]
    optimizer.step_rows(gradients)
    names = ["edge~thing:next_thing:thing~apart", "node~other~apart", "node~thing~apart"]
    assert sorted(optimizer._state) == names
    optimizer.save(tmp_path / "state")
    saved = [state_of(number) for number in range(3)]
    torch.testing.assert_close(torch.cat(saved)[:, 0], torch.tensor([0.1, 0.2, 9.0]))
    optimizer.step_rows(gradients)
    for group in optimizer.param_groups:
        group["lr"] = 0.9
    optimizer.load(tmp_path / "state")
    assert all(torch.equal(state_of(number), saved[number]) for number in range(3))
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.3, 0.4, 0.5])
    assert "rule" not in optimizer.param_groups[2]
    del optimizer
    optimizer = SparseAdam([tables[1]], lr=0.9)
    optimizer.load(tmp_path / "state")
    assert torch.equal(state_of(1), saved[1]) and optimizer._lr == pytest.approx(0.4)
