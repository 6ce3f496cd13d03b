"""When averaging starts, and what is averaged."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from trials.averaging import RunningMean, averaging_starts, learning_rate

GOLDEN = [411.93, 390.63, 314.11, 333.95, 309.50, 296.18, 284.02, 292.69, 293.75]


def first_start(losses: list[float], interval: int) -> int | None:
    """The 1-based epoch after which averaging starts."""
    starts = (averaging_starts(loss, losses[:epoch], interval) for epoch, loss in enumerate(losses))
    return next((epoch for epoch, start in enumerate(starts, 1) if start), None)


def test_golden_case_starts_after_the_ninth_epoch() -> None:
    assert first_start(GOLDEN, 1) == 9


def test_interval_zero_starts_at_the_first_loss_that_is_not_the_best() -> None:
    assert first_start(GOLDEN, 0) == 4


@pytest.mark.parametrize(("interval", "start"), [(0, 2), (1, 3), (2, 4), (3, None)])
def test_a_rising_loss_starts_averaging_once_there_are_more_epochs_than_the_interval(
    interval: int, start: int | None
) -> None:
    assert first_start([1.0, 2.0, 3.0, 4.0], interval) == start


def test_an_equal_loss_does_not_start_averaging() -> None:
    assert not averaging_starts(2.0, [2.0, 2.0], 1)


@given(st.lists(st.floats(0, 10), min_size=1), st.floats(0, 10), st.integers(1, 5))
def test_the_rule_is_the_papers(earlier: list[float], loss: float, n: int) -> None:
    expected = len(earlier) > n and loss > min(earlier[:-n])
    assert averaging_starts(loss, earlier, n) == expected


def sgd_steps(optimiser: torch.optim.Optimizer, module: nn.Linear, steps: int) -> Iterator[int]:
    """Take steps on a noisy quadratic; yield each one's number, 1 for the first."""
    generator = torch.Generator().manual_seed(1)
    for step in range(1, steps + 1):
        optimiser.zero_grad()
        inputs = torch.randn(4, 3, generator=generator, dtype=torch.float64)
        torch.autograd.backward(module(inputs).square().mean())
        optimiser.step()
        yield step


def linear() -> nn.Linear:
    module = nn.Linear(3, 2, dtype=torch.float64)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.arange(1.0, parameter.numel() + 1).view_as(parameter))
    return module


def test_running_mean_is_the_mean_of_the_iterates() -> None:
    module = linear()
    mean = RunningMean(module)
    seen = []
    for _ in range(7):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(-0.7)
        mean.update(module)
        seen.append([parameter.detach().clone() for parameter in module.parameters()])
    for parameter, *values in zip(mean.module.parameters(), *seen, strict=True):
        torch.testing.assert_close(parameter.detach(), torch.stack(values).mean(dim=0))


def test_before_the_first_update_the_mean_is_the_module_as_it_stood() -> None:
    module = linear()
    mean = RunningMean(module)
    with torch.no_grad():
        module.weight.add_(1)
    assert torch.equal(mean.module.weight, linear().weight)
    mean.update(module)
    assert torch.equal(mean.module.weight, module.weight)


def test_parity_with_torchs_asgd_whose_mean_starts_one_step_late() -> None:
    ours, theirs = linear(), linear()
    asgd = torch.optim.ASGD(theirs.parameters(), lr=1 / 16, lambd=0, t0=0, weight_decay=0.01)
    assert max(sgd_steps(asgd, theirs, 9)) == 9
    mean = RunningMean(ours)
    for step in sgd_steps(torch.optim.SGD(ours.parameters(), lr=1 / 16, weight_decay=0.01), ours, 9):
        if step > 1:
            mean.update(ours)
    for parameter, averaged in zip(theirs.parameters(), mean.module.parameters(), strict=True):
        # torch keeps 1/n in float32
        torch.testing.assert_close(asgd.state[parameter]["ax"], averaged.detach(), rtol=1e-6, atol=1e-6)


# --- the learning rate


@pytest.mark.parametrize(
    ("losses", "rate"),
    [
        ([], 30),
        ([5.0], 30),
        ([5.0, 5.0, 6.0], 30),
        ([5.0, 5.0, 6.0, 5.0], 3),
        ([5.0, 5.0, 6.0, 4.0, 4.1, 4.2], 30),
        ([5.0, 5.0, 6.0, 5.0, 7.0, 7.0], 3),
        ([5.0, 5.0, 6.0, 5.0, 7.0, 7.0, 7.0], 0.3),
        ([5.0, 5.0, 6.0, 5.0, 4.0, 7.0, 7.0, 7.0], 0.3),
    ],
)
def test_the_rate_falls_after_every_three_epochs_without_a_new_best(losses: list[float], rate: float) -> None:
    assert learning_rate(30, losses, patience=3, factor=0.1) == pytest.approx(rate)


@given(st.lists(st.integers(1, 9), max_size=60), st.integers(1, 8))
def test_the_rate_is_that_of_torchs_schedule(losses: list[int], patience: int) -> None:
    """torch waits for one bad epoch more, and takes nearly equal for equal unless told not to."""
    optimiser = torch.optim.SGD(linear().parameters(), lr=30)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimiser, factor=0.5, patience=patience - 1, threshold=0, eps=0
    )
    for loss in losses:
        schedule.step(loss)
    assert learning_rate(30, losses, patience, 0.5) == optimiser.param_groups[0]["lr"]
