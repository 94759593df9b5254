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


def dglkge(*arguments, **options):
    """Run the command in a process of its own."""
    return subprocess.run(
        [*warm.python(), "-m", "dglkge.cli.main", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        **options,
    )


def test_a_good_command(run):
    done = dglkge("predict", run, "--head", "town3", "--relation", "lies_in", "--topk", "2", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert [answer["rank"] for answer in json.loads(done.stdout)["answers"]] == [1, 2]


def test_bad_input_is_one_line_and_status_2(run):
    done = dglkge("predict", run, "--head", "town33", "--relation", "lies_in")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("dglkge: error: unknown entity 'town33'; did you mean 'town3'")
    assert done.stderr.count("\n") == 1


def test_a_damaged_checkpoint(run):
    (run / "checkpoint" / "checkpoint_version.txt").write_text("")
    done = dglkge("inspect", run)
    assert done.returncode == 2
    assert done.stderr == (
        f"dglkge: error: {run}/checkpoint/checkpoint_version.txt is empty; expected one number; the newest "
        "good version is 1: set checkpoint.fallback=true to go on from it (what is newer is moved aside), "
        "or move the folder away to start anew\n"
    )


def test_no_command_at_all():
    done = dglkge()
    assert done.returncode == 2
    assert "the following arguments are required: COMMAND" in done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGPIPE on Windows")
def test_a_reader_that_leaves(run):
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "dglkge.cli.main", "inspect", str(run)],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        timeout=LIMIT_SECONDS,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", [["--help"], ["similar", "RUN", "--entity", "person4"]])
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_stdout_on_a_full_disk_is_one_line_and_status_1(run, words, unbuffered):
    if words == ["--help"] and unbuffered:
        pytest.skip("argparse itself ignores the error")
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "dglkge.cli.main",
                *(str(run) if word == "RUN" else word for word in words),
            ],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=LIMIT_SECONDS,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": unbuffered},
        )
    assert (done.returncode, done.stderr) == (
        1,
        "dglkge: error: cannot write the output: No space left on device\n",
    )


def test_a_reader_of_the_help_that_leaves():
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "dglkge.cli.main", "predict", "--help"],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        timeout=LIMIT_SECONDS,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": ""},
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")
