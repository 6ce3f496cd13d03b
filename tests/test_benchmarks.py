"""What ours is measured against does the same work."""

import pytest

from benchmarks.plain import largest_difference
from tests.test_step import REGULARIZATIONS


@pytest.mark.parametrize("name", list(REGULARIZATIONS))
def test_the_textbook_step_has_our_loss_and_gradients(name: str) -> None:
    assert largest_difference(REGULARIZATIONS[name]) < 1e-12
