"""State in the form of ``torch.optim``: ``{"state": {number: {...}}, "param_groups": [...]}``.

Embeddings are numbered through all groups. The state of an embedding holds ``ids`` "(n,)" and the rows of
each state tensor for them; without ``ids`` these are all rows, in the order of their ids, as
``torch.optim.Adagrad`` and ``torch.optim.SparseAdam`` save them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dglkge.optim.state_file import EMB_STATES, GROUPS, IDS, PARAMS, STATES
from dglkge.optim.table import Table

#: torch's names of state tensors.
_NAME_IN_TORCH = {"mem": "exp_avg", "power": "exp_avg_sq"}


def is_of_torch(state_dict: Mapping[str, Any]) -> bool:
    """Whether a saved state is in the form of torch only."""
    return EMB_STATES not in state_dict and {"state", "param_groups"} <= set(state_dict)


def to_torch(content: Mapping[str, Any], tables: Sequence[Table]) -> dict[str, Any]:
    """One trainer's saved state in the form of torch."""
    by_label = {table.label: table for table in tables}
    state: dict[int, dict[str, torch.Tensor]] = {}
    groups = []
    for group in content[PARAMS][GROUPS]:
        numbers = range(len(state), len(state) + len(group["params"]))
        for number, label in zip(numbers, group["params"]):
            saved = content[EMB_STATES][label]
            state[number] = {
                IDS: saved[IDS],
                **{
                    _NAME_IN_TORCH.get(key, key): saved[STATES][tensor.name]
                    for key, tensor in by_label[label].state.items()
                },
            }
        groups.append({**group, "params": list(numbers)})
    return {"state": state, "param_groups": groups}


def from_torch(
    state_dict: Mapping[str, Any],
    tables: Sequence[Table],
    groups: Sequence[tuple[Sequence[str], Mapping[str, Any]]],
) -> dict[str, Any]:
    """A state in the form of torch as the optimizer's files have it.

    Parameters
    ----------
    state_dict : mapping
        In the form of torch.
    tables : sequence of Table
        The optimizer's tables.
    groups : sequence of (sequence of str, mapping)
        Its parameter groups, each with the keys of its tables.

    Raises
    ------
    ValueError
        Groups, or tables of a group, are not as many as here, or a state tensor is missing.
    """
    saved_groups = state_dict["param_groups"]
    sizes, own_sizes = [len(group["params"]) for group in saved_groups], [len(keys) for keys, _ in groups]
    if sizes != own_sizes:
        raise ValueError(f"the saved state has groups of {sizes} parameters, this optimizer of {own_sizes}")
    by_key = {table.key: table for table in tables}
    states, num_steps, named = {}, {}, []
    for (keys, _), saved_group in zip(groups, saved_groups):
        for key, number in zip(keys, saved_group["params"]):
            table, saved = by_key[key], state_dict["state"].get(number)
            if saved is None:
                continue  # torch saves nothing for a parameter that never had a gradient
            states[table.label] = _table_state(table, saved)
            if "step" in saved:
                num_steps[table.label] = int(torch.as_tensor(saved["step"]).max())
        named.append({**saved_group, "params": [by_key[key].label for key in keys]})
    params = {GROUPS: named, "num_steps": num_steps, "keys": {table.label: table.key for table in tables}}
    return {PARAMS: params, EMB_STATES: states}


def _table_state(table: Table, saved: Mapping[str, Any]) -> dict[str, Any]:
    """The state of one table, under the names of its tensors."""
    ids = torch.as_tensor(saved[IDS]) if IDS in saved else torch.arange(table.num_rows)
    states = {}
    for key, tensor in table.state.items():
        name = _NAME_IN_TORCH.get(key, key)
        if name not in saved:
            raise ValueError(f"state of {table.label!r}: {name!r} is missing, the file has {sorted(saved)}")
        rows = torch.as_tensor(saved[name])
        states[tensor.name] = rows.expand(len(ids)) if key == "step" and rows.dim() == 0 else rows
    return {IDS: ids, STATES: states}
