"""The folder for the Hugging Face hub: tensors, a card with examples that work, dglkge as its reader."""

from __future__ import annotations

import base64
import contextlib
import http.server
import io
import json
import re
import subprocess
import threading
import zlib

import numpy as np
import pytest

from dglkge.errors import InputError
from dglkge.inference.exports.files import text_output, write_outputs
from dglkge.inference.run import open_run
from tests import warm
from tests.functional.job import environment

RESULT = {
    "protocol": {"split": "test", "filtering": "filtered", "candidates": "all", "ties": "realistic"},
    "ties": {"realistic": {"both": {}}, "pessimistic": {"both": {}}},
    "both": {
        "mr": 3.5,
        "mrr": 0.61,
        "hits@1": 0.5,
        "hits@3": 0.7,
        "hits@10": 0.9,
        "auc": 0.9,
        "num_queries": 28,
    },
}


@pytest.fixture
def hub(folder, tmp_path):
    """The folder of a run with three results, one of them of another version."""
    raw = {**RESULT, "protocol": {**RESULT["protocol"], "filtering": "raw"}, "num_triples": 14, "version": 1}
    (folder / "metrics.json").write_text(json.dumps({"test": RESULT}))
    (folder / "metrics-test-raw.json").write_text(json.dumps(raw))
    old = {**raw, "protocol": {**raw["protocol"], "ties": "optimistic"}, "version": 0}
    (folder / "metrics-test-raw-optimistic.json").write_text(json.dumps(old))
    open_run(folder).export("huggingface", tmp_path / "hub")
    return tmp_path / "hub"


def test_tensors_and_names(hub, folder):
    safetensors = pytest.importorskip("safetensors", reason="needs safetensors")
    run = open_run(folder)
    with safetensors.safe_open(hub / "model.safetensors", framework="numpy") as file:
        assert sorted(file.keys()) == sorted(run.tables_in_order)
        assert file.metadata() == {"format": "pt"}
        for table in run.tables_in_order:
            assert np.array_equal(file.get_tensor(table), run.tables[table][:].numpy())
    assert (hub / "town.names.txt").read_text().splitlines() == list(run.tables.vocabulary("town").names)
    labels = (hub / "relation.names.txt").read_text(encoding="utf-8").splitlines()
    assert labels == list(run.tables.relations.labels.names)


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


def test_dglkge_reads_the_folder_like_the_run(hub, folder, dataset):
    run, copy = open_run(folder), open_run(hub, str(dataset.path))
    columns = ["entity", "known_from"]
    original, other = (model.predict_tails("person3", "near (person → town)", k=10) for model in (run, copy))
    assert original[columns].equals(other[columns]) and original["known_from"].notna().any()
    assert np.allclose(original["score"], other["score"], rtol=1e-5)
    near = [model.similar("town1") for model in (run, copy)]
    assert near[0]["entity"].equals(near[1]["entity"])
    assert np.allclose(near[0]["cosine"], near[1]["cosine"], atol=1e-6)
    assert run.evaluate("test").to_dict() == copy.evaluate("test").to_dict()
    with pytest.raises(InputError, match="hub does not say where its dataset .* is; say it with --dataset"):
        open_run(hub).evaluate("test")
    with pytest.raises(
        InputError, match="written by dglkge checkpoint export --format huggingface and is no checkpoint"
    ):
        copy.inspect()


def test_export_of_the_folder_is_the_same_folder(hub, tmp_path):
    open_run(hub).export("huggingface", tmp_path / "again")
    assert {path.name for path in hub.iterdir()} == {path.name for path in (tmp_path / "again").iterdir()}
    for path in hub.iterdir():
        if path.name != "README.md":  # only a run has metrics
            assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()
    assert "Not measured." in (tmp_path / "again/README.md").read_text()


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
        (
            "model.safetensors",
            lambda text: text.replace(b"[40,", b"[20,", 1),
            "has shape .*, config.json says",
        ),
    ],
)
def test_damage(hub, name, change, words):
    path = hub / name
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(InputError, match=words):
        open_run(hub).similar("town1", entity_type="town")


