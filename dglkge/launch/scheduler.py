"""Place of this process among the nodes of a job, from the environment of a scheduler. A pure function.

======================== ============================= ========================= ======================
started by               rank                          number of nodes           first host
======================== ============================= ========================= ======================
Open MPI's ``mpirun``    ``OMPI_COMM_WORLD_RANK``      ``OMPI_COMM_WORLD_SIZE``
torchrun                 ``GROUP_RANK``                ``GROUP_WORLD_SIZE``      ``MASTER_ADDR``
Kubernetes, indexed job  ``JOB_COMPLETION_INDEX``
SLURM's ``srun``         ``SLURM_NODEID``              ``SLURM_STEP_NUM_NODES``, ``SLURM_STEP_NODELIST``,
                                                       ``SLURM_NNODES``          ``SLURM_JOB_NODELIST``
======================== ============================= ========================= ======================

The first line whose rank is set counts: ``mpirun`` and torchrun may run inside a job of SLURM.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from dglkge.errors import InputError


@dataclass(frozen=True)
class SchedulerPlace:
    """Place of this process as the scheduler gives it.

    Attributes
    ----------
    rank : int
        Of the node, from 0.
    num_nodes : int or None
        None if the scheduler does not give it.
    first_host : str or None
        Name or address of node 0; None if the scheduler does not give it.
    """

    rank: int
    num_nodes: int | None = None
    first_host: str | None = None


@dataclass(frozen=True)
class _Scheduler:
    """Variables of one scheduler; the first that is set counts. `step` is set if all nodes were started."""

    name: str
    rank: str
    step: str | None = None
    local_rank: str | None = None
    num_nodes: tuple[str, ...] = ()
    first_host: tuple[str, ...] = ()
    remedy: str = ""


SCHEDULERS = (
    _Scheduler(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        None,
        "OMPI_COMM_WORLD_LOCAL_RANK",
        ("OMPI_COMM_WORLD_SIZE",),
        remedy="mpirun --map-by ppr:1:node",
    ),
    _Scheduler(
        "torchrun",
        "GROUP_RANK",
        None,
        "LOCAL_RANK",
        ("GROUP_WORLD_SIZE",),
        ("MASTER_ADDR",),
        remedy="torchrun --nproc-per-node=1",
    ),
    _Scheduler("Kubernetes", "JOB_COMPLETION_INDEX"),
    _Scheduler(
        "SLURM",
        "SLURM_NODEID",
        "SLURM_STEP_ID",  # absent in the script of sbatch, which runs on the first node only
        "SLURM_LOCALID",
        ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
        ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"),
        remedy="srun --ntasks-per-node=1",
    ),
)


def scheduler_place(environment: Mapping[str, str]) -> SchedulerPlace:
    """Return this process's place from the environment of a scheduler.

    Parameters
    ----------
    environment : mapping of str to str

    Raises
    ------
    InputError
        If no scheduler has set its variables, one is no number, several processes run on one node, or this is
        the script of a batch job.

    Examples
    --------
    >>> step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "cn[07-08]"}
    >>> scheduler_place({"SLURM_NODEID": "1", **step})
    SchedulerPlace(rank=1, num_nodes=2, first_host='cn07')
    """
    for scheduler in SCHEDULERS:
        if not environment.get(scheduler.rank):
            continue
        local = scheduler.local_rank
        if local is not None and environment.get(local, "0") != "0":
            raise InputError(
                f"{local} is {environment[local]}: {scheduler.name} has started several processes on this "
                f"node; dglkge-launch starts the node's trainers itself, one process a node is enough "
                f"({scheduler.remedy})"
            )
        rank = _number(environment, scheduler.rank, 0)
        counts = [name for name in scheduler.num_nodes if environment.get(name)]
        hosts = [environment[name] for name in scheduler.first_host if environment.get(name)]
        num_nodes = _number(environment, counts[0], 1) if counts else None
        if num_nodes is not None and rank >= num_nodes:
            raise InputError(f"{scheduler.rank} is {rank} and {counts[0]} is {num_nodes}; ranks count from 0")
        if scheduler.step is not None and not environment.get(scheduler.step) and (num_nodes or 1) > 1:
            raise InputError(
                f"{scheduler.name} has started this process on one of {num_nodes} nodes only; start "
                f"dglkge-launch on each of them with {scheduler.remedy}"
            )
        return SchedulerPlace(rank, num_nodes, first_host(hosts[0]) if hosts else None)
    names = ", ".join(f"{scheduler.rank} ({scheduler.name})" for scheduler in reversed(SCHEDULERS))
    raise InputError(
        f"--node_rank auto: no scheduler has set this node's rank; expected one of {names}; or give a number"
    )


def first_host(node_list: str) -> str:
    """Return the first host of a list in SLURM's form.

    Examples
    --------
    >>> first_host("cn[07-09,12],gpu1"), first_host("a1,b2"), first_host("r[1-2]n[3,5]")
    ('cn07', 'a1', 'r1n3')
    """
    # Commas in brackets separate numbers, others hosts. A number may have leading zeros, which are kept.
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", node_list)
    host = first.group(0) if first is not None else node_list
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", host)


def _number(environment: Mapping[str, str], name: str, lowest: int) -> int:
    """Read a variable as a whole number."""
    text = environment[name].strip()
    if not (text.isascii() and text.isdigit() and len(text) < 7 and int(text) >= lowest):
        raise InputError(f"the variable {name} is {text!r}; expected a whole number of at least {lowest}")
    return int(text)
