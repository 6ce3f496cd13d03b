"""The pictures of a report: there for whatever a sweep may be, and of what the trials were."""

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import matplotlib
import matplotlib.axes
import numpy as np
import pytest

from service.importance import find_importances
from service.pictures import (
    DRAWN,
    STYLE,
    Epoch,
    Story,
    _rate,
    by_parameter,
    draw_all,
    every_of,
    learning_curves,
    parallel_coordinates,
    use,
)
from service.schemas import TrialView
from tests.stories import BEGAN, SPEC, story
from tests.test_report import trial

TITLES = [
    "Learning curves",
    "What so many trials find",
    "What each parameter does",
    "Trials as lines",
    "Which parameters matter",
    "What of the cores was used",
    "When each trial ran",
]


def drawn(told: Story) -> list[str]:
    pictures = list(draw_all(told))
    for picture in pictures:
        root = ElementTree.fromstring(picture.svg)
        assert root.tag.endswith("svg")
        assert picture.alternative.endswith(".")
        assert picture.caption.endswith(".")
        assert b"http://" not in picture.svg.replace(b"http://www.w3.org/", b"").replace(
            b"http://purl.org/", b""
        ).replace(b"http://creativecommons.org/", b""), "nothing of it is elsewhere"
    return [picture.title for picture in pictures]


def test_an_ended_sweep_has_all_pictures() -> None:
    assert drawn(story()) == TITLES
    assert len(DRAWN) == len(TITLES)


def test_a_picture_is_the_same_twice() -> None:
    assert [picture.svg for picture in draw_all(story())] == [picture.svg for picture in draw_all(story())]


ODD: dict[str, Any] = {
    "nothing": {"trials": 0},
    "one trial of one epoch": {"trials": 1, "epochs": 1},
    "two trials": {"trials": 2},
    "all pruned": {"pruned": 1.0},
    "one arm": {"arms": {"fd": {"regularizer": "fraternal"}}},
    "no space": {"space": {}},
    "one parameter": {"space": {"kappa": {"type": "uniform", "low": 0.0, "high": 1.0}}},
    "a choice of one value": {"space": {"kappa": {"type": "choice", "values": [0.1]}}},
    "an arm that fixes what is sampled": {
        "arms": {"plain": {"kappa": 0.0}, "fd": {"regularizer": "fraternal"}},
        "baseline": "plain",
    },
    "many arms": {"arms": {f"a{n}": {"kappa": 0.1 + n / 100} for n in range(9)}},
    "GPUs": {"resources": {"gpus": 0.5}},
}


@pytest.mark.parametrize("changes", ODD.values(), ids=ODD.keys())
def test_whatever_a_sweep_is_it_can_be_drawn(changes: dict[str, Any]) -> None:
    assert set(drawn(story(**changes))) <= {*TITLES, "What of the GPUs was used"}


def test_a_sweep_that_runs_is_drawn_as_far_as_it_is() -> None:
    told = story(trials=4, state="running")
    running = [
        trial(4, "fd", None, "RUNNING", draw=2, params={"kappa": 0.1}, started_at=BEGAN),
        trial(5, "eld", 61.0, "FAIL", draw=2, started_at=BEGAN, finished_at=BEGAN),
        trial(6, "fd", None, "WAITING", draw=3),
    ]
    assert "When each trial ran" in drawn(replace(told, trials=[*told.trials, *running]))


def test_curves_that_are_not_finite_are_left_out() -> None:
    lost = [Epoch(number, 1, None, BEGAN, 1.0, 10) for number in range(3)]
    told = replace(story(trials=2), epochs=lost)
    assert learning_curves(told) is None
    mixed = replace(story(trials=2), epochs=[*lost, *story(trials=2).epochs])
    assert learning_curves(mixed) is not None


def test_the_line_of_the_best_trial_ends_at_the_best_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    told = story(trials=12, pruned=0.0)
    lines: list[tuple[list[float], float]] = []
    plot = matplotlib.axes.Axes.plot

    def note(axes: Any, x: Any, y: Any, *rest: Any, **how: Any) -> Any:
        lines.append((list(y), how["linewidth"]))
        return plot(axes, x, y, *rest, **how)

    monkeypatch.setattr(matplotlib.axes.Axes, "plot", note)
    with matplotlib.rc_context(STYLE):
        picture = parallel_coordinates(told)
    assert picture is not None
    best = min(told.trials, key=lambda trial: trial.rank)
    assert f"the best is trial {best.number}" in picture.alternative
    heights, width = lines[-1]
    assert width == max(width for _, width in lines), "it is the thick one"
    assert heights[-1] == 1.0
    assert heights[0] == list(told.spec.arms).index(best.arm)
    assert sorted(line[-1] for line, _ in lines) == [line[-1] for line, _ in lines], "better ones lie above"


