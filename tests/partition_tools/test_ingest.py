"""Names to ids, splits by a hash, and what is read before any triple: options, files, ids and types."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dglkge.data.text_format import Columns, RowRules
from dglkge.data.triples import BLOCK_BYTES, TripleFile, frame_chunks
from dglkge.errors import InputError
from dglkge.kernels.hashing import GOLDEN_GAMMA
from dglkge.partition import make_dataset, rows
from dglkge.partition.entity_types import type_name_fault, types_of_entities
from dglkge.partition.ingest import IdMaps, IdTriples, bytes_at_a_time, ingest, table_chunks
from dglkge.partition.make_dataset import METIS_TRIPLE_BYTES, hash_triples, metis_memory, split_by_hash
from dglkge.partition.options import Options, parse_fractions
from dglkge.partition.readers.files import find_input, split_of
from dglkge.partition.readers.id_folders import read_id_map, read_pairs
from dglkge.partition.rows import distinct_below
from tests.kernels.test_hashing import MASK, reference_split_mix
from tests.partition_tools.conftest import names

ROW = st.tuples(st.sampled_from("abcde"), st.sampled_from(["r", "s"]), st.sampled_from("cdefg"))
NUM_FILES = 7


def chunks(rows: list[tuple], size: int = 1000, rules: RowRules | None = None) -> list[dict[str, pa.Array]]:
    frame = pd.DataFrame(rows, columns=["head", "relation", "tail"])
    pieces = []
    for start in range(0, len(rows), size):
        pieces += frame_chunks(frame.iloc[start : start + size], Columns(), rules or RowRules(), "train")
    return pieces


@settings(max_examples=50)
@given(
    train=st.lists(ROW, min_size=1, max_size=30),
    test=st.lists(ROW, min_size=1, max_size=9),
    size=st.integers(1, 9),
)
def test_ids_lead_back_to_the_names_and_do_not_depend_on_chunks(train, test, size):
    whole = ingest({"train": chunks(train), "test": chunks(test)})
    pieces = ingest({"train": chunks(train, size), "test": chunks(test, size)})
    assert names(whole, "train") == train and names(whole, "test") == test
    assert whole.entities == pieces.entities == sorted({x for h, _, t in train + test for x in (h, t)})
    assert whole.relations == sorted({r for _, r, _ in train + test})
    assert all(np.array_equal(whole.splits[split], pieces.splits[split]) for split in whole.splits)


def test_names_that_no_file_can_hold_are_refused():
    for row, message in (
        (("a\nb", "r", "c"), r"the entity name 'a\\nb' holds '\\n'"),
        (("a", "r\ns", "c"), r"the relation name 'r\\ns' holds '\\n'"),
        (("a", "r\ts", "c"), r"the relation name 'r\\ts' holds '\\t'"),
    ):
        with pytest.raises(InputError, match=message):
            ingest({"train": chunks([row])})
    assert ingest({"train": chunks([("a\tb", "r", "c")])}).entities == ["a\tb", "c"]


IDS = RowRules({"head": 100, "relation": 100, "tail": 100})


def test_integers_without_holes_are_their_own_ids_and_maps_of_any_length_name_them():
    triples = ingest({"train": chunks([(2, 1, 0), (1, 0, 2)], rules=IDS)}, IdMaps())
    assert triples.splits["train"].tolist() == [[2, 1, 0], [1, 0, 2]]
    assert triples.entities == ["0", "1", "2"] and triples.relations == ["0", "1"]
    triples = ingest({"train": chunks([(0, 0, 2)], rules=IDS)}, IdMaps(["a", "b", "c", "d"], ["r"]))
    assert triples.entities == ["a", "b", "c", "d"] and names(triples, "train") == [("a", "r", "c")]
    for triples, message in (
        ([(0, 0, 2), (2, 0, 2)], "1 of the entity ids 0 to 2 never occur, the first is 1: give --entity-map"),
        ([(0, 1, 1)], "the relation ids reach 1, more than there are fields"),
        ([(0, 0, 1), (1, 2, 0), (1, 2, 0)], "1 of the relation ids 0 to 2 never occur, the first is 1"),
        ([(0, 0, 99)], "the entity ids reach 99, more than there are fields"),
    ):
        with pytest.raises(InputError, match=message):
            ingest({"train": chunks(triples, rules=IDS)}, IdMaps())


def rows_of(number: int) -> list[tuple[str, str, str]]:
    # The names at the start of a block may begin with a byte order mark.
    return [(f"\ufeffe{i % 11}", f"r{i % 3}", f"e{i * number % 17}") for i in range(10, 60 + number)]


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    """Files of several kinds; the first begins with a name without a byte order mark."""
    paths = [tmp_path / f"{number}.tsv" for number in range(NUM_FILES)]
    paths[3], paths[5] = tmp_path / "3.tsv.gz", tmp_path / "5.parquet"
    for number, path in enumerate(paths):
        text = "\ufeff" + "".join("\t".join(row) + "\n" for row in rows_of(number))
        content = text.replace("\n", "\r\n" if number == 2 else "\n").encode()
        path.write_bytes(gzip.compress(content) if number == 3 else content)
    pd.DataFrame(rows_of(5), columns=["head", "relation", "tail"]).to_parquet(paths[5])
    return paths


def read(paths: Sequence[Path], num_workers: int, read_bytes: int, folder: Path | None = None) -> IdTriples:
    positions_of: dict[Path, list[int]] = {}
    files = {
        "train": [TripleFile(path, read_bytes=read_bytes) for path in paths],
        "test": [TripleFile(paths[1], read_bytes=read_bytes)],
    }
    source = table_chunks(files, lambda path, position: positions_of.setdefault(path, []).append(position))
    triples = ingest(source, folder=folder, num_workers=num_workers)
    assert {path: positions[-1] for path, positions in positions_of.items()} == {
        path: path.stat().st_size for path in paths
    }
    return triples


@pytest.mark.parametrize(
    ("num_workers", "read_bytes", "in_files"),
    [(1, 32, True), (2, 100, False), (5, 64, True), (3, BLOCK_BYTES, False)],
)
def test_rows_stay_in_the_order_of_the_files(num_workers, read_bytes, in_files, paths, tmp_path):
    (tmp_path / "here").mkdir()
    triples = read(paths, num_workers, read_bytes, tmp_path / "here" if in_files else None)
    rows = [row for number in range(NUM_FILES) for row in rows_of(number)]
    assert triples.entities == sorted({name for head, _, tail in rows for name in (head, tail)})
    assert names(triples, "train") == rows and names(triples, "test") == rows_of(1)
    assert not triples.weights and not list((tmp_path / "here").iterdir())


@pytest.mark.parametrize("num_workers", [1, 4])
def test_the_error_of_the_first_wrong_file_counts(num_workers, paths, tmp_path):
    """An error or an interrupt ends the threads; a bad line before the damage of a file counts."""
    paths[4].write_text("a\tb\tc\n" * 40 + "a\tb\n" + "a\tb\tc\n" * 40 + "a\n")
    paths[6].write_text("a\n")
    threads = threading.active_count()
    with pytest.raises(InputError, match=r"4.tsv:41: got 2 columns separated by tabs, expected 3"):
        read(paths, num_workers, 32)
    paths[2].unlink()
    with pytest.raises(InputError, match="2.tsv: there is no such file"):
        read(paths, num_workers, 32)

    def stop(_path: Path, _position: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        files = {"train": [TripleFile(paths[0], read_bytes=32)]}
        ingest(table_chunks(files, stop), num_workers=num_workers)
    assert threading.active_count() == threads
    damaged = tmp_path / "t.tsv.gz"
    content = gzip.compress(b"a\tb\tc\n" * 10 + b"a\t\tc\n" + np.random.default_rng(0).bytes(4000))
    damaged.write_bytes(content[:-2000])
    files = {"train": [TripleFile(damaged, read_bytes=16)]}
    with pytest.raises(InputError, match=r"t.tsv.gz:11: the relation is empty"):
        ingest(table_chunks(files, print), num_workers=num_workers)


def random_triples(num: int) -> IdTriples:
    rows = np.random.default_rng(0).integers(0, 500, (num, 3)).astype(np.int32)
    return IdTriples([], [], {"train": rows}, {"train": np.arange(num, dtype=np.float32)})


def test_fractions_and_a_split_that_keeps_every_triple_with_its_weight():
    texts = ("0.9,0.05,0.05", "0.8", "1", "0.5, 0.5, 0")
    expected = [(0.9, 0.05, 0.05), (0.8, 0.1, 0.1), (1, 0, 0), (0.5, 0.5, 0)]
    np.testing.assert_allclose([parse_fractions(text) for text in texts], expected)
    for text in ("", "a", "0.9,0.1", "0,0.5,0.5", "1.2,-0.1,-0.1", "nan,0,1", "2"):
        with pytest.raises(InputError, match="give one or three fractions"):
            parse_fractions(text)
    before = random_triples(20_000)
    after = split_by_hash(before, (0.8, 0.15, 0.05), seed=3)
    sizes = [len(after.splits[name]) for name in ("train", "valid", "test")]
    # five standard deviations of a binomial
    assert sizes == pytest.approx([16000, 3000, 1000], abs=5 * (20000 * 0.8 * 0.2) ** 0.5)
    weights = np.concatenate([after.weights[name] for name in after.splits])
    assert sorted(weights.tolist()) == list(range(20_000))
    rows = np.concatenate(list(after.splits.values()))
    assert np.array_equal(rows, before.splits["train"][weights.astype(int)])


def test_a_split_depends_on_the_triple_and_the_seed_alone():
    rows = random_triples(400).splits["train"]

    def split_of(seed: int, order: np.ndarray) -> set[tuple]:
        split = split_by_hash(IdTriples([], [], {"train": rows[order]}), (0.5, 0.25, 0.25), seed)
        return {(name, *row) for name, part in split.splits.items() for row in part.tolist()}

    expected = split_of(7, np.arange(400))
    assert len(expected) == len(np.unique(rows, axis=0))
    assert split_of(7, np.random.default_rng(1).permutation(400)) == expected != split_of(8, np.arange(400))
    with pytest.raises(InputError, match="no triple is left to train on out of 2"):
        split_by_hash(random_triples(2), (1e-9, 0.5, 0.5), seed=0)


def test_hash_is_splitmix64():
    rows = random_triples(20).splits["train"]
    for row, value in zip(rows.tolist(), hash_triples(rows, seed=2**40).tolist()):
        state = 2**40
        for number in row:
            state = reference_split_mix(((state ^ number) + int(GOLDEN_GAMMA)) & MASK)
        assert value == state


def test_memory_follows_the_limit() -> None:
    """METIS is refused where it does not fit; blocks are smaller where many are in memory."""
    assert metis_memory(1000, 10**9) == 1000 * METIS_TRIPLE_BYTES
    with pytest.raises(InputError, match="METIS needs .* for 100,000,000 triples, --max-memory is 1.0 GB"):
        metis_memory(10**8, 10**9)
    with pytest.raises(InputError, match="the machine's free memory is .* GB: give --method ldg or random"):
        metis_memory(10**12, None)
    cases = ((1 << 40, 8), (512 << 20, 16), (512 << 20, 4), (64 * 10**6, 64))
    assert [bytes_at_a_time(*case) for case in cases] == [BLOCK_BYTES, 1 << 20, 4 << 20, 1 << 20]
    # Few large numbers take no large array.
    assert distinct_below([np.array([[2**31 - 1], [5], [5]], np.int32)], 0).tolist() == [5, 2**31 - 1]


def content(folder: Path) -> dict[str, bytes]:
    """All files of a data set but DGL's own, which have times in them, and the log."""
    files = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix not in (".dgl", ".log")
    }
    description = json.loads(files["dataset.json"])
    checksums = description["checksums"]
    assert any(name.endswith(".dgl") for name in checksums)
    description["checksums"] = {name: crc for name, crc in checksums.items() if not name.endswith(".dgl")}
    return {**files, "dataset.json": json.dumps(description).encode()}


