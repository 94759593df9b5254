"""The folder for the Hugging Face hub: tensors, a card with examples that work, dglkge as its reader."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import re
import shutil
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from dglkge.errors import InputError
from dglkge.inference.exports.files import text_output, write_outputs
from dglkge.inference.run import open_run

HITS = {"hits@1": 0.5, "hits@3": 0.7, "hits@10": 0.9}
RESULT = {
    "protocol": {"split": "test", "filtering": "filtered", "candidates": "all", "ties": "realistic"},
    "ties": {"realistic": {"both": {}}, "pessimistic": {"both": {}}},
    "both": {"mr": 3.5, "mrr": 0.61, **HITS, "auc": 0.9, "num_queries": 28},
}


@pytest.fixture
def hub(folder, tmp_path):
    raw = {**RESULT, "protocol": {**RESULT["protocol"], "filtering": "raw"}, "num_triples": 14, "version": 1}
    (folder / "metrics.json").write_text(json.dumps({"test": RESULT}))
    (folder / "metrics-test-raw.json").write_text(json.dumps(raw))
    old = {**raw, "protocol": {**raw["protocol"], "ties": "optimistic"}, "version": 0}
    (folder / "metrics-test-raw-optimistic.json").write_text(json.dumps(old))
    open_run(folder).export("huggingface", tmp_path / "hub")
    return tmp_path / "hub"


def test_card_is_one_of_the_hub(hub):
    huggingface_hub = pytest.importorskip("huggingface_hub", reason="needs huggingface_hub")
    card = huggingface_hub.ModelCard.load(hub / "README.md")
    assert card.data.library_name == "dglkge" and "link-prediction" in card.data.tags
    results = card.data.eval_results
    metrics = {(result.metric_name, result.metric_value) for result in results if result.metric_type == "mrr"}
    assert metrics == {
        ("mrr (test, filtered, all candidates, realistic ties)", 0.61),
        ("mrr (test, raw, all candidates, realistic ties, 14 triples)", 0.61),
    }
    assert {(result.task_type, result.dataset_split) for result in results} == {("link-prediction", "test")}
    assert "| test, filtered, all candidates, realistic ties | 3.5000 | 0.6100 | 0.5000 |" in card.text
    assert "optimistic" not in card.text


def test_examples_of_the_card_work(hub, folder, monkeypatch):
    pytest.importorskip("safetensors", reason="needs safetensors")
    run = open_run(folder)
    card = (hub / "README.md").read_text(encoding="utf-8")
    examples = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    assert len(examples) == 2
    monkeypatch.chdir(hub)
    printed = []
    for example in examples:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(example, {})
        printed.append(out.getvalue())
    head, relation = re.search(r"predict_tails\('(.+?)', '(.+?)'", examples[0]).groups()
    assert printed[0].strip() == str(run.predict_tails(head, relation, k=5, known="keep")).strip()
    near = run.similar(head, 4)
    lines = [line.split(" ") for line in printed[1].splitlines()]
    assert [line[0] for line in lines] == [head, *near["entity"]]
    assert np.allclose([float(line[1]) for line in lines[1:]], near["cosine"], atol=1e-6)


def test_dglkge_reads_the_folder_like_the_run(hub, run, dataset):
    copy, columns = open_run(hub, str(dataset.path)), ["entity", "known_from"]
    original, other = (model.predict_tails("person3", "near (person → town)", k=10) for model in (run, copy))
    assert original[columns].equals(other[columns]) and original["known_from"].notna().any()
    assert np.allclose(original["score"], other["score"], rtol=1e-5)
    assert run.evaluate("test").to_dict() == copy.evaluate("test").to_dict()
    assert list(copy.tables.relations.labels.names) == list(run.tables.relations.labels.names)
    with pytest.raises(InputError, match="hub does not say where its dataset .* is; say it with --dataset"):
        open_run(hub).evaluate("test")
    words = "written by dglkge checkpoint export --format huggingface and is no checkpoint"
    with pytest.raises(InputError, match=words):
        copy.inspect()


def test_export_of_the_folder_is_the_same_folder(hub, tmp_path):
    safe_open = pytest.importorskip("safetensors", reason="needs safetensors").safe_open
    with safe_open(hub / "model.safetensors", framework="numpy") as file:
        assert file.metadata() == {"format": "pt"}
    open_run(hub).export("huggingface", tmp_path / "again")
    again = {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()}
    files = {path.name: path.read_bytes() for path in hub.iterdir()}
    card = again.pop("README.md")  # only a run has metrics
    assert files.pop("README.md") != card and b"Not measured." in card and files == again


def test_paths_and_modules_stay_here(folder, tmp_path, hub):
    config = json.loads((hub / "config.json").read_text())
    assert str(folder) not in json.dumps(config) and "dataset_path" not in config
    config["training"]["imports"] = ["os.path", str(tmp_path / "evil.py")]
    (hub / "config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    open_run(hub).predict_tails("person3", "knows")
    assert not (tmp_path / "ran").exists()


def test_names_lead_out_of_no_folder(hub, tmp_path):
    """Neither at reading nor at export: names of entity types and data sets are parts of file names."""
    config = json.loads((hub / "config.json").read_text())
    types = {f"../{name}": count for name, count in config["entity_types"].items()}
    (hub / "config.json").write_text(json.dumps({**config, "entity_types": types}))
    with pytest.raises(InputError, match=r"config.json is damaged: '../\w+' is no name of an entity type"):
        open_run(hub)
    (tmp_path / "out").mkdir()
    output = text_output("../evil_entity.npy", "")
    with pytest.raises(InputError, match=r"would write '../evil_\S+', which is no file name in"):
        write_outputs([output], tmp_path / "out", overwrite=True)
    assert not (tmp_path / "evil_entity.npy").exists()


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("config.json", lambda text: text.replace(b'"score_function"', b'"score"'), "damaged: KeyError"),
        ("town.names.txt", lambda text: text[:-1], "names.txt is cut off"),
        ("town.names.txt", lambda text: text + b"x\n", "town.names.txt has 11 names, expected 10"),
        ("model.safetensors", lambda text: text[:200], "model.safetensors is damaged or has no tensor"),
        ("model.safetensors", lambda text: text.replace(b"[40,", b"[20,", 1), "has shape .*, config.json sa"),
    ],
)
def test_damage(hub, name, change, words):
    path = hub / name
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(InputError, match=words):
        open_run(hub).similar("town1", entity_type="town")


def test_pushed_to_the_hub_and_opened_there(run, tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub", reason="needs huggingface_hub")
    pytest.importorskip("safetensors", reason="needs safetensors")
    httpx, errors = importlib.import_module("httpx"), importlib.import_module("huggingface_hub.errors")
    refused = httpx.Response(404, request=httpx.Request("GET", "https://hub"))

    def upload_folder(repo_id, folder_path):
        shutil.copytree(folder_path, tmp_path / repo_id)
        return SimpleNamespace(commit_url=f"https://hub/{repo_id}/commit/5")

    def snapshot_download(repo_id, revision):
        if not (tmp_path / repo_id).exists():
            raise errors.RepositoryNotFoundError("404 Client Error.\nNot found", response=refused)
        return tmp_path / repo_id if revision in (None, "v1") else None

    with pytest.raises(InputError, match="^push_to_hub a b: Repo id must"):
        run.push_to_hub("a b")
    answers = {"create_repo": None, "upload_folder": upload_folder, "snapshot_download": snapshot_download}
    for name, answer in answers.items():  # with the arguments that the client's functions have
        monkeypatch.setattr(hub, name, mock.create_autospec(getattr(hub, name), side_effect=answer))
    assert run.push_to_hub("me/graph") == "https://hub/me/graph/commit/5"
    hub.create_repo.assert_called_once_with("me/graph", private=True, exist_ok=True)
    for url in ("hf://me/graph", "hf://me/graph@v1"):
        assert (open_run(url).tables["town"][:] == run.tables["town"][:]).all()
    with pytest.raises(InputError, match="^hf://me/other: 404 Client Error. Not found"):
        open_run("hf://me/other")
    hub.create_repo.side_effect = httpx.ConnectError("Connection refused")
    with pytest.raises(InputError, match="^push_to_hub me/graph: Connection refused"):
        run.push_to_hub("me/graph")
