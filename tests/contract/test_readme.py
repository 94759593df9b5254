"""The commands in README, docs/ and the demo exist: make targets, scripts, subcommands and every option."""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from dglkge.cli.main import GROUPS
from dglkge.launch.remote.connection import FORWARDED_VARIABLES
from tests import warm
from tests.contract.source_tree import ROOT

README = ROOT / "README.md"
BESIDE = [
    ROOT / name
    for name in (".github/CONTRIBUTING.md", "SECURITY.md", "examples/README.md", "benchmarks/README.md")
]
PAGES = sorted((ROOT / "docs").glob("*.md"))
DOCUMENTS = (README, *BESIDE, *PAGES)
DEMO = ROOT / "benchmarks" / "demo.sh"
PROGRAMS = ("make", "python", "dglkge", "dglkge-launch")
MODULES = {"dglkge": "dglkge.cli.main", "dglkge-launch": "dglkge.cli.launch"}
MADE_LATER = ("demo/", "runs/", "datasets/", "data/", "my")
"""Beginnings of paths that a reader has only after an earlier command."""


def commands(text: str) -> list[list[str]]:
    """The commands in a Markdown text's code, as words; continued lines are one command."""
    fence = r"^```[a-z]*\n(.*?)^```"
    blocks = re.findall(fence, text, re.MULTILINE | re.DOTALL)
    text = re.sub(fence, "", text, flags=re.MULTILINE | re.DOTALL)
    blocks += re.findall(r"(?:^ {4}.*\S.*\n)+", text, re.MULTILINE)
    # code in a sentence may go on in the next line
    blocks += [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", text)]
    return commands_of_shell("\n".join(blocks))


def commands_of_shell(text: str) -> list[list[str]]:
    """The lines of a shell script that call one of our programs, as words."""
    shell_commands = []
    for line in text.replace("\\\n", " ").splitlines():
        line = line.strip()
        line = line[2:] if line.startswith("$ ") else line
        if line.partition(" ")[0] in PROGRAMS and " " in line and "…" not in line:
            words = shlex.split(line, comments=True)
            shell_commands.append(words[: words.index(">")] if ">" in words else words)
    return shell_commands


def commands_of(path: Path) -> list[list[str]]:
    """The commands of a document, or of the demo, whose two variables are filled in."""
    text = path.read_text(encoding="utf-8")
    if path == DEMO:
        return commands_of_shell(text.replace("$demo", "demo").replace("$run", "demo/run"))
    return commands(text)


@cache
def help_of(*words: str) -> str:
    if words[0] in MODULES:  # in this process: a new one needs seconds to load torch
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), pytest.raises(SystemExit) as end:
            importlib.import_module(MODULES[words[0]]).main([*words[1:], "--help"])
        assert end.value.code == 0
        return printed.getvalue()
    command = [*warm.python(), *words, "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{' '.join(words)} --help: {done.stderr}"
    return done.stdout


def check_options(helped: str, words: list[str]) -> None:
    """Hold that a help text knows each option among some words, hyphens and underscores being the same."""
    known = helped.replace("-", "_")
    for word in words:
        if word.startswith("--"):
            option = word.partition("=")[0].replace("-", "_")
            assert re.search(rf"{option}\b", known), f"{word} is no option of this command:\n{helped}"


def check_script(words: list[str]) -> None:
    """Hold that a script of the repository exists and knows its options, and that files it is given exist."""
    assert (ROOT / words[0]).is_file(), f"no script {words[0]}"
    check_options(help_of(words[0]), words[1:])
    check_paths(words[1:])


def check_paths(words: list[str]) -> None:
    """Hold that what looks like a file of the repository is one."""
    for word in words:
        is_path = word.startswith(("examples/", "benchmarks/")) or word.endswith((".txt", ".yaml"))
        assert not is_path or word.startswith(MADE_LATER) or (ROOT / word).exists(), f"no file {word}"


def test_documents_name_commands():
    documented = {tuple(words) for path in DOCUMENTS for words in commands_of(path)}
    assert ("dglkge", "checkpoint", "convert", "--to", "run") in documented and len(documented) > 30
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 100 and len(text.split()) <= 600
    assert {"make", "dglkge", "python"} <= {words[0] for words in commands(text)}
    assert [words[0] for words in commands_of(DEMO)] == ["python", "python", "dglkge-launch", "dglkge"]


def problem_of(words: list[str]) -> str:
    """Return what is wrong with a command; empty if nothing is."""
    try:
        check_command(words)
    except (AssertionError, StopIteration) as error:
        return f"{' '.join(words)}: {error}"
    return ""


def check_command(words: list[str]) -> None:
    """Hold that a command's program, options and files exist."""
    if words[0] == "make":
        targets = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        unknown = [word for word in words[1:] if "=" not in word and word not in targets]
        assert not unknown, f"no target {unknown}"
    elif words[:2] == ["python", "-c"]:
        subprocess.run([sys.executable, *words[1:]], cwd=ROOT, capture_output=True, check=True, timeout=120)
    elif words[0] == "python":
        check_script(words[1:])
    elif words[0] == "dglkge-launch":
        script = next((place for place, word in enumerate(words) if word.endswith(".py")), len(words))
        check_options(help_of(words[0]), words[1:script])
        check_paths(words[1:script])
        if script < len(words):
            check_script(words[script:])
    else:
        depth = 3 if words[1] in GROUPS and len(words) > 2 else 1 if words[1].startswith("-") else 2
        check_options(help_of(*words[:depth]), words[depth:])


@pytest.mark.parametrize("path", [DEMO, *DOCUMENTS], ids=lambda path: path.name)
def test_commands_of_a_document_exist(path):
    problems = list(filter(None, map(problem_of, commands_of(path))))
    assert not problems, "\n".join(problems)


def test_links_lead_to_files_and_every_page_is_in_the_navigation():
    """Beside the site, whose strict build checks the links of docs/."""
    for path in (README, *BESIDE):
        links = re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text(encoding="utf-8"))
        assert not [link for link in links if not (path.parent / link).exists()], path.name
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    assert not [path.name for path in PAGES if f": {path.name}\n" not in navigation]


def test_documents_list_the_forwarded_variables():
    page = (ROOT / "docs" / "machines.md").read_text(encoding="utf-8")
    listed = page.partition("are passed on: ")[2].partition("`--extra-envs`")[0]
    whole, beginnings = listed.split("and what begins with")
    patterns = re.findall(r"`(\w+)`", whole) + [f"{name}*" for name in re.findall(r"`(\w+)`", beginnings)]
    assert sorted(patterns) == sorted(FORWARDED_VARIABLES)


def test_reader_finds_commands_and_what_does_not_exist():
    indented = "text\n\n    make demo   # all\n    python a.py \\\n      --b c\n\n"
    fenced = "```sh\n$ dglkge predict x --head 'a b'\nls\n```\n"
    parsed = commands(indented + fenced + "a `make` and `dglkge train\nRUN --verify`\n")
    expected = ["dglkge predict x --head a b", "dglkge train RUN --verify", "make demo", "python a.py --b c"]
    assert sorted(map(" ".join, parsed)) == expected
    check_options("--num_trainers N", ["--num-trainers", "2"])
    assert "no script nowhere.py" in problem_of(["python", "nowhere.py"])
    assert "no file examples/nowhere.yaml" in problem_of(["dglkge-launch", "examples/nowhere.yaml"])
    assert "--nowhere is no option" in problem_of(["dglkge", "plan", "--nowhere"])
    assert "no target ['nowhere']" in problem_of(["make", "nowhere"])
