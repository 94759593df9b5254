"""``dglkge tune``: the plan, and what is refused before anything is created."""

from __future__ import annotations

import fcntl
import json
import sys

import pytest

from dglkge.cli.main import main
from dglkge.tuning.tune import LOCK_FILE
from tests.toy_kg import toy_dataset


@pytest.fixture
def space(tmp_path):
    """Return a function that writes a space."""

    def write(**search):
        path = tmp_path / "space.yaml"
        content = {
            "set": {"dataset": str(toy_dataset(typed=True)), "training.num_epochs": 20},
            "space": {"optimizer.lr": [0.05, 0.1]},
            "search": search,
        }
        path.write_text(json.dumps(content))  # JSON is YAML
        return path

    return write


def call(capsys, *arguments):
    status = main(["tune", *map(str, arguments)])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_plan_is_shown_first(space, tmp_path, capsys):
    pytest.importorskip("optuna", reason="Optuna is not installed (extra 'tune')")
    output = tmp_path / "out"
    status, out, err = call(capsys, space(trials=8, reduction=2), "--output", output, "--dry-run")
    lines = out.splitlines()
    assert (status, err) == (0, "") and not output.exists()
    assert lines[0].split() == ["trials", "core", "share", "epochs", "trial_cost", "cost"]
    assert [line.split()[0] for line in lines[1:5]] == ["8", "4", "2", "1"]
    assert lines[4].split()[1:] == ["0", "1.0", "20", "1.0", "1.0"]
    assert lines[5].startswith("cost: ") and lines[5].endswith(
        "full trainings, the winner's included; allowed: 3"
    )
    status, out, _ = call(
        capsys, space(), "--output", output, "--dry-run", "--json", "--trials", "4", "--budget", "2"
    )
    report = json.loads(out)
    assert report["budget"] == 2 and report["cost"] <= 2
    assert [rung["trials"] for rung in report["rungs"]] == [4, 1]
    assert report["cost"] == pytest.approx(sum(rung["cost"] for rung in report["rungs"]), abs=1e-3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--budget", "0.5"], "the budget must be at least 1 full training, got 0.5"),
        (["--budget", "1"], "is too small for a search over 64 trials"),
        (["--trials", "0"], "the number of trials must be at least 1, got 0"),
        (["--num_trainers", "-1"], "--num-trainers must be at least 0, got -1"),
        (["--set", "dataset=/nowhere"], "/nowhere is no dataset folder"),
        (["--set", "model.dim=3"], "unknown key 'model.dim'"),
        (["--set", "loss.name=softmx"], "unknown loss 'softmx'"),
        (["--set", "training.objective=k_vs_all", "--set", "negatives.mask_known=true"], "k_vs_all"),
    ],
)
def test_mistakes(space, tmp_path, capsys, arguments, words):
    pytest.importorskip("optuna", reason="Optuna is not installed (extra 'tune')")
    status, out, err = call(capsys, space(), "--output", tmp_path / "out", *arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert words in err and not (tmp_path / "out").exists()


def test_one_search_at_a_time(space, tmp_path, capsys):
    pytest.importorskip("optuna", reason="Optuna is not installed (extra 'tune')")
    output = tmp_path / "out"
    output.mkdir()
    with open(output / LOCK_FILE, "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        status, _, err = call(capsys, space(), "--output", output)
    assert status == 2 and f"another dglkge tune runs in {output}; wait for it" in err.splitlines()[-1]
    assert [path.name for path in output.iterdir()] == [LOCK_FILE]


def test_without_optuna(space, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    status, out, err = call(capsys, space(), "--output", tmp_path / "out")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("dglkge: error: dglkge tune needs optuna: pip install 'dglkge[tune]' (")
    assert not (tmp_path / "out").exists()
