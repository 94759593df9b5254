"""Components in files of the user go all the way: plan, train, save, load, evaluate, predict.

No file of dglkge names them: a file of the folder ``own`` or of ``examples`` is all there is of each.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.functional import job as commands
from tests.functional.test_same_result_everywhere import tables
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
    """Tables of a run without components of one's own."""
    return train(tmp_path_factory.mktemp("usual") / "run", 2)


def source(kind: str) -> Path:
    """Return the file of a component."""
    return EXAMPLE if kind == "loss" else Path(__file__).parent / "own" / f"{kind}.py"


def train(output: Path, num_epochs: int, *settings: str) -> dict[str, np.ndarray]:
    """Train, or resume, until so many epochs are finished; returns the tables."""
    dataset = toy_dataset()
    more = (f"output={output}", f"training.num_epochs={num_epochs}", *settings)
    done = commands.train_alone(f"dataset={dataset}", *SETTINGS, *more)
    assert done.returncode == 0, done.stderr
    return tables(dataset, output)


@pytest.mark.parametrize("kind", OWN)
def test_a_component_in_one_file(tmp_path: Path, kind: str, usual: dict[str, np.ndarray]) -> None:
    module = shutil.copy(source(kind), tmp_path / "mine.py")
    settings = (*OWN[kind], f"imports=[{module}]")
    at_once = train(tmp_path / "at_once", 2, *settings)
    assert any(not np.array_equal(at_once[name], rows) for name, rows in usual.items())
    # Saved and loaded: equal only if all its state went on. The run names the module by itself.
    train(tmp_path / "run", 1, *settings)
    resumed = train(tmp_path / "run", 2, *OWN[kind])
    for name, rows in at_once.items():
        np.testing.assert_array_equal(resumed[name], rows, err_msg=name)
    named = ("--import", str(module))
    done = commands.dglkge("evaluate", str(tmp_path / "run"), "--json", *named)
    assert done.returncode == 0, done.stderr
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text(encoding="utf-8"))["test"]
    assert json.loads(done.stdout)["both"]["mrr"] == pytest.approx(metrics["both"]["mrr"])
    query = ("--head", "e003", "--relation", "turn_1")
    done = commands.dglkge("predict", str(tmp_path / "run"), *query, *named, "--topk", "5", "--json")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["answers"]) == 5


@pytest.mark.parametrize("kind", OWN)
def test_it_is_planned(tmp_path: Path, kind: str) -> None:
    module = source(kind)
    (tmp_path / "config.yaml").write_text(f"dataset: {toy_dataset()}\n", encoding="utf-8")
    plan = ["plan", str(tmp_path / "config.yaml"), "--json", "--num_trainers", "1", "--import", str(module)]
    for one in (*SETTINGS, *OWN[kind]):
        plan += ["--set", one]
    done = commands.dglkge(*plan)
    assert done.returncode == 0, done.stderr
    (machine,) = json.loads(done.stdout)["machines"]
    assert machine["memory"]["tables"] > 0
