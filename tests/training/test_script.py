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


def small_machine(monkeypatch: pytest.MonkeyPatch, shared_bytes: int) -> None:
    monkeypatch.setattr(checks, "host_memory", lambda output, job: HostMemory(2**40, shared_bytes, 2**40))


def test_too_little_shared_memory(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    small_machine(monkeypatch, 2**20)
    with caplog.at_level(logging.ERROR), pytest.raises(InputError) as refused:
        check_dataset(config(), Dataset.open(toy_dataset()), LEADER)
    assert "does not fit into machine 0" in str(refused.value)
    assert "1.0 MiB are there" in str(refused.value)
    assert "training.check_memory=false" in str(refused.value)
    assert "optimizer state" in caplog.text


@pytest.mark.parametrize(
    ("shared_bytes", "world", "more"),
    [
        pytest.param(2**30, LEADER, (), id="enough"),
        pytest.param(2**20, World(1, 2, 1, 2, launched=True), (), id="only the leader speaks"),
        pytest.param(2**20, LEADER, ("training.check_memory=false",), id="overruled"),
        pytest.param(0, World(), (), id="a process alone needs none"),
    ],
)
def test_runs_that_are_taken(shared_bytes, world, more, monkeypatch):
    small_machine(monkeypatch, shared_bytes)
    check_dataset(config(*more), Dataset.open(toy_dataset()), world)


def test_files_of_a_process_alone_need_no_memory_but_room(monkeypatch, tmp_path):
    size = Dataset.open(toy_dataset()).size()
    planned = plan_memory(config("tables.storage=disk"), size, 1, 0)[0]
    enough = planned.needed_bytes(in_files=True) - planned.base_bytes
    monkeypatch.setattr(checks, "host_memory", lambda output, job: HostMemory(enough, 0, 2**40))
    with pytest.raises(InputError, match="of memory are needed"):
        check_dataset(config("checkpoint.background=false"), Dataset.open(toy_dataset()), World())
    in_files = config("tables.storage=disk", f"tables.folder={tmp_path}")
    check_dataset(in_files, Dataset.open(toy_dataset()), World())
    monkeypatch.setattr(table_storage, "free_bytes", lambda folder: planned.file_bytes)
    with pytest.raises(InputError, match=f"files take 0.00 GB, and none of {tmp_path} has that room"):
        with script.join_cluster(in_files):
            pass


def test_joining_refuses_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "host_memory", lambda output, job: HostMemory(2**20, 2**40, 2**40))
    with pytest.raises(InputError, match="of memory are needed"), script.join_cluster(config()):
        pass
