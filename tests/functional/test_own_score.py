"""A score function in a file of the user goes all the way: plan, launch, resume, evaluate, predict, export.

No file of dglkge names it: ``examples/own_score_function.py`` is all there is. It is imported by the commands
only, so that the other tests do not meet it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from dglkge.data.dataset import Dataset
from tests.functional import job as commands
from tests.toy_kg import REPOSITORY, toy_dataset

DIM = 16
SETTINGS = (
    "model.score_function=pairwise_scale",
    f"model.dimension={DIM}",
    "negatives.num_uniform=20",
    "training.batch_size=48",
    "training.num_epochs=2",
)
MODULE = REPOSITORY / "examples" / "own_score_function.py"


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The user's file, in a folder that no process has on its path."""
    return Path(shutil.copy(MODULE, tmp_path_factory.mktemp("mine") / "mine.py"))


@pytest.fixture(scope="module")
def run(module: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run under the launcher: one server, two trainers."""
    folder = tmp_path_factory.mktemp("own")
    settings = (f"dataset={toy_dataset()}", f"output={folder / 'run'}", *SETTINGS)
    command = [*commands.launch_command(folder, 2, settings), "--import", str(module)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=commands.TIME_LIMIT_SECONDS,
        env=commands.environment(),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "run"


def test_memory_is_planned_with_its_widths(module: Path, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(f"dataset: {toy_dataset()}\n", encoding="utf-8")
    plan = ["plan", str(tmp_path / "config.yaml"), "--json", "--num_trainers", "1"]
    for setting in SETTINGS:
        plan += ["--set", setting]
    done = commands.dglkge(*plan, "--import", str(module))
    assert done.returncode == 0, done.stderr
    (machine,) = json.loads(done.stdout)["machines"]
    dataset = Dataset.open(toy_dataset())
    # a relation has two directions of half an entity's width
    pages = sum(
        -(-4 * DIM * count // 4096) for count in (dataset.num_entities("entity"), dataset.num_relations)
    )
    assert machine["memory"]["tables"] == 4096 * pages


def test_reading_runs_no_module_that_only_the_run_names(run: Path, module: Path, tmp_path: Path) -> None:
    for command in (
        ("inspect", str(run)),
        ("export", str(run), "--format", "npy", "--output", str(tmp_path / "tables")),
        ("evaluate", str(run)),
    ):
        refused = commands.dglkge(*command)
        assert refused.returncode == 2 and refused.stderr.count("\n") == 1
        assert (
            f"'pairwise_scale', trained with {module}; a recorded module runs as Python only"
            in refused.stderr
        )
        assert f"--import {module}" in refused.stderr


def test_it_is_evaluated(run: Path, module: Path) -> None:
    assert json.loads((run / "config.json").read_text(encoding="utf-8"))["imports"] == [str(module)]
    metrics = json.loads((run / "metrics.json").read_text(encoding="utf-8"))["test"]
    done = commands.dglkge("evaluate", str(run), "--json", "--import", str(module))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["both"]["mrr"] == pytest.approx(metrics["both"]["mrr"])


def test_predictions_are_those_of_the_formula(run: Path, module: Path, tmp_path: Path) -> None:
    """Scores written out by hand from exported rows, whose first half serves (h, r, ?)."""
    named = ("--import", str(module))
    done = commands.dglkge("export", str(run), "--format", "npy", "--output", str(tmp_path), *named)
    assert done.returncode == 0, done.stderr
    entities, relations = (np.load(tmp_path / f"{table}.npy") for table in ("entity", "relation"))
    assert relations.shape[1] == entities.shape[1] == DIM
    expected = [sum(entities[3, k] * tail[k] * relations[1, k // 2] for k in range(DIM)) for tail in entities]
    names = [(tmp_path / f"{table}.names.txt").read_text().splitlines() for table in ("entity", "relation")]
    query = ("--head", names[0][3], "--relation", names[1][1])
    done = commands.dglkge("predict", str(run), *query, *named, "--topk", "5", "--json")
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)["answers"]
    best = np.argsort(expected)[::-1][:5]
    assert [one["name"] for one in answers] == [names[0][place] for place in best]
    np.testing.assert_allclose([one["score"] for one in answers], np.array(expected)[best], rtol=1e-5)


def test_it_is_resumed_without_being_named_again(run: Path, module: Path, tmp_path: Path) -> None:
    output = Path(shutil.copytree(run, tmp_path / "run"))
    settings = (f"dataset={toy_dataset()}", f"output={output}", *SETTINGS, "training.num_epochs=3")
    done = commands.train_alone(*settings)
    assert done.returncode == 0, done.stderr
    assert "resumed: 2 epochs and 0 batches done" in done.stderr
    assert json.loads((output / "config.json").read_text(encoding="utf-8"))["imports"] == [str(module)]
