"""The page in Chromium: search, completion, clicks, hostile names, colours, a phone, the token."""

from __future__ import annotations

import shutil
from urllib.parse import parse_qs, urlsplit

import pandas as pd
import pytest

import dglkge
from tests.checkpoint.toy_checkpoint import calibrated
from tests.serving.conftest import IMAGE, ODD, SCRIPT, served

TOKEN = "correct-horse-battery"
READY = "body[data-ready]"
MATCHES = "#matches[aria-busy=false] [role=option]"  # those of all that was typed


def wait_for(page, name):
    """Wait until the page shows an entity with everything that is loaded for it."""
    page.wait_for_function("name => document.body.dataset.ready === name", arg=name)
    assert page.inner_text("h1") == name


def steps_of(page):
    return parse_qs(urlsplit(page.url).query, keep_blank_values=True).get("at", [])


def names_in(page, section):
    return page.locator(f"section[aria-label='{section}'] .rows .name").all_inner_texts()


@pytest.fixture
def page(server, open_page):
    page = open_page(server)
    page.wait_for_selector(READY)
    return page


def predicted(page):
    return page.locator("section[aria-label=Predicted] details").filter(has_text="lives_in →")


def test_search_by_keyboard_click_through_and_back(page, run):
    assert page.title() == f"{run.tables.meta.dataset_name} – dglkge"
    page.keyboard.press("/")
    page.keyboard.type("PERSON")
    page.wait_for_selector(MATCHES)
    page.keyboard.press("1")  # while the list still shows the matches of "PERSON"
    page.wait_for_selector(MATCHES)
    names = [text.split("\n")[0] for text in page.locator("#matches [role=option]").all_inner_texts()]
    assert names == ["person1", *(f"person{number}" for number in range(10, 20))]
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    assert page.inner_text("[aria-selected=true] .name") == "person10"
    assert page.get_attribute("#query", "aria-activedescendant") == "match-1"
    page.keyboard.press("Enter")
    wait_for(page, "person10")
    assert not page.is_visible("#matches") and page.evaluate("document.activeElement.tagName") == "H1"
    assert names_in(page, "Similar") == run.similar("person10", 20)["entity"].tolist()
    assert "lives_in →" in page.locator("section[aria-label='Known triples'] summary .name").all_inner_texts()
    expected = run.predict_tails("person10", "lives_in", 10, "drop")
    assert predicted(page).locator(".rows .name").all_inner_texts() == expected["entity"].tolist()
    score = float(predicted(page).locator(".rows .value").first.inner_text())
    assert score == pytest.approx(expected["score"][0], abs=6e-4)
    first, town = page.url, expected["entity"][0]
    predicted(page).locator(".rows a").first.click()
    wait_for(page, town)
    assert steps_of(page) == ["person10", town]
    assert page.locator("#trail li").all_inner_texts()[1].startswith("lives_in → ?")
    neighbour = names_in(page, "Similar")[0]
    page.click("section[aria-label=Similar] .rows a >> nth=0")
    wait_for(page, neighbour)
    assert steps_of(page) == ["person10", town, neighbour]
    moves = {page.go_back: town, page.reload: town, lambda: page.click("#trail a >> nth=0"): "person10"}
    for move, name in moves.items():
        move()
        wait_for(page, name)
    assert steps_of(page) == ["person10"] and page.url == first
    with page.expect_request("**/predict") as request:
        page.check("text=with known answers")
    body = request.value.post_data_json
    assert (body["known"], body["candidates"]) == ("mark", "seen")
    wait_for(page, "person10")
    marked = run.predict_tails("person10", "lives_in", 10)
    predicted(page).locator(".rows .name").first.wait_for()
    assert predicted(page).locator(".rows .name").all_inner_texts() == marked["entity"].tolist()
    badges = predicted(page).locator(".badge").all_inner_texts()
    assert badges == [split for split in marked["known_from"] if split]


def test_a_prediction_opens_its_reasons(server, open_page, run):
    page = open_page(f"{server}?at=person10&type=person&by=")
    wait_for(page, "person10")
    why, reasons = predicted(page).locator(".why").first, predicted(page).locator(".reasons").first
    town = predicted(page).locator(".rows .name").first.inner_text()
    why.click()
    reasons.locator("li").first.wait_for()
    shown, expected = reasons.inner_text(), run.explain("person10", "lives_in", town)
    assert all(rule["rule"] in shown for rule in expected["rules"])
    assert all(f"{link['entity']} instead of" in shown for link in expected["similar"])
    assert len(expected["triples"]) <= shown.count("\n") and why.get_attribute("aria-expanded") == "true"
    why.click()
    assert reasons.inner_text() == ""


