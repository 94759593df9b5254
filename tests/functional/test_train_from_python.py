"""``dglkge.train`` and ``dglkge train``: from triples to an opened run, resumed, refused, interrupted."""

from __future__ import annotations

import json
import logging
import signal
from pathlib import Path

import numpy as np
import psutil
import pytest

import dglkge
from dglkge.config.load import recipe_file
from dglkge.train_arguments import DataOptions, config_file, overrides
from tests import warm
from tests.functional import job as commands
from tests.functional.results import json_lines
from tests.toy_kg import ring_triples, toy_dataset

SETTINGS = {"model.dimension": 16, "negatives.num_uniform": 10, "training.batch_size": 48}
SETTINGS |= {"training.num_epochs": 2}
SCRIPT = """
import json, sys
import pandas as pd
import dglkge
output, epochs, rows, progress = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "shown"
frame = pd.read_csv(sys.argv[5], dtype=str)
settings = {**json.loads(sys.argv[6]), "training.num_epochs": epochs}
options = {"output": output, "trainers": 1, "columns": "s,p,o", "progress": progress}
run = dglkge.train(frame.iloc[:rows], "distmult", settings=settings, **options)
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


def command(folder: Path, epochs: int, rows: int = 10**6, progress: str = "silent") -> list[str]:
    """Return the words after ``python`` that train some of the ring's triples in ``folder/run``."""
    frame = ring_triples().set_axis(["s", "p", "o"], axis="columns")
    frame.to_csv(folder / "triples.csv", index=False)
    words = [str(folder / "run"), str(epochs), str(rows), progress, str(folder / "triples.csv")]
    return ["-c", SCRIPT, *words, json.dumps(SETTINGS)]


def files_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_train_resume_and_refuse(tmp_path):
    done = commands.run([*warm.python(), *command(tmp_path, 2)])
    (line,) = done.stdout.splitlines()
    printed = json.loads(line)
    assert (printed["epochs"], printed["score_function"]) == (2, "distmult")
    assert printed["metrics"] == pytest.approx(printed["evaluated"], abs=1e-9)
    total = sum(printed["splits"].values())
    assert total == len(ring_triples().drop_duplicates()) and printed["splits"]["train"] > 0.8 * total
    assert len(set(printed["answers"])) == len(printed["answers"]) > 1
    # The same triples and more epochs: the run goes on.
    done = commands.run([*warm.python(), *command(tmp_path, 3, progress="shown")])
    assert json.loads(done.stdout.splitlines()[-1])["epochs"] == 3
    assert "epoch 3/3" in done.stdout and "epoch 2/3" not in done.stdout
    # Other triples: refused, and nothing is changed.
    before = files_of(tmp_path / "run")
    done = commands.run([*warm.python(), *command(tmp_path, 3, rows=50)], status=1)
    told = "has a run of other triples or splits; give overwrite=True or another output\n"
    assert done.stderr.endswith(f"\ndglkge.errors.InputError: {tmp_path}/run {told}")
    assert files_of(tmp_path / "run") == before


@pytest.mark.usefixtures("in_foreground")
def test_an_interrupt_commits_and_leaves_no_process(tmp_path):
    with commands.started([*warm.python(), *command(tmp_path, 100000)]) as job:
        commands.wait_for(tmp_path / "run" / "stats.jsonl", job, 2)
        processes = commands.processes_with(str(tmp_path / "run"))
        assert len(processes) > 3
        job.send_signal(signal.SIGINT)
        output, _ = job.communicate(timeout=commands.TIME_LIMIT_SECONDS)
    assert job.returncode != 0 and output.splitlines()[-1] == "KeyboardInterrupt"
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert not alive
    progress = dglkge.open_run(tmp_path / "run").checkpoint.progress
    lines = json_lines(tmp_path / "run" / "stats.jsonl")
    per_epoch = lines[0]["num_batches"]
    committed = progress["finished_epochs"] * per_epoch + progress["batches_done"]
    reported = [line["epoch"] * per_epoch + line["batches_done"] for line in lines]
    # What was reported before the signal is committed; the batch of the last line may have been open.
    assert 1 <= reported[1] - 1 <= committed <= reported[-1] + per_epoch


