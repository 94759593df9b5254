"""``dglkge-engine``: what it would run for each Python, and what it says."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dglkge.cli import engine

PIP = [sys.executable, "-m", "pip"]


def test_pip_takes_a_wheel_of_dgl_or_gives_the_newest_another_name():
    for version in ((3, 10), (3, 12)):
        assert engine.plan(version, ["-q"], "/f") == [[*PIP, "install", "-q", "dgl==2.1.0"]]
    for version in ((3, 13), (4, 0)):
        download, tags, install = engine.plan(version, ["-q"], "/f")
        assert download[:5] == [*PIP, "download", "-q"] and download[-1] == "dgl==2.1.0"
        assert {"--no-deps", "--only-binary=:all:", "3.12", "cp312"} <= set(download)
        assert tags[1:4] == ["-m", "wheel", "tags"] and tags[-1] == "/f/*.whl"
        assert install == [*PIP, "install", "-q", "/f/*.whl"]


def test_the_name_fits_every_python(tmp_path):
    wheelfile = pytest.importorskip("wheel.wheelfile")
    path = tmp_path / "toy-1.0-cp312-cp312-manylinux1_x86_64.whl"
    with wheelfile.WheelFile(path, "w") as archive:
        archive.writestr("toy-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
        text = "Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: cp312-cp312-manylinux1_x86_64\n"
        archive.writestr("toy-1.0.dist-info/WHEEL", text)
    _, tags, _ = engine.plan((3, 13), [], str(tmp_path))
    words = [*tags[:-1], str(path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["toy-1.0-py3-none-manylinux1_x86_64.whl"]


def test_nothing_is_done_where_dgl_works(capsys):
    pytest.importorskip("dgl")
    assert engine.main([]) == 0
    assert capsys.readouterr().out.startswith("dgl 2.1.0 works with torch ")


def test_a_dry_run_prints_and_installs_nothing(monkeypatch, capsys):
    monkeypatch.setattr(engine, "works", lambda: "")
    monkeypatch.setattr(sys, "version_info", (3, 13))
    monkeypatch.setattr(engine.subprocess, "run", None)
    assert engine.main(["--dry-run", "--pip_flags=--no-index"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and " pip download --no-index " in lines[0] and " wheel tags " in lines[1]


def test_other_machines_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(engine.platform, "machine", lambda: "sparc")
    assert engine.main([]) == 2
    words = "dgl 2.1.0 has wheels for linux on x86_64 and aarch64; this is linux on sparc"
    assert capsys.readouterr().err == f"dglkge-engine: error: {words}\n"
