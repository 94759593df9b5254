"""Tables of a trained model written in the formats of others."""

from __future__ import annotations
