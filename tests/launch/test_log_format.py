"""Logs as JSON: lines of the launcher, of processes that know the form, and of any other program."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dglkge.cli.launch import main
from dglkge.distributed.world import JsonFormatter, json_line, parse_line
from dglkge.errors import InputError
from dglkge.launch.console import as_json, plain_text
from tests import warm
from tests.launch.conftest import ROOT

TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")
SPEAKS = """
import logging, os, sys
if os.environ["DGL_ROLE"] == "server": print("Server is exiting..."); sys.exit()
logging.basicConfig(format="%(message)s")
from dglkge.distributed.runtime import use_log_format
use_log_format()
logging.getLogger("mine").warning("two\\nlines")
print("said by print", flush=True)
if len(sys.argv) > 1: raise ValueError("broken")
"""


def records(text: str) -> list[dict[str, str]]:
    lines = [json.loads(line) for line in text.splitlines()]
    for record in lines:
        assert {"level", "process", "message"} <= set(record) and TIME.fullmatch(record["time"]), record
    return lines


def test_every_line_of_output_and_logs_is_an_object(launch, tmp_path: Path) -> None:
    job = launch(["--num_trainers", "1", "--log_format", "json", "--log_dir", "logs"], SPEAKS)
    shown = records(job.finish())
    assert job.launcher.returncode == 0, shown
    levels = [(record["level"], record["message"]) for record in shown if record["process"] == "trainer 0"]
    assert levels == [("warning", "two\nlines"), ("info", "said by print")]
    messages = [record["message"] for record in shown if record["process"] == "launcher"]
    assert messages[0].startswith("1 server(s) and 1 tr") and messages[-1].startswith("all processes ended w")
    log = records((tmp_path / "logs" / "trainer-0.log").read_text())
    assert [record["message"] for record in log] == ["two\nlines", "said by print"]
    assert log[0]["logger"] == "mine" and log[0]["process"] == "trainer 0"
    (hidden,) = records((tmp_path / "logs" / "server-0.log").read_text())
    assert (hidden["level"], hidden["message"]) == ("debug", "Server is exiting...")
    log = records((tmp_path / "logs" / "launcher.log").read_text())
    assert [record["message"] for record in log] == messages


def test_a_failure_is_one_object_of_level_error(launch, tmp_path: Path) -> None:
    """The variable selects the form too; the end of the log is shown as text."""
    job = launch(["--num_trainers", "1", "--log_dir", "logs"], SPEAKS, "fail", DGLKGE_LOG_FORMAT="json")
    errors = [record for record in records(job.finish()) if record["level"] == "error"]
    assert job.launcher.returncode == 1 and len(errors) == 2
    assert "\n    two\n    lines\n    said by print\n" in errors[0]["message"]
    assert "ValueError: broken" in errors[0]["message"] and "script_runner" not in errors[0]["message"]
    assert errors[1]["message"].startswith("failed after ")


def test_refusals(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    assert main(["--log_format", "json", "--ip_config", "absent", "train.py"]) == 2
    (error,) = records(capsys.readouterr().err)
    assert (error["level"], error["process"]) == ("error", "launcher")
    monkeypatch.setenv("DGLKGE_LOG_FORMAT", "xml")
    assert main(["train.py"]) == 2
    words = "dglkge-launch: error: DGLKGE_LOG_FORMAT is 'xml'; allowed are text, json\n"
    assert capsys.readouterr().err == words


def test_a_formatter_keeps_tracebacks_in_one_line() -> None:
    error = ValueError('é\n"quoted"')
    record = logging.LogRecord("a.b", logging.ERROR, "f", 1, "failed: %s", ("x",), (type(error), error, None))
    line = JsonFormatter("trainer 3").format(record)
    assert "\n" not in line and parse_line(line)["message"] == 'failed: x\nValueError: é\n"quoted"'


def test_what_is_no_such_object_becomes_a_message() -> None:
    for text in ("", "{", "[1]", "{}", '{"time": 1, "level": "a", "process": "b", "message": "c"}'):
        assert parse_line(text) is None and plain_text(text) == text
        wrapped = as_json("server 1", text)
        assert json.loads(wrapped)["message"] == text and plain_text(wrapped) == text
        assert as_json("server 2", wrapped) == wrapped


def test_training_from_python_finds_the_error_in_it() -> None:
    from dglkge.config import Config
    from dglkge.train_job import _run_job

    line = json_line("launcher", "error", "dglkge-launch: error: no such field")
    for text in (line, "dglkge-launch: error: no such field"):
        command = [sys.executable, "-c", f"print({text!r}); raise SystemExit(2)"]
        with pytest.raises(InputError, match="^no such field$"):
            _run_job(command, Config(), False)


def test_a_script_alone_obeys_the_variable() -> None:
    code = SPEAKS.replace('os.environ["DGL_ROLE"]', "None")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DGLKGE_LOG_FORMAT": "json"}
    command = [*warm.python(), "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    (record,) = records(done.stderr)
    assert (record["process"], record["message"]) == ("trainer 0", "two\nlines")
