"""Arguments of ``dglkge.train``: the forms that are taken, and what is refused before anything is made."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest

import dglkge
from dglkge.config.load import recipe_file
from dglkge.train_arguments import DataOptions, config_file, overrides
from tests import warm
from tests.functional.job import run
from tests.toy_kg import ring_triples, toy_dataset

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
    done = run([*warm.python(), "-c", SMALL, str(folder)])
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
    assert ranked == "nothing is ranked: there are no test triples" and logs == f"logs: {folder}/logs"
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
        ({"split": [0.9, 0.1]}, "split '0.9,0.1' is not allowed; give one or three fractions"),
        ({"split": object}, "split is .*, of type type; expected the share of train"),
        ({"seed": "x"}, "seed is 'x', of type str; expected a whole number"),
        ({"columns": "a,b"}, "^columns 'a,b' does not give head, relation and tail"),
        ({"columns": 3}, "columns is '3', of type int; expected a text"),
        ({"reading": {"format": "tsv"}}, "reading is for files and folders"),
        ({"reading": 3}, "reading is '3', of type int; expected a mapping"),
        ({"output": ""}, "output is ''; expected the path of a folder"),
        ({"output": 3}, "output is 3; expected the path of a folder"),
        ({"output": __file__}, "output is .*, which is a file; expected a folder"),
        ({"output": "/proc/my/run"}, "/proc/my/run( cannot be made|, and /proc is not a folder)"),
        ({"config": "fb15k237/comple"}, "config: there is no file .*did you mean 'fb15k237/complex'"),
        ({"config": 3}, "config is '3', of type int; expected a YAML file or the name of a recipe"),
        ({"settings": [1]}, "settings is '.1.', of type list; expected a mapping"),
        ({"settings": {"training": {"epochs": 3}}}, "unknown key 'training.epochs'"),
        ({"settings": {"seed": object()}}, "settings: seed is .*, of type object; expected a number"),
        ({"trainers": "two"}, "trainers is 'two', of type str; expected a whole number"),
        ({"trainers": np.int64(0)}, "trainers is 0; expected at least 1"),
        ({"score_function": 3}, "score_function is '3', of type int; expected a name: complex"),
        ({"score_function": "complx"}, "unknown score function 'complx'; did you mean 'complex'"),
        ({"score_function": "TransE"}, "unknown score function 'transe'; did you mean .*'transe_l1'"),
    ],
)
def test_what_is_refused_names_the_argument_and_makes_nothing(more, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = {"triples": ring_triples(), "output": tmp_path / "run", **more}
    with pytest.raises(dglkge.InputError, match=words):
        dglkge.train(**arguments)
    assert list(tmp_path.iterdir()) == []


def test_data_sets_have_splits_of_their_own(tmp_path):
    for more in ({"split": 0.9}, {"valid": ring_triples()}, {"reading": {"format": "tsv"}}):
        with pytest.raises(
            dglkge.InputError, match="splits of its own|go with an object|reading is for files"
        ):
            dglkge.train(toy_dataset(), output=tmp_path / "run", **more)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        (0.9, (0.9, 0.05, 0.05)),
        (np.float32(0.5), (0.5, 0.25, 0.25)),
        ("0.8,0.2,0", (0.8, 0.2, 0)),
        ((0.8, 0.2, 0), (0.8, 0.2, 0)),
        (np.array([0.5, 0.25, 0.25]), (0.5, 0.25, 0.25)),
        (1, (1, 0, 0)),
        (None, "auto"),
    ],
)
def test_forms_of_a_split(split, expected):
    made = DataOptions(split=split).to_options("x", False).split
    assert made == expected if expected == "auto" else made == pytest.approx(expected)


def test_forms_of_settings():
    nested = {"training": {"num_epochs": np.int32(3), "objective": {"name": "x"}}, "lr": np.float64(0.5)}
    expected = ["training.num_epochs=3", "training.objective.name=x", "lr=0.5", "model.score_function=rotate"]
    assert overrides(nested, "RotatE") == expected
    values = {"a": [np.int64(1), 2.0], "b": True, "c": None, "d": Path("x/y"), "e": np.array([1, 2]), "f": {}}
    expected = ["a=[1, 2.0]", "b=true", "c=null", "d=x/y", "e=[1, 2]", "f={}"]
    assert overrides(values, None) == expected
    # A component of one's own keeps its name.
    assert overrides({}, "MyScore") == ["model.score_function=MyScore"]


def test_a_configuration_is_a_file_or_a_recipe(tmp_path, monkeypatch):
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
    assert "nothing is ranked: there are no test triples" in caplog.messages


def test_the_public_names():
    assert dir(dglkge) == sorted([*dglkge.__all__, "__version__"])
    assert all(getattr(dglkge, name) is not None for name in dir(dglkge))
