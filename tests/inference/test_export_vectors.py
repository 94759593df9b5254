"""Parquet, faiss, LanceDB, Qdrant and TensorBoard's projector: each read back by its own program."""

from __future__ import annotations

import sys

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from dglkge.errors import InputError, JobError
from dglkge.inference.exports import files as export_files
from dglkge.inference.run import open_run
from dglkge.model.score_functions import SCORE_FUNCTIONS
from dglkge.typing import Side


@pytest.fixture
def run(folder, monkeypatch):
    monkeypatch.setattr(export_files, "ROWS_AT_A_TIME", 7)
    return open_run(folder)


def rows_of(run, table):
    """Return the names and rows of a table by the reader of checkpoints."""
    names = run.tables.relations.labels if table == "relation" else run.tables.vocabulary(table)
    return list(names.names), run.tables[table][:].numpy()


def same(names, rows, run, table):
    expected_names, expected_rows = rows_of(run, table)
    return list(names) == expected_names and np.asarray(rows, np.float32).tobytes() == expected_rows.tobytes()


def test_parquet_is_read_by_duckdb(run, tmp_path):
    duckdb = pytest.importorskip("duckdb", reason="needs DuckDB")
    run.export("parquet", tmp_path)
    for table in run.tables_in_order:
        table_rows = duckdb.sql(f"SELECT name, type, embedding FROM '{tmp_path}/{table}.parquet'").fetchall()
        assert {row[1] for row in table_rows} == {table}
        assert same([row[0] for row in table_rows], [row[2] for row in table_rows], run, table)
    # A search as in the documentation: entities of all types in one table, the vectors as arrays.
    nearest = duckdb.sql(
        f"""WITH entities AS (FROM read_parquet(['{tmp_path}/person.parquet', '{tmp_path}/town.parquet']))
        SELECT b.name FROM entities a, entities b WHERE a.name = 'person4' AND b.type = 'person'
        ORDER BY array_cosine_similarity(a.embedding::FLOAT[6], b.embedding::FLOAT[6]) DESC LIMIT 4"""
    ).fetchall()
    assert [row[0] for row in nearest] == ["person4", *run.similar("person4", 3)["entity"]]


def test_parquet_is_read_by_polars(run, tmp_path):
    polars = pytest.importorskip("polars", reason="needs Polars")
    run.export("parquet", tmp_path)
    for table in run.tables_in_order:
        frame = polars.read_parquet(tmp_path / f"{table}.parquet")
        assert frame.schema["embedding"] == polars.Array(polars.Float32, run.tables[table].shape[1])
        assert same(frame["name"].to_list(), frame["embedding"].to_numpy(), run, table)
    groups = pq.ParquetFile(tmp_path / "person.parquet").metadata  # one for each block
    assert [groups.row_group(group).num_rows for group in range(groups.num_row_groups)] == [7] * 5 + [5]


@pytest.fixture
def faiss():
    return pytest.importorskip("faiss", reason="needs faiss-cpu")


def test_faiss_holds_all_rows_and_finds_the_best_answers(run, tmp_path, faiss):
    """The query of a model whose score is an inner product finds in the index what prediction finds."""
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


@pytest.mark.parametrize("metric", ["l2", "cosine", "inner-product"])
def test_faiss_with_another_metric_finds_the_exact_neighbours(folder, tmp_path, faiss, metric):
    run = open_run(folder)
    run.export("faiss", tmp_path, ["person"], metric=metric)
    index = faiss.read_index(str(tmp_path / "person.faiss"))
    rows = rows_of(run, "person")[1].astype(np.float64)
    queries = np.random.default_rng(0).normal(size=(20, 6))
    products = queries @ rows.T
    expected = {
        "inner-product": -products,
        "cosine": -products / np.linalg.norm(rows, axis=1),
        "l2": ((queries[:, None] - rows[None]) ** 2).sum(2),
    }[metric]
    cosines, places = index.search(queries.astype(np.float32), 40)
    assert np.array_equal(places, np.argsort(expected, axis=1))
    assert np.allclose(np.abs(cosines), np.abs(np.sort(expected, axis=1)), rtol=1e-4)


