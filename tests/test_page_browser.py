"""The page of runs in a real browser: Chromium, driven by Playwright, against the command itself."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest
from page_runs import TOKEN, address, make_folder, make_run, rows
from runs import ROOT

from jaxdl.core.files import HALT_FILE, METRICS_FILE
from jaxdl.report.status import State

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PATH = os.environ.get("JAXDL_TEST_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        PATH is None,
        reason=f"no browser: install one of {', '.join(NAMES[:3])}, or set JAXDL_TEST_BROWSER to its path",
    ),
]
PICTURES = os.environ.get("JAXDL_TEST_PICTURES")
"""A folder for pictures of the pages, to look at."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = make_folder(tmp_path_factory.mktemp("page") / "runs")
    for number in range(60):
        make_run(folder / f"many{number:02}", State.STOPPED, lines=rows(50, loss=1.0 + number))
    for name in ("grows", "halts"):
        make_run(folder / name, State.PROCESSING, doing="training", lines=rows(400))
    return folder


@pytest.fixture(scope="module")
def url(folder):
    """The address of the page, served by the command."""
    line = [sys.executable, "-m", "jaxdl.status", str(folder), "--serve", "--port", "0"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAXDL_STATUS_TOKEN": TOKEN}
    with subprocess.Popen(line, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            said = server.stdout.readline()
            yield said.split()[-1].rstrip("/")
        finally:
            server.send_signal(signal.SIGINT)
        assert server.wait(20) == 0, "Ctrl-C ends it"


@pytest.fixture(scope="module")
def browser():
    driver = pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed")
    with driver.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=PATH, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser, url):
    """Opens an address; fails in the end if the browser complained, of a script or of what the policy forbids."""
    contexts, complaints = [], []

    def open_page(path="/", **options):
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
        page.goto(url + path)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


def photograph(page, name):
    if PICTURES:
        page.screenshot(path=os.path.join(PICTURES, f"{name}.png"))


def is_too_wide(page):
    """Whether the page has to be scrolled sideways."""
    return page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth + 1")


def test_runs_are_found_sorted_and_compared(open_page, folder):
    page = open_page(viewport={"width": 1300, "height": 850})
    rows_shown = page.locator("#part-rows tr")
    assert rows_shown.count() == 50
    photograph(page, "runs")
    page.get_by_role("link", name="Next").click()
    page.wait_for_url("**page=2**")
    assert rows_shown.count() == 16
    page.get_by_label("Filter").fill("many5")
    page.keyboard.press("Enter")
    page.wait_for_url("**q=many5**")
    assert rows_shown.count() == 10
    page.get_by_role("link", name="eval/loss").click()
    page.wait_for_url("**sort=eval**")
    assert page.locator("th[aria-sort=ascending]").inner_text() == "eval/loss"
    losses = [float(text) for text in page.locator("td[data-label='eval/loss']").all_inner_texts()]
    assert losses == sorted(losses)
    for box in range(2):
        page.locator("input[name=run]").nth(box).check()
    page.get_by_role("button", name="Compare").click()
    page.locator(".chart svg").first.wait_for()
    assert page.locator(".legend label").all_inner_texts() == ["many50", "many51"]
    assert page.locator(".chart").first.locator("path").count() == 4, "training and evaluation of two runs"
    page.get_by_role("checkbox", name="many50").uncheck()
    assert page.locator(".chart").first.locator("path").count() == 2
    photograph(page, "compare")


def test_curves_follow_the_run_and_its_settings(open_page, folder):
    run = folder / "grows"
    page = open_page(address(run))
    chart = page.locator(".chart").first
    chart.locator("svg").wait_for()
    assert chart.locator("path.raw").count() == 1, "40 reports of training are smoothed"
    page.get_by_label("Smoothing").fill("0")
    assert chart.locator("path.raw").count() == 0
    labels = chart.locator("text").all_inner_texts()
    page.get_by_label("log values").check()
    assert chart.locator("text").all_inner_texts() != labels
    svg = chart.locator("svg")
    svg.focus()
    page.keyboard.press("Home")
    assert "train/loss 0.2" in chart.locator(".values").inner_text()
    page.keyboard.press("ArrowRight")
    assert "at 20" in chart.locator(".values").inner_text()
    page.get_by_label("all metrics").check()
    with (run / METRICS_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": 410, "epoch": 9.0, "train/brand_new": 3.0}) + "\n")
    page.locator(".chart h3", has_text="brand_new").wait_for(timeout=15_000)
    page.locator("#part-state", has_text="410").wait_for(timeout=15_000)  # It is asked for by itself.
    photograph(page, "run")


def test_the_log_grows_while_it_is_looked_at(open_page, folder):
    page = open_page(address(folder / "good"))
    page.locator("#log-text", has_text="last").wait_for()
    with (folder / "good" / "output.log").open("a", encoding="utf-8") as file:
        file.write("<b>a line that comes later</b>\n")
    page.locator("#log-text", has_text="<b>a line that comes later</b>").wait_for(timeout=10_000)


def test_the_keyboard_alone_reaches_everything(open_page, folder):
    page = open_page()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    assert page.locator(".skip").bounding_box()["x"] >= 0, "it is seen when it has the focus"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    seen = set()
    for _ in range(30):
        page.keyboard.press("Tab")
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        seen.add(page.evaluate("document.activeElement.tagName + (document.activeElement.name || '')"))
        assert outline == "solid", seen
    assert {"INPUTq", "SELECTstate", "BUTTON", "A", "INPUTrun"} <= seen
    unlabelled = "[...document.querySelectorAll('input:not([type=hidden]), select, button')].filter("
    unlabelled += (
        "e => !(e.labels && e.labels.length) && !e.getAttribute('aria-label') && !e.textContent.trim()).length"
    )
    assert page.evaluate(unlabelled) == 0
    assert page.locator("main h1").count() == 1
    assert page.locator("header nav[aria-label]").count() == 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_it_without_sideways_scrolling(open_page, folder, scheme):
    phone = {"viewport": {"width": 360, "height": 740}, "color_scheme": scheme, "is_mobile": True}
    page = open_page(**phone)
    assert not is_too_wide(page)
    photograph(page, f"phone-{scheme}")
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    brightness = sum(map(int, re.findall(r"\d+", dark)[:3])) / 3
    assert (brightness < 60) == (scheme == "dark")
    pages = [address(folder / "failed"), address(folder / "good")]
    pages.append(f"/compare?run={pages[0].rpartition('/')[2]}&run={pages[1].rpartition('/')[2]}")
    for path in pages:
        page = open_page(path, **phone)
        page.locator(".chart").first.wait_for()
        assert not is_too_wide(page), path
        photograph(page, f"phone-{scheme}-{pages.index(path)}")
    page.get_by_label("Change between light and dark").click()
    assert page.evaluate("document.documentElement.dataset.theme") == {"light": "dark", "dark": "light"}[scheme]


def test_a_run_is_halted_by_who_signs_in(open_page, folder):
    run = folder / "halts"
    page = open_page(address(run))
    assert page.get_by_role("button", name="Halt").count() == 0
    page.get_by_role("link", name="Sign in to act").click()
    page.get_by_label("The token").fill(TOKEN)
    page.keyboard.press("Enter")
    page.wait_for_url("**/")
    page.goto(page.url.rstrip("/") + address(run))
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Halt").click()
    page.get_by_text("It has been asked to halt").wait_for()
    assert (run / HALT_FILE).read_text() == "halted on the status page\n"
