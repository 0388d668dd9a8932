"""The chat page in a real browser, where one is installed."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serve_support import RunningServer, nano, nano_slots

from clover.runtime.options import MODES
from clover.runtime.server.page import load_page

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
]
ASKED = "Parse the dispatch: UAV7: move waypoint 3 to 120,455. UAV2 goes to Elm."


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with RunningServer(nano_slots(1), slots=1) as running:
        yield running


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver")
    if not (CHROMIUM and DRIVER):
        pytest.skip("chromium and chromedriver are not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path}", "--window-size=1000,900"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.implicitly_wait(20)
    yield driver
    driver.quit()


def by(browser: Any, css: str) -> Any:
    return browser.find_element("css selector", css)


def ask(browser: Any, text: str) -> None:
    by(browser, "#input").send_keys(text + "\n")


def test_the_page_asks_nobody_else_for_anything(server: RunningServer) -> None:
    page, headers = load_page()
    text = page.decode()
    assert not re.search(r"""(src|href|url|import)\s*[=(]\s*["']?(https?:)?//""", text)
    assert "default-src 'none'" in headers["content-security-policy"]
    got = server.http.get("/")
    assert got.content == page and got.headers["content-security-policy"] == headers["content-security-policy"]


def test_a_reply_develops_in_the_page(server: RunningServer, browser: Any) -> None:
    browser.get(server.url)
    assert by(browser, "#model").text == "nano"
    ask(browser, ASKED)
    by(browser, ".turn button.small")  # appears when the reply is whole
    wanted = nano().chat([{"role": "user", "content": ASKED}], max_new_tokens=512)
    assert by(browser, ".reply").text == wanted.text
    cells = browser.find_elements("css selector", ".block:first-child .cell")
    shown = [cell for cell in cells if "mask" not in cell.get_attribute("class")]
    assert len(cells) == 32 and "probability" in shown[0].get_attribute("title")
    ends = [
        cell for cell in shown if "end" in cell.get_attribute("class") and "after" not in cell.get_attribute("class")
    ]
    assert len(ends) <= 1
    stats = by(browser, ".turn .stats").text
    assert f"{wanted.statistics.response_tokens} tokens" in stats and f"{wanted.statistics.steps} steps" in stats
    # a second turn carries the first
    ask(browser, "Repeat: Elm")
    browser.find_element("xpath", "(//button[text()='Play again'])[2]").click()
    history = [
        {"role": "user", "content": ASKED},
        {"role": "assistant", "content": wanted.text},
        {"role": "user", "content": "Repeat: Elm"},
    ]
    replies = [r.get_attribute("textContent") for r in browser.find_elements("css selector", ".reply")]
    assert replies[1] == nano().chat(history, max_new_tokens=512).text
    severe = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert not severe, severe


def test_every_mode_answers_in_the_page(server: RunningServer, browser: Any) -> None:
    """What does not act in a mode is not sent: the server would refuse it."""
    browser.get(server.url)
    by(browser, "#settings summary").click()
    inert = {"autoregressive": ["threshold", "block_size"], "self-speculative": ["threshold"]}
    for mode in MODES:
        by(browser, f"#mode option:nth-child({MODES.index(mode) + 1})").click()
        assert by(browser, "#mode").get_attribute("value") == mode
        disabled = [name for name in ("threshold", "block_size") if not by(browser, f"#{name}").is_enabled()]
        assert disabled == inert.get(mode, [])
        ask(browser, ASKED)
        browser.find_element("xpath", "//*[contains(@class, 'turn')]//*[contains(., 'tokens/step')]")
        wanted = nano().chat([{"role": "user", "content": ASKED}], max_new_tokens=512, mode=mode).text
        reply = by(browser, ".reply").get_attribute("textContent")
        assert reply == wanted or (mode == "adaptive" and reply)  # two adaptive replies may differ
        by(browser, "#fresh").click()
    assert not [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


def test_the_page_fits_a_phone_and_tells_errors(server: RunningServer, browser: Any) -> None:
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 360, "height": 740, "deviceScaleFactor": 2, "mobile": True}
    )
    browser.get(server.url)
    by(browser, "#settings summary").click()
    threshold = by(browser, "#threshold")
    threshold.clear()
    threshold.send_keys("0")
    ask(browser, "Hello " * 30)
    assert "threshold" in by(browser, ".error").text
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 360
