"""Tables that others have trained, or that were exported, read like a checkpoint."""

from __future__ import annotations
