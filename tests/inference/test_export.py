"""Exported files, each read back by its own program, and the folder for the Hugging Face hub."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import re
import shutil
from functools import partial
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from dglkge.checkpoint.reader import open_checkpoint
from dglkge.data.vocabulary import Vocabulary
from dglkge.errors import InputError, StorageError
from dglkge.inference.exports import export, import_tables
from dglkge.inference.exports import files as export_files
from dglkge.inference.exports.export import export_tables
from dglkge.inference.exports.files import text_output, write_outputs
from dglkge.inference.run import open_run
from dglkge.model.score_functions import SCORE_FUNCTIONS
from dglkge.typing import RELATION, Side
from tests.checkpoint.toy_checkpoint import TWO_PAIRS, save_toy, toy_meta, toy_tables

TABLES = ["person", "film", RELATION]


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A checkpoint of three parts, exported a few rows at a time."""
    monkeypatch.setattr(export_files, "ROWS_AT_A_TIME", 3)
    meta = toy_meta(relations=TWO_PAIRS)
    tables = toy_tables(meta)
    save_toy(tmp_path / "run", meta, tables, 3)
    return open_checkpoint(tmp_path / "run"), tables


def test_files_have_the_forms_of_their_programs(toy, tmp_path):
    """Special values too: in text, NaN and minus zero keep their meaning, not their bits."""
    checkpoint, tables = toy
    for file_format, ends in (("npy", ["npy", "names.txt"]), ("tsv", ["tsv"]), ("word2vec", ["vec"])):
        written = export_tables(checkpoint, TABLES, file_format, tmp_path, overwrite=False)
        assert [path.name for path in written] == [f"{table}.{end}" for table in TABLES for end in ends]
    labels = ["likes (person → person)", "made", "likes (person → film)"]
    for table, names in (("film", [f"film-{id_}" for id_ in range(5)]), (RELATION, labels)):
        rows = tables[table].rows.numpy()
        assert np.load(tmp_path / f"{table}.npy").tobytes() == rows.tobytes()
        texts = [tmp_path / f"{table}{end}" for end in (".names.txt", ".tsv", ".vec")]
        listed, tsv, word2vec = (path.read_text(encoding="utf-8").splitlines() for path in texts)
        assert word2vec.pop(0) == f"{len(rows)} {rows.shape[1]}"
        split = [[line.split("\t") for line in tsv], [line.split(" ") for line in word2vec]]
        assert listed == [words[0] for words in split[0]] == names
        assert [words[0] for words in split[1]] == [name.replace(" ", "_") for name in names]
        for lines in split:
            numbers = np.array([words[1:] for words in lines], np.float64).astype(np.float32)
            assert np.array_equal(numbers, rows, equal_nan=True)


def test_a_failure_leaves_no_file(toy, tmp_path, monkeypatch):
    checkpoint, _ = toy

    export_tables(checkpoint, ["person"], "tsv", tmp_path / "out", overwrite=False)
    before = (tmp_path / "out/person.tsv").read_bytes()
    written = partial(export._write_text, "\t")

    def full_at_the_film(table, file):
        if table.name == "film":
            raise OSError(28, "No space left on device")
        written(table, file)

    monkeypatch.setitem(export.FORMATS, "tsv", (export_files.each_table(".tsv", full_at_the_film), ""))
    with pytest.raises(StorageError, match="^cannot write to .*out: No space left on device"):
        export_tables(checkpoint, ["person", "film"], "tsv", tmp_path / "out", overwrite=True)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["person.tsv"]
    (tmp_path / "out" / ".person.tsv.tmp").write_text("what no export can remove")
    with pytest.raises(StorageError, match=r"^cannot make .*out/\.person\.tsv\.tmp: File exists"):
        export_tables(checkpoint, ["person"], "tsv", tmp_path / "out", overwrite=True)
    assert (tmp_path / "out/person.tsv").read_bytes() == before


def named(tmp_path, names, **changes):
    meta = toy_meta(num_people=len(names), **changes)
    vocabularies = {"person": Vocabulary(names, "entity")}
    save_toy(tmp_path / "run", meta, toy_tables(meta), 1, vocabularies)
    return open_checkpoint(tmp_path / "run")


