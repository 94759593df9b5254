"""The repository's own source files."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class SourceFile:
    """A Python file and its syntax tree."""

    path: Path
    tree: ast.Module

    @property
    def name(self) -> str:
        """Path below the repository, as a reader writes it."""
        return self.path.relative_to(ROOT).as_posix()

    @property
    def module(self) -> str:
        """Dotted name of the module."""
        return ".".join(self.path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def parsed(path: Path) -> SourceFile:
    """Parse a file, once for all tests of a process."""
    return SourceFile(path, ast.parse(path.read_text(encoding="utf-8"), str(path)))


def sources(*folders: str) -> list[SourceFile]:
    """Parse the Python files below some folders of the repository."""
    return [parsed(path) for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def called_name(call: ast.Call) -> str:
    """Return the last word of the function that is called."""
    return getattr(call.func, "attr", getattr(call.func, "id", ""))
