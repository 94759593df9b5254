"""``dglkge evaluate``: rank a split against a checkpoint's files, in one process."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dglkge.checkpoint.layout import RUN_CALIBRATION_FILE, split_metrics_file, triples_metrics_file
from dglkge.cli.common import (
    DATASET,
    FEATURES,
    JSON,
    RUN,
    VERIFY,
    Command,
    flag,
    goes_with,
    num_candidates,
    open_model,
    option,
    print_columns,
    print_json,
    print_text,
    write_json,
)
from dglkge.data.dataset_files import SPLITS, TEST, VALID
from dglkge.data.text_format import parse_columns, parse_delimiter
from dglkge.errors import InputError
from dglkge.evaluation.calibration import CORRUPTIONS_EACH, METHODS
from dglkge.evaluation.metrics import GROUPS, Protocol, format_table
from dglkge.typing import AUTO_DEVICE, DEVICES

if TYPE_CHECKING:
    import numpy as np

    from dglkge.inference.run import Run

logger = logging.getLogger(__name__)

GIVEN = "given"
"""Value of --candidates for those that came with the data set."""

CLASSIFICATION = (
    *("accuracy", "f1", "precision", "recall", "roc_auc", "average_precision"),
    *("num_true", "num_false"),
)
QUALITY = ("brier_score", "log_loss", "expected_calibration_error")
"""Figures in the tables, and their names in the JSON."""


def evaluate(args: argparse.Namespace) -> int:
    """Evaluate, then print and write the metrics."""
    from tqdm import tqdm

    from dglkge.model.device import open_device  # here: --help does without torch

    protocol = Protocol(
        split=args.triples or args.split or TEST,
        filtered=not (args.raw or args.candidates == GIVEN),
        num_candidates=None if args.candidates == GIVEN else args.candidates,
        ties=args.ties,
        batch_size=args.batch_size,
        seed=args.seed,
        given=args.candidates == GIVEN,
    )
    # Mistakes in the arguments are found before the checkpoint is read, which may take minutes.
    _check_judging(args)
    open_device(args.device, "--device")
    read = _file_reader(args)
    model = open_model(args)
    dataset = model.dataset
    triples = read(model, args.triples) if read else dataset.split(protocol.split)
    # The file's triples are true as well: none of them is a wrong answer to another's query.
    also_known = [triples] if read else []
    triples = triples[: args.limit]
    negatives = _read_negatives(args, model)
    # Two queries for each triple: its head and its tail. disable=None shows the bar only on a terminal.
    with tqdm(total=2 * len(triples), desc="rank", unit="query", disable=True if args.json else None) as bar:
        result = model.evaluate(protocol, triples, bar.update, also_known, args.device)
    checkpoint = model.checkpoint
    report = {
        "run": str(checkpoint.run_folder),
        "version": checkpoint.version,
        "dataset": dataset.name,
        **({"new_entities": _num_new(model)} if args.features else {}),
        **result.to_dict(),
    }
    report.update(_judge(args, model, triples, also_known, negatives))
    target = Path(args.output) if args.output else checkpoint.run_folder / _metrics_file(args, protocol)
    try:
        write_json(target, report)  # before printing: a closed pipe must not lose the result
    except InputError as error:
        if args.output:
            raise
        logger.warning("the metrics are printed only: %s", error)  # e.g. a run of another user
    if args.json:
        print_json(report)
    else:
        print_text(format_table(result, args.per_relation, args.by))
        _print_judged(report, "relation" in args.by or args.per_relation)
        if args.features:
            counted = ", ".join(f"{count} of type {name}" for name, count in report["new_entities"].items())
            print_text(f"new entities among the candidates: {counted}")
        print_text(f"written to {target}")
    return 0


def _num_new(model: Run) -> dict[str, int]:
    """Return the number of entities that were not trained, by type."""
    trained, counts = model.checkpoint.manifest.meta.entity_types, model.tables.meta.entity_types
    return {name: counts[name] - before for name, before in trained.items() if counts[name] > before}


def _check_judging(args: argparse.Namespace) -> None:
    """Refuse options of --classify and --calibrate that have no effect or cannot be."""
    goes_with(args, "negatives", args.classify, "--classify")
    for name in ("corruptions", "positive_rate"):
        goes_with(args, name, args.calibrate, "--calibrate")
    for name in ("classify", "calibrate"):
        if getattr(args, name) and args.split == VALID:
            raise InputError(
                f"--{name} fits on the valid split, so it cannot be judged by it; use --split test"
            )
    if args.positive_rate is not None and not 0 < args.positive_rate < 1:
        raise InputError(f"--positive-rate must be between 0 and 1, got {args.positive_rate}")


def _read_negatives(args: argparse.Namespace, model: Run) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the false triples of the files; refuse a data set without valid triples to fit on."""
    for name in ("classify", "calibrate"):
        if getattr(args, name) and not len(model.dataset.split(VALID)):
            raise InputError(
                f"--{name} fits on the valid split, and {model.dataset.path} has no valid triples"
            )
    if not args.negatives:
        return None
    read = _read_triples(args)
    return read(model, args.negatives[0]), read(model, args.negatives[1])


