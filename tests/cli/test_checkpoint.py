"""``dglkge checkpoint``: inspect, verify, conversions there and back, and exports."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dglkge.checkpoint.reader import open_checkpoint
from dglkge.typing import RELATION
from tests.checkpoint.toy_checkpoint import flip


def test_inspect_verify_and_checksums_of_what_is_read(run, dataset, shown, report, refusal):
    out = shown("inspect", run, "--verify")
    progress = "finished_epochs 2, batches_done 17, global_batch_size 100"
    for words in ("version 1", progress, "complex, dimension 6, reciprocal relations", "all 26 files are as"):
        assert words in out
    rows = [line.split()[:5] for line in out.splitlines()]
    assert ["person", "40", "6", "2", "sum"] in rows and ["relation", "5", "12", "1", "sum"] in rows
    inspection = report("inspect", run / "checkpoint")
    assert (inspection["version"], inspection["verified"], inspection["seed"]) == (1, False, 3)
    assert inspection["dataset"]["fingerprint"] == dataset.fingerprint
    num_rows = {table["name"]: table["num_rows"] for table in inspection["tables"]}
    assert num_rows == {"country": 3, "person": 40, "town": 10, "relation": 5}
    files = (run / "checkpoint" / "v1").glob("*.h5")
    assert inspection["size_bytes"] == sum(path.stat().st_size for path in files)
    assert "all 26 files are as they were written" in shown("checkpoint", "verify", run)
    path = run / "checkpoint" / "v1" / "embeddings_town_1.v1.h5"
    row = open_checkpoint(run).shards("town")[1].rows[2].numpy().tobytes()
    place = path.read_bytes().index(row)
    flip(path, place)  # the lowest bit of a number, which no reader can see
    line = refusal("evaluate", run, "--json")
    assert "embeddings_town_1.v1.h5 is damaged: its checksum is not the one in the manifest" in line
    assert not list(run.glob("metrics*"))
    assert np.isfinite(report("evaluate", run, "--no-verify")["both"]["mrr"])
    flip(path, place)
    flip(run / "checkpoint" / "v1" / "model.v1.h5", -1)
    shown("inspect", run)
    for words in (["verify", run], ["inspect", run, "--verify"]):
        assert "model.v1.h5 is damaged: its checksum is not the one in" in refusal("checkpoint", *words)


@pytest.mark.parametrize("kind", ["npy", "parquet", "safetensors", "tsv", "word2vec"])
def test_there_and_back(run, dataset, tmp_path, shown, refusal, kind):
    shown("checkpoint", "convert", run, "--to", kind, "--output", tmp_path / kind)
    words = ["checkpoint", "convert", tmp_path / kind, "--to", "run", "--from", kind, "--reciprocal"]
    words += ["--dataset", dataset.path, "--score-function"]
    back = [*words, "complex", "--output"]
    shown(*back, tmp_path / "back")
    original, again = open_checkpoint(run), open_checkpoint(tmp_path / "back")
    for table in [*original.entity_types, RELATION]:
        assert again[table][:].numpy().tobytes() == original[table][:].numpy().tobytes()
    assert again.meta.dataset_fingerprint == original.meta.dataset_fingerprint
    assert "holds a checkpoint already" in refusal(*back, tmp_path / "back")
    if kind in ("npy", "parquet", "safetensors"):
        path = tmp_path / kind / f"town.{kind}"
        path.write_bytes(path.read_bytes()[:20])
        line = refusal(*back, tmp_path / "out")
        assert path.name in line and ("as an npy file" if kind == "npy" else "damaged") in line
    if kind == "tsv":  # the rows of complex, taken as those of another algebra
        back = [*words, "keci", "--score-option", "p=1", "--output"]
        shown(*back, tmp_path / "keci", "--score-option", "q=1")
        assert "keci, dimension 6, p 1, q 1, reciprocal relations" in shown("inspect", tmp_path / "keci")
        line = refusal(*back, tmp_path / "other", "--score-option", "q=2")
        assert "the dimension must be a multiple of 4 (1 + p + q), got 6" in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("convert --to run", "--to run needs --dataset"),
        ("convert --to npy --from npy", "--from goes with --to run, got --to npy"),
        ("convert --to run DATA --reciprocal", "--reciprocal goes with --from"),
        ("convert --to npy --score-option p=1", "--score-option goes with --from"),
        ("convert --to run --from npy DATA --score-option p=x", "'p=x' is not of the form NAME=NUMBER"),
        ("convert --to dglke", "rotate, rescal, simple, transr_l1 of one entity type, no reciprocal"),
        ("convert --to run --from npy DATA --score-function complex", "expected one file"),
        ("convert --to run DATA --overwrite", "--to run replaces no run: take another --output"),
        ("export --format npy --max-rows 5", "--max-rows goes with --format projector, got --format npy"),
        ("export --format huggingface --table town", "whole models: the table 'country' is left out"),
        ("export --format parquet --table towns", "unknown table 'towns'; did you mean 'town'"),
    ],
)
def test_mistakes(run, dataset, tmp_path, refusal, arguments, words):
    command, *options = arguments.replace("DATA", f"--dataset {dataset.path}").split()
    assert words in refusal("checkpoint", command, run, *options, "--output", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_exported_files_are_listed_and_replaced_if_allowed(shown, report, refusal, run, tmp_path):
    out = tmp_path / "out"
    words = ["export", run, "--output", out, "--format"]
    lines = shown(*words, "npy", "--table", "town").splitlines()[1:]
    assert [line.split()[0] for line in lines] == [str(out / name) for name in ("town.npy", "town.names.txt")]
    assert np.array_equal(np.load(out / "town.npy"), open_checkpoint(run)["town"][:].numpy())
    shown(*words, "projector")
    before = {path: path.read_bytes() for path in out.iterdir()}
    line = refusal(*words, "projector", "--max-rows", "3")
    assert "exists; give --overwrite to replace it, or take another folder" in line
    assert before == {path: path.read_bytes() for path in out.iterdir()}
    shown(*words, "projector", "--max-rows", "3", "--overwrite")
    assert len((out / "person.tensors.tsv").read_text().splitlines()) == 3
    files = [entry["path"].rsplit("/", 1)[1] for entry in report(*words, "tsv")]
    assert files == ["country.tsv", "person.tsv", "town.tsv", "relation.tsv"]
    pytest.importorskip("lancedb", reason="needs lancedb")
    for entry in report(*words, "lancedb"):
        sizes = [path.stat().st_size for path in Path(entry["path"]).rglob("*") if path.is_file()]
        assert entry["size_bytes"] == sum(sizes) > 0
