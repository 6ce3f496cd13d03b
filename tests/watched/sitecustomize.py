"""Who opens SQLite, in any Python process that tests start, where all is to be tested on PostgreSQL.

Python loads a module of this name by itself, if its folder is in PYTHONPATH.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LOG = "TEST_SQLITE_LOG"
"""Variable: the file to write to. What begins with FRATERNAL_, some services of the tests are not told."""
FILES_BY_NATURE = ("service.backup", "service.export_study", "mlflow")
"""Modules: what they make or read is a file of SQLite, wherever the service keeps its things."""


def _callers() -> Iterator[str]:
    frame = sys._getframe(2)
    while frame is not None:
        yield str(frame.f_globals.get("__name__"))
        frame = frame.f_back


def _note(event: str, given: tuple[Any, ...]) -> None:
    if event == "sqlite3.connect" and not any(name.startswith(FILES_BY_NATURE) for name in _callers()):
        with Path(os.environ[LOG]).open("a") as log:
            command = " ".join(" ".join(sys.orig_argv).split())
            log.write(f"{given[0]} by {command[:200]}\n")


if LOG in os.environ:
    sys.addaudithook(_note)
