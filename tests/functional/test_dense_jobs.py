"""Modules under the launcher: any number of trainers, in slices, in 16 bits and compiled, and overflows."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from dglkge.model.device import autocast_problem, compiler_problem
from dglkge.model.score_functions import SCORE_FUNCTIONS
from dglkge.registry import import_modules
from tests.functional import job as commands
from tests.functional.results import assert_near, assert_same_training, datasets, metrics, parameters, stats
from tests.functional.test_same_result_everywhere import write_features
from tests.toy_kg import toy_dataset
from tests.training.test_dense_parameters import NEEDS_SLICES

OWN = Path(__file__).with_name("own") / "dense_score.py"
SETTINGS = (
    *("model.dimension=16", "model.init_scale=0.1", "training.matmul_dtype=float32", "dense.lr=0.01"),
    *("training.batch_size=50", "training.num_epochs=3", "evaluation.split=none"),
)
COMPILED = ("model.score_function=two_layers", f"imports=[{OWN}]", "dense.compile=true")
SCRIPT = str(Path(__file__).with_name("overflow_train.py"))


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
                *("dense.optimizer={name: AdamW, weight_decay: 0.1}", "model.entity_dropout=0.1"),
                *("dense.schedule={name: ExponentialLR, gamma: 0.5}", "optimizer.warmup_batches=3"),
            ),
        ),
    ],
    ids=["tucker, negatives and relations, clipped", "own module, one vs all, scheduled"],
)
def test_dense_parameters_do_not_depend_on_the_trainers(tmp_path, trainers, typed, more):
    alone, run = tmp_path / "alone", tmp_path / "run"
    settings = (f"dataset={toy_dataset(typed=typed)}", *SETTINGS, *more)
    commands.train_alone(f"output={alone}", *settings)
    commands.train(tmp_path, trainers, f"output={run}", *settings)
    import_modules([str(OWN)])
    assert len(parameters(alone)) > (2, 4)[typed]
    assert_same_training(run, alone)


@pytest.mark.skipif(
    autocast_problem("cpu", torch.float16) is not None, reason="torch has no float16 autocast on the CPU"
)
@pytest.mark.parametrize("sharding", ["replicated", pytest.param("fsdp", marks=NEEDS_SLICES)])
def test_an_overflow_on_one_trainer_skips_the_batch_on_all(tmp_path: Path, sharding: str) -> None:
    settings = [f"dataset={toy_dataset()}", f"output={tmp_path / 'run'}", *SETTINGS]
    settings += ["model.score_function=transformer", "dense.autocast=float16", "training.num_epochs=1"]
    settings += ["training.batch_size=32", f"dense.sharding={sharding}"]
    commands.run(
        commands.launch_command(tmp_path, 2, settings, script=(SCRIPT, str(tmp_path))), folder=tmp_path
    )
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert [index for index, same, _ in first if same] == [1, 3] and len(first) > 4
    start = first[0][2]
    expected = [start, start / 2, start / 2] + [start / 4] * (len(first) - 3)
    assert [scale for _, _, scale in first] == expected
    assert stats(tmp_path / "run")[-1]["skipped_batches"] == 2


@pytest.mark.parametrize(
    ("more", "tolerance"),
    [
        # Each trainer rounds its part of a gradient to 8 bits.
        (("model.score_function={name: conex, channels: 4}", "dense.autocast=bfloat16"), 0.02),
        (COMPILED, 1e-4),
        pytest.param((*COMPILED, "dense.sharding=fsdp"), 1e-4, marks=NEEDS_SLICES),
    ],
    ids=["bfloat16", "compiled", "compiled, in slices"],
)
def test_one_and_two_trainers(tmp_path: Path, more: tuple[str, ...], tolerance: float) -> None:
    if "dense.compile=true" in more and compiler_problem():
        pytest.skip(f"{compiler_problem()}")
    alone, run = tmp_path / "alone", tmp_path / "run"
    settings = (f"dataset={toy_dataset()}", *SETTINGS, "training.num_epochs=1", "dense.optimizer=SGD", *more)
    # Compiled code is compared with the module as it is written.
    commands.train_alone(f"output={alone}", *settings, "dense.compile=false")
    commands.train(tmp_path, 2, f"output={run}", *settings)
    for record, other in zip(stats(run), stats(alone), strict=True):
        assert record["loss"] == pytest.approx(other["loss"], rel=tolerance)
    if "model.score_function=two_layers" in more:
        import_modules([str(OWN)])
    trained, expected = parameters(run), parameters(alone)
    assert trained.keys() == expected.keys()
    for name, rows in expected.items():
        assert np.linalg.norm(trained[name] - rows) <= tolerance * np.linalg.norm(rows), name


SHARD_SETTINGS = (
    *("model.init_scale=0.3", "training.matmul_dtype=float32", "training.batch_size=50", "dense.lr=0.01"),
    *("optimizer.clip_norm=0.05", "optimizer.schedule={name: ExponentialLR, gamma: 0.7}"),
    *("evaluation.split=none", "evaluation.valid_every_epochs=2"),
)


def dense_file(run: Path) -> dict[str, np.ndarray]:
    """Return the dense parameters and their optimizer's state as the newest file has them."""
    return {name: values for name, values in datasets(run).items() if name.startswith("model:dense/")}


