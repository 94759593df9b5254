"""DGL-KE's folder of a trained model: file names, ``config.json``, id maps, rows and RotatE's phases.

DGL-KE writes ``{dataset}_{model}_entity.npy``, ``{dataset}_{model}_relation.npy`` and ``config.json``, the
arguments of its training command. The id maps, which name the rows, are in the folder of its triples.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from dglkge.checkpoint.manifest import CheckpointMeta
from dglkge.data.dataset_files import load_json
from dglkge.data.partition_layout import map_npy
from dglkge.data.text_format import numbered_lines
from dglkge.data.vocabulary import Vocabulary
from dglkge.errors import InputError
from dglkge.formats.operators import DGLKE_MATRICES, DGLKE_MODELS
from dglkge.inference.whole_tables import WholeTables
from dglkge.model.kge_model import KgeModel, build_model
from dglkge.model.score_functions import PHASE, SCORE_FUNCTIONS
from dglkge.typing import RELATION, Relation

logger = logging.getLogger(__name__)

CONFIG, ENTITY = "config.json", "entity"
OTHER_MODELS = ("ConvE", "AttH")
"""DGL-KE's models that dglkge does not implement."""

MAP_KEYS = {ENTITY: "emp_file", RELATION: "rmap_file"}
MAP_NAMES = {
    ENTITY: ("entities.tsv", "entities.dict", "entity2id.txt"),
    RELATION: ("relations.tsv", "relations.dict", "relation2id.txt"),
}
"""File names of id maps in order of preference: of user-defined data sets, then of built-in ones."""
DEFAULT_GAMMA = 12.0
INIT_EPSILON = 2.0
"""DGL-KE's initial rows are uniform in [-(gamma + 2) / hidden_dim, (gamma + 2) / hidden_dim]."""


def models() -> dict[str, str]:
    """Return DGL-KE's names of the models that dglkge has, to its score functions; other spellings first."""
    pairs = [(spelling, name) for name, spellings in DGLKE_MODELS.items() for spelling in spellings]
    # A stable sort by whether a spelling is DGL-KE's first one.
    return dict(sorted(pairs, key=lambda pair: pair[0] == DGLKE_MODELS[pair[1]][0]))


