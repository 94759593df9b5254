"""What a user of torch.optim and of DGL expects: traces, zero_grad, schedulers, groups, messages."""

from __future__ import annotations

import doctest
import gc
import importlib
import pkgutil

import pytest
import torch

import dglkge.optim
from dglkge.optim import SparseAdagrad, SparseAdam
from tests.optim.oracle import EVERYTHING

IDS = torch.tensor([1, 2])


def test_each_gradient_counts_once_and_nothing_stays_behind(adagrad) -> None:
    """Wherever zero_grad is called; gradients are summed until then, or until a step, as in torch."""
    table, optimizer = adagrad

    def sums() -> list[float]:
        assert table._trace == []
        return optimizer._state[table.name][torch.tensor([1, 2, 7])][:, 0].tolist()

    for step, place in enumerate(("before the forward", "before the backward", "nowhere"), start=1):
        if place == "before the forward":
            optimizer.zero_grad()
        rows = table(IDS)
        if place == "before the backward":
            optimizer.zero_grad()
        rows.sum().backward()
        optimizer.step()
        assert sums() == [step, step, 0.0]
    table(IDS).sum().backward()
    optimizer.zero_grad()
    optimizer.step()
    assert sums() == [3.0, 3.0, 0.0]
    for ids in (IDS, IDS[:1]):
        table(ids).sum().backward()
    ahead = table(torch.tensor([7])).sum()  # has its gradient after the next step
    optimizer.step()
    assert optimizer._state[table.name][IDS][:, 0].tolist() == [7.0, 4.0]
    ahead.backward()
    optimizer.step()
    assert sums() == [7.0, 4.0, 1.0]
    with torch.no_grad():
        table(IDS)
    assert table._trace == []
    for _ in range(3):  # rows that are dropped without a backward are forgotten
        table(IDS)
        optimizer.step()
    gc.collect()
    assert sums() == [7.0, 4.0, 1.0]
    assert [rows for _, rows in optimizer.tables[0].trace._pairs()] == []


def test_schedulers_set_the_learning_rate(make_table) -> None:
    table = make_table()
    optimizer = SparseAdam([table], lr=0.8)
    step_lr = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    before = table.weight[EVERYTHING]
    for expected in (0.8, 0.4, 0.2):
        assert optimizer._lr == pytest.approx(expected)
        optimizer.step_rows([(table, torch.tensor([0]), torch.ones(1, 4))])
        optimizer.step()
        step_lr.step()
    # Adam moves a row by the learning rate while its gradient stays the same
    torch.testing.assert_close(before[0] - table.weight[torch.tensor([0])][0], torch.full((4,), 1.4))
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0)
    for loss in (1.0, 2.0):
        plateau.step(loss)
    assert optimizer._lr == pytest.approx(0.01)


def test_groups_may_be_added(make_table) -> None:
    fast, slow, later = make_table(), make_table(2), make_table()
    optimizer = SparseAdagrad([{"params": [fast], "lr": 1.0}, {"params": slow}], lr=0.1)
    optimizer.add_param_group({"params": [later], "lr": 0.5})
    before = [table.weight[EVERYTHING] for table in (fast, slow, later)]
    optimizer.step_rows([(table, IDS, torch.ones(2, table.embedding_dim)) for table in (fast, slow, later)])
    for table, rows, lr in zip((fast, slow, later), before, (1.0, 0.1, 0.5)):
        torch.testing.assert_close(rows[1] - table.weight[IDS][0], torch.full((table.embedding_dim,), lr))


def test_a_closure_computes_the_loss_also_under_no_grad(adagrad) -> None:
    table, optimizer = adagrad

    def closure() -> float:
        loss = table(IDS).sum()
        loss.backward()
        return float(loss.detach())

    before = table.weight[EVERYTHING]
    with torch.no_grad():
        assert optimizer.step(closure) == pytest.approx(float(before[IDS].sum()))
    assert (table.weight[EVERYTHING] != before).any(1).nonzero().flatten().tolist() == [1, 2]


def test_overlap_fences_rows_and_state(make_table) -> None:
    table = make_table()
    optimizer = SparseAdagrad([table], lr=0.1, overlap=True)
    tensors = optimizer.state_tensors(table)
    for step in range(1, 20):
        table(EVERYTHING).sum().backward()
        optimizer.step()
        reader = tensors["sum"] if step % 2 else optimizer._state[table.name]
        assert reader[EVERYTHING].unique().tolist() == [step]
    optimizer.step_rows([(table, torch.tensor([1]), torch.full((1, 4), float("nan")))])
    with pytest.raises(FloatingPointError, match="not finite for 1 rows of"):
        optimizer.finish()
    table.weight[IDS] = torch.zeros(2, 4)
    assert table.weight[IDS].abs().sum() == 0


