"""Use of a trained model on its files: predict, find similar entities, rank, import and export. No DGL."""

from __future__ import annotations