@dataclass(frozen=True)
class DglkeFolder:
    """Files of one model.

    Attributes
    ----------
    stem : str
        Common prefix of the names of the two files of rows.
    score_function : str
        By the files' names or ``config.json``.
    config : dict
        The content of ``config.json``; empty without that file.
    """

    folder: Path
    stem: str
    score_function: str
    config: dict[str, Any]

    @classmethod
    def open(cls, folder: Path, score_function: str | None = None) -> DglkeFolder:
        """Find the files of a folder, whose score function the user may have said."""
        config = load_json(folder / CONFIG) if (folder / CONFIG).is_file() else {}
        # config.json names the files exactly. If it or these are absent, the one pair of files in the folder
        # is taken.
        stem = f"{config.get('dataset')}_{config.get('model_name')}_"
        if not (folder / f"{stem}{ENTITY}.npy").is_file():
            stem = one_file(folder, f"*_{ENTITY}.npy").name[: -len(f"{ENTITY}.npy")]
        # Known names only: a data set's own name may contain underscores, so the stem cannot be split.
        model = next((name for name in (*models(), *OTHER_MODELS) if stem.endswith(f"_{name}_")), None)
        configured = config.get("model_name")
        if None not in (model, configured) and configured != model:
            raise InputError(f"{folder / CONFIG} says {configured}, the file {stem}{ENTITY}.npy says {model}")
        model = model or configured
        if model is not None and model not in models():
            raise InputError(f"dglkge has no DGL-KE model {model!r}; known: {', '.join(models())}")
        known = models()[model] if model else score_function
        if known is None:
            raise InputError(
                f"neither {CONFIG} nor the names of the files in {folder} say what model the rows belong to; "
                "dglkge checkpoint convert --from dglke --score-function does"
            )
        if score_function not in (None, known):
            raise InputError(f"the files are DGL-KE's {model}, --score-function says {score_function}")
        return cls(folder, stem, known, config)

    def rows(self, table: str) -> np.ndarray:
        """Map the rows (n, D) of ``entity`` or ``relation``: phases in radians, matrices beside the rows."""
        rows = load_npy(self.folder / f"{self.stem}{table}.npy")
        if table != RELATION:
            return rows
        if SCORE_FUNCTIONS.get(self.score_function).relation_init == PHASE:
            return self._phases(rows)
        if self.score_function not in DGLKE_MATRICES:
            return rows
        path = self.folder / f"{self.stem}{DGLKE_MATRICES[self.score_function]}.npy"
        matrices = load_npy(path)
        if len(matrices) != len(rows):
            raise InputError(f"{path} has {len(matrices)} rows, expected {len(rows)}: one for each relation")
        return np.concatenate([rows, matrices], axis=1)

    def names(self, table: str, num_rows: int) -> list[str]:
        """Return the names of a table's rows by its id map, which ``config.json`` may name; [] without."""
        config, named = self.config, self.config.get(MAP_KEYS[table])
        data = Path(str(config.get("data_path") or "."))
        # A map under a default name in another folder may be that of another model.
        places = [self.folder, data, data / str(config.get("dataset") or ".")] if named else [self.folder]
        files = [str(named)] if named else MAP_NAMES[table]
        for path in (place / file for file in files for place in places):
            if path.is_file():
                # The map has the delimiter of the triples.
                return read_id_map(path, str(config.get("delimiter") or "\t"), num_rows)
        if named:
            raise InputError(
                f"{self.folder / CONFIG} names the id map {named}, which is neither in {self.folder} nor in "
                f"{data}: put it beside the rows, whose order it gives"
            )
        return []

    def _phases(self, rows: np.ndarray) -> np.ndarray:
        """Return RotatE's relation rows as phases in radians; gamma in ``config.json`` gives the scale."""
        where, width = self.folder / CONFIG, rows.shape[1]
        if not self.config:
            raise InputError(f"{where} is missing: RotatE's phases are scaled by its gamma")
        gamma, dim = self.config.get("gamma"), self.config.get("hidden_dim", width)
        if not isinstance(gamma, (int, float)) or not -INIT_EPSILON < gamma < math.inf:
            raise InputError(f"{where}: gamma is {gamma!r}; allowed: a number above -2")
        # The width is part of the scale: config.json of another model would give wrong phases without an
        # error.
        if dim != width:
            raise InputError(f"{where}: hidden_dim is {dim}, but the rows of relations have {width} numbers")
        # In float64, so that export and import together change a row by one rounding only.
        return (rows.astype(np.float64) / phase_scale(gamma, width)).astype(np.float32)


def phase_scale(gamma: float, hidden_dim: int) -> float:
    """Return DGL-KE's rows of RotatE's relations divided by the phases in radians.

    DGL-KE initializes these rows in the range of the entities' rows and maps that range to [-pi, pi].
    """
    return (gamma + INIT_EPSILON) / hidden_dim / math.pi


def open_dglke(folder: Path) -> WholeTables:
    """Open DGL-KE's folder: one entity type ``entity``, and relations between entities of that type.

    Ids are DGL-KE's row numbers. Without an id map they are also the names.
    """
    files, rows, names = DglkeFolder.open(folder), {}, {}
    for table in (ENTITY, RELATION):
        matrix = files.rows(table)
        # Rows that are float32 already stay mapped from the file.
        rows[table] = torch.from_numpy(np.asarray(matrix, dtype=np.float32))
        names[table] = files.names(table, len(matrix)) or list(map(str, range(len(matrix))))
    # No file states the model's shape: the widths are the only check that rows and model fit.
    model = build_model(files.score_function, rows[ENTITY].shape[1], reciprocal=False)
    require_width(model, files.score_function, rows[RELATION], folder)
    meta = CheckpointMeta(
        dataset_name=str(files.config.get("dataset") or folder.name),
        entity_types={ENTITY: len(rows[ENTITY])},
        relations=[Relation(name, ENTITY, ENTITY) for name in names[RELATION]],
        progress={},
        score_function=files.score_function,
        dim=model.dim,
        reciprocal=False,
    )
    return WholeTables(folder, meta, rows, lambda _type: Vocabulary(names[ENTITY], ENTITY), {})


