"""``dglkge tune``: the plan, and what is refused before anything is created."""

from __future__ import annotations

import fcntl
import json

import pytest

from dglkge.tuning.tune import LOCK_FILE
from tests.toy_kg import toy_dataset


@pytest.fixture
def tune(tmp_path):
    def write(**search):
        fixed = {"dataset": str(toy_dataset(typed=True)), "training.num_epochs": 20}
        content = {"set": fixed, "space": {"optimizer.lr": [0.05, 0.1]}, "search": search}
        (tmp_path / "space.yaml").write_text(json.dumps(content))  # JSON is YAML
        return ["tune", tmp_path / "space.yaml", "--output", tmp_path / "out"]

    return write


@pytest.fixture
def optuna():
    return pytest.importorskip("optuna", reason="Optuna is not installed (extra 'tune')")


def test_plan_is_shown_first(optuna, tune, tmp_path, shown, report):
    lines = shown(*tune(trials=8, reduction=2), "--dry-run").splitlines()
    assert not (tmp_path / "out").exists()
    assert lines[0].split() == ["trials", "core", "share", "epochs", "trial_cost", "cost"]
    assert [line.split()[0] for line in lines[1:5]] == ["8", "4", "2", "1"]
    assert lines[4].split()[1:] == ["0", "1.0", "20", "1.0", "1.0"]
    ending = "full trainings, the winner's included; allowed: 3"
    assert lines[5].startswith("cost: ") and lines[5].endswith(ending)
    plan = report(*tune(), "--dry-run", "--trials", "4", "--budget", "2")
    assert plan["budget"] == 2 and plan["cost"] <= 2
    assert [rung["trials"] for rung in plan["rungs"]] == [4, 1]
    assert plan["cost"] == pytest.approx(sum(rung["cost"] for rung in plan["rungs"]), abs=1e-3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--budget 0.5", "the budget must be at least 1 full training, got 0.5"),
        ("--budget 1", "is too small for a search over 64 trials"),
        ("--trials 0", "the number of trials must be at least 1, got 0"),
        ("--num_trainers -1", "--num-trainers must be at least 0, got -1"),
        ("--set dataset=/nowhere", "/nowhere is no dataset folder"),
        ("--set model.dim=3", "unknown key 'model.dim'"),
        ("--set training.objective=k_vs_all --set negatives.mask_known=true", "k_vs_all"),
    ],
)
def test_mistakes(optuna, tune, tmp_path, refusal, arguments, words):
    assert words in refusal(*tune(), *arguments.split())
    assert not (tmp_path / "out").exists()


def test_one_search_at_a_time(optuna, tune, tmp_path, call):
    (tmp_path / "out").mkdir()
    with open(tmp_path / "out" / LOCK_FILE, "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        status, _, err = call(*tune())
    words = f"another dglkge tune runs in {tmp_path}/out; wait for it"
    assert status == 2 and words in err.splitlines()[-1]
    assert [path.name for path in (tmp_path / "out").iterdir()] == [LOCK_FILE]