@pytest.mark.parametrize("typed, method", [(False, "random"), (True, "ldg")])
def test_any_limit_and_any_workers_give_the_same_files(typed, method, tmp_path, build_here, monkeypatch):
    rng = np.random.default_rng(4)
    names = [f"{kind}{i}" for kind in "ab" for i in range(40)]
    frame = pd.DataFrame({"head": rng.choice(names, 900), "relation": rng.integers(0, 6, 900)})
    frame = frame.assign(tail=rng.choice(names, 900), weight=rng.random(900).astype(np.float32))
    frame = pd.concat([frame, frame[:50]])
    frame.to_csv(tmp_path / "all.tsv", sep="\t", header=False, index=False)
    (tmp_path / "types.tsv").write_text("".join(f"{name}\t{name[0]}\n" for name in names))
    contents, columns = [], Columns(order=("head", "relation", "tail", "weight"))
    shared = {"num_parts": 2, "method": method, "columns": columns, "split": (0.8, 0.1, 0.1), "name": "same"}
    shared |= {"entity_types": tmp_path / "types.tsv"} if typed else {}
    for number, (limit, num_workers) in enumerate(((None, 1), (64 * 10**6, 3))):
        options = Options(**shared, max_memory=limit, num_workers=num_workers)
        if limit is not None:
            # As few rows at a time, and as many buckets, as a large graph would have.
            monkeypatch.setattr(rows, "ROWS_AT_A_TIME", 64)
            monkeypatch.setattr("dglkge.partition.readers.files.bytes_at_a_time", lambda *_: 512)
            monkeypatch.setattr("dglkge.partition.build_graph.PIECE_ROWS", 50)
            monkeypatch.setattr("dglkge.data.quality.INDEXED_BYTES", 64 * 10**6 // 100)
        make_dataset.partition_triples([tmp_path / "all.tsv"], tmp_path / str(number), options)
        contents.append(content(tmp_path / str(number)))
    assert sorted(contents[0]) == sorted(contents[1])
    assert [name for name, expected in contents[0].items() if contents[1][name] != expected] == []
    report = json.loads(contents[0]["partitions/report.json"])
    assert report["method"] == method and report["quality"]["duplicates"]["train"] > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "all.tsv", "types.tsv"]


