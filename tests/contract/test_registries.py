"""Every member of every registry has a test case in the folder that mirrors its room, or the registry's."""

from __future__ import annotations

import ast
import importlib
import re

from dglkge.registry import Registry
from tests.contract.source_tree import ROOT, sources


def registries() -> dict[str, tuple[str, Registry]]:
    """Module and registry by name; nobody fills one but its own room."""
    named = {}
    for path in sorted((ROOT / "dglkge").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for name in re.findall(r"^(\w+)\b.*= Registry\(", path.read_text("utf-8"), re.MULTILINE):
            named[name] = module, getattr(importlib.import_module(module), name)
    return named


def words_of_tests(room: str) -> set[str]:
    words = set()
    for source in sources(f"tests/{room}"):
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                words.update(node.value.split())
            elif isinstance(node, (ast.Name, ast.Attribute)):
                words.add(node.id if isinstance(node, ast.Name) else node.attr)
    return words


def test_every_member_has_a_case():
    named = registries()
    assert {"SCORE_FUNCTIONS", "LOSSES", "REGULARIZERS"} <= set(named) and len(named) >= 10
    words: dict[str, set[str]] = {}
    for name, (module, registry) in named.items():
        members = {member: registry.get(member) for member in registry}
        assert members or name == "CALLBACKS", f"{module}.{name} is empty"  # those are users' own
        homes = {module, *(getattr(member, "__module__", module) for member in members.values())}
        rooms = {home.split(".")[1] for home in homes}
        words |= {room: words_of_tests(room) for room in rooms - set(words)}
        named_there = set().union(*(words[room] for room in rooms))
        # By its name, or that of its class.
        names = {member: {member, getattr(item, "__name__", member)} for member, item in members.items()}
        assert [member for member in members if not names[member] & named_there] == [], name
