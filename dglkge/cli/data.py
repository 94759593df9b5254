"""``dglkge data list`` and ``get``: data sets that have a name. Imports are late: ``--help`` needs none."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from dglkge.cli.common import Command, option, print_columns, print_text

COLUMNS = ("name", "entities", "relations", "train", "valid", "test", "verified by")


def list_data(args: argparse.Namespace) -> dict[str, Any]:
    """Return the data sets of the registry."""
    from dglkge.data.public_data import public_data

    return {name: {**vars(entry), "verified_by": entry.verified_by} for name, entry in public_data().items()}


def show_list(entries: dict[str, Any], args: argparse.Namespace) -> None:
    """Print a line for each."""
    rows = [
        [name, *(f"{count:,}" for count in entry["counts"].values()), entry["verified_by"]]
        for name, entry in entries.items()
    ]
    print_columns(COLUMNS, rows)


def get_data(args: argparse.Namespace) -> dict[str, Any]:
    """Download a data set, and compare its counts."""
    from dglkge.data.public_data import get_public
    from dglkge.partition.options import Options
    from dglkge.partition.sources import read_named

    entry = get_public(args.name)
    with tempfile.TemporaryDirectory(prefix="dglkge-data-") as temporary:
        options = Options(progress=False if args.quiet or args.json else None)
        folder, _ = read_named(entry, Path(temporary), options)
    return {**vars(entry), "folder": str(folder)}


def show_data(entry: dict[str, Any], args: argparse.Namespace) -> None:
    """Print counts, source and folder."""
    counts = ", ".join(f"{count:,} {what}" for what, count in entry["counts"].items())
    print_text(
        f"{entry['name']}: {counts}\n{entry['citation']}\nlicence: {entry['licence']}\n{entry['folder']}"
    )


PLACES = """
Downloads go to ~/.cache/dglkge, or the folder that DGLKGE_CACHE names. DGLKGE_DATA is the URL of a mirror,
with the files of each data set in a folder of its name, or a folder of this kind; that needs no network."""

LIST = Command(
    description="""List the data sets of the field that have a name; dglkge data build and dglkge.train take
it in place of files. The last column says what a download is compared with.""",
    examples="""examples:
  dglkge data list
  dglkge data list --json    with addresses, checksums, licences and citations""",
    run=list_data,
    show=show_list,
)

GET = Command(
    description="Download a data set, compare checksums and counts, and print its folder.",
    examples=f"""examples:
  dglkge data get fb15k-237
{PLACES}""",
    options=[option("name", "of dglkge data list, in any spelling", metavar="NAME")],
    run=get_data,
    show=show_data,
)
