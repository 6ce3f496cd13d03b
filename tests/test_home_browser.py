"""The home page as a person sees it: live, by the keyboard alone, without the service, on any screen."""

from collections.abc import Callable
from contextlib import ExitStack, closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from sqlalchemy import update

from service.database import naive, now, open_engine
from service.tables import sweeps
from tests.browsers import (
    NEEDS_BROWSER,
    complaints,
    focused,
    is_wider_than_the_screen,
    keep_picture,
    look_as,
    press,
    press_tab_until,
    shown,
    violations,
)
from tests.databases import database_of
from tests.played_service import PlayedDriver, played_service, submit
from tests.service_process import wait_until
from tests.test_access import bearer, tokens_of, wait_until_refused

pytestmark = NEEDS_BROWSER

FAILURE = """three trials in a row have failed of the same thing, RuntimeError
Traceback (most recent call last):
  File "trials/attempt.py", line 88, in attempt
    loss.backward()
RuntimeError: element 0 of tensors does not require grad"""
PAST: tuple[tuple[int, dict[str, Any], dict[str, Any], timedelta], ...] = (
    (
        8,
        {"name": "Seeds of the single layer", "labels": {"team": "nlp"}, "budget": {"trials": 8}},
        {"state": "succeeded", "ran_s": 25_500.0},
        timedelta(days=3),
    ),
    (
        5,
        {"name": "κ from 0.01 to 0.5", "labels": {"paper": "iclr18"}, "budget": {"trials": 16}},
        {"state": "cancelled", "ran_s": 1_900.0},
        timedelta(days=2),
    ),
    (
        3,
        {
            "name": "Clipped at 13",
            "labels": {"team": "lm"},
            "budget": {"trials": 12},
            "training": {"clip": 13},
        },
        {"state": "failed", "state_reason": FAILURE, "ran_s": 62.0},
        timedelta(hours=11),
    ),
    (
        4,
        {"name": "FD against ELD on WikiText-2", "labels": {"team": "lm"}, "budget": {"trials": 24}},
        {
            "state": "paused",
            "state_reason": "the disk is full: the checkpoint of trial 4 could not be written",
            "ran_s": 3_000.0,
        },
        timedelta(minutes=40),
    ),
)
"""How many trials have been played, of what that was asked for, what it has become, and how long ago."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a service that has been used for a while."""
    folder = tmp_path_factory.mktemp("used")
    engine = open_engine(database_of(folder))
    with played_service(folder, plays=False) as client:
        for played, asked, become, ago in PAST:
            sweep_id = submit(client, **asked)
            with closing(PlayedDriver(folder, sweep_id)) as driver:
                for _ in range(played):
                    driver.play()
                if become["state"] == "succeeded":
                    driver.verify()
            at = naive(now() - ago)
            values = {"state_since": at, "running_since": None, **become}
            with engine.begin() as connection:
                connection.execute(update(sweeps).where(sweeps.c.id == sweep_id).values(values))
    engine.dispose()
    return folder


def open_home(browser: webdriver.Chrome, client: httpx.Client, path: str = "/") -> None:
    browser.get(str(client.base_url).rstrip("/") + path)


def is_shown(browser: webdriver.Chrome, words: str) -> Callable[[], bool]:
    return lambda: words in " ".join(" ".join(shown(browser)).split())


def wait_until_shown(browser: webdriver.Chrome, words: str) -> None:
    wait_until(is_shown(browser, words), f"{words!r} is shown", lambda: "\n".join(shown(browser)))


