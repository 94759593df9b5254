"""The benchmark of the evaluation runs and writes figures that belong together."""

from __future__ import annotations

import json
import runpy
import sys

import pytest

from tests.toy_kg import REPOSITORY

SCRIPT = REPOSITORY / "benchmarks" / "evaluation.py"


@pytest.mark.parametrize(
    "score_function, reciprocal", [("complex", "--reciprocal"), ("transe_l2", "--no-reciprocal")]
)
def test_figures_belong_together(score_function, reciprocal, monkeypatch, tmp_path, capsys):
    script, output = runpy.run_path(str(SCRIPT)), tmp_path / "figures.json"
    script["main"].__globals__["PRODUCT_SECONDS"] = 0.01
    sizes = "--num-entities 300 --num-triples 50 --num-relations 4 --dim 8 --num-threads 1 --markdown".split()
    arguments = [*sizes, "--score-function", score_function, reciprocal, "--output", str(output)]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
    script["main"]()
    figures, shown = json.loads(output.read_text()), capsys.readouterr().out
    assert figures["score_function"] == score_function and figures["num_threads"] == 1
    assert figures["num_queries"] == 100
    assert figures["scores_per_second"] == pytest.approx(300 * figures["queries_per_second"], rel=0.02)
    assert figures["mrr"] == pytest.approx(figures["plain_loop_mrr"], abs=1e-5)
    assert figures["times_faster_than_plain_loop"] > 0
    assert f"| {figures['graph']} | {score_function} | 8 | 1 | 100 |" in shown
    for name, value in figures.items():
        assert f"{name:24} {value}" in shown
