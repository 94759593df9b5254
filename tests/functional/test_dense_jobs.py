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
OWN_MODULE = ("model.score_function=two_layers", f"imports=[{OWN}]")
SCRIPT = str(Path(__file__).with_name("overflow_train.py"))


@pytest.fixture(autouse=True)
def own_module_is_forgotten() -> Iterator[None]:
    """Remove what the test imports: other tests list all score functions."""
    yield
    SCORE_FUNCTIONS._members.pop("two_layers", None)
    for name, module in list(sys.modules.items()):
        if getattr(module, "__file__", None) == str(OWN):
            del sys.modules[name]


def test_an_own_module_does_not_depend_on_the_trainers(tmp_path: Path) -> None:
    alone, run = tmp_path / "alone", tmp_path / "run"
    settings = (f"dataset={toy_dataset(typed=True)}", *SETTINGS, "training.objective=one_vs_all")
    settings += (*OWN_MODULE, "model.entity_dropout=0.1")
    settings += ("dense.optimizer={name: AdamW, weight_decay: 0.1}", "optimizer.warmup_batches=3")
    settings += ("dense.schedule={name: ExponentialLR, gamma: 0.5}",)
    commands.train_alone(f"output={alone}", *settings)
    commands.train(tmp_path, 2, f"output={run}", *settings)
    import_modules([str(OWN)])
    assert len(parameters(alone)) > 4
    assert_same_training(run, alone)


@pytest.mark.skipif(autocast_problem("cpu", torch.float16) is not None, reason="no float16 on the CPU")
@pytest.mark.parametrize("sharding", ["replicated", pytest.param("fsdp", marks=NEEDS_SLICES)])
def test_an_overflow_on_one_trainer_skips_the_batch_on_all(tmp_path: Path, sharding: str) -> None:
    settings = [f"dataset={toy_dataset()}", f"output={tmp_path / 'run'}", *SETTINGS]
    settings += ["model.score_function=transformer", "dense.autocast=float16", "training.num_epochs=1"]
    settings += ["training.batch_size=32", f"dense.sharding={sharding}"]
    command = commands.launch_command(tmp_path, 2, settings, script=(SCRIPT, str(tmp_path)))
    commands.run(command, folder=tmp_path)
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
        pytest.param((*OWN_MODULE, "dense.compile=true", "dense.sharding=fsdp"), 1e-4, marks=NEEDS_SLICES),
    ],
    ids=["bfloat16", "compiled, in slices"],
)
def test_one_and_two_trainers(tmp_path: Path, more: tuple[str, ...], tolerance: float) -> None:
    """Compiled code is compared with the module as it is written."""
    if "dense.compile=true" in more and compiler_problem():
        pytest.skip(f"{compiler_problem()}")
    alone, run = tmp_path / "alone", tmp_path / "run"
    settings = (f"dataset={toy_dataset()}", *SETTINGS, "training.num_epochs=1", "dense.optimizer=SGD", *more)
    commands.train_alone(f"output={alone}", *settings, "dense.compile=false")
    commands.train(tmp_path, 2, f"output={run}", *settings)
    for record, other in zip(stats(run), stats(alone), strict=True):
        assert record["loss"] == pytest.approx(other["loss"], rel=tolerance)
    if set(OWN_MODULE) <= set(more):
        import_modules([str(OWN)])
    trained, expected = parameters(run), parameters(alone)
    assert trained.keys() == expected.keys()
    for name, rows in expected.items():
        assert np.linalg.norm(trained[name] - rows) <= tolerance * np.linalg.norm(rows), name


def compare(alone: Path, run: Path) -> None:
    """Compare losses, rankings, parameters and the state of the dense optimizer of two runs."""
    assert_same_training(run, alone, atol=1e-3)
    rankings = [[record["valid"] for record in stats(folder) if "valid" in record] for folder in (run, alone)]
    assert rankings[0] and rankings[0] == [pytest.approx(ranking, rel=1e-2) for ranking in rankings[1]]
    state, expected = (
        {name: values for name, values in datasets(folder).items() if name.startswith("model:dense/")}
        for folder in (run, alone)
    )
    assert len(expected) >= 4
    assert_near(state, expected, 1e-3, 1e-4)


SHARED = (
    *("model.init_scale=0.3", "training.matmul_dtype=float32", "training.batch_size=50", "dense.lr=0.01"),
    *("optimizer.clip_norm=0.05", "optimizer.schedule={name: ExponentialLR, gamma: 0.7}"),
    *("evaluation.split=none", "evaluation.valid_every_epochs=2"),
)
TUCKER = (
    # A core (7, 16, 16): slices of 3, 3 and 1 matrices on three trainers.
    *("model.score_function={name: tucker, relation_dimension: 7}", "model.dimension=16"),
    *("model.reciprocal_relations=false", "negatives.num_uniform=20", "negatives.chunk_size=25"),
    *("training.relation_prediction=0.5", "dense.optimizer={name: AdamW, weight_decay: 0.1}", *SHARED),
)


@pytest.fixture(scope="module")
def tucker_alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("tucker") / "run"
    commands.train_alone(f"dataset={toy_dataset()}", f"output={run}", "training.num_epochs=4", *TUCKER)
    return run


def test_a_core_does_not_depend_on_the_trainers(tucker_alone: Path, tmp_path: Path) -> None:
    """Shares are uneven, and the norm that is clipped is that of rows and core together."""
    words = (f"dataset={toy_dataset()}", f"output={tmp_path / 'run'}", "training.num_epochs=4", *TUCKER)
    commands.train(tmp_path, 3, *words)
    compare(tucker_alone, tmp_path / "run")


@NEEDS_SLICES
def test_shards_train_as_one_process_and_resume_at_any_size(tucker_alone: Path, tmp_path: Path) -> None:
    """Three trainers for two epochs, then two with slices of theirs; replicated ones read the same files."""
    run, settings = tmp_path / "run", (f"dataset={toy_dataset()}", *TUCKER)
    for trainers, epochs in ((3, 2), (2, 4)):
        more = (f"training.num_epochs={epochs}", "dense.sharding=fsdp", *settings)
        commands.train(tmp_path, trainers, f"output={run}", *more)
    assert not list(run.glob("tmp*"))
    compare(tucker_alone, run)
    # Nothing is left to train: one process without slices takes the files over and ranks.
    for folder in (run, tucker_alone):
        commands.train_alone(f"output={folder}", "training.num_epochs=4", *settings, "evaluation.split=test")
    assert metrics(run)["both"] == pytest.approx(metrics(tucker_alone)["both"], rel=1e-2)


@NEEDS_SLICES
def test_layers_and_projections_of_features_in_slices(tmp_path: Path) -> None:
    """Rows of a batch are projected before its loss, with parameters that were elsewhere until then."""
    dataset, alone, run = toy_dataset(typed=True), tmp_path / "alone", tmp_path / "run"
    settings = (f"dataset={dataset}", *SHARED, "training.num_epochs=2", "dense.sharding=fsdp")
    settings += ("model.score_function=transformer", "model.dimension=8", "training.objective=one_vs_all")
    settings += (write_features(tmp_path, dataset), "features.mlp={}")
    settings += ("dense.optimizer={name: SGD, momentum: 0.9}",)
    commands.train_alone(f"output={alone}", *settings)
    # The stand-in for a GPU: it computes with a copy of the layers, filled from slices before each batch.
    commands.train(tmp_path, 2, f"output={run}", "training.device=cpu_staged", *settings)
    compare(alone, run)
