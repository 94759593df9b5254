"""What the partitioner's tests share."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from dglkge.data.dataset_files import PARTITIONS
from dglkge.partition import dataset_writer
from dglkge.partition.ingest import IdTriples, Reading
from dglkge.partition.options import Options, ReadingOptions
from dglkge.partition.readers.files import Source, find_input, read_files
from dglkge.partition.run_build import GraphJob
from partition_tools import partition
from tests import warm
from tests.toy_kg import REPOSITORY, typed_triples


@pytest.fixture
def build_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Partition without a child, which would have to import DGL first."""
    from dglkge.partition.build_graph import build_partitions

    def build(dataset: Path, job: GraphJob) -> None:
        (dataset / PARTITIONS).mkdir()
        with contextlib.redirect_stdout(io.StringIO()):
            build_partitions(dataset, job)

    monkeypatch.setattr(dataset_writer, "run_build", build)


@pytest.fixture
def call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run partition.py in this process, into the folder out; returns exit status, stdout and stderr."""

    def run(source: object, *words: object) -> tuple[int, str, str]:
        arguments = ["--input", source, "--output", tmp_path / "out", *words]
        status = partition.main([str(word) for word in arguments])
        return (status, *capsys.readouterr())

    return run


def run_script(*words: object, script: str = "partition.py", copied: bool = True, **options: Any):
    """Run a script as a user does, with no help from PYTHONPATH."""
    command = [*warm.python(), str(REPOSITORY / "partition_tools" / script), *map(str, words)]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {warm.COPIED_BUILD: "1"} if copied else {}
    options = {"stdout": subprocess.PIPE, **options}
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=180, env=env, **options)


def read(path: Path | list[Path], **options: Any) -> tuple[Source, Reading]:
    """Find and read an input, as partition_triples does before it writes anything."""
    inputs = path if isinstance(path, list) else [path]
    general = {name: options.pop(name) for name in ("split", "num_parts") if name in options}
    reading_options = Options(reading=ReadingOptions(**options), **general)
    return find_input(inputs, reading_options), read_files(inputs, inputs[0].parent, reading_options)


def names(source: Reading | IdTriples, split: str = "train") -> list[tuple[str, str, str]]:
    """The triples of a split by name, in their order."""
    triples = source.triples if isinstance(source, Reading) else source
    rows = triples.splits[split].tolist()
    return [(triples.entities[h], triples.relations[r], triples.entities[t]) for h, r, t in rows]


@pytest.fixture
def typed(tmp_path: Path) -> tuple[pd.DataFrame, dict[str, str], Path]:
    """Triples of three entity types, the type of each entity, and the file that says so."""
    frame, types = typed_triples()
    path = tmp_path / "types.tsv"
    path.write_text("".join(f"{name}\t{type_}\n" for name, type_ in types.items()))
    return frame, types, path


# What follows reads a data set back into names, by the files alone, and without any code of the project.
def lines(path: Path) -> list[str]:
    return path.read_bytes().decode().split("\n")[:-1]


def named(dataset: Path, triples: np.ndarray, original_ids: dict | None = None) -> list[tuple[str, ...]]:
    """Return head, relation and tail of triples by name, and the time if there is one."""
    relations = [line.split("\t") for line in lines(dataset / "relations.tsv")]
    entities = {path.stem: lines(path) for path in (dataset / "entities").glob("*.txt")}
    times = lines(dataset / "times.txt") if (dataset / "times.txt").exists() else []
    rows = []
    for head, number, tail in triples.tolist():
        row, time = divmod(number, len(times) or 1)
        name, lhs, rhs = relations[row if original_ids is None else original_ids["relation"][row]]
        if original_ids is not None:
            head, tail = original_ids[lhs][head], original_ids[rhs][tail]
        rows.append((entities[lhs][head], name, entities[rhs][tail], *times[time : time + 1]))
    return rows


def named_triples(dataset: Path, split: str) -> list[tuple[str, ...]]:
    return named(dataset, np.load(dataset / f"{split}.npy"))


def owned_triples(dataset: Path) -> list[Counter]:
    """Return, for each partition, the named triples of its ``edges.npy``, going through the id maps."""
    files = (dataset / "partitions").glob("original_ids_*.npy")
    original_ids = {path.stem.removeprefix("original_ids_"): np.load(path) for path in files}
    parts = sorted((dataset / "partitions").glob("part*/edges.npy"))
    return [Counter(named(dataset, np.load(part), original_ids)) for part in parts]
