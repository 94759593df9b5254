"""One optimizer for each embedding."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

from dgl.distributed import DistEmbedding

#: The optimizer of each embedding of this process, by its kvstore and the name of its tensor there. A process
#: that trains twice has two kvstores; an optimizer of the first one may still be referenced.
_OWNERS: weakref.WeakValueDictionary = weakref.WeakValueDictionary()


def claim(embeddings: Sequence[Any], optimizer: Any) -> None:
    """Make an optimizer that of some embeddings, for as long as it lives; all of them or none.

    Raises
    ------
    TypeError
        Something is no ``dgl.distributed.DistEmbedding``.
    ValueError
        An embedding has an optimizer already.
    """
    kind = type(optimizer).__name__
    for embedding in embeddings:
        if not isinstance(embedding, DistEmbedding):
            got = type(embedding).__name__
            raise TypeError(f"{kind} updates dgl.distributed.DistEmbedding only, got {got}")
    keys = [(id(embedding.kvstore), embedding.data_name) for embedding in embeddings]
    if any(key in _OWNERS for key in keys):
        gc.collect()  # an optimizer that nobody holds any more may still hang in a reference cycle
    for embedding, key in zip(embeddings, keys):
        if key in _OWNERS or keys.count(key) > 1:
            other = type(_OWNERS.get(key, optimizer)).__name__
            raise ValueError(
                f"embedding {embedding.name!r} has an optimizer already ({other}): "
                "two would overwrite each other's state"
            )
    for key in keys:
        _OWNERS[key] = optimizer
