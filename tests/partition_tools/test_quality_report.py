"""What ``--strict-splits`` and ``--drop-leaks`` refuse and leave out; the figures and the table of them."""

from __future__ import annotations

import io
import json

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from dglkge.data.dataset import Dataset
from dglkge.data.quality import measure_quality
from dglkge.errors import InputError
from dglkge.partition.make_dataset import partition_dataframe
from dglkge.partition.options import Options
from dglkge.partition.report import partition_figures, print_figures, print_quality
from tests.data import toy_folder
from tests.partition_tools.reading_back import named_triples

pytestmark = pytest.mark.usefixtures("build_here")

ROLES = ["head", "relation", "tail"]
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


def test_implied_triples_are_refused_above_a_share(tmp_path, call):
    source = write(tmp_path / "source", train=TRAIN, test=[("e9", "likes", "e8"), NEAR[8]])
    status, _, err = call(source, "--strict-splits=0.49")
    assert status == 2 and not (tmp_path / "out").exists()
    assert err == (
        "partition.py: error: 1 of 2 test triples (50.0%) follow from train by an inverse, symmetric or "
        f"duplicate relation, e.g. {source}/test.tsv:3: 'e8' 'above' 'e9': --strict-splits allows a "
        "share of 0.49; --drop-leaks implied leaves them out\n"
    )
    assert call(source, "--strict-splits=0.5")[0] == 0 and (tmp_path / "out").exists()


def test_leaks_are_left_out(tmp_path, call):
    test, out = [TRAIN[0], NEAR[8], ("e9", "likes", "e8")], tmp_path / "out"
    source = write(tmp_path / "source", train=TRAIN, valid=[TRAIN[1]], test=test)
    for which, remaining in (("exact", 2), ("implied", 1)):
        status, text, err = call(source, "--drop-leaks", which, "--strict-splits", "--overwrite")
        assert (status, err) == (0, "")
        assert f"left out as leaks: 1 of valid and {3 - remaining} of test" in text.splitlines()
        splits = [named_triples(out, split) for split in ("train", "valid", "test")]
        assert splits[1:] == [[], test[-remaining:]] and len(splits[0]) == len(TRAIN)
        leaks = Dataset.open(out).quality()["leaks"]["test"]
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


def owner(ntype: str, original_id: int) -> int:
    return int(toy_folder.NODE_IDS[ntype][original_id] >= toy_folder.BOUNDARIES[ntype][1])


def test_figures_are_those_counted_by_hand_and_printed(tmp_path):
    figures = partition_figures(Dataset.open(toy_folder.write_toy_folder(tmp_path / "toy")))
    num_triples = len(toy_folder.TRAIN)
    edges, cut = [0, 0], [0, 0]
    for head, relation, tail in toy_folder.TRAIN.tolist():
        _, lhs, rhs = toy_folder.RELATIONS[relation]
        part = owner(rhs, tail)
        edges[part] += 1
        cut[part] += owner(lhs, head) != part
    assert [part["num_edges"] for part in figures["parts"]] == edges
    assert [part["cut_edges"] for part in figures["parts"]] == cut
    assert figures["edge_cut"] == {"edges": sum(cut), "fraction": sum(cut) / num_triples}
    assert figures["balance"] == {"edges": pytest.approx(max(edges) / (num_triples / 2)), "entities": 1}
    assert [part["num_entities"] for part in figures["parts"]] == [3, 3]
    assert figures["parts"][0]["nodes"] == {"person": 2, "relation": 2, "town": 1}
    stream = io.StringIO()
    print_figures({**figures, "name": "[bold]x[/bold]"}, Console(file=stream, width=100))
    text = stream.getvalue()
    for words in (
        "[bold]x[/bold]: 6 entities of 2 types, 3 relations", "triples: 5 train, 1 valid, 0 test",
        "partitions (random, seed 0)", f"edge cut: {sum(cut)} ",
    ):  # fmt: skip
        assert words in text
    assert len([line for line in text.splitlines() if line.startswith("│")]) == 2


def printed(quality: dict) -> list[str]:
    stream = io.StringIO()
    print_quality(quality, Console(file=stream, width=100))
    return [" ".join(line.replace("│", " ").split()) for line in stream.getvalue().splitlines()]


def test_quality_is_printed(tmp_path):
    """Names that look like markup stay; of many pairs of relations the largest ten are shown."""
    rows = {"train": [*TRAIN, TRAIN[0]], "valid": TRAIN[1:2]}
    rows["test"] = [TRAIN[-1], NEAR[8], ("new", "likes", "e1")]
    frames = {
        split: pd.DataFrame([(f"[b]{h}", r, f"[b]{t}") for h, r, t in triples], columns=ROLES)
        for split, triples in rows.items()
    }
    quality = partition_dataframe(frames.pop("train"), tmp_path / "out", **frames)["quality"]
    lines = printed(quality)
    for line in (
        "triples 19 1 3",
        "repeat an earlier one 1 0 0",
        "stand in train 1 (100.0%) 1 (33.3%)",
        "stand in valid 0 (0.0%)",
        "implied by train 1 (100.0%) 1 (33.3%)",
        "have a name unseen in train 0 1",
        "entities unseen in train 0 1",
        "pairs of relations that share 80% or more of their triples: 1",
        "100.0% 9 above is the inverse of below",
        "relations with one training triple: 1 (likes)",
        "training triples of an entity: 0 to 5, median 4, mean 3.5; 1 entities have one, 1 none",
        "entities with most: [b]e1 5, [b]e5 5, [b]e0 4, [b]e2 4, [b]e3 4",
        "connected components of train: 1; the largest has 10 entities (100.0%)",
    ):
        assert line in lines
    common = {"relations": ["a", "b"], "triples": [10, 8], "overlap": 8, "share": 0.8}
    kinds = ["inverse", "duplicate", "symmetric"] + ["duplicate"] * 8
    pairs = {"least_share": 0.8, "count": 11, "largest": [{**common, "kind": kind} for kind in kinds]}
    single = {"count": 3, "examples": ["x", "y"]}
    lines = printed({**quality, "relation_pairs": pairs, "single_triple_relations": single})
    first = lines.index("pairs of relations that share 80% or more of their triples: 11, the largest 10")
    shown = ["80.0% 8 a is the inverse of b", "80.0% 8 a is a duplicate of b", "80.0% 8 a is symmetric"]
    assert lines[first + 1 : first + 4] == shown
    assert len([line for line in lines if line.startswith("80.0%")]) == 10
    assert "relations with one training triple: 3 (x, y, ...)" in lines
    pairs, single = {**pairs, "count": 0, "largest": []}, {"count": 0, "examples": []}
    counts = {"triples": dict.fromkeys(rows, 4000), "degrees": {**quality["degrees"], "max": 1234}}
    counts |= {"relation_pairs": pairs, "single_triple_relations": single}
    text = "\n".join(printed({**quality, **counts}))
    assert "triples 4,000 4,000 4,000" in text and "an entity: 0 to 1,234, median 4" in text
    assert "pairs of relations" not in text and "one training triple" not in text
