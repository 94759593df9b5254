"""What ruff does not see of the house's rules."""

from __future__ import annotations

import ast
import importlib
import inspect

import pytest

from tests.contract.source_tree import called_name, sources

NOT_IMPORTED = ("dglkge.__main__", "dglkge.cli.training_script", "dglkge.launch.script_runner")


def undocumented(module) -> list[str]:
    """Public methods of a module's public classes that neither they nor a base class document."""
    classes = [item for name, item in vars(module).items() if inspect.isclass(item) and name[0] != "_"]
    return [
        f"{module.__name__}.{class_.__name__}.{name}"
        for class_ in classes
        if class_.__module__ == module.__name__
        for name, item in vars(class_).items()
        if name[0] != "_" and name not in getattr(class_, "__dataclass_fields__", {})
        if (inspect.isroutine(item) or isinstance(item, property))
        if not inspect.getdoc(getattr(class_, name))
    ]


def test_public_methods_have_a_docstring():
    pytest.importorskip("fastapi", reason="the extras are not installed here")
    modules = [source.module for source in sources("dglkge") if source.module not in NOT_IMPORTED]
    assert not [name for module in modules for name in undocumented(importlib.import_module(module))]


def pickle_reads(tree: ast.AST) -> list[str]:
    """Calls that may run a pickle in a file of numpy or torch; ruff's S301 finds the others."""
    needed = {"torch.load": "weights_only=True", "np.load": "allow_pickle=False"}
    reads = []
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or called_name(call) != "load":
            continue
        name, words = ast.unparse(call.func), [ast.unparse(word) for word in call.keywords]
        # Of readers/numbered.py: it calls nothing but what makes arrays.
        if "pickle_module=ARRAYS_ONLY" in words:
            continue
        is_default = name == "np.load" and not any(word.startswith("allow_pickle") for word in words)
        if name in needed and needed[name] not in words and not is_default:
            reads.append(ast.unparse(call))
    return reads


def test_no_pickle_is_trusted():
    files = sources("dglkge", "partition_tools", "examples", "benchmarks")
    assert not [(source.name, call) for source in files for call in pickle_reads(source.tree)]
    unsafe = "torch.load(f); torch.load(f, weights_only=False); np.load(f, allow_pickle=True)"
    safe = "torch.load(f, weights_only=True); np.load(f); np.load(f, allow_pickle=False)"
    safe += "; torch.load(f, pickle_module=ARRAYS_ONLY)"
    assert len(pickle_reads(ast.parse(unsafe))) == 3 and pickle_reads(ast.parse(safe)) == []
