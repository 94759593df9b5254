"""The repository's own source files, parsed once for all contract tests."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OUTPUTS = {"build", "data", "datasets", "demo", "dist", "runs"}
"""Folders at the top of the repository that commands write, as .gitignore has them."""

NOT_OURS = [".git", "__pycache__", ".venv*", ".hypothesis", "*_cache", "*.egg-info"]
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class SourceFile:
    """A Python file: where it is, what it says, and its syntax tree."""

    path: Path
    text: str
    tree: ast.Module

    @property
    def name(self) -> str:
        """Path below the repository, as a reader writes it."""
        return self.path.relative_to(ROOT).as_posix()

    @property
    def module(self) -> str:
        """Dotted name of the module."""
        parts = self.path.relative_to(ROOT).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def num_lines(self) -> int:
        """Number of lines."""
        return self.text.count("\n")


def walk(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder that belong to the project, in order."""
    for path in sorted(folder.iterdir()):
        written = path.parent == ROOT and path.name in OUTPUTS
        if written or any(fnmatch(path.name, pattern) for pattern in NOT_OURS):
            continue
        if path.is_dir():
            yield from walk(path)
        elif path.is_file():
            yield path


@cache
def sources(*folders: str) -> tuple[SourceFile, ...]:
    """Return the Python files below some folders of the repository; one that does not parse is an error.

    To be called in tests: while tests are collected, every worker would parse all files.
    """
    return tuple(source for folder in folders for source in sources_of(folder))


@cache
def sources_of(folder: str) -> tuple[SourceFile, ...]:
    """Return the Python files below one folder."""
    return tuple(parsed(path) for path in walk(ROOT / folder) if path.suffix == ".py")


def parsed(path: Path) -> SourceFile:
    """Return a Python file."""
    text = path.read_text(encoding="utf-8")
    return SourceFile(path, text, ast.parse(text, filename=str(path)))


def functions(tree: ast.AST) -> Iterator[FunctionNode]:
    """Yield every function and method, nested ones included."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Yield (dotted name of what is called, the call)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node
