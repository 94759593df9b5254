"""``dglkge checkpoint export``: formats, refusals and JSON; and the names of ``dglkge evaluate``'s files."""

from __future__ import annotations

import json

import pytest

from dglkge.errors import InputError
from dglkge.inference.export import FORMATS
from dglkge.inference.export_vectors import PROJECTOR_ROWS
from dglkge.inference.run import open_run


def test_help_names_every_format_and_the_default_sample(call, capsys):
    with pytest.raises(SystemExit):
        call("export", "--help")
    text = capsys.readouterr().out
    for name in FORMATS:
        assert f"\n  {name} " in text
    assert f"default: {PROJECTOR_ROWS}" in text
    assert "model.reciprocal_relations=false" in text


def test_files_and_folders_are_listed_with_their_sizes(call, run, tmp_path):
    pytest.importorskip("lancedb", reason="needs lancedb")
    status, out, err = call("export", run, "--format", "lancedb", "--output", tmp_path / "out", "--json")
    assert (status, err) == (0, "")
    for entry in json.loads(out):
        files = [path for path in (tmp_path / "out").rglob("*") if str(path).startswith(entry["path"] + "/")]
        assert entry["size_bytes"] == sum(path.stat().st_size for path in files if path.is_file()) > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["npy", "--max-rows", "5"], "--max-rows goes with --format projector, got --format npy"),
        (["npy", "--metric", "l2"], "--metric goes with --format faiss, got --format npy"),
        (["projector", "--max-rows", "0"], "--max-rows must be at least 1, got 0"),
        (["huggingface", "--table", "town"], "holds whole models: the table 'country' is left out"),
        (["dglke"], "reciprocal True; train with model.reciprocal_relations=false for it"),
        (["parquet", "--table", "towns"], "unknown table 'towns'; did you mean 'town'"),
    ],
)
def test_mistakes_are_one_line_and_write_nothing(call, run, tmp_path, arguments, words):
    out = tmp_path / "out"
    status, shown, err = call("export", run, "--output", out, "--format", *arguments)
    assert (status, shown, err.count("\n")) == (2, "", 1)
    assert words in err and not out.exists()


def test_what_exists_is_replaced_with_the_flag_that_the_refusal_names(call, run, tmp_path):
    arguments = ["export", run, "--format", "projector", "--output", tmp_path]
    assert call(*arguments)[0] == 0
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    status, _, err = call(*arguments, "--max-rows", "3")
    assert (status, err.count("\n")) == (2, 1)
    assert "exists; give --overwrite to replace it, or take another folder" in err
    assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    assert call(*arguments, "--max-rows", "3", "--overwrite")[0] == 0
    assert len((tmp_path / "person.tensors.tsv").read_text().splitlines()) == 3


def test_a_run_is_not_replaced_and_the_option_is_not_ignored(call, run, dataset, tmp_path):
    arguments = ["checkpoint", "convert", run, "--to", "run", "--dataset", dataset.path]
    status, _, err = call(*arguments, "--output", tmp_path / "new", "--overwrite")
    assert status == 2 and not (tmp_path / "new").exists()
    assert "--overwrite goes with the formats of --to; --to run replaces no run: take another --output" in err


def test_results_of_other_protocols_have_files_of_their_own(call, run):
    """None of them replaces another; those of a training job, in the older layout too, stand beside them."""
    old = {"test": {"protocol": {"split": "test"}, "both": {"mrr": 0.5}}}
    (run / "metrics.json").write_text(json.dumps(old))
    options = [
        [],
        ["--raw"],
        ["--limit", "5"],
        ["--candidates", "4"],
        ["--candidates", "4", "--seed", "3", "--raw"],
        ["--ties", "pessimistic", "--split", "valid"],
    ]
    reports = [json.loads(call("evaluate", run, *one, "--json")[1]) for one in options]
    names = [
        "metrics-test.json",
        "metrics-test-raw.json",
        "metrics-test-first5.json",
        "metrics-test-sampled4-seed0.json",
        "metrics-test-raw-sampled4-seed3.json",
        "metrics-valid-pessimistic.json",
    ]
    assert sorted(path.name for path in run.glob("metrics*")) == sorted([*names, "metrics.json"])
    results = open_run(run).results
    assert results == {**dict(zip(names, reports)), "metrics.json: test": old["test"]}
    assert [results[name]["num_triples"] for name in names] == [14, 14, 5, 14, 14, 14]
    assert open_run(run).metrics == old


@pytest.mark.parametrize("content", ["{", "[1]"])
def test_a_damaged_metrics_file_is_named(run, content):
    (run / "metrics-test.json").write_text(content)
    with pytest.raises(InputError, match="metrics-test.json (is cut off|holds list)"):
        assert open_run(run).results