@pytest.mark.parametrize("name", [IMAGE, ODD])
def test_hostile_names_are_text(page, name):
    page.fill("#query", name[:8].upper())
    page.wait_for_selector(MATCHES)
    assert page.locator("#matches [role=option] .name").first.inner_text() == name
    page.locator("#matches [role=option]").first.click()
    wait_for(page, name)
    assert steps_of(page) == [name] and page.title().startswith(name)
    assert page.locator("main img, main script").count() == 0
    if name == IMAGE:  # a person, whom others know
        known = page.locator("section[aria-label='Known triples']")
        assert f"{SCRIPT} →" in known.locator("summary .name").all_inner_texts()
        known.locator("details").filter(has_text=SCRIPT).first.locator(".rows a").first.click()
        page.wait_for_function("name => document.body.dataset.ready !== name", arg=name)
        assert SCRIPT in page.inner_text("#trail")


def test_problems_are_shown(server, page, browser):
    refused = browser.new_context().new_page()  # a refusal stands in the browser's console as an error
    refused.goto(f"{server}?at=persn1&type=person&by=")
    refused.wait_for_selector(".problem")
    assert "did you mean 'person1'" in refused.inner_text(".problem")
    refused.context.close()
    page.fill("#query", "zzz")
    page.wait_for_selector("#matches .none")
    page.keyboard.press("Enter")
    page.keyboard.press("Escape")
    assert not page.is_visible("#matches") and steps_of(page) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_and_a_phone(server, open_page, scheme):
    phone = {"viewport": {"width": 360, "height": 740}, "is_mobile": True, "has_touch": True}
    page = open_page(f"{server}?at=town3&type=town&by=", color_scheme=scheme, **phone)
    wait_for(page, "town3")
    elements = {"documentElement": "backgroundColor", "body": "color"}
    colours = [page.evaluate(f"getComputedStyle(document.{name}).{key}") for name, key in elements.items()]
    background, text = (sum(map(int, colour[4:-1].split(","))) for colour in colours)
    assert background > 600 > 200 > text if scheme == "light" else background < 200 < 600 < text
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_token(run_folder, open_page):
    with served(run_folder, TOKEN) as url:
        page = open_page(f"{url}?at=town3&type=town&by=#token={TOKEN}")
        wait_for(page, "town3")
        assert TOKEN not in page.url and "#" not in page.url
        page.reload()
        wait_for(page, "town3")
        locked_page = open_page(url)
        locked_page.wait_for_selector("#token-dialog[open]")
        locked_page.fill("#token", TOKEN)
        locked_page.keyboard.press("Enter")
        locked_page.wait_for_selector(READY)
        assert TOKEN not in locked_page.url and "town" in locked_page.inner_text("main")


def test_a_new_entity_and_numbers(page, run):
    fact = ("Ann", "lives_in", "town4")
    expected = run.add_entities(pd.DataFrame([fact], columns=["head", "relation", "tail"]))
    page.fill("section[aria-label='New entity'] input", "Ann")
    page.fill("textarea[aria-label=Triples]", "\t".join(fact))
    page.click("section[aria-label='New entity'] button")
    page.locator("section[aria-label='New entity'] .rows .name").first.wait_for()
    near = expected.similar("Ann", 20)["entity"].tolist()
    assert names_in(page, "New entity")[: len(near)] == near
    values = {f"person{number}": float(number) for number in range(5, 17)}
    text = "\n".join(f"{name}\t{value}" for name, value in values.items())
    page.fill("textarea[aria-label=Values]", text)
    page.click("section[aria-label=Numbers] button")
    page.locator("section[aria-label=Numbers] .rows .name").first.wait_for()
    frame = run.predict_numbers(values)
    assert names_in(page, "Numbers") == frame["entity"][frame["known"].isna()].tolist()[:20]


def test_a_question_of_several_hops(run_folder, open_page, tmp_path):
    folder = shutil.copytree(run_folder, tmp_path / "run")
    calibrated(folder, 1.0, 0.0)
    question = "?x : (person10, lives_in, ?y), (?x, lives_in, ?y)"
    expected = dglkge.open_run(folder).ask(question, 20)
    with served(folder) as url:
        page = open_page(url)
        page.wait_for_selector(READY)
        page.fill("section[aria-label=Ask] input", question)
        page.keyboard.press("Enter")
        page.locator("section[aria-label=Ask] .rows .name").first.wait_for()
        assert names_in(page, "Ask") == expected["entity"].tolist()
        path = page.locator("section[aria-label=Ask] .note").first.inner_text()
        assert path.startswith("(person10, lives_in, ") and f"({expected['entity'][0]}, lives_in, " in path
        page.click("section[aria-label=Ask] .rows a >> nth=0")
        wait_for(page, expected["entity"][0])
