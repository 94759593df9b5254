"""A command imports what it needs when it needs it: help, version and lists of settings are immediate."""

from __future__ import annotations

import json
import subprocess
import sys

from dglkge.cli.main import COMMANDS
from dglkge.data.dataset import Dataset
from dglkge.inference import choices
from dglkge.inference.exports import export, import_tables
from tests.checkpoint.toy_checkpoint import save_toy_run
from tests.contract.source_tree import ROOT
from tests.toy_kg import toy_dataset

HEAVY = ("torch", "pandas", "dgl", "pyarrow", "numba", "scipy", "h5py")
PROGRAM = f"""
import contextlib, io, json, sys
from dglkge.cli.main import main
heavy = {{}}
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        main(words)
    heavy[" ".join(words)] = [name for name in {HEAVY!r} if name in sys.modules]
print(json.dumps(heavy))
"""


def printed(program: str, *words: str) -> str:
    """Run a program in a new process; returns what it prints."""
    command = [sys.executable, "-c", program, *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, check=True).stdout


def heavy_after(calls: list[list[str]]) -> dict[str, list[str]]:
    """Run commands in one new process; returns the heavy packages that are loaded after each."""
    heavy = json.loads(printed(PROGRAM, json.dumps(calls)))
    assert len(heavy) == len(calls)
    return heavy


def test_help_and_lists_import_no_heavy_package(tmp_path):
    calls = [["--help"], ["--version"], *([*name.split(), "--help"] for name in COMMANDS)]
    calls += [["config", "show"], ["config", "recipes"], ["--print-completion", "bash"]]
    heavy = heavy_after([*calls, ["inspect", str(tmp_path)]])
    # A command that reads a run does load torch, so this test is not blind.
    assert "torch" in heavy.pop(f"inspect {tmp_path}")
    assert not {call: names for call, names in heavy.items() if names}


def test_one_query_needs_torch_and_h5py_only(tmp_path, call):
    """Data frames are for files of queries, and compiled loops for rankings: each takes .2 s."""
    run = save_toy_run(tmp_path / "run", Dataset.open(toy_dataset(typed=True)))
    words = ["predict", str(run), "--head", "person1", "--relation", "knows"]
    assert heavy_after([words]) == {" ".join(words): ["torch", "h5py"]}
    assert call(*words)[1].startswith("(person1, knows, ?): best tails")


def test_formats_of_the_choices_are_those_of_the_code():
    assert list(choices.EXPORT_FORMATS) == sorted(export.FORMATS)
    assert list(choices.IMPORT_FORMATS) == sorted(import_tables.FORMATS)


TRAINED_FROM_PYTHON = """
import sys, dglkge
try:
    dglkge.train([("a", "r", "b")], "complex", output=sys.argv[1])
except dglkge.InputError as error:
    print(error, "torch" in sys.modules)
"""


def test_a_mistake_is_refused_without_torch(tmp_path):
    """Torch takes seconds to import, on a busy machine tens of them."""
    nowhere = str(tmp_path / "nowhere")
    calls = [[name, nowhere] for name in ("serve", "predict", "evaluate", "calibrate", "report")]
    calls += [[*name.split(), nowhere] for name in ("checkpoint inspect", "data build", "data get")]
    calls += [["train", f"dataset={nowhere}"], ["train", "--recipe", "fb15k237/complex"]]
    assert not [call for call, packages in heavy_after(calls).items() if "torch" in packages]
    told = f"output is {__file__}, which is a file; expected a folder False\n"
    assert printed(TRAINED_FROM_PYTHON, __file__) == told


def test_a_launcher_and_a_node_program_start_without_the_settings():
    """Each machine starts one; a job's configuration is read, once, where there is one."""
    program = "import sys, dglkge.cli.launch, dglkge.launch.node_program; "
    assert printed(program + "print({'pydantic', 'numpy'} & {*sys.modules})") == "set()\n"