def test_the_command(tmp_path):
    """``dglkge train`` and ``dglkge config --diff``."""
    settings = {**SETTINGS, "dataset": str(toy_dataset()), "output": str(tmp_path / "run")}
    words = commands.sets([f"{name}={value}" for name, value in settings.items()])
    printed = commands.dglkge("train", *words, "--num_trainers", "1").stdout
    assert f"checkpoint, statistics and metrics are in {tmp_path}/run\n" in printed
    last = printed.splitlines()[-1]
    assert last.startswith(f"next: dglkge predict {tmp_path}/run --head NAME") and "dglkge serve" in last
    assert (tmp_path / "run" / "logs" / "trainer-0.log").is_file()
    changed = json.loads(commands.dglkge("config", "--diff", str(tmp_path / "run"), "--json").stdout)
    # The run has recorded what "auto" was.
    assert changed.pop("training.matmul_dtype", {"value": "float32"})["value"] in ("float32", "bfloat16")
    # What is not given follows the size of the data.
    by_size = {"training.averaging": 4.0, "optimizer.lr": 0.2, "regularizer.weight": 0.01}
    assert {name: entry["value"] for name, entry in changed.items()} == {**by_size, **settings}
    done = commands.dglkge("train", "--set", "training.epochs=3", status=2)
    assert done.stderr.startswith("dglkge: error: ")


SMALL = """
import logging, sys
import numpy as np
import dglkge
logging.basicConfig(level="INFO", format="%(message)s")
settings = {"model": {"dimension": np.int64(8)}, "training": {"num_epochs": 2}}
run = dglkge.train(
    [("Alice", "likes", "Bob")], "ComplEx", output=sys.argv[1], trainers=np.int64(1), settings=settings
)
print(run)
print(run.predict_tails("Alice", "likes")["entity"].tolist())
"""


