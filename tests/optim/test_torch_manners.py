"""What a user of torch.optim and of DGL expects: traces, zero_grad, schedulers, groups, attributes,
messages."""

from __future__ import annotations

import gc

import pytest
import torch

from dglkge.optim import SparseAdagrad, SparseAdam

EVERYTHING = torch.arange(50)
IDS = torch.tensor([1, 2])


def moved(table, before: torch.Tensor) -> list[int]:
    return torch.nonzero((table.weight[EVERYTHING] != before).any(1)).flatten().tolist()


@pytest.mark.parametrize("place", ["before the forward", "before the backward", "nowhere"])
def test_zero_grad_may_stand_in_several_places(make_table, place) -> None:
    """Each gradient counts once, wherever zero_grad is called, and nothing stays behind."""
    table = make_table()
    optimizer = SparseAdagrad([table], lr=0.1)
    for step in range(1, 4):
        if place == "before the forward":
            optimizer.zero_grad()
        rows = table(IDS)
        if place == "before the backward":
            optimizer.zero_grad()
        rows.sum().backward()
        optimizer.step()
        assert optimizer._state[table.name][IDS].unique().tolist() == [step]
        assert table._trace == []


def test_zero_grad_drops_gradients(make_table) -> None:
    """After a backward it forgets, as in torch."""
    table = make_table()
    optimizer = SparseAdagrad([table], lr=0.1)
    before = table.weight[EVERYTHING]
    table(IDS).sum().backward()
    optimizer.zero_grad()
    optimizer.step()
    assert moved(table, before) == []


def test_gradients_accumulate_over_backwards(make_table) -> None:
    """Two forwards and two backwards before a step are summed."""
    table = make_table()
    optimizer = SparseAdagrad([table], lr=0.1)
    for ids in (IDS, IDS[:1]):
        table(ids).sum().backward()
    optimizer.step()
    assert optimizer._state[table.name][IDS][:, 0].tolist() == [4.0, 1.0]


def test_rows_read_ahead_of_a_step_still_count(make_table) -> None:
    """Prefetched rows get their gradient after the step of the batch before."""
    table = make_table()
    optimizer = SparseAdagrad([table], lr=0.1)
    first = table(IDS).sum()
    second = table(torch.tensor([7])).sum()
    first.backward()
    optimizer.step()
    assert optimizer._state[table.name][torch.tensor([1, 7])][:, 0].tolist() == [1.0, 0.0]
    second.backward()
    optimizer.step()
    assert optimizer._state[table.name][torch.tensor([1, 7])][:, 0].tolist() == [1.0, 1.0]


def test_reads_without_backward_do_not_leak(make_table) -> None:
    """Rows that are read with gradients on and dropped are forgotten; under no_grad nothing is recorded."""
    table = make_table()
    optimizer = SparseAdagrad([table], lr=0.1)
    with torch.no_grad():
        table(IDS)
    assert table._trace == []
    for _ in range(3):
        table(IDS)
        optimizer.step()
    gc.collect()
    assert table._trace == []
    assert [rows for _, rows in optimizer.tables[0].trace._pairs()] == []


def test_schedulers_set_the_learning_rate(make_table) -> None:
    """StepLR, a warm-up with LambdaLR, and ReduceLROnPlateau."""
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


def test_groups_have_their_own_learning_rates(make_table) -> None:
    """Two groups, one of them added later."""
    fast, slow, later = make_table(), make_table(2), make_table()
    optimizer = SparseAdagrad([{"params": [fast], "lr": 1.0}, {"params": slow}], lr=0.1)
    optimizer.add_param_group({"params": [later], "lr": 0.5})
    before = [table.weight[EVERYTHING] for table in (fast, slow, later)]
    optimizer.step_rows([(table, IDS, torch.ones(2, table.embedding_dim)) for table in (fast, slow, later)])
    for table, rows, lr in zip((fast, slow, later), before, (1.0, 0.1, 0.5)):
        torch.testing.assert_close(rows[1] - table.weight[IDS][0], torch.full((table.embedding_dim,), lr))


def test_closure(make_table) -> None:
    """step(closure) computes the loss and returns it, also under no_grad."""
    table = make_table()
    optimizer = SparseAdagrad([table], lr=0.1)

    def closure() -> float:
        loss = table(IDS).sum()
        loss.backward()
        return float(loss.detach())

    before = table.weight[EVERYTHING]
    with torch.no_grad():
        assert optimizer.step(closure) == pytest.approx(float(before[IDS].sum()))
    assert moved(table, before) == [1, 2]


def test_overlap_fences_rows_and_state(make_table) -> None:
    """Rows and state that are read right after a step are those after the step."""
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
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
    ],
)
def test_bad_options_are_named(make_table, arguments, message) -> None:
    """Before anything is made; the embedding stays free for another optimizer."""
    table = make_table()
    with pytest.raises(ValueError, match=message):
        SparseAdam([table], **{"lr": 0.1, **arguments})
    SparseAdam([table], lr=0.1)


def test_wrong_objects_are_named(make_table) -> None:
    """A parameter of torch, an embedding twice, ids and shapes that do not fit, a foreign embedding."""
    table, other = make_table(), make_table()
    with pytest.raises(
        TypeError, match="SparseAdagrad updates dgl.distributed.DistEmbedding only, got Parameter"
    ):
        SparseAdagrad([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    with pytest.raises(ValueError, match="empty parameter list"):
        SparseAdagrad([], lr=0.1)
    with pytest.raises(TypeError, match="got str"):
        SparseAdagrad([table, "table"], lr=0.1)
    with pytest.raises(ValueError, match=f"embedding 'node~thing~{table.name}' is given twice"):
        SparseAdagrad([table, table], lr=0.1)
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


def test_state_dict_round_trip(make_table, tmp_path, caplog) -> None:
    """Saved with a path object, loaded into another optimizer; files of DGL's make too."""
    table, other = make_table(), make_table()
    optimizer = SparseAdagrad([table], lr=0.1)
    optimizer.step_rows([(table, IDS, torch.ones(2, 4))])
    optimizer.save(tmp_path / "state[1]")
    assert [path.name for path in tmp_path.iterdir()] == ["state[1]_0"]
    (tmp_path / "state[1]_3").write_bytes((tmp_path / "state[1]_0").read_bytes())
    content = torch.load(tmp_path / "state[1]_0", weights_only=True)
    assert content["params"]["_lr"] == 0.1
    assert list(content["emb_states"][table.name]) == ["ids", "states"]
    optimizer.step_rows([(table, IDS, torch.ones(2, 4))])
    optimizer.param_groups[0]["lr"] = 0.3
    optimizer.load(str(tmp_path / "state[1]").encode())
    assert optimizer._state[table.name][IDS].unique().tolist() == [1.0]
    assert optimizer._lr == 0.1
    assert "ignored the files of trainers [3]" in caplog.text
    stranger = SparseAdam([other], lr=0.1)
    stranger.load_state_dict(content)
    assert f"ignored the saved state of ['{table.name}']" in caplog.text
    content["emb_states"][other.name] = content["emb_states"][table.name]
    with pytest.raises(ValueError, match="the file has .* this optimizer"):
        stranger.load_state_dict(content)
