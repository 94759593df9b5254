"""Chromium for the tests of pages: no script fails, and nothing is asked of another address."""

from __future__ import annotations

import shutil

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed")
    # Started and ended with a file: its event loop would be in the way of other tests' own.
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser):
    """Open an address; at the end no page has a message, and all was asked of the hosts of the addresses."""
    contexts, problems, requests, opened = [], [], [], []

    def open_one(url, **options):
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        context.set_default_timeout(120_000)  # busy machines take long to draw a page
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: problems.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.on("dialog", lambda dialog: problems.append(f"dialog: {dialog.message}"))
        opened.append(url)
        page.goto(url)
        return page

    yield open_one
    for context in contexts:
        for page in context.pages:
            assert page.evaluate("window.hacked ?? window.broken") is None
        context.close()
    assert not problems and requests
    # A page of a file is whole; a server is asked for more.
    places = {url if url.startswith("file:") else "/".join(url.split("/")[:3]) for url in opened}
    assert {url if url.startswith("file:") else "/".join(url.split("/")[:3]) for url in requests} == places