def compare(alone: Path, run: Path) -> None:
    """Compare losses, rankings, parameters and the state of the dense optimizer of two runs."""
    assert_same_training(run, alone, atol=1e-3)
    rankings = [[record["valid"] for record in stats(folder) if "valid" in record] for folder in (run, alone)]
    assert rankings[0] and rankings[0] == [pytest.approx(ranking, rel=1e-2) for ranking in rankings[1]]
    state, expected = (dense_file(folder) for folder in (run, alone))
    assert len(expected) >= 4
    assert_near(state, expected, 1e-3, 1e-4)


@NEEDS_SLICES
def test_shards_train_as_one_process_and_resume_at_any_size(tmp_path: Path) -> None:
    """Three trainers for two epochs, then two with slices of theirs; replicated ones read the same files."""
    dataset, alone, run = toy_dataset(), tmp_path / "alone", tmp_path / "run"
    # A core (7, 16, 16): slices of 3, 3 and 1 matrices on three trainers.
    settings = (f"dataset={dataset}", "model.score_function={name: tucker, relation_dimension: 7}")
    settings += (*SHARD_SETTINGS, "dense.optimizer={name: AdamW, weight_decay: 0.1}", "model.dimension=16")
    commands.train_alone(f"output={alone}", "training.num_epochs=4", *settings)
    for trainers, epochs in ((3, 2), (2, 4)):
        more = (f"training.num_epochs={epochs}", "dense.sharding=fsdp", *settings)
        commands.train(tmp_path, trainers, f"output={run}", *more)
    assert not list(run.glob("tmp*"))
    compare(alone, run)
    # Nothing is left to train: one process without slices takes the files over and ranks.
    for folder in (run, alone):
        commands.train_alone(f"output={folder}", "training.num_epochs=4", *settings, "evaluation.split=test")
    assert metrics(run)["both"] == pytest.approx(metrics(alone)["both"], rel=1e-2)


@NEEDS_SLICES
def test_layers_and_projections_of_features_in_slices(tmp_path: Path) -> None:
    """Rows of a batch are projected before its loss, with parameters that were elsewhere until then."""
    dataset, alone, run = toy_dataset(typed=True), tmp_path / "alone", tmp_path / "run"
    settings = (f"dataset={dataset}", *SHARD_SETTINGS, "training.num_epochs=2", "dense.sharding=fsdp")
    settings += ("model.score_function=transformer", "model.dimension=8", "training.objective=one_vs_all")
    settings += (write_features(tmp_path, dataset), "features.mlp={}")
    settings += ("dense.optimizer={name: SGD, momentum: 0.9}",)
    commands.train_alone(f"output={alone}", *settings)
    # The stand-in for a GPU: it computes with a copy of the layers, filled from slices before each batch.
    commands.train(tmp_path, 2, f"output={run}", "training.device=cpu_staged", *settings)
    compare(alone, run)
