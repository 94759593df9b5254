"""The benchmark of checkpoints runs, and its figures belong together."""

from __future__ import annotations

import json
import runpy
import sys

import pytest

from tests.toy_kg import REPOSITORY

SCRIPT = REPOSITORY / "benchmarks" / "checkpoint.py"


def test_figures_belong_together(monkeypatch, tmp_path, capsys):
    output = tmp_path / "figures.json"
    arguments = ["--folder", tmp_path, "--num-rows", "3000", "--dim", "8", "--num-repeats", "1"]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, arguments), "--output", str(output)])
    runpy.run_path(str(SCRIPT))["main"]()
    figures, shown = json.loads(output.read_text()), capsys.readouterr().out
    assert figures["table_megabytes"] == figures["copy_megabytes"] == 0.2
    for operation, plain in (
        ("background_write", "plain_write"),
        ("waiting_write", "plain_write"),
        ("checkpoint_read", "plain_read"),
    ):
        ratio = figures[f"{operation}_megabytes_per_second"] / figures[f"{plain}_megabytes_per_second"]
        name = f"{operation.replace('checkpoint_', '')}_share_of_plain"
        assert figures[name] == pytest.approx(ratio, rel=0.05, abs=0.002)
    assert 0 < figures["stall_share_of_write"] <= 1
    for name, value in figures.items():
        assert f"{name:46} {value}" in shown
    assert list(tmp_path.iterdir()) == [output]  # nothing is left on the disk