@pytest.mark.parametrize(
    ("metric", "names"),
    [
        ("inner-product", ["complex", "distmult", "rescal"]),
        ("l2", ["transe_l2", "transe_l1", "rotate"]),
        ("cosine", ["translation_cos"]),
    ],
)
def test_metrics_of_score_functions(metric, names):
    assert {SCORE_FUNCTIONS.get(name).metric for name in names} == {metric}


def test_a_release_of_faiss_with_another_form_is_refused(folder, tmp_path, faiss, monkeypatch):
    written = faiss.serialize_index
    monkeypatch.setattr(
        faiss, "serialize_index", lambda index: np.append(np.zeros(8, np.uint8), written(index))
    )
    with pytest.raises(
        JobError, match=f"faiss {faiss.__version__} writes an index in a form that is not known"
    ):
        open_run(folder).export("faiss", tmp_path, ["person"])
    assert not list(tmp_path.glob("*.faiss*"))


def test_lancedb(run, tmp_path):
    lancedb = pytest.importorskip("lancedb", reason="needs lancedb")
    out = tmp_path / "out"
    run.export("lancedb", out)
    assert sorted(path.name for path in out.iterdir()) == sorted(
        f"{name}.lance" for name in run.tables_in_order
    )
    database = lancedb.connect(out)
    for table in run.tables_in_order:
        arrow_table = database.open_table(table).to_arrow()
        assert arrow_table.schema.field("vector").type.list_size == run.tables[table].shape[1]
        rows = np.array(arrow_table["vector"].to_pylist(), np.float32)
        assert same(arrow_table["name"].to_pylist(), rows, run, table)
        assert set(arrow_table["type"].to_pylist()) == {table}
    expected_row = run.embeddings(["person4"]).to_numpy()[0]
    near = database.open_table("person").search(expected_row).distance_type("cosine").limit(4).to_list()
    assert [neighbour["name"] for neighbour in near] == ["person4", *run.similar("person4", 3)["entity"]]


def test_lancedb_replaces_a_table_only_if_allowed(folder, tmp_path, monkeypatch):
    lancedb = pytest.importorskip("lancedb", reason="needs lancedb")
    run, out = open_run(folder), tmp_path / "out"
    run.export("lancedb", out, ["town"])
    with pytest.raises(InputError, match="town.lance exists; give --overwrite to replace it"):
        run.export("lancedb", out, ["person", "town"])
    assert [path.name for path in out.iterdir()] == ["town.lance"]
    monkeypatch.setattr("os.replace", fail_with(OSError(28, "No space left on device")))
    with pytest.raises(Exception, match="No space left"):
        run.export("lancedb", out, ["town"], overwrite=True)
    monkeypatch.undo()
    assert lancedb.connect(out).open_table("town").count_rows() == 10
    run.export("lancedb", out, ["town"], overwrite=True)
    assert [path.name for path in out.iterdir()] == ["town.lance"]
    assert lancedb.connect(out).open_table("town").count_rows() == 10


def fail_with(error):
    def fail(*arguments):
        raise error

    return fail


def test_projector(run, tmp_path):
    """TensorBoard's own plugin reads the configuration and the tensors."""
    config_pb2 = pytest.importorskip(
        "tensorboard.plugins.projector.projector_config_pb2", reason="needs TensorBoard"
    )
    from google.protobuf import text_format
    from tensorboard.plugins.projector import projector_plugin

    run.export("projector", tmp_path)
    config = text_format.Parse(
        (tmp_path / "projector_config.pbtxt").read_text(), config_pb2.ProjectorConfig()
    )
    assert [embedding.tensor_name for embedding in config.embeddings] == run.tables_in_order
    for embedding in config.embeddings:
        rows = projector_plugin._read_tensor_tsv_file(str(tmp_path / embedding.tensor_path))
        title, *lines = (tmp_path / embedding.metadata_path).read_text(encoding="utf-8").split("\n")[:-1]
        assert title == "name\ttype"
        assert {line.split("\t")[1] for line in lines} == {embedding.tensor_name}
        assert same([line.split("\t")[0] for line in lines], rows, run, embedding.tensor_name)


