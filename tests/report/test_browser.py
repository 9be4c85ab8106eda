"""The page in a real browser: drawn, readable on a phone, sorted by a click, dark by a click, silent and offline."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from metavd.report import page as pages
from metavd.report.page import write_report
from metavd.report.pictures import publish

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
waiting = pytest.importorskip("selenium.webdriver.support.ui", reason="selenium is not installed")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not (BROWSER and DRIVER), reason="no chromium and chromedriver here; see make chromium")

# Without these a browser that runs as root does not start, or asks its maker for news.
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
EVIL = "<img src=x onerror=alert(1)></script><script>alert(2)</script>"


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


def show(browser: Any, page: Path, *, width: int = 1280, theme: str = "light") -> None:
    """Open a page on a screen of that width, in a system of that theme."""
    phone = width < 600
    screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": phone}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    feature = {"name": "prefers-color-scheme", "value": theme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    browser.get_log("browser"), browser.get_log("performance")
    browser.get(page.as_uri())
    # On a busy machine the driver has answered before the page's script had its turn.
    drawn = "document.readyState === 'complete' && document.querySelector('#clients-table td, .notes') !== null"
    waiting.WebDriverWait(browser, 120).until(lambda _: ask(browser, drawn))


def ask(browser: Any, script: str) -> Any:
    return browser.execute_script(f"return {script}")


def text(browser: Any, script: str) -> list[str]:
    return ask(browser, f"[...{script}].map(e => e.textContent)")


def colour(browser: Any, what: str, kind: str = "color") -> str:
    return ask(browser, f"getComputedStyle(document.querySelector('{what}')).{kind}")


def test_the_page_opens_without_a_complaint_and_asks_for_nothing(browser, page):
    """No error or warning in the console; no request but for the file itself."""
    show(browser, page)
    assert browser.get_log("browser") == []
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [e["params"] for e in events if e["method"] == "Network.requestWillBeSent"]
    asked = {each["request"]["url"] for each in sent if each["documentURL"] == page.as_uri()}
    assert {url for url in asked if not url.startswith("data:")} == {page.as_uri()}


@pytest.mark.parametrize("width", [1280, 390])
def test_every_figure_is_drawn_and_nothing_sticks_out(browser, page, width):
    """Figures have a size and marks inside their frame; the page itself never scrolls sideways, folds opened."""
    show(browser, page, width=width)
    browser.execute_script("document.querySelectorAll('details').forEach(d => d.open = true)")
    sizes = ask(browser, """[...document.querySelectorAll('svg.figure')].map(s => {
        const marks = [...s.querySelectorAll('path, use, image')].filter(m => {
            const box = m.getBoundingClientRect(); return box.width + box.height > 1; });
        const own = s.getBoundingClientRect();
        return [s.getAttribute('aria-label'), own.width, own.height, marks.length, s.querySelectorAll('text').length];
    })""")  # fmt: skip
    assert len(sizes) > 20
    for alt, *size, marks, texts in sizes:
        assert min(size) > 100, alt
        assert marks > 5, alt
        assert texts > 3, alt
    assert ask(browser, "document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0
    wide = ask(browser, "[...document.querySelectorAll('svg.figure')].map(s => s.getBoundingClientRect().width)")
    assert max(wide) <= width


def test_texts_of_figures_can_be_read_on_a_phone(browser, page):
    """No letter of a figure is smaller than 9 pixels at 390 pixels' width."""
    show(browser, page, width=390)
    least = ask(browser, """Math.min(...[...document.querySelectorAll('svg.figure text')].map(t =>
        parseFloat(getComputedStyle(t).fontSize) * t.getScreenCTM().a || 99))""")  # fmt: skip
    assert least >= 9


def test_clients_are_sorted_by_a_click(browser, page):
    """A heading sorts up, again down; another seed and another figure change the numbers."""
    show(browser, page)

    def column(place: int) -> list[str]:
        return text(browser, f"document.querySelectorAll('#clients-table tbody td:nth-child({place})')")

    def click(place: int) -> None:
        browser.execute_script(f"document.querySelectorAll('#clients-table th button')[{place - 1}].click()")

    assert column(1) == [str(number) for number in range(11)]
    click(3)
    sizes = [int(value) for value in column(3)]
    assert sizes == sorted(sizes)
    assert sizes != sorted(sizes, reverse=True)
    click(3)
    assert [int(value) for value in column(3)] == sizes[::-1]
    assert ask(browser, "document.querySelector('#clients-table th[aria-sort]').ariaSort") == "descending"
    click(6)
    accuracy = [float(value) for value in column(6)]
    assert accuracy == sorted(accuracy)
    click(1)
    before = column(6)
    for select, value in (("clients-figure", "nll"), ("clients-set", "1")):
        browser.execute_script(
            f"const s = document.getElementById('{select}'); s.value = '{value}'; s.dispatchEvent(new Event('change'))"
        )
        assert column(6) != before
        before = column(6)


