"""Whole data sets partitioned and extended, read back by the files alone; leaks left out, and the report."""

from __future__ import annotations

import gzip
import io
import json
import re
import shutil
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from dglkge.data.dataset import Dataset
from dglkge.data.quality import measure_quality
from dglkge.errors import InputError
from dglkge.partition import extend
from dglkge.partition.make_dataset import partition_dataframe
from dglkge.partition.options import Options
from dglkge.partition.report import partition_figures, print_figures, print_quality
from dglkge.typing import RELATION
from partition_tools import extend as extend_script
from tests.data import toy_folder
from tests.partition_tools.conftest import named, named_triples, owned_triples, run_script
from tests.toy_kg import ring_triples, toy_dataset

pytestmark = pytest.mark.usefixtures("build_here")

ROLES, RING = ["head", "relation", "tail"], ring_triples()
LAYOUTS = [(1, "metis"), (3, "metis"), (3, "ldg"), (2, "random")]


def rows(frame: pd.DataFrame) -> list[tuple]:
    return list(frame[ROLES].itertuples(index=False, name=None))


@pytest.mark.parametrize("num_parts, method", LAYOUTS)
def test_every_triple_lies_in_one_partition(tmp_path, num_parts, method):
    """Also one that repeats another, a loop, and those of names that only valid and test have."""
    options, out = Options(num_parts=num_parts, method=method), tmp_path / "out"
    loop, lonely = (pd.DataFrame([row], columns=ROLES) for row in (("a", "s", "a"), ("lonely", "u", "e000")))
    splits = {"train": pd.concat([RING[:200], RING[:2], loop]), "valid": RING[200:], "test": lonely}
    figures = partition_dataframe(splits["train"], out, splits["valid"], lonely, options=options)
    for split, frame in splits.items():
        assert named_triples(out, split) == rows(frame)
    assert figures["duplicates"]["train"] == 2
    assert figures["unseen"]["test"] == {"entities": 1, "relations": 1, "triples": 1}
    owned = owned_triples(out)
    assert len(owned) == num_parts and all(owned)
    assert sum(owned, Counter()) == Counter(rows(splits["train"]))
    dataset = Dataset.open(out)
    assert dataset.num_parts == num_parts and dataset.part_method == method


@pytest.mark.parametrize("num_parts, method", LAYOUTS)
def test_typed_graph(tmp_path, typed, num_parts, method):
    frame, types, path = typed
    options = Options(num_parts=num_parts, method=method, entity_types=path)
    # A pair of types that the relation joins in test only.
    test = pd.DataFrame([("person0", "lies_in", "person1")], columns=ROLES)
    partition_dataframe(frame, tmp_path / "out", test=test, options=options)
    assert named_triples(tmp_path / "out", "test") == rows(test)
    assert Counter(named_triples(tmp_path / "out", "train")) == Counter(rows(frame))
    assert sum(owned_triples(tmp_path / "out"), Counter()) == Counter(rows(frame))
    dataset = Dataset.open(tmp_path / "out")
    assert dataset.entity_types == sorted(set(types.values()))
    for type_ in dataset.entity_types:
        assert all(types[name] == type_ for name in dataset.vocabulary(type_).names)
        # DGL cannot store a partition without a node of some type.
        assert (np.diff(dataset.layout().range_starts(type_)) > 0).all()
    labels = set(dataset.relations.labels.names)
    assert {"near (person → town)", "near (town → town)", "lies_in (person → person)", "knows"} <= labels
    assert dataset.num_relations == len(labels) == 6
    start, triples = 0, named_triples(tmp_path / "out", "train")
    for lhs, rhs, first, last in dataset.edge_types:
        pair_rows = [row for row in rows(frame) if (types[row[0]], types[row[2]]) == (lhs, rhs)]
        assert first == start and triples[first:last] == pair_rows
        start = last
        for relation in np.unique(dataset.split("train")[first:last, 1]).tolist():
            assert (dataset.relations[relation].lhs, dataset.relations[relation].rhs) == (lhs, rhs)
    assert start == len(frame)


