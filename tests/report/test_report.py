"""The command, its page as text and in Chromium, curves, and the same figures computed otherwise."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest

import dglkge
from dglkge.errors import InputError
from dglkge.report.figures import Choices, collect, configuration, frequent_entities, project
from dglkge.report.page import render
from dglkge.report.run_state import MOST_POINTS, learning_curves, read_lines, thinned
from tests.report.conftest import HOSTILE, stats_lines

pytest.importorskip("plotly", reason="plotly is not installed")
pytest.importorskip("sklearn", reason="scikit-learn is not installed")


class Reader(HTMLParser):
    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements, self.texts = [], []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.texts.append(data)


def test_names_are_text(page):
    html = page.read_text(encoding="utf-8")
    reader = Reader(html)
    tags, attributes = zip(*reader.elements)
    assert tags.count("script") == 3 and not {"img", "i", "iframe", "base", "form"} & set(tags)
    assert not [name for names in attributes for name in names if name.startswith("on") or name == "src"]
    assert [names["href"] for tag, names in reader.elements if tag == "link"] == ["data:,"]
    assert any(HOSTILE["near"] in text for text in reader.texts)
    assert "window.broken = 1</script>" not in html and "{{ 7 * 7 }}" in html
    assert [names["type"] for names in attributes if names.get("id") == "plots"] == ["application/json"]
    plots = json.loads(html.split('id="plots">', 1)[1].split("</script>", 1)[0])
    types = {trace["name"]: trace["text"] for trace in plots["plot-map-0"]["data"]}
    assert set(types) == {"country", "person", "town"}
    assert "&lt;b&gt;Rome&lt;/b&gt; &amp; %{x} {{ 7 * 7 }}" in types["town"]
    assert plots["plot-categories"]["data"][2]["name"] == "second &lt;b&gt;, head"


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
        ("FIRST FIRST --output OUT", "the same run is given twice: "),
        ("FIRST --limit -1", "--limit must be at least 0, got -1"),
        ("FIRST --candidates many", "--candidates must be all or a number of at least 1, got 'many'"),
        ("FIRST --output /nowhere/page.html", "cannot write /nowhere/page.html: there is no folder"),
        ("nothing", "nothing does not exist; expected the folder of a run"),
    ],
)
def test_bad_input_is_one_line(refusal, runs, tmp_path, arguments, message):
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


@pytest.fixture
def opened(open_page, page):
    def opened_page(**options):
        tab = open_page(page.as_uri(), **options)
        tab.wait_for_selector("html[data-ready]")
        return tab

    return opened_page


SECTIONS = "overview data curves ranking examples map time partitions configuration".split()


def test_everything_is_there_names_run_nothing_and_a_click_sorts_a_table(opened):
    tab = opened(viewport={"width": 1280, "height": 900})
    assert [tab.locator(f"section#{name} h2").count() for name in SECTIONS] == [1] * len(SECTIONS)
    assert tab.locator(".plot").count() >= 10 and tab.locator(".plot:not(:has(.main-svg))").count() == 0
    assert tab.locator("#plot-map-0 .scatterlayer .trace").count() == 3
    assert tab.locator("#table-relations-0 tbody th", has_text="<i onclick=alert(1)>near</i>").count() >= 1
    # Hover shows a name literally.
    tab.evaluate("document.getElementById('plot-map-0').scrollIntoView()")
    town = "document.getElementById('plot-map-0').data[2].text.findIndex((name) => name.includes('Rome'))"
    tab.evaluate(f"Plotly.Fx.hover('plot-map-0', [{{curveNumber: 2, pointNumber: {town}}}])")
    assert "<b>Rome</b> & %{x} {{ 7 * 7 }}" in tab.locator("#plot-map-0 .hoverlayer").text_content()
    cells = tab.locator("#table-relations-0 tbody tr > :nth-child(5)")
    heading, values = tab.locator("#table-relations-0 thead th").nth(4), cells.all_text_contents()
    for order, is_falling in (("descending", True), ("ascending", False)):
        heading.get_by_role("button").click()
        assert cells.all_text_contents() == sorted(values, key=float, reverse=is_falling)
        assert heading.get_attribute("aria-sort") == order


def brightness(tab, selector: str, field: str) -> float:
    style = f"getComputedStyle(document.querySelector({selector!r})).{field}"
    numbers = tab.evaluate(f"{style}.match(/[0-9.]+/g).map(Number)")
    return sum(numbers[:3]) / 3


def test_it_is_dark_bright_on_paper_and_fits_a_phone(opened):
    tab = opened(viewport={"width": 390, "height": 844}, is_mobile=True, color_scheme="dark")
    assert tab.evaluate("document.documentElement.scrollWidth") == 390
    assert brightness(tab, "body", "backgroundColor") < 60 < 180 < brightness(tab, "body", "color")
    assert brightness(tab, "#plot-loss .xtick text", "fill") > 180
    tab.emulate_media(media="print")
    assert brightness(tab, "body", "backgroundColor") == 255 and tab.locator("nav").is_hidden()


@pytest.fixture(scope="module")
def figures(runs):
    return collect([str(runs.first)], Choices(limit=0, points=0))


def test_ranking_is_that_of_the_run_and_figures_are_json(runs, figures):
    assert json.loads(json.dumps(figures, allow_nan=False)) == figures
    ranking, expected = figures["runs"][0]["ranking"], dglkge.open_run(runs.first).evaluate("test").to_dict()
    assert ranking["sides"] == {side: expected[side] for side in ("both", "head", "tail")}
    assert ranking["relations"] == expected["per_relation"]
    assert ranking["categories"] == expected["per_category"]
    assert ranking["num_triples"] == ranking["num_triples_of_split"] == len(runs.dataset.split("test"))


def test_a_limit_draws_triples_of_the_whole_split(runs):
    choices = [Choices(limit=6, points=0, seed=seed) for seed in (0, 0, 1)]
    drawn = [collect([str(runs.first)], choice)["runs"][0]["ranking"] for choice in choices]
    assert [ranking["num_triples"] for ranking in drawn] == [6, 6, 6]
    assert drawn[0]["sides"]["both"]["num_queries"] == 12
    assert drawn[0]["relations"] == drawn[1]["relations"] != drawn[2]["relations"]


def test_examples_have_the_rank_of_their_triple(runs, figures):
    run, checked = dglkge.open_run(runs.first), 0
    best, worst = (figures["runs"][0]["examples"][kind] for kind in ("best", "worst"))
    assert best[0]["mrr"] >= worst[0]["mrr"]
    assert not {example["relation"] for example in best} & {example["relation"] for example in worst}
    for example in [*best, *worst]:
        relation = runs.dataset.relations.labels.id(example["relation"])
        pair = runs.dataset.relations[relation]
        heads, tails = runs.dataset.vocabulary(pair.lhs), runs.dataset.vocabulary(pair.rhs)
        for query in example["queries"]:
            ends = (query["given"], query["true"])
            head, tail = ends if query["side"] == "tail" else ends[::-1]
            result = run.evaluate("test", np.array([[heads.id(head), relation, tails.id(tail)]]))
            assert getattr(result, query["side"]).mr == query["rank"]
            if query["side"] == "tail":
                answers = run.predict_tails(head, example["relation"], k=5)["entity"].tolist()
                assert [answer["name"] for answer in query["answers"]] == answers
            checked += 1
    assert checked >= 8


def test_the_data_set_and_its_partitions(runs, figures):
    (data,) = figures["datasets"]
    assert data["triples"] == {name: len(runs.dataset.split(name)) for name in ("train", "valid", "test")}
    assert data["entities"] == {name: runs.dataset.num_entities(name) for name in runs.dataset.entity_types}
    assert sum(part["num_edges"] for part in data["partitions"]["parts"]) == data["triples"]["train"]
    degrees = dglkge.open_run(str(runs.first)).degrees
    expected = {name: np.zeros(len(of), int) for name, of in degrees.items()}
    for head, relation_id, tail in runs.dataset.split("train").tolist():
        pair = runs.dataset.relations[relation_id]
        expected[pair.lhs][head] += 1
        expected[pair.rhs][tail] += 1
    for name, of in degrees.items():
        assert of.tolist() == expected[name].tolist()
    assert sum(count for *_, count in data["degrees"]["histogram"]) == sum(data["entities"].values())


def test_the_map_shows_the_entities_of_the_highest_degrees(runs):
    entity_map = collect([str(runs.first)], Choices(limit=5, points=12))["runs"][0]["map"]
    types = {name: type_["names"] for name, type_ in entity_map["types"].items()}
    assert 12 <= entity_map["num_entities"] == sum(map(len, types.values())) <= 14
    assert set(types) == set(runs.dataset.entity_types) and HOSTILE["town0"] in types["town"]
    degrees = dglkge.open_run(str(runs.first)).degrees
    for name, ids in frequent_entities(degrees, 12).items():
        rest = np.delete(degrees[name], ids)
        assert not len(rest) or degrees[name][ids].min() >= rest.max()


def test_maps():
    """PCA by singular values; t-SNE keeps groups together; equal rows have a map."""
    rows = np.random.default_rng(0).normal(size=(50, 7)) * np.array([5, 3, 1, 1, 1, 1, 1])
    points, explained = project(rows, "pca")
    left, sizes, _ = np.linalg.svd(rows - rows.mean(0), full_matrices=False)
    assert np.allclose(np.abs(points), np.abs(left[:, :2] * sizes[:2]))
    assert explained == pytest.approx((sizes[:2] ** 2 / (sizes**2).sum()).tolist())
    groups = np.repeat([[0.0] * 5, [50.0] * 5], 10, axis=0) + np.random.default_rng(0).normal(size=(20, 5))
    points, explained = project(groups, "tsne")
    centres = points.reshape(2, 10, 2).mean(1)
    nearest = np.linalg.norm(points[:, None] - centres, axis=2).argmin(1)
    assert nearest.tolist() == [0] * 10 + [1] * 10
    assert not explained and not project(np.ones((5, 3)), "pca")[0].any()
    with pytest.raises(InputError, match="not finite: the run has diverged"):
        project(np.full((5, 3), np.nan), "pca")


def test_changed_fields_are_marked():
    by_field = {row["field"]: row for row in configuration([{"model": {"dimension": 6}}, {}])}
    assert by_field["model.dimension"]["values"] == [6, 400] and by_field["model.dimension"]["differs"]
    assert by_field["model.dimension"]["is_changed"] == [True, False]
    assert not by_field["training.batch_size"]["differs"]
    # What auto has decided is no change.
    rows = {row["field"]: row for row in configuration([{"training": {"matmul_dtype": "bfloat16"}}])}
    assert rows["training.matmul_dtype"]["values"] == ["bfloat16"]
    assert rows["training.matmul_dtype"]["is_changed"] == [False]
