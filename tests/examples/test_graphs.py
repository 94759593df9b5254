"""Debian's packages, the standard library and the synthetic graph as triples: exact, sound, repeatable."""

from __future__ import annotations

import json
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


def test_fields_become_triples():
    assert set(debian_graph.read(PACKAGES)) == {
        *(("a", "depends", name) for name in "bcd"),
        *(("a", "provides", "virtual-a"), ("a", "section", "section:games"), ("b", "depends", "a")),
        *(("a", "maintainer", "maintainer:Ann Example"), ("a", "source", "source:src-a")),
        *(("a", "tag-role", "tag:role::program"), ("a", "tag-uitoolkit", "tag:uitoolkit::gtk")),
    }


def test_held_out_entities_stay_in_training():
    triples = [(f"e{i % 20}", "r", f"e{i // 20}") for i in range(400)]
    triples = sorted(set(triples)) + [("lonely", "r", "e1")]
    splits = debian_graph.split(triples, 10, seed=0)
    assert {name: len(some) for name, some in splits.items()} == {
        "train": len(triples) - 10,
        "valid": 5,
        "test": 5,
    }
    assert sorted(sum(splits.values(), [])) == sorted(triples)
    uses = Counter(name for head, _, tail in splits["train"] for name in (head, tail))
    assert all(uses[name] >= 2 for some in ("valid", "test") for h, _, t in splits[some] for name in (h, t))
    assert splits == debian_graph.split(triples, 10, seed=0) != debian_graph.split(triples, 10, seed=1)


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


def test_sources_add_what_is_built_from_what():
    added = set(debian_graph.read(PACKAGES, SOURCES)) - set(debian_graph.read(PACKAGES))
    assert {head for head, _, _ in added} == {"source:src-a"}
    assert {(relation, tail) for _, relation, tail in added} == {
        *(("builds", name) for name in ("a", "virtual-a")),
        *(("build-depends", name) for name in ("debhelper-compat", "c", "d")),
        *(("uploader", f"maintainer:{name}") for name in ("Ann Example", "Bob, the Second")),
        *(("built-for", f"architecture:{name}") for name in ("all", "amd64")),
        ("source-section", "section:games"),
    }


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


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder that the command wrote of this interpreter's library, and what it printed."""
    output = tmp_path_factory.mktemp("stdlib")
    return output, run_script("benchmarks/stdlib_kg.py", "--output", output).stdout


def rows(path: Path) -> list[tuple[str, ...]]:
    return [tuple(line.split("\t")) for line in path.read_text(encoding="utf-8").splitlines()]


def test_small_library_exactly(tmp_path):
    for name, text in SMALL_LIBRARY.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    triples, types = stdlib_kg.extract_triples(tmp_path)
    builtin_names = {
        name for name, kind in types.items() if "." not in name and kind in ("class", "function")
    }
    file_triples = {triple for triple in triples if triple[0] not in builtin_names}
    expected = [line.split(": ") for line in EXPECTED.strip().splitlines()]
    pairs = [(name, *pair.split()) for name, pairs in expected for pair in pairs.split("; ")]
    assert file_triples == {(head, name, tail) for name, head, *tails in pairs for tail in tails}
    assert triples == sorted(set(triples))
    assert types["shapes.base.Shape"] == "class" and types["shapes.base.pen"] == "function"
    assert types["shapes"] == "module" and types["argument:colour"] == "argument"
    assert "Other" not in str(types) and "Helper" not in str(types) and "broken" not in types


def test_builtins_are_known_without_source(tmp_path):
    triples, types = stdlib_kg.extract_triples(tmp_path)
    assert ("FileNotFoundError", "inherits_from", "OSError") in triples
    assert ("list", "has_method", "method:append") in triples
    assert types["len"] == "function" and types["len"] != types["ValueError"] == "class"
    assert not [triple for triple in triples if triple[0] == triple[2]]


def test_the_running_interpreters_library(written):
    """Triples fit the schema, nothing is asked that was not learned, and the summary counts what is there."""
    output, printed = written
    types = dict(rows(output / "entity_types.tsv"))
    splits = {split: rows(output / f"{split}.tsv") for split in ("train", "valid", "test")}
    everything = [triple for triples in splits.values() for triple in triples]
    pairs = {(relation, types[head], types[tail]) for head, relation, tail in everything}
    assert pairs == {(name, *pair) for name, all_pairs in stdlib_kg.SCHEMA.items() for pair in all_pairs}
    assert len(pairs) < 20 and len(set(everything)) == len(set(splits["train"])) + sum(
        len(splits[split]) for split in ("valid", "test")
    )
    assert {end for head, _, tail in splits["train"] for end in (head, tail)} == set(types)
    assert {(relation, types[head], types[tail]) for head, relation, tail in splits["train"]} == pairs
    for split in ("valid", "test"):
        assert 0.03 < len(splits[split]) / len(everything) < 0.06
    summary = json.loads((output / "summary.json").read_text(encoding="utf-8"))
    assert summary["entities"] == Counter(types.values())
    assert summary["splits"] == {split: len(triples) for split, triples in splits.items()}
    assert sum(summary["relations"].values()) == len(everything)
    assert f"{sum(summary['entities'].values()):,}" in printed
    assert "inherits_from (class → class)" in printed and summary["python"] in printed


