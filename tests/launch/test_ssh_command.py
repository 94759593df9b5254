"""Commands for other machines: what ssh is told, and that nothing of the user's is read by a shell."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys

from dglkge.launch.remote.ssh import STARTER, SshSettings, forwarded_environment, ssh_command

HOSTILE = ["a b", "it's", '"', "$HOME", "`id`", "; touch injected", "\\", "a\nb", "*", "&& false", "-o", "é"]


def options(command: list[str]) -> list[str]:
    return [value for flag, value in zip(command, command[1:]) if flag == "-o"]


def test_users_options_come_first() -> None:
    """ssh takes the first value of an option, so the user's win; ours make a silent host known in time."""
    settings = SshSettings(options=("ConnectTimeout=3", "StrictHostKeyChecking=no"))
    command = ssh_command(settings, "host", ["true"])
    assert options(command)[:2] == ["ConnectTimeout=3", "StrictHostKeyChecking=no"]
    values = dict(option.split("=", 1) for option in reversed(options(command)))
    assert values["ConnectTimeout"] == "3"
    assert values["BatchMode"] == "yes"
    assert int(values["ServerAliveInterval"]) * int(values["ServerAliveCountMax"]) <= 15


def test_only_what_was_said_is_passed() -> None:
    command = ssh_command(SshSettings(), "host", ["true"])
    assert not {"-p", "-l", "-i"} & set(command)
    assert not any(option.startswith("StrictHostKeyChecking") for option in options(command))
    command = ssh_command(SshSettings(2222, "me", "my key"), "host", ["true"])
    assert command[-9:-3] == ["-i", "my key", "-l", "me", "-p", "2222"]


def test_words_survive_the_shell(tmp_path) -> None:
    words = [sys.executable, "-c", "import sys; print(ascii(sys.argv[1:]))", *HOSTILE]
    command = ssh_command(SshSettings(), "host", words)
    assert command[-3:-1] == ["--", "host"]
    assert shlex.split(command[-1]) == words
    done = subprocess.run(["sh", "-c", command[-1]], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout == f"{ascii(HOSTILE)}\n"
    assert not list(tmp_path.iterdir())


def test_starter() -> None:
    """One line of stdin names the program and its variables, and not a byte more is read."""
    code = "import os, sys; print(os.environ['ODD'], os.getcwd(), sys.stdin.read())"
    program = [sys.executable, "-c", code]
    line = json.dumps([program, {"ODD": "it's é", "PYTHONUTF8": "1"}]).encode() + b"\n"
    command = [sys.executable, "-I", "-S", "-c", STARTER]
    done = subprocess.run(command, input=line + b"rest", capture_output=True, check=True)
    assert done.stdout.decode() == "it's é / rest\n"
    assert not set("'\n!$`\\") & set(STARTER)


def test_program_that_never_comes() -> None:
    """Where the launcher goes before it has sent the program, the interpreter goes too."""
    command = [sys.executable, "-I", "-S", "-c", STARTER]
    assert subprocess.run(command, input=b"[", capture_output=True, timeout=30).returncode == 1


def test_forwarded_variables() -> None:
    """What changes how Python, DGL and torch compute; not what belongs to this session, and no secrets."""
    forwarded = "PATH PYTHONHASHSEED LD_PRELOAD OMP_NUM_THREADS DGLBACKEND GLOO_SOCKET_IFNAME".split()
    private = "HOME USER SSH_AUTH_SOCK AWS_SECRET_ACCESS_KEY RANK DISPLAY DGLKGE_SECRET".split()
    variables = forwarded_environment(dict.fromkeys([*forwarded, *private], "/x'y $z"))
    assert variables == dict.fromkeys(forwarded, "/x'y $z")
    # Processes elsewhere start in other folders; an empty entry stays what it was.
    variables = forwarded_environment({"PYTHONPATH": f".{os.pathsep}{os.pathsep}/a", "PYTHONWARNINGS": "."})
    assert variables == {"PYTHONPATH": f"{os.getcwd()}{os.pathsep}{os.pathsep}/a", "PYTHONWARNINGS": "."}