def test_projector_shows_a_sample_of_a_large_table(run, tmp_path):
    run.export("projector", tmp_path, ["person", "town"], max_rows=12)
    names, rows = rows_of(run, "person")
    lines = (tmp_path / "person.metadata.tsv").read_text().splitlines()[1:]
    places = [names.index(line.split("\t")[0]) for line in lines]
    assert len(places) == 12 and places == sorted(set(places)) and places != list(range(12))
    assert np.array_equal(np.loadtxt(tmp_path / "person.tensors.tsv").astype(np.float32), rows[places])
    assert len((tmp_path / "town.tensors.tsv").read_text().splitlines()) == 10


def test_qdrant(run, tmp_path):
    qdrant = pytest.importorskip("qdrant_client", reason="needs qdrant-client")
    (path,) = run.export("qdrant", tmp_path / "out")
    client = qdrant.QdrantClient(path=str(path))
    try:
        assert {collection.name for collection in client.get_collections().collections} == set(
            run.tables_in_order
        )
        for table in run.tables_in_order:
            points, _ = client.scroll(table, limit=1000, with_vectors=True)
            points = sorted(points, key=lambda point: point.id)
            assert [point.id for point in points] == list(range(len(points)))
            assert {point.payload["type"] for point in points} == {table}
            assert same([point.payload["name"] for point in points], [p.vector for p in points], run, table)
        # The best tails are the nearest by the query that the model makes: ComplEx is a product.
        query = run.model.query(
            run.tables["person"]["person1"][None], run.tables["relation"]["lives_in"][None], Side.TAIL
        )
        hits = client.query_points("town", query=query[0].tolist(), limit=4).points
        expected = run.predict_tails("person1", "lives_in", 4)
        assert [point.payload["name"] for point in hits] == expected["entity"].tolist()
        assert [point.score for point in hits] == pytest.approx(expected["score"].tolist(), rel=1e-5)
        server = qdrant.QdrantClient(":memory:")
        client.migrate(server)
        assert server.query_points("town", query=query[0].tolist(), limit=4).points == hits
    finally:
        client.close()
    with pytest.raises(InputError, match="qdrant exists; give --overwrite"):
        run.export("qdrant", tmp_path / "out")
    (path,) = run.export("qdrant", tmp_path / "out", ["town"], overwrite=True, metric="cosine")
    client = qdrant.QdrantClient(path=str(path))
    try:
        row = run.tables["town"]["town3"].tolist()
        hits = client.query_points("town", query=row, limit=4).points
        assert [point.payload["name"] for point in hits] == ["town3", *run.similar("town3", 3)["entity"]]
        assert not client.collection_exists("person")
    finally:
        client.close()


@pytest.mark.parametrize(
    ("name", "package"), [("faiss", "faiss"), ("lancedb", "lancedb"), ("qdrant", "qdrant_client")]
)
def test_a_missing_package_is_named_with_its_extra(folder, tmp_path, monkeypatch, name, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        InputError, match=rf"^the format {name} needs {name}\S*: pip install 'dglkge\[{name}\]' \("
    ):
        open_run(folder).export(name, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_memory_does_not_grow_with_the_table(tmp_path, monkeypatch):
    """Each block is written before the next one is read."""
    monkeypatch.setattr(export_files, "ROWS_AT_A_TIME", 10)
    events = []

    class Tables:
        def gather(self, table, ids):
            events.append(("read", len(ids)))
            return torch.zeros(len(ids), 4)

    class File:
        def write(self, data):
            events.append(("write", len(data)))

    table = export_files.ExportedTable(Tables(), "entity", [str(id_) for id_ in range(35)], (35, 4))
    export_files.write_rows(File(), table.blocks())
    assert events == [("read", 10), ("write", 160)] * 3 + [("read", 5), ("write", 80)]
