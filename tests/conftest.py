"""What holds for every test."""

import os

# Before torch is loaded: OpenMP threads that meet on a core, a test's and a driver's, cost up to ten times.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from service.records import Records, migrate, open_engine


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no GPU is there"))


@pytest.fixture
def records(tmp_path: Path) -> Iterator[Records]:
    engine = open_engine(f"sqlite:///{tmp_path / 'fraternal.db'}")
    migrate(engine)
    yield Records(engine)
    engine.dispose()
