"""Ranking: how high do true triples score among corrupted ones. Torch and numpy; no DGL."""

from __future__ import annotations
