"""``dglkge evaluate`` and ``calibrate``: metrics of a trained model, and probabilities of its scores."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dglkge.checkpoint.layout import RUN_CALIBRATION_FILE, metrics_file
from dglkge.cli import common
from dglkge.cli.common import command, figure, flag, num_candidates, option, print_columns, print_text
from dglkge.data.dataset_files import SPLITS, TEST, VALID
from dglkge.data.text_format import bare_path
from dglkge.errors import InputError
from dglkge.evaluation.calibration import CORRUPTIONS_EACH, CURVES, METHODS
from dglkge.evaluation.metrics import GROUPS, Protocol, format_table
from dglkge.typing import AUTO_DEVICE, DEVICES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np

    from dglkge.inference.run import Run

logger = logging.getLogger(__name__)

TIES = ("realistic", "optimistic", "pessimistic")
GIVEN = "given"
"""Value of --candidates for those that came with the data set."""

CLASSIFICATION = "accuracy f1 precision recall roc_auc average_precision num_true num_false".split()
QUALITY = ("brier_score", "log_loss", "expected_calibration_error")
"""Figures in the tables, and their names in the JSON."""


@command(
    *common.MODEL_AND_DATASET,
    option("--split", f"which triples (default: {TEST})", choices=SPLITS),
    option("--triples FILE", "rank the triples of this file instead of a split"),
    common.COLUMNS,
    common.DELIMITER,
    *common.NEW_ENTITIES,
    common.RULES,
    flag("--raw", "rank among other known answers too (default: filtered)"),
    option(
        "--candidates N",
        "all entities of the type, N sampled ones for each query, or given: those of OGB's data (all)",
        type=lambda text: text if text == GIVEN else num_candidates(text),
    ),
    common.SEED,
    option("--ties", "rank among equal scores: mean, best or worst", default=TIES[0], choices=TIES),
    option(
        "--by",
        "show the metrics of every relation, or category of relations (1-1, 1-N, N-1, N-N in training); "
        "side divides these into head and tail",
        is_repeated=True,
        choices=GROUPS,
    ),
    option("--per-relation", "the same as --by relation", dest="by", action="append_const", const="relation"),
    option("--buckets P", "metrics by bucket: heads of one of P ranges of ids, tails of another", least=1),
    flag("--classify", "also tell true triples from drawn false ones, by thresholds of the valid split"),
    option("--negatives VALID_FILE FILE", "false triples for --classify: of valid, of those ranked", nargs=2),
    option("--batch-size", "queries at a time", least=1, default=4096),
    option(
        "--device",
        "where scores are computed: auto is cuda if torch finds a GPU, else cpu; cpu_staged: the code of "
        "cuda on the CPU, for tests; the ranks are the same",
        choices=DEVICES,
        default=AUTO_DEVICE,
    ),
    option("--limit", "only the first N triples of the split", least=1),
    option("-o --output FILE", "JSON file for the metrics of every relation"),
)
def evaluate(args: argparse.Namespace) -> int:
    """Rank the head and the tail of every triple of a split, or of a file, among all entities of
    the right type, and show MR, MRR, Hits@1/3/10/50 and AUC. Reads the files of the checkpoint and
    of the data set, and uses every core; no server is needed.

    Examples
    --------
      dglkge evaluate runs/demo                              filtered, all candidates, test split
      dglkge evaluate runs/demo --split valid --limit 500    the first 500 triples of the valid split
      dglkge evaluate s3://bucket/demo --dataset data/demo   a run at a URL (checkpoint.storage)
      dglkge evaluate runs/demo --triples mine.tsv           triples of your own, by name
      dglkge evaluate runs/demo --triples new.tsv --features new.parquet    entities that were not trained
      dglkge evaluate runs/demo --rules                      rules and embeddings as one ranking
      dglkge evaluate runs/demo --by relation                the metrics of every relation too
      dglkge evaluate runs/demo --by category --by side      1-1, 1-N, N-1 and N-N relations, heads and tails
      dglkge evaluate runs/demo --buckets 4                  the metrics of each pair of ranges of ids too
      dglkge evaluate runs/demo --classify                   accuracy of telling true from false triples too

    The metrics of every relation are in RUN/metrics-SPLIT.json, or RUN/metrics-triples-NAME.json with
    --triples; the name of another protocol has its options, e.g. RUN/metrics-test-raw-first500.json.
    """
    from dglkge.model.device import open_device  # here: --help does without torch

    is_given = args.candidates == GIVEN
    num_sampled = None if is_given else args.candidates
    ranking = (not (args.raw or is_given), num_sampled, args.ties, args.batch_size, args.seed, is_given)
    protocol = Protocol(args.triples or args.split or TEST, *ranking)
    # Mistakes in the arguments are found before the checkpoint is read, which may take minutes.
    common.goes_with(args, "negatives", args.classify, "--classify")
    for name in ("columns", "delimiter"):
        common.goes_with(args, name, args.triples is not None or args.negatives, "--triples")
    if args.classify and args.split == VALID:
        raise InputError("--classify fits on the valid split, so it cannot be judged by it; use --split test")
    if args.buckets is not None and is_given:
        raise InputError("given candidates are ranked in the order of a split, not bucket by bucket")
    if args.split is not None and args.triples is not None:
        raise InputError("give either --split or --triples, not both")
    for path in filter(None, [args.triples, *(args.negatives or [])]):
        if not Path(path).is_file():
            raise InputError(f"{path}: there is no such file")
    open_device(args.device, "--device")
    model = common.open_model(args)
    dataset = model.dataset
    triples = _read(args, model, args.triples) if args.triples else dataset.split(protocol.split)
    # The file's triples are true as well: none of them is a wrong answer to another's query.
    also_known = [triples] if args.triples else []
    triples = triples[: args.limit]
    if args.classify:
        _require_valid("--classify", model)
    negatives = [_read(args, model, path) for path in args.negatives or []]
    # Two queries for each triple: its head and its tail.
    with common.progress_bar(args, 2 * len(triples), desc="rank", unit="query") as bar:
        rest = (bar.update, also_known, args.device)
        if args.buckets is None:
            result, buckets = model.evaluate(protocol, triples, *rest), []
        else:
            sets = {protocol.split: triples}
            *parts, (_, _, result), _ = model.evaluate_buckets(sets, protocol, args.buckets, *rest)
            names = ("lhs_partition", "rhs_partition")
            buckets = [dict(zip(names, bucket or ())) | part.both.to_dict() for _, bucket, part in parts]
    folder, version = model.checkpoint.run_folder, model.checkpoint.version
    report: dict[str, Any] = {"run": str(folder), "version": version, "dataset": dataset.name}
    has_new = bool(args.features or args.about)
    if has_new:
        trained, counts = model.checkpoint.manifest.meta.entity_types, model.tables.meta.entity_types
        added = {name: counts[name] - before for name, before in trained.items() if counts[name] > before}
        report["new_entities"] = added
    report |= result.to_dict()
    if buckets:
        report["buckets"] = buckets
    if args.classify:
        from dglkge.inference.truth import classify

        known = model.known_triples(also_known)
        files = (negatives[0], negatives[1]) if negatives else None
        report["classification"] = classify(model, triples, known, args.seed, files).to_dict()
    target = Path(args.output) if args.output else folder / _metrics_file(args, protocol)
    try:
        common.write_json(target, report)  # before printing: a closed pipe must not lose the result
    except InputError as error:
        if args.output:
            raise
        logger.warning("the metrics are printed only: %s", error)  # e.g. a run of another user
    if args.json:
        common.print_json(report)
        return 0
    print_text(format_table(result, by=args.by))
    if buckets:
        rows = [[figure(value, "-") for value in bucket.values()] for bucket in buckets]
        print_columns(list(buckets[0]), rows)
    if args.classify:
        figures = report["classification"]
        print_text(f"classification: {figures['thresholds']}; negatives {figures['negatives']}")
        by_relation = figures["per_relation"] if "relation" in args.by else {}
        _print_figures(CLASSIFICATION, {"all": figures, **by_relation})
    if has_new:
        texts = [f"{count} of type {name}" for name, count in report["new_entities"].items()]
        print_text(f"new entities among the candidates: {', '.join(texts)}")
    print_text(f"written to {target}")
    return 0


@command(
    *common.MODEL_AND_DATASET,
    option("--method", "a monotone step function, or a sigmoid", default="isotonic", choices=METHODS),
    option("--corruptions", "false triples for each side of a true one", least=1, default=CORRUPTIONS_EACH),
    option("--positive-rate SHARE", "share of true triples among those that you will judge", default=0.5),
    option("--questions N", "curves for dglkge ask, by N made questions (CQD's adapter)", least=0, default=0),
    flag("--by-relation", "also a sigmoid for each relation and side, shrunk to the curve of all"),
    common.SEED,
)
def calibrate(args: argparse.Namespace) -> dict[str, Any]:
    """Fit probabilities of scores on the valid split, for predict, serve and Python.
    They are written beside the checkpoint, and their quality on the test split is shown.

    Examples
    --------
      dglkge calibrate runs/demo
      dglkge calibrate runs/demo --by-relation --questions 1000
      dglkge calibrate runs/demo --method platt --positive-rate 0.01
    """
    from dglkge.inference import truth

    model = common.open_model(args)
    _require_valid("dglkge calibrate", model)
    known = model.known_triples()
    options = (args.method, args.positive_rate, args.corruptions, args.seed, args.by_relation, args.questions)
    fitted = truth.calibrate(model, known, *options)
    test = model.dataset.split(TEST)
    quality = truth.calibration_quality(model, fitted, test, known) if len(test) else {}
    path = model.checkpoint.run_folder / RUN_CALIBRATION_FILE
    common.write_json(path, fitted.to_dict())
    left_out = ("curve", "run_id", *CURVES)
    fields = {name: value for name, value in fitted.to_dict().items() if name not in left_out}
    return {"path": str(path), **fields, "curves_by_relation": len(fitted.by_relation), **quality}


def _require_valid(calibration: str, model: Run) -> None:
    """Refuse a data set without valid triples to fit on."""
    if not len(model.dataset.split(VALID)):
        raise InputError(f"{calibration} fits on valid triples, and {model.dataset.path} has none")


@calibrate.shows
def _print_calibration(report: dict[str, Any], _args: argparse.Namespace) -> None:
    """Print the quality of the probabilities as a table."""
    print_text(
        f"calibration: {report['method']}, {100 * report['positive_rate']:g} % true triples assumed, "
        f"fitted on {report['num_true']} true and {report['num_false']} false scores of the valid split"
    )
    if report["prior_scores"] is not None:
        print_text(
            f"{report['curves_by_relation']} curves of a relation and a side, to each of which the common "
            f"curve counts as {report['prior_scores']} scores"
        )
    if QUALITY[0] in report:  # there are test triples
        _print_figures(QUALITY, {"": report})
    print_text(f"probabilities written to {report['path']}")


def _print_figures(names: Sequence[str], groups: Mapping[str, Mapping[str, Any]]) -> None:
    """Print figures of groups as a table."""
    rows = [[label, *(figure(group[name], "-") for name in names)] for label, group in groups.items()]
    print_columns(["", *names], rows)


def _read(args: argparse.Namespace, run: Run, path: str) -> np.ndarray:
    """Read a file of triples with a run's names."""
    # Imported only here: pandas takes half a second, which no other command needs.
    from dglkge.data.named_triples import read_named_triples

    # With the names of new entities; ids are those of the data set.
    names = run.dataset.relations, run.tables.vocabulary
    return read_named_triples(Path(path), *names, *common.file_format(args))


def _metrics_file(args: argparse.Namespace, protocol: Protocol) -> str:
    """Return the name of the JSON file in the run's folder; results of other protocols have other names."""
    suffix = protocol.suffix(args.limit)
    suffix += "-with-features" * bool(args.features or args.about) + "-with-rules" * args.rules
    # Among all entities buckets change nothing.
    suffix += f"-buckets{args.buckets}" if args.buckets and protocol.num_candidates else ""
    if args.triples is None:
        return metrics_file(args.split or TEST, suffix)
    return metrics_file(f"triples-{bare_path(Path(args.triples)).stem}", suffix)
