"""A ranking result as plain text."""

from __future__ import annotations

from dglkge.evaluation.metrics import RankingMetrics
from dglkge.evaluation.ranking_result import SIDES, RankingResult

DECIMALS = {"mr": 1, "num_queries": 0}
DEFAULT_DECIMALS = 4


def format_table(result: RankingResult, per_relation: bool = False) -> str:
    """Lay the figures out in aligned columns under a line that names the protocol.

    Parameters
    ----------
    result : RankingResult
    per_relation : bool
        Add one line for each relation (both sides), the most frequent first.

    Returns
    -------
    str
        Several lines, the last one not ended.
    """
    lines = [(f"{sides} sides" if sides == "both" else sides, result.metrics(sides)) for sides in SIDES]
    if per_relation:
        by_relation = [(label, by_side["both"]) for label, by_side in result.per_relation().items()]
        lines += sorted(by_relation, key=lambda line: -line[1].num_queries)
    return "\n".join([result.protocol.describe(), *_aligned(lines)])


def _aligned(lines: list[tuple[str, RankingMetrics]]) -> list[str]:
    """Return a header and one text line for each labelled set of figures."""
    names = list(lines[0][1].to_dict())
    cells = [["", *names]]
    for label, metrics in lines:
        figures = [
            f"{value:.{DECIMALS.get(name, DEFAULT_DECIMALS)}f}" for name, value in metrics.to_dict().items()
        ]
        cells.append([label, *figures])
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    return [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))])
        for row in cells
    ]
