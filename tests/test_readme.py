"""The README's walk-through works as printed."""

import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from tests.played_service import played_service
from tests.service_process import running_service, wait_until, write_corpus

README = Path(__file__).parent.parent / "README.md"
USUAL_URL = "http://127.0.0.1:8123"


def walk_through() -> list[str]:
    """The shell blocks between the mark in the README and the next heading."""
    after_mark = README.read_text().partition("<!-- walk-through")[2].partition("\n## ")[0]
    return re.findall(r"```bash\n(.*?)```", after_mark, flags=re.DOTALL)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="the walk-through needs curl: install it")
def test_the_walk_through_with_curl_works_as_printed(tmp_path: Path) -> None:
    submit, look, fetch, pause, cancel = walk_through()
    assert USUAL_URL in submit
    write_corpus(tmp_path / "ptb")
    with running_service(tmp_path / "data") as service:
        lines = submit.replace(USUAL_URL, service.url).splitlines()
        own = f'export CORPUS=\'{{"path": "{tmp_path / "ptb"}"}}\''  # the texts would take minutes
        here = "\n".join(own if line.startswith("export CORPUS=") else line for line in lines)

        def run(*blocks: str) -> str:
            script = "\n".join(("set -euo pipefail", *blocks))
            done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout

        run(here)
        sweep_id = service.get("/v1/sweeps")["sweeps"][0]["id"]
        addresses = f"export URL={service.url} SWEEP={sweep_id}"
        assert f'"id":"{sweep_id}"' in run(addresses, look)
        wait_until(lambda: service.sweep(sweep_id)["best"] is not None, "a trial has finished an epoch")
        assert "model.safetensors" in run(addresses, fetch)
        with tarfile.open(tmp_path / "best.tar") as archive:
            assert "SHA256SUMS" in archive.getnames()
        run(addresses, pause)
        assert [event["kind"] for event in service.events(sweep_id)].count("resume_requested") == 1
        run(addresses, cancel)
        assert service.wait_for_end(sweep_id)["state"] == "cancelled"


API = README.parent / "docs" / "api.md"


@pytest.mark.skipif(shutil.which("curl") is None, reason="the walk-through needs curl: install it")
def test_lines_that_tell_of_the_api_work_as_printed(tmp_path: Path) -> None:
    blocks = re.findall(r"```bash\n(.*?)```", API.read_text(), flags=re.DOTALL)
    assert len(blocks) > 5
    with played_service(tmp_path, plays=False) as client:
        script = "\n".join(("set -euo pipefail", *blocks)).replace(
            USUAL_URL, str(client.base_url).rstrip("/")
        )
        done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        (sweep,) = client.get("/v1/sweeps").json()["sweeps"]
    assert (sweep["name"], sweep["labels"], sweep["priority"]) == ("tuesday", {"who": "me"}, 5)
