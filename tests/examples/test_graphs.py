"""Debian's packages, the standard library and the synthetic graph as triples: exact, sound, repeatable."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import debian_graph
import stdlib_kg
import synthetic_graph as synthetic
from dglkge.data.dataset import Dataset
from dglkge.partition.make_dataset import Options, partition_triples
from tests.examples.scripts import run_script

PACKAGES = """Package: a
Depends: b (>= 1), c | d, missing
Provides: virtual-a
Section: games
Maintainer: Ann Example <ann@example.org>
Source: src-a (1.2)
Tag: role::program, uitoolkit::gtk

Package: b
Depends: a

Package: c

Package: d
"""


SOURCES = """Package: src-a
Binary: a, virtual-a
Build-Depends: debhelper-compat (= 13), c [amd64] | d:any,
 b
Uploaders: Ann Example <ann@example.org>, Bob, the Second <bob@example.org>
Architecture: all amd64
Section: games
Files:
 0123 9 src-a.dsc
"""


def test_packages_and_sources_become_triples():
    packages = set(debian_graph.read(PACKAGES))
    assert packages == {
        *(("a", "depends", name) for name in "bcd"),
        *(("a", "provides", "virtual-a"), ("a", "section", "section:games"), ("b", "depends", "a")),
        *(("a", "maintainer", "maintainer:Ann Example"), ("a", "source", "source:src-a")),
        *(("a", "tag-role", "tag:role::program"), ("a", "tag-uitoolkit", "tag:uitoolkit::gtk")),
    }
    assert set(debian_graph.read(PACKAGES, SOURCES)) - packages == {
        *(("source:src-a", "builds", name) for name in ("a", "virtual-a")),
        *(("source:src-a", "build-depends", name) for name in ("debhelper-compat", "c", "d")),
        *(("source:src-a", "uploader", f"maintainer:{name}") for name in ("Ann Example", "Bob, the Second")),
        *(("source:src-a", "built-for", f"architecture:{name}") for name in ("all", "amd64")),
        ("source:src-a", "source-section", "section:games"),
    }


def test_held_out_entities_stay_in_training():
    triples = [*((f"e{i % 20}", "r", f"e{i // 20}") for i in range(400)), ("lonely", "r", "e1")]
    splits = debian_graph.split(triples, 10, seed=0)
    assert [len(splits[name]) for name in ("train", "valid", "test")] == [391, 5, 5]
    assert sorted(sum(splits.values(), [])) == sorted(triples)
    uses = Counter(name for head, _, tail in splits["train"] for name in (head, tail))
    assert all(min(uses[head], uses[tail]) >= 2 for head, _, tail in splits["valid"] + splits["test"])
    assert splits == debian_graph.split(triples, 10, seed=0) != debian_graph.split(triples, 10, seed=1)


SMALL_LIBRARY = {
    "shapes/__init__.py": "from .base import *\nfrom .round import Circle as Disc, area\n",
    "shapes/base.py": """
import sys
from contextlib import contextmanager as managed

class Shape(object):
    def area(self, unit): raise NotImplementedError
    @property
    def name(self): return self.area("m")
    class Corner: ...

class ShapeError(ValueError): ...

@managed
def pen(colour, *rest, width=1, **options):
    try:
        import json
        yield json.dumps(colour)
    finally:
        rest.append(width)
""",
    "shapes/round.py": """
import shapes
from . import base as b
from shapes.base import ShapeError as Bad
Alias = b.Shape

class Circle(Alias, nowhere.Unknown):
    def grow(self, factor, /):
        if factor < 0:
            raise Bad("negative")
        return shapes.pen(Circle())

def area(circle):
    raise
