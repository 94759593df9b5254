"""What does not fit is refused before DGL is asked for anything."""

from __future__ import annotations

import logging

import pytest

from dglkge.config import Config, load_config
from dglkge.data.dataset import Dataset
from dglkge.distributed.world import World
from dglkge.errors import InputError
from dglkge.launch import table_storage
from dglkge.planning.host import HostMemory
from dglkge.planning.memory import plan_memory
from dglkge.training import script
from dglkge.training.building import checks
from dglkge.training.building.checks import check_dataset
from tests.toy_kg import toy_dataset

LEADER = World(0, 2, 0, 2, launched=True)


def config(*settings: str) -> Config:
    return load_config(None, [f"dataset={toy_dataset()}", "model.dimension=4096", *settings])


def small_machine(monkeypatch: pytest.MonkeyPatch, memory: int = 2**40, shared_memory: int = 2**40) -> None:
    monkeypatch.setattr(checks, "host_memory", lambda output, job: HostMemory(memory, shared_memory, 2**40))


def test_too_little_memory(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    small_machine(monkeypatch, shared_memory=2**20)
    with caplog.at_level(logging.ERROR), pytest.raises(InputError) as refused:
        check_dataset(config(), Dataset.open(toy_dataset()), LEADER)
    for words in ("not fit into machine 0", "1.0 MiB are there", "training.check_memory=false"):
        assert words in str(refused.value)
    assert "optimizer state" in caplog.text
    small_machine(monkeypatch, memory=2**20)
    with pytest.raises(InputError, match="of memory are needed"), script.join_cluster(config()):
        pass


@pytest.mark.parametrize(
    ("shared_memory", "world", "more"),
    [
        pytest.param(2**30, LEADER, (), id="enough"),
        pytest.param(2**20, World(1, 2, 1, 2, launched=True), (), id="only the leader speaks"),
        pytest.param(2**20, LEADER, ("training.check_memory=false",), id="overruled"),
        pytest.param(0, World(), (), id="a process alone needs none"),
    ],
)
def test_runs_that_are_taken(shared_memory, world, more, monkeypatch):
    small_machine(monkeypatch, shared_memory=shared_memory)
    check_dataset(config(*more), Dataset.open(toy_dataset()), world)


def test_files_of_a_process_alone_need_no_memory_but_room(monkeypatch, tmp_path):
    dataset = Dataset.open(toy_dataset())
    (planned,) = plan_memory(config("tables.storage=disk"), dataset.size(), 1, 0)
    small_machine(monkeypatch, planned.needed_bytes(in_files=True) - planned.base_bytes, 0)
    with pytest.raises(InputError, match="of memory are needed"):
        check_dataset(config("checkpoint.background=false"), dataset, World())
    in_files = config("tables.storage=disk", f"tables.folder={tmp_path}")
    check_dataset(in_files, dataset, World())
    monkeypatch.setattr(table_storage, "free_bytes", lambda folder: planned.file_bytes)
    room = f"files take 0.00 GB, and none of {tmp_path} has that room"
    with pytest.raises(InputError, match=room), script.join_cluster(in_files):
        pass
