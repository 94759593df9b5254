"""The benchmark of the evaluation runs and writes figures that belong together."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "evaluation.py"


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """Run the script's main with some arguments; return its figures and what it printed."""

    def run_script(*arguments: str):
        script = runpy.run_path(str(SCRIPT))
        script["main"].__globals__["PRODUCT_SECONDS"] = 0.01
        output = tmp_path / "figures.json"
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments, "--output", str(output)])
        before = torch.get_num_threads()
        try:
            script["main"]()
        finally:
            torch.set_num_threads(before)
        return json.loads(output.read_text()), capsys.readouterr().out

    return run_script


@pytest.mark.parametrize(
    "score_function, reciprocal", [("complex", "--reciprocal"), ("transe_l2", "--no-reciprocal")]
)
def test_figures_belong_together(run, score_function, reciprocal):
    figures, shown = run(
        *("--num-entities", "300", "--num-triples", "50", "--num-relations", "4"),
        *("--dim", "8", "--score-function", score_function, reciprocal, "--num-threads", "1", "--markdown"),
    )
    assert figures["score_function"] == score_function and figures["num_threads"] == 1
    assert figures["num_queries"] == 100
    assert figures["scores_per_second"] == pytest.approx(300 * figures["queries_per_second"], rel=0.02)
    assert figures["mrr"] == pytest.approx(figures["plain_loop_mrr"], abs=1e-5)
    assert figures["times_faster_than_plain_loop"] > 0
    assert f"| {figures['graph']} | {score_function} | 8 | 1 | 100 |" in shown
    for name, value in figures.items():
        assert f"{name:24} {value}" in shown