@pytest.mark.parametrize(
    ("file_format", "name", "words"),
    [
        ("tsv", "a\tb", r"name 'a\\tb' of table 'person' has a tab, .* in the format tsv; parquet"),
        ("projector", "a\tb", "has a tab, which separates fields or lines in the format projector"),
        ("npy", "a\rb", "has a carriage return, which separates fields or lines in the format npy"),
        ("huggingface", "a\rb", "has a carriage return"),
        ("word2vec", "x y", "'x y' of table 'person' becomes 'x_y' in the format word2vec, as another"),
        ("np", "b", "unknown format 'np'; did you mean 'npy'"),
    ],
)
def test_what_could_not_be_read_back_is_refused(tmp_path, file_format, name, words):
    checkpoint = named(tmp_path, ["x_y", name, "c"], score_function="distmult", reciprocal=False)
    with pytest.raises(InputError, match=words):
        export_tables(checkpoint, ["person", RELATION], file_format, tmp_path / "out", overwrite=False)
    assert not (tmp_path / "out").exists()


def test_names_come_back_from_parquet_and_damaged_tsv_is_refused(tmp_path):
    names = ["a\tb", "x y", 'say "no"']
    export_tables(named(tmp_path, names), ["person"], "parquet", tmp_path / "out", overwrite=False)
    assert import_tables.READERS["parquet"](tmp_path / "out", "person")[0] == names
    for line, words in {"b\t1\tx": "film.tsv:2: 'x' is no number", "b\t1": "2: a name and 1 num"}.items():
        (tmp_path / "film.tsv").write_text(f"a\t1\t2\n{line}\n")
        with pytest.raises(InputError, match=words):
            import_tables.READERS["tsv"](tmp_path, "film")


@pytest.fixture
def run(folder, monkeypatch):
    monkeypatch.setattr(export_files, "ROWS_AT_A_TIME", 7)
    return open_run(folder)


def rows_of(run, table):
    names = run.tables.relations.labels if table == "relation" else run.tables.vocabulary(table)
    return list(names.names), run.tables[table][:].numpy()


def same(names, rows, run, table):
    expected_names, expected_rows = rows_of(run, table)
    return list(names) == expected_names and np.asarray(rows, np.float32).tobytes() == expected_rows.tobytes()


def test_parquet_is_read_by_duckdb_and_polars(run, tmp_path):
    duckdb = pytest.importorskip("duckdb", reason="needs DuckDB")
    polars = pytest.importorskip("polars", reason="needs Polars")
    run.export("parquet", tmp_path)
    for table in run.tables_in_order:
        table_rows = duckdb.sql(f"SELECT name, type, embedding FROM '{tmp_path}/{table}.parquet'").fetchall()
        names, types, rows = zip(*table_rows)
        assert set(types) == {table} and same(names, rows, run, table)
        frame = polars.read_parquet(tmp_path / f"{table}.parquet")
        assert frame.schema["embedding"] == polars.Array(polars.Float32, run.tables[table].shape[1])
        assert same(frame["name"].to_list(), frame["embedding"].to_numpy(), run, table)
    # A search as in the documentation: entities of all types in one table, the vectors as arrays.
    nearest = duckdb.sql(
        f"""WITH entities AS (FROM read_parquet(['{tmp_path}/person.parquet', '{tmp_path}/town.parquet']))
        SELECT b.name FROM entities a, entities b WHERE a.name = 'person4' AND b.type = 'person'
        ORDER BY array_cosine_similarity(a.embedding::FLOAT[6], b.embedding::FLOAT[6]) DESC LIMIT 4"""
    ).fetchall()
    assert [row[0] for row in nearest] == ["person4", *run.similar("person4", 3)["entity"]]
    groups = pq.ParquetFile(tmp_path / "person.parquet").metadata  # one for each block
    assert [groups.row_group(group).num_rows for group in range(groups.num_row_groups)] == [7] * 5 + [5]


def test_faiss_holds_all_rows_and_finds_the_best_answers(run, tmp_path):
    """The query of a model whose score is an inner product finds in the index what prediction finds."""
    faiss = pytest.importorskip("faiss", reason="needs faiss-cpu")
    run.export("faiss", tmp_path)
    for table in run.tables_in_order:
        index = faiss.read_index(str(tmp_path / f"{table}.faiss"))
        names = (tmp_path / f"{table}.names.txt").read_text(encoding="utf-8").split("\n")[:-1]
        assert index.metric_type == faiss.METRIC_INNER_PRODUCT and index.is_trained
        assert same(names, index.reconstruct_n(0, index.ntotal), run, table)
    head, relation = run.tables["person"]["person3"], run.tables["relation"]["lives_in"]
    query = run.model.query(head[None], relation[None], Side.TAIL).numpy()
    index = faiss.read_index(str(tmp_path / "town.faiss"))
    scores, places = index.search(query, 10)
    expected = run.predict_tails("person3", "lives_in", k=10)
    towns = rows_of(run, "town")[0]
    assert [towns[place] for place in places[0]] == expected["entity"].to_list()
    assert np.allclose(scores[0], expected["score"], rtol=1e-5)


