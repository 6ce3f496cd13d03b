"""The service as a person sees it: a real browser on its dashboard, its sign-in and its docs."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from service.access import COOKIE
from service.database import migrate, open_engine
from service.tokens import Tokens
from tests.browsers import NEEDS_BROWSER, complaints, keep_picture, shown
from tests.databases import database_of
from tests.played_service import played_service, submit, wait_for
from tests.service_process import ServiceProcess, running_service, small_spec, wait_until, write_corpus
from tests.stock_dashboard import stock_dashboard

pytestmark = NEEDS_BROWSER


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

    for number, arm in ((0, "fd"), (1, "eld")):
        browser.get(f"{page}/trials?numbers={number}")
        wait_until(
            lambda words=f"arm {arm}": words in " ".join(shown(browser)),  # type: ignore[misc]
            f"trial {number} of arm {arm} is shown",
        )
        assert f"Trial {number} (trial_id={number + 1})" in shown(browser)
    assert "Running" in shown(browser), "trials that run are listed as such"
    assert not service.has_ended(sweep_id), "all this was seen while the sweep ran"

    browser.get(page)
    wait_until(lambda: "Intermediate values" in shown(browser), "the study's page draws its curves")
    assert complaints(browser) == []
    keep_picture(browser, "dashboard-1400-light")
    service.cancel(sweep_id)
    service.wait_for_end(sweep_id)


@pytest.mark.sqlite("what is exported is a file of SQLite")
def test_a_sweep_that_was_taken_elsewhere_is_shown_by_the_stock_dashboard(
    browser: webdriver.Chrome, tmp_path: Path
) -> None:
    taken = tmp_path / "taken.db"
    with played_service(tmp_path / "data") as client:
        sweep_id = submit(client, name="taken elsewhere")
        wait_for(client, sweep_id, "succeeded")
        taken.write_bytes(client.get(f"/v1/sweeps/{sweep_id}/export?format=optuna").content)
    with stock_dashboard(taken) as dashboard:
        browser.get(f"{dashboard.base_url}/dashboard/studies/1/trials?numbers=1")
        wait_until(lambda: "Trial 1 (trial_id=2)" in shown(browser), "its trials are shown")
        assert f"taken elsewhere ({sweep_id})" in " ".join(shown(browser))
        assert "Complete" in shown(browser)
        browser.get(f"{dashboard.base_url}/dashboard/studies/1")
        wait_until(lambda: "Intermediate values" in shown(browser), "the study's page draws its curves")
        assert complaints(browser) == []


def test_person_signs_in_by_the_keyboard_sees_dashboard_and_docs_and_signs_out(
    browser: webdriver.Chrome, tmp_path: Path
) -> None:
    with closing(Tokens(open_engine(database_of(tmp_path)))) as tokens:
        migrate(open_engine(database_of(tmp_path)))
        _, written = tokens.create("person", "write", None)
    with played_service(tmp_path) as client:
        client.headers["authorization"] = f"Bearer {written}"
        sweep = wait_for(client, submit(client), "succeeded")
        page = str(client.base_url).rstrip("/") + sweep["dashboard_url"]
        browser.get(page)
        assert browser.title == "Sign in to fraternal"
        assert complaints(browser) == []
        browser.switch_to.active_element.send_keys("frt_of_nobody", Keys.ENTER)
        wait_until(lambda: "That did not work" in " ".join(shown(browser)), "the alert is shown")
        browser.get_log("browser")  # which names the 401
        browser.switch_to.active_element.send_keys(written, Keys.ENTER)
        wait_until(lambda: "Intermediate values" in shown(browser), "the study's page draws its curves")
        assert browser.current_url == page
        assert browser.execute_script("return document.cookie") == "", "no script can read it"
        browser.get(f"{client.base_url}/docs")
        wait_until(lambda: "/v1/sweeps" in shown(browser), "the API is described")
        assert complaints(browser) == []
        browser.get(f"{client.base_url}/sign-in")
        browser.find_element(By.CSS_SELECTOR, "button").send_keys(Keys.ENTER)
        wait_until(lambda: "Sign in to fraternal" in shown(browser), "the sign-in is shown")
        assert browser.get_cookie(COOKIE) is None