def test_fingerprint_depends_on_the_triples_alone(tmp_path):
    """And partitions on the seed."""
    results = []
    layouts = [(1, "metis", 5), (3, "random", 5), (3, "random", 5), (3, "random", 6)]
    for place, (num_parts, method, seed) in enumerate(layouts):
        options = Options(num_parts=num_parts, method=method, seed=seed, name="same")
        partition_dataframe(RING, tmp_path / str(place), options=options)
        parts = np.load(tmp_path / str(place) / "partitions" / "original_ids_entity.npy").tolist()
        results.append((Dataset.open(tmp_path / str(place)).fingerprint, parts))
    assert len({fingerprint for fingerprint, _ in results}) == 1
    assert results[1] == results[2] != results[3]
    partition_dataframe(RING[:-1], tmp_path / "other")
    assert Dataset.open(tmp_path / "other").fingerprint != results[0][0]


def test_pair_with_fewer_triples_than_partitions(tmp_path):
    """DGL itself cannot store a partition without an edge of some type."""
    triples = [(f"a{i}", "r", f"a{(i + 1) % 9}") for i in range(9)]
    triples += [("a0", "s", "b0"), ("b1", "t", "b2"), ("b0", "t", "b1")]
    frame = pd.DataFrame(triples, columns=ROLES)
    types = tmp_path / "types.tsv"
    types.write_text("".join(f"{x}{i}\t{x}\n" for x in "ab" for i in range(9)))
    for method in ("metis", "random"):
        options = Options(num_parts=3, method=method, entity_types=types, overwrite=True)
        figures = partition_dataframe(frame, tmp_path / "out", options=options)
        assert sum(owned_triples(tmp_path / "out"), Counter()) == Counter(rows(frame))
        assert sum(part["num_edges"] for part in figures["parts"]) == len(frame)


def test_weights_go_where_their_triples_go(tmp_path, typed):
    frame, _, path = typed
    frame["score"] = np.arange(len(frame)) / 8
    columns = "head=head,relation=relation,tail=tail,weight=score"
    options = Options(num_parts=2, entity_types=path)
    partition_dataframe(frame, tmp_path / "out", columns=columns, options=options)
    weight_of = dict(zip(rows(frame), frame["score"].tolist()))
    dataset = Dataset.open(tmp_path / "out")
    assert dataset.has_weights
    triples = named_triples(tmp_path / "out", "train")
    assert dataset.train_weights().tolist() == [weight_of[row] for row in triples]
    partition_dataframe(frame, tmp_path / "unweighted", options=options)
    assert Dataset.open(tmp_path / "unweighted").fingerprint != dataset.fingerprint
    for part_id in range(2):
        table = dataset.layout().edge_table(part_id)
        assert table.weights.tolist() == [weight_of[triples[i]] for i in table.triple_ids.tolist()]


SAID = "one set of triples, split 90/5/5 by a hash; --split 1 keeps all of them for training"
FEW = "19 triples are too few to split: all are for training"


