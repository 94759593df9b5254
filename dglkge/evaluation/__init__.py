"""Ranking of true triples among corrupted ones: queries, counts, metrics. Torch and numpy; no DGL."""

from __future__ import annotations
