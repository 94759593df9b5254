"""The import table holds: for every import of every file, and the checker finds what would break it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

import pytest

from tests.contract.imports import FLOOR, OUTSIDE, breaks, circle, imported, inside, room
from tests.contract.source_tree import ROOT, SourceFile, sources

OPTIM_MAY_IMPORT = {"torch", "dgl", "numpy"}
ONLY_FOR_PEOPLE = {
    "rich": ("dglkge.cli", "dglkge.partition", "partition_tools"),
    "psutil": ("dglkge.launch", "dglkge.partition"),
    "fastapi": ("dglkge.serving", "dglkge.cli.serve"),
    "uvicorn": ("dglkge.serving", "dglkge.cli.serve"),
    "faiss": ("dglkge.serving", "dglkge.inference"),
}
DISTRIBUTION = {"faiss": "faiss-cpu", "mlflow": "mlflow-skinny", "sklearn": "scikit-learn", "yaml": "pyyaml"}
DISTRIBUTION |= {"pydantic_core": "pydantic"}


def house() -> tuple[SourceFile, ...]:
    """The files that rooms are made of."""
    return sources("dglkge", "partition_tools")


def imports_of(source: SourceFile) -> list[tuple[int, str]]:
    """All imports of one file."""
    return list(imported(source.tree, source.module, source.path.name == "__init__.py"))


def third_party(target: str) -> str:
    """The outside package of an imported name, empty for the standard library's and our own."""
    package = target.partition(".")[0]
    known = getattr(sys, "stdlib_module_names", sys.builtin_module_names)
    return "" if package in known or package in ("dglkge", "partition_tools") else package


def test_imports_go_down():
    assert not [
        f"{source.name}:{line} imports {target}: {breaks(source.module, target)}"
        for source in house()
        for line, target in imports_of(source)
        if breaks(source.module, target)
    ]


def test_every_room_is_in_the_table():
    rooms = {room(source.module) for source in house()} - {""}
    assert rooms <= set(FLOOR), f"the table has no floor for {sorted(rooms - set(FLOOR))}"


def test_no_circles():
    modules = {source.module for source in house()}
    graph: dict[str, set[str]] = {}
    for source in house():
        if source.module == "dglkge":
            continue  # the front door imports on first use, when its rooms are complete
        targets = set()
        for _, target in imports_of(source):
            targets.add(target if target in modules else target.rpartition(".")[0])
        graph[source.module] = targets & modules - {source.module, "dglkge"}
    assert circle(graph) == []