def test_values_that_are_not_allowed():
    for options, message in (
        ({"method": "mets"}, "unknown partition method 'mets'; did you mean 'metis'"),
        ({"num_parts": 0}, "the number of partitions is 0, expected 1 or more"),
        ({"num_workers": 0}, "--num-workers is 0, expected 1 or more"),
        ({"seed": -1}, "the seed is -1, expected 0 to"),
        ({"strict_splits": 1.5}, "--strict-splits is 1.5, expected a share from 0 to 1"),
        ({"strict_splits": float("nan")}, "--strict-splits is nan"),
        ({"relation_map": Path("x")}, "map was given, but the ids are not said to be integers"),
        ({"entity_map": Path("/nowhere"), "integer_ids": True}, "/nowhere: there is no such file"),
        ({"drop_leaks": "exakt"}, "unknown kind of leaks to drop 'exakt'; did you mean 'exact'"),
    ):
        with pytest.raises(InputError, match=message):
            Options(**options)


def test_partitions_need_a_node_of_every_type_each(tmp_path):
    for types, nodes in (("ab", r"entities of type 'b' \(2\)"), ("a", r"there are relations \(1\)")):
        names = [f"{types[place % len(types)]}{place}" for place in range(5)]
        (tmp_path / "types.tsv").write_text("".join(f"{name}\t{name[0]}\n" for name in names))
        frame = pd.DataFrame([(name, "r", names[0]) for name in names], columns=["head", "relation", "tail"])
        with pytest.raises(InputError, match=f"3 partitions are more than .*{nodes}"):
            options = Options(num_parts=3, entity_types=tmp_path / "types.tsv")
            make_dataset.partition_dataframe(frame, tmp_path / "out", options=options)


