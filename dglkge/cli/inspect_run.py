"""``dglkge inspect``: what a checkpoint holds."""

from __future__ import annotations

import argparse
from typing import Any

from dglkge.checkpoint.hdf5_format import OPTIMIZER_GROUP, STATE_BLOB
from dglkge.checkpoint.manifest import UNKNOWN_CRC32, FileEntry, TextEntry
from dglkge.checkpoint.reader import Checkpoint, open_checkpoint
from dglkge.cli.opened_run import add_run_argument
from dglkge.cli.output import human_bytes, print_columns, print_json
from dglkge.typing import RELATION

HELP = "show a checkpoint's version, progress, model, tables and files"
DESCRIPTION = """Show a checkpoint's version, progress, model, tables and files.
With --verify, read every file and compare its checksum."""
EXAMPLES = """examples:
  dglkge inspect runs/demo
  dglkge inspect runs/demo --verify --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_run_argument(parser)
    parser.add_argument("--verify", action="store_true", help="read every file and compare its checksum")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(args: argparse.Namespace) -> int:
    """Look and print."""
    checkpoint = open_checkpoint(args.run)
    if args.verify:
        checkpoint.verify()
    report = _report(checkpoint, args.verify)
    if args.json:
        print_json(report)
    else:
        _print_report(report, args.verify)
    return 0


def _report(checkpoint: Checkpoint, verified: bool) -> dict[str, Any]:
    """Describe a checkpoint."""
    meta = checkpoint.meta
    files: list[FileEntry | TextEntry] = [*checkpoint.manifest.files]
    files += checkpoint.manifest.all_texts.values()
    with_checksum = [entry for entry in files if entry.crc32 != UNKNOWN_CRC32]
    return {
        "path": str(checkpoint.path),
        "version": checkpoint.version,
        "verified": verified and len(with_checksum) == len(files),
        "progress": dict(meta.progress),
        "model": {
            "score_function": meta.score_function,
            "dimension": meta.dim,
            "reciprocal_relations": meta.reciprocal,
        },
        "optimizer": dict(meta.optimizer),
        "dataset": {
            "name": meta.dataset_name,
            "path": meta.dataset_path,
            "fingerprint": meta.dataset_fingerprint,
        },
        "seed": meta.seed,
        "versions": dict(meta.versions),
        "tables": [_table(checkpoint, table) for table in [*checkpoint.entity_types, RELATION]],
        "files": [
            {
                "name": entry.name,
                "size_bytes": entry.size_bytes,
                "crc32": f"{entry.crc32:08x}" if entry in with_checksum else None,
            }
            for entry in files
        ],
        "size_bytes": sum(entry.size_bytes for entry in checkpoint.manifest.files),
    }


def _table(checkpoint: Checkpoint, table: str) -> dict[str, Any]:
    """Describe one table."""
    entries = checkpoint.manifest.of_table(table)
    num_rows, width = checkpoint[table].shape
    state = {path for entry in entries for path in entry.shapes if path.startswith(OPTIMIZER_GROUP + "/")}
    names = {path.split("/", 1)[1] for path in state} - {STATE_BLOB}
    return {
        "name": table,
        "num_rows": num_rows,
        "width": width,
        "num_parts": len(entries),
        "optimizer_state": sorted(names),
        "size_bytes": sum(entry.size_bytes for entry in entries),
    }


def _print_report(report: dict[str, Any], verify: bool) -> None:
    """Print the description for people."""
    progress, model, dataset = report["progress"], report["model"], report["dataset"]
    reciprocal = ", reciprocal relations" if model["reciprocal_relations"] else ""
    lines = {
        "checkpoint": f"{report['path']}, version {report['version']}, {human_bytes(report['size_bytes'])}",
        "progress": ", ".join(f"{name} {value}" for name, value in progress.items()),
        "model": f"{model['score_function']}, dimension {model['dimension']}{reciprocal}",
        "optimizer": ", ".join(f"{name} {value}" for name, value in report["optimizer"].items()),
        "dataset": f"{dataset['name']} ({dataset['path']}), fingerprint {dataset['fingerprint'][:12]}",
        "seed": report["seed"],
        "written by": ", ".join(f"{name} {value}" for name, value in report["versions"].items()),
    }
    unknown = sum(one["crc32"] is None for one in report["files"])
    if report["verified"]:
        lines["checksums"] = f"all {len(report['files'])} files are as they were written"
    elif verify:
        lines["checksums"] = (
            f"none for {unknown} of {len(report['files'])} files, which PyTorch-BigGraph wrote: not verified"
        )
    for name, text in lines.items():
        print(f"{name:<11} {text}")
    print()
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
