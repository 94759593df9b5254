"""DGL 2.1.0's own optimizers run beside ours; several optimizers of one embedding."""

from __future__ import annotations

from pathlib import Path

import dgl
import pytest
import torch

from dglkge.optim import RowAdagrad, SparseAdagrad, SparseAdam
from tests.optim.cluster import run_cluster
from tests.optim.oracle import EVERYTHING, batch, start_rows

IDS = torch.tensor([1, 2])


@pytest.mark.parametrize(("num_trainers", "num_machines"), [(1, 1), (3, 1), (2, 2)])
def test_the_mean_of_duplicates_gives_dgls_numbers(num_trainers: int, num_machines: int) -> None:
    """12 steps with a hub and uneven shares. DGL's Adagrad gets its sum of squares back after each step."""
    options = {"num_machines": num_machines, "arguments": {"num_steps": 12, "process_group": True}}
    for results in run_cluster("beside", num_trainers, **options):
        assert list(results) == ["SparseAdagrad", "SparseAdam"]
        for (their_rows, their_state), (rows, state) in results.values():
            assert (rows != start_rows(60, 3)).any(1).sum() == 60
            for tensor, expected in zip([rows, *state], [their_rows, *their_state], strict=True):
                torch.testing.assert_close(tensor, expected, rtol=1e-4, atol=1e-5)


def test_parts_of_dgl_are_loaded_by_any_trainer(tmp_path: Path) -> None:
    """Each loads what DGL's optimizer saved on the next one: no row is lost; DGL's roots become sums."""
    for roots, total, lr in run_cluster("load_parts", 4, num_machines=2, arguments={"folder": tmp_path}):
        assert roots.count_nonzero() > 0
        torch.testing.assert_close(total, roots.square(), rtol=0, atol=0)
        assert lr == pytest.approx(0.25)


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_epsilon_inside_the_root_gives_the_numbers_of_dgl_optim(make_table, kernels: str) -> None:
    name = f"inside_{kernels}"
    twin = dgl.nn.NodeEmbedding(50, 4, name, init_func=lambda rows: rows.copy_(start_rows(50, 4)))
    dgls = dgl.optim.SparseAdagrad([twin], lr=0.1, eps=0.25)
    table, by_row = make_table(), make_table(1)
    options = {"lr": 0.1, "eps": 0.25, "eps_inside_root": True, "duplicates": "mean", "kernels": kernels}
    optimizer, other = SparseAdagrad([table], **options), RowAdagrad([by_row], **options)
    for step in range(20):
        ids, gradients = batch(step, 50, 4)
        dgls.zero_grad()
        (twin(ids, torch.device("cpu")) * gradients).sum().backward()
        dgls.step()
        optimizer.step_rows([(table, ids, gradients)])
        other.step_rows([(by_row, ids, gradients[:, :1].contiguous())])
    (total,) = twin.optm_state
    torch.testing.assert_close(table.weight[EVERYTHING], twin.weight, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(optimizer._state[table.name][EVERYTHING], total, rtol=1e-5, atol=1e-6)
    # One number a row is Adagrad: the rows moved as the first column of DGL's.
    moved = by_row.weight[EVERYTHING] - start_rows(50, 1)
    torch.testing.assert_close(moved[:, 0], (twin.weight - start_rows(50, 4))[:, 0], rtol=1e-5, atol=1e-6)


def test_attributes_of_dgl(make_table) -> None:
    """Names, defaults and state tensors that DGL's own tests look at; hyper-parameters may be set."""
    table, other = make_table(), make_table()
    adagrad, adam = SparseAdagrad([table], 0.1, 1e-9), SparseAdam(params=[other], lr=0.2, betas=(0.8, 0.99))
    assert (adagrad._lr, adagrad._eps, adagrad._rank, adagrad._world_size) == (0.1, 1e-9, 0, 1)
    assert (adam._lr, adam._eps, adam._beta1, adam._beta2) == (0.2, 1e-8, 0.8, 0.99)
    assert adagrad._params == [table]
    assert adagrad._state[table.name].name == f"node~thing~{table.name}_sum"
    names = [tensor.tensor_name for tensor in adam._state[other.name]]
    assert names == [f"{other.name}_{key}" for key in ("step", "mem", "power")]
    adagrad._world_size, adagrad._rank = 1, 0
    adagrad._lr, adagrad._eps, adam._beta1, adam._beta2 = 0.5, 1e-3, 0.7, 0.9
    saved = adagrad.local_state_dict()["params"]
    assert (saved["_lr"], saved["_eps"], saved["world_size"]) == (0.5, 1e-3, 1)
    assert adam.param_groups[0]["betas"] == (0.7, 0.9)
    with pytest.raises(AttributeError, match="the rule of SparseAdagrad has no 'betas'"):
        adagrad._beta1  # noqa: B018


def test_a_second_optimizer_loads_what_the_first_saved(make_table, tmp_path: Path) -> None:
    """Both live, and share the state; the one that did not step goes on once the other is gone."""
    table = make_table()
    first = SparseAdagrad([table], lr=0.1)
    first.step_rows([(table, IDS, torch.full((2, 4), 2.0))])
    first.save(tmp_path / "state")
    second = SparseAdagrad([table], lr=0.9)
    second.load(tmp_path / "state")
    assert second._lr == 0.1
    for optimizer in (first, second):
        assert optimizer._state[table.name][IDS].unique().tolist() == [4.0]
    del first, optimizer
    second.step_rows([(table, IDS, torch.full((2, 4), 1.0))])
    assert second._state[table.name][IDS].unique().tolist() == [5.0]


def test_two_optimizers_must_not_step_one_embedding(make_table) -> None:
    """The first that steps has it, by either entry, until it is gone; the other one changes nothing."""
    table, other = make_table(), make_table()
    first, second = SparseAdagrad([table], lr=0.1), SparseAdam([other, table], lr=0.1)
    first.step()
    message = f"embedding '{table.name}' is updated by another optimizer .SparseAdagrad.: only one may step"
    for step in (second.step, lambda: second.step_rows([(other, IDS, torch.ones(2, 4))])):
        with pytest.raises(ValueError, match=message):
            step()
    assert torch.equal(other.weight[EVERYTHING], start_rows(50, 4))
    # Adagrad's state has the name of RowAdagrad's, so only one of them can live.
    with pytest.raises(ValueError, match=rf"keeps its state '{table.name}_sum' with rows \(4,\), this"):
        RowAdagrad([table], lr=0.1)
    SparseAdagrad([other], lr=0.1).step()
    del first
    second.step()
    RowAdagrad([table], lr=0.1)