def test_one_set_of_triples_is_split_and_splits_of_the_user_stay(tmp_path, call):
    for num, words, notes, sizes in (
        (240, "", [SAID], (216, 12, 12)),
        (240, "--split 0.6,0.2,0.2", [], (144, 48, 48)),
        (240, "--split 1", [], (240, 0, 0)),
        (19, "", [FEW], (19, 0, 0)),
    ):
        RING[:num].to_csv(tmp_path / "all.csv", index=False)
        status, out, _ = call(tmp_path / "all.csv", *words.split(), "--method", "random", "--overwrite")
        assert status == 0 and "header: head is 'head', relation is 'relation', tail is 'tail'\n" in out
        assert [line for line in out.splitlines() if line in (SAID, FEW)] == notes
        splits = [named_triples(tmp_path / "out", split) for split in ("train", "valid", "test")]
        assert sum(map(Counter, splits), Counter()) == Counter(rows(RING[:num]))
        # Five standard deviations of a binomial.
        assert [len(split) for split in splits] == pytest.approx(sizes, abs=5 * (num * 0.9 * 0.1) ** 0.5)
        assert all(bool(split) == bool(size) for split, size in zip(splits, sizes))
    figures = partition_dataframe(RING[1:], tmp_path / "two", RING[:1], options=Options(split="auto"))
    assert figures["splits"] == {"train": 239, "valid": 1, "test": 0}
    with pytest.raises(InputError, match="--split needs one set of triples, got train, test"):
        partition_dataframe(RING, tmp_path / "no", test=RING, options=Options(split=(0.8, 0.1, 0.1)))
    assert not (tmp_path / "no").exists()


COUNTS = {
    "FB15k-237": (14541, 237, 272115, 17535, 20466, 36),
    "WN18RR": (40943, 11, 86835, 3034, 3134, 384),
    "Nations": (14, 55, 1592, 199, 201, 0),
}
"""Entities, relations, train, valid, test, and entities of valid and test unseen in training."""


@pytest.mark.parametrize("name", COUNTS)
def test_counts(shared_datasets, tmp_path, call, name):
    source = shared_datasets / name
    figures = json.loads(call(source, "--num-parts", "2", "--json")[1])
    entities, relations, train, valid, test, unseen = COUNTS[name]
    assert figures["entity_types"] == {"entity": entities} and figures["num_relations"] == relations
    assert figures["splits"] == {"train": train, "valid": valid, "test": test}
    assert figures["unseen"]["valid_and_test"]["entities"] == unseen
    assert figures["duplicates"] == {"train": 0, "valid": 0, "test": 0} and figures["warnings"] == []
    assert figures["balance"]["edges"] < 1.1 and figures["balance"]["entities"] < 1.1
    with gzip.open(source / "test.tsv.gz", "rt", encoding="utf-8") as file:
        expected = [tuple(line.rstrip("\n").split("\t")) for line in file]
    assert named_triples(tmp_path / "out", "test") == expected
    assert Dataset.open(tmp_path / "out").num_entities("entity") == entities


def write(path: Path, *rows: tuple[str, ...]) -> Path:
    path.write_text("".join("\t".join(row) + "\n" for row in rows))
    return path