@pytest.mark.parametrize("values", ["even", "converging", "two places", "the same but for rounding"])
def test_the_smoother_stays_among_the_trials(values: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """scipy's choice of how smooth a spline is breaks down where points lie close together."""
    chance = random.Random(0)
    drawn_from: dict[str, Callable[[int], float]] = {
        "even": lambda n: chance.random(),
        "converging": lambda n: 0.5 + 0.4 * math.exp(-n / 20) * (chance.random() - 0.5),
        "two places": lambda n: 0.3 if n % 2 else 0.1 + 0.2,
        "the same but for rounding": lambda n: 0.3 + n * 1e-16,
    }
    space = {"kappa": {"type": "uniform", "low": 0.0, "high": 1.0}}
    told = story(trials=600, epochs=1, pruned=0.0, space=space)
    flat = [
        one.model_copy(
            update={
                "params": {"kappa": drawn_from[values](one.number)},
                "best_valid_perplexity": 60 + chance.uniform(-1, 1),
            }
        )
        for one in told.trials
    ]
    lines: list[Any] = []
    plot = matplotlib.axes.Axes.plot

    def note(axes: Any, x: Any, y: Any, *rest: Any, **how: Any) -> Any:
        lines.append(y)
        return plot(axes, x, y, *rest, **how)

    monkeypatch.setattr(matplotlib.axes.Axes, "plot", note)
    assert by_parameter(replace(told, trials=flat)) is not None
    assert all(59 <= value <= 61 for line in lines for value in line)


def test_perplexities_beyond_all_bounds_are_drawn_as_the_largest() -> None:
    told = story(trials=40, epochs=4, pruned=0.0)
    wild = [
        one.model_copy(update={"best_valid_perplexity": 1e250}) if one.number % 2 else one
        for one in told.trials
    ]
    curves = [replace(one, perplexity=1e250) if one.number % 2 else one for one in told.epochs]
    assert drawn(replace(told, trials=wild, epochs=curves)) == TITLES


def test_cores_in_use_are_as_many_as_trials_trained_at_the_time() -> None:
    at = BEGAN.timestamp()
    begun, ended = np.array([at, at + 10.0, at + 10.0]), np.array([at + 10.0, at + 30.0, at + 20.0])
    edges = at + np.array([0.0, 5.0, 10.0, 15.0, 20.0, 30.0])
    busy = _rate(begun, ended, ended - begun, edges)
    assert busy == pytest.approx([1, 1, 2, 2, 1], abs=1e-6)


def test_what_was_used_adds_up() -> None:
    told = story(trials=12, epochs=5, pruned=0.0)
    picture = use(told)
    assert picture is not None
    seconds = 12 * 5 * 8
    assert f"{seconds / 3600:.2f} core-hours" in picture.alternative
    assert f"{12 * 5 * 90_000:,} tokens" in picture.alternative


def test_of_thousands_of_trials_some_are_drawn_and_use_still_adds_up() -> None:
    told = story(trials=40, epochs=5, pruned=0.0)
    some = replace(told, every=2, epochs=[epoch for epoch in told.epochs if epoch.number // 2 % 2 == 0])
    assert [trial.draw for trial in some.drawn] == [draw for draw in range(0, 20, 2) for _ in range(2)]
    assert {trial.arm for trial in some.drawn} == set(told.spec.arms)
    assert drawn(some) == TITLES
    picture = use(some)
    assert picture is not None
    assert f"{40 * 5 * 90_000:,} tokens" in picture.alternative
    assert [every_of(*how_many) for how_many in ((1000, 1), (1001, 1), (2, 100_001), (0, 0))] == [1, 2, 2, 1]


def test_the_parameter_that_matters_is_found_to() -> None:
    told = story(trials=96, pruned=0.0)
    found = find_importances(told.spec, told.trials)
    assert next(iter(found)) == "kappa"
    assert sum(found.values()) == pytest.approx(1)
    assert list(found.values()) == sorted(found.values(), reverse=True)


def test_of_few_trials_nothing_is_said_to_matter() -> None:
    assert find_importances(story(trials=9).spec, story(trials=9).trials) == {}


def test_what_is_fixed_or_never_varied_has_no_importance() -> None:
    fixed = {**SPEC["space"], "alpha": {"type": "choice", "values": [2.0]}}
    told = story(trials=60, pruned=0.0, space=fixed)
    without: list[TrialView] = [
        one.model_copy(update={"params": {**one.params, "output_p": 0.4}}) for one in told.trials
    ]
    assert set(find_importances(told.spec, without)) == {"kappa", "batch_size", "non_monotone_interval"}
