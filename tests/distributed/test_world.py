"""Who a process is, from the variables of the launcher; what all trainers agree on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import pytest

from dglkge.distributed.process_group import agree
from dglkge.distributed.world import World
from dglkge.errors import CheckpointError, InputError, InputErrors, StorageError
from tests.optim.test_exchanges import Threads


def launched(**changes: str) -> dict[str, str]:
    env = {"DGL_DIST_MODE": "distributed", "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
    meeting = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    return {**env, **meeting, "LOCAL_WORLD_SIZE": "2", **changes}


def test_every_rank_of_a_cluster_knows_its_machine() -> None:
    worlds = [World.detect(launched(RANK=str(rank), LOCAL_RANK=str(rank % 2))) for rank in range(4)]
    assert [world.machine for world in worlds] == [0, 0, 1, 1]
    assert [world.is_machine_leader for world in worlds] == [True, False, True, False]
    assert {world.num_machines for world in worlds} == {2}
    assert worlds[3].rendezvous == ("10.0.0.1", 29500) and worlds[3].timeout_seconds == 600
    more = {"DGLKGE_TIMEOUT_SECONDS": "7.5", "DGLKGE_JOB": "a1b2", "DGLKGE_PROGRESS": "1"}
    world = World.detect(launched(**more))
    assert (world.timeout_seconds, world.shows_progress, world.job) == (7.5, True, "a1b2")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RANK": ""}, "the launcher's variable RANK is ''; expected a whole number"),
        ({"WORLD_SIZE": "four"}, "WORLD_SIZE is 'four'"),
        ({"WORLD_SIZE": "5"}, "every machine must run the same number of trainers"),
        ({"RANK": "4"}, "do not fit"),
        ({"LOCAL_RANK": "0"}, "RANK=3 does not fit LOCAL_RANK=0, LOCAL_WORLD_SIZE=2"),
        ({"DGLKGE_TIMEOUT_SECONDS": "soon"}, "DGLKGE_TIMEOUT_SECONDS is 'soon'; expected seconds above 0"),
    ],
)
def test_variables_that_do_not_fit_are_refused(changes: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        World.detect(launched(**changes))


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2: torchrun"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "OMPI_COMM_WORLD_SIZE is 4: mpirun"),
        ({"PMI_SIZE": "3"}, "PMI_SIZE is 3: mpirun"),
        ({"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4"}, "SLURM_STEP_NUM_TASKS is 4: srun"),
        ({"SLURM_NTASKS": "4", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0"}, "SLURM_NTASKS is 4: srun"),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "2"}, "SLURM_NTASKS is 4: srun"),
    ],
)
def test_one_of_several_processes_of_another_launcher_is_refused(variables, named) -> None:
    """Each of them would train alone and write to the same folder."""
    with pytest.raises(InputError, match=rf"^{named}.*start one dglkge-launch --ip_config.*$"):
        World.detect(variables)
    assert World.detect(launched(**variables | {"WORLD_SIZE": "4"})).launched


@pytest.mark.parametrize(
    "variables",
    [
        {"WORLD_SIZE": "1", "OMPI_COMM_WORLD_SIZE": "1", "PMI_SIZE": "1"},
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"},  # a batch script
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967291"},  # SLURM's name for it
        {"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_ID": "0"},  # srun -n1 in a larger job
    ],
)
def test_a_process_that_another_launcher_started_alone_may_train(variables) -> None:
    assert World.detect(variables) == World()


def outcomes(works: list[Callable[[], Any]]) -> list[Any]:
    texts: list[str] = [""] * len(works)
    threads = Threads(len(works))

    def trainer(rank: int) -> Any:
        def gather(text: str) -> list[str]:
            texts[rank] = text
            threads.barrier.wait(30)
            return list(texts)

        try:
            return agree(gather, works[rank])
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(works)) as pool:
        return list(pool.map(trainer, range(len(works))))


@pytest.mark.parametrize("kind", [InputError, CheckpointError, StorageError])
def test_all_raise_the_first_error_of_its_kind(kind: type[Exception]) -> None:
    assert outcomes([lambda: 1, lambda: None, lambda: "c"]) == [1, None, "c"]
    errors = outcomes([lambda: 1, Mock(side_effect=kind("no room")), Mock(side_effect=InputError("later"))])
    assert [(type(error), str(error)) for error in errors] == [(kind, "rank 1: no room")] * 3


def test_errors_of_rank_0_and_bugs() -> None:
    """Rank 0 is not named; a kind without constructor is its base; a bug is not sent to others."""
    errors = outcomes([Mock(side_effect=InputErrors(["a", "b"])), lambda: 1])
    assert [(type(error), str(error)) for error in errors] == [(InputError, "a; b")] * 2
    with pytest.raises(ZeroDivisionError):
        agree(lambda text: pytest.fail("sent"), Mock(side_effect=ZeroDivisionError))
