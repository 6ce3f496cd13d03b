"""A real browser, and what can be asked of the page that it shows."""

import base64
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

CHROMIUM, CHROMEDRIVER = shutil.which("chromium"), shutil.which("chromedriver")
NEEDS_BROWSER = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None or CHROMEDRIVER is None,
        reason="no browser: install Debian's packages chromium and chromium-driver",
    ),
]
QUIET = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --window-size=1400,1000"
)
PICTURES = Path(__file__).parent.parent / "build" / "pictures"
"""Of pages, as the tests have seen them; kept, and looked at by people."""
TALLEST_PICTURE = 2000
MOST_TABS = 200


@contextmanager
def opened_browser(profile: Path) -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    for argument in (*QUIET.split(), f"--user-data-dir={profile}"):
        options.add_argument(argument)
    options.binary_location = str(CHROMIUM)
    options.set_capability("goog:loggingPrefs", {"browser": "SEVERE"})
    chrome = webdriver.Chrome(options=options, service=Service(str(CHROMEDRIVER)))
    try:
        yield chrome
    finally:
        chrome.quit()


def shown(browser: webdriver.Chrome) -> list[str]:
    """The page's words, one by one as they stand below each other."""
    words: str = browser.execute_script("return document.body ? document.body.innerText : ''")
    return words.splitlines()


def complaints(browser: webdriver.Chrome) -> list[str]:
    """What the console says since it was asked last: of scripts that failed, and that a policy refused."""
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


def look_as(browser: webdriver.Chrome, width: int, scheme: str) -> None:
    """As on a screen of so many pixels, for who prefers a light or a dark one."""
    screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    preferred = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", preferred)


def is_wider_than_the_screen(browser: webdriver.Chrome) -> bool:
    page = "document.documentElement"
    return bool(browser.execute_script(f"return {page}.scrollWidth > {page}.clientWidth"))


def violations(browser: webdriver.Chrome) -> list[str]:
    """What axe-core finds wrong with the page, of any of its rules."""
    browser.execute_script((files("axe_playwright_python") / "axe.min.js").read_text())
    found: Any = browser.execute_async_script("axe.run().then(arguments[0])")
    assert found["testEngine"]["version"] >= "4.10", "colours and roles as they are today"
    assert len(found["passes"]) > 10, "it has looked at a page"
    return [
        f"{rule['id']}: {', '.join(str(node['target']) for node in rule['nodes'])}"
        for rule in found["violations"]
    ]


def press(browser: webdriver.Chrome, key: str) -> None:
    """On whatever has the focus."""
    ActionChains(browser).send_keys(key).perform()


def focused(browser: webdriver.Chrome) -> str:
    """Id of what has the focus."""
    return str(browser.execute_script("return document.activeElement.id"))


def press_tab_until(browser: webdriver.Chrome, element_id: str) -> None:
    """As who has no mouse comes to an element; it must be seen to be there."""
    for _ in range(MOST_TABS):
        press(browser, Keys.TAB)
        if focused(browser) == element_id:
            outline = browser.execute_script("return getComputedStyle(document.activeElement).outlineStyle")
            assert outline == "solid", f"the focus on {element_id} is not seen"
            return
    raise AssertionError(f"{element_id} is not reached by the keyboard")


def keep_picture(browser: webdriver.Chrome, name: str, folder: Path = PICTURES) -> None:
    size: Any = browser.execute_script(
        "return [document.documentElement.clientWidth, document.documentElement.scrollHeight]"
    )
    clip = {"x": 0, "y": 0, "width": size[0], "height": min(size[1], TALLEST_PICTURE), "scale": 1}
    taken = browser.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.png").write_bytes(base64.b64decode(taken["data"]))
