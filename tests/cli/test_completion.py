"""Shell completion with a real bash, and ``dglkge-engine``: what it would run for each Python."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import pytest

from dglkge.cli import engine, launch
from dglkge.cli.main import main
from dglkge.config.load import recipe_files

COMPLETE = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
$(complete -p "$1" | sed -E 's/.* -F ([^ ]+) .*/\\1/')
printf '%s\\n' "${COMPREPLY[@]}"
"""
"""What bash does at a press of Tab: it calls the function that `complete` has registered for the command."""


def script(capsys, command: str, shell: str) -> str:
    pytest.importorskip("shtab", reason="shtab is not installed: pip install 'dglkge[completion]'")
    if command == "dglkge-launch":
        assert launch.main(["--print_completion", shell]) == 0
    else:
        with pytest.raises(SystemExit, match="0"):
            main(["--print-completion", shell])
    return capsys.readouterr().out


def test_bash_completes(capsys, tmp_path):
    if shutil.which("bash") is None:
        pytest.skip("there is no bash here")
    for name in ("dglkge", "dglkge-launch"):
        (tmp_path / name).write_text(script(capsys, name, "bash"))
    (tmp_path / "here" / "runs").mkdir(parents=True)
    (tmp_path / "here" / "rules.yaml").touch()

    def tab(*words: str) -> list[str]:
        command = ["bash", "-c", COMPLETE, "bash", str(tmp_path / words[0]), *words]
        return sorted(subprocess.check_output(command, cwd=tmp_path / "here", text=True, timeout=60).split())

    assert tab("dglkge", "ev") == ["evaluate"]
    assert tab("dglkge", "predict", "--pro") == ["--probability"]
    assert tab("dglkge", "predict", "--known", "") == ["drop", "keep", "mark"]
    assert tab("dglkge", "predict", "ru") == ["runs"]  # a folder, not a file
    assert tab("dglkge", "train", "ru") == tab("dglkge-launch", "ru") == ["rules.yaml", "runs"]
    for words in (("config", "recipes"), ("train", "--recipe")):
        recipes = sorted(name for name in recipe_files() if name.startswith("fb15k237/complex"))
        assert tab("dglkge", *words, "fb15k237/complex") == recipes
    assert tab("dglkge", "checkpoint", "convert", "runs", "--from", "np") == ["npy"]
    assert tab("dglkge", "predict", "--head", "") == []  # a name of the user's data
    assert tab("dglkge-launch", "--num_t") == ["--num_trainers"]
    assert tab("dglkge-launch", "--ip_config", "rul") == ["rules.yaml"]


@pytest.mark.parametrize("command", ["dglkge", "dglkge-launch"])
@pytest.mark.parametrize("shell, begins", [("zsh", "#compdef"), ("tcsh", "#")])
def test_other_shells_have_a_script(capsys, command, shell, begins):
    text = script(capsys, command, shell)
    assert text.startswith(begins) and re.search("num.trainers", text)
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=text, text=True, check=True, timeout=60)


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
    subprocess.run([*tags[:-1], str(path)], check=True, timeout=60)
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
