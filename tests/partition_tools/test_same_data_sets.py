"""Data sets stay as they are, byte for byte: digests of what earlier versions made of the same input.

A digest covers all files but DGL's own, which have times in them, and the log. After a change of format that
is meant, print the new digests: ``python -m tests.partition_tools.test_same_data_sets``.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from dglkge.data.text_format import parse_columns
from dglkge.partition.make_dataset import partition_files
from dglkge.partition.options import Options, ReadingOptions

Row = tuple[str, str, str]
NAMES = [
    f"http://example.org/{kind}/{'aé語'[i % 3]}{i}" for i in range(60) for kind in ("thing", "resource/of")
]
NAMES += [*map(str, range(30)), *("x" * length for length in range(1, 25)), "\ufeffbom", "a b", "NA", "null"]

CASES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "tsv": (["tsv"], {}),
    "random": (["tsv"], {"num_parts": 2, "method": "random", "seed": 3}),
    "ldg": (["tsv"], {"num_parts": 3, "method": "ldg"}),
    "gzip": (["gz"], {"num_parts": 2, "method": "random"}),
    "bzip2": (["bz2"], {}),
    "csv": (["csv"], {}),
    "parquet": (["parquet"], {"num_parts": 2, "method": "ldg"}),
    "weights": (["weights"], {"columns": "hrtw", "num_parts": 2, "method": "random"}),
    "weights of types": (["weights"], {"columns": "hrtw", "types": True, "num_parts": 2, "method": "random"}),
    "types": (["tsv"], {"types": True, "num_parts": 3, "method": "ldg"}),
    "integers": (["integers"], {"integer_ids": True, "num_parts": 2, "method": "random"}),
    "id maps": (["integers"], {"integer_ids": True, "maps": True}),
    "split": (
        ["one.tsv", "two.tsv.gz", "three.tsv"],
        {"split": (0.8, 0.1, 0.1), "num_parts": 2, "method": "ldg"},
    ),
    "columns": (["tsv"], {"columns": "rht"}),
    "no last end": (["end.tsv"], {}),
    "implied": (["tsv"], {"drop_leaks": "implied"}),
    "exact": (["tsv"], {"drop_leaks": "exact", "max_memory": 64 * 10**6}),
    "types from": (["tsv"], {"reading": ReadingOptions(types_from="r3")}),
}

EXPECTED: dict[str, str] = {
    "tsv": "ab474996d5040c6a",
    "random": "854ef56803fd0240",
    "ldg": "bcdcd5f9d73a8091",
    "gzip": "a39e84b812c8efdb",
    "bzip2": "3a67bd4e80811b1f",
    "csv": "7eed6c2f7ffd3675",
    "parquet": "fd9cbf46e5e0cf03",
    "weights": "9d454003600187a5",
    "weights of types": "4d9dfb450dded713",
    "types": "117bd9d4e2516aa8",
    "integers": "cda7f727233e90d8",
    "id maps": "e8551ad411a4cceb",
    "split": "bace0b320d9a4987",
    "columns": "85b841aead5ce288",
    "no last end": "3bfc2378ca0086d1",
    "implied": "bd1380cbf52d2990",
    "exact": "bd1380cbf52d2990",
    "types from": "894136907f38a86e",
}


def rows(num: int, seed: int) -> list[Row]:
    """Triples with loops, duplicates, a symmetric relation and two that are inverse to each other."""
    rng = random.Random(seed)
    found: list[Row] = []
    for _ in range(num):
        head, tail = rng.choice(NAMES), rng.choice(NAMES)
        relation = rng.choice([*(f"r{i}" for i in range(9)), "equals", "part of"])
        found.append((head, relation, tail))
        if relation == "equals" and rng.random() < 0.95:
            found.append((tail, relation, head))
        if relation == "part of" and rng.random() < 0.95:
            found.append((tail, "has part", head))
        if rng.random() < 0.05:
            found.append(found[-1])
        if rng.random() < 0.03:
            found.append((head, "r1", head))
    return found


def text(some: list[Row], weights: bool = False) -> bytes:
    lines = ["\t".join(row) + (f"\t{i * 37 % 100 / 8}" if weights else "") for i, row in enumerate(some)]
    return "".join(line + "\n" for line in lines).encode()


def write_inputs(folder: Path) -> None:
    """Write the inputs of all cases."""
    train, valid, test = rows(900, 1), rows(60, 2), rows(70, 3)
    valid += train[:10]
    test += [(tail, relation, head) for head, relation, tail in train[20:40]]
    test += [*valid[:3], ("only in test", "rt", "only in test 2")]
    splits = {"train": train, "valid": valid, "test": test}
    every = [row for some in splits.values() for row in some]
    entities = {name: i for i, name in enumerate(sorted({name for h, _, t in every for name in (h, t)}))}
    relations = {name: i for i, name in enumerate(sorted({relation for _, relation, _ in every}))}
    for kind in ("tsv", "gz", "bz2", "csv", "parquet", "weights", "integers"):
        (folder / kind).mkdir()
    for split, some in splits.items():
        (folder / "tsv" / f"{split}.tsv").write_bytes(text(some))
        (folder / "gz" / f"{split}.tsv.gz").write_bytes(gzip.compress(text(some)))
        (folder / "bz2" / f"{split}.txt.bz2").write_bytes(bz2.compress(text(some).replace(b"\n", b"\r\n")))
        (folder / "weights" / f"{split}.tsv").write_bytes(text(some, weights=True))
        ids = [(str(entities[h]), str(relations[r]), str(entities[t])) for h, r, t in some]
        (folder / "integers" / f"{split}.tsv").write_bytes(text(ids))
        frame = pd.DataFrame(some, columns=["Source", "Type", "Target"])
        frame.to_csv(folder / "csv" / f"{split}.csv", index=False)
        frame.columns = ["head", "relation", "tail"]
        frame.to_parquet(folder / "parquet" / f"{split}.parquet")
    (folder / "one.tsv").write_bytes(text(train[:400]))
    (folder / "two.tsv.gz").write_bytes(gzip.compress(text(train[400:600])))
    (folder / "three.tsv").write_bytes(text(train[600:]))
    (folder / "end.tsv").write_bytes(text(train) + b"\n\nx\tr1\txx")
    for name, ids_of in (("entities", entities), ("relations", relations)):
        (folder / f"{name}.map").write_text("".join(f"{id_}\t{key}\n" for key, id_ in ids_of.items()))
    (folder / "types").write_text("".join(f"{name}\t{'ab'[id_ % 2]}\n" for name, id_ in entities.items()))


def options_of(folder: Path, case: str, **more: Any) -> Options:
    given = {**CASES[case][1], **more}
    if "columns" in given:
        given["columns"] = parse_columns(given["columns"])
    if given.pop("types", False):
        given["entity_types"] = folder / "types"
    if given.pop("maps", False):
        given |= {"entity_map": folder / "entities.map", "relation_map": folder / "relations.map"}
    return Options(**given, name="same", progress=False)


def digest(dataset: Path, folder: Path) -> str:
    """Return a digest of a data set; paths of the inputs and the version do not count."""
    found = hashlib.sha256()
    for path in sorted(dataset.rglob("*")):
        if path.is_dir() or path.suffix in (".dgl", ".log"):
            continue
        content = path.read_bytes()
        if path.suffix == ".json":
            fields = json.loads(content)
            fields.pop("created_by", None)
            fields.pop("checksums", None)  # also of DGL's own files, which have times in them
            content = json.dumps(fields).replace(str(folder), "").encode()
        found.update(f"{path.relative_to(dataset)}:{len(content)}\n".encode() + content)
    return found.hexdigest()[:16]


@pytest.mark.parametrize("case", CASES)
def test_a_data_set_is_as_it_was(case: str, tmp_path: Path, build_here: None) -> None:
    write_inputs(tmp_path)
    inputs = [tmp_path / name for name in CASES[case][0]]
    partition_files(inputs, tmp_path / "out", options_of(tmp_path, case, num_workers=2))
    assert digest(tmp_path / "out", tmp_path) == EXPECTED[case]


def main() -> None:
    """Print the digests."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder)
        for case, (names, _) in CASES.items():
            output = folder / "out" / case
            partition_files([folder / one for one in names], output, options_of(folder, case))
            print(f'    "{case}": "{digest(output, folder)}",', flush=True)


if __name__ == "__main__":
    main()
