"""The dashboard as a person sees it: a real browser on the real service, while a sweep runs."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By

from tests.service_process import ServiceProcess, running_service, small_spec, wait_until, write_corpus

CHROMIUM, CHROMEDRIVER = shutil.which("chromium"), shutil.which("chromedriver")

pytestmark = [
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


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    for argument in (*QUIET.split(), f"--user-data-dir={tmp_path / 'browser'}"):
        options.add_argument(argument)
    options.binary_location = str(CHROMIUM)
    options.set_capability("goog:loggingPrefs", {"browser": "SEVERE"})
    chrome = webdriver.Chrome(options=options, service=Service(str(CHROMEDRIVER)))
    try:
        yield chrome
    finally:
        chrome.quit()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ServiceProcess]:
    with running_service(tmp_path / "data") as running:
        yield running


def test_dashboard_shows_the_trials_of_both_arms_while_they_run(
    browser: webdriver.Chrome, service: ServiceProcess, tmp_path: Path
) -> None:
    sweep_id = service.submit(small_spec(write_corpus(tmp_path / "corpus"), budget={"trials": 100}))
    wait_until(lambda: service.sweep(sweep_id)["trials"]["running"] >= 2, "a trial of each arm runs")
    service.wait_for_epochs(sweep_id, 2)
    page = service.url + service.sweep(sweep_id)["dashboard_url"]

    def shown() -> list[str]:
        """The page's words, one by one as they stand below each other."""
        return browser.find_element(By.TAG_NAME, "body").text.splitlines()

    for number, arm in ((0, "fd"), (1, "eld")):
        browser.get(f"{page}/trials?numbers={number}")
        wait_until(lambda arm=arm: f"arm {arm}" in " ".join(shown()), f"trial {number} of arm {arm} is shown")  # type: ignore[misc]
        assert f"Trial {number} (trial_id={number + 1})" in shown()
    assert "Running" in shown(), "trials that run are listed as such"
    assert not service.has_ended(sweep_id), "all this was seen while the sweep ran"

    browser.get(page)
    wait_until(lambda: "Intermediate values" in shown(), "the study's page draws its curves")
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
    service.cancel(sweep_id)
    service.wait_for_end(sweep_id)
