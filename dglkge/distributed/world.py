"""Place of this process among the processes of its job, read from the launcher's environment variables.

They also say whether it logs as JSON: one object a line with ``time``, ``level``, ``process`` and
``message``. The launcher writes such lines with ``--log_format json``, for itself and for lines of processes
that are not JSON. Standard library only: the launcher imports this file.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dglkge.checkpoint.layout import parse_object
from dglkge.errors import InputError

LOG_FORMAT_VARIABLE = "DGLKGE_LOG_FORMAT"
TEXT, JSON = "text", "json"
LOG_FORMATS = (TEXT, JSON)

LOG_FIELDS = ("time", "level", "process", "message")


def timestamp(seconds: float | None = None) -> str:
    """Return seconds since the epoch, by default now, in UTC with milliseconds (RFC 3339).

    Examples
    --------
    >>> timestamp(0.25)
    '1970-01-01T00:00:00.250Z'
    """
    date = datetime.datetime.fromtimestamp(time.time() if seconds is None else seconds, datetime.timezone.utc)
    return date.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def json_line(process: str, level: str, message: str, seconds: float | None = None, **more: Any) -> str:
    """Return one line, without its end; `more` are further fields, `seconds` since the epoch, by default now.

    Examples
    --------
    >>> json_line("trainer 0", "info", "resumed", 0.0)
    '{"time": "1970-01-01T00:00:00.000Z", "level": "info", "process": "trainer 0", "message": "resumed"}'
    """
    record = dict(zip(LOG_FIELDS, (timestamp(seconds), level, process, message)))
    return json.dumps({**record, **more}, ensure_ascii=False)


def parse_line(text: str) -> dict[str, Any] | None:
    """Return the object of a line that has all of :data:`LOG_FIELDS` as texts; None for any other line."""
    record = parse_object(text) if text.startswith("{") else {}
    return record if all(isinstance(record.get(name), str) for name in LOG_FIELDS) else None


class JsonFormatter(logging.Formatter):
    """Formats log records as :func:`json_line` of a process, with the logger as a further field."""

    def __init__(self, process: str) -> None:
        super().__init__("%(message)s")
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        # The base class appends the traceback to the message.
        text = super().format(record)
        return json_line(self._process, record.levelname.lower(), text, record.created, logger=record.name)


DEFAULT_TIMEOUT_SECONDS = 600.0
TIMEOUT_VARIABLE = "DGLKGE_TIMEOUT_SECONDS"
JOB_VARIABLE = "DGLKGE_JOB"
NO_VERIFY_VARIABLE = "DGLKGE_NO_VERIFY"
OWN_DISKS_VARIABLE = "DGLKGE_OWN_DISKS"
"""1: the machines of the job share no disk."""

SIZE_VARIABLES = {
    "WORLD_SIZE": "torchrun",
    "OMPI_COMM_WORLD_SIZE": "mpirun",
    "MV2_COMM_WORLD_SIZE": "mpirun",
    "PMI_SIZE": "mpirun",
    "SLURM_STEP_NUM_TASKS": "srun",
}
"""Variables with the number of processes that another launcher started, and the usual launcher of each."""

FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""SLURM step ids from here on are not started by srun: the batch script, the shell of salloc."""