""",
    "contextlib.py": "def contextmanager(func): return func\n",
    "looped.py": "from looped import gone\nfrom looped import *\nclass Lost(gone): ...\n",
    "broken.py": "def (:\n",
    "test/helper.py": "class Helper: ...\n",
    "site-packages/other.py": "class Other: ...\n",
}

EXPECTED = """
submodule_of: shapes.base shapes; shapes.round shapes
imports: shapes shapes.base shapes.round; shapes.base sys contextlib json; shapes.round shapes shapes.base
defined_in: shapes.base.Shape shapes.base; shapes.base.Shape.Corner shapes.base
defined_in: shapes.base.ShapeError shapes.base; shapes.base.pen shapes.base
defined_in: shapes.round.Circle shapes.round; shapes.round.area shapes.round
defined_in: contextlib.contextmanager contextlib; looped.Lost looped
inherits_from: shapes.base.Shape object; shapes.base.ShapeError ValueError
inherits_from: shapes.round.Circle shapes.base.Shape
has_method: shapes.base.Shape method:area method:name; shapes.round.Circle method:grow
takes_argument: method:area argument:unit; method:grow argument:factor
takes_argument: shapes.base.pen argument:colour argument:width; shapes.round.area argument:circle
takes_argument: contextlib.contextmanager argument:func
raises: shapes.base.Shape NotImplementedError; shapes.round.Circle shapes.base.ShapeError
calls: shapes.base.Shape method:area; shapes.round.Circle shapes.base.pen; shapes.base.pen method:append
uses_decorator: method:name property; shapes.base.pen contextlib.contextmanager
"""
"""By relation: head and tails, head and tails."""


def rows(path: Path) -> list[tuple[str, ...]]:
    return [tuple(line.split("\t")) for line in path.read_text(encoding="utf-8").splitlines()]


def test_small_library_exactly(tmp_path):
    """Beside it are the builtins, which have no source."""
    for name, text in SMALL_LIBRARY.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    triples, types = stdlib_kg.extract_triples(tmp_path)
    builtin = {name for name, kind in types.items() if "." not in name and kind in ("class", "function")}
    expected = [line.split(": ") for line in EXPECTED.strip().splitlines()]
    pairs = [(name, *pair.split()) for name, pairs in expected for pair in pairs.split("; ")]
    of_files = {triple for triple in triples if triple[0] not in builtin}
    assert of_files == {(head, name, tail) for name, head, *tails in pairs for tail in tails}
    assert triples == sorted(set(triples)) and not [triple for triple in triples if triple[0] == triple[2]]
    kinds = {"shapes.base.Shape": "class", "shapes.base.pen": "function", "shapes": "module"}
    kinds |= {"argument:colour": "argument", "len": "function", "ValueError": "class"}
    assert {name: types[name] for name in kinds} == kinds
    assert "Other" not in str(types) and "Helper" not in str(types) and "broken" not in types
    assert ("FileNotFoundError", "inherits_from", "OSError") in triples
    assert ("list", "has_method", "method:append") in triples


def test_packages_of_the_running_interpreter(tmp_path):
    """Triples fit the schema, nothing is asked that was not learned, and the summary counts what is there."""
    for name in ("asyncio", "email", "unittest"):
        shutil.copytree(Path(os.__file__).with_name(name), tmp_path / "library" / name)
    words = ("--output", tmp_path, "--source", tmp_path / "library")
    printed = run_script("benchmarks/stdlib_kg.py", *words).stdout
    types = dict(rows(tmp_path / "entity_types.tsv"))
    splits = {split: rows(tmp_path / f"{split}.tsv") for split in ("train", "valid", "test")}
    everything = [triple for triples in splits.values() for triple in triples]
    for triples in (everything, splits["train"]):
        pairs = {(relation, types[head], types[tail]) for head, relation, tail in triples}
        assert pairs == {(name, *pair) for name, ends in stdlib_kg.SCHEMA.items() for pair in ends}
    assert {end for head, _, tail in splits["train"] for end in (head, tail)} == set(types)
    for split in ("valid", "test"):
        assert not set(splits[split]) & set(splits["train"])
        assert 0.03 < len(splits[split]) / len(everything) < 0.06
    summary = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    assert summary["entities"] == Counter(types.values())
    assert summary["splits"] == {split: len(triples) for split, triples in splits.items()}
    assert sum(summary["relations"].values()) == len(everything)
    assert f"{len(types):,}" in printed and "inherits_from (class → class)" in printed


def test_split_depends_on_the_triple_alone():
    """One more triple moves no other: the split is no shuffle. What was not learned moves to training."""
    types = {f"e{i}": "class" for i in range(2000)}
    triples = [(f"e{i}", "inherits_from", f"e{j}") for i in range(40) for j in range(40) if i != j]
    whole, fewer = (stdlib_kg.split_triples(some, types) for some in (triples, triples[1:]))
    for split, members in fewer.items():
        assert set(members) == set(whole[split]) - {triples[0]} and len(whole[split]) > 40
    lonely = [(f"e{2 * i}", "inherits_from", f"e{2 * i + 1}") for i in range(1000)]
    splits = stdlib_kg.split_triples(lonely, types)
    assert sorted(splits["train"]) == sorted(lonely) and not splits["valid"] and not splits["test"]
    # A relation that is learned for other types only.
    types |= {f"m{i}": "method" for i in range(200)}
    methods = [(f"m{i}", "has", f"m{(i + 1) % 200}") for i in range(200)]
    held_out = next(t for t in stdlib_kg.split_triples([*triples, *methods], types)["test"] if t[1] == "has")
    ends = [(end, "is", end) for end in (held_out[0], held_out[2])]
    assert held_out in stdlib_kg.split_triples([*triples, *ends, held_out], types)["train"]


@pytest.mark.parametrize("exponent", [0.0, 0.75, 1.0, 1.5])
def test_ranks_follow_the_power_law(exponent):
    """Against the integral of the density between two ranks, computed by summing a fine grid."""
    num, size = 50, 200_000
    ranks = synthetic.zipf_ranks((np.arange(size) + 0.5) / size, num, exponent)
    assert ranks.min() == 0 and ranks.max() == num - 1
    grid = np.arange(1, num + 1, 1e-4)
    density = grid**-exponent
    expected = np.add.reduceat(density, np.searchsorted(grid, np.arange(1, num + 1) - 1e-9)) / density.sum()
    assert np.allclose(np.bincount(ranks, minlength=num) / size, expected, atol=1e-4)


def test_blocks_make_the_rows_of_the_whole_with_skewed_degrees(monkeypatch):
    """The same seed gives the same rows, another seed others; a block needs none of those before it."""
    monkeypatch.setattr(synthetic, "BLOCK_ROWS", 1000)
    shape = synthetic.Shape(2000, 20, 6000, seed=1)
    blocks = [np.column_stack(synthetic.edges(shape, start, start + 1000)) for start in range(0, 6000, 1000)]
    assert np.array_equal(blocks[1], np.column_stack(synthetic.edges(shape, 1000, 2000)))
    other = synthetic.edges(synthetic.Shape(2000, 20, 6000, seed=2), 0, 1000)
    assert (np.column_stack(other) != blocks[0]).mean() > 0.5
    heads, relations, tails = np.concatenate(blocks).T
    tables = [table.to_pandas() for table in synthetic.blocks(shape)]
    assert list(pd.concat(tables)["head"]) == [f"e{head}" for head in heads]
    degrees = np.bincount(heads, minlength=2000) + np.bincount(tails, minlength=2000)
    assert degrees.min() >= 1 and degrees.max() > 20 * np.median(degrees)
    counts = np.bincount(relations, minlength=20)
    assert counts.argmax() == 0 and counts[0] > 5 * counts[-1] > 0
    assert np.argsort(degrees)[-10:].std() > 200  # hubs are not neighbours
    for num in (1, 2, 7, 1000, 99_991):
        mapped = synthetic.scatter(np.arange(num), num, offset=3)
        assert np.array_equal(np.sort(mapped), np.arange(num))
        assert num < 1000 or np.abs(np.diff(mapped)).min() > 100


@pytest.mark.parametrize("kind", ["tsv", "parquet"])
def test_the_partition_tool_reads_it(kind, tmp_path):
    words = ["--entities", "300", "--relations", "7", "--edges", "2000", "--held-out", "50", "--format", kind]
    run_script("benchmarks/synthetic_graph.py", "--output", tmp_path / "triples", *words)
    partition_triples([tmp_path / "triples"], tmp_path / "dataset", Options(), None)
    dataset = Dataset.open(tmp_path / "dataset")
    assert [len(dataset.split(split)) for split in ("train", "valid", "test")] == [1900, 50, 50]
    assert dataset.num_entities("entity") == 300 and len(dataset.relations) == 7
    assert not np.array_equal(dataset.split("valid"), dataset.split("test"))


@pytest.mark.parametrize(
    ("script", "words", "message"),
    [
        ("stdlib_kg.py", [], "the following arguments are required: --output"),
        ("stdlib_kg.py", ["--output", "x", "--source", "/no/where"], "no such folder: /no/where"),
        ("synthetic_graph.py", ["--output", "x", "--edges", "10", "--held-out", "5"], "more edges than are"),
        ("synthetic_graph.py", ["--output", "."], "exists"),
    ],
)
def test_bad_arguments(script, words, message, tmp_path):
    done = run_script(f"benchmarks/{script}", *words, status=2, cwd=tmp_path)
    assert message in done.stderr and "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())
