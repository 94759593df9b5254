"""Ranks, counts and first hosts from the variables of schedulers."""

from __future__ import annotations

import pytest

from dglkge.errors import InputError
from dglkge.launch.scheduler import SchedulerPlace, first_host, scheduler_place

SRUN = {
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_NNODES": "4",
    "SLURM_JOB_NODELIST": "cn[07-10]",
}
TORCHRUN = {
    "GROUP_RANK": "2",
    "RANK": "2",
    "LOCAL_RANK": "0",
    "GROUP_WORLD_SIZE": "3",
    "MASTER_ADDR": "10.0.0.1",
}
MPIRUN = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        (SRUN, SchedulerPlace(1, 4, "cn07")),
        # srun --nodes=2 in a job of four: the step's nodes count
        (
            {**SRUN, "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "cn09,cn10"},
            SchedulerPlace(1, 2, "cn09"),
        ),
        ({"JOB_COMPLETION_INDEX": "3", "HOSTNAME": "kge-workers-0-3"}, SchedulerPlace(3)),
        (TORCHRUN, SchedulerPlace(2, 3, "10.0.0.1")),
        (MPIRUN, SchedulerPlace(0, 2)),
        ({**SRUN, **TORCHRUN}, SchedulerPlace(2, 3, "10.0.0.1")),
        ({**SRUN, **MPIRUN}, SchedulerPlace(0, 2)),
    ],
)
def test_place(environment: dict[str, str], place: SchedulerPlace) -> None:
    assert scheduler_place({"PATH": "/bin", **environment}) == place


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            {},
            r"no scheduler has set this node's rank; expected one of SLURM_NODEID \(SLURM\), JOB_COMPLETION",
        ),
        (
            {**SRUN, "SLURM_LOCALID": "1"},
            "SLURM_LOCALID is 1: SLURM has started several processes .*tasks-per",
        ),
        ({**TORCHRUN, "LOCAL_RANK": "1"}, "torchrun --nproc-per-node=1"),
        ({**SRUN, "SLURM_NODEID": "x"}, "the variable SLURM_NODEID is 'x'; expected a whole number"),
        (
            {**SRUN, "SLURM_NNODES": "0"},
            "the variable SLURM_NNODES is '0'; expected a whole number of at least",
        ),
        (
            {**SRUN, "SLURM_STEP_ID": ""},
            "on one of 4 nodes only; .* with srun --ntasks-per-node=1",
        ),
        ({**SRUN, "SLURM_NODEID": "4"}, "SLURM_NODEID is 4 and SLURM_NNODES is 4; ranks count from 0"),
    ],
)
def test_what_makes_no_sense(environment: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        scheduler_place(environment)


@pytest.mark.parametrize(
    ("node_list", "host"),
    [
        ("cn1", "cn1"),
        ("cn1,cn2", "cn1"),
        ("cn[1-3]", "cn1"),
        ("cn[007,009-012]", "cn007"),
        ("gpu-a[01-02],cn[1-3]", "gpu-a01"),
        ("rack[1-2]n[3,5].site", "rack1n3.site"),
        ("10.0.0.7", "10.0.0.7"),
    ],
)
def test_first_host_of_a_list_of_slurm(node_list: str, host: str) -> None:
    assert first_host(node_list) == host
