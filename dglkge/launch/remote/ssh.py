"""Ways to other machines: ssh, and the environment that is forwarded.

No user input passes through a shell: the remote command line is an interpreter and one fixed line of Python,
and everything else (program, arguments, variables) follows over stdin.
"""

from __future__ import annotations

import fnmatch
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

FORWARDED_VARIABLES = (
    "CONDA_*", "CUDA_*", "DGL*", "GLOO_*", "GOMP_*", "HDF5_*", "KMP_*", "LANG", "LANGUAGE", "LC_*",
    "LD_LIBRARY_PATH", "LD_PRELOAD", "MALLOC_*", "MKL_*", "NCCL_*", "NUMBA_*", "OMP_*", "OPENBLAS_*", "PATH",
    "PYTHON*", "TORCH_*", "TP_*", "TZ", "VIRTUAL_ENV",
)  # fmt: skip
"""Patterns of names; --extra_envs forwards any other."""

SECRET_VARIABLE = "DGLKGE_SECRET"
"""Secret of jobs without SSH; never given to another process."""

NOT_INHERITED = (SECRET_VARIABLE, "TORCHELASTIC_USE_AGENT_STORE")
"""Removed from the environment of jobs without SSH. torchrun sets the second: torch would then connect to the
store of torchrun instead of the job's."""

SEARCH_PATHS = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")


def forwarded_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Select the variables that are forwarded to other machines.

    Relative folders of search paths are made absolute: processes elsewhere start in other folders.
    """
    picked = {
        name: value
        for name, value in environment.items()
        if name != SECRET_VARIABLE
        and any(fnmatch.fnmatchcase(name, pattern) for pattern in FORWARDED_VARIABLES)
    }
    for name in SEARCH_PATHS:
        if name in picked:
            folders = picked[name].split(os.pathsep)
            picked[name] = os.pathsep.join(
                os.path.abspath(folder) if folder else folder for folder in folders
            )
    return picked


CONNECT_SECONDS = 10
ALIVE_SECONDS = 3
ALIVE_COUNT = 4
"""ssh closes a connection after ALIVE_SECONDS * ALIVE_COUNT without a reply."""


@dataclass(frozen=True)
class SshSettings:
    """Options for SSH from the command line; None: the value of ``~/.ssh/config``.

    `options` are further ``KEY=VALUE`` of ssh_config(5); they override those of this module.
    """

    port: int | None = None
    username: str | None = None
    identity_file: str | None = None
    options: tuple[str, ...] = ()


def ssh_command(settings: SshSettings, address: str, words: Sequence[str]) -> list[str]:
    """Return the command that runs some words on another machine, each quoted for the shell there."""
    # BatchMode: ssh must fail and not ask for a password, which no user could enter.
    defaults = {
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
    # ssh uses the first value of a repeated option
    for option in (*settings.options, *(f"{key}={value}" for key, value in defaults.items())):
        command += ["-o", option]
    for flag, value in (("-i", settings.identity_file), ("-l", settings.username), ("-p", settings.port)):
        if value is not None:
            command += [flag, str(value)]
    return [*command, "--", address, shlex.join(words)]


STARTER = (
    'import json,os;line=open(0,"rb",0,closefd=False).readline();line or os._exit(1);'
    'command,environment=json.loads(line);os.chdir("/");'
    "os.execve(command[0],command,{**os.environ,**environment})"
)
"""Program that sets an environment and becomes another program, given as a line of JSON; the rest of stdin is
that program's. Without a line the launcher is gone. In ``/``: a folder named dglkge in the home folder would
be imported as the package. One line without quotes that a login shell may treat in its own way."""
