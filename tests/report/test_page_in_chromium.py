"""The page in a browser: it draws, sorts, loads nothing, follows the theme and fits a phone and paper."""

from __future__ import annotations

import pytest

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

SECTIONS = "overview data curves ranking examples map time partitions configuration".split()


@pytest.fixture
def opened(open_page, page):
    def opened_page(**options):
        tab = open_page(page.as_uri(), **options)
        tab.wait_for_selector("html[data-ready]")
        return tab

    return opened_page


def brightness(tab, selector: str, field: str) -> float:
    style = f"getComputedStyle(document.querySelector({selector!r})).{field}"
    numbers = tab.evaluate(f"{style}.match(/[0-9.]+/g).map(Number)")
    return sum(numbers[:3]) / 3


def test_everything_is_there_names_run_nothing_and_a_click_sorts_a_table(opened):
    tab = opened(viewport={"width": 1280, "height": 900}, color_scheme="light")
    assert [tab.locator(f"section#{name} h2").count() for name in SECTIONS] == [1] * len(SECTIONS)
    assert tab.locator(".plot").count() >= 10 and tab.locator(".plot:not(:has(.main-svg))").count() == 0
    assert tab.locator("#plot-loss .scatterlayer .trace").count() == 1  # the second run has no records
    assert tab.locator("#plot-map-0 .scatterlayer .trace").count() == 3
    assert tab.locator("#table-relations-0 tbody th", has_text="<i onclick=alert(1)>near</i>").count() >= 1
    # Hover shows a name literally.
    tab.evaluate("document.getElementById('plot-map-0').scrollIntoView()")
    town = "document.getElementById('plot-map-0').data[2].text.findIndex((name) => name.includes('Rome'))"
    tab.evaluate(f"Plotly.Fx.hover('plot-map-0', [{{curveNumber: 2, pointNumber: {town}}}])")
    assert "<b>Rome</b> & %{x} {{ 7 * 7 }}" in tab.locator("#plot-map-0 .hoverlayer").text_content()

    def column(place: int) -> list[str]:
        cells = tab.locator(f"#table-relations-0 tbody tr > :nth-child({place})")
        return [text.strip() for text in cells.all_text_contents()]

    before, heading = column(5), tab.locator("#table-relations-0 thead th").nth(4)
    for order, is_falling in (("descending", True), ("ascending", False)):
        heading.get_by_role("button").click()
        assert column(5) == sorted(before, key=float, reverse=is_falling)
        assert heading.get_attribute("aria-sort") == order
    assert column(5) != sorted(before, key=float, reverse=True)
    name = tab.locator("#table-relations-0 thead th").first
    name.get_by_role("button").click()
    assert heading.get_attribute("aria-sort") is None and name.get_attribute("aria-sort") == "ascending"
    assert column(1)[0].startswith("<i onclick") and column(1).index("knows") < column(1).index("lives_in")


def test_dark_and_paper(opened):
    tab = opened(viewport={"width": 1000, "height": 900}, color_scheme="dark")
    assert brightness(tab, "body", "backgroundColor") < 60 < 180 < brightness(tab, "body", "color")
    assert brightness(tab, "#plot-loss .xtick text", "fill") > 180
    tab.emulate_media(media="print")
    sync_api.expect(tab.locator("#plot-loss .xtick text").first).to_have_css("fill", "rgb(27, 31, 36)")
    assert brightness(tab, "body", "backgroundColor") == 255
    assert tab.locator("nav").is_hidden()
    tab.emulate_media(media="screen", color_scheme="light")
    assert brightness(tab, "body", "backgroundColor") == 255


def test_a_phone(opened):
    tab = opened(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    assert tab.evaluate("document.documentElement.scrollWidth") == 390
    widest = tab.evaluate(
        "Math.max(...[...document.querySelectorAll('.plot svg')].map((s) => s.getBoundingClientRect().right))"
    )
    assert widest <= 390
    assert tab.evaluate("document.getElementById('table-relations-0').scrollWidth") > 390