@dataclass(frozen=True)
class World:
    """Place of one trainer in its job.

    Attributes
    ----------
    rank : int
        Number among all trainers; ``machine * trainers_per_machine + local_rank``.
    launched : bool
        Whether ``dglkge-launch`` (or DGL's launcher) started this process. Without it the process
        trains alone, in DGL's standalone mode.
    shows_progress : bool
        Whether the launcher's output is a terminal, so that progress bars are useful.
    has_own_disk : bool
        Whether the machines of the job share no disk.
    rendezvous : tuple of (str, int)
        Address and port of torch's rendezvous.
    timeout_seconds : float
        Timeout of waits for another trainer or a server. A trainer fails after it, and the launcher then ends
        the job. The user sets it as ``DGLKGE_TIMEOUT_SECONDS``.
    job : str
        The launcher's id of the job, equal for all its attempts; empty without a launcher.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    trainers_per_machine: int = 1
    launched: bool = False
    shows_progress: bool = False
    has_own_disk: bool = False
    rendezvous: tuple[str, int] = ("127.0.0.1", 0)
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
    job: str = ""

    @property
    def machine(self) -> int:
        """Number of this machine and of the partition that it holds."""
        return self.rank // self.trainers_per_machine

    @property
    def num_machines(self) -> int:
        """Number of machines of the job."""
        return self.world_size // self.trainers_per_machine

    @property
    def is_machine_leader(self) -> bool:
        """Whether this trainer does the work that is done once on each machine."""
        return self.local_rank == 0

    @property
    def is_disk_leader(self) -> bool:
        """Whether this trainer does the work that is done once on each disk of the job."""
        return self.rank == 0 or (self.has_own_disk and self.is_machine_leader)

    def wants_bar(self, setting: str) -> bool:
        """Return whether this trainer shows progress bars: rank 0 does.

        ``setting`` is ``always``, ``never``, or ``auto``: on a terminal.
        """
        watched = self.shows_progress or sys.stderr.isatty()
        return self.rank == 0 and (setting == "always" or (setting == "auto" and watched))

    @classmethod
    def detect(cls, environment: Mapping[str, str] | None = None) -> World:
        """Read the place of this process from environment variables.

        Raises
        ------
        InputError
            If the process was launched but a variable is missing, not a number, or does not fit the others;
            or if another launcher started it as one of several, each of which would train alone.
        """
        env = os.environ if environment is None else environment
        if env.get("DGL_DIST_MODE", "standalone") != "distributed":
            if (other := _other_launcher(env)) is not None:
                name, starter = other
                raise InputError(
                    f"{name} is {env[name]}: {starter} (or another launcher) started {env[name]} processes, "
                    "and each would train alone and write to the same folder; start one "
                    "dglkge-launch --ip_config ip_config.txt SCRIPT ARGUMENTS instead (it starts the "
                    f"trainers of all machines), or run the script once, with {name} unset"
                )
            return cls()
        rank, world_size = _number(env, "RANK"), _number(env, "WORLD_SIZE")
        local, per_machine = _number(env, "LOCAL_RANK"), _number(env, "LOCAL_WORLD_SIZE")
        # Machine and local rank follow from the rank, because each machine has equally many trainers.
        if per_machine < 1 or world_size % per_machine or not 0 <= rank < world_size:
            raise InputError(
                f"RANK={rank}, WORLD_SIZE={world_size}, LOCAL_WORLD_SIZE={per_machine} do not fit: "
                "every machine must run the same number of trainers"
            )
        if rank % per_machine != local:
            raise InputError(f"RANK={rank} does not fit LOCAL_RANK={local}, LOCAL_WORLD_SIZE={per_machine}")
        return cls(
            rank, world_size, local, per_machine, launched=True,
            shows_progress=env.get("DGLKGE_PROGRESS") == "1",
            has_own_disk=env.get(OWN_DISKS_VARIABLE) == "1",
            rendezvous=(env.get("MASTER_ADDR", "127.0.0.1"), _number(env, "MASTER_PORT")),
            timeout_seconds=_seconds(env.get(TIMEOUT_VARIABLE, str(DEFAULT_TIMEOUT_SECONDS))),
            job=env.get(JOB_VARIABLE, ""),
        )  # fmt: skip


def inherited_log_format() -> str:
    """Return how this process shall log; raises InputError."""
    name = os.environ.get(LOG_FORMAT_VARIABLE) or TEXT
    if name not in LOG_FORMATS:
        raise InputError(f"{LOG_FORMAT_VARIABLE} is {name!r}; allowed are {', '.join(LOG_FORMATS)}")
    return name


def _other_launcher(environment: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the variable by which this process is one of several, and who sets it; None if it is alone.

    SLURM_NTASKS alone does not show it: sbatch sets it for the batch script too, which runs once. It counts
    if the process is a task of a step (SLURM_STEP_ID, SLURM_STEPID) or not the first task (SLURM_PROCID). If
    srun sets the number of tasks of the step (SLURM_STEP_NUM_TASKS), that number counts instead.
    """
    starters = dict(SIZE_VARIABLES)
    steps = [environment.get(name, "") for name in ("SLURM_STEP_ID", "SLURM_STEPID")]
    is_task = any(step.isdigit() and int(step) < FIRST_SPECIAL_STEP for step in steps)
    is_later_task = environment.get("SLURM_PROCID", "0") != "0"
    if not environment.get("SLURM_STEP_NUM_TASKS") and (is_task or is_later_task):
        starters["SLURM_NTASKS"] = "srun"
    for name, starter in starters.items():
        text = environment.get(name, "")
        if text.isdigit() and int(text) > 1:
            return name, starter
    return None


def _number(environment: Mapping[str, str], name: str) -> int:
    """Read one variable as a non-negative whole number."""
    text = environment.get(name, "")
    if not text.isdigit():
        raise InputError(f"the launcher's variable {name} is {text!r}; expected a whole number")
    return int(text)


def _seconds(text: str) -> float:
    """Read a timeout."""
    with contextlib.suppress(ValueError):
        if 0 < (seconds := float(text)) <= 86400:
            return seconds
    raise InputError(f"{TIMEOUT_VARIABLE} is {text!r}; expected seconds above 0 and up to 86400")
