"""Saved state: files, dictionaries and other programs' forms."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest
import torch
from dgl.distributed import DistTensor

from dglkge.optim import SparseAdagrad, SparseAdam
from tests.optim.cluster import partitions, run_cluster
from tests.optim.oracle import EVERYTHING, start_rows

IDS = torch.tensor([1, 2])


def form_of_dgl(table, total: float) -> dict:
    """State as DGL's SparseAdagrad saves it: the same number for every element."""
    states = {f"node~thing~{table.name}_sum": torch.full((50, 4), total)}
    params = {"world_size": 1, "_lr": 0.5, "_eps": 0.0}
    return {"params": params, "emb_states": {table.name: {"ids": EVERYTHING, "states": states}}}


@pytest.mark.parametrize(("roots", "root_of_sum"), [(True, 5.0), (False, 19**0.5)])
def test_roots_of_dgl_are_squared(adagrad, tmp_path, roots: bool, root_of_sum: float) -> None:
    """DGL keeps 3 where the sum of squares is 9; with a gradient of 4 the next root is 5."""
    table, optimizer = adagrad
    before = table.weight[IDS]
    torch.save(form_of_dgl(table, 3.0), tmp_path / "state_0")
    optimizer.load(f"{tmp_path}//state", dgl_keeps_roots=roots)
    optimizer.step_rows([(table, IDS, torch.full((2, 4), 4.0))])
    torch.testing.assert_close(before - table.weight[IDS], torch.full((2, 4), 0.5 * 4 / root_of_sum))
    optimizer.load_local_state_dict(form_of_dgl(table, 3.0), dgl_keeps_roots=roots)
    state = optimizer.state_tensors(table)["sum"][EVERYTHING]
    assert state.unique().tolist() == [9.0 if roots else 3.0]
    assert (optimizer._lr, optimizer._eps) == (0.5, 0.0)


def test_rows_that_do_not_fit_are_refused(adagrad, tmp_path) -> None:
    """One error, by file and by dictionary, and nothing changes."""
    table, optimizer = adagrad
    optimizer.step_rows([(table, IDS, torch.ones(2, 4))])
    before = optimizer.state_tensors(table)["sum"][EVERYTHING]
    name = f"node~thing~{table.name}_sum"
    for ids, shape, message in (
        (EVERYTHING + 1, (50, 4), f"state of '{table.name}': the file has row 50, the table has 50 rows"),
        (EVERYTHING - 1, (50, 4), f"state of '{table.name}': the file has row -1, the table has 50 rows"),
        (EVERYTHING, (50, 3), r"expected rows .4,. for 50 ids, the file has .3,. for 50"),
        (EVERYTHING, (49, 4), r"expected rows .4,. for 50 ids, the file has .4,. for 49"),
    ):
        wrong = form_of_dgl(table, 3.0)
        wrong["emb_states"][table.name] = {"ids": ids, "states": {name: torch.ones(shape)}}
        with pytest.raises(ValueError, match=message):
            optimizer.load_local_state_dict(wrong)
        torch.save(wrong, tmp_path / "wrong_0")
        with pytest.raises(ValueError, match=message):
            optimizer.load(tmp_path / "wrong")
    wrong = form_of_dgl(table, 3.0)
    wrong["params"]["_lr"] = float("nan")
    with pytest.raises(ValueError, match="lr must be a finite number >= 0, got nan"):
        optimizer.load_local_state_dict(wrong)
    (tmp_path / "noise_0").write_bytes(b"no archive")
    with pytest.raises(ValueError, match="noise_0 is no optimizer state: "):
        optimizer.load(tmp_path / "noise")
    assert torch.equal(optimizer.state_tensors(table)["sum"][EVERYTHING], before)
    assert (optimizer._lr, optimizer._eps) == (0.1, 1e-10)


def sparse_gradient(step: int) -> torch.Tensor:
    """A gradient of 50 rows, for some of them, in float64."""
    ids = torch.tensor([step % 5, 7, 9 + step])
    values = torch.arange(12, dtype=torch.float64).reshape(3, 4) + 1 + step
    return torch.sparse_coo_tensor(ids[None], values, (50, 4), check_invariants=True).coalesce()


