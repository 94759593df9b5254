"""Components in files of the user go all the way: plan, train, save, load, evaluate, predict, export."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from dglkge.data.dataset import Dataset
from tests.functional import job as commands
from tests.functional.results import metrics, tables
from tests.toy_kg import REPOSITORY, toy_dataset

OWN = {
    "loss": ("loss={name: steep, slope: 2}", "training.objective=one_vs_all"),
    "objective": ("training.objective={name: tails, label_smoothing: 0.1}",),
    "regularizer": ("regularizer={name: fourth, weight: 0.5}",),
    "rule": ("optimizer={name: heavy_ball, momentum: 0.7, lr: 0.5}",),
    "transform": ("model.row_transform={name: center, share: 0.9}",),
}
EXAMPLE = REPOSITORY / "examples" / "own_loss.py"
SETTINGS = (
    *("model.dimension=8", "model.init_scale=0.3", "negatives.num_uniform=10", "training.batch_size=60"),
    *("training.matmul_dtype=float32", "regularizer.name=none"),
)


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    return train(tmp_path_factory.mktemp("usual") / "run", 2)


def train(output: Path, num_epochs: int, *settings: str) -> dict[str, np.ndarray]:
    """Train, or resume, until so many epochs are finished; returns the tables."""
    more = (f"output={output}", f"training.num_epochs={num_epochs}", *settings)
    commands.train_alone(f"dataset={toy_dataset()}", *SETTINGS, *more)
    return tables(output)


@pytest.mark.parametrize("kind", OWN)
def test_a_component_in_one_file(tmp_path: Path, kind: str, usual: dict[str, np.ndarray]) -> None:
    source = EXAMPLE if kind == "loss" else Path(__file__).parent / "own" / f"{kind}.py"
    module = shutil.copy(source, tmp_path / "mine.py")
    settings, named = (*OWN[kind], f"imports=[{module}]"), ("--import", str(module))
    (tmp_path / "config.yaml").write_text(f"dataset: {toy_dataset()}\n", encoding="utf-8")
    plan = ["plan", str(tmp_path / "config.yaml"), "--json", "--num_trainers", "1", *named]
    done = commands.dglkge(*plan, *commands.sets((*SETTINGS, *OWN[kind])))
    (machine,) = json.loads(done.stdout)["machines"]
    assert machine["memory"]["tables"] > 0
    at_once = train(tmp_path / "at_once", 2, *settings)
    assert any(not np.array_equal(at_once[name], rows) for name, rows in usual.items())
    # Saved and loaded: equal only if all its state went on. The run names the module by itself.
    train(tmp_path / "run", 1, *settings)
    resumed = train(tmp_path / "run", 2, *OWN[kind])
    for name, rows in at_once.items():
        np.testing.assert_array_equal(resumed[name], rows, err_msg=name)
    done = commands.dglkge("evaluate", str(tmp_path / "run"), "--json", *named)
    assert json.loads(done.stdout)["both"]["mrr"] == pytest.approx(metrics(tmp_path / "run")["both"]["mrr"])
    query = ("--head", "e003", "--relation", "turn_1")
    done = commands.dglkge("predict", str(tmp_path / "run"), *query, *named, "--topk", "5", "--json")
    assert len(json.loads(done.stdout)["answers"]) == 5


DIM = 16
SCORE_SETTINGS = (
    *("model.score_function=pairwise_scale", f"model.dimension={DIM}", "negatives.num_uniform=20"),
    *("training.batch_size=48", "training.num_epochs=2"),
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
    settings = (f"dataset={toy_dataset()}", f"output={folder / 'run'}", *SCORE_SETTINGS)
    commands.run([*commands.launch_command(folder, 2, settings), "--import", str(module)])
    return folder / "run"


def test_memory_is_planned_with_its_widths(module: Path, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(f"dataset: {toy_dataset()}\n", encoding="utf-8")
    plan = ["plan", str(tmp_path / "config.yaml"), "--json", "--num_trainers", "1", "--import", str(module)]
    done = commands.dglkge(*plan, *commands.sets(SCORE_SETTINGS))
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
        refused = commands.dglkge(*command, status=2)
        assert refused.stderr.count("\n") == 1
        assert (
            f"'pairwise_scale', trained with {module}; a recorded module runs as Python only"
            in refused.stderr
        )
        assert f"--import {module}" in refused.stderr


def test_predictions_are_those_of_the_formula(run: Path, module: Path, tmp_path: Path) -> None:
    """Scores written out by hand from exported rows, whose first half serves (h, r, ?)."""
    named = ("--import", str(module))
    done = commands.dglkge("evaluate", str(run), "--json", *named)
    assert json.loads(done.stdout)["both"]["mrr"] == pytest.approx(metrics(run)["both"]["mrr"])
    done = commands.dglkge("export", str(run), "--format", "npy", "--output", str(tmp_path), *named)
    entities, relations = (np.load(tmp_path / f"{table}.npy") for table in ("entity", "relation"))
    assert relations.shape[1] == entities.shape[1] == DIM
    expected = [sum(entities[3, k] * tail[k] * relations[1, k // 2] for k in range(DIM)) for tail in entities]
    names = [(tmp_path / f"{table}.names.txt").read_text().splitlines() for table in ("entity", "relation")]
    query = ("--head", names[0][3], "--relation", names[1][1])
    done = commands.dglkge("predict", str(run), *query, *named, "--topk", "5", "--json")
    answers = json.loads(done.stdout)["answers"]
    best = np.argsort(expected)[::-1][:5]
    assert [answer["name"] for answer in answers] == [names[0][place] for place in best]
    np.testing.assert_allclose([answer["score"] for answer in answers], np.array(expected)[best], rtol=1e-5)


def test_it_is_resumed_without_being_named_again(run: Path, module: Path, tmp_path: Path) -> None:
    output = Path(shutil.copytree(run, tmp_path / "run"))
    settings = (f"dataset={toy_dataset()}", f"output={output}", *SCORE_SETTINGS, "training.num_epochs=3")
    done = commands.train_alone(*settings)
    assert "resumed: 2 epochs and 0 batches done" in done.stderr
    assert json.loads((output / "config.json").read_text(encoding="utf-8"))["imports"] == [str(module)]
