"""What the commands print and write, called in this process and as programs."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from dglkge.cli.common import TerminalFormatter, print_columns, run_command
from dglkge.cli.main import ALIASES, COMMANDS, GROUPS, actions, main
from dglkge.config import load_config
from dglkge.errors import InputError
from tests import warm
from tests.toy_kg import REPOSITORY


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
        start = r"\S+/ |--\w|> \w|runs/|datasets/|\S+\.(yaml|tsv)|fb15k237/|fb15k-237|list|  +\w"
        assert re.search(rf"{program} ({start})", text)
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
    text = help_of(name)
    assert help_of(former) == text and text.startswith(f"usage: dglkge {name} ")
    assert not re.search(rf"^    {former} ", help_of(""), re.MULTILINE)


@pytest.mark.parametrize(("words", "lines"), [([], 1), (["-q"], 0), (["-v"], 1)])
def test_underscores_are_accepted_and_quiet_hides_warnings(call, run, caplog, words, lines):
    options = ("--batch_size=5", "--per_relation", "--no_verify", "--limit", "3")
    assert call("evaluate", run, *options, "-o", run / "a_b.json")[0] == 0
    assert json.loads((run / "a_b.json").read_text())["num_triples"] == 3  # values keep theirs
    (run / "metrics-test.json").mkdir()
    assert call("evaluate", run, *words)[0] == 0
    assert len(caplog.records) == lines


@pytest.mark.parametrize(
    ("words", "prog", "text"),
    [
        (["confg"], "dglkge", "unknown command 'confg'; did you mean 'config'?"),
        (["data", "biuld"], "dglkge data", "unknown command 'biuld'; did you mean 'build'?"),
        (["data", "build", "--inptu"], "dglkge data build", "unknown option '--inptu'; did you mean "),
        (["similar", "run", "--ytpe=a"], "dglkge similar", "unknown option '--ytpe'; did you mean '--type'?"),
        (["similar", "run", "x", "y"], "dglkge similar", "unexpected argument 'y'"),
        (["predict", "-k", "x", "run"], "dglkge predict", "argument -k/--k: invalid int value: 'x'"),
    ],
)  # fmt: skip
def test_usage_errors_show_the_usage_of_their_command(words, prog, text, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(words)
    err = capsys.readouterr().err
    assert err.startswith(f"usage: {prog} [") and f"\n{prog}: error: {text}" in err


@pytest.mark.parametrize("is_terminal", [True, False])
def test_terminals_get_no_control_characters_of_names(capsys, monkeypatch, is_terminal):
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: is_terminal, raising=False)
    rest = "c [b]" + "x" * (0 if is_terminal else 200)
    name = f"a\x1b]0;owned\x07\x9b31mb\t{rest}"

    def body():
        print_columns(["name"], [[name]])
        raise InputError(f"unknown: {name}")

    record = logging.LogRecord("dglkge", logging.WARNING, "", 0, "odd: %s", (name,), None)
    logged = TerminalFormatter("%(message)s").format(record)
    run_command("x", body)
    shown = r"a\x1b]0;owned\x07\x9b31mb" + f"\t{rest}" if is_terminal else name
    table = r"a\x1b]0;owned\x07\x9b31mb\t" + rest
    assert capsys.readouterr() == (f"name\n{table}\n", f"x: error: unknown: {' '.join(shown.split())}\n")
    assert logged == f"odd: {shown}"


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
    def status(**behaviour):
        return run_command("cmd", mock.Mock(**behaviour))

    assert [status(return_value=number) for number in (0, 7)] == [0, 7]
    assert status(side_effect=InputError("two\n  lines")) == 2
    assert status(side_effect=KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == "cmd: error: two lines\ncmd: interrupted\n"
    for error in (ZeroDivisionError(), OSError(errno.ENOSPC, "No space left on device")):
        with pytest.raises(type(error)):  # with its traceback
            status(side_effect=error)


def test_quality_of_a_data_set(shown, report, refusal, dataset, tmp_path):
    quality = report("quality", dataset.path)
    stored = json.loads((dataset.path / "partitions" / "report.json").read_text())["quality"]
    assert quality == stored == dataset.quality()
    lines = [" ".join(line.replace("│", " ").split()) for line in shown("quality", dataset.path).splitlines()]
    assert lines[0] == "quality of the data"
    assert f"triples {' '.join(str(count) for count in quality['triples'].values())}" in lines
    assert lines[-1].startswith(f"connected components of train: {quality['components']['count']}; ")
    assert "is no dataset folder: it has no dataset.json" in refusal("quality", tmp_path)


def test_recipes(shown, report, refusal, tmp_path):
    recipes = {entry["name"]: entry for entry in report("recipes")}
    assert recipes["fb15k237/complex"]["score function"] == "complex" and "fb15k237/space" not in recipes
    first, rest = shown("recipes", "fb15k237/complex").split("\n", 1)
    recipe = REPOSITORY / "dglkge" / "config" / "recipes" / "fb15k237" / "complex.yaml"
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
    text = "dataset: d\nloss: {name: hinge, margin: 2}\nmodel: {score_function: {name: keci, p: 1}}\n"
    (tmp_path / "own.yaml").write_text(f"{text}optimizer: {{schedule: {{name: StepLR, step_size: 3}}}}\n")
    differences = report("config", "--diff", tmp_path / "own.yaml")
    expected = {"dataset": "d", "model.score_function": "keci", "model.score_function.p": 1}
    expected |= {"loss.name": "hinge", "loss.margin": 2.0}
    expected |= {"optimizer.schedule": {"name": "StepLR", "every": "epoch", "step_size": 3}}
    assert {key: field["value"] for key, field in differences.items()} == expected
    basic = report("config", "show", "--basic")
    assert len(basic) == 10 and "optimizer.lr" in basic
    (tmp_path / "basic.yaml").write_text(shown("config", "show", "--basic").replace("''", "data/x"))
    assert load_config(tmp_path / "basic.yaml").model == load_config(None, ["dataset=data/x"]).model
    section = report("config", "optimizer")
    assert all(key.startswith("optimizer.") for key in section) and len(section) > 5
    line = refusal("config", "optimzer")
    assert "no field begins with 'optimzer'; known: checkpoint, dataset" in line
    assert f"cannot read {tmp_path}/config.json: No such file" in refusal("config", "--diff", tmp_path)


def dglkge(run, words, stdout, python=None, unbuffered=""):
    """Run a command, in which RUN is the run, and return its status and stderr."""
    environment = {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": unbuffered}
    command = [*(python or warm.python()), "-m", "dglkge.cli.main", *words.replace("RUN", str(run)).split()]
    options = {"stdout": stdout, "stderr": subprocess.PIPE, "env": {**os.environ, **environment}}
    done = subprocess.run(command, text=True, timeout=120, **options)
    return done.returncode, done.stderr


EXPORT = "export RUN --output OUT --format"


@pytest.mark.parametrize(
    ("package", "words", "user", "extra"),
    [
        ("fastapi", "serve RUN --port 0", "dglkge serve needs fastapi", "serve"),
        ("uvicorn", "serve RUN --port 0", "dglkge serve needs uvicorn", "serve"),
        ("faiss", "serve RUN --port 0 --faiss --faiss-from 1", "--faiss needs faiss-cpu", "faiss"),
        ("faiss", f"{EXPORT} faiss", "the format faiss needs faiss-cpu", "faiss"),
        ("lancedb", f"{EXPORT} lancedb", "the format lancedb needs lancedb", "lancedb"),
        ("qdrant_client", f"{EXPORT} qdrant", "the format qdrant needs qdrant-client", "qdrant"),
        ("plotly", "report RUN --output OUT", "a report needs plotly", "report"),
        ("jinja2", "report RUN --output OUT", "a report needs jinja2", "report"),
        ("sklearn", "report RUN --output OUT", "the map of entities (--points 0 leaves it out)", "report"),
        ("optuna", "tune SPACE --output OUT", "dglkge tune needs optuna", "tune"),
        ("shtab", "--print-completion bash", "shell completion needs shtab", "completion"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(
    refusal, run, dataset, tmp_path, monkeypatch, package, words, user, extra
):
    for name in [package, *(name for name in sys.modules if name.startswith(f"{package}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    space = f"set: {{dataset: {dataset.path}}}\nspace: {{optimizer.lr: [0.1, 1]}}"
    (tmp_path / "space.yaml").write_text(space)
    names = {"RUN": run, "OUT": tmp_path / "out", "SPACE": tmp_path / "space.yaml"}
    line = refusal(*(names.get(word, word) for word in words.split()))
    assert line.startswith(user) and f": pip install 'dglkge[{extra}]' (" in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("words", ["inspect RUN", "predict --help"])
def test_a_reader_that_leaves(run, words):
    """The one run of a command by Python itself: a copy of a warm process hides a missing import."""
    read, write = os.pipe()
    os.close(read)
    assert dglkge(run, words, write, python=[sys.executable]) == (141, "")
    os.close(write)


@pytest.mark.parametrize(
    ("words", "unbuffered"),
    [("--help", ""), ("similar RUN person4", ""), ("similar RUN person4", "1")],
    ids=["argparse", "at-exit", "unbuffered"],
)
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_stdout_on_a_full_disk_is_one_line_and_status_1(run, words, unbuffered):
    message = "dglkge: error: cannot write the output: No space left on device\n"
    with open("/dev/full", "w") as full:
        assert dglkge(run, words, full, unbuffered=unbuffered) == (1, message)
