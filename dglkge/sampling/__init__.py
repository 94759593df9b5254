"""Which edges are trained on next, and against what."""