class Hub(http.server.BaseHTTPRequestHandler):
    """The part of the hub's interface that uploads and downloads of one revision need; in memory."""

    files: dict[str, bytes] = {}
    requested: list[str] = []
    protocol_version = "HTTP/1.1"

    def _answer(self, content: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.requested.append(self.path)
        answer: dict = {"url": f"http://{self.headers['Host']}/me/graph"}
        if "/preupload/" in self.path:
            paths = [file["path"] for file in json.loads(body)["files"]]
            answer = {
                "files": [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in paths]
            }
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            answer = {"commitUrl": f"{answer['url']}/commit/{REVISION}", "commitOid": REVISION}
        self._answer(json.dumps(answer).encode())

    def do_GET(self) -> None:
        self.requested.append(self.path)
        if self.path.startswith("/api/models/me/graph/tree/"):
            tree = [
                {"type": "file", "path": name, "size": len(content), "oid": "0"}
                for name, content in self.files.items()
            ]
            self._answer(json.dumps(tree).encode())
        elif self.path.startswith("/api/models/me/graph/"):
            siblings = [{"rfilename": name} for name in self.files]
            self._answer(json.dumps({"id": "me/graph", "sha": REVISION, "siblings": siblings}).encode())
        elif self.path.startswith(f"/me/graph/resolve/{REVISION}/"):
            content = self.files[self.path.rpartition("/")[2]]
            self._answer(content, ETag=f'"{zlib.crc32(content):x}"', X_Repo_Commit=REVISION)
        else:
            self._answer(b'{"error": "Repository not found"}', 404, X_Error_Code="RepoNotFound")

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        """Print nothing."""


REVISION = "5" * 40


def test_pushed_to_the_hub_and_opened_there(folder, tmp_path):
    """In a process of its own: huggingface_hub reads the hub's address when it is imported."""
    pytest.importorskip("huggingface_hub")
    pytest.importorskip("safetensors")
    script = f"""
import dglkge
run = dglkge.open_run({str(folder)!r})
print(run.push_to_hub("me/graph"))
there = dglkge.open_run("hf://me/graph")
assert (there.tables["town"][:] == run.tables["town"][:]).all()
print(there.predict_tails("person1", "lives_in", k=1, known="keep")["entity"][0])
try:
    dglkge.open_run("hf://me/other")
except dglkge.InputError as error:
    print(error)
"""
    python = [*warm.python(), "-c"]  # first: what it starts is in the environment then
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        env = environment() | {
            "HF_ENDPOINT": address,
            "HF_HOME": str(tmp_path / "home"),
            "HF_TOKEN": "hf_test",
        }
        done = subprocess.run([*python, script], capture_output=True, text=True, timeout=120, env=env)
        server.shutdown()
    assert done.returncode == 0, done.stderr
    commit, answer, refusal = done.stdout.splitlines()
    assert commit == f"{address}/me/graph/commit/{REVISION}"
    expected = open_run(folder).predict_tails("person1", "lives_in", 1, "keep")["entity"].tolist()
    assert [answer] == expected and refusal.startswith("hf://me/other: ") and "404" in refusal
    assert {"README.md", "config.json", "model.safetensors", "town.names.txt"} <= set(Hub.files)
    assert "/api/repos/create" in Hub.requested
    script = f"""
import dglkge
run = dglkge.open_run({str(folder)!r})
for task in (lambda: run.push_to_hub("me/graph"), lambda: run.push_to_hub("a b"), lambda: dglkge.open_run("hf://me/x")):
    try:
        task()
    except dglkge.InputError as error:
        print(error)
"""
    done = subprocess.run([*python, script], capture_output=True, text=True, timeout=120, env=env)
    network, name, both = done.stdout.splitlines()  # the server is gone
    assert done.returncode == 0 and "push_to_hub me/graph: " in network and "refused" in network
    assert "push_to_hub a b: " in name and "hf://me/x: " in both
