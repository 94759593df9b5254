"""``dglkge checkpoint export``: its help, its list of files, and its refusals."""

from __future__ import annotations

import numpy as np
import pytest

from dglkge.checkpoint import open_checkpoint
from dglkge.inference.exports.export import FORMATS, PROJECTOR_ROWS


def test_help_names_every_format_and_the_default_sample(call, capsys):
    with pytest.raises(SystemExit):
        call("export", "--help")
    text = capsys.readouterr().out
    for name in FORMATS:
        assert f"\n  {name} " in text
    assert f"default: {PROJECTOR_ROWS}" in text and "model.reciprocal_relations=false" in text


def test_files_are_listed(shown, report, run, tmp_path):
    words = ["export", run, "--output", tmp_path / "out", "--format"]
    lines = shown(*words, "npy", "--table", "town").splitlines()[1:]
    names = [str(tmp_path / "out" / name) for name in ("town.npy", "town.names.txt")]
    assert [line.split()[0] for line in lines] == names
    assert np.array_equal(np.load(tmp_path / "out/town.npy"), open_checkpoint(run)["town"][:].numpy())
    files = [entry["path"].rsplit("/", 1)[1] for entry in report(*words, "tsv")]
    assert files == ["country.tsv", "person.tsv", "town.tsv", "relation.tsv"]


def test_folders_are_listed_with_their_sizes(report, run, tmp_path):
    pytest.importorskip("lancedb", reason="needs lancedb")
    for entry in report("export", run, "--format", "lancedb", "--output", tmp_path / "out"):
        files = [path for path in (tmp_path / "out").rglob("*") if str(path).startswith(entry["path"] + "/")]
        assert entry["size_bytes"] == sum(path.stat().st_size for path in files if path.is_file()) > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("npy --max-rows 5", "--max-rows goes with --format projector, got --format npy"),
        ("npy --metric l2", "--metric goes with --format faiss or qdrant, got --format npy"),
        ("projector --max-rows 0", "--max-rows must be at least 1, got 0"),
        ("huggingface --table town", "holds whole models: the table 'country' is left out"),
        ("dglke", "reciprocal True; train with model.reciprocal_relations=false for it"),
        ("parquet --table towns", "unknown table 'towns'; did you mean 'town'"),
    ],
)
def test_mistakes_write_nothing(refusal, run, tmp_path, arguments, words):
    out = tmp_path / "out"
    assert (
        words in refusal("export", run, "--output", out, "--format", *arguments.split()) and not out.exists()
    )


def test_what_exists_is_replaced_with_the_flag_that_the_refusal_names(shown, refusal, run, tmp_path):
    def files():
        return {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}

    words = ["export", run, "--format", "projector", "--output", tmp_path]
    shown(*words)
    before = files()
    assert "exists; give --overwrite to replace it, or take another folder" in refusal(
        *words, "--max-rows", "3"
    )
    assert before == files()
    shown(*words, "--max-rows", "3", "--overwrite")
    assert len((tmp_path / "person.tensors.tsv").read_text().splitlines()) == 3