def test_front_door_imports_on_first_use_only():
    """``import dglkge`` must stay free: others import dglkge.optim alone. It prepares DGL's import."""
    (front,) = [source for source in house() if source.module == "dglkge"]
    at_import = [node for node in front.tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {target for node in at_import for _, target in imported(node, "dglkge", True)}
    assert {name for name in names if third_party(name) or name.startswith("dglkge")} == {
        "dglkge.distributed.dgl_import"
    }
    (door,) = [source for source in house() if source.module == "dglkge.distributed.dgl_import"]
    assert not [name for _, name in imports_of(door) if third_party(name)]


def test_optim_imports_outside_packages_of_its_own_only():
    for source in sources("dglkge/optim"):
        outside = {third_party(target) for _, target in imports_of(source)} - {""}
        assert outside <= OPTIM_MAY_IMPORT, f"{source.name} imports {outside - OPTIM_MAY_IMPORT}"


def test_compilers_of_loops_are_imported_from_the_door_itself():
    """Cached machine code belongs to the state of all files that name the door: no other file has loops."""
    names = {"compiled", "compiled_unaliased", "intrinsic", "overload", "carray"}
    for source in house():
        for line, target in imports_of(source):
            module, _, name = target.rpartition(".")
            places = ("dglkge.kernels.jit", "numba", "typing")
            assert name not in names or module in places, f"{source.name}:{line}"


def test_outside_packages_are_required_by_pyproject():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    required = set(re.findall(r'"([A-Za-z0-9_-]+)[^"]*"', text.partition("[tool.")[0]))
    for source in house():
        for line, target in imports_of(source):
            package = DISTRIBUTION.get(third_party(target), third_party(target))
            assert package in required | {""}, f"{source.name}:{line}"


@pytest.mark.parametrize("package", ONLY_FOR_PEOPLE)
def test_packages_that_few_rooms_need(package):
    rooms = ONLY_FOR_PEOPLE[package]
    elsewhere = [source for source in house() if not source.module.startswith(rooms)]
    users = {source.name for source in elsewhere for _, name in imports_of(source) if inside(name, package)}
    assert not users


@pytest.mark.parametrize(
    "module, target, reason",
    [
        ("dglkge.optim.alltoall", "dglkge.errors.InputError", "never"),
        ("dglkge.optim.alltoall", "dglkge", "never"),
        ("dglkge.kernels.chains", "numba.core", "only dglkge.kernels.jit imports numba"),
        ("dglkge.model.functions.comparators", "numba", "only dglkge.kernels.jit imports numba"),
        ("dglkge.kernels.jit", "dglkge.errors.InputError", "never"),
        ("dglkge.kernels.jit", "torch", "never"),
        ("dglkge.model.losses", "dgl", "never"),
        ("dglkge.model.losses", "h5py", "never"),
        ("dglkge.data.triples", "dgl.distributed.DistGraph", "never"),
        ("dglkge.checkpoint.reader", "torch.distributed.barrier", "never"),
        ("dglkge.inference.exports.export", "dgl", "never"),
        ("dglkge.launch.supervisor", "dglkge.training.trainer", "never"),
        ("dglkge.cli.main", "partition_tools.partition", "never"),
        ("dglkge.config.schema", "dglkge.optim.SparseAdam", "no component"),
        ("dglkge.config.schema", "torch", "never"),
        ("dglkge.model.losses", "dglkge.config.schema", "not below"),
        ("dglkge.data.dataset", "dglkge.config.schema", "not below"),
        ("dglkge.sampling.triple_order", "dglkge.embeddings.TableSet", "not below"),
        ("dglkge.errors", "dglkge.optim", "not below"),
        ("dglkge.training.trainer", "dglkge.cli.main", "not below"),
        ("dglkge.partition.ingest", "dglkge.training.build", "not below"),
        ("dglkge.cli.main", "dglkge.attic.old", "no room 'attic'"),
        ("dglkge.report.figures", "dglkge.cli.common", "not below"),
        ("dglkge.report.figures", "dgl", "never"),
        ("dglkge.inference.exports.export", "dglkge", "front door"),
        ("dglkge.evaluation.metrics", "dgl.function", "never"),
        ("dglkge.checkpoint.layout", "dglkge.errors.InputError", "standard library only"),
        ("dglkge.checkpoint.lineage", "numpy", "standard library only"),
        ("dglkge.config.schema", "dglkge.checkpoint.manifest.Manifest", "no component"),
    ],
)
def test_checker_finds_a_broken_rule(module, target, reason):
    assert reason in breaks(module, target)


@pytest.mark.parametrize(
    "module, target",
    [
        ("dglkge.registry", "dglkge.errors.InputError"),
        ("dglkge.optim.optimizers", "dglkge.kernels.updates"),
        ("dglkge.optim.optimizers", "dgl.distributed"),
        ("dglkge.kernels.updates", "dglkge.kernels.jit.compiled"),
        ("dglkge.kernels.jit", "numba"),
        ("dglkge.checkpoint.manager", "torch.distributed.barrier"),
        ("dglkge.checkpoint.reader", "torch.from_numpy"),
        ("dglkge.embeddings.table_set", "dglkge.optim.SparseAdam"),
        ("dglkge.cli.main", "dglkge.inference.exports.export"),
        ("dglkge.partition.ingest", "dglkge.data.triples"),
        ("partition_tools.partition", "dglkge.__version__"),
        ("dglkge.model.losses", "dglkge.model.negative_terms"),
        ("dglkge.distributed.lease", "dglkge.checkpoint.layout.LEASE_FILE"),
        ("dglkge.launch.remote.synced_site", "dglkge.checkpoint.storage.CheckpointStorage"),
        ("dglkge.checkpoint.lineage", "dataclasses"),
        ("dglkge.checkpoint.lineage", "json"),
    ],
)
def test_checker_lets_pass_what_the_table_allows(module, target):
    assert breaks(module, target) == ""


def test_names_are_read_without_large_packages():
    """The launcher and its agents import the names: torch alone would cost each of them a second."""
    code = "import sys, dglkge.checkpoint.lineage, dglkge.data.dataset_files; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert "dglkge" in loaded and not loaded & (OUTSIDE - {"dglkge"})


def test_checker_reads_every_form_of_import():
    text = "import a.b\nfrom .c import d\ndef f():\n    from .. import e\n    import g as h\n"
    names = sorted(name for _, name in imported(ast.parse(text), "p.q.r", is_package=False))
    assert names == ["a.b", "g", "p.e", "p.q.c.d"]
    assert [name for _, name in imported(ast.parse("from . import x"), "p.q", is_package=True)] == ["p.q.x"]
    assert inside("dgl", "dgl") and inside("dgl.x", "dgl") and not inside("dglkge.x", "dgl")


def test_checker_finds_a_circle():
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
