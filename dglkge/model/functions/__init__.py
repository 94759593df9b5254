"""Score functions by family, with comparators and operators; ``model.score_functions`` registers them."""

from __future__ import annotations