def test_relative_and_absolute_files_go_together(tmp_path, monkeypatch):
    touch(tmp_path, "train.tsv", "valid.tsv")
    monkeypatch.chdir(tmp_path)
    source = find_input([Path("train.tsv"), tmp_path / "valid.tsv"], Options())
    assert source.line == "input: train.tsv, valid.tsv: tab-separated text (by name)"


def find_sources(inputs):
    return {split: path for split, ((path, _),) in find_input(inputs, Options()).files.items()}


def touch(folder, *names):
    paths = [folder / name for name in names]
    for path in paths:
        path.touch()
    return paths


def test_splits_by_names_of_files_and_else_by_their_order(tmp_path):
    names = {
        "train": "train.tsv TRAIN.txt.gz fb15k.train.txt",
        "valid": "valid.csv dev.tsv val.parquet wiki-validation.tsv.gz",
        "test": "freebase_mtr100-test.txt",
        None: "training_data.tsv contrain.tsv facts.tsv",
    }
    for split, files in names.items():
        assert {split_of(tmp_path / name) for name in files.split()} == {split}
    train, test, *_ = touch(tmp_path, "train.tsv.gz", "test.csv", "README.md", "entity_types.tsv", "train.md")
    assert find_sources([tmp_path]) == find_sources([test, train]) == {"train": train, "test": test}
    paths = touch(tmp_path, "a.tsv", "b.tsv", "c.tsv")
    assert list(find_sources(paths).items()) == list(zip(["train", "valid", "test"], paths))
    assert find_sources(paths[:1]) == {"train": paths[0]} and find_sources([test]) == {"train": test}


def test_wrong_inputs(tmp_path):
    cases = (
        ("train.tsv valid.tsv dev.tsv", "", "the valid split is ambiguous: .*dev.tsv"),
        ("train.tsv valid.tsv dev.tsv", "train.tsv valid.tsv dev.tsv", "the valid split is ambiguous: .*dev"),
        ("train.tsv facts.tsv", "train.tsv facts.tsv", "facts.tsv: its name does not say which"),
        ("a.tsv train.json", "", "has no file called train with one of the extensions .bin, .csv, .graphml"),
        ("", "nothing.tsv", "nothing.tsv: there is no such file or folder"),
        ("a.tsv", "a.tsv .", "takes one folder or up to three files; got the folder"),
        ("a.tsv", "a.tsv a.tsv a.tsv a.tsv", "up to three files .*, got 4"),
    )
    for number, (files, inputs, message) in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        touch(folder, *files.split())
        with pytest.raises(InputError, match=message):
            find_sources([folder / name for name in inputs.split()] or [folder])


