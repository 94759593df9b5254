"""DGL-KE's folder of a trained model: file names, ``config.json``, id maps and RotatE's phases.

DGL-KE writes ``{dataset}_{model}_entity.npy``, ``{dataset}_{model}_relation.npy`` and ``config.json``, the
arguments of its training command. The id maps that give each row its name lie where its triples lie.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dglkge.checkpoint.manifest import CheckpointMeta
from dglkge.data.dataset_files import load_json
from dglkge.errors import InputError
from dglkge.typing import RELATION

logger = logging.getLogger(__name__)

CONFIG = "config.json"
ENTITY = "entity"
MODELS = {
    "TransE": "transe_l2",
    "TransE_l1": "transe_l1",
    "TransE_l2": "transe_l2",
    "DistMult": "distmult",
    "ComplEx": "complex",
    "RotatE": "rotate",
}
"""DGL-KE's models that dglkge has; its ``TransE`` is ``TransE_l2``."""
MODEL_OF = {score_function: model for model, score_function in MODELS.items() if model != "TransE"}
"""Our score functions to DGL-KE's models."""
OTHER_MODELS = ("TransR", "RESCAL", "SimplE", "ConvE", "AttH")
"""DGL-KE's models that dglkge has not."""

MAP_KEYS = {ENTITY: "emp_file", RELATION: "rmap_file"}
MAP_NAMES = {
    ENTITY: ("entities.tsv", "entities.dict", "entity2id.txt"),
    RELATION: ("relations.tsv", "relations.dict", "relation2id.txt"),
}
"""Names of the id maps of user-defined data sets, which come first, and of the built-in ones."""
DEFAULT_GAMMA = 12.0
INIT_EPSILON = 2.0
"""DGL-KE starts rows in [-(gamma + 2) / hidden_dim, (gamma + 2) / hidden_dim]."""


@dataclass(frozen=True)
class DglkeFolder:
    """The files of one model.

    Attributes
    ----------
    folder : Path
    stem : str
        Beginning of the names of the two files of rows.
    model : str or None
        DGL-KE's name of the model; None where neither the files' names nor ``config.json`` tell.
    config : dict or None
        The content of ``config.json``; None where there is none.
    """

    folder: Path
    stem: str
    model: str | None
    config: dict[str, Any] | None

    @classmethod
    def open(cls, folder: Path) -> DglkeFolder:
        """Find the files of a folder.

        Raises
        ------
        InputError
            If there is not one model, or it is none of dglkge's.
        """
        config = load_json(folder / CONFIG) if (folder / CONFIG).is_file() else None
        wanted = f"{config.get('dataset')}_{config.get('model_name')}_" if config else ""
        if not (folder / f"{wanted}{ENTITY}.npy").is_file():
            found = sorted(folder.glob(f"*_{ENTITY}.npy"))
            if len(found) != 1:
                raise InputError(f"expected one file {folder / f'*_{ENTITY}.npy'}, found {len(found)}")
            wanted = found[0].name[: -len(f"{ENTITY}.npy")]
        model = next((one for one in (*MODELS, *OTHER_MODELS) if wanted.endswith(f"_{one}_")), None)
        said = config.get("model_name") if config else None
        if model is not None and said is not None and said != model:
            raise InputError(
                f"{folder / CONFIG} says {said}, the file {wanted}{ENTITY}.npy says {model}: "
                "they belong to two models"
            )
        model = model or said
        if model is not None and model not in MODELS:
            raise InputError(f"dglkge has no DGL-KE model {model!r}; known: {', '.join(MODELS)}")
        return cls(folder, wanted, model, config)

    def rows_file(self, table: str) -> Path:
        """Return the file of a table's rows."""
        return self.folder / f"{self.stem}{table}.npy"

    def names(self, table: str, num_rows: int) -> list[str]:
        """Return the names of a table's rows from its id map.

        Parameters
        ----------
        table : str
            ``"entity"`` or ``"relation"``.
        num_rows : int
            Of the table.

        Returns
        -------
        list of str
            Empty where there is no id map.

        Raises
        ------
        InputError
            If ``config.json`` names a map that is not there, or the map does not fit the rows.
        """
        path = self._map_file(table)
        if path is None:
            return []
        delimiter = (self.config or {}).get("delimiter") or "\t"
        return read_id_map(path, str(delimiter), num_rows)

    def _map_file(self, table: str) -> Path | None:
        """Find a table's id map: beside the rows, or where ``config.json`` says that the triples lie."""
        config = self.config or {}
        named = config.get(MAP_KEYS[table])
        data = Path(str(config.get("data_path") or "."))
        places = [self.folder, data, data / str(config.get("dataset") or ".")]
        for name in [str(named)] if named else MAP_NAMES[table]:
            # Without a name only the folder itself is searched: any other map may be another model's.
            for path in [place / name for place in places] if named else [self.folder / name]:
                if path.is_file():
                    return path
        if named:
            raise InputError(
                f"{self.folder / CONFIG} names the id map {named}, which is neither in {self.folder} nor in "
                f"{data}: put it beside the rows, whose order it gives"
            )
        return None

    def phases(self, rows: np.ndarray) -> np.ndarray:
        """Return RotatE's relation rows as phases in radians.

        Raises
        ------
        InputError
            If ``config.json`` is missing or does not fit the rows: it has gamma, and so the scale.
        """
        where = self.folder / CONFIG
        if self.config is None:
            raise InputError(f"{where} is missing: RotatE's phases are scaled by its gamma")
        gamma = self.config.get("gamma")
        if isinstance(gamma, bool) or not isinstance(gamma, (int, float)) or not math.isfinite(gamma):
            raise InputError(f"{where}: gamma is {gamma!r}; allowed: a number")
        if gamma <= -INIT_EPSILON:
            raise InputError(f"{where}: gamma is {gamma!r}; allowed: a number above -2")
        width = rows.shape[1]
        hidden = self.config.get("hidden_dim", width)
        if hidden != width:
            raise InputError(
                f"{where}: hidden_dim is {hidden}, but the rows of relations have {width} numbers"
            )
        return (rows.astype(np.float64) / phase_scale(gamma, width)).astype(np.float32)