def test_progress_moves_and_the_keyboard_steers_and_the_page_outlives_the_service(
    browser: webdriver.Chrome, tmp_path: Path
) -> None:
    with ExitStack() as first_life:
        client = first_life.enter_context(played_service(tmp_path, plays=False))
        open_home(browser, client)
        wait_until_shown(browser, "No sweep yet")
        keep_picture(browser, "home-empty")
        sweep_id = submit(client, name="FD against ELD, one layer of 200", labels={"team": "nlp"})
        wait_until_shown(browser, "0 of 6 trials")
        browser.execute_script("window.loadedOnce = true")
        driver = first_life.enter_context(closing(PlayedDriver(tmp_path, sweep_id)))
        driver.play()
        wait_until_shown(browser, "1 of 6 trials")
        wait_until_shown(browser, "fd, trial 0")

        press_tab_until(browser, f"{sweep_id}-pause")
        driver.play()
        wait_until_shown(browser, "2 of 6 trials")
        assert focused(browser) == f"{sweep_id}-pause", "a row that changes keeps the focus"
        press(browser, Keys.ENTER)
        wait_until_shown(browser, "is pausing: running trials save where they stand.")
        wait_until_shown(browser, "Pausing")
        assert client.get(f"/v1/sweeps/{sweep_id}").json()["state"] == "pausing"
        assert focused(browser) == sweep_id, "its button is gone: the focus is on its row"
        press_tab_until(browser, f"{sweep_id}-resume")
        press(browser, Keys.SPACE)
        wait_until_shown(browser, "goes on.")
        assert complaints(browser) == []
        port = client.base_url.port

    wait_until_shown(browser, "Not live: trying again")
    keep_picture(browser, "home-not-live")
    with played_service(tmp_path, plays=False, port=port) as client:
        client.post(f"/v1/sweeps/{sweep_id}:stop")
        wait_until_shown(browser, "Stopping")
        wait_until(lambda: "Live" in shown(browser), "it is live again")
        complaints(browser)  # of a service that was not there

        press_tab_until(browser, f"{sweep_id}-cancel")
        press(browser, Keys.ENTER)
        wait_until_shown(browser, "Cancel FD against ELD, one layer of 200?")
        assert violations(browser) == []
        press(browser, Keys.ESCAPE)
        wait_until(lambda: focused(browser) == f"{sweep_id}-cancel", "the focus is back at its button")
        assert client.get(f"/v1/sweeps/{sweep_id}").json()["state"] == "stopping"
        press(browser, Keys.ENTER)
        press(browser, Keys.TAB)
        press(browser, Keys.ENTER)
        wait_until_shown(browser, "is being cancelled.")
        assert client.get(f"/v1/sweeps/{sweep_id}").json()["state"] == "cancelling"
        assert complaints(browser) == []
        assert browser.execute_script("return window.loadedOnce"), "all of it on one page, loaded once"


def test_a_refusal_is_said_on_the_page_and_what_is_filtered_is_looked_at_again(
    browser: webdriver.Chrome, tmp_path: Path
) -> None:
    with played_service(tmp_path, plays=False) as client:
        sweep_id = submit(client, name="one")
        open_home(browser, client, "/?state=queued")
        wait_until(lambda: "Live" in shown(browser), "it is live")
        verb = browser.find_element(By.CSS_SELECTOR, "[name=verb][value=pause]")
        browser.execute_script("arguments[0].value = 'stop'", verb)
        browser.find_element(By.ID, f"{sweep_id}-pause").click()
        wait_until_shown(browser, "That did not work: sweep")
        wait_until_shown(browser, "legal now: pause, cancel")
        client.post(f"/v1/sweeps/{sweep_id}:pause")
        wait_until_shown(browser, "No sweep is like that.")
        assert complaints(browser) == []


FAILING_LOOKS = """
const [address] = arguments, ask = window.fetch, later = window.setTimeout;
window.failing = true;
window.setTimeout = (act, ms) => later(act, ms / 20);
window.fetch = (...asked) => !window.failing ? ask(...asked)
  : address ? ask(address, ...asked.slice(1)) : Promise.reject(new TypeError("Failed to fetch"));
"""
"""Until it is told otherwise, the page is answered by another address, or by nobody, where that is null."""