@pytest.mark.parametrize("kind", ["Adagrad", "SparseAdam"])
def test_state_of_torch_goes_on(make_table, kind: str) -> None:
    table = make_table()
    rows = torch.nn.Parameter(start_rows(50, 4).double())
    reference = getattr(torch.optim, kind)([rows], lr=0.3)
    is_adam = kind == "SparseAdam"
    optimizer = SparseAdam([table], 0.1, bias_correction="global") if is_adam else SparseAdagrad([table], 0.1)
    for step in range(6):
        if step == 3:
            table.weight[EVERYTHING] = rows.detach().float()
            optimizer.load_state_dict(reference.state_dict())
            assert optimizer._lr == 0.3
        gradient = sparse_gradient(step)
        rows.grad = gradient
        reference.step()
        if step >= 3:
            optimizer.step_rows([(table, gradient.indices()[0], gradient.values().float())])
    torch.testing.assert_close(table.weight[EVERYTHING].double(), rows.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("keys", [("state", "param_groups"), ("params", "emb_states")])
def test_state_dict_is_of_both_forms(make_table, tmp_path, keys: tuple[str, str]) -> None:
    """Either pair of keys alone restores rows, steps, rates and the learning rate of each group."""
    tables = [make_table(), make_table(2)]
    gradients = [(tables[0], IDS, torch.ones(2, 4)), (tables[1], IDS, torch.full((2, 2), 3.0))]

    def adam() -> SparseAdam:
        groups = [{"params": tables[:1], "lr": 0.2}, {"params": tables[1:]}]
        return SparseAdam(groups, lr=0.1, bias_correction="global")

    first = adam()
    for _ in range(3):
        first.step_rows(gradients)
    first.param_groups[0]["betas"] = (0.5, 0.9)
    saved, rows = first.state_dict(), [table.weight[EVERYTHING] for table in tables]
    assert set(saved) == {"state", "param_groups", "params", "emb_states"}
    assert [group["params"] for group in saved["param_groups"]] == [[0], [1]]
    assert set(saved["state"][0]) == {"ids", "step", "exp_avg", "exp_avg_sq"}
    torch.save({key: saved[key] for key in keys}, tmp_path / "saved")
    first.step_rows(gradients)
    expected = [table.weight[EVERYTHING] for table in tables]
    del first  # and its state with it
    second = adam()
    second.load_state_dict(torch.load(tmp_path / "saved", weights_only=True))
    for table, before in zip(tables, rows):
        table.weight[EVERYTHING] = before
    second.step_rows(gradients)
    assert [group["lr"] for group in second.param_groups] == [0.2, 0.1]
    assert second.param_groups[0]["betas"] == (0.5, 0.9)
    assert all(torch.equal(table.weight[EVERYTHING], after) for table, after in zip(tables, expected))
    with pytest.raises(ValueError, match=r"the saved state has groups of .2. parameters, this optimizer of"):
        second.load_state_dict({"state": {}, "param_groups": [{"params": [0, 1]}]})
    with pytest.raises(ValueError, match="'step' is missing, the file has ."):
        groups = [{"params": [0]}, {"params": [1]}]
        second.load_state_dict({"state": {0: {"sum": torch.ones(50, 4)}}, "param_groups": groups})


@pytest.mark.parametrize("unscales", [False, True])
def test_grad_scaler(adagrad, unscales: bool) -> None:
    """The steps of torch's Adagrad without a scaler; one with an infinite gradient is left out."""
    table, optimizer = adagrad
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=3)
    rows = torch.nn.Parameter(start_rows(50, 4).double())
    reference = torch.optim.Adagrad([rows], lr=0.1, eps=1e-10)
    scales = []
    for step in range(6):
        gradient = sparse_gradient(step)
        ids, values = gradient.indices()[0], gradient.values().float()
        optimizer.zero_grad()
        for part in (slice(0, 2), slice(1, 3)):  # two reads, with a row in common
            loss = (table(ids[part]) * values[part] / 2).sum()
            scaler.scale(loss * (float("inf") if step == 1 else 1.0)).backward()
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        if step != 1:
            share = torch.tensor([[0.5], [1.0], [0.5]], dtype=torch.float64)
            rows.grad = torch.zeros_like(rows).index_add_(0, ids, values.double() * share)
            reference.step()
    torch.testing.assert_close(table.weight[EVERYTHING].double(), rows.detach(), rtol=1e-5, atol=1e-5)
    assert scales == [2.0**14, 2.0**13, 2.0**13, 2.0**13, 2.0**14, 2.0**14]
    assert optimizer.num_skipped_rows == 0


