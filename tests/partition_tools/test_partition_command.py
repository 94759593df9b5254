"""The command itself: what it prints, its exit status, one line for each bad input."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from dglkge.data.dataset import Dataset
from dglkge.data.dataset_files import GRAPH_JOB, PARTITION_LOG
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
    assert (done.returncode, done.stderr) == (0, "")
    input_line, first, *_, last = done.stdout.splitlines()
    assert input_line == "input: train.tsv, valid.tsv, test.tsv: tab-separated text (by name)"
    assert first == "table: 60 entities, 4 relations"
    assert last == f"the dataset lies in {tmp_path / 'table'}"
    assert "METIS" not in done.stdout and "peak mem" not in done.stdout
    partitions = tmp_path / "table" / "partitions"
    assert "peak mem" in (partitions / PARTITION_LOG).read_text() and not (partitions / GRAPH_JOB).exists()
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


def write(folder: Path, name: str, content: bytes) -> str:
    (folder / name).write_bytes(content)
    return str(folder / name)


def test_bad_input_is_one_line_and_status_2(tmp_path, call):
    for name, content, options, message in (
        ("split.tsv", b"a\tb\tc\n", "--split 0.5,0.6,0.1", "the fractions add up to 1.2, not 1"),
        ("bad.csv", b"a,b,c\n", "--columns h,r", "--columns 'h,r' does not give head, relation and tail"),
        ("ids.tsv", b"0\t0\t0\n", "--entity-map x --ids names", "--ids names excludes --entity-map"),
        ("kind.json", b'{"a": ["b", "c"]}\n', "", "kind.json: unknown kind of file, by its name and by its"),
    ):
        path = write(tmp_path, name, content)
        status, out, err = call(path, *options.split())
        assert (status, out) == (2, "")
        assert err.startswith("partition.py: error: ") and err.count("\n") == 1 and message in err
        assert not (tmp_path / "out").exists() and not (tmp_path / ".out.partial").exists()


def test_status_as_a_process(tmp_path):
    """In plain Python: nothing but the script imports what it needs."""
    path = write(tmp_path, "t.tsv", b"a\tb\n")
    done = run_script("--input", path, "--output", tmp_path / "out", python=[sys.executable])
    assert done.returncode == 2 and done.stdout == ""
    fault = f"{path}:1: got 2 columns separated by tabs, expected 3: 'a\\tb'"
    assert done.stderr == f"partition.py: error: {fault}\n"
