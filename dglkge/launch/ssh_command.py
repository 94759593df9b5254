"""What reaches another machine: OpenSSH's client, and a Python there that reads its program from stdin.

Nothing of the user's goes through a shell: the remote command line is an interpreter and one fixed line of
Python, and everything else (program, arguments, variables) follows over stdin.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass

CONNECT_SECONDS = 10
ALIVE_SECONDS = 3
ALIVE_COUNT = 4
"""A connection that is silent for ALIVE_SECONDS * ALIVE_COUNT is given up by the client."""


@dataclass(frozen=True)
class SshSettings:
    """How the user wants machines to be reached; what is not said, ``~/.ssh/config`` says.

    Attributes
    ----------
    port : int or None
    username : str or None
    identity_file : str or None
        Private key.
    options : tuple of str
        Further ``KEY=VALUE`` of ssh_config(5); they win over ours.
    """

    port: int | None = None
    username: str | None = None
    identity_file: str | None = None
    options: tuple[str, ...] = ()


def ssh_command(settings: SshSettings, address: str, words: list[str]) -> list[str]:
    """Return the command that runs some words on another machine, each quoted for the shell there.

    Parameters
    ----------
    settings : SshSettings
    address : str
        As ip_config.txt has it, so that ``~/.ssh/config`` may know it by this name.
    words : list of str
        Program and arguments.

    Examples
    --------
    >>> ssh_command(SshSettings(port=2222), "10.0.0.2", ["echo", "it's"])[-5:]
    ['-p', '2222', '--', '10.0.0.2', "echo 'it'\\"'\\"'s'"]
    """
    return [*ssh_client(settings), "--", address, shlex.join(words)]


def ssh_client(settings: SshSettings) -> list[str]:
    """Return the client and its options, for ourselves or for a program that calls it (``rsync -e``)."""
    ours = {
        "BatchMode": "yes",
        "ConnectTimeout": CONNECT_SECONDS,
        "ServerAliveInterval": ALIVE_SECONDS,
        "ServerAliveCountMax": ALIVE_COUNT,
        "LogLevel": "ERROR",
        # a shared connection would serve at most 10 processes (MaxSessions)
        "ControlMaster": "no",
        "ControlPath": "none",
    }
    command = ["ssh", "-T", "-x"]
    # ssh takes the first value that it sees
    for option in (*settings.options, *(f"{key}={value}" for key, value in ours.items())):
        command += ["-o", option]
    if settings.identity_file is not None:
        command += ["-i", settings.identity_file]
    if settings.username is not None:
        command += ["-l", settings.username]
    if settings.port is not None:
        command += ["-p", str(settings.port)]
    return command


def python_from_stdin(python: str, program: bytes) -> list[str]:
    """Return the words that run a Python program of the standard library whose text comes first on stdin.

    It is read byte by byte: what follows is the program's own.
    """
    reader = f'import os,sys;exec(b"".join(os.read(0,1)or sys.exit(1)for _ in range({len(program)})))'
    return [python, "-I", "-S", "-c", reader]
