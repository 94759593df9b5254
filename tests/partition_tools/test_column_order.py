"""Columns in a wrong order: the public graphs and small ones, as names and as integers."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pandas as pd
import pytest

from dglkge.data.text_format import Columns, RowRules, parse_columns
from dglkge.data.triples import frame_chunks
from dglkge.partition.ingest import column_order_advice, ingest
from tests.toy_kg import ring_triples


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


def public(folder) -> pd.DataFrame:
    frame = pd.read_csv(folder / "test.tsv.gz", sep="\t", header=None, dtype=str, keep_default_na=False)
    return frame.set_axis(["head", "relation", "tail"], axis=1)


@pytest.mark.parametrize(
    "name, kind", [("FB15k-237", "names"), ("WN18RR", "integers"), ("CoDEx-S", "names"), ("UMLS", "integers")]
)
def test_public_graphs(shared_datasets, name, kind):
    frame = public(shared_datasets / name)
    frame = frame if kind == "names" else as_integers(frame)
    # Head and tail may change places: nothing tells them apart.
    assert advice(frame, "hrt") is None and advice(frame, "trh") is None
    for order, right in (("htr", "head,relation,tail"), ("rht", "head,relation,tail"), ("thr", "")):
        line = advice(frame, order)
        assert line.endswith(f"give --columns {right}" if right else "tail,relation,head")


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


def write(path, frame: pd.DataFrame, order: str):
    columns = [{"h": "head", "r": "relation", "t": "tail"}[letter] for letter in order]
    path.write_bytes(gzip.compress(frame[columns].to_csv(sep="\t", index=False, header=False).encode()))
    return path


def test_command_warns_in_one_line(tmp_path, build_here, call, caplog):
    path = write(tmp_path / "train.tsv.gz", as_integers(ring_triples()), "htr")
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
    path = write(tmp_path / "train.tsv.gz", frame, "htr")
    status, out, err = call(path, "--ids", "integers")
    assert (status, out) == (2, "") and err.startswith(
        "partition.py: error: 39 of the relation ids 0 to 78 never occur, the first is 1: give --relation-map"
    )
    assert err.endswith(
        "or --ids names if these are names; the columns look as if they were in another order: 80 heads, "
        "40 relations, 3 tails; if what was read as tail is the relation, give --columns head,tail,relation\n"
    )
    write(path, as_integers(ring_triples()).replace({"relation": {"1": "9"}}), "hrt")
    status, _, err = call(path, "--ids", "integers")
    assert status == 2 and err.endswith("or --ids names if these are names\n")
    # With maps, an entity's id is too large for a relation.
    path = write(tmp_path / "train.tsv.gz", as_integers(ring_triples()), "htr")
    for name, count in (("entities", 60), ("relations", 4)):
        (tmp_path / f"{name}.tsv").write_text("".join(f"{i}\t{name}{i}\n" for i in range(count)))
    maps = ["--entity-map", tmp_path / "entities.tsv", "--relation-map", tmp_path / "relations.tsv"]
    fault = f"{path}:4: the relation id is 4, allowed is 0 to 3; it could be an entity's: see --columns"
    status, out, err = call(path, *maps)
    assert (status, out) == (2, "") and err.startswith(f"partition.py: error: {fault}")
