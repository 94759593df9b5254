"""Words KEY=VALUE of a command line override fields, wherever they stand."""

from __future__ import annotations

from pathlib import Path

import pytest

from dglkge.cli.main import main
from dglkge.launch.script_config import script_config


@pytest.mark.parametrize(
    "words",
    [
        ["FILE", "modl.dimension=3", "optimizer.lr=0"],
        ["FILE", "--set", "modl.dimension=3", "--num_trainers", "2", "optimizer.lr=0"],
        ["modl.dimension=3", "FILE", "--set=optimizer.lr=0"],
        ["modl.dimension=3", "--num_trainers", "2", "FILE", "optimizer.lr=0"],
    ],
)
def test_all_mistakes_are_printed_each_on_a_line(words, tmp_path: Path, capsys) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("dataset: d\nseed: x\n", encoding="utf-8")
    assert main(["plan", *(word.replace("FILE", str(path)) for word in words)]) == 2
    assert sorted(capsys.readouterr().err.splitlines()) == [
        f"dglkge: error: {path}:2: seed is 'x'; allowed: a whole number",
        "dglkge: error: override 'modl.dimension=3': unknown key 'modl.dimension'; did you mean "
        "'model.dimension'?",
        "dglkge: error: override 'optimizer.lr=0': optimizer.lr is 0.0; allowed: a number above 0",
    ]


def test_other_words_are_refused(tmp_path: Path, capsys) -> None:
    assert main(["plan", "run.yaml", "optimizer.lr=1", "more"]) == 2
    assert "give one CONFIG or --recipe, got run.yaml and more" in capsys.readouterr().err


def test_the_launcher_reads_them_too(tmp_path: Path) -> None:
    config = script_config(["train.py", "dataset=d", "--num", "3", "seed=4"], tmp_path)
    assert config is not None and (config.dataset, config.seed) == ("d", 4)
    assert script_config(["train.py", "seed=4"], tmp_path) is None
