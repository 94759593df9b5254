"""Every member of every registry has a test case in the folder that mirrors its room, or the registry's."""

from __future__ import annotations

import ast
import importlib

import pytest

from dglkge.registry import Registry
from tests.contract.source_tree import ROOT, parsed, sources, walk


def registries() -> list[tuple[str, str, Registry]]:
    """All registries of the package as (module, name, registry); nobody fills one but its own room."""
    found = []
    # While tests are collected: only the files that may have one are parsed.
    named = [
        path for path in walk(ROOT / "dglkge") if path.suffix == ".py" and b"Registry(" in path.read_bytes()
    ]
    for source in map(parsed, named):
        for node in source.tree.body:
            value = getattr(node, "value", None)
            if isinstance(value, ast.Call) and ast.unparse(value.func).startswith("Registry"):
                target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
                module = importlib.import_module(source.module)
                found.append((source.module, target.id, getattr(module, target.id)))
    return found


def words_of_tests(room: str) -> set[str]:
    """All names and strings in the tests of a room."""
    words = set()
    for source in sources(f"tests/{room}"):
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                words.update(node.value.split())
            elif isinstance(node, (ast.Name, ast.Attribute)):
                words.add(node.id if isinstance(node, ast.Name) else node.attr)
    return words


def without_case(members: dict[str, object], words: set[str]) -> list[str]:
    """Members whose name and whose class's name stand nowhere in the tests."""
    return [name for name, member in members.items() if not {name, getattr(member, "__name__", name)} & words]


REGISTRIES = registries()


@pytest.mark.parametrize("module, name, registry", REGISTRIES, ids=[name for _, name, _ in REGISTRIES])
def test_every_member_has_a_case(module, name, registry):
    members = {member: registry.get(member) for member in registry}
    assert members, f"{module}.{name} is empty"
    homes = {module, *(getattr(member, "__module__", module) for member in members.values())}
    words = {word for home in homes for word in words_of_tests(home.split(".")[1])}
    assert without_case(members, words) == []


def test_there_are_registries():
    assert {"SCORE_FUNCTIONS", "LOSSES", "REGULARIZERS"} <= {name for _, name, _ in REGISTRIES}


def test_checker_finds_a_member_without_case():
    assert without_case({"softmax": 1, "hinge": 2}, {"softmax", "x"}) == ["hinge"]
    assert without_case({"softmax": Registry}, {"Registry"}) == []
