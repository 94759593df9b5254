"""Calls a compiled loop when it is imported: numba takes .3 s to look up its own functions before the first.

For processes from which others are forked.
"""

from __future__ import annotations

import numpy as np

from dglkge.kernels.narrow_rows import widen_rows

widen_rows(np.zeros((1, 1), np.uint16), np.zeros(1, np.int64), False, np.zeros((1, 1), np.float32))