def test_numbers_of_overlapping_steps_are_not_lost(make_table) -> None:
    """The number given to a step is summed in that step, although the next one is started before it ends."""
    table = make_table()
    optimizer = SparseAdagrad([table], lr=0.1, overlap=True)
    finishing, sums = threading.Event(), []
    finish = optimizer.finish

    def let_it_end() -> None:
        finishing.set()
        result = finish()
        sums.append(0 if result is None else result.extra_sum)

    optimizer.when_phase(lambda phase: phase != "waiting" or finishing.wait(60))
    optimizer.finish = let_it_end
    for extra in (1, 0, 0, 1):
        optimizer.step_rows([(table, IDS, torch.ones(2, 4))], extra=extra)
        finishing.clear()
    optimizer.step()
    optimizer.finish()
    assert sums == [0, 1, 0, 0, 1, 0]


def test_rows_that_others_overwrite_are_not_waited_for(make_table, monkeypatch) -> None:
    """Hogwild on rows of 16 bits: what is read back is what another trainer has written meanwhile."""
    table = make_table(dtype=torch.bfloat16)
    optimizer = SparseAdagrad([table], lr=0.5, synchronous=False, timeout_seconds=2)
    write = DistTensor.__setitem__

    def write_and_lose(tensor: DistTensor, ids: torch.Tensor, rows: torch.Tensor) -> None:
        write(tensor, ids, rows)
        write(tensor, ids, rows + 1)  # another trainer

    before = table.weight[IDS]
    monkeypatch.setattr(DistTensor, "__setitem__", write_and_lose)
    optimizer.step_rows([(table, IDS, torch.ones(2, 4))])
    torch.testing.assert_close(table.weight[IDS], before + 0.5)


def run(worker: str, folder: Path, num_trainers: int, num_machines: int, **more: float) -> list:
    maps = torch.load(partitions(num_machines) / "original_ids.pt", weights_only=True)["user"]
    arguments = {"folder": folder, "original_ids": maps, **more}
    return run_cluster(worker, num_trainers, num_machines=num_machines, arguments=arguments)


def test_state_moves_to_another_cluster(tmp_path: Path) -> None:
    """2 trainers on 2 machines save; 1 on 1 and 3 on 2 load, with the rate and epsilon of the file."""
    saved = run("save_state", tmp_path, 2, 2)[0]
    assert len(list(tmp_path.iterdir())) == 4
    for num_trainers, num_machines, lr in ((1, 1, 0.001), (3, 2, 0.2)):
        for results in run("load_state", tmp_path, num_trainers, num_machines, lr=lr):
            by_original, by_node, without_map, nothing = results
            if num_machines == 1:
                assert by_node.startswith("state of 'saved' is saved by node ids of another partitioning")
            for state, got_lr, eps in [by_original] if num_machines == 1 else [by_original, by_node]:
                assert (got_lr, eps) == pytest.approx((0.05, 1e-8))
                for key, rows in saved.items():
                    torch.testing.assert_close(state[key], rows, rtol=0, atol=0)
            assert without_map == "state of 'saved' is saved by original ids: give original_ids to load it"
            assert nothing == f"no file {tmp_path}/nothing_<rank> to load optimizer state from"


def test_what_one_trainer_cannot_load_or_save_is_told_to_all(tmp_path: Path) -> None:
    (load, save), (own_load, own_save) = run("fail_alone", tmp_path, 2, 1)
    assert own_load == "KeyError: 'ids'"
    assert load == f"ValueError: trainer 1 cannot load the optimizer state: {own_load}"
    assert str(tmp_path / "none") in own_save
    assert save == f"OSError: trainer 1 cannot save the optimizer state: {own_save}"


def test_trainers_share_the_rows_out_and_skip_a_step_together() -> None:
    """Each row is saved once; an overflow of one is left out by all; who gives up ends the others' step."""
    results = run_cluster("several", 3, arguments={"workers": ["saved_ids", "overflow", "give_up"]})
    for rank, ((alone, ids), (rows, scales), message) in enumerate(results):
        assert alone == (None if rank else list(range(0, 60, 3)))
        assert ids == list(range(rank, 60, 3))
        expected = start_rows(60, 2)
        expected[5] -= 0.5  # Adagrad's first step is the learning rate; the second was left out,
        expected[5] -= 0.5 * 3 / 10**0.5  # and the third has the gradients 1 and 3
        torch.testing.assert_close(rows, expected)
        assert scales == [1024.0, 512.0, 512.0]
        mistake = r"ValueError: gradient of 'given_up': id 1000 is not in \[0, 60\)"
        other = r"ConnectionError: optimizer step 2: trainer 1 \(process .*\) gave up"
        assert re.fullmatch(mistake if rank == 1 else other, message)
