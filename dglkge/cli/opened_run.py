"""A run opened for a command: its checkpoint, its model, and its dataset where that is needed."""

from __future__ import annotations

import argparse
from pathlib import Path

from dglkge.checkpoint.bigraph_reader import is_bigraph
from dglkge.checkpoint.reader import Checkpoint
from dglkge.data.dataset import Dataset
from dglkge.errors import InputError
from dglkge.model.kge_model import KgeModel, build_model

SPLITS = ("train", "valid", "test")


def add_run_argument(parser: argparse.ArgumentParser) -> None:
    """Declare the argument that every command starts with."""
    parser.add_argument("run", metavar="RUN", help="folder of a run, or the checkpoint folder in it")


def add_verify_argument(parser: argparse.ArgumentParser) -> None:
    """Declare that what is read may go unchecked."""
    parser.add_argument(
        "--no-verify",
        action="store_true",
        help="do not compare what is read with its checksums, which saves reading the rows once more",
    )


def add_dataset_argument(parser: argparse.ArgumentParser) -> None:
    """Declare where the dataset lies now."""
    parser.add_argument(
        "--dataset", metavar="DIR", help="the run's dataset, where it has moved since training"
    )


def open_model(checkpoint: Checkpoint) -> KgeModel:
    """Build the checkpoint's model."""
    meta = checkpoint.meta
    return build_model(meta.score_function, meta.dim, meta.reciprocal)


def open_dataset(checkpoint: Checkpoint, path: str | None) -> Dataset:
    """Open the dataset that a checkpoint was trained on.

    Parameters
    ----------
    checkpoint : Checkpoint
    path : str or None
        None for where it lay when the run was trained.

    Raises
    ------
    InputError
        If it is not there, or is another one, or PyTorch-BigGraph wrote the checkpoint.
    """
    if is_bigraph(checkpoint.path, checkpoint.version):
        target = path or "DIR"
        resumed = checkpoint.run_folder.with_name(checkpoint.run_folder.name + "_converted")
        raise InputError(
            f"{checkpoint.path} was written by PyTorch-BigGraph, with ids of its own; to use it with "
            f"a data set: dglkge checkpoint convert {checkpoint.path} --to run --dataset {target} "
            f"--output {resumed}"
        )
    folder = Path(path or checkpoint.meta.dataset_path)
    if path is None and not folder.is_dir():
        raise InputError(f"the run's dataset {folder} is not there any more; say with --dataset where it is")
    dataset = Dataset.open(folder)
    if dataset.fingerprint != checkpoint.meta.dataset_fingerprint:
        raise InputError(
            f"{folder} is not the dataset of this run ({checkpoint.meta.dataset_name}): its fingerprint is "
            f"{dataset.fingerprint[:12]}, expected {checkpoint.meta.dataset_fingerprint[:12]}"
        )
    return dataset
