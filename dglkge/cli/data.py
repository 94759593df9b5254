"""``dglkge data``: data sets that have a name. All imports of packages are late: ``--help`` needs none."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from dglkge.cli.common import JSON, Command, option, print_json, print_rich, print_text

WIDTH = 90
"""Of the table: on a narrow terminal lines are folded, and no cell is cut."""


def list_data(args: argparse.Namespace) -> int:
    """List the data sets of the registry."""
    from dglkge.data.public_data import public_data

    entries = public_data()
    if args.json:
        print_json(
            {name: {**vars(entry), "verified_by": entry.verified_by} for name, entry in entries.items()}
        )
        return 0
    from rich.table import Table

    table = Table("name", box=None)
    for column in ("entities", "relations", "train", "valid", "test"):
        table.add_column(column, justify="right")
    table.add_column("verified by")
    for name, entry in entries.items():
        table.add_row(name, *(f"{count:,}" for count in entry.counts.values()), entry.verified_by)
    print_rich(table, width=WIDTH)
    return 0


def get_data(args: argparse.Namespace) -> int:
    """Download a data set, and compare its counts."""
    from dglkge.data.public_data import get_public
    from dglkge.partition.options import Options
    from dglkge.partition.sources import read_named

    entry = get_public(args.name)
    with tempfile.TemporaryDirectory(prefix="dglkge-data-") as temporary:
        folder, _ = read_named(entry, Path(temporary), Options())
    if args.json:
        print_json({**vars(entry), "folder": str(folder)})
        return 0
    counts = ", ".join(f"{count:,} {what}" for what, count in entry.counts.items())
    print_text(f"{entry.name}: {counts}\n{entry.citation}\nlicence: {entry.licence}\n{folder}")
    return 0


PLACES = """
Downloads go to ~/.cache/dglkge, or the folder that DGLKGE_CACHE names. DGLKGE_DATA is the URL of a mirror,
with the files of each data set in a folder of its name, or a folder of this kind; that needs no network."""

LIST = Command(
    description="List the data sets that have a name.",
    examples="""examples:
  dglkge data list
  dglkge data list --json    with addresses, checksums, licences and citations""",
    options=[JSON],
    run=list_data,
    summary="the data sets that have a name",
)

GET = Command(
    description="Download a data set, compare checksums and counts, and print its folder.",
    examples=f"""examples:
  dglkge data get fb15k-237
{PLACES}""",
    options=[option("name", "of dglkge data list, in any spelling", metavar="NAME"), JSON],
    run=get_data,
    summary="download one",
)

DATA = Command(
    description="""Data sets of the field by name: list them, or download one into the cache folder. dglkge
partition and dglkge.train take such a name in place of files.""",
    examples=f"""examples:
  dglkge data list
  dglkge data get fb15k-237
  dglkge partition fb15k-237 --output data/fb15k-237
{PLACES}""",
    actions={"list": LIST, "get": GET},
)
