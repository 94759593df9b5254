"""Rows of a batch in the host's memory: left in place, or copied, widened to float32 and transformed."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dglkge.embeddings.row_lookup import FoundRows, RowLookup
from dglkge.embeddings.table_set import TableSet
from dglkge.optim.scratch import Scratch
from dglkge.step.contracts import RowGradients, Rows, RowStore, RowTransform
from dglkge.step.planning import Places, Plan


class Transforms:
    """The transforms of each table's rows, in their order; tables without transforms may be absent."""

    def __init__(self, by_table: Mapping[str, Sequence[RowTransform]]) -> None:
        self._chains = {name: list(chain) for name, chain in by_table.items() if chain}
        self._each = list({id(one): one for chain in self._chains.values() for one in chain}.values())

    def __contains__(self, table: str) -> bool:
        return table in self._chains

    def start_batch(self, number: int) -> None:
        """Begin a batch."""
        for transform in self._each:
            transform.start_batch(number)

    def forward(self, table: str, ids: Tensor, rows: Tensor) -> None:
        """Change copied rows (n, D) in place."""
        for transform in self._chains.get(table, ()):
            transform.forward(table, ids, rows)

    def backward(self, gradients: Sequence[RowGradients]) -> None:
        """Change gradients in place: from those of transformed rows to those of the tables' rows."""
        for table, ids, rows in gradients:
            for transform in reversed(self._chains.get(table, [])):
                transform.backward(table, ids, rows)


@dataclass(frozen=True)
class TableRows:
    """Rows of one table: ids (n,), copies (n, D) if there are any, gradients (n, D), and where rows lie."""

    ids: Tensor
    copies: Tensor | None
    gradients: Tensor
    found: Any = None

    @functools.cached_property
    def found_gradients(self) -> FoundRows:
        """Where the gradients lie."""
        return FoundRows.in_array(self.gradients.numpy())


@dataclass(frozen=True)
class CopiedRows(Rows):
    """Rows of a batch by table, of which autograd accumulates the gradients in place."""

    tables: Mapping[str, TableRows]

    def leaf(self, places: Places) -> Tensor:
        rows = self.tables[places.table]
        if rows.copies is None:
            raise RuntimeError(
                f"rows of {places.table} are read in place: an objective by autograd copies them"
            )
        leaf = rows.copies[places.run].detach().requires_grad_()
        # Set before backward(): autograd then accumulates into this memory in place.
        leaf.grad = rows.gradients[places.run]
        return leaf

    def gradients(self, places: Places) -> Tensor:
        return self.tables[places.table].gradients[places.run]

    def found_gradients(self, places: Places) -> FoundRows:
        return self.tables[places.table].found_gradients.part(places.run)


class HostRows(CopiedRows):
    """Rows of a batch in the host's memory."""

    def found(self, places: Places) -> FoundRows:
        found: FoundRows = self.tables[places.table].found.part(places.run)
        return found

    def collect(self) -> list[RowGradients]:
        return [RowGradients(name, rows.ids, rows.gradients) for name, rows in self.tables.items()]


class LookupStore(RowStore):
    """Rows that the lookup of the tables finds: in this machine's memory, or fetched from other machines."""

    def __init__(self, tables: TableSet, transforms: Transforms) -> None:
        self._tables = tables
        self._transforms = transforms

    @property
    def _lookup(self) -> RowLookup:
        return self._tables.lookup

    @property
    def num_ahead(self) -> int:
        return self._lookup.num_ahead

    @property
    def sent_bytes(self) -> int:
        return self._lookup.sent_bytes

    def announce(self, plan: Plan) -> None:
        self._lookup.announce(plan.number, self._row_ids(plan))

    def before_update(self) -> None:
        self._lookup.before_update()

    def _row_ids(self, plan: Plan) -> dict[str, Tensor]:
        """Return the ids of the rows of a plan, by table."""
        return {name: self._tables.row_ids(name, ids) for name, ids in plan.ids.items()}


class HostStore(LookupStore):
    """Rows in the host's memory: left where they are stored, or copied and widened to float32.

    Rows of a table with transforms are copied in any case, others unless the objective reads them in place.
    """

    def __init__(self, tables: TableSet, transforms: Transforms, reads_in_place: bool) -> None:
        super().__init__(tables, transforms)
        self._reads_in_place = reads_in_place
        self._scratch = {name: Scratch() for name in tables}

    def prepare(self, plan: Plan) -> Plan:
        return plan

    def rows(self, plan: Plan) -> HostRows:
        located = self._lookup.rows(plan.number, self._row_ids(plan))
        tables = {}
        for name, ids in plan.ids.items():
            size = (len(ids), self._tables[name].dim)
            gradients = self._scratch[name].take("gradients", *size)
            room = functools.partial(self._scratch[name].take, "rows", *size)
            copies = None
            if self._reads_in_place and name not in self._transforms:
                # Compiled loops write all gradients.
                found = located[name].found(room)
            else:
                # Autograd adds to gradients that exist.
                gradients.zero_()
                copies = located[name].copied(room())
                self._transforms.forward(name, ids, copies)
                found = FoundRows.in_array(copies.numpy())
            tables[name] = TableRows(ids, copies, gradients, found)
        return HostRows(tables)
