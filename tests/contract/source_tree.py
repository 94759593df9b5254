"""The repository's own source files."""

from __future__ import annotations

import ast
from dataclasses import dataclass
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


def sources(*folders: str) -> list[SourceFile]:
    """Parse the Python files below some folders of the repository."""
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [SourceFile(path, ast.parse(path.read_text(encoding="utf-8"), str(path))) for path in paths]
