"""Who this process is among the processes of a job."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from dglkge.errors import InputError

DEFAULT_LIMIT_SECONDS = 600.0
LIMIT_VARIABLE = "DGLKGE_TIMEOUT_SECONDS"


@dataclass(frozen=True)
class World:
    """The place of one trainer in its job; every other position is derived from it.

    Attributes
    ----------
    rank : int
        Place among all trainers; ``machine * trainers_per_machine + local_rank``.
    world_size : int
        Number of trainers of the job.
    local_rank : int
        Place among the trainers of this machine.
    trainers_per_machine : int
        Number of trainers on each machine.
    launched : bool
        Whether ``dglkge-launch`` (or DGL's launcher) started this process. Without it the process
        trains alone, in DGL's standalone mode.
    is_watched : bool
        Whether the launcher shows the output to a person on a terminal.
    has_own_disk : bool
        Whether the machines of the job share no disk.
    rendezvous : tuple of (str, int)
        Address and port where the trainers find each other.
    limit_seconds : float
        No trainer waits longer than this for another one or for a server; it then fails, and the launcher
        ends the job. The user sets it as ``DGLKGE_TIMEOUT_SECONDS``.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    trainers_per_machine: int = 1
    launched: bool = False
    is_watched: bool = False
    has_own_disk: bool = False
    rendezvous: tuple[str, int] = ("127.0.0.1", 0)
    limit_seconds: float = DEFAULT_LIMIT_SECONDS

    @property
    def machine(self) -> int:
        """Number of this machine; also the number of the partition that it holds."""
        return self.rank // self.trainers_per_machine

    @property
    def num_machines(self) -> int:
        """Number of machines of the job."""
        return self.world_size // self.trainers_per_machine

    @property
    def is_machine_leader(self) -> bool:
        """Whether this trainer does what must be done once on each machine."""
        return self.local_rank == 0

    @classmethod
    def detect(cls, environment: Mapping[str, str] | None = None) -> World:
        """Read the variables that the launcher sets.

        Parameters
        ----------
        environment : mapping of str to str, optional
            Instead of ``os.environ``, so that tests build any cluster by hand.

        Returns
        -------
        World

        Raises
        ------
        InputError
            If the process was launched but a variable is missing, no number, or does not fit the others.
        """
        env = os.environ if environment is None else environment
        if env.get("DGL_DIST_MODE", "standalone") != "distributed":
            return cls()
        rank, world_size = _number(env, "RANK"), _number(env, "WORLD_SIZE")
        local_rank, per_machine = _number(env, "LOCAL_RANK"), _number(env, "LOCAL_WORLD_SIZE")
        if per_machine < 1 or world_size % per_machine or not 0 <= rank < world_size:
            raise InputError(
                f"RANK={rank}, WORLD_SIZE={world_size}, LOCAL_WORLD_SIZE={per_machine} do not fit: "
                "every machine must run the same number of trainers"
            )
        if rank % per_machine != local_rank:
            raise InputError(
                f"RANK={rank} does not fit LOCAL_RANK={local_rank}, LOCAL_WORLD_SIZE={per_machine}"
            )
        return cls(
            rank,
            world_size,
            local_rank,
            per_machine,
            launched=True,
            is_watched=env.get("DGLKGE_PROGRESS") == "1",
            has_own_disk=env.get("DGLKGE_OWN_DISKS") == "1",
            rendezvous=(env.get("MASTER_ADDR", "127.0.0.1"), _number(env, "MASTER_PORT")),
            limit_seconds=_seconds(env.get(LIMIT_VARIABLE, str(DEFAULT_LIMIT_SECONDS))),
        )


def choose_dgl_backend() -> None:
    """Tell DGL to use torch; it asks at its import, and without an answer writes one into the user's home."""
    os.environ.setdefault("DGLBACKEND", "pytorch")


def _number(environment: Mapping[str, str], name: str) -> int:
    """Read one variable as a whole number."""
    text = environment.get(name, "")
    if not text.isdigit():
        raise InputError(f"the launcher's variable {name} is {text!r}; expected a whole number")
    return int(text)


def _seconds(text: str) -> float:
    """Read the limit of waiting."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 86400:
        raise InputError(f"{LIMIT_VARIABLE} is {text!r}; expected seconds above 0 and up to 86400")
    return seconds
