"""Objectives: from the rows of a batch to its loss and gradients, with negatives or over all candidates."""

from __future__ import annotations
