"""Plan of a job: its processes with command and environment. Pure functions, which start nothing.

The environment is that of DGL's own launcher (``tools/launch.py`` of its repository) and torch's rendezvous
variables, so that scripts written for DGL's launcher run unchanged.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dglkge.distributed import world
from dglkge.distributed.dgl_import import SEGMENTS_VARIABLE, TABLE_FOLDER_VARIABLE
from dglkge.distributed.jobs import job_prefix
from dglkge.errors import InputError
from dglkge.planning.host import MOST_DEFAULT_TRAINERS
from dglkge.typing import AUTO_DEVICE, CPU_DEVICE, CUDA_DEVICE

VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Places:
    """Base folders of relative paths: of the launcher, and of the processes on the machines."""

    here: Path
    workspace: Path

    def on_machines(self, path: Path) -> Path:
        """Convert a path of the launcher to one on the machines: in the workspace, or equal if absolute."""
        path = self.here / path
        return self.workspace / path.relative_to(self.here) if path.is_relative_to(self.here) else path


@dataclass(frozen=True)
class Limits:
    """Timeouts of a :class:`dglkge.launch.supervisor.Supervisor`.

    Attributes
    ----------
    failure_seconds : float
        From SIGTERM to SIGKILL after a process has failed.
    stop_seconds : float
        The same for trainers after a stop signal, or after one of them has left with status 143; they may
        need it to save their state.
    exit_seconds : float
        From the end of the last trainer to that of the servers, or from status 0 of a server to the end of
        the trainers.
    """

    failure_seconds: float = 3.0
    stop_seconds: float = 120.0
    exit_seconds: float = 30.0


SERVER = "server"
TRAINER = "trainer"


@dataclass(frozen=True)
class Host:
    """A machine of the job as its processes reach it; server i listens on ``port + i`` of its IPv4 address.

    Attributes
    ----------
    num_cores : int
        Processor cores that the job may use there.
    interface : str or None
        Network interface of the address; None if unknown.
    runner : tuple of str
        Interpreter there and its arguments before the script.
    table_folder : str
        Folder of the job's tables there, if they are files; empty: they are in shared memory.
    gpus : tuple of str
        GPUs there for trainers, each as ``CUDA_VISIBLE_DEVICES`` names it.
    """

    address: str
    port: int
    num_cores: int
    interface: str | None = None
    runner: tuple[str, ...] = ()
    table_folder: str = ""
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True)
class JobSettings:
    """Settings of a job from the command line; counts are per machine, samplers per trainer.

    Attributes
    ----------
    num_omp_threads : int or None
        Of a trainer; None: the cores of its machine shared out among the trainers.
    part_config : str or None
        DGL's partition file; None: the script names it.
    extra_envs : mapping of str to str
        Variables for every process; they override all others.
    log_dir : str
        Folder of the logs, with the cleaned ip_config.txt that servers and trainers read.
    shows_progress : bool
        Whether the launcher writes to a terminal, and trainers show progress although they write to a pipe.
    sync : bool
        Whether the machines share no disk, so that each sends its parts of a checkpoint to the first.
    job, attempt
        Id of the job, equal for all its attempts, in the lease on the run's folder. Each attempt has names of
        its own in shared memory, so that none meets what processes of the one before still hold.
    device : str
        What trainers are to use, as :func:`device_of_trainers` returns it.
    """

    command: tuple[str, ...]
    num_trainers: int
    num_servers: int = 1
    num_samplers: int = 0
    num_omp_threads: int | None = None
    num_server_threads: int = 1
    graph_format: str = "csc"
    part_config: str | None = None
    log_dir: str = "logs"
    extra_envs: Mapping[str, str] = field(default_factory=dict)
    shows_progress: bool = False
    sync: bool = False
    log_format: str = world.TEXT
    job: str = ""
    attempt: int = 0
    device: str = ""
    no_verify: bool = False


OPTIONS = (
    "num_samplers", "num_omp_threads", "num_server_threads", "graph_format", "extra_envs", "log_format",
    "sync", "no_verify",
)  # fmt: skip
"""Fields of :class:`JobSettings` that are options of the command line as they are."""


@dataclass(frozen=True)
class PlannedProcess:
    """One process of a job; `number` is that among all processes of its role, of a trainer its rank.

    The command never goes through a shell; the environment is added to that of the launcher.
    """

    role: str
    number: int
    address: str
    command: tuple[str, ...]
    environment: Mapping[str, str]

    @property
    def name(self) -> str:
        """Name for messages, e.g. ``trainer 1``."""
        return f"{self.role} {self.number}"


def choose_num_trainers(
    hosts: Sequence[Host], lowest: int, highest: int | None, device: str, most: int = MOST_DEFAULT_TRAINERS
) -> int:
    """Return one trainer for each core of the smallest machine, or for each GPU, within limits.

    GPUs count if the configured device allows them and every machine has some; else there are `most` at most
    by default.
    """
    # One number for all machines: a trainer's machine follows from its rank.
    if device in (AUTO_DEVICE, CUDA_DEVICE) and hosts and all(host.gpus for host in hosts):
        counts = [len(host.gpus) for host in hosts]
    else:
        counts = [host.num_cores for host in hosts]
        highest = most if highest is None else highest
    return max(lowest, min(counts if highest is None else [highest, *counts]))


def device_of_trainers(device: str, hosts: Sequence[Host], num_trainers: int) -> str:
    """Return what trainers are to use: ``cuda``, ``cpu`` where GPUs are to be hidden, else an empty text.

    `device` is that of the configuration; empty: it is unknown, and the script's environment stays. Raises
    InputError if ``cuda`` is configured and a machine has fewer GPUs than trainers.
    """
    short = [host for host in hosts if len(host.gpus) < num_trainers]
    if device == CUDA_DEVICE and short:
        count, words = len(short[0].gpus), f"training.device is cuda and machine {short[0].address} has "
        if not count:
            raise InputError(
                f"{words}no GPU for its trainers (nvidia-smi -L lists none, {VISIBLE_VARIABLE} hides "
                "all, or torch is built without CUDA); allowed there: cpu or auto"
            )
        words += f"{count} GPU{'s' if count > 1 else ''} for {num_trainers} trainers; allowed: "
        raise InputError(f"{words}--num_trainers {count} or less, or training.device auto or cpu")
    if device == CUDA_DEVICE:
        return CUDA_DEVICE
    if device == AUTO_DEVICE and any(host.gpus for host in hosts):
        return CPU_DEVICE if short else CUDA_DEVICE
    return ""


def plan_processes(
    hosts: Sequence[Host], settings: JobSettings, master_port: int, inherited: Mapping[str, str]
) -> list[PlannedProcess]:
    """List every process of a job: servers in the order of ``DGL_SERVER_ID``, then trainers by their ranks.

    Machine i holds partition i; torch's rendezvous is on machine 0. Values of conveniences (variables other
    than DGL's and torch's) in the launcher's environment, `inherited`, are kept.
    """
    hidden = "" if settings.device else None  # no GPU; None: the script's environment decides
    shared = {
        # DGL counts samplers as clients: a server waits until this number has connected.
        "DGL_NUM_CLIENT": settings.num_trainers * (1 + settings.num_samplers) * len(hosts),
        "DGL_NUM_SAMPLER": settings.num_samplers, "DGL_NUM_SERVER": settings.num_servers,
        "DGL_GRAPH_FORMAT": settings.graph_format, "DGL_IP_CONFIG": f"{settings.log_dir}/ip_config.txt",
        "DGL_CONF_PATH": settings.part_config, "DGLKGE_LOG_DIR": settings.log_dir,
        world.OWN_DISKS_VARIABLE: 1 if settings.sync else None,
        world.NO_VERIFY_VARIABLE: 1 if settings.no_verify else None,
        world.LOG_FORMAT_VARIABLE: None if settings.log_format == world.TEXT else settings.log_format,
        world.JOB_VARIABLE: settings.job or None,
        SEGMENTS_VARIABLE: f"{job_prefix(settings.job)}{settings.attempt}~" if settings.job else None,
    }  # fmt: skip
    servers, trainers = [], []
    for machine, host in enumerate(hosts):
        command = (*host.runner, *settings.command)
        conveniences = {
            # Python buffers output to a pipe, which would hold back the lines of the console.
            "PYTHONUNBUFFERED": 1,
            "DGLKGE_PROGRESS": 1 if settings.shows_progress else None,
            "GLOO_SOCKET_IFNAME": host.interface,
        }
        # The user's own values of conveniences win; those of DGL's and torch's protocol must be ours.
        base = {key: value for key, value in conveniences.items() if key not in inherited} | shared
        if host.table_folder or TABLE_FOLDER_VARIABLE in inherited:  # an outer job's is not ours
            base[TABLE_FOLDER_VARIABLE] = host.table_folder
        for local in range(settings.num_servers):
            number = machine * settings.num_servers + local
            variables = {
                "DGL_ROLE": "server", "DGL_SERVER_ID": number,
                "OMP_NUM_THREADS": settings.num_server_threads, VISIBLE_VARIABLE: hidden,
            }  # fmt: skip
            environment = _texts(base, variables, settings.extra_envs)
            servers.append(PlannedProcess(SERVER, number, host.address, command, environment))
        for local in range(settings.num_trainers):
            number = machine * settings.num_trainers + local
            variables = {
                # DGL numbers groups of clients of long-lived servers; a job of this launcher has one.
                "DGL_ROLE": "client", "DGL_DIST_MODE": "distributed", "DGL_GROUP_ID": 0,
                "OMP_NUM_THREADS": num_threads(settings, host),
                "RANK": number, "LOCAL_RANK": local, "GROUP_RANK": machine,
                "WORLD_SIZE": settings.num_trainers * len(hosts), "LOCAL_WORLD_SIZE": settings.num_trainers,
                "MASTER_ADDR": hosts[0].address, "MASTER_PORT": master_port,
                VISIBLE_VARIABLE: host.gpus[local] if settings.device == CUDA_DEVICE else hidden,
            }  # fmt: skip
            environment = _texts(base, variables, settings.extra_envs)
            trainers.append(PlannedProcess(TRAINER, number, host.address, command, environment))
    return servers + trainers


def _texts(*parts: Mapping[str, object]) -> dict[str, str]:
    """Return an environment of several parts, of which the last one counts; None: a variable is not set."""
    return {name: str(value) for part in parts for name, value in part.items() if value is not None}


def common_environment(processes: Sequence[PlannedProcess]) -> dict[str, str]:
    """Return the variables that all processes share, with a trainer's number of threads.

    What is imported before the processes are forked reads them, and the threads when it is loaded.
    """
    environment = dict(set.intersection(*(set(process.environment.items()) for process in processes)))
    for process in processes:
        if process.role == TRAINER:
            environment["OMP_NUM_THREADS"] = process.environment["OMP_NUM_THREADS"]
    return environment


def describe_plan(processes: Sequence[PlannedProcess]) -> str:
    """Return the plan as shell commands with quoted values, for ``--dry_run``."""
    lines = []
    for process in processes:
        variables = [f"{key}={shlex.quote(value)}" for key, value in sorted(process.environment.items())]
        lines.append(f"# {process.name} on {process.address}")
        lines.append(" ".join(["env", *variables, shlex.join(process.command)]))
    return "\n".join(lines)


def plan_to_dict(processes: Sequence[PlannedProcess]) -> list[dict[str, object]]:
    """Return the plan as JSON values, for ``--dry_run --json``."""
    names = ("name", "address", "command", "environment")
    return [{name: getattr(process, name) for name in names} for process in processes]


def num_threads(settings: JobSettings, host: Host) -> int:
    """Return the threads of a trainer on a machine."""
    # Rounded down, so that trainers have no more threads than the machine has cores.
    return settings.num_omp_threads or max(1, host.num_cores // settings.num_trainers)
