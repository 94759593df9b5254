"""Packaging of dglkge: requirements, the two lanes, commands."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent

FEATURES = {
    "completion": ["shtab>=1.6"],
    "faiss": ["faiss-cpu>=1.8"],
    "huggingface": ["huggingface_hub", "safetensors"],
    "lancedb": ["lancedb"],
    # Without a server MLflow keeps runs in a database file.
    "mlflow": ["mlflow-skinny>=2.14", "sqlalchemy", "alembic"],
    "rdf": ["pyoxigraph>=0.5,<0.6"],
    "report": ["jinja2", "plotly>=5", "scikit-learn"],
    "serve": ["fastapi>=0.110", "pydantic>=2", "uvicorn>=0.29"],
    "storage": ["fsspec", "s3fs"],
    "tensorboard": ["tensorboard"],
    "tune": ["optuna>=4.2,<5"],
    "wandb": ["wandb>=0.17"],
}
"""Packages of features that not everybody wants: pip install 'dglkge[report,serve]'."""


def read(name: str) -> str:
    """Return a file of the repository as text."""
    return (HERE / name).read_text(encoding="utf-8")


def version() -> str:
    """Return the version from the package's source; importing it would need DGL and torch."""
    found = re.search(r'^__version__ = "([^"]+)"$', read("dglkge/__init__.py"), re.MULTILINE)
    if found is None:
        raise RuntimeError('dglkge/__init__.py has no line __version__ = "..."')
    return found.group(1)


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


setup(
    name="dglkge",
    version=version(),
    description="Knowledge-graph embeddings trained on DGL's own distributed engine",
    long_description=read("README.md") if (HERE / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["dglkge", "dglkge.*"]),
    # Explicit, so that an editable installation puts this folder on the path, partition_tools included.
    package_dir={"": "."},
    package_data={"dglkge": ["py.typed"], "dglkge.report": ["page.*"], "dglkge.serving": ["page/*"]},
    cmdclass={"build_py": WithRecipes},
    python_requires=">=3.9",
    # No torch here: unpinned, it would bring several GB of CUDA packages of a release that no DGL loads.
    # An environment with DGL has a torch that fits it; the lanes below pin pairs that are tested.
    install_requires=[
        "dgl>=1.1.3",
        "h5py",
        "numba",
        "numpy",
        "packaging",
        "pandas",
        "psutil",
        "pyarrow",
        "pyyaml",
        "rich",
        "scipy",
        "tqdm",
    ],
    extras_require={
        # Both versions of DGL import packages that they do not require: packaging, pydantic, pyyaml.
        "dgl1": ["dgl==1.1.3", "torch==2.13.0", "packaging"],
        # torch 2.2.1 needs numpy 1, which newer releases of pyarrow refuse at import without declaring it.
        "dgl2": [
            "dgl==2.1.0",
            "torch==2.2.1",
            "torchdata==0.7.1",
            "numpy<2",
            "pyarrow<23",
            "pydantic",
            "pyyaml",
        ],
        **FEATURES,
        "test": [
            *("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "setuptools>=70.1"),
            *(package for packages in FEATURES.values() for package in packages),
            # Readers of what is exported, a client of what is served, a browser's driver, notebooks.
            *("duckdb", "polars", "httpx", "playwright", "ipykernel", "nbclient", "nbformat"),
            # An S3 server on loopback.
            "moto[server]",
        ],
        "dev": ["ruff", "mypy"],
    },
    entry_points={
        "console_scripts": [
            "dglkge=dglkge.cli.main:main",
            "dglkge-launch=dglkge.cli.launch:main",
        ]
    },
)
