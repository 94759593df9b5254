"""An untrained run on the typed toy data set, some of whose names are code."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest

import dglkge
from dglkge.data.dataset import Dataset
from tests.checkpoint.toy_checkpoint import save_toy_run
from tests.chromium import browser, open_page  # noqa: F401
from tests.toy_kg import partition, typed_triples, write_splits

IMAGE = "<img src=x onerror='window.hacked=1'>"
SCRIPT = "</script><script>window.hacked=2</script>"
ODD = "Zoë & 'co' #/?=+%41 🦊"
"""Instead of person0, the relation knows, and town1."""


def renamed_dataset(folder: Path, renamed: dict[str, str], num_parts: int) -> Dataset:
    """Partition the typed toy triples under other names, whose files have none of the quotes of CSV."""
    frame, types = typed_triples()
    write_splits(folder / "source", frame)
    for path in (folder / "source").iterdir():
        rows = pd.read_csv(path, sep="\t", header=None).replace(renamed)
        path.write_text("".join("\t".join(row) + "\n" for row in rows.values), encoding="utf-8")
    lines = [f"{renamed.get(name, name)}\t{kind}\n" for name, kind in types.items()]
    (folder / "types.tsv").write_text("".join(lines), encoding="utf-8")
    options = ["--entity-types", str(folder / "types.tsv"), "--method", "random", "--num-parts"]
    return Dataset.open(partition(folder / "source", folder / "dataset", *options, str(num_parts)))


@pytest.fixture(scope="session")
def hostile_dataset(tmp_path_factory) -> Dataset:
    renamed = {"person0": IMAGE, "town1": ODD, "knows": SCRIPT}
    return renamed_dataset(tmp_path_factory.mktemp("hostile"), renamed, 1)


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory, hostile_dataset):
    return save_toy_run(tmp_path_factory.mktemp("serving") / "run", hostile_dataset)


@pytest.fixture(scope="module")
def run(run_folder):
    return dglkge.open_run(run_folder)


@contextlib.contextmanager
def served(run_folder, token=None) -> Iterator[str]:
    """Serve a run from a thread of this process; yields the address."""
    pytest.importorskip("fastapi", reason="FastAPI is not installed")
    uvicorn = pytest.importorskip("uvicorn", reason="uvicorn is not installed")
    from dglkge.serving.app import ModelCalls, create_app
    from dglkge.serving.explorer import Explorer
    from dglkge.serving.server import HostNames, listening_socket, server_config, url_of

    calls = ModelCalls(1)
    with listening_socket("127.0.0.1", 0) as bound:
        app = create_app(Explorer(dglkge.open_run(run_folder)), calls, HostNames("127.0.0.1", True), token)
        server = uvicorn.Server(server_config(app))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        while not server.started and thread.is_alive():
            thread.join(0.01)
        try:
            yield url_of(bound, "127.0.0.1")
        finally:
            server.should_exit = True
            thread.join(60)
            calls.close()


@pytest.fixture(scope="module")
def server(run_folder) -> Iterator[str]:
    with served(run_folder) as url:
        yield url
