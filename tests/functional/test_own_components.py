"""Components in files of the user go all the way: plan, train, save, load, evaluate, predict, export."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from dglkge.data.dataset import Dataset
from tests.functional import job as commands
from tests.functional.results import assert_near, metrics, tables
from tests.toy_kg import REPOSITORY, toy_dataset

OWN = Path(__file__).with_name("own")
EXAMPLES = REPOSITORY / "examples"
COMPONENTS = {
    "loss": (EXAMPLES / "own_loss.py", ("loss={name: steep, slope: 2}", "training.objective=one_vs_all")),
    "objective": (OWN / "objective.py", ("training.objective={name: tails, label_smoothing: 0.1}",)),
    "regularizer": (OWN / "regularizer.py", ("regularizer={name: fourth, weight: 0.5}",)),
    "rule": (OWN / "rule.py", ("optimizer={name: heavy_ball, momentum: 0.7, lr: 0.5}",)),
    "transform": (OWN / "transform.py", ("model.row_transform={name: center, share: 0.9}",)),
}
SETTINGS = (
    *("model.dimension=8", "model.init_scale=0.3", "negatives.num_uniform=10", "training.batch_size=60"),
    *("training.matmul_dtype=float32", "regularizer.name=none"),
)


def train(output: Path, num_epochs: int, *settings: str) -> dict[str, np.ndarray]:
    """Train, or resume, until so many epochs are finished; returns the tables."""
    more = (f"output={output}", f"training.num_epochs={num_epochs}", *settings)
    commands.train_alone(f"dataset={toy_dataset()}", *SETTINGS, *more)
    return tables(output)


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    return train(tmp_path_factory.mktemp("usual") / "run", 2)


@pytest.mark.parametrize("kind", COMPONENTS)
def test_a_component_in_one_file(tmp_path: Path, kind: str, usual: dict[str, np.ndarray]) -> None:
    source, settings = COMPONENTS[kind]
    module = shutil.copy(source, tmp_path / "mine.py")
    (tmp_path / "config.yaml").write_text(f"dataset: {toy_dataset()}\n", encoding="utf-8")
    words = ("--json", "--num_trainers", "1", "--import", module, *commands.sets((*SETTINGS, *settings)))
    (machine,) = json.loads(commands.dglkge("plan", str(tmp_path / "config.yaml"), *words).stdout)["machines"]
    assert machine["memory"]["tables"] > 0
    run, at_once = tmp_path / "run", train(tmp_path / "at_once", 2, *settings, f"imports=[{module}]")
    assert any(not np.array_equal(at_once[name], rows) for name, rows in usual.items())
    # Saved and loaded: equal only if all its state went on. The run names the module by itself.
    train(run, 1, *settings, f"imports=[{module}]")
    assert_near(train(run, 2, *settings), at_once, 0, 0)
    done = commands.dglkge("evaluate", str(run), "--json", "--import", module)
    assert json.loads(done.stdout)["both"]["mrr"] == pytest.approx(metrics(run)["both"]["mrr"])
    query = ("--head", "e003", "--relation", "turn_1", "--import", module, "--topk", "5", "--json")
    assert len(json.loads(commands.dglkge("predict", str(run), *query).stdout)["answers"]) == 5


DIM = 16
SCORE_SETTINGS = (
    *("model.score_function=pairwise_scale", f"model.dimension={DIM}", "negatives.num_uniform=20"),
    *("training.batch_size=48", "training.num_epochs=2"),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two trainers, beside the user's files in a folder that is on no process's path."""
    folder = tmp_path_factory.mktemp("mine")
    shutil.copy(EXAMPLES / "own_score_function.py", folder / "mine.py")
    shutil.copy(OWN / "rule.py", folder)
    settings = (f"dataset={toy_dataset()}", f"output={folder / 'run'}", *SCORE_SETTINGS)
    command = commands.launch_command(folder, 2, (*settings, *COMPONENTS["rule"][1]))
    commands.run([*command, "--import", str(folder / "mine.py"), "--import", str(folder / "rule.py")])
    return folder / "run"


def imports(run: Path) -> list[str]:
    return ["--import", str(run.with_name("mine.py")), "--import", str(run.with_name("rule.py"))]


def test_memory_is_planned_with_the_widths_of_a_score_function(run: Path, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(f"dataset: {toy_dataset()}\n", encoding="utf-8")
    words = ("plan", str(tmp_path / "config.yaml"), "--json", "--num_trainers", "1", *imports(run))
    done = commands.dglkge(*words, *commands.sets(SCORE_SETTINGS))
    (machine,) = json.loads(done.stdout)["machines"]
    dataset = Dataset.open(toy_dataset())
    counts = (dataset.num_entities("entity"), dataset.num_relations)
    # A relation has two directions of half an entity's width.
    assert machine["memory"]["tables"] == sum(4096 * -(-4 * DIM * count // 4096) for count in counts)


def test_reading_runs_no_module_that_only_the_run_names(run: Path, tmp_path: Path) -> None:
    module = run.with_name("mine.py")
    for command in (
        ("inspect", str(run)),
        ("export", str(run), "--format", "npy", "--output", str(tmp_path / "tables")),
        ("evaluate", str(run)),
    ):
        refused = commands.dglkge(*command, status=2)
        assert refused.stderr.count("\n") == 1
        assert f"'pairwise_scale', trained with {module}" in refused.stderr
        assert "a recorded module runs as Python only" in refused.stderr
        assert f"--import {module}" in refused.stderr


def test_predictions_are_those_of_the_formula(run: Path, tmp_path: Path) -> None:
    """Scores written out by hand from exported rows, whose first half serves (h, r, ?)."""
    done = commands.dglkge("evaluate", str(run), "--json", *imports(run))
    assert json.loads(done.stdout)["both"]["mrr"] == pytest.approx(metrics(run)["both"]["mrr"])
    commands.dglkge("export", str(run), "--format", "npy", "--output", str(tmp_path), *imports(run))
    entities, relations = (np.load(tmp_path / f"{table}.npy") for table in ("entity", "relation"))
    assert relations.shape[1] == entities.shape[1] == DIM
    expected = (entities[3] * entities) @ np.repeat(relations[1, : DIM // 2], 2)
    names = [(tmp_path / f"{table}.names.txt").read_text().splitlines() for table in ("entity", "relation")]
    query = ("--head", names[0][3], "--relation", names[1][1], "--topk", "5", "--json")
    answers = json.loads(commands.dglkge("predict", str(run), *query, *imports(run)).stdout)["answers"]
    best = np.argsort(expected)[::-1][:5]
    assert [answer["name"] for answer in answers] == [names[0][place] for place in best]
    np.testing.assert_allclose([answer["score"] for answer in answers], expected[best], rtol=1e-5)


def test_it_is_resumed_without_being_named_again(run: Path, tmp_path: Path) -> None:
    output = Path(shutil.copytree(run, tmp_path / "run"))
    settings = (f"dataset={toy_dataset()}", f"output={output}", *SCORE_SETTINGS, *COMPONENTS["rule"][1])
    done = commands.train_alone(*settings, "training.num_epochs=3")
    assert "resumed: 2 epochs and 0 batches done" in done.stderr
    recorded = json.loads((output / "config.json").read_text(encoding="utf-8"))["imports"]
    assert recorded == imports(run)[1::2]
