"""What `fraternal plot` draws: every trial's line in every panel, and nothing that is not there."""

import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from service.errors import CommandFailed
from service.plots import COLOURS, PANELS, plot_dynamics
from service.schemas import EpochView, TrialDetail


def epoch(number: int, **values: Any) -> EpochView:
    fields: dict[str, Any] = {
        **{"epoch": number, "attempt": 1, "train_loss": 5.0, "valid_loss": 5.0, "valid_perplexity": 148.4},
        **{"raw_valid_loss": 5.0, "averaged": False, "optimised": 6.0, "penalty": 0.5, "ar": 0.1, "tar": 0.1},
        **{"gradient_norm": 1.0, "lr": 30.0, "pair_difference": 0.4, "prediction_variance": 0.2},
        **{
            "recorded_at": datetime(2026, 1, 1, tzinfo=UTC),
            "expectation_gap": 0.2,
            "tokens": 1000,
            "tokens_per_s": 500.0,
            "seconds": 2.0,
            "is_best": True,
        },
    }
    return EpochView(**{**fields, **values})


def trial(number: int, arm: str, curve: list[EpochView]) -> TrialDetail:
    best = min((each.valid_loss for each in curve), default=None)
    unused: dict[str, Any] = dict.fromkeys(
        (
            "best_epoch",
            "best_valid_perplexity",
            "valid_perplexity",
            "failure",
            "checkpoint_sha256",
            "device",
            "runtime",
        )
    )
    return TrialDetail(
        **unused, number=number, arm=arm, draw=0, seed=1, attempt=1, state="COMPLETE", params={}, config={},
        epochs_done=len(curve), best_valid_loss=best, started_at=None, finished_at=None, curve=curve,
    )  # fmt: skip


def figure_of(tmp_path: Path, trials: list[TrialDetail]) -> Figure:
    figures: list[Figure] = []
    savefig = Figure.savefig
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            Figure, "savefig", lambda self, *args, **kw: figures.append(self) or savefig(self, *args, **kw)
        )
        plot_dynamics("a title", trials, tmp_path / "plot.svg")
    return figures[0]


@pytest.fixture
def drawn(tmp_path: Path) -> Figure:
    """Of an arm with two trials and an arm with one of them; one trial has not finished an epoch."""
    trials = [
        trial(
            0,
            "fd",
            [epoch(1, penalty=0.0), epoch(2, valid_loss=4.0, tokens_per_s=None, valid_perplexity=54.6)],
        ),
        trial(1, "eld", [epoch(1, prediction_variance=0.1)]),
        trial(2, "fd", [epoch(1), epoch(2)]),
        trial(3, "eld", []),
    ]
    return figure_of(tmp_path, trials)


def line(figure: Figure, panel: str, trial: int) -> list[tuple[float, float]]:
    (axes,) = (axes for axes in figure.axes if axes.get_title().startswith(panel))
    xs, ys = axes.lines[trial].get_data()
    return [(float(x), float(y)) for x, y in zip(xs, ys, strict=True)]


def test_every_trial_with_an_epoch_has_a_line_in_every_panel(drawn: Figure) -> None:
    assert [axes.get_title() for axes in drawn.axes] == [panel.title for panel in PANELS]
    for axes in drawn.axes:
        sides = 1 + ("dashed" in axes.get_title())
        assert [str(each.get_color()) for each in axes.lines] == [COLOURS[1], COLOURS[0], COLOURS[1]] * sides


def test_lines_are_the_curves(drawn: Figure) -> None:
    assert line(drawn, "train perplexity", 0) == [(1, math.exp(5.0)), (2, math.exp(5.0))]
    assert line(drawn, "validation perplexity", 0) == [(1, 148.4), (2, 54.6)]
    assert line(drawn, "Remark 1", 1) == [(1, 0.4)]
    assert line(drawn, "Remark 1", 1 + 3) == [(1, 0.2)], "twice the variance, dashed"
    assert line(drawn, "Proposition 1", 1 + 3) == [(1, 0.8)]
    assert line(drawn, "validation perplexity", 3) == [], "what is validated are the raw weights"


def test_a_dot_is_where_averaging_begins(tmp_path: Path) -> None:
    curve = [epoch(1), epoch(2), epoch(3, averaged=True), epoch(4, averaged=True)]
    assert line(figure_of(tmp_path, [trial(0, "fd", curve)]), "validation perplexity", 1) == [
        (3, math.exp(5.0)),
        (4, math.exp(5.0)),
    ]
    assert [axes.lines[0].get_markevery() for axes in figure_of(tmp_path, [trial(0, "fd", curve)]).axes] == [
        [2] for _ in PANELS
    ]


def test_what_an_epoch_lacks_or_a_logarithm_cannot_show_is_left_out(drawn: Figure) -> None:
    assert line(drawn, "penalty", 0) == [(2, 0.5)]
    assert line(drawn, "trained tokens", 0) == [(1, 500)]


def test_the_best_trial_of_each_arm_is_the_thick_one(drawn: Figure) -> None:
    widths = [each.get_linewidth() for each in drawn.axes[0].lines]
    assert widths[0] == widths[1] > widths[2]


@pytest.mark.parametrize(("name", "begins"), [("p.png", b"\x89PNG"), ("p.SVG", b"<?xml"), ("p.pdf", b"%PDF")])
def test_the_name_tells_the_kind(tmp_path: Path, name: str, begins: bytes) -> None:
    plot_dynamics("κ = 0.1", [trial(0, "fd", [epoch(1)])], tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(begins)


def test_a_title_is_taken_as_it_is_written(tmp_path: Path) -> None:
    plot_dynamics("kappa $0.1$ against $x^$", [trial(0, "fd", [epoch(1)])], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").exists()


def test_what_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CommandFailed, match=r"a plot is one of .png, .svg, .pdf; 'p.jpg' ends in none"):
        plot_dynamics("", [trial(0, "fd", [epoch(1)])], tmp_path / "p.jpg")
    with pytest.raises(CommandFailed, match="nothing to draw yet"):
        plot_dynamics("", [trial(0, "fd", [])], tmp_path / "p.png")
    assert not list(tmp_path.iterdir())
