"""Dense parameters in slices: torch's optimizers over whole parameters as the oracle; refusals."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from dglkge.config.schema import DenseConfig
from dglkge.training.building.components import (
    has_slices_on_processors,
    known_optimizers,
    works_by_number,
)
from tests import warm
from tests.functional.job import environment
from tests.surroundings import free_ports

SIZE = 3
NEEDS_SLICES = pytest.mark.skipif(
    not has_slices_on_processors(), reason="this torch has no FSDP2 on processors"
)


@NEEDS_SLICES
def test_slices_are_summed_updated_joined_and_read(tmp_path: Path) -> None:
    """The checks are in shard_ranks.py, on each of three processes."""
    port = str(free_ports())
    script = str(Path(__file__).with_name("shard_ranks.py"))
    ranks = [
        subprocess.Popen(
            [*warm.python(), script, str(rank), str(SIZE), port, str(tmp_path)],
            env=environment(),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(SIZE)
    ]
    try:
        errors = [one.communicate(timeout=120)[1] for one in ranks]
    finally:
        for one in ranks:
            one.kill()
            one.wait()
    assert [one.returncode for one in ranks] == [0] * SIZE, "\n".join(errors)


def test_optimizers_that_need_whole_parameters_are_found() -> None:
    found = {name for name in known_optimizers() if not works_by_number(DenseConfig(optimizer=name, lr=0.1))}
    assert found == {"Adafactor", "Muon"} & set(known_optimizers())
