"""Adds the recipes to the package; all else of its packaging stands in pyproject.toml."""

from __future__ import annotations

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent


class WithRecipes(build_py):
    """Copies the recipes of examples/ into the package: a wheel has no examples."""

    def run(self) -> None:
        """Build, then copy; an editable installation reads them where they are."""
        super().run()
        if self.editable_mode:
            return
        for path in sorted((HERE / "examples").glob("*/*.yaml")):
            target = Path(self.build_lib) / "dglkge" / "config" / "recipes" / path.parent.name / path.name
            target.parent.mkdir(parents=True, exist_ok=True)
            self.copy_file(str(path), str(target))


setup(cmdclass={"build_py": WithRecipes})
