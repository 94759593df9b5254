"""Connection to the launcher's agent on one machine, over OpenSSH's client or another transport.

No user input passes through a shell: the remote command line is an interpreter and one fixed line of Python,
and everything else (program, arguments, variables) follows over stdin.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import select
import shlex
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol, cast

from dglkge.errors import InputError
from dglkge.launch.remote import agent_starter
from dglkge.launch.watchdog import HEARTBEAT_SECONDS

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

    Parameters
    ----------
    environment : mapping of str to str
        That of the launcher.

    Returns
    -------
    dict of str to str
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


class Transport(Protocol):
    """Way to another machine: the command of a client process that carries stdin, stdout and stderr.

    Attributes
    ----------
    client_name, how, remedy : str
        For messages: the client, its way, and the remedy if it cannot be started.
    """

    @property
    def client_name(self) -> str:
        """Name of the client."""
        ...

    @property
    def how(self) -> str:
        """Way of the client."""
        ...

    @property
    def remedy(self) -> str:
        """What to do if the client cannot be started."""
        ...

    def command(self, address: str, words: Sequence[str]) -> list[str]:
        """Return the command that runs some words on the machine."""
        ...


@dataclass(frozen=True)
class SshSettings:
    """Options for SSH from the command line; None: the value of ``~/.ssh/config``.

    Attributes
    ----------
    port : int or None
    username : str or None
    identity_file : str or None
        Private key.
    options : tuple of str
        Further ``KEY=VALUE`` of ssh_config(5); they override those of this module.
    """

    port: int | None = None
    username: str | None = None
    identity_file: str | None = None
    options: tuple[str, ...] = ()

    client_name = "ssh client"
    how = "by ssh"
    remedy = "install OpenSSH's client"

    def command(self, address: str, words: Sequence[str]) -> list[str]:
        """Return the command that runs some words on another machine."""
        return ssh_command(self, address, words)


def ssh_command(settings: SshSettings, address: str, words: Sequence[str]) -> list[str]:
    """Return the command that runs some words on another machine, each quoted for the shell there.

    Parameters
    ----------
    settings : SshSettings
    address : str
        As in ip_config.txt, so that entries of ``~/.ssh/config`` with this name apply.
    words : sequence of str
        Program and arguments.

    Examples
    --------
    >>> ssh_command(SshSettings(port=2222), "10.0.0.2", ["echo", "it's"])[-5:]
    ['-p', '2222', '--', '10.0.0.2', "echo 'it'\\"'\\"'s'"]
    """
    return [*ssh_client(settings), "--", address, shlex.join(words)]


def ssh_client(settings: SshSettings) -> list[str]:
    """Return the ssh client with its options."""
    # BatchMode: ssh must fail and not ask for a password, which no user could enter.
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
    # ssh uses the first value of a repeated option
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
    """Return the command that runs a Python program whose source comes first on stdin.

    The source is read byte by byte, so that the bytes after it are left for the program. It may import the
    standard library only.
    """
    # Works with any login shell, as the words contain no user input. No file is needed on the machine.
    reader = f'import os,sys;exec(b"".join(os.read(0,1)or sys.exit(1)for _ in range({len(program)})))'
    return [python, "-I", "-S", "-c", reader]


REPLY_SECONDS = 30.0
LEAVE_SECONDS = 2.0


class HostSession:
    """Connection to an agent on this machine (without a transport) or on another one.

    A thread sends a heartbeat every HEARTBEAT_SECONDS.

    Parameters
    ----------
    address : str
        As in ip_config.txt.
    transport : Transport or None
        None: this machine.
    python : str
        The interpreter there.
    environment : mapping of str to str
        Added to the environment there.

    Raises
    ------
    InputError
        If there is no client here, or `python` cannot be started here.
    """

    def __init__(
        self, address: str, transport: Transport | None, python: str, environment: Mapping[str, str]
    ) -> None:
        self.address = address
        self.transport = transport
        self.python = python
        self.environment = dict(environment)
        starter = Path(agent_starter.__file__).read_bytes()
        # A file and not a pipe: a full pipe that is not read would block ssh.
        self._errors = tempfile.TemporaryFile()
        self._replies = b""
        self._num_calls = 0
        self.is_cut = False
        # Heartbeats and calls come from different threads; a line must not be split.
        self._writing = threading.Lock()
        # The source of the starter is sent: it sets PYTHONPATH and the like before dglkge is imported.
        command = self.command(python_from_stdin(python, starter))
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                bufsize=0,
                start_new_session=True,
            )
        except OSError as error:
            self._errors.close()
            raise InputError(self._describe_missing(command[0], error)) from None
        agent = {"command": [python, "-m", "dglkge.launch.remote.agent"], "environment": self.environment}
        self._write(starter + json.dumps(agent).encode() + b"\n")
        self._closing = threading.Event()
        threading.Thread(target=self._send_heartbeats, daemon=True).start()

    @property
    def is_alive(self) -> bool:
        """Whether the agent, or the client process that leads to it, still runs."""
        return self._process.poll() is None

    def command(self, words: list[str]) -> list[str]:
        """Return the command that runs some words on the machine."""
        return words if self.transport is None else self.transport.command(self.address, words)

    def call(self, task: str, seconds: float = REPLY_SECONDS, /, **arguments: Any) -> Any:
        """Call a task of the agent and return its result.

        Parameters
        ----------
        task : str
            One of ``agent.TASKS``, or ``lock``.
        seconds : float
            Timeout.
        **arguments
            Of the task; any names, ``seconds`` included.

        Raises
        ------
        InputError
            Error of the task, or that the agent has ended or does not reply in time.
        """
        self._num_calls += 1
        # The id marks the reply: an earlier call may have timed out, and its reply may still come.
        self._write(json.dumps({"id": self._num_calls, "do": task, **arguments}).encode() + b"\n")
        deadline = time.monotonic() + seconds
        while True:
            reply = self._read_reply(deadline, seconds)
            if reply.get("id") != self._num_calls:
                continue  # reply to a call that timed out, or output of a login shell
            if "error" in reply:
                raise InputError(reply["error"])
            return reply["ok"]

    def close(self) -> None:
        """Close stdin, at whose end the agent exits; kill it after LEAVE_SECONDS."""
        self._closing.set()
        with contextlib.suppress(OSError):
            cast(IO[bytes], self._process.stdin).close()
        # Time for the agent to release its lock, before the connection is killed.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(LEAVE_SECONDS)
        self.cut()
        self._process.wait()
        cast(IO[bytes], self._process.stdout).close()
        self._errors.close()

    def cut(self) -> None:
        """Kill the connection, from any thread: a blocked :meth:`call` raises, transfers are cancelled."""
        self.is_cut = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _read_reply(self, deadline: float, seconds: float) -> dict[str, Any]:
        """Read one line; return its JSON object, empty for other output, such as that of a login shell."""
        replies = cast(IO[bytes], self._process.stdout).fileno()
        while b"\n" not in self._replies:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([replies], [], [], left)[0]:
                raise InputError(f"did not answer within {seconds:g} s")
            data = os.read(replies, 65536)
            if not data:
                raise InputError(self._describe_end())
            self._replies += data
        line, _, self._replies = self._replies.partition(b"\n")
        with contextlib.suppress(ValueError):
            reply = json.loads(line)
            if isinstance(reply, dict):
                return reply
        return {}

    def _describe_missing(self, program: str, error: OSError) -> str:
        """Describe a program that could not be started on the launcher's machine, with a remedy."""
        if self.transport is None:
            return (
                f"{self.address}, the launcher's machine: cannot start {program}: {error.strerror}; "
                "give the path of another interpreter with --python"
            )
        return (
            f"the launcher's machine cannot start {program!r}, which reaches {self.address}: "
            f"{error.strerror}; {self.transport.remedy}"
        )

    def _describe_end(self) -> str:
        """Describe why there is no agent, by the last line of ssh, the shell or Python."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(LEAVE_SECONDS)
        if self.transport is not None and (self._process.returncode or 0) < 0:
            name = signal.Signals(-self._process.returncode).name
            return f"its {self.transport.client_name} was killed by {name}"
        # The last line: before it ssh or a login shell may print banners.
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        words = lines[-1].strip() if lines else f"status {self._process.returncode}"
        if self.transport is not None and self._process.returncode == 255:
            return f"cannot be reached {self.transport.how}: {words}"
        if "No module named" in words:
            return f"dglkge must be installed for {self.python} there: {words}"
        return f"{self.python} could not run there: {words}"

    def _send_heartbeats(self) -> None:
        """Send heartbeats until the session is closed; the body of a thread."""
        while not self._closing.wait(HEARTBEAT_SECONDS):
            self._write(b"\n")

    def _write(self, data: bytes) -> None:
        """Write whole lines; a closed pipe is ignored here, as reads report it."""
        with self._writing, contextlib.suppress(OSError, ValueError):
            # An unbuffered write may accept fewer bytes than given.
            while data:
                data = data[cast(IO[bytes], self._process.stdin).write(data) :]


def close_all(sessions: Sequence[HostSession]) -> None:
    """Close sessions in parallel."""
    threads = [threading.Thread(target=session.close) for session in sessions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
