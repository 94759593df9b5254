"""DGL 2.1.0's own optimizers run beside ours; and what DGL's own tests of them do, done with ours."""

from __future__ import annotations

import itertools
from pathlib import Path

import dgl
import pytest
import torch

from dglkge.optim import RowAdagrad, SparseAdagrad, SparseAdam
from tests.optim.cluster import run_cluster
from tests.optim.oracle import batch, start_rows

NUM_NODES = {"item": 24, "user": 60}
EVERYTHING = torch.arange(50)
IDS = torch.tensor([1, 2])


def run(worker: str, num_trainers: int, **options) -> list:
    return run_cluster(f"tests.optim.dgl_workers:{worker}", num_trainers, num_nodes=NUM_NODES, **options)


@pytest.mark.parametrize(
    ("num_trainers", "num_machines"), [(1, 1), (3, 1), (2, 2)], ids=["alone", "one machine", "two machines"]
)
def test_the_mean_of_duplicates_gives_dgls_numbers(num_trainers: int, num_machines: int) -> None:
    """12 steps with a hub and uneven shares. DGL's Adagrad gets its sum of squares back after each step."""
    arguments = {"num_steps": 12, "process_group": True}
    for results in run("beside", num_trainers, num_machines=num_machines, arguments=arguments):
        assert list(results) == ["SparseAdagrad", "SparseAdam"]
        for (their_rows, their_state), (rows, state) in results.values():
            assert (rows != start_rows(60, 3)).any(1).sum() == 60
            for tensor, expected in zip([rows, *state], [their_rows, *their_state], strict=True):
                torch.testing.assert_close(tensor, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_epsilon_inside_the_root_gives_the_numbers_of_dgl_optim(make_table, kernels: str) -> None:
    """``dgl.optim.SparseAdagrad``, DGL's optimizer for tables of one machine."""
    twin = dgl.nn.NodeEmbedding(
        50, 4, f"inside_{kernels}", init_func=lambda rows: rows.copy_(start_rows(50, 4))
    )
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


def test_dgl_writes_the_root_over_its_state() -> None:
    """200 gradients of 2.5: DGL's learning rate never decays. Fails if DGL is mended."""
    (dgl_row, dgl_state), (row, state) = run("roots", 1, arguments={"process_group": True})[0]
    assert dgl_state < 4 < 1000 < state  # about sqrt(g^2 + 3) against the sum of 200 squares
    assert dgl_row < -10 < -3 < row


def test_trainers_that_are_no_multiple_of_servers() -> None:
    """Three trainers and two servers: DGL's exchange breaks, ours does not."""
    expected = start_rows(60, 2)
    # Rows 0, 1, 2 by one trainer each, row 3 by all three: Adagrad's first step is the sign.
    expected[:4] -= 0.1
    results = run("uneven", 3, num_servers=2, expected_status={})
    for result in results:
        torch.testing.assert_close(result["ours"], expected)
    assert any("Error" in result["dgl"] for result in results if isinstance(result["dgl"], str))


@pytest.mark.parametrize(("num_trainers", "num_machines"), [(2, 1), (4, 2)])
def test_parts_of_dgl_are_loaded_by_any_trainer(tmp_path: Path, num_trainers: int, num_machines: int) -> None:
    """Each trainer loads the part that DGL's optimizer saved on the next one: no row is lost, and the roots
    that DGL keeps on the CPU become sums."""
    arguments = {"folder": tmp_path}
    for roots, total, lr in run("load_parts", num_trainers, num_machines=num_machines, arguments=arguments):
        assert roots.count_nonzero() > 0
        torch.testing.assert_close(total, roots.square(), rtol=0, atol=0)
        assert lr == pytest.approx(0.25)


def test_state_is_saved_and_loaded_by_other_numbers_of_trainers(tmp_path: Path) -> None:
    """Four trainers save; six and two load, and take the learning rate and epsilon of the file."""
    states = list(torch.rand(2, 60, 1, generator=torch.Generator().manual_seed(0)))
    run("store", 4, arguments={"folder": tmp_path, "states": states, "lr": 0.1, "eps": 1e-8})
    for num_trainers in (6, 2):
        arguments = {"folder": tmp_path, "lr": 0.001, "eps": 2e-8}
        for loaded, lr, eps in run("store", num_trainers, arguments=arguments):
            assert all(map(torch.equal, loaded, states))
            assert (lr, eps) == (0.1, 1e-8)


@pytest.mark.parametrize(("num_trainers", "num_servers"), [(1, 1), (2, 2)])
def test_embeddings_move_by_the_learning_rate(num_trainers: int, num_servers: int) -> None:
    """No process group with one trainer; the state can be opened by its name; a batch may read rows twice."""
    for first, first_sum, second, second_sum in run("embeddings", num_trainers, num_servers=num_servers):
        for rows, total, num_gradients in ((first, first_sum, 1), (second, second_sum, 2)):
            torch.testing.assert_close(rows, torch.full((60, 1), -0.001))
            assert total.unique().tolist() == [(num_trainers * num_gradients) ** 2]


def test_adam_is_torchs_in_the_first_step(make_table) -> None:
    """Rank and number of trainers may be set; a table without gradients is left as it is; rows by a slice."""
    table, unused = make_table(), make_table()
    optimizer = SparseAdam(params=[table, unused], lr=0.01)
    optimizer._world_size, optimizer._rank = 1, 0
    dense = torch.nn.Embedding.from_pretrained(start_rows(50, 4), freeze=False, sparse=True)
    reference = torch.optim.SparseAdam(dense.parameters(), lr=0.01)
    ids, labels = torch.tensor([3, 30, 41, 7]), torch.ones(4, dtype=torch.int64)
    for rows, adam in ((dense(ids), reference), (table(ids, torch.device("cpu")), optimizer)):
        adam.zero_grad()
        torch.nn.functional.cross_entropy(rows, labels).backward()
        adam.step()
    torch.testing.assert_close(table.weight[0:50], dense.weight.detach(), rtol=1e-5, atol=1e-6)
    assert torch.equal(unused.weight[0:25], start_rows(50, 4)[:25])


def test_attributes_of_dgl(make_table) -> None:
    """Names, defaults and state tensors that DGL's own tests look at; hyper-parameters may be set."""
    table, other = make_table(), make_table()
    adagrad, adam = SparseAdagrad([table], 0.1, 1e-9), SparseAdam([other], 0.2, (0.8, 0.99))
    assert (adagrad._lr, adagrad._eps, adagrad._rank, adagrad._world_size) == (0.1, 1e-9, 0, 1)
    assert (adam._lr, adam._eps, adam._beta1, adam._beta2) == (0.2, 1e-8, 0.8, 0.99)
    assert adagrad._params == [table]
    assert adagrad._state[table.name].name == f"node~thing~{table.name}_sum"
    names = [tensor.tensor_name for tensor in adam._state[other.name]]
    assert names == [f"{other.name}_{key}" for key in ("step", "mem", "power")]
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
    SparseAdagrad([other], lr=0.1).step()
    del first
    second.step()


def test_state_of_another_shape_is_refused(make_table) -> None:
    """Adagrad's state has the name of RowAdagrad's, so only one of them can live."""
    table = make_table(name="contested")
    first = SparseAdagrad([table], lr=0.1)
    message = (
        r"embedding 'contested': another optimizer keeps its state 'contested_sum' with rows \(4,\), this"
    )
    with pytest.raises(ValueError, match=message):
        RowAdagrad([table], lr=0.1)
    del first
    RowAdagrad([table], lr=0.1).step()


@pytest.mark.parametrize("name", ["SparseAdagrad", "SparseAdam"])
def test_edges_have_embeddings(make_table, tmp_path: Path, name: str) -> None:
    """A table over edges beside one over nodes: its rows move, its state is saved and loaded."""
    optimizers = {"SparseAdagrad": SparseAdagrad, "SparseAdam": SparseAdam}
    tables = [make_table(ntype="next_thing"), make_table()]
    assert tables[0].num_embeddings == 51
    optimizer = optimizers[name](tables, lr=0.1)
    for table, ids in itertools.product(tables, ([50, 0], [49])):
        if max(ids) < table.num_embeddings:
            (table(torch.tensor(ids)) * 3).sum().backward()
    optimizer.step()
    torch.testing.assert_close(
        start_rows(51, 4) - tables[0].weight[torch.arange(51)],
        torch.zeros(51, 4).index_fill_(0, torch.tensor([0, 49, 50]), 0.1),
    )
    saved = {key: tensor[torch.arange(51)] for key, tensor in optimizer.state_tensors(tables[0]).items()}
    optimizer.save(tmp_path / "state")
    for tensor in optimizer.state_tensors(tables[0]).values():
        tensor[torch.arange(51)] = torch.zeros(tensor.shape)
    optimizer.load(tmp_path / "state")
    for key, tensor in optimizer.state_tensors(tables[0]).items():
        assert torch.equal(tensor[torch.arange(51)], saved[key])
        assert saved[key].any()
