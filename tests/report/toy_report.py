"""Hostile names and lines of training for the tests of a report."""

from __future__ import annotations

HOSTILE = {
    "person0": "<script>window.broken = 1</script>",
    "person1": "</script><script>window.broken = 2</script>",
    "person2": '"><img src=x onerror="window.broken = 3">',
    "town0": "<b>Rome</b> & %{x} {{ 7 * 7 }}",
    "near": "<i onclick=alert(1)>near</i>",
}
"""Names of the toy graph, and what they are called here."""


def stats_lines() -> list[dict]:
    """Three epochs of two reports; the second epoch was begun twice."""
    places = [(0, 2), (0, 4), (1, 2), (1, 2), (1, 4), (2, 2), (2, 4)]
    lines: list[dict] = []
    for number, (epoch, done) in enumerate(places):
        line = {
            "epoch": epoch,
            "batches_done": done,
            "num_batches": 4,
            "loss": 7.0 - number,
            "epoch_loss": 3.0,
        }
        line |= {"edges_per_second": 100.0, "epoch_seconds": done * 1.5, "bytes_sent": 10 * done}
        if done == 4:
            line |= {
                "num_trainers": 2,
                "trainer_memory_bytes": 2**30,
                "phase_seconds": {"score": 1.0, "loss": 3.0},
            }
        lines.append(line)
        if done == 4:
            lines.append({"epoch": epoch, "valid": {"mrr": 0.1 * (epoch + 1), "num_queries": 20}})
    return lines