def test_split_depends_on_the_triple_alone():
    """One more triple moves no other: the split is no shuffle."""
    types = {f"e{i}": "class" for i in range(40)}
    triples = [(f"e{i}", "inherits_from", f"e{j}") for i in range(40) for j in range(40) if i != j]
    whole = stdlib_kg.split_triples(triples, types)
    fewer = stdlib_kg.split_triples(triples[1:], types)
    for split, members in fewer.items():
        assert set(members) == set(whole[split]) - {triples[0]}
    assert min(len(members) for members in whole.values()) > 40


def test_unseen_triples_move_to_training():
    types = {f"e{i}": "class" for i in range(2000)}
    lonely = [(f"e{2 * i}", "inherits_from", f"e{2 * i + 1}") for i in range(1000)]
    splits = stdlib_kg.split_triples(lonely, types)
    assert sorted(splits["train"]) == sorted(lonely) and not splits["valid"] and not splits["test"]


def test_relation_unseen_between_two_types_moves_to_training():
    """The relation is learned for classes; the one triple between methods would be asked unlearned."""
    types = {**{f"e{i}": "class" for i in range(30)}, **{f"m{i}": "method" for i in range(200)}}
    triples = [(f"e{i}", "calls", f"e{j}") for i in range(30) for j in range(30)]
    triples += [(f"m{i}", "has", f"m{(i + 1) % 200}") for i in range(200)]
    alone = stdlib_kg.split_triples(triples, types)
    held_out = next(triple for triple in alone["test"] if triple[1] == "has")
    rest = [triple for triple in triples if triple[1] != "has"]
    rest += [(end, "is", end) for end in (held_out[0], held_out[2])]
    assert held_out in stdlib_kg.split_triples([*rest, held_out], types)["train"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "the following arguments are required: --output"),
        (["--output", "x", "--source", "/no/where"], "no such folder: /no/where"),
    ],
)
def test_bad_arguments(arguments, message, tmp_path):
    done = run_script("benchmarks/stdlib_kg.py", *arguments, status=2, cwd=tmp_path)
    assert message in done.stderr and "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


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


def test_scatter_is_one_to_one_and_takes_neighbours_apart():
    for num in (1, 2, 7, 1000, 1024, 99_991):
        mapped = synthetic.scatter(np.arange(num), num, offset=3)
        assert np.array_equal(np.sort(mapped), np.arange(num))
        assert num < 1000 or np.abs(np.diff(mapped)).min() > 100


def test_every_entity_occurs_and_degrees_are_skewed():
    shape = synthetic.Shape(2000, 20, 6000, seed=1)
    heads, relations, tails = synthetic.edges(shape, 0, 6000)
    degrees = np.bincount(heads, minlength=2000) + np.bincount(tails, minlength=2000)
    assert degrees.min() >= 1 and len(degrees) == 2000
    assert degrees.max() > 20 * np.median(degrees)
    counts = np.bincount(relations, minlength=20)
    assert counts.argmax() == 0 and counts[0] > 5 * counts[-1] > 0
    hubs = np.argsort(degrees)[-10:]
    assert hubs.std() > 200  # not neighbours


def test_blocks_make_the_same_rows_as_the_whole(monkeypatch):
    """The same seed gives the same rows, another seed others; a block needs none of those before it."""
    monkeypatch.setattr(synthetic, "BLOCK_ROWS", 1000)
    shape = synthetic.Shape(500, 5, 2500, seed=1)
    whole = [
        np.column_stack(synthetic.edges(shape, start, min(start + 1000, 2500))) for start in (0, 1000, 2000)
    ]
    again = np.column_stack(synthetic.edges(shape, 1000, 2000))
    assert np.array_equal(whole[1], again)
    other = synthetic.edges(synthetic.Shape(500, 5, 2500, seed=2), 0, 1000)
    assert (np.column_stack(other) != whole[0]).mean() > 0.5
    tables = [table.to_pandas() for table in synthetic.blocks(shape)]
    assert list(pd.concat(tables)["head"]) == [f"e{head}" for block in whole for head in block[:, 0]]


@pytest.mark.parametrize("kind", ["tsv", "parquet"])
def test_the_partition_tool_reads_it(kind, tmp_path):
    def run(*words: str, status: int = 0) -> str:
        words = ("--output", str(tmp_path / "triples"), *words)
        return run_script("benchmarks/synthetic_graph.py", *words, status=status).stderr

    assert "more edges than are held out" in run("--edges", "10", "--held-out", "5", status=2)
    assert not (tmp_path / "triples").exists()
    words = ["--entities", "300", "--relations", "7", "--edges", "2000", "--held-out", "50", "--format", kind]
    run(*words)
    partition_triples([tmp_path / "triples"], tmp_path / "dataset", Options(), None)
    dataset = Dataset.open(tmp_path / "dataset")
    assert [len(dataset.split(split)) for split in ("train", "valid", "test")] == [1900, 50, 50]
    assert dataset.num_entities("entity") == 300 and len(dataset.relations) == 7
    assert not np.array_equal(dataset.split("valid"), dataset.split("test"))
    assert "triples exists" in run(*words, status=2)