def test_the_theme_follows_the_system_and_the_button(browser, page):
    """Paper and ink of page and figures change places; the button says what it leads to."""
    seen = {}
    for theme in ("light", "dark"):
        show(browser, page, theme=theme)
        seen[theme] = [colour(browser, "body"), colour(browser, "body", "backgroundColor")]
        letters = "[...new Set([...document.querySelectorAll('svg.figure text')].map(t => getComputedStyle(t).fill))]"
        assert set(ask(browser, letters)) == {seen[theme][0], colour(browser, ".hint")}, "figures have the page's ink"
    assert all(light != dark for light, dark in zip(seen["light"], seen["dark"], strict=True))
    button = browser.find_element("id", "theme")
    assert button.text == "Light"
    button.click()
    assert [colour(browser, "body"), colour(browser, "body", "backgroundColor")] == seen["light"]
    assert button.text == "Dark"
    button.click()
    assert colour(browser, "body") == seen["dark"][0]


def test_a_method_of_the_legend_can_be_shown_alone(browser, page):
    """Pressed, all lines of other methods fade; pressed again, all are there."""
    show(browser, page)
    chip = browser.find_elements("css selector", ".chip")[1]
    chip.click()
    others, own = '[data-group]:not([data-group="1"])', '[data-group="1"]'
    assert ask(browser, f"document.querySelectorAll('{others}').length") > 10
    assert ask(browser, f"[...document.querySelectorAll('{others}')].every(e => e.classList.contains('faded'))")
    assert not ask(browser, f"[...document.querySelectorAll('{own}')].some(e => e.classList.contains('faded'))")
    chip.click()
    assert ask(browser, "document.querySelectorAll('.faded').length") == 0


@pytest.mark.parametrize(("width", "theme"), [(390, "dark")])
def test_a_page_without_unseen_clients_shows_names(browser, named, tmp_path, width, theme):
    """Clients and classes have their names in the table and in figures; no unseen ones; nothing sticks out."""
    write_report([named], tmp_path / "page.html")
    show(browser, tmp_path / "page.html", width=width, theme=theme)
    assert browser.get_log("browser") == []
    cells = text(browser, "document.querySelectorAll('#clients-table tbody td')")
    assert cells[::7] == ["north", "south", "west"]
    assert cells[4].startswith(("ill (", "well ("))
    drawn = text(browser, "document.querySelectorAll('svg[aria-label^=\"Gain\"] text')")
    assert {"north", "south", "west"} <= set(drawn)
    assert "unseen" not in " ".join(
        text(browser, "document.querySelectorAll('h2, h3, .band, .facts, svg.figure text')")
    )
    assert ask(browser, "document.documentElement.scrollWidth") <= width
    outside = """[...document.querySelectorAll('svg.figure text')].filter(t => {
        const own = t.getBoundingClientRect(), frame = t.closest('svg').getBoundingClientRect();
        return own.left < frame.left - 1 || own.right > frame.right + 1; }).map(t => t.textContent)"""
    assert ask(browser, outside) == [], "a text of a figure is cut off"


def test_markup_in_names_does_nothing(browser, runs, edited, tmp_path, monkeypatch):
    """A dataset and a layer called like an attack are shown by name; no element, no dialog, no error comes of it."""
    folder = Path(shutil.copytree(runs / "reptile+metavd+drop" / "seed-0", tmp_path / "run"))
    edited(folder / "result.json", lambda value: value.update(data=EVIL, method=EVIL))
    edited(folder / "details.json", lambda value: value["rates"].update({EVIL: value["rates"].pop("fc1")}))
    draw = ("rates", "curve-loss", "reliability-test")  # enough to see; all of them take a while
    stub = "<svg></svg>"
    monkeypatch.setattr(pages, "publish", lambda p, f: publish(p, f) if p.name.startswith(draw) else stub)
    write_report([folder], tmp_path / "page.html")
    assert len(list((tmp_path / "page_files").glob("*.svg"))) == 3
    show(browser, tmp_path / "page.html", width=390)
    assert browser.get_log("browser") == []
    assert text(browser, "document.querySelectorAll('h1')") == [EVIL]
    assert ask(browser, "document.querySelectorAll('img, iframe').length") == 0
    assert ask(browser, "document.scripts.length") == 2
    assert EVIL in text(browser, "document.querySelectorAll('#clients-table th')")
    assert ask(browser, "document.documentElement.scrollWidth") == 390
