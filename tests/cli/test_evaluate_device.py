"""``dglkge evaluate --device``: the same ranks on a device, and an error where it is missing."""

from __future__ import annotations

import json

import pytest
import torch


@pytest.mark.parametrize("candidates", ["all", "5"])
def test_ranks_are_those_of_the_cpu(call, run, candidates: str) -> None:
    reports = []
    for device in ("cpu", "cpu_staged"):
        words = ("--candidates", candidates, "--json", "--device", device)
        status, out, err = call("evaluate", run, *words)
        assert status == 0, err
        reports.append(json.loads(out))
    assert reports[0] == reports[1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cuda_without_a_gpu_is_status_2(call, run) -> None:
    status, out, err = call("evaluate", run, "--device", "cuda")
    assert (status, out) == (2, "")
    assert err.startswith("dglkge: error: --device is cuda and torch ")
    assert err.endswith("; allowed here: cpu, auto or cpu_staged\n") and err.count("\n") == 1
