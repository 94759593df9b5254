"""Copies a version for PyTorch-BigGraph to continue: its files, and its number of passes as the version.

PyTorch-BigGraph has no record of its progress but the version: it commits after each pass and resumes with
pass ``version``, in epoch ``version // num_edge_chunks // len(edge_paths)``. Versions of dglkge count
commits, at any cadence.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

from dglkge.checkpoint import hdf5_format, layout, shared_texts
from dglkge.checkpoint.bigraph_config import PassCount, bigraph_attributes, bigraph_config
from dglkge.checkpoint.bigraph_reader import is_bigraph
from dglkge.checkpoint.reader import Checkpoint
from dglkge.checkpoint.relation_layout import MODEL_GROUP
from dglkge.errors import CheckpointError, InputError, write_error
from dglkge.typing import RELATION

COPIED = (hdf5_format.EMBEDDINGS, MODEL_GROUP, f"{hdf5_format.OPTIMIZER_GROUP}/{hdf5_format.STATE_BLOB}")
"""What PyTorch-BigGraph has in its HDF5 files; ids and plain optimizer state are ours alone."""


def copy_for_bigraph(source: Checkpoint, output: Path) -> int:
    """Write a folder that PyTorch-BigGraph resumes from, as its ``checkpoint_path`` and ``entity_path``.

    Parameters
    ----------
    source : Checkpoint
        All its files are compared with their checksums first.
    output : Path
        A folder that does not exist, or is empty.

    Returns
    -------
    int
        Its version: the passes that are finished.

    Raises
    ------
    InputError
        If the folder is not empty, or PyTorch-BigGraph wrote the checkpoint.
    CheckpointError
        If no pass is finished, or a file is damaged or cannot be written.
    """
    manifest, folder = source.manifest, source.folder
    if is_bigraph(folder, source.version):
        raise InputError(f"{folder} was written by PyTorch-BigGraph, which resumes from it as it is")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise InputError(f"{output} exists and is no empty folder; take another --output")
    passes = PassCount.of(manifest.meta)
    if not passes.finished:
        raise CheckpointError(
            f"{folder} has no finished pass over the training triples: PyTorch-BigGraph would start anew "
            "from it; expected at least one epoch, edge set or chunk (training.edge_chunks)"
        )
    source.verify()
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        hidden = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
        try:
            _write(source, hidden, output, passes)
            hidden.chmod(0o755)
            # Replaces an empty folder.
            hidden.rename(output)
        finally:
            shutil.rmtree(hidden, ignore_errors=True)
    except OSError as error:
        raise write_error(f"cannot write to {output}", error) from error
    return passes.finished


def _write(source: Checkpoint, folder: Path, output: Path, passes: PassCount) -> None:
    """Write all files to a folder that will have the name of the output."""
    manifest, version = source.manifest, passes.finished
    num_parts = max(entry.part + 1 for entry in manifest.files if entry.table != RELATION)
    config = bigraph_config(manifest.meta, num_parts, str(output.resolve()))
    attributes = bigraph_attributes(manifest.meta, config)
    for entry in manifest.files:
        name = layout.model_file(version)
        if entry.table != RELATION:
            name = layout.embeddings_file(entry.table, entry.part, version)
        with (
            hdf5_format.open_file(source.folder / entry.name) as theirs,
            hdf5_format.create(folder / name, attributes) as ours,
        ):
            for path in COPIED:
                if path in theirs:
                    parent = path.rpartition("/")[0]
                    theirs.copy(path, ours.require_group(parent) if parent else ours)
    of_parts = [text.name for entry in manifest.files for text in entry.texts]
    for name in (layout.RELATION_COUNT_FILE, layout.RELATION_NAMES_FILE, *of_parts):
        shutil.copyfile(source.folder / name, folder / name)
    (folder / layout.CONFIG_FILE).write_text(json.dumps(config, indent=4), encoding="utf-8")
    # A save that was interrupted may have left records of passes that this version does not have.
    place = divmod(version, len(passes.edge_sets) * passes.num_chunks)
    open_pass = (place[0], *divmod(place[1], passes.num_chunks))
    kept = [one for one in shared_texts.read_stats(source.folder) if shared_texts.pass_of(one) < open_pass]
    lines = "".join(json.dumps(one) + "\n" for one in kept)
    (folder / layout.STATS_FILE).write_text(lines, encoding="utf-8")
    (folder / layout.VERSION_FILE).write_text(f"{version}\n", encoding="utf-8")
