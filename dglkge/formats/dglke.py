"""DGL-KE's names of models, and the files in which it has their matrices."""

from __future__ import annotations

MODELS: dict[str, tuple[str, ...]] = {
    "transe_l1": ("TransE_l1",),
    "transe_l2": ("TransE_l2", "TransE"),
    "distmult": ("DistMult",),
    "complex": ("ComplEx",),
    "rotate": ("RotatE",),
    "rescal": ("RESCAL",),
    "simple": ("SimplE",),
    "transr_l1": ("TransR",),
}
"""By the name of the score function; the first one is written, all are read."""

MATRICES = {"transr": "projection", "transr_l1": "projection"}
"""File of the numbers of a relation's row after the first D, by the name of the score function."""
