"""The command: what it prints, its exit status, one line for bad input, advice on the order of columns."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from dglkge.data.dataset import Dataset
from dglkge.data.dataset_files import PARTITION_LOG
from dglkge.data.text_format import Columns, RowRules, parse_columns
from dglkge.data.triples import frame_chunks
from dglkge.partition.ingest import column_order_advice, ingest
from tests.partition_tools.conftest import run_script
from tests.toy_kg import ring_triples, write_splits

ROLES = ["head", "relation", "tail"]


@pytest.fixture
def source(tmp_path) -> Path:
    return write_splits(tmp_path / "source", ring_triples())


def test_table_and_json_and_metis_repeats_itself(tmp_path, source):
    """In two runs, each from another folder; METIS alone would not give the same partitions twice."""
    words = ["--input", source, "--num-parts", 3]
    done = run_script(*words, "--output", tmp_path / "table", copied=False, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")  # no progress
    input_line, first, *_, last = done.stdout.splitlines()
    assert input_line == "input: train.tsv, valid.tsv, test.tsv: tab-separated text (by name)"
    assert first == "table: 60 entities, 4 relations"
    assert last == f"the dataset lies in {tmp_path / 'table'}"
    assert "METIS" not in done.stdout and "peak mem" not in done.stdout
    partitions = tmp_path / "table" / "partitions"
    assert "peak mem" in (partitions / PARTITION_LOG).read_text()
    assert Dataset.open(tmp_path / "table").num_parts == 3

    words += ["--name", "ring", "--json", "--progress"]
    done = run_script(*words, "--output", tmp_path / "json", copied=False)
    assert done.returncode == 0, done.stderr
    assert "reading" in done.stderr and "partitioning into 3 (metis)" in done.stderr
    figures = json.loads(done.stdout)
    assert figures == json.loads((tmp_path / "json" / "partitions" / "report.json").read_text())
    assert figures["name"] == "ring" and len(figures["parts"]) == 3
    assert 0 < figures["edge_cut"]["fraction"] < 1
    for name in ("original_ids_entity.npy", "original_ids_relation.npy", "part1/edges.npy"):
        twice = [np.load(tmp_path / output / "partitions" / name) for output in ("table", "json")]
        assert np.array_equal(*twice)


def test_every_kind_of_input_gives_the_same_dataset(tmp_path, source, build_here, call):
    """Every file but the report, which names the input; also in pieces, and ids with the names of a map."""
    splits = {
        split: pd.read_csv(source / f"{split}.tsv", sep="\t", header=None, names=ROLES)
        for split in ("train", "valid", "test")
    }
    triples = pd.concat(splits.values())
    entities, relations = sorted({*triples["head"], *triples["tail"]}), sorted({*triples["relation"]})
    ids, maps = {}, []
    for kind, names in (("entity", entities), ("relation", relations)):
        ids |= {name: place for place, name in enumerate(names)}
        (tmp_path / f"{kind}.map").write_text("".join(f"{ids[name]}\t{name}\n" for name in names))
        maps += [f"--{kind}-map", str(tmp_path / f"{kind}.map")]
    kinds = {
        "plain.tsv.gz": [],
        "edges.csv": [],
        "rht.tsv.bz2": ["--columns", "rht"],
        "named.parquet": ["--columns", "head=s,relation=p,tail=o"],
        "ids.tsv": maps,
        "blocks.tsv": ["--max-memory", "64MB", "--num-workers", "3"],
    }
    contents = []
    for number, (name, words) in enumerate(kinds.items()):
        kind, _, suffix = name.partition(".")
        (tmp_path / kind).mkdir()
        for split, frame in splits.items():
            path = tmp_path / kind / f"{split}.{suffix}"
            if kind == "named":
                frame.set_axis(["s", "p", "o"], axis=1)[["p", "o", "s"]].to_parquet(path)
            elif kind == "edges":
                frame.to_csv(path, index=False, header=["Source", "Type", "Target"])
            else:
                table = frame.replace(ids) if kind == "ids" else frame
                table = table[["relation", "head", "tail"]] if kind == "rht" else table
                table.to_csv(path, sep="\t", index=False, header=False)
        out = tmp_path / f"{number}.out"
        common = ("--name", "same", "--num-parts", "2", "--method", "ldg")
        status, _, err = call(tmp_path / kind, "--output", out, *common, *words)
        assert status == 0, err
        arrays = [path for path in sorted(out.rglob("*")) if path.suffix in (".npy", ".tsv", ".txt")]
        contents.append({path.relative_to(out): path.read_bytes() for path in arrays})
    assert len(contents[0]) > 10 and all(content == contents[0] for content in contents)


def test_bad_input_is_one_line_and_status_2(tmp_path, call):
    for name, content, options, message in (
        ("split.tsv", b"a\tb\tc\n", "--split 0.5,0.6,0.1", "the fractions add up to 1.2, not 1"),
        ("bad.csv", b"a,b,c\n", "--columns h,r", "--columns 'h,r' does not give head, relation and tail"),
        ("ids.tsv", b"0\t0\t0\n", "--entity-map x --ids names", "--ids names excludes --entity-map"),
        ("kind.json", b'{"a": ["b", "c"]}\n', "", "kind.json: unknown kind of file, by its name and by its"),
    ):
        path = tmp_path / name
        path.write_bytes(content)
        status, out, err = call(path, *options.split())
        assert (status, out) == (2, "")
        assert err.startswith("partition.py: error: ") and err.count("\n") == 1 and message in err
        assert not (tmp_path / "out").exists() and not (tmp_path / ".out.partial").exists()


def advice(frame: pd.DataFrame, order: str) -> str | None:
    """Read a frame whose columns stand in the right order as if they stood in another."""
    columns = parse_columns(order)
    frame = frame.set_axis(list(columns.order), axis=1)
    triples = ingest({"train": frame_chunks(frame, Columns(), RowRules(), "train")})
    return column_order_advice(triples.splits, columns, triples.entities, triples.relations)


def as_integers(frame: pd.DataFrame) -> pd.DataFrame:
    """Number entities and relations from 0, each in the order of names."""
    number = {name: str(i) for i, name in enumerate(sorted({*frame["head"], *frame["tail"]}))}
    number |= {name: str(i) for i, name in enumerate(sorted(set(frame["relation"])))}
    return frame.apply(lambda column: column.map(number))


def graph(heads, relations, tails, num_triples: int = 2000) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    columns = {"head": heads, "relation": relations, "tail": tails}
    return pd.DataFrame({role: rng.choice(names, num_triples) for role, names in columns.items()})


def test_unusual_graphs_in_the_right_order():
    users, items = [f"user{i}" for i in range(300)], [f"item{i}" for i in range(300)]
    actions = [f"action{i}" for i in range(12)]
    graphs = {
        "two kinds of entities": graph(users, actions, items),
        "attributes": graph(users, actions, ["yes", "no"]),
        "few heads": graph(["Rome", "Paris"], [f"property{i}" for i in range(40)], items),
        # Relations that are described, as in RDF.
        "described": pd.concat([graph(users, actions, items), graph(actions, ["label", "comment"], items)]),
        "one relation": graph(users, ["likes"], users),
        "tiny": graph(["a", "b"], actions[:9], ["a", "b"]),
    }
    assert {name: advice(frame, "hrt") for name, frame in graphs.items()} == dict.fromkeys(graphs)
    assert advice(graphs["two kinds of entities"], "htr") and advice(graphs["two kinds of entities"], "rht")


def write_columns(path, frame: pd.DataFrame, order: str):
    columns = [{"h": "head", "r": "relation", "t": "tail"}[letter] for letter in order]
    path.write_bytes(gzip.compress(frame[columns].to_csv(sep="\t", index=False, header=False).encode()))
    return path


def test_command_warns_in_one_line(tmp_path, build_here, call, caplog):
    path = write_columns(tmp_path / "train.tsv.gz", as_integers(ring_triples()), "htr")
    status, out, _ = call(path, "--json")
    (record,) = caplog.records
    assert status == 0 and json.loads(out)["warnings"] == [record.getMessage()] == [
        "the columns look as if they were in another order: 60 heads, 60 relations, 4 tails; if what was "
        "read as tail is the relation, give --columns head,tail,relation"
    ]
    caplog.clear()
    assert call(path, "--columns", "head,tail,relation", "--overwrite")[0] == 0 and not caplog.records
    # Columns with names are mended by name.
    ring_triples().set_axis(["s", "p", "o"], axis=1).to_parquet(tmp_path / "train.parquet")
    words = ["--columns", "head=p,relation=s,tail=o", "--json", "--overwrite"]
    (warning,) = json.loads(call(tmp_path / "train.parquet", *words)[1])["warnings"]
    assert warning.endswith("give --columns relation=p,head=s,tail=o")


def test_ids_that_cannot_be_are_explained(tmp_path, call):
    """Tails read as relations leave gaps: the advice goes with the error."""
    rows = [(i, (7 * i) % 40 * 2, i % 3) for i in range(80)]
    frame = pd.DataFrame(rows, columns=["head", "tail", "relation"])
    path = write_columns(tmp_path / "train.tsv.gz", frame, "htr")
    status, out, err = call(path, "--ids", "integers")
    assert (status, out) == (2, "") and err.startswith(
        "partition.py: error: 39 of the relation ids 0 to 78 never occur, the first is 1: give --relation-map"
    )
    assert err.endswith(
        "or --ids names if these are names; the columns look as if they were in another order: 80 heads, "
        "40 relations, 3 tails; if what was read as tail is the relation, give --columns head,tail,relation\n"
    )
    # With maps, an entity's id is too large for a relation.
    path = write_columns(tmp_path / "train.tsv.gz", as_integers(ring_triples()), "htr")
    for name, count in (("entities", 60), ("relations", 4)):
        (tmp_path / f"{name}.tsv").write_text("".join(f"{i}\t{name}{i}\n" for i in range(count)))
    maps = ["--entity-map", tmp_path / "entities.tsv", "--relation-map", tmp_path / "relations.tsv"]
    fault = f"{path}:4: the relation id is 4, allowed is 0 to 3; it could be an entity's: see --columns"
    status, out, err = call(path, *maps)
    assert (status, out) == (2, "") and err.startswith(f"partition.py: error: {fault}")
