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


def heavy_after(calls: list[list[str]]) -> dict[str, list[str]]:
    """Run commands in one new process; returns the heavy packages that are loaded after each."""
    command = [sys.executable, "-c", PROGRAM, json.dumps(calls)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, check=True)
    return json.loads(done.stdout)


def test_help_and_lists_import_no_heavy_package():
    calls = [["--help"], ["--version"], *([*name.split(), "--help"] for name in COMMANDS)]
    calls += [["config", "show"], ["config", "recipes"], ["--print-completion", "bash"]]
    heavy = heavy_after(calls)
    assert len(heavy) == len(calls) and not {call: names for call, names in heavy.items() if names}


def test_what_is_measured_can_be_found(tmp_path):
    """A command that reads a run does load torch, so the test above is not blind."""
    assert "torch" in heavy_after([["inspect", str(tmp_path)]])[f"inspect {tmp_path}"]


def test_one_query_needs_torch_and_h5py_only(tmp_path, call):
    """Data frames are for files of queries, and compiled loops for rankings: each takes .2 s."""
    run = save_toy_run(tmp_path / "run", Dataset.open(toy_dataset(typed=True)))
    words = ["predict", str(run), "--head", "person1", "--relation", "knows"]
    assert heavy_after([words]) == {" ".join(words): ["torch", "h5py"]}
    assert call(*words)[1].startswith("(person1, knows, ?): best tails")


def test_formats_of_the_choices_are_those_of_the_code():
    assert list(choices.EXPORT_FORMATS) == sorted(export.FORMATS)
    assert list(choices.IMPORT_FORMATS) == sorted(import_tables.FORMATS)


def test_a_missing_folder_is_refused_without_torch(tmp_path):
    """Torch takes seconds to import, on a busy machine tens of them."""
    nowhere = str(tmp_path / "nowhere")
    words = (
        "serve",
        "predict",
        "evaluate",
        "calibrate",
        "report",
        "checkpoint inspect",
        "data build",
        "data get",
    )
    calls = [[*name.split(), nowhere] for name in words]
    calls += [["train", f"dataset={nowhere}"], ["train", "--recipe", "fb15k237/complex"]]
    heavy = heavy_after(calls)
    assert len(heavy) == len(calls) and not [call for call, packages in heavy.items() if "torch" in packages]


def test_a_launcher_and_a_node_program_start_without_the_settings():
    """Each machine starts one; a job's configuration is read, once, where there is one."""
    program = "import sys, dglkge.cli.launch, dglkge.launch.node_program; "
    program += "print({'pydantic', 'numpy'} & {*sys.modules})"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, check=True)
    assert done.stdout == "set()\n"
