"""What one Python source file says of itself: its classes, functions and imports, and the names it mentions.

The first half of ``stdlib_kg.py``: one file at a time, parsed and never imported.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Union

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BLOCKS = (ast.If, ast.Try, ast.With)
FunctionNode = Union[ast.FunctionDef, ast.AsyncFunctionDef]


@dataclass
class Module:
    """What one source file says, before its names are followed to other files.

    Attributes
    ----------
    names : dict
        What a name at the top of the module stands for, as a dotted path.
    stars : list of str
        Modules whose every name is imported.
    said : list of (head, head type, relation, tail, tail type)
        What is certain from this file alone.
    mentioned : list of (head, head type, relation, tail)
        The tail is a dotted path as the source has it, or ``.name`` for a method called on some object.
    """

    name: str
    is_package: bool
    names: dict[str, str] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)
    said: list[tuple[str, str, str, str, str]] = field(default_factory=list)
    mentioned: list[tuple[str, str, str, str]] = field(default_factory=list)

    def say(self, head: str, head_type: str, relation: str, tail: str, tail_type: str) -> None:
        """Note a triple that is certain."""
        self.said.append((head, head_type, relation, tail, tail_type))

    def mention(self, head: str, head_type: str, relation: str, path: str) -> None:
        """Note a triple whose tail is still to be followed to where it is defined."""
        self.mentioned.append((head, head_type, relation, path))


def read_module(name: str, is_package: bool, tree: ast.Module) -> Module:
    """Read a parsed source file."""
    module = Module(name, is_package)
    read_body(tree.body, name, module)
    return module


def read_body(body: Iterable[ast.stmt], scope: str, module: Module) -> None:
    """Read the statements of a module or class, those of all branches of if, try and with included."""
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
                    module.names.setdefault(target.id, value)


def read_class(node: ast.ClassDef, scope: str, module: Module) -> None:
    """Note a class, its bases and all that is defined in it."""
    name = f"{scope}.{node.name}"
    if scope == module.name:
        module.names[node.name] = name
    module.say(name, "class", "defined_in", module.name, "module")
    for base in node.bases:
        module.mention(name, "class", "inherits_from", dotted(base))
    read_body(node.body, name, module)


def read_function(node: FunctionNode, scope: str, module: Module) -> None:
    """Note a function, or a method; what a method does is said of its class, as method names are shared."""
    if scope == module.name:
        actor, actor_type = f"{scope}.{node.name}", "function"
        name, kind = actor, actor_type
        module.names[node.name] = name
        module.say(name, kind, "defined_in", scope, "module")
    else:
        actor, actor_type = scope, "class"
        name, kind = f"method:{node.name}", "method"
        module.say(scope, actor_type, "has_method", name, kind)
    arguments = node.args
    for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
        if argument.arg not in ("self", "cls"):
            module.say(name, kind, "takes_argument", f"argument:{argument.arg}", "argument")
    for decorator in node.decorator_list:
        target = decorator.func if isinstance(decorator, ast.Call) else decorator
        module.mention(name, kind, "uses_decorator", dotted(target))
    read_actions(node, actor, actor_type, module)


def read_actions(function: ast.stmt, actor: str, actor_type: str, module: Module) -> None:
    """Note what the body of a function calls, raises and imports, nested functions included."""
    pending: list[ast.AST] = list(getattr(function, "body", []))
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Call):
            path = dotted(node.func)
            if not path and isinstance(node.func, ast.Attribute):
                path = f".{node.func.attr}"
            module.mention(actor, actor_type, "calls", path)
        elif isinstance(node, ast.Raise) and node.exc is not None:
            target = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            module.mention(actor, actor_type, "raises", dotted(target))
            pending.extend(ast.iter_child_nodes(node.exc))  # what is raised is not said to be called as well
            continue
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            read_import(node, module)
        if not isinstance(node, (ast.Name, ast.Constant)):
            pending.extend(ast.iter_child_nodes(node))


def read_import(node: ast.Import | ast.ImportFrom, module: Module) -> None:
    """Note what an import statement binds; the first of several bindings of a name stays."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            bound = alias.asname or alias.name.partition(".")[0]
            module.names.setdefault(bound, alias.name if alias.asname else bound)
            module.mention(module.name, "module", "imports", f"import {alias.name}")
        return
    source = node.module or ""
    if node.level:
        up = node.level - 1 if module.is_package else node.level
        parts = module.name.split(".")
        source = ".".join([*parts[: len(parts) - up], *([source] if source else [])])
    for alias in node.names:
        module.mention(module.name, "module", "imports", f"from {source} {alias.name}")
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
