"""The count of traffic by schedule of buckets: equal traffic, and more reads where pairs are disjoint."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("machines", [2, 4])
def test_no_schedule_saves_traffic(benchmark_module, capsys, machines):
    words = ["--entities", "4000", "--edges", "20000", "--ranges", "8", "--batch", "50"]
    assert benchmark_module("bucket_schedules").main([*words, "--machines", str(machines)]) == 0
    lines = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [line[0] for line in lines] == ["same", "rotated heads", "shifted"]
    same, *others = [(float(line[1]), int(line[3])) for line in lines]
    for rows, reads in others:
        # Batches cut the same buckets at other places.
        assert rows == pytest.approx(same[0], rel=0.02)
        assert reads > same[1]


def test_all_rows_are_own_where_both_ends_are(benchmark_module):
    module = benchmark_module("bucket_schedules")
    args = module.build_parser().parse_args(
        ["--edges", "2000", "--entities", "100", "--local", "1", "--negatives", "0"]
    )
    graph = module.make_graph(args)
    assert module.count_rows(args, graph, module.walks(args, "same")) == 0