def write_map(path, content: bytes):
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def pairs(path, content: bytes, **options) -> list[tuple[int, str, str]]:
    return list(read_pairs(write_map(path, content), ("entity", "type"), **options))


def test_pairs_and_id_maps(tmp_path):
    for name in ("m.tsv", "m.txt.gz"):
        rows = pairs(tmp_path / name, b'\xef\xbb\xbfa\tx\r\n\n b\t"y\n')
        assert rows == [(1, "a", "x"), (3, " b", '"y')]
    assert pairs(tmp_path / "m.csv", b'"a,b",x\n') == [(1, "a,b", "x")]
    assert pairs(tmp_path / "m.tsv", b"a\tx\tsome label\n", more_columns=True) == [(1, "a", "x")]
    for name, content, message in (
        ("m.tsv", b"a\tx\tsome label\n", "m.tsv:1: got 3 columns, expected entity and type"),
        ("m.tsv", b"", "m.tsv: the file is empty"),
        ("m.tsv", b"a\tx\nb\t\n", "m.tsv:2: the type is empty"),
        ("m.tsv", b"a\tx\nb\t\xff\n", "m.tsv:2: byte 3 of the line is not UTF-8"),
        ("m.csv", b'"a,x\n', "m.csv:1: bad quotes"),
    ):
        with pytest.raises(InputError, match=message):
            pairs(tmp_path / name, content)
    write_map(tmp_path / "m.tsv", b"plain").rename(tmp_path / "plain.tsv.gz")
    for name in ("plain.tsv.gz", "nothing.tsv"):
        with pytest.raises(InputError, match=f"{name}: cannot be read"):
            list(read_pairs(tmp_path / name, ("entity", "type")))
    path = tmp_path / "m.tsv"
    assert read_id_map(write_map(path, b"1\tb\n0\ta\n2\t 2\n"), "entity") == ["a", "b", " 2"]
    for content, message in (
        (b"x\ta\n", "m.tsv:1: the entity id is 'x', expected an integer from 0"),
        (b"1" * 5000 + b"\ta\n", "m.tsv:1: the entity id is '1111"),
        (b"0\ta\n0\tb\n", "m.tsv:2: the entity id 0 stands here a second time"),
        (b"0\ta\n1\ta\n", "m.tsv:2: the entity name 'a' stands here and in line 1"),
        (b"0\ta\n2\tb\n", "m.tsv: 2 entity ids reach 2, but 1 is missing"),
        (b"\n", "m.tsv: the file is empty"),
    ):
        with pytest.raises(InputError, match=message):
            read_id_map(write_map(path, content), "entity")


def types_of(folder, content: bytes | None, names: str, integer_ids: bool = False):
    path = None if content is None else write_map(folder / "types.tsv", content)
    options = Options(entity_types=path, integer_ids=integer_ids)
    types, type_of = types_of_entities(options, names.split())
    return types, type_of.tolist()


def test_types_are_sorted_and_unused_ones_left_out(tmp_path):
    """Integer ids are typed by id, whatever their names; without a file there is one type."""
    assert types_of(tmp_path, None, "a b") == (["entity"], [0, 0])
    assert types_of(tmp_path, b"a\tz\tlabel\nb\ty\nnobody\tx\nb\ty\n", "a b") == (["y", "z"], [1, 0])
    assert types_of(tmp_path, b"0\tp\n1\tq\n", "A R", integer_ids=True) == (["p", "q"], [0, 1])
    for content, entities, message in (
        (b"a\tx\n", "a b c", "types.tsv: 2 entities of the triples have no type, the first is 'b'"),
        (b"a\tx\nb\tx\na\ty\n", "a b", "types.tsv:3: entity 'a' has type 'y', a line before says 'x'"),
    ):
        with pytest.raises(InputError, match=message):
            types_of(tmp_path, content, entities)
    assert [type_name_fault(name) for name in ("entity", "Q5", "a_b", "a.b-c", "_")] == [None] * 5
    assert "is not allowed" in type_name_fault("")
    for name in ("a b", "a:b", "a/b", "ä", "a__b", "relation", "..", "a" * 101):
        with pytest.raises(InputError, match="types.tsv:2: the type .* is not allowed"):
            types_of(tmp_path, f"a\tx\nb\t{name}\n".encode(), "a b")
