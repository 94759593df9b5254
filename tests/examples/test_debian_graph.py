"""Debian's packages as triples, and the split that keeps every entity in training."""

from __future__ import annotations

from collections import Counter

import debian_graph

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
        ("a", "depends", "b"),
        ("a", "depends", "c"),
        ("a", "depends", "d"),
        ("a", "provides", "virtual-a"),
        ("a", "section", "section:games"),
        ("a", "maintainer", "maintainer:Ann Example"),
        ("a", "source", "source:src-a"),
        ("a", "tag-role", "tag:role::program"),
        ("a", "tag-uitoolkit", "tag:uitoolkit::gtk"),
        ("b", "depends", "a"),
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
    left = Counter(name for head, _, tail in splits["train"] for name in (head, tail))
    assert all(left[name] >= 2 for some in ("valid", "test") for h, _, t in splits[some] for name in (h, t))
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
    source = "source:src-a"
    assert set(debian_graph.read(PACKAGES, SOURCES)) - set(debian_graph.read(PACKAGES)) == {
        (source, "builds", "a"),
        (source, "builds", "virtual-a"),
        (source, "build-depends", "debhelper-compat"),
        (source, "build-depends", "c"),
        (source, "build-depends", "d"),
        (source, "uploader", "maintainer:Ann Example"),
        (source, "uploader", "maintainer:Bob, the Second"),
        (source, "built-for", "architecture:all"),
        (source, "built-for", "architecture:amd64"),
        (source, "source-section", "section:games"),
    }
