"""``dglkge inspect``: version, progress, model, tables and files of a checkpoint."""

from __future__ import annotations

import argparse
from typing import Any

from dglkge.cli.common import add_options, human_bytes, print_columns, print_json, print_text

DESCRIPTION = """Show a checkpoint's version, progress, model, tables and files.
With --verify, read every file and compare it with its checksum."""
EXAMPLES = """examples:
  dglkge inspect runs/demo
  dglkge inspect runs/demo --verify --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_options(parser, "run", "json")
    parser.add_argument(
        "--verify", action="store_true", help="read every file and compare it with its checksum"
    )


def run(args: argparse.Namespace) -> int:
    """Describe the checkpoint and print."""
    from dglkge.inference.run import open_run  # here: --help does without torch

    # verify=False: inspect compares all files itself, once, if that is wanted.
    report = open_run(args.run, verify=False).inspect(args.verify)
    if args.json:
        print_json(report)
    else:
        _print_report(report, args.verify)
    return 0


def _print_report(report: dict[str, Any], verify: bool) -> None:
    """Print the description as text."""
    progress, model, dataset = report["progress"], report["model"], report["dataset"]
    reciprocal = ", reciprocal relations" if model["reciprocal_relations"] else ""
    common = ("score_function", "dimension", "reciprocal_relations")
    options = "".join(f", {name} {value}" for name, value in model.items() if name not in common)
    lines = {
        "checkpoint": f"{report['path']}, version {report['version']}, {human_bytes(report['size_bytes'])}",
        "progress": ", ".join(f"{name} {value}" for name, value in progress.items()),
        "model": f"{model['score_function']}, dimension {model['dimension']}{options}{reciprocal}",
        "optimizer": ", ".join(f"{name} {value}" for name, value in report["optimizer"].items()),
        "dataset": f"{dataset['name']} ({dataset['path']}), fingerprint {dataset['fingerprint'][:12]}",
        "seed": report["seed"],
        "written by": ", ".join(f"{name} {value}" for name, value in report["versions"].items()),
    }
    # Counted over all files: a checkpoint of PyTorch-BigGraph has no checksum at all.
    unknown = sum(one["crc32"] is None for one in report["files"])
    if report["verified"]:
        lines["checksums"] = f"all {len(report['files'])} files are as they were written"
    elif verify:
        lines["checksums"] = (
            f"none for {unknown} of {len(report['files'])} files, which PyTorch-BigGraph wrote: not verified"
        )
    for name, text in lines.items():
        print_text(f"{name:<11} {text}")
    print_text()
    print_columns(
        ["table", "rows", "width", "parts", "optimizer state", "size"],
        [
            [
                table["name"],
                table["num_rows"],
                table["width"],
                table["num_parts"],
                ", ".join(table["optimizer_state"]) or "-",
                human_bytes(table["size_bytes"]),
            ]
            for table in report["tables"]
        ],
    )
