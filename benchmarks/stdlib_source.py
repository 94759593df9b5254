"""Definitions and references of one Python source file: classes, functions, imports, and the names they use.

First stage of ``stdlib_kg.py``: one file at a time, parsed and never imported.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass, field

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BLOCKS = (ast.If, ast.Try, ast.With)
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Module:
    """Content of one source file, before its names are resolved in other files.

    Attributes
    ----------
    names : dict
        Name at the top of the module to its dotted path.
    stars : list of str
        Modules of star imports.
    definitions : list of (head, head type, relation, tail, tail type)
        Triples that follow from this file alone.
    references : list of (head, head type, relation, tail)
        Triples whose tail is a dotted path as in the source, or ``.name`` for a method of some object.
    """

    name: str
    is_package: bool
    names: dict[str, str] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)
    definitions: list[tuple[str, str, str, str, str]] = field(default_factory=list)
    references: list[tuple[str, str, str, str]] = field(default_factory=list)

    def define(self, head: str, head_type: str, relation: str, tail: str, tail_type: str) -> None:
        """Add a triple that follows from this file alone."""
        self.definitions.append((head, head_type, relation, tail, tail_type))

    def refer(self, head: str, head_type: str, relation: str, path: str) -> None:
        """Add a triple whose tail must be resolved."""
        self.references.append((head, head_type, relation, path))


def read_module(name: str, is_package: bool, tree: ast.Module) -> Module:
    """Read a parsed source file."""
    module = Module(name, is_package)
    read_body(tree.body, name, module)
    return module


def read_body(body: Iterable[ast.stmt], scope: str, module: Module) -> None:
    """Read the statements of a module or class, including all branches of if, try and with."""
    for node in body:
        if isinstance(node, FUNCTIONS):
            read_function(node, scope, module)
        elif isinstance(node, ast.ClassDef):
            read_class(node, scope, module)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            read_import(node, module)
        elif isinstance(node, BLOCKS):
            handlers = [stmt for handler in getattr(node, "handlers", []) for stmt in handler.body]
            inner = [*node.body, *handlers, *getattr(node, "orelse", []), *getattr(node, "finalbody", [])]
            read_body(inner, scope, module)
        elif isinstance(node, ast.Assign) and scope == module.name:
            value = dotted(node.value)
            for target in node.targets:
                if value and isinstance(target, ast.Name):
                    # The first binding counts, as in read_import.
                    module.names.setdefault(target.id, value)


def read_class(node: ast.ClassDef, scope: str, module: Module) -> None:
    """Read a class, its bases and its body."""
    name = f"{scope}.{node.name}"
    if scope == module.name:
        module.names[node.name] = name
    module.define(name, "class", "defined_in", module.name, "module")
    for base in node.bases:
        module.refer(name, "class", "inherits_from", dotted(base))
    read_body(node.body, name, module)


def read_function(node: FunctionNode, scope: str, module: Module) -> None:
    """Read a function or method. Actions of a method belong to its class, as classes share method names."""
    if scope == module.name:
        actor, actor_type = f"{scope}.{node.name}", "function"
        name, kind = actor, actor_type
        module.names[node.name] = name
        module.define(name, kind, "defined_in", scope, "module")
    else:
        actor, actor_type = scope, "class"
        name, kind = f"method:{node.name}", "method"
        module.define(scope, actor_type, "has_method", name, kind)
    arguments = node.args
    for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
        if argument.arg not in ("self", "cls"):
            module.define(name, kind, "takes_argument", f"argument:{argument.arg}", "argument")
    for decorator in node.decorator_list:
        target = decorator.func if isinstance(decorator, ast.Call) else decorator
        module.refer(name, kind, "uses_decorator", dotted(target))
    read_actions(node, actor, actor_type, module)


def read_actions(function: ast.stmt, actor: str, actor_type: str, module: Module) -> None:
    """Read what the body of a function calls, raises and imports, including nested functions."""
    pending: list[ast.AST] = list(getattr(function, "body", []))
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Call):
            path = dotted(node.func)
            if not path and isinstance(node.func, ast.Attribute):
                path = f".{node.func.attr}"
            module.refer(actor, actor_type, "calls", path)
        elif isinstance(node, ast.Raise) and node.exc is not None:
            # "raise Error(...)" contains a call, which would be recorded a second time as "calls".
            target = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            module.refer(actor, actor_type, "raises", dotted(target))
            pending.extend(ast.iter_child_nodes(node.exc))  # the class that is raised is not called as well
            continue
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            read_import(node, module)
        if not isinstance(node, (ast.Name, ast.Constant)):
            pending.extend(ast.iter_child_nodes(node))


def read_import(node: ast.Import | ast.ImportFrom, module: Module) -> None:
    """Read the names that an import statement binds; the first of several bindings of a name counts."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            bound = alias.asname or alias.name.partition(".")[0]
            module.names.setdefault(bound, alias.name if alias.asname else bound)
            module.refer(module.name, "module", "imports", f"import {alias.name}")
        return
    source = node.module or ""
    if node.level:
        # One dot is the package itself: of a package's __init__ that is its own name.
        up = node.level - 1 if module.is_package else node.level
        parts = module.name.split(".")
        source = ".".join([*parts[: len(parts) - up], *([source] if source else [])])
    for alias in node.names:
        module.refer(module.name, "module", "imports", f"from {source} {alias.name}")
        if alias.name == "*":
            module.stars.append(source)
        else:
            module.names.setdefault(alias.asname or alias.name, f"{source}.{alias.name}")


def dotted(node: ast.expr) -> str:
    """Return ``a.b.c`` for an expression of that form, and an empty string for any other."""
    attributes: list[str] = []
    while isinstance(node, ast.Attribute):
        attributes.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(attributes)]) if isinstance(node, ast.Name) else ""
