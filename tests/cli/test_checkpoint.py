"""``dglkge checkpoint``: inspect, verify, and conversions there and back."""

from __future__ import annotations

import json

import numpy as np
import pytest

from dglkge.checkpoint import open_checkpoint
from dglkge.cli.main import main
from dglkge.data.dataset import Dataset
from dglkge.typing import RELATION
from tests.checkpoint.toy_checkpoint import save_toy_named, toy_meta, toy_tables
from tests.toy_kg import toy_dataset


def call(capsys, *arguments):
    status = main(["checkpoint", *map(str, arguments)])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_inspect_and_verify(run, capsys):
    status, out, _ = call(capsys, "inspect", run, "--json")
    assert status == 0 and json.loads(out)["verified"] is False
    status, out, _ = call(capsys, "verify", run)
    assert status == 0 and "all 26 files are as they were written" in out
    path = run / "checkpoint" / "v1" / "model.v1.h5"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert call(capsys, "inspect", run)[0] == 0
    for words in (["verify", run], ["inspect", run, "--verify"]):
        status, _, err = call(capsys, *words)
        assert status == 2 and "model.v1.h5 is damaged: its checksum is not the one in the manifest" in err


@pytest.mark.parametrize("kind", ["npy", "parquet", "safetensors", "word2vec"])
def test_there_and_back(run, dataset, tmp_path, capsys, kind):
    """Every table, relations of the same name among them, bit for bit."""
    assert call(capsys, "convert", run, "--to", kind, "--output", tmp_path / "files")[0] == 0
    back = ["--from", kind, "--score-function", "complex", "--reciprocal", "--dataset", dataset.path]
    status, out, err = call(
        capsys, "convert", tmp_path / "files", *back, "--to", "run", "--output", tmp_path / "back"
    )
    assert status == 0, err
    ours, again = open_checkpoint(run), open_checkpoint(tmp_path / "back")
    for table in [*ours.entity_types, RELATION]:
        wanted = np.nan_to_num(ours[table][:].numpy())
        assert np.nan_to_num(again[table][:].numpy()).tobytes() == wanted.tobytes()
    assert again.meta.dataset_fingerprint == ours.meta.dataset_fingerprint
    status, _, err = call(
        capsys, "convert", tmp_path / "files", *back, "--to", "run", "--output", tmp_path / "back"
    )
    assert status == 2 and "holds a checkpoint already" in err


def test_options_of_a_score_function(run, dataset, tmp_path, capsys):
    """Rows of complex are those of keci with p = 0 and q = 1; here they are taken as another algebra's."""
    assert call(capsys, "convert", run, "--to", "npy", "--output", tmp_path / "files")[0] == 0
    back = ["--from", "npy", "--score-function", "keci", "--reciprocal", "--dataset", dataset.path]
    back += ["--score-option", "p=1", "--score-option", "q=1", "--to", "run", "--output", tmp_path / "back"]
    status, _, err = call(capsys, "convert", tmp_path / "files", *back)
    assert status == 0, err
    assert open_checkpoint(tmp_path / "back").meta.score_options == {"p": 1, "q": 1}
    status, out, _ = call(capsys, "inspect", tmp_path / "back")
    assert status == 0 and "keci, dimension 6, p 1, q 1, reciprocal relations" in out
    back[-1], back[back.index("p=1")] = tmp_path / "other", "p=2"
    status, _, err = call(capsys, "convert", tmp_path / "files", *back)
    assert status == 2 and "the dimension must be a multiple of 4 (1 + p + q), got 6" in err


def test_dglke_there_and_back(tmp_path, capsys):
    ring = Dataset.open(toy_dataset())
    meta = toy_meta(
        "distmult",
        ring.relations.relations,
        reciprocal=False,
        entity_types={"entity": ring.num_entities("entity")},
        dataset_name="ring",
        dataset_fingerprint=ring.fingerprint,
    )
    tables = toy_tables(meta)
    save_toy_named(tmp_path / "run" / "checkpoint", meta, tables, {"entity": ring.vocabulary("entity")}, 2)
    files = tmp_path / "files"
    assert call(capsys, "convert", tmp_path / "run", "--to", "dglke", "--output", files)[0] == 0
    rows = np.load(files / "ring_DistMult_entity.npy")
    assert rows.tobytes() == tables["entity"].rows.numpy().tobytes()
    for path in files.glob("*.tsv"):
        path.unlink()  # without id maps rows are in the order of ids
    (files / "config.json").unlink()
    back = ["--from", "dglke", "--score-function", "distmult", "--dataset", ring.path, "--to", "run"]
    status, _, err = call(capsys, "convert", files, *back, "--output", tmp_path / "back")
    assert status == 0, err
    again = open_checkpoint(tmp_path / "back")
    assert again[RELATION][:].numpy().tobytes() == tables[RELATION].rows.numpy().tobytes()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--to", "run"], "--to run needs --dataset"),
        (["--to", "npy", "--from", "npy"], "--from goes with --to run, got --to npy"),
        (["--to", "npy", "--reciprocal"], "--reciprocal goes with --from"),
        (["--to", "run", "--dataset", "DATASET", "--reciprocal"], "--reciprocal goes with --from"),
        (["--to", "npy", "--score-function", "complex"], "--score-function goes with --from"),
        (["--to", "npy", "--score-option", "p=1"], "--score-option goes with --from"),
        (
            ["--to", "run", "--from", "npy", "--dataset", "DATASET", "--score-option", "p=x"],
            "--score-option 'p=x' is not of the form NAME=NUMBER, e.g. p=1",
        ),
        (
            ["--to", "dglke"],
            "DGL-KE has transe_l1, transe_l2, distmult, complex, rotate, rescal, simple, transr_l1 of one "
            "entity type, no reciprocal",
        ),
        (["--to", "run", "--from", "npy", "--dataset", "DATASET"], "--from needs --score-function"),
        (
            ["--to", "run", "--from", "npy", "--dataset", "DATASET", "--score-function", "complex"],
            "expected one file",
        ),
    ],
)
def test_mistakes(run, dataset, tmp_path, capsys, arguments, words):
    given = [dataset.path if word == "DATASET" else word for word in arguments]
    status, _, err = call(capsys, "convert", run, *given, "--output", tmp_path / "out")
    assert status == 2 and words in err
    assert not (tmp_path / "out").exists()


def test_damaged_files_are_refused(run, dataset, tmp_path, capsys):
    for kind, name in (("npy", "town.npy"), ("safetensors", "town.safetensors"), ("parquet", "town.parquet")):
        files = tmp_path / kind
        assert call(capsys, "convert", run, "--to", kind, "--output", files)[0] == 0
        (files / name).write_bytes((files / name).read_bytes()[:20])
        back = ["--from", kind, "--score-function", "complex", "--reciprocal", "--dataset", dataset.path]
        status, _, err = call(capsys, "convert", files, *back, "--to", "run", "--output", tmp_path / "out")
        assert status == 2 and name in err and "damaged" in err