@pytest.mark.parametrize("metric", ["l2", "cosine"])
def test_faiss_with_another_metric_finds_the_exact_neighbours(run, tmp_path, metric):
    faiss = pytest.importorskip("faiss", reason="needs faiss-cpu")
    run.export("faiss", tmp_path, ["person"], metric=metric)
    index = faiss.read_index(str(tmp_path / "person.faiss"))
    rows = rows_of(run, "person")[1].astype(np.float64)
    queries = np.random.default_rng(0).normal(size=(20, 6))
    products = queries @ rows.T
    distances = -products / np.linalg.norm(rows, axis=1)
    if metric == "l2":
        distances = ((queries[:, None] - rows[None]) ** 2).sum(2)
    scores, places = index.search(queries.astype(np.float32), 40)
    assert np.array_equal(places, np.argsort(distances, axis=1))
    assert np.allclose(np.abs(scores), np.abs(np.sort(distances, axis=1)), rtol=1e-4)


def test_metrics_of_score_functions():
    metrics = {"inner-product": ["complex", "distmult", "rescal"], "cosine": ["translation_cos"]}
    for metric, names in {**metrics, "l2": ["transe_l2", "transe_l1", "rotate"]}.items():
        assert {SCORE_FUNCTIONS.get(name).metric for name in names} == {metric}


def test_lancedb(run, tmp_path, monkeypatch):
    lancedb = pytest.importorskip("lancedb", reason="needs lancedb")
    out = tmp_path / "out"
    run.export("lancedb", out)
    tables = sorted(f"{name}.lance" for name in run.tables_in_order)
    assert sorted(path.name for path in out.iterdir()) == tables
    database = lancedb.connect(out)
    for table in run.tables_in_order:
        arrow_table = database.open_table(table).to_arrow()
        assert arrow_table.schema.field("vector").type.list_size == run.tables[table].shape[1]
        assert same(arrow_table["name"].to_pylist(), arrow_table["vector"].to_pylist(), run, table)
        assert set(arrow_table["type"].to_pylist()) == {table}
    query = run.embeddings(["person4"]).to_numpy()[0]
    near = database.open_table("person").search(query).distance_type("cosine").limit(4).to_list()
    assert [neighbour["name"] for neighbour in near] == ["person4", *run.similar("person4", 3)["entity"]]
    # A table is replaced only if allowed, and by a whole one.
    shutil.rmtree(out / "person.lance")
    with pytest.raises(InputError, match="town.lance exists; give --overwrite to replace it"):
        run.export("lancedb", out, ["person", "town"])
    assert not (out / "person.lance").exists()
    with monkeypatch.context() as patch:
        patch.setattr("os.replace", mock.Mock(side_effect=OSError(28, "No space left on device")))
        with pytest.raises(Exception, match="No space left"):
            run.export("lancedb", out, ["town"], overwrite=True)
    assert lancedb.connect(out).open_table("town").count_rows() == 10
    with monkeypatch.context() as patch:
        # The old table is aside when the disk goes away: it stays there.
        renames = iter([os.replace, *[mock.Mock(side_effect=OSError(116, "Stale file handle"))] * 2])
        patch.setattr("os.replace", lambda *paths: next(renames)(*paths))
        with pytest.raises(Exception, match="Stale file handle"):
            run.export("lancedb", out, ["town"], overwrite=True)
    (out / "town.lance.old").rename(out / "town.lance")
    assert lancedb.connect(out).open_table("town").count_rows() == 10
    run.export("lancedb", out, ["person", "town"], overwrite=True)
    assert sorted(path.name for path in out.iterdir()) == tables


