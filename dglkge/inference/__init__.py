"""Asking a trained model: links, similar entities, and the rows themselves in other formats."""

from __future__ import annotations
