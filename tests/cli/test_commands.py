"""The commands as programs: exit status, stdout and stderr."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests import warm
from tests.toy_kg import REPOSITORY

LIMIT_SECONDS = 120


def dglkge(*arguments, python=None, unbuffered="", **options):
    """Run the command in a process of its own; its output is text, unless the options say otherwise."""
    environment = {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": unbuffered}
    return subprocess.run(
        [*(python or warm.python()), "-m", "dglkge.cli.main", *map(str, arguments)],
        text=True,
        timeout=LIMIT_SECONDS,
        env={**os.environ, **environment},
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
    )


def test_a_good_command(run):
    done = dglkge("predict", run, "--head", "town3", "--relation", "lies_in", "--topk", "2", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert [answer["rank"] for answer in json.loads(done.stdout)["answers"]] == [1, 2]


def test_bad_input_is_one_line_and_status_2(run):
    done = dglkge("predict", run, "--head", "town33", "--relation", "lies_in")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("dglkge: error: unknown entity 'town33'; did you mean 'town3'")
    (run / "checkpoint" / "checkpoint_version.txt").write_text("")
    done = dglkge("inspect", run)
    assert (done.returncode, done.stderr) == (
        2,
        f"dglkge: error: {run}/checkpoint/checkpoint_version.txt is empty; expected one number; the newest "
        "good version is 1: set checkpoint.fallback=true to go on from it (what is newer is moved aside), "
        "or move the folder away to start anew\n",
    )


@pytest.mark.parametrize("words", [["inspect", "RUN"], ["predict", "--help"]])
def test_a_reader_that_leaves(run, words):
    """The one run of a command by Python itself: a copy of a warm process hides a missing import."""
    read, write = os.pipe()
    os.close(read)
    words = [run if word == "RUN" else word for word in words]
    done = dglkge(*words, python=[sys.executable], stdout=write)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(
    ("words", "unbuffered"),
    [
        pytest.param(["--help"], "", id="argparse"),
        pytest.param(["similar", "RUN", "person4"], "", id="at-exit"),
        pytest.param(["similar", "RUN", "person4"], "1", id="unbuffered"),
    ],
)
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_stdout_on_a_full_disk_is_one_line_and_status_1(run, words, unbuffered):
    words = [run if word == "RUN" else word for word in words]
    with open("/dev/full", "w") as full:
        done = dglkge(*words, unbuffered=unbuffered, stdout=full)
    message = "dglkge: error: cannot write the output: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, message)
