"""State is saved by one cluster and loaded by others of another size and partitioning."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from .cluster import original_ids, run_cluster

NUM_NODES = {"item": 24, "user": 60}


def run(worker: str, folder: Path, num_trainers: int, num_machines: int, **more: float) -> list:
    """Run a worker that gets the map of ids of its own partitioning."""
    maps = original_ids(num_machines, NUM_NODES)["user"]
    return run_cluster(
        f"tests.optim.workers:{worker}",
        num_trainers,
        num_machines=num_machines,
        num_nodes=NUM_NODES,
        arguments={"folder": folder, "original_ids": maps, **more},
    )


def test_state_moves_to_another_cluster(tmp_path: Path) -> None:
    """3 trainers on 2 machines save; 1 on 1 and 2 on 2 load; learning rates rise but never fall."""
    saved = run("save_state", tmp_path, 3, 2)[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"by_{kind}_{rank}" for kind in ("node", "original") for rank in range(3)
    ]
    for num_trainers, num_machines, lr, loaded_lr in ((1, 1, 0.001, 0.05), (2, 2, 0.2, 0.2)):
        for state, got_lr, eps, messages in run("load_state", tmp_path, num_trainers, num_machines, lr=lr):
            assert got_lr == pytest.approx(loaded_lr)
            assert eps == pytest.approx(1e-8)
            for key, rows in saved.items():
                torch.testing.assert_close(state[key], rows, rtol=0, atol=0)
            if num_machines == 1:
                assert messages[0].startswith("state of 'saved' is saved by node ids of another partitioning")
            assert messages[1] == "state of 'saved' is saved by original ids: give original_ids to load it"
            assert messages[2] == f"no file {tmp_path}/nothing_<rank> to load optimizer state from"
