# SPDX-License-Identifier: Apache-2.0
"""Every page of build/site, in a browser as wide as a telephone and as wide as a laptop. `./dev test docs` builds them
and runs this; pictures of some pages, and of those that fail, are left in build/screenshots."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

playwright = pytest.importorskip("playwright.sync_api")

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "build" / "site"
PAGES = sorted(path.relative_to(SITE).as_posix() for path in SITE.rglob("*.html"))
SHOWN = {"index.html", "performance.html", "support.html", "features/windows.html", "reference/c.html"}
WIDTHS = (390, 1280)
SCREENSHOTS = ROOT / "build" / "screenshots"
FAULTS = (Path(__file__).parent / "faults.js").read_text()


@pytest.fixture(scope="module")
def browser():
    """Debian's, or that of `playwright install chromium`."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    shutil.rmtree(SCREENSHOTS, ignore_errors=True)  # those of the run before
    with playwright.sync_playwright() as started:
        try:
            # No sandbox, as root may have none, and all that it opens was written here.
            launched = started.chromium.launch(executable_path=found, args=["--no-sandbox"])
        except playwright.Error as error:
            pytest.skip(f"no browser: install Debian's chromium ({str(error).splitlines()[0]})")
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def tab(browser):
    return browser.new_page()


def faults(tab, width: int) -> list[str]:
    tab.set_viewport_size({"width": width, "height": 1000})
    return [f"{width}: {fault}" for fault in tab.evaluate(FAULTS)]


@pytest.mark.parametrize("name", PAGES or [pytest.param("", marks=pytest.mark.skip("no build/site: ./dev docs"))])
def test_a_page_fits_its_screen(tab, name):
    tab.goto((SITE / name).as_uri())
    found = []
    for width in WIDTHS:
        of_width = faults(tab, width)
        if of_width or name in SHOWN:
            tab.screenshot(path=SCREENSHOTS / f"{name.replace('/', '-')}-{width}.png")
        found += of_width
    assert not found


@pytest.mark.parametrize(("body", "fault"), [
    ("<p>short</p>", None),
    ('<div style="width: 2000px">wide</div>', "the page is 2"),
    ('<img src="none.png">', "does not load"),
    ('<div style="overflow: hidden; width: 200px"><pre>' + "long " * 90 + "</pre></div>", "is cut off: <pre>"),
    ('<div style="overflow: hidden"><table><tr><td>' + "long" * 90 + "</table></div>", "is cut off: <table>"),
    ('<div style="overflow: auto"><table><tr><td>' + "long" * 90 + "</table></div>", None),
    ("<table><tr><td>" + "long" * 90 + "</table>", "leaves the screen: <table>"),
    ('<table style="width: 50px; table-layout: fixed; word-break: break-all"><tr><td><code>tessera.attention</code>'
     "</table>", "a word of code is broken"),
    ("<ul><li><p>point</p><p>./dev bench --suite cpu</p></ul>", "is no code"),
])
def test_faults_are_seen(tab, tmp_path, body, fault):
    page = tmp_path / "page.html"
    page.write_text(f'<!doctype html><meta name="viewport" content="width=device-width"><body>{body}')
    tab.goto(page.as_uri())
    found = faults(tab, 390)
    assert not found if fault is None else any(fault in one for one in found), found
