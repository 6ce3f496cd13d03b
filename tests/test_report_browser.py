"""The report's page as a person sees it: on any screen, by light and by dark, with nothing but itself."""

from pathlib import Path

import pytest
from selenium import webdriver

from service.pictures import draw_all
from service.report_page import write_page
from tests.browsers import (
    NEEDS_BROWSER,
    complaints,
    is_wider_than_the_screen,
    keep_picture,
    look_as,
    shown,
    violations,
)
from tests.played_service import played_service, submit, wait_for
from tests.stories import story

pytestmark = NEEDS_BROWSER

SCREENS = [(1280, "light"), (390, "dark")]
BROKEN = """return [...document.images].filter(image => !image.complete || !image.naturalWidth).length"""
IMAGES = "return document.images.length"


def assert_fit_to_be_read(browser: webdriver.Chrome, width: int) -> None:
    assert not is_wider_than_the_screen(browser)
    assert browser.execute_script(BROKEN) == 0
    assert violations(browser) == []
    assert width == browser.execute_script("return innerWidth")


def test_the_services_page_is_whole_under_its_own_policy(browser: webdriver.Chrome, tmp_path: Path) -> None:
    with played_service(tmp_path) as client:
        sweep = wait_for(client, submit(client, name="Six trials", budget={"trials": 12}), "succeeded")
        browser.get(f"{client.base_url}/v1/sweeps/{sweep['id']}/report")
        for width, scheme in SCREENS:
            look_as(browser, width, scheme)
            assert browser.execute_script(IMAGES) >= 4
            assert browser.execute_script(BROKEN) == 0
            assert not is_wider_than_the_screen(browser)
        assert "Learning curves" in shown(browser)
        background = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
        assert background == "rgb(20, 24, 29)", "its style is not refused, and is a dark one here"
        assert complaints(browser) == []


@pytest.mark.parametrize(("width", "scheme"), SCREENS)
def test_a_report_that_was_kept_can_be_read_by_everybody(
    browser: webdriver.Chrome, tmp_path: Path, width: int, scheme: str
) -> None:
    told = story(trials=96, epochs=30)
    page = tmp_path / "report.html"
    page.write_text(write_page(told, list(draw_all(told))), encoding="utf-8")
    browser.get(page.as_uri())
    look_as(browser, width, scheme)
    assert_fit_to_be_read(browser, width)
    assert browser.execute_script(IMAGES) == 7
    keep_picture(browser, f"report-{width}-{scheme}")
