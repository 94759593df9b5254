"""``dglkge checkpoint``: inspect, verify, and conversions there and back."""

from __future__ import annotations

import numpy as np
import pytest

from dglkge.checkpoint import open_checkpoint
from dglkge.typing import RELATION


def test_inspect_and_verify(run, dataset, shown, report, refusal):
    out = shown("inspect", run, "--verify")
    for words in (
        "version 1",
        "finished_epochs 2, batches_done 17, global_batch_size 100",
        "complex, dimension 6, reciprocal relations",
        "all 26 files are as they were written",
    ):
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
    path = run / "checkpoint" / "v1" / "model.v1.h5"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    shown("inspect", run)
    for words in (["verify", run], ["inspect", run, "--verify"]):
        assert "model.v1.h5 is damaged: its checksum is not the one in" in refusal("checkpoint", *words)


@pytest.fixture
def convert(shown, run, tmp_path, dataset):
    """Write the rows of the run in a format; return the words that make a run of them."""

    def write(kind, score_function="complex"):
        shown("checkpoint", "convert", run, "--to", kind, "--output", tmp_path / kind)
        words = ["checkpoint", "convert", tmp_path / kind, "--to", "run", "--dataset", dataset.path]
        return [*words, "--from", kind, "--score-function", score_function, "--reciprocal", "--output"]

    return write


@pytest.mark.parametrize("kind", ["npy", "parquet", "safetensors", "tsv", "word2vec"])
def test_there_and_back(run, convert, tmp_path, shown, refusal, kind):
    """Every table, relations of the same name among them, bit for bit."""
    back = [*convert(kind), tmp_path / "back"]
    shown(*back)
    original, again = open_checkpoint(run), open_checkpoint(tmp_path / "back")
    for table in [*original.entity_types, RELATION]:
        assert again[table][:].numpy().tobytes() == original[table][:].numpy().tobytes()
    assert again.meta.dataset_fingerprint == original.meta.dataset_fingerprint
    assert "holds a checkpoint already" in refusal(*back)


def test_options_of_a_score_function(convert, tmp_path, shown, refusal):
    """Rows of complex are those of keci with p = 0 and q = 1; here they are taken as another algebra's."""
    back = convert("npy", "keci")
    shown(*back, tmp_path / "back", "--score-option", "p=1", "--score-option", "q=1")
    assert open_checkpoint(tmp_path / "back").meta.score_options == {"p": 1, "q": 1}
    assert "keci, dimension 6, p 1, q 1, reciprocal relations" in shown("inspect", tmp_path / "back")
    line = refusal(*back, tmp_path / "other", "--score-option", "p=2", "--score-option", "q=1")
    assert "the dimension must be a multiple of 4 (1 + p + q), got 6" in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--to run", "--to run needs --dataset"),
        ("--to npy --from npy", "--from goes with --to run, got --to npy"),
        ("--to run --dataset DATASET --reciprocal", "--reciprocal goes with --from"),
        ("--to npy --score-function complex", "--score-function goes with --from"),
        ("--to npy --score-option p=1", "--score-option goes with --from"),
        (
            "--to run --from npy --dataset DATASET --score-option p=x",
            "--score-option 'p=x' is not of the form NAME=NUMBER, e.g. p=1",
        ),
        ("--to dglke", "rotate, rescal, simple, transr_l1 of one entity type, no reciprocal"),
        ("--to run --from npy --dataset DATASET", "--from needs --score-function"),
        ("--to run --from npy --dataset DATASET --score-function complex", "expected one file"),
        (
            "--to run --dataset DATASET --overwrite",
            "--overwrite goes with the formats of --to; --to run replaces no run: take another --output",
        ),
    ],
)
def test_mistakes(run, dataset, tmp_path, refusal, arguments, words):
    words_given = [dataset.path if word == "DATASET" else word for word in arguments.split()]
    assert words in refusal("checkpoint", "convert", run, *words_given, "--output", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["npy", "safetensors", "parquet"])
def test_damaged_files_are_refused(convert, tmp_path, refusal, kind):
    back = convert(kind)
    path = tmp_path / kind / f"town.{kind}"
    path.write_bytes(path.read_bytes()[:20])
    line = refusal(*back, tmp_path / "out")
    assert path.name in line and "damaged" in line


def test_evaluate_compares_what_it_reads_with_its_checksums(run, refusal, report):
    path = run / "checkpoint" / "v1" / "embeddings_town_1.v1.h5"
    content = bytearray(path.read_bytes())
    place = content.index(open_checkpoint(run).shards("town")[1].rows[2].numpy().tobytes())
    content[place] ^= 1  # the lowest bit of a number, which no reader can see
    path.write_bytes(content)
    line = refusal("evaluate", run, "--json")
    assert "embeddings_town_1.v1.h5 is damaged: its checksum is not the one in the manifest" in line
    assert not list(run.glob("metrics*"))
    assert np.isfinite(report("evaluate", run, "--no-verify")["both"]["mrr"])