def _judge(
    args: argparse.Namespace,
    model: Run,
    triples: np.ndarray,
    also_known: Sequence[np.ndarray],
    negatives: tuple[np.ndarray, np.ndarray] | None,
) -> dict[str, Any]:
    """Classify and calibrate as the arguments say, write the probabilities, and return the fields."""
    found: dict[str, Any] = {}
    if not args.classify and not args.calibrate:
        return found
    from dglkge.inference.truth import calibrate, calibration_quality, classify

    known = model.known_triples(also_known)
    if args.classify:
        found["classification"] = classify(model, triples, known, args.seed, negatives).to_dict()
    if args.calibrate:
        rate = args.positive_rate or 0.5
        corruptions = args.corruptions or CORRUPTIONS_EACH
        fitted = calibrate(model, known, args.calibrate, rate, corruptions, args.seed)
        quality = calibration_quality(model, fitted, triples, known)
        path = model.checkpoint.run_folder / RUN_CALIBRATION_FILE
        write_json(path, fitted.to_dict())
        kept = {name: value for name, value in fitted.to_dict().items() if name not in ("curve", "run_id")}
        found["calibration"] = {"path": str(path), **kept, **quality}
    return found


def _print_judged(report: dict[str, Any], per_relation: bool) -> None:
    """Print the classification and the calibration of a report as tables."""
    if "classification" in report:
        found = report["classification"]
        print_text(f"classification: {found['thresholds']}; negatives {found['negatives']}")
        groups = [("all", found), *(found["per_relation"].items() if per_relation else ())]
        rows = [[label, *(_figure(group[name]) for name in CLASSIFICATION)] for label, group in groups]
        print_columns(["", *CLASSIFICATION], rows)
    if "calibration" in report:
        found = report["calibration"]
        print_text(
            f"calibration: {found['method']}, {100 * found['positive_rate']:g} % true triples assumed, "
            f"fitted on {found['num_true']} true and {found['num_false']} false scores of the valid split"
        )
        print_columns(["", *QUALITY], [["", *(_figure(found[name]) for name in QUALITY)]])
        print_text(f"probabilities written to {found['path']}")


def _figure(value: float | None) -> str:
    """Return a figure as text; a count without decimals, a hyphen for none."""
    return "-" if value is None else str(value) if isinstance(value, int) else f"{value:.4f}"


def _file_reader(args: argparse.Namespace) -> Callable[[Run, str], np.ndarray] | None:
    """Return a function that reads the file of ``--triples`` with a run's names; None for a split."""
    for path in [args.triples, *(args.negatives or [])]:
        if path is not None and not Path(path).is_file():
            raise InputError(f"{path}: there is no such file")
    for name in ("columns", "delimiter"):
        goes_with(args, name, args.triples is not None or args.negatives, "--triples")
    if args.split is not None and args.triples is not None:
        raise InputError("give either --split or --triples, not both")
    return None if args.triples is None else _read_triples(args)


def _read_triples(args: argparse.Namespace) -> Callable[[Run, str], np.ndarray]:
    """Return a function that reads a file of triples with a run's names."""
    # Imported only here: pandas takes half a second, which no other command needs.
    from dglkge.data.named_triples import read_named_triples

    columns = parse_columns(args.columns) if args.columns else None
    delimiter = parse_delimiter(args.delimiter) if args.delimiter else None
    return lambda run, path: read_named_triples(
        # With the names of new entities, where there are some; ids are those of the data set.
        Path(path),
        run.dataset.relations,
        run.tables.vocabulary if args.features else run.dataset.vocabulary,
        columns,
        delimiter,
    )


def _metrics_file(args: argparse.Namespace, protocol: Protocol) -> str:
    """Return the name of the JSON file in the run's folder; results of other protocols have other names."""
    suffix = protocol.suffix(args.limit)
    if args.features:
        suffix += "-with-features"
    if args.triples is None:
        return split_metrics_file(args.split or TEST, suffix)
    return triples_metrics_file(Path(args.triples).name.partition(".")[0], suffix)


