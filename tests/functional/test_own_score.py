"""A score function in a file of the user's goes the whole way: plan, launch, resume, evaluate, predict, export.

No file of dglkge names it: ``own_score.py`` beside this file is all there is.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from dglkge.checkpoint.reader import open_checkpoint
from dglkge.data.dataset import Dataset
from dglkge.registry import import_modules
from tests.functional import job as commands
from tests.toy_kg import toy_dataset

DIM = 16
SETTINGS = (
    "model.score_function=pairwise_scale",
    f"model.dimension={DIM}",
    "negatives.num_uniform=20",
    "training.batch_size=48",
    "training.num_epochs=2",
)
MODULE = Path(__file__).with_name("own_score.py")


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
    done = commands.run_to_end(command)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "run"


def scores(run: Path, heads: np.ndarray, relations: np.ndarray, tails: np.ndarray) -> np.ndarray:
    """Score triples by the formula written out, from the rows of the checkpoint; the tail's side."""
    checkpoint = open_checkpoint(run)
    rows = [checkpoint.gather("entity", torch.from_numpy(ids)).numpy() for ids in (heads, tails)]
    of_relations = checkpoint.gather("relation", torch.from_numpy(relations)).numpy()
    assert of_relations.shape[1] == DIM  # half an entity's row, for each of two directions
    forward = of_relations[:, : DIM // 2]
    found: np.ndarray = sum(
        rows[0][:, k] * rows[1][:, k] * forward[:, k // 2] for k in range(DIM)
    )  # type: ignore[assignment]
    return found


def test_memory_is_planned_with_its_widths(module: Path, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(f"dataset: {toy_dataset()}\n", encoding="utf-8")
    plan = ["plan", str(tmp_path / "config.yaml"), "--json", "--num_trainers", "1"]
    for setting in SETTINGS:
        plan += ["--set", setting]
    done = commands.dglkge(*plan, "--import", str(module))
    assert done.returncode == 0, done.stderr
    (machine,) = json.loads(done.stdout)["machines"]
    dataset = Dataset.open(toy_dataset())
    num_entities, num_relations = dataset.num_entities("entity"), len(dataset.relations)
    pages = sum(-(-4 * DIM * count // 4096) * 4096 for count in (num_entities, num_relations))
    assert machine["memory"]["tables"] == pages


def test_it_is_recorded_and_evaluated_without_being_named_again(run: Path, module: Path) -> None:
    assert json.loads((run / "config.json").read_text(encoding="utf-8"))["imports"] == [str(module)]
    metrics = json.loads((run / "metrics.json").read_text(encoding="utf-8"))["test"]
    done = commands.dglkge("evaluate", str(run), "--json")
    assert done.returncode == 0, done.stderr
    again = json.loads(done.stdout)
    assert again["both"]["mrr"] == pytest.approx(metrics["both"]["mrr"])


def test_predictions_are_those_of_the_formula(run: Path, module: Path) -> None:
    import_modules([str(module)])
    dataset = Dataset.open(toy_dataset())
    head, relation = dataset.vocabulary("entity").names[3], dataset.relations.relations[0].name
    done = commands.dglkge("predict", str(run), "--head", head, "--relation", relation, "--topk", "5", "--json")
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    count = len(dataset.vocabulary("entity"))
    expected = scores(run, np.full(count, 3), np.zeros(count, np.int64), np.arange(count))
    best = np.sort(expected)[::-1][:5]
    np.testing.assert_allclose([one["score"] for one in answers], best, rtol=1e-4, atol=1e-7)


def test_it_is_resumed_without_being_named_again(run: Path, tmp_path: Path) -> None:
    output = Path(shutil.copytree(run, tmp_path / "run"))
    settings = (f"dataset={toy_dataset()}", f"output={output}", *SETTINGS, "training.num_epochs=3")
    done = commands.train_alone(*settings)
    assert done.returncode == 0, done.stderr
    assert open_checkpoint(output).meta.progress["finished_epochs"] == 3
    saved = json.loads((output / "config.json").read_text(encoding="utf-8"))
    assert saved["imports"] == json.loads((run / "config.json").read_text(encoding="utf-8"))["imports"]


def test_a_file_that_has_gone_is_one_line(run: Path, module: Path, tmp_path: Path) -> None:
    output = Path(shutil.copytree(run, tmp_path / "run"))
    moved = module.with_name("moved.py")
    module.rename(moved)
    try:
        lost = commands.dglkge("export", str(output), "--format", "npy", "--output", str(tmp_path / "a"))
        assert lost.returncode == 2
        assert lost.stderr.count("\n") == 1
        assert f"the checkpoint has the score function 'pairwise_scale': cannot import '{module}'" in lost.stderr
        assert "--import takes the name of a module" in lost.stderr
        found = commands.dglkge(
            "export", str(output), "--format", "npy", "--output", str(tmp_path / "b"), "--import", str(moved)
        )
        assert found.returncode == 0, found.stderr
    finally:
        moved.rename(module)
