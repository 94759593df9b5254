"""The benchmark of a whole path in a control group: its commands, what it refuses, and who is killed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import limited_memory
from dglkge.errors import InputError

MIB = 2**20


def test_the_commands_of_the_path(tmp_path):
    (tmp_path / "test.tsv").write_text("a b\tlikes\tc\nx\ty\tz\n")
    words = ["--input", str(tmp_path), "--work", str(tmp_path), "--set", "model.dimension=8"]
    args = limited_memory.build_parser().parse_args([*words, "--partition-options", "--max_memory 64MB"])
    commands = limited_memory.commands(args, tmp_path / "data", tmp_path / "run", tmp_path / "metrics.json")
    assert list(commands) == ["partition", "train", "evaluate", "predict"]
    assert commands["partition"][-2:] == ["--max_memory", "64MB"]
    assert commands["train"][-4:] == ["--num_trainers", "2", "--set", "model.dimension=8"]
    # Those of the run's own ranking are not there with evaluation.split=none.
    assert commands["evaluate"][-2:] == ["--output", str(tmp_path / "metrics.json")]
    assert commands["predict"][-6:] == ["--head", "a b", "--relation", "likes", "--topk", "5"]


def test_a_folder_without_test_triples_is_refused(tmp_path, capsys):
    assert limited_memory.main(["--input", str(tmp_path), "--work", str(tmp_path / "work")]) == 2
    assert f"{tmp_path} has no test.tsv" in capsys.readouterr().err
    assert limited_memory.main(["--input", str(tmp_path), "--work", str(tmp_path), "--limit", "much"]) == 2
    assert "much" in capsys.readouterr().err


@pytest.mark.parametrize(("size", "ends_well"), [(8 * MIB, True), (400 * MIB, False)])
def test_a_command_that_takes_more_than_the_limit_fails(tmp_path: Path, size, ends_well):
    # In a process of its own, so that the one that is killed is not the one that is waited for.
    child = f"import time; held = bytearray({size}); time.sleep(0.4)"
    command = [
        sys.executable,
        "-c",
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])",
    ]
    try:
        if ends_well:
            found = limited_memory.run_limited(command, 100 * MIB, tmp_path / "log", 60)
            assert size < found["peak_group_bytes"] <= 100 * MIB
            return
        with pytest.raises(RuntimeError, match="ended well, but 1 processes were killed by the limit"):
            limited_memory.run_limited(command, 100 * MIB, tmp_path / "log", 60)
        failing = [sys.executable, "-c", f"held = bytearray({size})"]
        with pytest.raises(RuntimeError, match=r"(?s)ended with -9.*the limit killed 1 of its processes"):
            limited_memory.run_limited(failing, 100 * MIB, tmp_path / "log", 60)
    except InputError as error:
        pytest.skip(str(error))