def phase_scale(gamma: float, hidden_dim: int) -> float:
    """Return what DGL-KE's RotatE multiplies phases by: rows start in the range of the entities' rows."""
    return (gamma + INIT_EPSILON) / hidden_dim / math.pi


def read_id_map(path: Path, delimiter: str, num_rows: int) -> list[str]:
    """Read lines of id and name, and return the names by id.

    DGL-KE reads and writes the id first; its documentation, and files made by it, have the name first. The
    column that holds every id once is that of the ids. A first line with the number of lines, as Freebase's
    files have, is left out.

    Raises
    ------
    InputError
        If the file cannot be read, or neither column has each id of the rows once.
    """
    try:
        lines = path.read_bytes().decode("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    lines = [line.strip("\r") for line in lines if line.strip()]
    if lines and delimiter not in lines[0] and lines[0].strip().isdigit():
        lines = lines[1:]
    pairs = [tuple(line.split(delimiter)) for line in lines]
    for number, pair in enumerate(pairs, start=1):
        if len(pair) != 2:
            raise InputError(f"{path}:{number}: got {len(pair)} columns, expected id and name")
    for ids, names in ((0, 1), (1, 0)):
        name_of = {int(pair[ids]): pair[names] for pair in pairs if _is_id(pair[ids])}
        if len(pairs) == num_rows == len(name_of) and max(name_of, default=-1) < num_rows:
            return [name_of[id_] for id_ in range(num_rows)]
    raise InputError(
        f"{path}: got ids of {len(pairs)} rows, expected each of 0 to {num_rows - 1} once, as the "
        f"file of rows has {num_rows}"
    )


def _is_id(text: str) -> bool:
    return text.strip().isascii() and text.strip().isdigit()


def dglke_config(meta: CheckpointMeta) -> dict[str, Any]:
    """Return the ``config.json`` that DGL-KE's commands need to read a model of ours.

    Raises
    ------
    InputError
        If DGL-KE has no such model.
    """
    if meta.score_function not in MODEL_OF or meta.reciprocal or len(meta.entity_types) != 1:
        raise InputError(
            f"DGL-KE has {', '.join(MODEL_OF)} of one entity type, no reciprocal relations; "
            f"got {meta.score_function}, {', '.join(meta.entity_types)}, reciprocal {meta.reciprocal}"
        )
    loss = meta.config.get("loss", {})
    has_gamma = loss.get("name") in ("margin_ranking", "self_adversarial")
    doubled = meta.score_function == "rotate"
    return {
        "model_name": MODEL_OF[meta.score_function],
        "dataset": meta.dataset_name,
        "hidden_dim": meta.dim // 2 if doubled else meta.dim,
        "gamma": float(loss["margin"]) if has_gamma else DEFAULT_GAMMA,
        "double_ent": doubled,
        "double_rel": False,
        "delimiter": "\t",
        "data_path": ".",
        MAP_KEYS[ENTITY]: MAP_NAMES[ENTITY][0],
        MAP_KEYS[RELATION]: MAP_NAMES[RELATION][0],
    }


def id_map_lines(names: Sequence[str]) -> list[bytes]:
    """Return the lines of an id map, as DGL-KE writes them."""
    return [f"{id_}\t{name}\n".encode() for id_, name in enumerate(names)]


def config_bytes(config: dict[str, Any]) -> bytes:
    """Return the content of ``config.json``."""
    return (json.dumps(config, indent=4) + "\n").encode()
