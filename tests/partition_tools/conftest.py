"""What the partitioner's tests share."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from dglkge.partition import dataset_writer
from dglkge.partition.ingest import IdTriples, Reading
from dglkge.partition.options import Options, ReadingOptions
from dglkge.partition.readers.files import Source, find_input, read_files
from dglkge.partition.run_build import GraphJob
from partition_tools import partition
from tests import warm
from tests.toy_kg import REPOSITORY, ring_triples, typed_triples


def build_in_this_process(dataset: Path, job: GraphJob) -> None:
    """Partition without a child, which would have to import DGL first."""
    from dglkge.partition.build_graph import build_partitions

    job.save(dataset)
    with contextlib.redirect_stdout(io.StringIO()):
        build_partitions(dataset, GraphJob.take(dataset))


@pytest.fixture
def build_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset_writer, "run_build", build_in_this_process)


@pytest.fixture
def call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run partition.py in this process, into the folder out; returns exit status, stdout and stderr."""

    def run(source: object, *words: object) -> tuple[int, str, str]:
        arguments = ["--input", source, "--output", tmp_path / "out", *words]
        status = partition.main([str(word) for word in arguments])
        return (status, *capsys.readouterr())

    return run


def run_script(
    *words: object,
    script: str = "partition.py",
    python: Sequence[str] = (),
    copied: bool = True,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """Run a script as a user does, with no help from PYTHONPATH."""
    path = REPOSITORY / "partition_tools" / script
    command = [*(python or warm.python()), str(path), *map(str, words)]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {warm.COPIED_BUILD: "1"} if copied else {}
    options = {"stdout": subprocess.PIPE, **options}
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=180, env=env, **options)


def read(path: Path | list[Path], **options: Any) -> tuple[Source, Reading]:
    """Find and read an input, as partition_triples does before it writes anything."""
    inputs = path if isinstance(path, list) else [path]
    general = {name: options.pop(name) for name in ("split", "num_parts") if name in options}
    reading_options = Options(reading=ReadingOptions(**options), **general)
    return find_input(inputs, reading_options), read_files(inputs, inputs[0].parent, reading_options, None)


def names(source: Reading | IdTriples, split: str = "train") -> list[tuple[str, str, str]]:
    """The triples of a split by name, in their order."""
    triples = source.triples if isinstance(source, Reading) else source
    rows = triples.splits[split].tolist()
    return [(triples.entities[h], triples.relations[r], triples.entities[t]) for h, r, t in rows]


@pytest.fixture
def ring() -> pd.DataFrame:
    return ring_triples()


@pytest.fixture
def typed(tmp_path: Path) -> tuple[pd.DataFrame, dict[str, str], Path]:
    """Triples of three entity types, the type of each entity, and the file that says so."""
    frame, types = typed_triples()
    path = tmp_path / "types.tsv"
    path.write_text("".join(f"{name}\t{type_}\n" for name, type_ in types.items()))
    return frame, types, path
