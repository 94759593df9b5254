"""For processes of which others are copies: importing this calls a compiled loop.

Numba takes .3 s to look up its own functions before the first one runs.
"""

from __future__ import annotations

import numpy as np

from dglkge.kernels.narrow_rows import widen_rows

widen_rows(np.zeros((1, 1), np.uint16), np.zeros(1, np.int64), False, np.zeros((1, 1), np.float32))
