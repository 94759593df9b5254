"""What ruff does not see of the house's rules."""

from __future__ import annotations

import importlib
import inspect

import pytest

from tests.contract.source_tree import ROOT, sources

NOT_IMPORTED = ("dglkge.__main__", "dglkge.cli.training_script", "dglkge.launch.script_runner")


def undocumented(module) -> list[str]:
    """Public methods of a module's public classes that neither they nor a base class document."""
    classes = [item for name, item in vars(module).items() if inspect.isclass(item) and name[0] != "_"]
    return [
        f"{module.__name__}.{each.__name__}.{name}"
        for each in classes
        if each.__module__ == module.__name__
        for name, item in vars(each).items()
        if name[0] != "_" and name not in getattr(each, "__dataclass_fields__", {})
        if (inspect.isroutine(item) or isinstance(item, property))
        if not inspect.getdoc(getattr(each, name))
    ]


def test_public_methods_have_a_docstring():
    pytest.importorskip("fastapi", reason="the extras are not installed here")
    modules = [source.module for source in sources("dglkge") if source.module not in NOT_IMPORTED]
    assert not [name for module in modules for name in undocumented(importlib.import_module(module))]


def test_no_array_is_unpickled():
    """numpy's default; ruff's S301 and S614 hold the same of pickle and torch."""
    assert not [
        path for path in (ROOT / "dglkge").rglob("*.py") if "allow_pickle=True" in path.read_text("utf-8")
    ]
