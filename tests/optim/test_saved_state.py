"""State is saved by one cluster and loaded by others of another size and partitioning."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.optim.cluster import original_ids, run_cluster
from tests.optim.oracle import start_rows

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
    """3 trainers on 2 machines save; 1 on 1 and 2 on 2 load; the learning rate is the file's."""
    saved = run("save_state", tmp_path, 3, 2)[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"by_{kind}_{rank}" for kind in ("node", "original") for rank in range(3)
    ]
    for num_trainers, num_machines, lr in ((1, 1, 0.001), (2, 2, 0.2)):
        for state, got_lr, eps, messages in run("load_state", tmp_path, num_trainers, num_machines, lr=lr):
            assert got_lr == pytest.approx(0.05)
            assert eps == pytest.approx(1e-8)
            for key, rows in saved.items():
                torch.testing.assert_close(state[key], rows, rtol=0, atol=0)
            if num_machines == 1:
                assert messages[0].startswith("state of 'saved' is saved by node ids of another partitioning")
            assert messages[1] == "state of 'saved' is saved by original ids: give original_ids to load it"
            assert messages[2] == f"no file {tmp_path}/nothing_<rank> to load optimizer state from"


@pytest.mark.parametrize(("num_trainers", "num_machines"), [(2, 1), (4, 2)])
def test_parts_of_dgl_are_loaded_by_any_trainer(tmp_path: Path, num_trainers: int, num_machines: int) -> None:
    """Each trainer loads the part that DGL's optimizer saved on the next one: no row is lost, and the roots
    that DGL keeps on the CPU become sums."""
    results = run("load_parts_of_dgl", tmp_path, num_trainers, num_machines)
    for roots, loaded, lr in results:
        assert roots.count_nonzero() > 0
        torch.testing.assert_close(loaded, roots.square(), rtol=0, atol=0)
        assert lr == pytest.approx(0.25)


def test_what_one_trainer_cannot_load_or_save_is_told_to_all(tmp_path: Path) -> None:
    """Whatever is wrong: the others do not wait for a trainer that has given up."""
    (load, save), (own_load, own_save) = run("fail_alone", tmp_path, 2, 1)
    assert own_load == "KeyError: 'ids'"
    assert load == f"ValueError: trainer 1 cannot load the optimizer state: {own_load}"
    assert str(tmp_path / "none") in own_save
    assert save == f"OSError: trainer 1 cannot save the optimizer state: {own_save}"


def test_state_of_one_trainer_alone(tmp_path: Path) -> None:
    """state_dict before the first step, on trainer 0 only, waits for no other trainer."""
    results = run_cluster("tests.optim.workers:lone_state_dict", 2, num_nodes=NUM_NODES, timeout_seconds=60)
    assert results == [list(range(0, 60, 2)), None]


def test_trainers_that_are_not_synchronous_share_the_rows_out(tmp_path: Path) -> None:
    """Hogwild: every row is saved once, by one trainer."""
    saved = run_cluster("tests.optim.workers:hogwild_state", 3, num_nodes=NUM_NODES)
    assert sorted(sum(saved, [])) == list(range(60))


def test_an_overflow_of_one_trainer_holds_all_of_them(tmp_path: Path) -> None:
    """GradScaler: all leave out the step, also those with finite gradients or without any, and all lower the
    scale."""
    for rows, scales in run_cluster("tests.optim.workers:overflow", 3, num_nodes=NUM_NODES):
        expected = start_rows(60, 2)
        expected[5] -= 0.5  # Adagrad's first step is the learning rate; the second was left out,
        expected[5] -= 0.5 * 3 / 10**0.5  # and the third has the gradients 1 and 3
        torch.testing.assert_close(rows, expected)
        assert scales == [1024.0, 512.0, 512.0]
