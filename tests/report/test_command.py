"""The command: refusals, JSON, a page in which every name is text, curves from the lines of training."""

from __future__ import annotations

import itertools
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from dglkge.report import plots
from dglkge.report.figures import Choices, collect
from dglkge.report.page import render
from dglkge.report.run_state import MOST_POINTS, learning_curves, read_lines, thinned
from tests.report.conftest import HOSTILE, stats_lines


class Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict]] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.texts.append(data)


def test_names_are_text(page):
    html = page.read_text(encoding="utf-8")
    reader = Reader()
    reader.feed(html)
    tags, attributes = zip(*reader.elements)
    assert tags.count("script") == 3 and not {"img", "i", "iframe", "base", "form"} & set(tags)
    assert not [name for names in attributes for name in names if name.startswith("on") or name == "src"]
    assert [names["href"] for tag, names in reader.elements if tag == "link"] == ["data:,"]
    assert any(HOSTILE["near"] in text for text in reader.texts)
    assert "window.broken = 1</script>" not in html and "{{ 7 * 7 }}" in html
    assert [names["type"] for names in attributes if names.get("id") == "plots"] == ["application/json"]


def test_plots_have_every_name_as_plotly_shows_it_literally(page):
    text = page.read_text(encoding="utf-8").split('id="plots">', 1)[1].split("</script>", 1)[0]
    plot_data = json.loads(text)
    plot = plot_data["plot-map-0"]
    types = {trace["name"]: trace["text"] for trace in plot["data"]}
    assert set(types) == {"country", "person", "town"}
    assert "&lt;script&gt;window.broken = 1&lt;/script&gt;" in types["person"]
    assert "&lt;b&gt;Rome&lt;/b&gt; &amp; %{x} {{ 7 * 7 }}" in types["town"]
    assert plot_data["plot-categories"]["data"][2]["name"] == "second &lt;b&gt;, head"
    # Names on the map do not lie on each other.
    points = [point for trace in plot["data"] for point in zip(trace["customdata"], trace["x"], trace["y"])]
    names = [(name["x"], name["y"]) for name in plot["layout"]["annotations"]]
    assert 5 < len(names) <= 25 and max(points)[1:] in names
    _, width, height = np.ptp(points, axis=0)
    for (x, y), (other_x, other_y) in itertools.combinations(names, 2):
        assert abs(x - other_x) > 0.15 * width or abs(y - other_y) > 0.05 * height


def test_a_page_of_one_run_shows_its_mrr_once_and_is_kept(call, refusal, runs, tmp_path):
    target = tmp_path / "one.html"
    words = ("report", runs.first, "--limit", 0)
    assert call(*words, "--output", target)[0] == 0
    html = target.read_text(encoding="utf-8")
    status, out, err = call(*words, "--json", "--points", 0)
    figures = json.loads(out)["runs"][0]
    assert (status, err) == (0, "") and "map" not in figures and not (runs.first / "report.html").exists()
    before_ranking = html.partition('<section id="ranking">')[0]
    assert before_ranking.count(f">{figures['ranking']['sides']['both']['mrr']:.4f}<") == 1
    assert ">MRR<" not in before_ranking
    assert "<b>5</b><span>relations</span>" in html and "<b>53</b><span>entities</span>" in html
    assert refusal(*words, "--output", target) == f"{target} exists; --overwrite replaces it"
    assert target.read_text(encoding="utf-8") == html


