"""Dense parameters under the launcher: the same on one, two and three trainers; a user's own module."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dglkge.checkpoint import open_checkpoint
from dglkge.model.score_functions import SCORE_FUNCTIONS
from dglkge.registry import import_modules
from tests.functional import job as commands
from tests.functional.test_same_result_everywhere import stats, tables
from tests.toy_kg import toy_dataset

OWN = Path(__file__).with_name("own") / "dense_score.py"
SETTINGS = (
    *("model.dimension=16", "model.init_scale=0.1", "training.matmul_dtype=float32"),
    *("training.batch_size=50", "training.num_epochs=3", "dense.lr=0.01", "evaluation.split=none"),
)


@pytest.fixture(autouse=True)
def own_module_is_forgotten() -> Iterator[None]:
    """Remove what the test imports: other tests list all score functions."""
    yield
    SCORE_FUNCTIONS._members.pop("two_layers", None)
    for name, module in list(sys.modules.items()):
        if getattr(module, "__file__", None) == str(OWN):
            del sys.modules[name]


@pytest.mark.parametrize(
    ("trainers", "typed", "more"),
    [
        # Shares are uneven, and the norm that is clipped is that of rows and core together.
        (
            *(3, False),
            (
                *("model.score_function=tucker", "model.reciprocal_relations=false", "model.init_scale=0.3"),
                *("negatives.num_uniform=20", "negatives.chunk_size=25", "optimizer.clip_norm=0.05"),
                *("training.relation_prediction=0.5", "model.score_function.relation_dimension=6"),
            ),
        ),
        (
            *(2, True),
            (
                *("model.score_function=two_layers", f"imports=[{OWN}]", "training.objective=one_vs_all"),
                "dense.optimizer={name: AdamW, weight_decay: 0.1}",
                "dense.schedule={name: ExponentialLR, gamma: 0.5}",
                *("model.entity_dropout=0.1", "optimizer.warmup_batches=3"),
            ),
        ),
    ],
    ids=["tucker, negatives and relations, clipped", "own module, one vs all, scheduled"],
)
def test_dense_parameters_do_not_depend_on_the_trainers(
    tmp_path: Path, trainers: int, typed: bool, more: tuple[str, ...]
) -> None:
    dataset, alone, run = toy_dataset(typed=typed), tmp_path / "alone", tmp_path / "run"
    settings = (f"dataset={dataset}", *SETTINGS, *more)
    done = commands.train_alone(f"output={alone}", *settings)
    assert done.returncode == 0, done.stderr
    done = commands.train(tmp_path, trainers, f"output={run}", *settings)
    assert done.returncode == 0, done.stderr
    for one, several in zip(stats(alone), stats(run), strict=True):
        assert several["loss"] == pytest.approx(one["loss"], rel=1e-4)
    import_modules([str(OWN)])
    found = tables(dataset, run)
    for name, rows in tables(dataset, alone).items():
        np.testing.assert_allclose(found[name], rows, rtol=1e-3, atol=1e-4, err_msg=name)
    of_run = open_checkpoint(run).dense_parameters()
    expected = open_checkpoint(alone).dense_parameters()
    assert expected and of_run.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(of_run[name], values, rtol=1e-3, atol=1e-4, err_msg=name)
