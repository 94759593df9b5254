"""Dense parameters in slices: torch's optimizers over whole parameters as the oracle; refusals."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from dglkge.config import load_config
from dglkge.config.schema import DenseConfig
from dglkge.distributed.world import World
from dglkge.errors import InputError
from dglkge.training.building.checks import check_config
from dglkge.training.building.components import known_optimizers, works_by_number
from tests import warm
from tests.functional.job import environment
from tests.surroundings import free_ports
from tests.toy_kg import toy_dataset
from tests.training.shards import NEEDS_SLICES

SIZE = 3


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


def refusal(folder: Path, *settings: str) -> str:
    """Return the error of a configuration."""
    chosen = [f"dataset={toy_dataset()}", f"output={folder}", "dense.sharding=fsdp", *settings]
    with pytest.raises(InputError) as caught:
        check_config(load_config(None, chosen), World())
    return str(caught.value)


@NEEDS_SLICES
@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_an_optimizer_that_needs_whole_parameters_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path, "model.score_function=tucker", "dense.optimizer=Muon") == (
        "dense.optimizer is Muon and dense.sharding is fsdp, which gives each trainer a slice of a "
        "parameter: this optimizer's step depends on the whole; allowed: optimizers that work number by "
        "number, e.g. Adam, or dense.sharding replicated"
    )


def test_refused_settings(tmp_path: Path) -> None:
    words = "dense.sharding is fsdp and model.score_function is complex, which has no dense parameters"
    assert words in refusal(tmp_path)
    with pytest.raises(InputError, match="dense.sharding is 'ddp'; allowed: one of replicated, fsdp"):
        load_config(None, [f"dataset={toy_dataset()}", "dense.sharding=ddp"])


def test_a_torch_without_slices_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch 2.6 is."""
    monkeypatch.delattr(torch.cpu.Stream, "record_event", raising=False)
    assert refusal(tmp_path, "model.score_function=tucker") == (
        f"dense.sharding is fsdp, and torch {torch.__version__} has no FSDP2 on processors; allowed: "
        "replicated, or a newer torch (2.13 is tested)"
    )
