"""Joining and leaving alone: what a training leaves in its process, and what it does not touch."""

from __future__ import annotations

import logging

import pytest
import torch.distributed as dist

from dglkge.data.dataset import Dataset
from dglkge.distributed.dgl_compat import dgl
from dglkge.distributed.runtime import join_cluster
from dglkge.errors import InputError
from tests.toy_kg import toy_dataset


def join():
    dataset = Dataset.open(toy_dataset())
    return join_cluster(dataset.graph_name, str(dataset.graph_config_path), dataset.num_parts)


def test_nothing_of_dgl_is_left() -> None:
    for _ in range(2):
        with join() as cluster:
            assert cluster.graph.num_nodes("entity") == 60
            assert dgl.distributed.kvstore.get_kvstore() is not None
        assert dgl.distributed.kvstore.get_kvstore() is None
        assert dgl.distributed.role.get_role() is None


def test_a_graph_that_cannot_be_opened_is_no_membership(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(dgl.distributed, "DistGraph", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError), join():
            pass
    with join() as cluster:
        assert cluster.graph.num_nodes("entity") == 60


def test_refusing_a_second_one_leaves_the_first_alone() -> None:
    with join() as first:
        with pytest.raises(InputError, match="^this process cannot join a second training"):
            with join():
                pass
        assert dgl.distributed.kvstore.get_kvstore() is first.graph._client


def test_what_runs_in_the_background_is_finished_after_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    """One that cannot be finished does not hide the failure."""
    finished = []
    with caplog.at_level(logging.ERROR), pytest.raises(ValueError, match="asked to fail"), join() as cluster:
        cluster.on_leave(lambda: finished.append("left"))
        cluster.on_exit(lambda: finished.append("ended"))
        cluster.on_exit(lambda: 1 / 0)
        raise ValueError("asked to fail")
    assert finished == ["ended"] and caplog.messages == ["division by zero"]


def test_a_process_group_of_the_user_stays() -> None:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with join():
            pass
        assert dist.is_initialized()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