def test_one_triple_is_trained_and_nothing_ranked(tmp_path):
    """Without a terminal a line an epoch is logged, where the logs are, and what to do next."""
    folder = tmp_path / "run"
    done = commands.run([*warm.python(), "-c", SMALL, str(folder)])
    repr_, answers = done.stdout.splitlines()
    assert repr_ == f"Run({folder}: complex, dimension 8, 2 entities, 1 relations, 2 epochs)"
    assert sorted(json.loads(answers.replace("'", '"'))) == ["Alice", "Bob"]
    lines = done.stderr.splitlines()
    told = [line.partition(":")[0] for line in lines if line.startswith("epoch")]
    assert told == ["epoch 1/2", "epoch 2/2"]
    split, chosen, ranked, logs, files, next_command, in_python = (
        line for line in lines if not line.startswith("epoch")
    )
    assert split == "1 triples are too few to split: all are for training"
    assert chosen.startswith("chosen for this data set (docs/quality.md): training.batch_size=500 ")
    assert "num_epochs" not in chosen and "optimizer.lr=0.2" in chosen
    assert (
        ranked == f"nothing is ranked: {folder}/dataset has no test triples"
        and logs == f"logs: {folder}/logs"
    )
    assert files == f"checkpoint, statistics and metrics are in {folder}"
    assert next_command.startswith(f"next: dglkge predict {folder} ") and "dglkge serve" in next_command
    assert in_python.startswith("next, in Python: run.predict_tails(head, relation); ")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"triples": 3}, "triples is of type int; expected a data frame"),
        ({"triples": "nowhere.tsv"}, "triples: nowhere.tsv: there is no such file or folder"),
        ({"triples": "umlz"}, "umlz: there is no such file or folder; unknown data set 'umlz'"),
        ({"valid": 3}, "valid is of type int; expected a data frame"),
        ({"splits": 0.9}, "unknown argument of dglkge.train 'splits'; did you mean 'split'"),
        ({"split": "a"}, "split 'a' is not allowed; give one or three fractions"),
        ({"seed": "x"}, "seed is 'x', of type str; expected a whole number"),
        ({"columns": "a,b"}, "^columns 'a,b' does not give head, relation and tail"),
        ({"reading": {"format": "tsv"}}, "reading is for files and folders"),
        ({"output": ""}, "output is ''; expected the path of a folder"),
        ({"output": __file__}, "output is .*, which is a file; expected a folder"),
        ({"output": "/proc/my/run"}, "/proc/my/run( cannot be made|, and /proc is not a folder)"),
        ({"config": "fb15k237/comple"}, "config: there is no file .*did you mean 'fb15k237/complex'"),
        ({"settings": [1]}, "settings is '.1.', of type list; expected a mapping"),
        ({"settings": {"training": {"epochs": 3}}}, "unknown key 'training.epochs'"),
        ({"settings": {"seed": object()}}, "settings: seed is .*, of type object; expected a number"),
        ({"trainers": "two"}, "trainers is 'two', of type str; expected a whole number"),
        ({"trainers": np.int64(0)}, "trainers is 0; expected at least 1"),
        ({"score_function": "TransE"}, "unknown score function 'transe'; did you mean .*'transe_l1'"),
    ],
)
def test_what_is_refused_names_the_argument_and_makes_nothing(more, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = {"triples": ring_triples(), "output": tmp_path / "run", **more}
    with pytest.raises(dglkge.InputError, match=words):
        dglkge.train(**arguments)
    assert list(tmp_path.iterdir()) == []


def test_what_is_refused_creates_nothing(tmp_path):
    triples = ring_triples()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("")
    with pytest.raises(dglkge.InputError, match="mine is not removed: it has no run"):
        dglkge.train(triples, output=tmp_path / "mine", overwrite=True)
    assert (tmp_path / "mine" / "thesis.tex").exists()
    # Wrong triples are found before a run is removed for them.
    old = tmp_path / "old"
    old.mkdir()
    (old / "config.json").write_text("{}")
    for wrong in (triples.assign(head=None), tmp_path / "nowhere.tsv"):
        with pytest.raises(dglkge.InputError):
            dglkge.train(wrong, output=old, overwrite=True)
        assert (old / "config.json").exists()
        with pytest.raises(dglkge.InputError):
            dglkge.train(wrong, output=tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "old"]
    inside = old / "dataset"
    inside.symlink_to(toy_dataset())
    with pytest.raises(dglkge.InputError, match="lies in .*old, which overwrite would remove"):
        dglkge.train(inside, output=old, overwrite=True)
    for more, message in (
        ({"split": (0.8, 0.1, 0.1)}, "is a data set with splits of its own"),
        ({"valid": ring_triples()}, "splits of its own|go with an object"),
        ({"reading": {"format": "tsv"}}, "reading is for files"),
    ):
        with pytest.raises(dglkge.InputError, match=message):
            dglkge.train(toy_dataset(), output=tmp_path / "run", **more)


def test_forms_of_a_split_of_settings_and_of_a_configuration(tmp_path, monkeypatch):
    thirds = (np.float32(0.5), np.array([0.5, 0.25, 0.25]), "0.5,0.25,0.25", (0.5, 0.25, 0.25))
    splits = [DataOptions(split=split).to_options("x", False).split for split in (*thirds, 1)]
    assert splits == [pytest.approx((0.5, 0.25, 0.25))] * 4 + [(1, 0, 0)]
    assert DataOptions(split=None).to_options("x", False).split == "auto"
    nested = {"training": {"num_epochs": np.int32(3), "objective": {"name": "x"}}, "lr": np.float64(0.5)}
    expected = ["training.num_epochs=3", "training.objective.name=x", "lr=0.5", "model.score_function=rotate"]
    assert overrides(nested, "RotatE") == expected
    values = {"a": [np.int64(1), 2.0], "b": True, "c": None, "d": Path("x/y"), "e": np.array([1, 2]), "f": {}}
    expected = ["a=[1, 2.0]", "b=true", "c=null", "d=x/y", "e=[1, 2]", "f={}"]
    assert overrides(values, None) == expected
    # A component of one's own keeps its name.
    assert overrides({}, "MyScore") == ["model.score_function=MyScore"]
    name = "fb15k237/complex"
    assert config_file(name) == recipe_file(name) and config_file(None) is None
    monkeypatch.chdir(tmp_path)
    Path("mine").write_text("seed: 1")
    assert config_file("mine") == Path("mine")


@pytest.mark.usefixtures("warm_executable")
def test_a_folder_of_a_call_that_failed_is_used_again(tmp_path, monkeypatch, caplog):
    """The data set of other triples is replaced if nothing was trained on it."""
    from dglkge import train_job

    def fail(*arguments):
        raise dglkge.JobError("the job failed")

    monkeypatch.setattr(train_job, "_run_job", fail)
    caplog.set_level(logging.INFO, "dglkge")
    folder = tmp_path / "run"
    for triples, rows in ((ring_triples(), 240), (ring_triples()[:100], 100)):
        with pytest.raises(dglkge.JobError):
            dglkge.train(triples, output=folder, split="0.9,0.1,0")
        splits = json.loads((folder / "dataset" / "dataset.json").read_text())["splits"]
        assert sum(splits.values()) == rows and splits["test"] == 0
    assert f"nothing is ranked: {folder}/dataset has no test triples" in caplog.messages


def test_the_public_names():
    assert dir(dglkge) == sorted([*dglkge.__all__, "__version__"])
    assert all(getattr(dglkge, name) is not None for name in dir(dglkge))
