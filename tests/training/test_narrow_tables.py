"""Training on rows of 16 bits: a step is that of float32 from the same rows, rounded."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import dglkge
from dglkge.checkpoint.reader import open_checkpoint
from dglkge.config import load_config
from dglkge.data.dataset import Dataset
from dglkge.data.dataset_files import read_dataset_size
from dglkge.errors import CheckpointError
from dglkge.planning.memory import plan_memory
from dglkge.planning.shared_memory import state_bytes, table_bytes
from dglkge.typing import RELATION
from tests.toy_kg import toy_dataset
from tests.training import live
from tests.training.live import batches_of, opened, train

DIM = 8


def configured(run: Path, *more: str) -> dglkge.Config:
    words = ("model.init_scale=0.5", "regularizer.name=auto", "training.num_epochs=1", *more)
    return load_config(None, live.settings(toy_dataset(typed=True), run, "evaluation.split=none", *words))


def two_steps(run: Path, start: dict[str, torch.Tensor], *more: str) -> tuple[Any, Any, list[float]]:
    """Train two batches; return the rows before and after the first, and the losses of both."""
    with opened(configured(run, *more)) as trainer:
        for name, rows in start.items():
            trainer.tables[name].local_rows.copy_(rows)
        tables, losses = [], []
        for _, batch in itertools.islice(batches_of(trainer, 1), 2):
            rows = {name: table.widened(np.arange(len(table))) for name, table in trainer.tables.items()}
            tables.append(rows)
            losses.append(trainer.step(batch))
        return *tables, losses


KINDS = {
    "negatives": ("optimizer.clip_norm=0.1", "optimizer.weight_decay=0.1"),
    "reference": ("training.kernels=reference", "optimizer.name=row_adagrad"),
    "distance": ("model.score_function=transe_l2", "loss.name=margin_ranking", "model.max_norm=0.7"),
    "adam": ("optimizer.name=sparse_adam", "optimizer.lr=0.05", "loss.name=logistic"),
    "one_vs_all": ("training.objective=one_vs_all", "model.entity_dropout=0.2"),
    "one_vs_all_reference": ("training.objective=one_vs_all", "training.kernels=reference"),
    "k_vs_all": ("training.objective=k_vs_all", "training.relation_prediction=0.5", "regularizer.name=n3"),
    "global_vectors": ("model.global_vectors=true", "model.reciprocal_relations=false"),
    "buckets": ("sampling.num_ranges=2", "training.synchronous=false"),
}


# The type matters to lookup and update only: two kinds cover it.
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [*((kind, "bfloat16") for kind in KINDS), ("negatives", "float16"), ("one_vs_all", "float16")],
)
def test_a_step_is_that_of_float32_rounded(tmp_path: Path, kind: str, dtype: str) -> None:
    before, after, narrow = two_steps(tmp_path / "narrow", {}, f"tables.dtype={dtype}", *KINDS[kind])
    start, wide_after, wide = two_steps(tmp_path / "wide", before, *KINDS[kind])
    # The same loss from the same rows, and the second batch's from nearly the same.
    assert narrow[0] == pytest.approx(wide[0], rel=1e-5)
    assert narrow[1] == pytest.approx(wide[1], rel=0.02)
    kept = getattr(torch, dtype)
    for name, rows in before.items():
        assert torch.equal(rows, start[name])
        is_narrow = torch.equal(after[name], after[name].to(kept).float())
        assert is_narrow == (name != RELATION)
        if name == RELATION:
            torch.testing.assert_close(after[name], wide_after[name], rtol=1e-4, atol=1e-5)
            continue
        # One of the two neighbours.
        unit = torch.finfo(kept).eps * wide_after[name].abs() + 1e-5
        assert bool(((after[name] - wide_after[name]).abs() <= unit).all()), name
        # Rows without a gradient are not rounded again.
        untouched = (wide_after[name] == start[name]).all(dim=1)
        assert torch.equal(after[name][untouched], before[name][untouched])


@pytest.mark.parametrize(("dtype", "share"), [("float32", 1.0), ("bfloat16", 0.5), ("float16", 0.5)])
def test_tables_take_what_is_planned(dtype: str, share: float, tmp_path: Path) -> None:
    more = ("model.dimension=2048", "optimizer.relations.name=row_adagrad")  # 2,048 numbers are whole pages
    wide_config, config = configured(tmp_path, *more), configured(tmp_path, *more, f"tables.dtype={dtype}")
    size = read_dataset_size(Path(config.dataset))
    (part,) = size.parts
    with opened(config) as trainer:
        rows = {name: table.local_rows.nbytes for name, table in trainer.tables.items()}
        states = [
            (state.local_partition.nbytes, state.local_partition.dtype)
            for table in trainer.tables.values()
            for state in trainer.optimizer.state_tensors(table.embedding).values()
        ]
    assert table_bytes(part, config) == sum(rows.values())
    # A number for each relation does not fill a page.
    assert state_bytes(part, config) == sum(-(-num_bytes // 4096) * 4096 for num_bytes, _ in states)
    assert {state_dtype for _, state_dtype in states} == {torch.float32}
    num_entities = sum(num for name, num in part.num_rows.items() if name != RELATION)
    assert sum(rows.values()) - rows[RELATION] == share * 4 * 2048 * num_entities
    (host,), (wide,) = (plan_memory(each, size, 2, 1) for each in (config, wide_config))
    # Files have float32; the copy for the background writer has the tables' type.
    assert host.disk_bytes == wide.disk_bytes
    memory, wide_memory = dict(host.memory), dict(wide.memory)
    saved = wide_memory["tables"] - memory["tables"]
    assert wide_memory["checkpoint's background copy"] - memory["checkpoint's background copy"] == saved
    assert wide.shared_memory_bytes - host.shared_memory_bytes == saved


def test_given_vectors_and_other_runs_start_rounded_to_the_nearest(tmp_path: Path) -> None:
    dataset = Dataset.open(toy_dataset(typed=True))
    kind = dataset.entity_types[0]
    names = list(dataset.vocabulary(kind).names)
    vectors = np.random.default_rng(0).standard_normal((len(names), DIM)).astype(np.float32)
    path = tmp_path / "vectors.txt"
    pd.DataFrame(vectors, index=names).to_csv(path, sep=" ", header=False, float_format="%.9g")
    init = (f"model.init_from.path={path}", "model.init_from.std=-1")
    with opened(configured(tmp_path / "run", "tables.dtype=bfloat16", *init)) as trainer:
        got = trainer.tables.gather(kind, torch.arange(len(names)))
        expected = torch.from_numpy(vectors).bfloat16().float()
        assert torch.equal(got, expected)
        trainer.commit()
    # A run in float32 starts with these very numbers, and one in float16 with the nearest.
    for dtype in ("float32", "float16"):
        more = (f"tables.dtype={dtype}", f"checkpoint.init_path={tmp_path / 'run'}")
        limit = ("model.max_norm=1",) if dtype == "float16" else ()
        with opened(configured(tmp_path / dtype, *more, *limit)) as trainer:
            rows = trainer.tables.gather(kind, torch.arange(len(names)))
            if dtype == "float32":
                assert torch.equal(rows, expected)
            else:
                lengths = expected.norm(dim=1, keepdim=True)
                shorter = torch.where(lengths > 1, expected / lengths, expected)
                torch.testing.assert_close(rows, shorter, rtol=2**-10, atol=2**-20)
                assert torch.equal(rows, rows.half().float())


def test_the_type_may_change_while_epochs_are_left(tmp_path: Path) -> None:
    for dtype, num_epochs in (("float32", 1), ("bfloat16", 2)):
        more = (f"training.num_epochs={num_epochs}", f"tables.dtype={dtype}", "checkpoint.every_epochs=1")
        with opened(configured(tmp_path / "run", *more)) as trainer:
            if dtype == "bfloat16":
                saved = open_checkpoint(tmp_path / "run")
                for name in trainer.tables.entity_types:
                    got = trainer.tables.gather(name, torch.arange(len(trainer.tables[name])))
                    assert torch.equal(got, saved[name][:].bfloat16().float())
            train(trainer, num_epochs)
            trainer.commit()
    config = configured(tmp_path / "run", *more[:1], "tables.dtype=float16")
    with pytest.raises(CheckpointError, match="tables.dtype was 'bfloat16', is 'float16'"), opened(config):
        pass
