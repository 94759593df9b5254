"""What the commands print and write, called in this process."""

from __future__ import annotations

import errno
import json
import logging
import re
import sys
from pathlib import Path

import pytest

from dglkge import __version__
from dglkge.cli.common import TerminalFormatter, print_columns, run_command
from dglkge.cli.main import ALIASES, COMMANDS, GROUPS, actions, main
from dglkge.config import load_config
from dglkge.distributed.jobs import human_bytes
from dglkge.errors import InputError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def help_of(capsys):
    def shown_help(command):
        with pytest.raises(SystemExit) as exit_:
            main([*command.split(), "--help"])
        assert exit_.value.code == 0
        return capsys.readouterr().out

    return shown_help


@pytest.mark.parametrize("command", ["", *GROUPS, *COMMANDS])
def test_help_teaches_with_examples(command, help_of):
    """One spelling of options is shown; --json, -v, -q are everywhere, --import where components are used."""
    text = help_of(command)
    if command in COMMANDS:
        program = "dglkge-launch" if command == "launch" else f"dglkge {command}"
        assert re.search(
            rf"{program} (\S+/ |--\w|> \w|runs/|datasets/|\S+\.(yaml|tsv)|fb15k237/|fb15k-237|list|  +\w)",
            text,
        )
    else:
        assert all(word in text for word in actions(command))
    assert max(len(line) for line in text.splitlines()) <= 110
    if command in COMMANDS and command != "launch":
        assert not re.findall(r"^ +(?:-\w, )?--\w*_\w*", text, re.MULTILINE)
        assert all(f" {option}" in text for option in ("--json", "-v, --verbose", "-q, --quiet"))
        reads_no_model = command.startswith(("data ", "job ")) or command == "config recipes"
        assert ("--import" in text) != reads_no_model
        assert "--output" not in text or "-o " in text


@pytest.mark.parametrize("former, name", ALIASES.items())
def test_former_names_are_hidden_aliases(former, name, help_of):
    """Both have the same help; that of all commands has no former name."""
    text = help_of(name)
    assert help_of(former) == text and text.startswith(f"usage: dglkge {name} ")
    assert not re.search(rf"^    {former} ", help_of(""), re.MULTILINE)


def test_underscores_are_accepted(call, run, tmp_path):
    words = ("--batch_size=5", "--per_relation", "--no_verify", "--limit", "3")
    assert call("evaluate", run, *words, "-o", tmp_path / "a_b.json")[0] == 0
    assert json.loads((tmp_path / "a_b.json").read_text())["num_triples"] == 3  # values keep theirs


@pytest.mark.parametrize(("words", "lines"), [([], 1), (["-q"], 0), (["-v"], 1)])
def test_quiet_hides_warnings(call, run, caplog, words, lines):
    (run / "metrics-test.json").mkdir()
    assert call("evaluate", run, *words)[0] == 0
    assert len(caplog.records) == lines


@pytest.mark.parametrize(
    ("words", "prog", "text"),
    [
        (["confg"], "dglkge", "unknown command 'confg'; did you mean 'config'?"),
        (["data", "biuld"], "dglkge data", "unknown command 'biuld'; did you mean 'build'?"),
        (["data"], "dglkge data", "the following arguments are required: COMMAND"),
        (["data", "build", "--inptu"], "dglkge data build", "unknown option '--inptu'; did you mean "),
        (["similar", "run", "--ytpe=a"], "dglkge similar", "unknown option '--ytpe'; did you mean '--type'?"),
        (["similar", "run", "x", "y"], "dglkge similar", "unexpected argument 'y'"),
        (["predict", "-k", "x", "run"], "dglkge predict", "argument -k/--k: invalid int value: 'x'"),
    ],
)  # fmt: skip
def test_usage_errors_show_the_usage_of_their_command(words, prog, text, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(words)
    err = capsys.readouterr().err
    assert exit_.value.code == 2
    assert err.startswith(f"usage: {prog} [") and f"\n{prog}: error: {text}" in err


@pytest.mark.parametrize("is_terminal", [True, False])
def test_terminals_get_no_control_characters_of_names(capsys, monkeypatch, is_terminal):
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: is_terminal, raising=False)
    name = "a\x1b]0;owned\x07\x9b31mb\tc"

    def body():
        print_columns(["name"], [[name]])
        raise InputError(f"unknown: {name}")

    record = logging.LogRecord("dglkge", logging.WARNING, "", 0, "odd: %s", (name,), None)
    logged = TerminalFormatter("%(message)s").format(record)
    run_command("x", body)
    shown = r"a\x1b]0;owned\x07\x9b31mb" + "\tc" if is_terminal else name
    table = r"a\x1b]0;owned\x07\x9b31mb\tc"
    assert capsys.readouterr() == (f"name\n{table}\n", f"x: error: unknown: {' '.join(shown.split())}\n")
    assert logged == f"odd: {shown}"


