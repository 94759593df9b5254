"""The command: refusals, JSON, and a page in which every name is text."""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser

import pytest

from dglkge.report.figures import Choices, collect
from dglkge.report.page import render
from tests.report.toy_report import HOSTILE


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
    assert sum(tag == "script" for tag, _ in reader.elements) == 3
    assert not [tag for tag, _ in reader.elements if tag in ("img", "i", "iframe", "base", "form")]
    assert not [name for _, attributes in reader.elements for name in attributes if name.startswith("on")]
    assert not [attributes for _, attributes in reader.elements if "src" in attributes]
    assert [attributes["href"] for tag, attributes in reader.elements if tag == "link"] == ["data:,"]
    assert any(HOSTILE["near"] in text for text in reader.texts)
    assert "window.broken = 1</script>" not in html and "{{ 7 * 7 }}" in html
    (start,) = [
        place for place, (_, attributes) in enumerate(reader.elements) if attributes.get("id") == "plots"
    ]
    assert reader.elements[start][1]["type"] == "application/json"


@pytest.fixture
def plots(page):
    text = page.read_text(encoding="utf-8").split('id="plots">', 1)[1].split("</script>", 1)[0]
    return json.loads(text)


def test_plots_have_every_name_as_plotly_shows_it_literally(plots):
    types = {trace["name"]: trace["text"] for trace in plots["plot-map-0"]["data"]}
    assert set(types) == {"country", "person", "town"}
    assert "&lt;script&gt;window.broken = 1&lt;/script&gt;" in types["person"]
    assert "&lt;b&gt;Rome&lt;/b&gt; &amp; %{x} {{ 7 * 7 }}" in types["town"]
    assert plots["plot-categories"]["data"][2]["name"] == "second &lt;b&gt;, head"


def test_a_page_of_one_run_shows_its_mrr_once(call, runs, tmp_path):
    target = tmp_path / "one.html"
    assert call("report", runs.first, "--output", target, "--limit", 0)[0] == 0
    html = target.read_text(encoding="utf-8")
    figures = json.loads(call("report", runs.first, "--json", "--limit", 0, "--points", 0)[1])
    mrr = f"{figures['runs'][0]['ranking']['sides']['both']['mrr']:.4f}"
    before_ranking = html.partition('<section id="ranking">')[0]
    assert before_ranking.count(f">{mrr}<") == 1 and ">MRR<" not in before_ranking
    assert "<b>5</b><span>relations</span>" in html and "<b>53</b><span>entities</span>" in html


def test_names_on_the_map_do_not_lie_on_each_other(plots):
    plot = plots["plot-map-0"]
    points = [point for trace in plot["data"] for point in zip(trace["customdata"], trace["x"], trace["y"])]
    names = plot["layout"]["annotations"]
    assert 5 < len(names) <= 25 and max(points)[1:] in [(name["x"], name["y"]) for name in names]
    width = max(x for _, x, _ in points) - min(x for _, x, _ in points)
    height = max(y for *_, y in points) - min(y for *_, y in points)
    for number, name in enumerate(names):
        for other in names[:number]:
            assert abs(name["x"] - other["x"]) > 0.15 * width or abs(name["y"] - other["y"]) > 0.05 * height


def test_buckets_of_a_run_with_ranges(runs):
    pytest.importorskip("plotly", reason="plotly is not installed")
    figures = collect([str(runs.first)], Choices(limit=5, points=0))
    assert "table-buckets" not in render(figures)
    record = {"lhs_partition": 2, "rhs_partition": 1, "stats": {"count": 12345, "metrics": {"loss": 0.25}}}
    record |= {"seconds": 2.0, "bytes_read": 3_000_000, "bytes_written": 500_000, "mb_per_second": 1.75}
    figures["runs"][0]["training"]["buckets"] = [{**record, "major_faults": 7}]
    (table,) = re.findall('<table id="table-buckets-0".*?</table>', render(figures), re.DOTALL)
    cells = re.findall("<t[dh][^>]*>([^<]*)</t[dh]>", table.partition("<tbody>")[2])
    assert cells == ["0", "2", "1", "12,345", "0.2500", "–", "2.00", "3.0", "0.5", "1.8", "7"]


def test_the_best_run_of_a_row_is_bold(runs):
    """The lowest mean rank, and the highest of all others."""
    pytest.importorskip("plotly", reason="plotly is not installed")
    figures = collect([str(runs.first), str(runs.second)], Choices(limit=5, points=0))
    figures["runs"][1]["ranking"]["sides"]["both"] |= {"mr": 1.0, "mrr": 0.001}
    row = re.compile(r'<th scope="row">(MRR|MR)</th><td(.*?)>.*?</td><td(.*?)>')
    marked = {name: ["best" in cell for cell in cells] for name, *cells in row.findall(render(figures))}
    assert marked == {"MRR": [True, False], "MR": [False, True]}


def test_json_has_the_figures(call, runs):
    status, out, err = call("report", runs.first, "--json", "--limit", 5, "--points", 0)
    fields = json.loads(out)
    assert (status, err) == (0, "") and not (runs.first / "report.html").exists()
    assert fields["runs"][0]["ranking"]["num_triples"] == 5 and "map" not in fields["runs"][0]


def test_a_page_that_exists_is_kept(refusal, runs, tmp_path):
    target = tmp_path / "page.html"
    target.write_text("mine")
    assert refusal("report", runs.first, "--output", target) == f"{target} exists; --overwrite replaces it"
    assert target.read_text() == "mine"


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("FIRST SECOND", "a page of 2 runs belongs to none of them: say with --output where"),
        ("FIRST --limit -1", "--limit must be at least 0, got -1"),
        ("FIRST --points -1", "--points must be at least 0, got -1"),
        ("FIRST --candidates many", "--candidates must be all or a number of at least 1, got 'many'"),
        ("FIRST --output /nowhere/page.html", "cannot write /nowhere/page.html: there is no folder"),
        ("nothing", "nothing does not exist; expected the folder of a run"),
        ("FIRST FIRST --output OUT", "the same run is given twice"),
    ],
)
def test_bad_input_is_one_line(refusal, runs, tmp_path, arguments, message):
    pytest.importorskip("plotly", reason="plotly is not installed")
    names = {"FIRST": runs.first, "SECOND": runs.second, "OUT": tmp_path / "page.html"}
    assert refusal("report", *(names.get(word, word) for word in arguments.split())).startswith(message)
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize("package", ["plotly", "jinja2", "sklearn"])
def test_a_missing_package_is_named_before_the_work(refusal, runs, tmp_path, monkeypatch, package):
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, package, None)
    whats = {"sklearn": "the map of entities (--points 0 leaves it out) needs scikit-learn"}
    expected = whats.get(package, f"a report needs {package}")
    line = refusal("report", runs.first, "--output", tmp_path / "page.html")
    assert line.startswith(f"{expected}: pip install 'dglkge[report]' (")