EVALUATE = Command(
    description="""Rank the head and the tail of every triple of a split, or of a file, among all entities of
the right type, and show MR, MRR, Hits@1/3/10/50 and AUC. Reads the files of the checkpoint and
of the data set, and uses every core; no server is needed.""",
    examples="""examples:
  dglkge evaluate runs/demo                              filtered, all candidates, test split
  dglkge evaluate runs/demo --split valid --limit 500    the first 500 triples of the valid split
  dglkge evaluate s3://bucket/demo --dataset data/demo   a run at a URL (checkpoint.storage)
  dglkge evaluate runs/demo --triples mine.tsv           triples of your own, by name
  dglkge evaluate runs/demo --triples new.tsv --features new.parquet
                                                         entities that were not trained, by their features
  dglkge evaluate runs/demo --by relation                the metrics of every relation too
  dglkge evaluate runs/demo --by category --by side      1-1, 1-N, N-1 and N-N relations, heads and tails
  dglkge evaluate runs/demo --classify                   accuracy of telling true from false triples too
  dglkge evaluate runs/demo --calibrate isotonic         probabilities for dglkge predict --probability""",
    options=[
        RUN,
        VERIFY,
        option("--split", f"which triples (default: {TEST})", choices=SPLITS),
        option(
            "--triples",
            "rank the triples of this file (tsv, txt, csv, also gz, or Parquet) instead of a split",
            metavar="FILE",
        ),
        option(
            "--columns",
            "columns of the file: head,relation,tail (default), htr, or names of its header",
            metavar="ROLES",
        ),
        option("--delimiter", "instead of the tab, or of the comma of CSV", metavar="CHAR"),
        DATASET,
        FEATURES,
        flag("--raw", "rank among other known answers too (default: filtered)"),
        option(
            "--candidates",
            "all entities of the type, N sampled ones for each query, or given: those of OGB's data (all)",
            metavar="N",
            type=lambda text: text if text == GIVEN else num_candidates(text),
        ),
        option("--seed", "seed of the sampled candidates (default: %(default)s)", type=int, default=0),
        option(
            "--ties",
            "rank among equal scores: the mean, the best or the worst (default: %(default)s)",
            default="realistic",
            choices=("realistic", "optimistic", "pessimistic"),
        ),
        option(
            "--by",
            "show the metrics of every relation, or of every category of relations (1-1, 1-N, N-1, N-N in "
            "the training triples); side divides these into head and tail; may be repeated",
            action="append",
            choices=GROUPS,
            default=[],
        ),
        flag("--per-relation", "the same as --by relation"),
        flag(
            "--classify",
            "also tell true from false triples: a threshold for each relation, fitted on the valid split; "
            "one false triple is drawn for each true one",
        ),
        option(
            "--negatives",
            "files of false triples for --classify: for the valid split, and for the ranked triples",
            nargs=2,
            metavar=("VALID_FILE", "FILE"),
        ),
        option(
            "--calibrate",
            "also fit probabilities of scores on the valid split, for dglkge predict --probability; "
            "written beside the checkpoint",
            choices=METHODS,
        ),
        option(
            "--corruptions",
            "with --calibrate, false triples drawn for each side of a true one "
            f"(default: {CORRUPTIONS_EACH})",
            least=1,
            metavar="N",
        ),
        option(
            "--positive-rate",
            "with --calibrate, share of true triples among those that you will judge (default: 0.5)",
            type=float,
            metavar="SHARE",
        ),
        option(
            "--batch-size", "queries at a time (default: %(default)s)", least=1, default=4096, metavar="N"
        ),
        option(
            "--device",
            "where scores are computed: auto is cuda if torch finds a GPU, else cpu; cpu_staged is the "
            "code of cuda on the CPU, for tests; the ranks are the same (default: %(default)s)",
            choices=DEVICES,
            default=AUTO_DEVICE,
        ),
        option("--limit", "only the first N triples of the split", least=1, metavar="N"),
        option(
            "--output",
            "JSON file with the metrics of every relation (default: RUN/metrics-SPLIT.json, or "
            "RUN/metrics-triples-NAME.json with --triples; the name of another protocol has its options, "
            "e.g. RUN/metrics-test-raw-first500.json)",
            metavar="FILE",
        ),
        JSON,
    ],
    run=evaluate,
)