@pytest.mark.parametrize(
    ("address", "told"), [(None, "Not live: trying again"), ("/cancel?sweep=none", "Not live: ")]
)
def test_what_one_look_did_not_find_is_found_by_a_later_one(
    browser: webdriver.Chrome, tmp_path: Path, address: str | None, told: str
) -> None:
    with played_service(tmp_path, plays=False) as client:
        first = submit(client, name="the first")
        open_home(browser, client)
        wait_until(lambda: "Live" in shown(browser), "it is live")
        browser.execute_script(FAILING_LOOKS, address)
        submit(client, name="the second")
        wait_until_shown(browser, told)
        client.post(f"/v1/sweeps/{first}:pause")
        wait_until_shown(browser, "Paused")
        assert not is_shown(browser, "the second")()
        browser.execute_script("window.failing = false")
        wait_until_shown(browser, "the second")
        wait_until(lambda: "Live" in shown(browser), "it is live again")
        complaints(browser)  # of what was not there


def test_every_page_of_ours_is_accessible_on_a_desk_and_a_phone_light_and_dark(
    browser: webdriver.Chrome, folder: Path
) -> None:
    with played_service(folder, plays=False, running_sweeps=2) as client:
        running = submit(
            client, name="FD against ELD, one layer of 200", labels={"team": "nlp"}, budget={"trials": 16}
        )
        submit(client, name="Weight decay, all regularizers", labels={"team": "nlp"}, priority=5)
        with closing(PlayedDriver(folder, running)) as driver:
            for _ in range(7):
                driver.play()
            for width in (1280, 390):
                for scheme in ("light", "dark"):
                    look_as(browser, width, scheme)
                    open_home(browser, client)
                    wait_until(lambda: "Live" in shown(browser), "it is live")
                    assert violations(browser) == [], (width, scheme)
                    assert not is_wider_than_the_screen(browser)
                    keep_picture(browser, f"home-{width}-{scheme}")
                    for path, words in (
                        ("/?name=nothing", "No sweep is like that."),
                        ("/?state=done", "Input should be 'queued'"),
                        (f"/cancel?sweep={running}", "Keep it"),
                    ):
                        open_home(browser, client, path)
                        wait_until_shown(browser, words)
                        assert violations(browser) == [], (path, width, scheme)
        assert [said for said in complaints(browser) if "422" not in said] == []


def test_a_reader_sees_no_button_and_signs_in_again_once_the_token_is_revoked(
    browser: webdriver.Chrome, tmp_path: Path
) -> None:
    with closing(tokens_of(tmp_path)) as kept, played_service(tmp_path, plays=False) as client:
        token, reads = kept.create("reader", "read", None)
        _, writes = kept.create("writer", "write", None)
        client.headers["authorization"] = f"Bearer {writes}"
        sweep_id = submit(client, name="one")
        for scheme in ("light", "dark"):
            look_as(browser, 390, scheme)
            open_home(browser, client)
            wait_until_shown(browser, "Sign in to fraternal")
            assert violations(browser) == []
            keep_picture(browser, f"sign-in-390-{scheme}")
        browser.switch_to.active_element.send_keys(reads, Keys.ENTER)
        wait_until_shown(browser, "reader, may look")
        wait_until(lambda: "Live" in shown(browser), "it is live")
        assert violations(browser) == []
        assert browser.find_elements(By.CSS_SELECTOR, ".verbs button") == []
        assert complaints(browser) == []
        kept.revoke(token.id)
        wait_until_refused(client, bearer(reads))
        client.post(f"/v1/sweeps/{sweep_id}:pause")
        wait_until_shown(browser, "Sign in to fraternal")


def test_200_sweeps_with_the_longest_names_fit_on_the_narrowest_phone(
    browser: webdriver.Chrome, tmp_path: Path
) -> None:
    with played_service(tmp_path, plays=False) as client:
        for number in range(200):
            name = ["W" * 200, "a name " * 28, "\u202e" + "שלום " * 39][number % 3]
            labels = {"L" * 64: "x" * 200, "n": str(number)} if number % 5 == 0 else {}
            submit(client, name=name, labels=labels)
        look_as(browser, 360, "light")
        open_home(browser, client, "/?page_size=200")
        assert len(browser.find_elements(By.CSS_SELECTOR, "li.sweep")) == 200
        assert not is_wider_than_the_screen(browser)
