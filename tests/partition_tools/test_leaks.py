"""``--strict-splits`` and ``--drop-leaks``: what is refused, what is left out, and what the figures say."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest

from dglkge.data.dataset import Dataset
from dglkge.data.quality import measure_quality
from dglkge.errors import InputError
from dglkge.partition.make_dataset import partition_dataframe
from dglkge.partition.options import Options
from tests.partition_tools.reading_back import named_triples

pytestmark = pytest.mark.usefixtures("build_here")

NEAR = [(f"e{i}", "above", f"e{i + 1}") for i in range(9)]
TRAIN = [*NEAR[:8], *((t, "below", h) for h, _, t in NEAR), ("e0", "likes", "e5")]
"""Nine pairs, in both directions but for (e8, above, e9)."""


def write(folder, **splits: list[tuple]):
    folder.mkdir()
    for name, rows in splits.items():
        # An empty line first: it is no row, but counts as a line.
        (folder / f"{name}.tsv").write_text("\n" + "".join("\t".join(row) + "\n" for row in rows))
    return folder


def test_repeated_triples_are_refused_before_anything_is_written(tmp_path, call):
    test = [("e3", "likes", "e0"), ("e0", "likes", "e5"), TRAIN[3]]
    source = write(tmp_path / "source", train=TRAIN, valid=[("e0", "likes", "e5")], test=test)
    status, out, err = call(source, "--strict-splits")
    assert (status, out) == (2, "")
    assert err == (
        "partition.py: error: 1 of 1 valid triples (100.0%) and 2 of 3 test triples (66.7%) stand in train "
        f"too, e.g. {source}/valid.tsv:2: 'e0' 'likes' 'e5', also {source}/train.tsv:19: "
        "--strict-splits refuses this; --drop-leaks exact leaves them out\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    # Without the option they are counted and kept.
    status, out, err = call(source, "--json")
    assert (status, err) == (0, "")
    figures = json.loads(out)
    assert figures["quality"]["leaks"]["test"]["in_train"] == {"triples": 2, "share": pytest.approx(2 / 3)}
    assert figures["dropped_leaks"] == {} and figures["warnings"] == []
    assert Dataset.open(tmp_path / "out").quality() == figures["quality"]


@pytest.mark.parametrize("option, status", [("--strict-splits=0.5", 0), ("--strict-splits=0.49", 2)])
def test_implied_triples_are_refused_above_a_share(tmp_path, call, option, status):
    source = write(tmp_path / "source", train=TRAIN, test=[("e9", "likes", "e8"), NEAR[8]])
    code, _, err = call(source, option)
    assert code == status and (tmp_path / "out").exists() == (status == 0)
    if status:
        assert err == (
            "partition.py: error: 1 of 2 test triples (50.0%) follow from train by an inverse, symmetric or "
            f"duplicate relation, e.g. {source}/test.tsv:3: 'e8' 'above' 'e9': --strict-splits allows a "
            "share of 0.49; --drop-leaks implied leaves them out\n"
        )


@pytest.mark.parametrize("which, remaining", [("exact", 2), ("implied", 1)])
def test_leaks_are_left_out(tmp_path, call, which, remaining):
    test = [TRAIN[0], NEAR[8], ("e9", "likes", "e8")]
    source = write(tmp_path / "source", train=TRAIN, valid=[TRAIN[1]], test=test)
    status, out, err = call(source, "--drop-leaks", which, "--strict-splits")
    assert (status, err) == (0, "")
    assert f"left out as leaks: 1 of valid and {3 - remaining} of test" in out.splitlines()
    assert named_triples(tmp_path / "out", "test") == test[-remaining:]
    assert named_triples(tmp_path / "out", "valid") == []
    assert len(named_triples(tmp_path / "out", "train")) == len(TRAIN)
    leaks = Dataset.open(tmp_path / "out").quality()["leaks"]["test"]
    assert leaks["in_train"]["triples"] == 0 and leaks["implied"]["triples"] == remaining - 1


def test_rows_of_data_frames_are_named(tmp_path):
    columns = ["s", "p", "o"]
    train = pd.DataFrame(TRAIN, columns=columns).assign(w=1.0)
    test = pd.DataFrame([TRAIN[8], TRAIN[4]], columns=columns).assign(w=1.0)
    options = Options(strict_splits=0.5)
    with pytest.raises(InputError, match="e.g. test: row 1: 'e1' 'below' 'e0', also train: row 9: "):
        columns = "head=s,relation=p,tail=o,weight=w"
        partition_dataframe(train, tmp_path / "out", test=test, columns=columns, options=options)
    assert list(tmp_path.iterdir()) == []


def test_split_rows_have_no_place(tmp_path, call):
    rows = [row for i in range(30) for row in ((f"a{i}", "r", f"b{i}"), (f"b{i}", "r", f"a{i}"))]
    source = write(tmp_path / "source", train=rows)
    status, _, err = call(source, "--split", "0.6", "--strict-splits", "0.1")
    assert status == 2 and ", e.g. valid: 'b" in err and str(source) not in err


def test_typed_relations_count_apart(tmp_path, build_here, typed):
    """``near`` joins two pairs of types, so it is two relations; what is stored is what is measured again."""
    frame, types, path = typed
    order = np.random.default_rng(0).permutation(len(frame))
    train, test = frame.iloc[order[20:]], frame.iloc[order[:20]]
    options = Options(num_parts=2, entity_types=path)
    figures = partition_dataframe(train, tmp_path / "out", test=test, options=options)
    again = measure_quality(Dataset.open(tmp_path / "out").numbered()).report
    # Ties of the hubs are in the order of numbers, which are by name here and by type there.
    for quality in (again, figures["quality"]):
        quality["hubs"] = sorted(hub["degree"] for hub in quality["hubs"])
    assert again == figures["quality"]
    by_types = {(types[h], r, types[t]) for h, r, t in frame.itertuples(index=False)}
    assert len(by_types) == Dataset.open(tmp_path / "out").num_relations == 5
