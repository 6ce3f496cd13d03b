"""The pictures of a report: there for whatever a sweep may be, and of what the trials were."""

from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import matplotlib
import matplotlib.axes
import pytest

from service.importance import find_importances
from service.pictures import DRAWN, STYLE, Epoch, Story, draw_all, learning_curves, parallel_coordinates, use
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


def test_what_was_used_adds_up() -> None:
    told = story(trials=12, epochs=5, pruned=0.0)
    picture = use(told)
    assert picture is not None
    seconds = 12 * 5 * 8
    assert f"{seconds / 3600:.2f} core-hours" in picture.alternative
    assert f"{12 * 5 * 90_000:,} tokens" in picture.alternative


def test_of_thousands_of_trials_some_are_drawn_and_use_still_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    told = story(trials=30, epochs=5, pruned=0.0)
    monkeypatch.setattr("service.pictures.MOST_DRAWN", 10)
    assert [trial.number for trial in told.drawn] == list(range(0, 30, 3))
    some = replace(told, epochs=[epoch for epoch in told.epochs if epoch.number % 3 == 0])
    assert drawn(some) == TITLES
    picture = use(some)
    assert picture is not None
    assert f"{30 * 5 * 90_000:,} tokens" in picture.alternative


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