def test_version(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"dglkge {__version__}\n"


def test_every_command_says_that_there_is_no_run(refusal, tmp_path):
    values = tmp_path / "values.tsv"
    values.write_text("a\t1\n")
    more = {
        "predict": ["--head", "a", "--relation", "b"],
        "similar": ["a"],
        "complete": ["--output", tmp_path / "out"],
        "ask": ["?x : (a, b, ?x)"],
        "explain": ["--relation", "r"],
        "attributes": [values],
        "checkpoint export": ["--format", "npy", "--output", tmp_path / "out"],
        "checkpoint convert": ["--to", "npy", "--output", tmp_path / "out"],
    }
    without = ("plan", "train", "tune", "launch", "job list", "job stop")
    for command in COMMANDS:
        if command not in without and not command.startswith(("data ", "config ")):
            line = refusal(*command.split(), tmp_path / "nowhere", *more.get(command, []))
            assert line == f"{tmp_path}/nowhere does not exist; expected the folder of a run"


def test_run_command(capsys):
    def fail(error):
        raise error

    def status(error):
        return run_command("cmd", lambda: fail(error))

    assert [run_command("cmd", lambda number=number: number) for number in (0, 7)] == [0, 7]
    assert status(InputError("two\n  lines")) == 2
    assert capsys.readouterr().err == "cmd: error: two lines\n"
    assert status(KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == "cmd: interrupted\n"
    for error in (ZeroDivisionError(), OSError(errno.ENOSPC, "No space left on device")):
        with pytest.raises(type(error)):  # with its traceback
            status(error)


def test_columns(capsys):
    print_columns(["n", "name", ""], [[1, "a", ""], [10, "[b]cd", "x"]])
    assert capsys.readouterr().out == " n  name\n 1  a\n10  [b]cd  x\n"
    print_columns(["name"], [["long " * 100]])
    assert capsys.readouterr().out.count("\n") == 2
    print_columns(["only"], [])
    assert capsys.readouterr().out == "only\n"


def test_sizes():
    sizes = {
        0: "0 B",
        1023: "1023 B",
        1024: "1.0 KiB",
        1536: "1.5 KiB",
        5 << 20: "5.0 MiB",
        1 << 50: "1024.0 TiB",
    }
    assert {size: human_bytes(size) for size in sizes} == sizes


def test_quality_of_a_data_set(shown, report, refusal, dataset, tmp_path):
    quality = report("quality", dataset.path)
    stored = json.loads((dataset.path / "partitions" / "report.json").read_text())["quality"]
    assert quality == stored == dataset.quality()
    lines = [" ".join(line.replace("│", " ").split()) for line in shown("quality", dataset.path).splitlines()]
    assert lines[0] == "quality of the data"
    assert f"triples {' '.join(str(count) for count in quality['triples'].values())}" in lines
    assert lines[-1].startswith(f"connected components of train: {quality['components']['count']}; ")
    line = refusal("quality", tmp_path)
    assert line.startswith(f"{tmp_path} is no dataset folder: it has no dataset.json")


def test_recipes(shown, report, refusal, tmp_path):
    recipes = {entry["name"]: entry for entry in report("recipes")}
    assert recipes["fb15k237/complex"]["score function"] == "complex" and "fb15k237/space" not in recipes
    first, rest = shown("recipes", "fb15k237/complex").split("\n", 1)
    recipe = ROOT / "dglkge" / "config" / "recipes" / "fb15k237" / "complex.yaml"
    assert rest == recipe.read_text().split("\n", 1)[1]
    # The schema is named by its place on this machine.
    assert Path(first.removeprefix("# yaml-language-server: $schema=")).is_file()
    assert len(shown("recipes").splitlines()) == len(recipes) + 1
    for words in (["recipes", "fb15k237/complx"], ["train", "--recipe", "fb15k237/complx"]):
        line = refusal(*words)
        assert line.startswith("unknown recipe 'fb15k237/complx'; did you mean 'fb15k237/complex'")
    line = refusal("train", tmp_path / "a.yaml", "--recipe", "fb15k237/complex")
    assert f"give one CONFIG or --recipe, got {tmp_path}/a.yaml and fb15k237/complex" in line


def test_config(shown, report, refusal, tmp_path):
    # What it prints is a configuration of the defaults.
    (tmp_path / "all.yaml").write_text(shown("config").replace("dataset: ''", "dataset: data/x"))
    assert load_config(tmp_path / "all.yaml") == load_config(None, ["dataset=data/x"])
    assert report("config", "--diff", tmp_path / "all.yaml").keys() == {"dataset"}
    (tmp_path / "own.yaml").write_text(
        "dataset: d\nloss: {name: hinge, margin: 2}\nmodel: {score_function: {name: keci, p: 1}}\n"
        "optimizer: {schedule: {name: StepLR, step_size: 3}}\n"
    )
    differences = report("config", "--diff", tmp_path / "own.yaml")
    assert {key: field["value"] for key, field in differences.items()} == {
        "dataset": "d",
        "model.score_function": "keci",
        "model.score_function.p": 1,
        "loss.name": "hinge",
        "loss.margin": 2.0,
        "optimizer.schedule": {"name": "StepLR", "every": "epoch", "step_size": 3},
    }
    basic = report("config", "show", "--basic")
    assert len(basic) == 10 and "optimizer.lr" in basic
    (tmp_path / "basic.yaml").write_text(shown("config", "show", "--basic").replace("''", "data/x"))
    assert load_config(tmp_path / "basic.yaml").model == load_config(None, ["dataset=data/x"]).model
    section = report("config", "optimizer")
    assert all(key.startswith("optimizer.") for key in section) and len(section) > 5
    line = refusal("config", "optimzer")
    assert "no field begins with 'optimzer'; known: checkpoint, dataset" in line
    assert f"cannot read {tmp_path}/config.json: No such file" in refusal("config", "--diff", tmp_path)
