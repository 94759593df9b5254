"""The way by which rows of other machines come, from the configuration."""

from __future__ import annotations

import torch

from dglkge.config import Config
from dglkge.distributed.request_limit import request_limit_seconds
from dglkge.embeddings.table_set import TableSet
from dglkge.optim.alltoall import Alltoall
from dglkge.training.components import check_lookup


def choose_lookup(config: Config, tables: TableSet, num_machines: int) -> None:
    """Let rows of other machines come in the way that is configured; a collective.

    Parameters
    ----------
    config : Config
    tables : TableSet
    num_machines : int

    Raises
    ------
    InputError
        If rows that the kvstore brings are to be stale.
    """
    check_lookup(config)
    chosen = config.training
    if chosen.lookup == "kvstore":
        return
    if num_machines > 1:
        group = Alltoall(
            request_limit_seconds(),
            own_group=True,
            purpose="lookup of rows",
            duty="train every batch, also with no triples of its own",
        )
        tables.use_exchange(group, getattr(torch, chosen.wire), chosen.staleness)
