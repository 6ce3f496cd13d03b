"""`python -m tests.pictures SWEEP`: README's pictures of a sweep, by a browser from a running service."""

import argparse
import tempfile
import time
from pathlib import Path

import httpx

from tests.browsers import keep_picture, look_as, opened_browser, shown
from tests.service_process import wait_until

DOCS = Path(__file__).parent.parent / "docs"
WIDTH = 1280


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sweep")
    parser.add_argument("--url", default="http://127.0.0.1:8123")
    asked = parser.parse_args()
    sweep = httpx.get(f"{asked.url}/v1/sweeps/{asked.sweep}").raise_for_status().json()
    pages = {
        "report": (f"/v1/sweeps/{asked.sweep}/report", "Learning curves"),
        "dashboard": (sweep["dashboard_url"], "Intermediate values"),
    }
    with tempfile.TemporaryDirectory() as profile, opened_browser(Path(profile)) as browser:
        look_as(browser, WIDTH, "light")
        for name, (path, words) in pages.items():
            browser.get(asked.url + path)
            wait_until(lambda words=words: words in " ".join(shown(browser)), f"{name} is shown")  # type: ignore[misc]
            time.sleep(2)  # the dashboard's curves are drawn in motion
            keep_picture(browser, name, DOCS)
            print(DOCS / f"{name}.png")


if __name__ == "__main__":
    main()