def flip_last_bit(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def test_flipped_bits_are_found(tmp_path):
    """In every file of a data set and of one that was extended; oracle: zlib over the whole file."""
    source = write(tmp_path / "more.tsv", ("e003", "turn_1", "e990"))
    extend.extend_dataset(Dataset.open(toy_dataset(2)).path, [source], tmp_path / "new", "more")
    dataset = Dataset.open(tmp_path / "new")
    checksums = dataset.description["checksums"]
    arrays = [f"partitions/part{part}/{name}.npy" for part in (0, 1) for name in ("edges", "triple_ids")]
    assert set(arrays) < set(checksums)
    dataset.verify()
    for name, checksum in checksums.items():
        path = dataset.path / name
        assert zlib.crc32(path.read_bytes()) == checksum
        flip_last_bit(path)
        with pytest.raises(InputError, match=re.escape(f"{path} is damaged: its CRC-32 is ")):
            dataset.verify()
        flip_last_bit(path)
    # what extend.py reads is compared too
    path = dataset.path / "partitions/part1/edges.npy"
    flip_last_bit(path)
    with pytest.raises(InputError, match="part1/edges.npy is damaged"):
        extend.extend_dataset(dataset.path, [source], tmp_path / "newer", "even more")
    shutil.rmtree(path.parent)  # a partition of another machine
    dataset.verify()


def parts_of(dataset: Dataset, type_: str) -> np.ndarray:
    return dataset.layout().part_of(type_, np.asarray(dataset.layout().node_ids(type_)))


def stored_ids(dataset: Dataset, type_: str, part: int) -> np.ndarray:
    """Return the original ids of a partition, as rows of a checkpoint's file stand."""
    layout = dataset.layout()
    return np.sort(layout.original_ids(type_)[slice(*layout.node_range(type_, part))])


@pytest.mark.parametrize("typed", [False, True])
def test_old_ids_and_partitions_stay(tmp_path, typed):
    old = Dataset.open(toy_dataset(2, typed))
    rows = [("e003", "turn_1", "e990"), ("e990", "spin", "e991"), ("e005", "turn_7", "e001")]
    if typed:
        rows = [("person3", "lives_in", "town99"), ("person90", "knows", "person1")]
        rows.append(("person3", "saw", "town1"))
    source = write(tmp_path / "more.tsv", *rows)
    extend.extend_dataset(old.path, [source], tmp_path / "new", "more")
    new = Dataset.open(tmp_path / "new")
    assert new.edge_set_names == ["train", "more"]
    for type_ in old.entity_types:
        before, after = list(old.vocabulary(type_).names), list(new.vocabulary(type_).names)
        assert after[: len(before)] == before
        parts = parts_of(old, type_)
        assert np.array_equal(parts, parts_of(new, type_)[: len(parts)])
        for part in range(2):
            # The old ones, then the new ones.
            old_ids, new_ids = (stored_ids(dataset, type_, part) for dataset in (old, new))
            assert np.array_equal(new_ids[: len(old_ids)], old_ids)
            assert (new_ids[len(old_ids) :] >= len(before)).all()
    assert new.relations.relations[: old.num_relations] == old.relations.relations
    assert new.num_relations == old.num_relations + 1
    assert sorted(named_triples(new.path, "train")) == sorted([*named_triples(old.path, "train"), *rows])
    added = new.split("train")[new.edge_set_of_triples() == 1]
    assert sorted(named(new.path, added)) == sorted(rows)
    assert named_triples(new.path, "test") == named_triples(old.path, "test")
    assert new.fingerprint != old.fingerprint
    # Every triple lies in the partition of its tail.
    owned = [new.layout().edge_table(part).triple_ids for part in range(2)]
    assert sorted(np.concatenate(owned).tolist()) == list(range(len(new.split("train"))))
    assert new.layout().num_nodes(RELATION) == new.num_relations


def test_a_new_entity_goes_where_its_neighbours_are(tmp_path):
    old = Dataset.open(toy_dataset(2))
    names = old.vocabulary("entity")
    for part in (0, 1):
        near = [names[entity] for entity in np.flatnonzero(parts_of(old, "entity") == part)[:5].tolist()]
        source = write(tmp_path / "more.tsv", *[("novum", "turn_1", entity) for entity in near])
        extend.extend_dataset(old.path, [source], tmp_path / f"new{part}", "more")
        new = Dataset.open(tmp_path / f"new{part}")
        assert parts_of(new, "entity")[new.vocabulary("entity").id("novum")] == part


def test_refusals(tmp_path):
    old = toy_dataset(2, True)
    source = write(tmp_path / "more.tsv", ("person1", "owns", "yacht1"))
    with pytest.raises(InputError, match="1 new entities have no type, the first is 'yacht1'.*--entity-t"):
        extend.extend_dataset(old, [source], tmp_path / "new", "more")
    types = write(tmp_path / "types.tsv", ("yacht1", "ship"))
    with pytest.raises(InputError, match="'yacht1' has the type 'ship', which the data set lacks"):
        extend.extend_dataset(old, [source], tmp_path / "new", "more", entity_types=types)
    with pytest.raises(InputError, match="has an edge set 'train' already"):
        extend.extend_dataset(old, [source], tmp_path / "new", "train")
    with pytest.raises(InputError, match="is the data set itself"):
        extend.extend_dataset(old, [source], old, "more", overwrite=True)
    assert not (tmp_path / "new").exists()
    types = write(tmp_path / "types.tsv", ("yacht1", "town"))
    figures = extend.extend_dataset(old, [source], tmp_path / "new", "more", entity_types=types)
    assert figures["added"] == {"edge_set": "more", "triples": 1, "entities": 1, "relations": 1, "times": 0}


def test_command_and_training_of_touched_rows(tmp_path, capsys):
    """The script, then a run from an old one: rows that the new triples lack stay bit by bit."""
    from dglkge.checkpoint.reader import open_checkpoint
    from tests.functional.job import train_alone

    old = toy_dataset()
    source = write(tmp_path / "more.tsv", ("e003", "turn_1", "e990"), ("e990", "turn_7", "e005"))
    words = ["--dataset", old, "--input", source, "--name", "more", "--output", tmp_path / "new"]
    done = run_script(*words, script="extend.py")
    assert done.returncode == 0, done.stderr
    assert "edge set more: 2 triples, 1 new entities, 0 new relations" in done.stdout
    assert extend_script.main(list(map(str, words))) == 2
    err = capsys.readouterr().err
    assert "exists" in err and err.count("\n") == 1
    common = ["model.dimension=8", "training.batch_size=50", "negatives.chunk_size=10",
              "negatives.num_uniform=10", "evaluation.split=none"]  # fmt: skip
    train_alone(*common, f"dataset={old}", f"output={tmp_path / 'a'}", "training.num_epochs=2")
    train_alone(
        *common, f"dataset={tmp_path / 'new'}", f"output={tmp_path / 'b'}", "training.num_epochs=3",
        f"checkpoint.init_path={tmp_path / 'a'}", "training.edge_sets=[more]", "training.rows=touched",
    )  # fmt: skip
    before, after = (open_checkpoint(tmp_path / name) for name in ("a", "b"))
    names = Dataset.open(tmp_path / "new").vocabulary("entity")
    moved = (before["entity"][:] != after["entity"][: len(before["entity"])]).any(1).nonzero().squeeze(1)
    assert {names[entity] for entity in moved.tolist()} == {"e003", "e005"}
    lines = (after.folder / "training_stats.json").read_text().splitlines()
    assert [json.loads(line)["stats"]["count"] for line in lines] == [2, 2, 2]


NEAR = [(f"e{i}", "above", f"e{i + 1}") for i in range(9)]
TRAIN = [*NEAR[:8], *((t, "below", h) for h, _, t in NEAR), ("e0", "likes", "e5")]
"""Nine pairs, in both directions but for (e8, above, e9)."""


def write_files(folder, **splits: list[tuple]):
    folder.mkdir()
    for name, rows in splits.items():
        # An empty line first: it is no row, but counts as a line.
        (folder / f"{name}.tsv").write_text("\n" + "".join("\t".join(row) + "\n" for row in rows))
    return folder


def test_repeated_triples_are_refused_before_anything_is_written(tmp_path, call):
    test = [("e3", "likes", "e0"), ("e0", "likes", "e5"), TRAIN[3]]
    source = write_files(tmp_path / "source", train=TRAIN, valid=[("e0", "likes", "e5")], test=test)
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
    source = write_files(tmp_path / "source", train=TRAIN, test=[("e9", "likes", "e8"), NEAR[8]])
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
    source = write_files(tmp_path / "source", train=TRAIN, valid=[TRAIN[1]], test=test)
    for which, remaining in (("exact", 2), ("implied", 1)):
        status, text, err = call(source, "--drop-leaks", which, "--strict-splits", "--overwrite")
        assert (status, err) == (0, "")
        assert f"left out as leaks: 1 of valid and {3 - remaining} of test" in text.splitlines()
        splits = [named_triples(out, split) for split in ("train", "valid", "test")]
        assert splits[1:] == [[], test[-remaining:]] and len(splits[0]) == len(TRAIN)
        leaks = Dataset.open(out).quality()["leaks"]["test"]
        assert leaks["in_train"]["triples"] == 0 and leaks["implied"]["triples"] == remaining - 1


def test_rows_of_data_frames_are_named(tmp_path, call):
    columns = ["s", "p", "o"]
    train = pd.DataFrame(TRAIN, columns=columns).assign(w=1.0)
    test = pd.DataFrame([TRAIN[8], TRAIN[4]], columns=columns).assign(w=1.0)
    options = Options(strict_splits=0.5)
    with pytest.raises(InputError, match="e.g. test: row 1: 'e1' 'below' 'e0', also train: row 9: "):
        columns = "head=s,relation=p,tail=o,weight=w"
        partition_dataframe(train, tmp_path / "out", test=test, columns=columns, options=options)
    assert list(tmp_path.iterdir()) == []
    # Rows that a hash has split have no place.
    rows = [row for i in range(30) for row in ((f"a{i}", "r", f"b{i}"), (f"b{i}", "r", f"a{i}"))]
    source = write_files(tmp_path / "source", train=rows)
    status, _, err = call(source, "--split", "0.6", "--strict-splits", "0.1")
    assert status == 2 and ", e.g. valid: 'b" in err and str(source) not in err


def test_typed_relations_count_apart(tmp_path, typed):
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
    text = "\n".join(printed({**figures, "name": "[bold]x[/bold]"}, print_figures))
    for words in ("[bold]x[/bold]: 6 entities of 2 types, 3 relations", f"edge cut: {sum(cut)} "):
        assert words in text


def printed(figures: dict, print_table: Callable = print_quality) -> list[str]:
    stream = io.StringIO()
    print_table(figures, Console(file=stream, width=100))
    return [" ".join(line.replace("│", " ").split()) for line in stream.getvalue().splitlines()]


def test_quality_is_printed(tmp_path):
    """Names that look like markup stay; of many pairs of relations the largest ten are shown."""
    test = [TRAIN[-1], NEAR[8], ("new", "likes", "e1")]
    rows = {"train": [*TRAIN, TRAIN[0]], "valid": TRAIN[1:2], "test": test}
    frames = {
        split: pd.DataFrame([(f"[b]{h}", r, f"[b]{t}") for h, r, t in triples], columns=ROLES)
        for split, triples in rows.items()
    }
    quality = partition_dataframe(frames.pop("train"), tmp_path / "out", **frames)["quality"]
    expected = """triples 19 1 3
    repeat an earlier one 1 0 0
    stand in train 1 (100.0%) 1 (33.3%)
    stand in valid 0 (0.0%)
    implied by train 1 (100.0%) 1 (33.3%)
    have a name unseen in train 0 1
    pairs of relations that share 80% or more of their triples: 1
    100.0% 9 above is the inverse of below
    relations with one training triple: 1 (likes)
    training triples of an entity: 0 to 5, median 4, mean 3.5; 1 entities have one, 1 none
    entities with most: [b]e1 5, [b]e5 5, [b]e0 4, [b]e2 4, [b]e3 4
    connected components of train: 1; the largest has 10 entities (100.0%)"""
    assert {line.strip() for line in expected.splitlines()} <= set(printed(quality))
    common = {"relations": ["a", "b"], "triples": [10, 8], "overlap": 8, "share": 0.8}
    kinds = ["inverse", "duplicate", "symmetric"] + ["duplicate"] * 8
    pairs = {"least_share": 0.8, "count": 11, "largest": [{**common, "kind": kind} for kind in kinds]}
    lines = printed({**quality, "relation_pairs": pairs})
    first = lines.index("pairs of relations that share 80% or more of their triples: 11, the largest 10")
    shown = ["80.0% 8 a is the inverse of b", "80.0% 8 a is a duplicate of b", "80.0% 8 a is symmetric"]
    assert lines[first + 1 : first + 4] == shown
    assert len([line for line in lines if line.startswith("80.0%")]) == 10
