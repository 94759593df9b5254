"""``dglkge tune`` with real trainings: from the space to the winner's run, and through Ctrl-C."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import psutil
import pytest
import yaml

from dglkge.inference.run import open_run
from tests import surroundings, warm
from tests.functional import job as commands
from tests.toy_kg import toy_dataset

pytest.importorskip("optuna", reason="Optuna is not installed (extra 'tune')")

INTERRUPTED_EPOCHS = 160
"""Half of them in a trial: seconds, where the interrupt comes some milliseconds after the first epoch."""


def write_space(folder: Path, trials: int, num_epochs: int, **more: object) -> Path:
    base = {
        "dataset": str(toy_dataset()),
        "model.dimension": 16,
        "negatives.num_uniform": 20,
        "training.batch_size": 200,
        "training.num_epochs": num_epochs,
        "checkpoint.every_epochs": 0,
        "regularizer.name": "n3",
        **more,
    }
    space = {"optimizer.lr": {"low": 0.01, "high": 1.0, "log": True}, "regularizer.weight": [0.001, 0.01]}
    content = {"set": base, "space": space, "search": {"trials": trials, "reduction": 2, "seed": 1}}
    path = folder / "space.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


def test_from_space_to_run(tmp_path):
    space = write_space(tmp_path, trials=2, num_epochs=6, **{"evaluation.metric": "hits@3"})
    output = tmp_path / "tuned"
    done = commands.dglkge("tune", str(space), "--output", str(output), "--num_trainers", "2", "--json")
    report = json.loads(done.stdout)
    assert report["cost"] <= report["budget"] == 3
    trials = json.loads((output / "trials.json").read_text())
    best = max(trials["trials"], key=lambda trial: trial["value"])
    assert [trial["state"] for trial in trials["trials"]] == ["complete"] * 2
    assert trials["best"]["values"] == best["values"] == report["best"]["values"]
    assert trials["spent"] == pytest.approx(report["cost"], abs=1e-3)
    for trial in trials["trials"]:
        run = output / "trials" / trial["name"] / "run"
        config = json.loads((run / "config.json").read_text())
        assert config["training"]["num_epochs"] == trial["num_epochs"] == report["rungs"][0]["epochs"]
        assert config["optimizer"]["lr"] == trial["values"]["optimizer.lr"]
        assert json.loads((run / "metrics.json").read_text())["valid"]["both"]["hits@3"] == trial["value"]
        assert not (run / "checkpoint").exists()
    header, *rows = (output / "trials.tsv").read_text().splitlines()
    assert len(rows) == 2 and header.split("\t")[-2:] == ["optimizer.lr", "regularizer.weight"]
    winner = yaml.safe_load((output / "best.yaml").read_text())
    assert winner["optimizer"]["lr"] == best["values"]["optimizer.lr"]
    assert winner["training"]["num_epochs"] == 6 and winner["dataset"] == str(toy_dataset())
    assert open_run(report["best"]["run"]).checkpoint.progress["finished_epochs"] == 6
    metrics = json.loads((Path(report["best"]["run"]) / "metrics.json").read_text())
    assert report["best"]["metric"] == "hits@3"
    assert metrics["test"]["both"]["hits@3"] == report["best"]["value"]


def test_interrupted_search_goes_on(tmp_path):
    space = write_space(tmp_path, trials=2, num_epochs=INTERRUPTED_EPOCHS)
    output, trial = tmp_path / "tuned", tmp_path / "tuned" / "trials" / "rung0-trial000"
    command = [*warm.python(), "-m", "dglkge.cli.main", "tune", str(space), "--output", str(output)]
    with surroundings.foreground(), commands.started(command) as search:
        commands.wait_for(trial / "run" / "stats.jsonl", search, 1)
        processes = commands.processes_with(str(trial))
        assert processes
        search.send_signal(signal.SIGINT)
        told, _ = search.communicate(timeout=60)
    assert search.returncode == 130 and "dglkge: interrupted\n" in told, told
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert not alive, "the trial outlived the search"
    (unfinished,) = json.loads((output / "trials.json").read_text())["trials"]
    assert unfinished["state"] == "unfinished"
    done = commands.dglkge("tune", str(space), "--output", str(output))
    assert "resumed: " in (trial / "trial.log").read_text()
    trials = json.loads((output / "trials.json").read_text())["trials"]
    assert [trial["state"] for trial in trials] == ["complete"] * 2
    assert trials[0]["values"] == unfinished["values"]
    assert "configuration: " in done.stdout and " mrr " in done.stdout
