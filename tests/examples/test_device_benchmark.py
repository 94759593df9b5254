"""The benchmark of devices: its cases are configurations, its report has every figure."""

from __future__ import annotations

import subprocess
import sys

from dglkge.config import load_config
from dglkge.training.building.checks import check_config
from tests.toy_kg import REPOSITORY


def test_cases_can_be_trained(benchmark_module):
    device = benchmark_module("device")
    args = device.build_parser().parse_args([])
    for settings, _ in device.cases(args).values():
        check_config(load_config(None, ["dataset=x", "training.profile=true", *settings]))
    found = [load_config(None, ["dataset=x", *sets]) for sets, _ in device.cases(args).values()]
    objectives = [config.training.objective.name for config in found]
    assert objectives == ["negative_sampling", "negative_sampling", "one_vs_all"]
    args = device.build_parser().parse_args(["--compile"])
    compiled = [load_config(None, ["dataset=x", *sets]) for sets, _ in device.cases(args).values()]
    assert [config.training.compile for config in compiled] == [False, False, True, True, False]


def test_report_has_training_and_ranking(benchmark_module):
    trained = {"edges_per_second": 1e6, "first_edges_per_second": 5e5, "wall_seconds": 2.0}
    trained["phase_seconds"] = {"score": 0.001}
    found = {"case": {"cpu": trained}, "ranking": {"cpu": {"seconds": 3.0, "mrr": 0.25}}}
    text = benchmark_module("device").report(found)
    assert "| case | cpu | 1,000,000 | 500,000 | 2.0 |" in text
    assert "| ranking, MRR 0.2500 | cpu | | | 3.0 |" in text
    assert "1.00" in text


def test_unknown_device_is_status_2():
    path = REPOSITORY / "benchmarks" / "device.py"
    done = subprocess.run([sys.executable, str(path), "--device", "gpu"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "device.py: 'gpu' is no device; known: auto, cpu, cuda, cpu_staged\n"