def test_buckets_of_a_run_with_ranges_and_the_best_run_of_a_row(runs):
    pytest.importorskip("plotly", reason="plotly is not installed")
    two_figures = collect([str(runs.first), str(runs.second)], Choices(limit=5, points=0))
    assert "table-buckets" not in render(two_figures)
    record = {"lhs_partition": 2, "rhs_partition": 1, "stats": {"count": 12345, "metrics": {"loss": 0.25}}}
    record |= {"seconds": 2.0, "bytes_read": 3_000_000, "bytes_written": 500_000, "mb_per_second": 1.75}
    two_figures["runs"][0]["training"]["buckets"] = [{**record, "major_faults": 7}]
    (table,) = re.findall('<table id="table-buckets-0".*?</table>', render(two_figures), re.DOTALL)
    cells = re.findall("<t[dh][^>]*>([^<]*)</t[dh]>", table.partition("<tbody>")[2])
    assert cells == ["0", "2", "1", "12,345", "0.2500", "–", "2.00", "3.0", "0.5", "1.8", "7"]
    # The lowest mean rank is bold, and the highest of all others.
    two_figures["runs"][1]["ranking"]["sides"]["both"] |= {"mr": 1.0, "mrr": 0.001}
    row = re.compile(r'<th scope="row">(MRR|MR)</th><td(.*?)>.*?</td><td(.*?)>')
    cells = row.findall(render(two_figures))
    marked = {name: ["best" in first, "best" in second] for name, first, second in cells}
    assert marked == {"MRR": [True, False], "MR": [False, True]}


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("FIRST SECOND", "a page of 2 runs belongs to none of them: say with --output where"),
        ("FIRST --limit -1", "--limit must be at least 0, got -1"),
        ("FIRST --points -1", "--points must be at least 0, got -1"),
        ("FIRST --candidates many", "--candidates must be all or a number of at least 1, got 'many'"),
        ("FIRST --output /nowhere/page.html", "cannot write /nowhere/page.html: there is no folder"),
        ("nothing", "nothing does not exist; expected the folder of a run"),
    ],
)
def test_bad_input_is_one_line(refusal, runs, tmp_path, arguments, message):
    pytest.importorskip("plotly", reason="plotly is not installed")
    names = {"FIRST": runs.first, "SECOND": runs.second, "OUT": tmp_path / "page.html"}
    assert refusal("report", *(names.get(word, word) for word in arguments.split())).startswith(message)
    assert not (tmp_path / "page.html").exists()


def test_batches_and_rankings_that_were_repeated_replace_the_earlier_ones():
    lines = [*stats_lines(), {"epoch": 1, "valid": {"mrr": 0.9, "num_queries": 20}}]
    curves = learning_curves(lines)
    assert curves["loss"] == [[0.5, 7.0], [1.0, 6.0], [1.5, 4.0], [2.0, 3.0], [2.5, 2.0], [3.0, 1.0]]
    # 6 s of each epoch, and 3 s of the one that was begun twice.
    assert curves["seconds"] == 3 * 6.0 + 3.0
    assert [epoch["epoch"] for epoch in curves["epochs"]] == [1, 2, 3]
    assert {epoch["trainer_memory_bytes"] for epoch in curves["epochs"]} == {2**30}
    assert curves["phase_seconds"] == {"score": 3.0, "loss": 9.0}
    assert curves["valid"] == {"mrr": [[1.0, 0.1], [2.0, 0.9], [3.0, pytest.approx(0.3)]]}
    # Of buckets, those of the last epoch.
    records = [{"index": number, "seconds": 1.0} for number in (4, 5)]
    lines += [{"epoch": 0, "bucket_record": {"index": 0, "seconds": 1.0}}]
    lines += [{"epoch": 1, "bucket_record": record} for record in [{"index": 5, "seconds": 9.0}, *records]]
    assert learning_curves(lines)["buckets"] == records


def test_a_torn_line_is_skipped(runs):
    assert read_lines(runs.first / "stats.jsonl") == stats_lines()
    assert read_lines(runs.second / "stats.jsonl") == []
    assert learning_curves([])["loss"] == [] and learning_curves([])["seconds"] == 0


def test_a_long_curve_keeps_its_mean_and_its_end():
    values = np.arange(10 * MOST_POINTS, dtype=float)
    points = thinned(values, values)
    assert len(points) == MOST_POINTS and points[-1][0] == values[-1]
    assert np.mean([value for _, value in points]) == pytest.approx(values.mean())


def test_train_and_valid_loss_are_in_one_picture():
    lines = [*stats_lines(), {"epoch": 2, "valid": {"mrr": 0.5, "loss": 2.5, "num_queries": 20}}]
    run = {"label": "a", "training": learning_curves(lines)}
    traces = plots.curves([run], "loss", "loss")["data"]
    assert [(trace["name"], trace["y"][-1]) for trace in traces] == [("a, train", 1.0), ("a, valid", 2.5)]
    assert [trace["name"] for trace in plots.curves([run], "valid", "MRR")["data"]] == ["a"]
    assert plots.is_log_better([run], "loss") is False