def test_projector(run, tmp_path):
    pytest.importorskip("tensorboard", reason="needs TensorBoard")
    from google.protobuf import text_format
    from tensorboard.plugins.projector import projector_config_pb2, projector_plugin

    run.export("projector", tmp_path)
    text = (tmp_path / "projector_config.pbtxt").read_text()
    embeddings = text_format.Parse(text, projector_config_pb2.ProjectorConfig()).embeddings
    assert [embedding.tensor_name for embedding in embeddings] == run.tables_in_order
    for embedding in embeddings:
        rows = projector_plugin._read_tensor_tsv_file(str(tmp_path / embedding.tensor_path))
        lines = (tmp_path / embedding.metadata_path).read_text(encoding="utf-8").split("\n")[:-1]
        titles, *fields = (line.split("\t") for line in lines)
        assert titles == ["name", "type"] and {type_ for _, type_ in fields} == {embedding.tensor_name}
        assert same([name for name, _ in fields], rows, run, embedding.tensor_name)
    # A sample of a large table
    run.export("projector", tmp_path / "sample", ["person", "town"], max_rows=12)
    names, rows = rows_of(run, "person")
    lines = (tmp_path / "sample" / "person.metadata.tsv").read_text().splitlines()[1:]
    places = [names.index(line.split("\t")[0]) for line in lines]
    assert len(places) == 12 and places == sorted(set(places)) and places != list(range(12))
    sample = np.loadtxt(tmp_path / "sample" / "person.tensors.tsv").astype(np.float32)
    assert np.array_equal(sample, rows[places])
    assert len((tmp_path / "sample" / "town.tensors.tsv").read_text().splitlines()) == 10


def test_qdrant(run, tmp_path):
    qdrant = pytest.importorskip("qdrant_client", reason="needs qdrant-client")
    (path,) = run.export("qdrant", tmp_path / "out")
    with contextlib.closing(qdrant.QdrantClient(path=str(path))) as client:
        collections = {collection.name for collection in client.get_collections().collections}
        assert collections == set(run.tables_in_order)
        for table in run.tables_in_order:
            points, _ = client.scroll(table, limit=1000, with_vectors=True)
            points = sorted(points, key=lambda point: point.id)
            assert {point.payload["type"] for point in points} == {table}
            assert same([point.payload["name"] for point in points], [p.vector for p in points], run, table)
        # The best tails are the nearest by the query that the model makes: ComplEx is a product.
        rows = run.tables["person"]["person1"][None], run.tables["relation"]["lives_in"][None]
        query = run.model.query(*rows, Side.TAIL)
        hits = client.query_points("town", query=query[0].tolist(), limit=4).points
        expected = run.predict_tails("person1", "lives_in", 4)
        assert [point.payload["name"] for point in hits] == expected["entity"].tolist()
        assert [point.score for point in hits] == pytest.approx(expected["score"].tolist(), rel=1e-5)
        server = qdrant.QdrantClient(":memory:")
        client.migrate(server)
        assert server.query_points("town", query=query[0].tolist(), limit=4).points == hits
    (path,) = run.export("qdrant", tmp_path / "out", ["town"], overwrite=True, metric="cosine")
    with contextlib.closing(qdrant.QdrantClient(path=str(path))) as client:
        hits = client.query_points("town", query=run.tables["town"]["town3"].tolist(), limit=4).points
        assert [point.payload["name"] for point in hits] == ["town3", *run.similar("town3", 3)["entity"]]
        assert not client.collection_exists("person")


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


def test_examples_of_the_card_work(hub, run, monkeypatch):
    pytest.importorskip("safetensors", reason="needs safetensors")
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
    with pytest.raises(InputError, match=r"config.json is damaged: .*'../\w+' is not the name of a file"):
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
        (
            "config.json",
            lambda text: text.replace(b'"dimension": ', b'"dimension": -'),
            "damaged: .*dim is -",
        ),
        ("town.names.txt", lambda text: text[:-1], "names.txt is cut off"),
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


def test_each_block_is_written_before_the_next_is_read(monkeypatch):
    monkeypatch.setattr(export_files, "ROWS_AT_A_TIME", 10)
    calls = mock.Mock()
    calls.gather.side_effect = lambda table, ids: torch.zeros(len(ids), 4)
    table = export_files.ExportedTable(calls, "entity", [str(id_) for id_ in range(35)], (35, 4))
    export_files.write_rows(calls, table.blocks())
    assert [name for name, *_ in calls.mock_calls] == ["gather", "write"] * 4
    assert [len(written) for (written,), _ in calls.write.call_args_list] == [160, 160, 160, 80]