def is_dglke(folder: Path) -> bool:
    """Return whether a folder holds DGL-KE's files of rows."""
    return folder.is_dir() and any(folder.glob(f"*_{ENTITY}.npy")) and any(folder.glob(f"*_{RELATION}.npy"))


def one_file(folder: Path, pattern: str) -> Path:
    """Return the one file of a folder that matches a pattern."""
    paths = list(folder.glob(pattern))
    if len(paths) != 1:
        raise InputError(f"expected one file {folder / pattern}, found {len(paths)}")
    return paths[0]


def load_npy(path: Path) -> np.ndarray:
    """Map the matrix in an npy file copy-on-write."""
    # Torch warns about read-only arrays; no write can reach the file.
    matrix = map_npy(path, mode="c")
    if matrix.ndim != 2:
        raise InputError(f"{path}: its shape is {matrix.shape}, expected a matrix")
    return matrix


def require_width(model: KgeModel, score_function: str, relations: torch.Tensor, folder: Path) -> None:
    """Refuse rows of relations of another width than the model's."""
    if relations.shape[1] != model.relation_width:
        halves = ", two halves," if model.reciprocal else ""
        raise InputError(
            f"{folder}: the rows of relations have {relations.shape[1]} numbers, {score_function} with "
            f"entities of {model.dim}{halves} needs {model.relation_width}"
        )


def read_id_map(path: Path, delimiter: str, num_rows: int) -> list[str]:
    """Read lines of id and name, and return the names by id.

    DGL-KE reads and writes the id first; files made after its documentation have the name first. The column
    that holds every id once is taken as that of the ids. A first line with the number of lines, as in
    Freebase's files, is skipped.
    """
    pairs = [line.split(delimiter) for _, line in numbered_lines(path) if line.strip()]
    # Freebase's files begin with their number of lines.
    if pairs and len(pairs[0]) == 1 and pairs[0][0].strip().isdigit():
        del pairs[0]
    for number, pair in enumerate(pairs, start=1):
        if len(pair) != 2:
            raise InputError(f"{path}:{number}: got {len(pair)} columns, expected id and name")
    # DGL-KE's own order first: if both columns are permutations of the ids, the id is the first one.
    ids = list(map(str, range(num_rows)))
    for column in (0, 1):
        name_of = {pair[column].strip(): pair[1 - column] for pair in pairs}
        if len(pairs) == num_rows and name_of.keys() == {*ids}:
            return [name_of[id_] for id_ in ids]
    raise InputError(f"{path}: got ids of {len(pairs)} rows, expected each of 0 to {num_rows - 1} once")


def dglke_config(meta: CheckpointMeta) -> dict[str, Any]:
    """Return the ``config.json`` with which DGL-KE's commands read a model of dglkge."""
    if meta.score_function not in DGLKE_MODELS or meta.reciprocal or len(meta.entity_types) != 1:
        raise InputError(
            f"DGL-KE has {', '.join(DGLKE_MODELS)} of one entity type, no reciprocal relations; "
            f"got {meta.score_function}, {', '.join(meta.entity_types)}, reciprocal {meta.reciprocal}"
            + ("; train with model.reciprocal_relations=false for it" if meta.reciprocal else "")
        )
    doubled = SCORE_FUNCTIONS.get(meta.score_function).relation_init == PHASE
    maps = {MAP_KEYS[table]: MAP_NAMES[table][0] for table in (ENTITY, RELATION)}
    # dglkge's scores have no gamma: a margin's value is kept, and any other only adds a constant.
    gamma = float(meta.config.get("loss", {}).get("margin", DEFAULT_GAMMA))
    model = {"model_name": DGLKE_MODELS[meta.score_function][0], "dataset": meta.dataset_name, "gamma": gamma}
    shape = {"hidden_dim": meta.dim // 2 if doubled else meta.dim, "double_ent": doubled, "double_rel": False}
    return {**model, **shape, "delimiter": "\t", "data_path": ".", **maps}


def write_id_map(names: Sequence[str], file: BinaryIO) -> None:
    """Write an id map as DGL-KE does: id and name on each line."""
    file.writelines(f"{id_}\t{name}\n".encode() for id_, name in enumerate(names))
