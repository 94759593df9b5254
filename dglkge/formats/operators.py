"""Names of other programs: PyTorch-BigGraph's operators, comparators, parameters, losses; DGL-KE's models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dglkge.model.functions.bigraph_operators import OPERATORS as FORMULAS
from dglkge.model.functions.bigraph_scores import NAMED, BigraphScore
from dglkge.model.score_functions import SCORE_FUNCTIONS

LOSSES = {"softmax": "softmax", "logistic": "logistic", "margin_ranking": "ranking"}
"""Its losses by our names."""

PARAMETERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "none": ((), ()),
    "translation": (("translation",), ("translations",)),
    "diagonal": (("diagonal",), ("diagonals",)),
    "linear": (("linear_transformation",), ("linear_transformations",)),
    "affine": (("linear_transformation", "translation"), ("linear_transformations", "translations")),
    "complex_diagonal": (("real", "imag"), ("real", "imag")),
}
"""Names of the parameters of its operators: of one relation, and of all relations stacked."""


DGLKE_MODELS: dict[str, tuple[str, ...]] = {
    "transe_l1": ("TransE_l1",),
    "transe_l2": ("TransE_l2", "TransE"),
    "distmult": ("DistMult",),
    "complex": ("ComplEx",),
    "rotate": ("RotatE",),
    "rescal": ("RESCAL",),
    "simple": ("SimplE",),
    "transr_l1": ("TransR",),
}
"""DGL-KE's names by that of the score function; the first one is written, all are read."""

DGLKE_MATRICES = {"transr": "projection", "transr_l1": "projection"}
"""DGL-KE's file of the numbers of a relation's row after the first D, by the name of the score function."""


@dataclass(frozen=True)
class Operator:
    """A score function in PyTorch-BigGraph's files: how a relation's row is cut into parameters.

    Attributes
    ----------
    name : str
        PyTorch-BigGraph's operator, or a name of ours where it has none.
    comparator : str
        PyTorch-BigGraph's comparator, or a name of ours where it has none (it then refuses the config).
    static, dynamic : tuple of str
        Names of the equal pieces of a row, for one relation and for all relations stacked.
    adjoint_signs : tuple of int
        Sign of each piece in the operator that acts on the tail instead of the head:
        <h r, t> = <h, conj(r) t> and ||h + r - t|| = ||h - (t - r)||.
    bias : bool
        Whether the first number of an entity's row is a bias.
    shapes : callable or None
        Takes the dimension and returns the shape of each piece; None: they are equal parts of the row.
    turns : bool
        Whether the one piece is a matrix R which our query multiplies from the right, h R. PyTorch-BigGraph
        multiplies from the left: its operator on the head is the transpose, that on the tail is R itself.
    """

    name: str
    comparator: str
    static: tuple[str, ...] = ("row",)
    dynamic: tuple[str, ...] = ("rows",)
    adjoint_signs: tuple[int, ...] = (1,)
    bias: bool = False
    shapes: Callable[[int], tuple[tuple[int, ...], ...]] | None = None
    turns: bool = False


OPERATORS = {
    "": Operator("none", "dot", *PARAMETERS["none"]),  # tables without a model
    "transe_l1": Operator("translation", "l1", *PARAMETERS["translation"], (-1,)),
    "transe_l2": Operator("translation", "l2", *PARAMETERS["translation"], (-1,)),
    "distmult": Operator("diagonal", "dot", *PARAMETERS["diagonal"]),
    "complex": Operator("complex_diagonal", "dot", *PARAMETERS["complex_diagonal"], (1, -1)),
    "rescal": Operator("linear", "dot", *PARAMETERS["linear"], shapes=FORMULAS["linear"].shapes, turns=True),
    "rotate": Operator("rotation", "complex_modulus", ("phases",), ("phases",), (-1,)),
}
"""By the name of the score function; one that is not here is stored whole, under its own name."""


def operator_of(score_function: str) -> Operator:
    """Return the operator of a registered score function."""
    if score_function in OPERATORS:
        return OPERATORS[score_function]
    made = SCORE_FUNCTIONS.get(score_function)
    if not issubclass(made, BigraphScore):
        return Operator(score_function, "dot" if made.is_product else score_function)
    # Of several operators each relation has its own parameters: the layout of files cuts their rows.
    static, dynamic = PARAMETERS.get(made.acts.name, ((), ()))
    signs = (1,) * len(static)
    return Operator(made.acts.name, made.comparator, static, dynamic, signs, made.has_bias, made.acts.shapes)


def score_function_of(operator: str, comparator: str, bias: bool) -> str | None:
    """Return the score function of an operator and a comparator; None where none has them."""
    pair = pair_name(operator, comparator, bias)
    return pair if pair in SCORE_FUNCTIONS else None


def pair_name(operator: str, comparator: str, bias: bool) -> str:
    """Return our name of an operator and a comparator."""
    name = f"{operator}_{comparator}" + ("_bias" if bias else "")
    return NAMED.get(name, name)
