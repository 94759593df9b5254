"""A small knowledge graph that a model can learn: rings of entities that relations turn by fixed steps."""

from __future__ import annotations

import functools
import os
import subprocess
from pathlib import Path

import numpy as np
import pandas as pd

from tests import warm
from tests.surroundings import made_once

REPOSITORY = Path(__file__).resolve().parents[1]

NUM_ENTITIES = 60
STEPS = (1, 7, 13, 22)


def ring_triples(num_entities: int = NUM_ENTITIES) -> pd.DataFrame:
    """Return all triples (e_i, turn_k, e_(i+k)); each relation is a rotation of the ring."""
    rows = [
        (f"e{i:03d}", f"turn_{step}", f"e{(i + step) % num_entities:03d}")
        for step in STEPS
        for i in range(num_entities)
    ]
    return pd.DataFrame(rows, columns=["head", "relation", "tail"])


TIMES = ("2021-03", "2021-04", "2021-05", "2021-06")


def temporal_triples() -> pd.DataFrame:
    """Return triples at times: ``turn`` turns the ring by another step at each, ``follow`` always by 5.

    ``open`` holds in the last two months only.
    """
    rows = []
    for place, time in enumerate(TIMES):
        for i in range(NUM_ENTITIES):
            steps = {"turn": STEPS[place], "follow": 5, **({"open": 11} if place > 1 else {})}
            rows += [
                (f"e{i:03d}", relation, f"e{(i + step) % NUM_ENTITIES:03d}", time)
                for relation, step in steps.items()
            ]
    return pd.DataFrame(rows, columns=["head", "relation", "tail", "time"])


def temporal_dataset(num_parts: int = 1) -> Path:
    """Return the folder of the temporal triples, partitioned once; see :func:`toy_dataset`."""

    def make(folder: Path) -> None:
        write_splits(folder / "source", temporal_triples())
        options = ("--num-parts", str(num_parts), "--method", "random", "--columns", "hrtT")
        partition(folder / "source", folder / "dataset", *options)

    return made_once(f"toy-{num_parts}-temporal", make) / "dataset"


def typed_triples() -> tuple[pd.DataFrame, dict[str, str]]:
    """Return triples of people, towns and countries, and the type of each entity.

    ``near`` joins two pairs of types, and so becomes two relations.
    """
    rows = []
    for i in range(40):
        rows.append((f"person{i}", "lives_in", f"town{i % 10}"))
        rows.append((f"person{i}", "knows", f"person{(i + 10) % 40}"))
        rows.append((f"person{i}", "near", f"town{(i + 1) % 10}"))
    for j in range(10):
        rows.append((f"town{j}", "lies_in", f"country{j % 3}"))
        rows.append((f"town{j}", "near", f"town{(j + 1) % 10}"))
    frame = pd.DataFrame(rows, columns=["head", "relation", "tail"])
    names = sorted(set(frame["head"]) | set(frame["tail"]))
    return frame, {name: name.rstrip("0123456789") for name in names}


def write_splits(folder: Path, frame: pd.DataFrame, seed: int = 0) -> Path:
    """Write train, valid and test files, a tenth of the triples in each of the last two."""
    folder.mkdir(parents=True, exist_ok=True)
    order = np.random.default_rng(seed).permutation(len(frame))
    tenth = len(frame) // 10
    cuts = {"valid": order[:tenth], "test": order[tenth : 2 * tenth], "train": order[2 * tenth :]}
    for name, rows in cuts.items():
        frame.iloc[np.sort(rows)].to_csv(folder / f"{name}.tsv", sep="\t", header=False, index=False)
    return folder


def partition(source: Path, output: Path, *options: str) -> Path:
    """Run the partitioner's command."""
    command = [*warm.python(), str(REPOSITORY / "partition_tools" / "partition.py")]
    command += ["--input", str(source), "--output", str(output), *options]
    # METIS repeats itself in memory that glibc has zeroed only: not in a copy.
    is_copied = "--num-parts" not in options or "random" in options
    env = {**os.environ, **({warm.COPIED_BUILD: "1"} if is_copied else {})}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    if done.returncode:
        raise RuntimeError(f"partition.py ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return output


def weighted_dataset(folder: Path, scale: float = 1.0, num_parts: int = 1) -> Path:
    """Partition the typed triples with weights between 0 and a scale, in a fresh folder."""
    frame, types = typed_triples()
    frame["weight"] = np.random.default_rng(3).random(len(frame)).round(3) * scale
    write_splits(folder / "source", frame)
    lines = "".join(f"{name}\t{kind}\n" for name, kind in types.items())
    (folder / "types.tsv").write_text(lines, encoding="utf-8")
    options = ["--columns", "hrtw", "--entity-types", str(folder / "types.tsv"), "--method", "random"]
    return partition(folder / "source", folder / "dataset", *options, "--num-parts", str(num_parts))


def toy_dataset(num_parts: int = 1, typed: bool = False, method: str = "random") -> Path:
    """Return the folder of a toy data set, partitioned once for all tests and workers, which only read it.

    Its triples lie beside it in ``source``, the types of typed entities in ``types.tsv``.
    """
    return _partitioned(num_parts, typed, method)


@functools.cache
def _partitioned(num_parts: int, typed: bool, method: str) -> Path:
    def make(folder: Path) -> None:
        source = folder / "source"
        options = ["--num-parts", str(num_parts), "--method", method]
        if typed:
            frame, types = typed_triples()
            write_splits(source, frame)
            lines = "".join(f"{name}\t{kind}\n" for name, kind in types.items())
            (folder / "types.tsv").write_text(lines, encoding="utf-8")
            options += ["--entity-types", str(folder / "types.tsv")]
        else:
            write_splits(source, ring_triples())
        partition(source, folder / "dataset", *options)

    return made_once(f"toy-{num_parts}-{'typed' if typed else 'ring'}-{method}", make) / "dataset"