def test_bad_options_are_named(make_table) -> None:
    """Before anything is made; the embedding stays free for another optimizer."""
    table = make_table()
    for arguments, message in (
        ({"lr": -1}, "lr must be a finite number >= 0, got -1"),
        ({"eps": float("nan")}, "eps must be a finite number >= 0, got nan"),
        ({"weight_decay": -0.5}, "weight_decay must be a finite number >= 0, got -0.5"),
        ({"max_row_norm": 0}, "max_row_norm must be positive or None, got 0"),
        ({"betas": (0.9, 1.0)}, r"betas must be two numbers in \[0, 1\), got \(0.9, 1.0\)"),
        ({"duplicates": "max"}, "duplicates must be 'sum' or 'mean', got 'max'"),
        ({"wire_dtype": torch.int8}, "wire_dtype must be torch.float32, bfloat16 or float16, got torch.int8"),
        ({"nonfinite": "ignore"}, "nonfinite must be 'raise' or 'skip', got 'ignore'"),
        ({"timeout_seconds": 0}, "timeout_seconds must be positive, got 0"),
        ({"kernels": "plain"}, "kernels must be 'auto' or 'reference', got 'plain'"),
        ({"bias_correction": "none"}, "bias_correction must be 'row' or 'global', got 'none'"),
    ):
        with pytest.raises(ValueError, match=message):
            SparseAdam([table], **{"lr": 0.1, **arguments})
    SparseAdam([table], lr=0.1)


def test_wrong_objects_are_named(make_table) -> None:
    """A parameter of torch, an embedding twice, ids and shapes that do not fit, a foreign embedding."""
    table, other = make_table(), make_table()
    for parameters, error, message in (
        ([torch.nn.Parameter(torch.zeros(2))], TypeError, "updates dgl.distributed.DistEmbedding only"),
        ([], ValueError, "empty parameter list"),
        ([table, "table"], TypeError, "got str"),
        ([table, table], ValueError, f"embedding 'node~thing~{table.name}' is given twice"),
    ):
        with pytest.raises(error, match=message):
            SparseAdagrad(parameters, lr=0.1)
    optimizer = SparseAdagrad(table, lr=0.1)
    with pytest.raises(ValueError, match="is given twice"):
        optimizer.add_param_group({"params": table})
    for ids, rows, message in (
        ([50], (1, 4), r"id 50 is not in \[0, 50\)"),
        ([-1], (1, 4), "id -1 is not in"),
        ([1, 2], (1, 4), r"expected ids \(n,\) and rows \(n, 4\), got \(2,\) and \(1, 4\)"),
    ):
        with pytest.raises(ValueError, match=message):
            optimizer.step_rows([(table, torch.tensor(ids), torch.ones(rows))])
    with pytest.raises(ValueError, match=f"'{other.name}' is not one of this optimizer's: .'{table.name}'."):
        optimizer.step_rows([(other, IDS, torch.ones(2, 4))])
    with pytest.raises(ValueError, match="is not one of this optimizer's"):
        optimizer.state_tensors(other)


def test_files_of_any_name_and_of_other_tables(make_table, tmp_path, caplog) -> None:
    """Files of more trainers, and state of other tables, are left out with a warning."""
    table, other = make_table(), make_table()
    optimizer = SparseAdagrad([table], lr=0.1)
    optimizer.step_rows([(table, IDS, torch.ones(2, 4))])
    optimizer.save(tmp_path / "state[1]")
    assert [path.name for path in tmp_path.iterdir()] == ["state[1]_0"]
    (tmp_path / "state[1]_3").write_bytes((tmp_path / "state[1]_0").read_bytes())
    optimizer.step_rows([(table, IDS, torch.ones(2, 4))])
    optimizer.load(str(tmp_path / "state[1]").encode())
    assert optimizer._state[table.name][IDS].unique().tolist() == [1.0]
    assert "ignored the files of trainers [3]" in caplog.text
    content = torch.load(tmp_path / "state[1]_0", weights_only=True)
    stranger = SparseAdam([other], lr=0.1)
    stranger.load_state_dict(content)
    assert f"ignored the saved state of ['{table.name}']" in caplog.text
    content["emb_states"][other.name] = content["emb_states"][table.name]
    with pytest.raises(ValueError, match="the file has .* this optimizer"):
        stranger.load_state_dict(content)


def test_examples_of_docstrings(standalone_graph) -> None:
    num_examples = 0
    for module in pkgutil.iter_modules(dglkge.optim.__path__, "dglkge.optim."):
        results = doctest.testmod(importlib.import_module(module.name))
        assert results.failed == 0, module.name
        num_examples += results.attempted
    assert num_examples > 5
