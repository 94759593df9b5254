"""Shell completion: the scripts, and what a real bash completes with them."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from dglkge.cli import launch
from dglkge.cli.main import main
from dglkge.config.load import recipe_files

pytest.importorskip("shtab", reason="shtab is not installed: pip install 'dglkge[completion]'")

COMPLETE = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
$(complete -p "$1" | sed -E 's/.* -F ([^ ]+) .*/\\1/')
printf '%s\\n' "${COMPREPLY[@]}"
"""
"""What bash does at a press of Tab: it calls the function that `complete` has registered for the command."""


def script(capsys, command: str, shell: str) -> str:
    if command == "dglkge-launch":
        assert launch.main(["--print_completion", shell]) == 0
    else:
        with pytest.raises(SystemExit) as exit_:
            main(["--print-completion", shell])
        assert exit_.value.code == 0
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
    assert tab("dglkge", "checkpoint", "conv") == ["convert"]
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


def test_another_shell_is_refused(call, capsys):
    with pytest.raises(SystemExit) as exit_:
        call("--print-completion", "fish")
    assert exit_.value.code == 2 and "invalid choice: 'fish' (choose from" in capsys.readouterr().err
