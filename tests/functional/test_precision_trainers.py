"""Modules in 16 bits and compiled, under the launcher: overflows on one trainer, and one or two trainers."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from dglkge.checkpoint import open_checkpoint
from dglkge.model.precision import autocast_problem, compiler_problem
from dglkge.registry import import_modules
from tests import warm
from tests.functional import job as commands
from tests.functional.test_dense_trainers import OWN, SETTINGS, own_module_is_forgotten  # noqa: F401
from tests.functional.test_same_result_everywhere import stats, tables
from tests.toy_kg import toy_dataset
from tests.training.shards import NEEDS_SLICES

COMPILED = ("model.score_function=two_layers", f"imports=[{OWN}]", "dense.compile=true")
SCRIPT = str(Path(__file__).with_name("overflow_train.py"))


@pytest.mark.skipif(
    autocast_problem("cpu", torch.float16) is not None, reason="torch has no float16 autocast on the CPU"
)
@pytest.mark.parametrize("sharding", ["replicated", pytest.param("fsdp", marks=NEEDS_SLICES)])
def test_an_overflow_on_one_trainer_skips_the_batch_on_all(tmp_path: Path, sharding: str) -> None:
    settings = [f"dataset={toy_dataset()}", f"output={tmp_path / 'run'}", *SETTINGS]
    settings += ["model.score_function=transformer", "dense.autocast=float16", "training.num_epochs=1"]
    settings += ["training.batch_size=32", f"dense.sharding={sharding}"]
    command = [*warm.python(), "-m", "dglkge.cli.launch", "--ip_config", str(commands.ip_config(tmp_path))]
    command += ["--num_trainers", "2", "--num_omp_threads", "1", SCRIPT, str(tmp_path)]
    command += [word for one in settings for word in ("--set", one)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=commands.environment(), cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
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
    dataset, alone, run = toy_dataset(), tmp_path / "alone", tmp_path / "run"
    settings = (f"dataset={dataset}", *SETTINGS, "training.num_epochs=1", "dense.optimizer=SGD", *more)
    for done in (
        # Compiled code is compared with the module as it is written.
        commands.train_alone(f"output={alone}", *settings, "dense.compile=false"),
        commands.train(tmp_path, 2, f"output={run}", *settings),
    ):
        assert done.returncode == 0, done.stderr
    for one, several in zip(stats(alone), stats(run), strict=True):
        assert several["loss"] == pytest.approx(one["loss"], rel=tolerance)
    if "model.score_function=two_layers" in more:
        import_modules([str(OWN)])
    found = tables(dataset, run) | open_checkpoint(run).dense_parameters()
    expected = tables(dataset, alone) | open_checkpoint(alone).dense_parameters()
    assert found.keys() == expected.keys()
    for name, rows in expected.items():
        difference = np.linalg.norm(np.asarray(found[name]) - np.asarray(rows))
        assert difference <= tolerance * np.linalg.norm(rows), name
