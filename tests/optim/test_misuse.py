"""What goes wrong in a cluster is said on every trainer, and nothing hangs."""

from __future__ import annotations

import signal

import pytest
import torch

from tests.optim.cluster import run_cluster
from tests.optim.oracle import start_rows

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
