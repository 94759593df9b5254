"""``dglkge.train`` and ``dglkge train``: from triples to an opened run, resumed, refused, interrupted."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

import dglkge
from tests import warm
from tests.functional.job import TIME_LIMIT_SECONDS, environment, run, wait_for_line
from tests.toy_kg import ring_triples, toy_dataset

SETTINGS = {
    "model.dimension": 16,
    "negatives.num_uniform": 10,
    "training.batch_size": 48,
    "training.num_epochs": 2,
}
SCRIPT = """
import json, signal, sys
import pandas as pd
import dglkge
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background of a shell
output, epochs, rows, progress = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "shown"
frame = pd.read_csv(sys.argv[5], dtype=str)
settings = {**json.loads(sys.argv[6]), "training.num_epochs": epochs}
run = dglkge.train(
    frame.iloc[:rows], "distmult", output=output, trainers=1, settings=settings, columns="s,p,o",
    progress=progress,
)
first = frame.iloc[0]
answers = run.predict_tails(first["s"], first["p"], k=1000)
print(json.dumps({
    "epochs": run.checkpoint.progress["finished_epochs"],
    "score_function": run.tables.meta.score_function,
    "splits": {split: len(run.dataset.split(split)) for split in ("train", "valid", "test")},
    "metrics": run.metrics["test"]["both"]["mrr"],
    "evaluated": run.evaluate("test").both.mrr,
    "answers": answers["entity"].tolist(),
}))
"""


@pytest.fixture
def command(tmp_path):
    """Returns the command line of a script that trains the ring's triples."""
    frame = ring_triples()
    frame = frame.rename(columns=dict(zip(frame.columns, ("s", "p", "o"))))
    frame.to_csv(tmp_path / "triples.csv", index=False)

    def of(epochs: int, rows: int = 10**6, progress: str = "silent", python: Sequence[str] = ()) -> list[str]:
        return [
            *(python or warm.python()),
            *("-c", SCRIPT, str(tmp_path / "run"), str(epochs), str(rows), progress),
            *(str(tmp_path / "triples.csv"), json.dumps(SETTINGS)),
        ]

    return of


def test_train_resume_and_refuse(command, tmp_path):
    done = run(command(2))
    (line,) = done.stdout.splitlines()
    printed = json.loads(line)
    assert (printed["epochs"], printed["score_function"]) == (2, "distmult")
    assert printed["metrics"] == pytest.approx(printed["evaluated"], abs=1e-9)
    total = sum(printed["splits"].values())
    assert total == len(ring_triples().drop_duplicates()) and printed["splits"]["train"] > 0.8 * total
    assert len(set(printed["answers"])) == len(printed["answers"]) > 1
    # The same triples and more epochs: the run goes on.
    done = run(command(3, progress="shown"))
    assert json.loads(done.stdout.splitlines()[-1])["epochs"] == 3
    assert "epoch 3/3" in done.stdout and "epoch 2/3" not in done.stdout
    # Other triples: refused, and nothing is changed.
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    done = run(command(3, rows=50), status=1)
    assert done.stderr.splitlines()[-1] == (
        f"dglkge.errors.InputError: {tmp_path}/run has a run of other triples or splits; give "
        "overwrite=True or another output"
    )
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


def test_an_interrupt_commits_and_leaves_no_process(command, tmp_path):
    job = subprocess.Popen(
        command(100000, python=[sys.executable]),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=warm.runners(environment()),
    )
    try:
        wait_for_line(tmp_path / "run" / "stats.jsonl", job, 2)
        started = psutil.Process(job.pid).children(recursive=True)
        assert started
        job.send_signal(signal.SIGINT)
        _, err = job.communicate(timeout=TIME_LIMIT_SECONDS)
    finally:
        job.kill()
        job.wait()
    assert job.returncode != 0 and err.splitlines()[-1] == "KeyboardInterrupt"
    _, alive = psutil.wait_procs(started, timeout=20)
    assert not alive
    progress = dglkge.open_run(tmp_path / "run").checkpoint.progress
    lines = [json.loads(line) for line in (tmp_path / "run" / "stats.jsonl").read_text().splitlines()]
    per_epoch = lines[0]["num_batches"]
    committed = progress["finished_epochs"] * per_epoch + progress["batches_done"]
    reported = [line["epoch"] * per_epoch + line["batches_done"] for line in lines]
    # What was reported before the signal is committed; the batch of the last line may have been open.
    assert 1 <= reported[1] - 1 <= committed <= reported[-1] + per_epoch


def test_what_is_refused_creates_nothing(tmp_path):
    triples = ring_triples()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("")
    with pytest.raises(dglkge.errors.InputError, match="mine is not removed: it has no run"):
        dglkge.train(triples, output=tmp_path / "mine", overwrite=True)
    assert (tmp_path / "mine" / "thesis.tex").exists()
    # Wrong triples are found before a run is removed for them.
    old = tmp_path / "old"
    old.mkdir()
    (old / "config.json").write_text("{}")
    for wrong in (triples.assign(head=None), tmp_path / "nowhere.tsv"):
        with pytest.raises(dglkge.errors.InputError):
            dglkge.train(wrong, output=old, overwrite=True)
        assert (old / "config.json").exists()
        with pytest.raises(dglkge.errors.InputError):
            dglkge.train(wrong, output=tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "old"]
    inside = old / "dataset"
    inside.symlink_to(toy_dataset())
    with pytest.raises(dglkge.errors.InputError, match="lies in .*old, which overwrite would remove"):
        dglkge.train(inside, output=old, overwrite=True)
    with pytest.raises(dglkge.errors.InputError, match="is a data set with splits of its own"):
        dglkge.train(toy_dataset(), output=tmp_path / "run", split=(0.8, 0.1, 0.1))


def test_the_command(tmp_path):
    """``dglkge train`` and ``dglkge config --diff``."""
    settings = {**SETTINGS, "dataset": toy_dataset(), "output": tmp_path / "run"}
    # What is not given follows the size of the data.
    by_size = {"training.averaging": 4.0, "optimizer.lr": 0.2, "regularizer.weight": 0.01}
    words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    done = run([*warm.python(), "-m", "dglkge", "train", *words, "--num_trainers", "1"])
    assert f"checkpoint, statistics and metrics are in {tmp_path}/run" in done.stdout
    last = done.stdout.splitlines()[-1]
    assert last.startswith(f"next: dglkge predict {tmp_path}/run --head NAME") and "dglkge serve" in last
    assert (tmp_path / "run" / "logs" / "trainer-0.log").is_file()
    done = run([*warm.python(), "-m", "dglkge", "config", "--diff", str(tmp_path / "run"), "--json"])
    changed = json.loads(done.stdout)
    # The run has recorded what "auto" was.
    assert changed.pop("training.matmul_dtype", {"value": "float32"})["value"] in ("float32", "bfloat16")
    assert {name: entry["value"] for name, entry in changed.items()} == {
        name: str(value) if isinstance(value, Path) else value for name, value in (by_size | settings).items()
    }
    done = run([*warm.python(), "-m", "dglkge", "train", "--set", "training.epochs=3"], status=2)
    assert done.stderr.startswith("dglkge: error: ")
