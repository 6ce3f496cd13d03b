"""`fraternal plot`: the learning dynamics of a sweep's trials, one panel a quantity. No torch.

A trial is a thin line in its arm's colour; the best trial of each arm is a thick one.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from operator import attrgetter
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from service.errors import CommandFailed
from service.schemas import EpochView, TrialDetail
from trials.perplexity import perplexity
from trials.store import write_whole

FORMATS = (".png", ".svg", ".pdf")
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Okabe and Ito's, which colour-blind readers can tell apart."""
COLUMNS = 3


@dataclass(frozen=True)
class Panel:
    title: str
    value: Callable[[EpochView], float | None]
    logarithmic: bool = True


PANELS = (
    Panel("train perplexity", lambda epoch: perplexity(epoch.train_loss)),
    Panel("validation perplexity", lambda epoch: epoch.valid_perplexity),
    Panel("penalty (not scaled by κ)", lambda epoch: epoch.penalty),
    Panel("mean hidden activation |m·h|²/d", lambda epoch: epoch.ar),
    Panel("R_FD / m: two masks", lambda epoch: epoch.pair_difference),
    Panel("R_FD over 2 Var: Remark 1 says 1", lambda epoch: _remark_1(epoch)),
    Panel("R_FD over 4 R_ELD: Proposition 1 says ≤ 1", lambda epoch: _proposition_1(epoch)),
    Panel("gradient norm before clipping", lambda epoch: epoch.gradient_norm),
    Panel("trained tokens per second", lambda epoch: epoch.tokens_per_s, logarithmic=False),
)


def plot_dynamics(title: str, trials: Sequence[TrialDetail], out: Path) -> None:
    """Write a figure whose kind its name tells. Raises CommandFailed where there is nothing to draw."""
    if out.suffix not in FORMATS:
        raise CommandFailed(f"a plot is one of {', '.join(FORMATS)}; {out.name!r} ends in none of them")
    drawn = [trial for trial in trials if trial.curve]
    if not drawn:
        raise CommandFailed("no trial has finished an epoch: there is nothing to draw yet")
    colours = dict(zip(sorted({trial.arm for trial in drawn}), _cycled(), strict=False))
    rows = math.ceil(len(PANELS) / COLUMNS)
    figure = Figure(figsize=(5 * COLUMNS, 3.2 * rows), layout="constrained")
    figure.suptitle(title, parse_math=False)
    for axes, panel in zip(figure.subplots(rows, COLUMNS).flat, PANELS, strict=True):
        _draw(axes, panel, drawn, colours)
    lines = [Line2D([], [], color=colour, label=arm) for arm, colour in colours.items()]
    figure.legend(handles=lines, loc="outside lower center", ncols=len(lines))
    drawing = BytesIO()
    figure.savefig(drawing, format=out.suffix[1:], dpi=120)
    write_whole(out, drawing.getvalue())


def _draw(axes: Axes, panel: Panel, trials: Sequence[TrialDetail], colours: Mapping[str, str]) -> None:
    axes.set_title(panel.title, fontsize="medium")
    axes.set_xlabel("epoch")
    if panel.logarithmic:
        axes.set_yscale("log")
    best = {trial.arm: trial.number for trial in sorted(trials, key=attrgetter("rank"), reverse=True)}
    for trial in trials:
        points = [(epoch.epoch, panel.value(epoch)) for epoch in trial.curve]
        shown = [(epoch, value) for epoch, value in points if value is not None and math.isfinite(value)]
        if panel.logarithmic:
            shown = [(epoch, value) for epoch, value in shown if value > 0]
        thick = best[trial.arm] == trial.number
        axes.plot(
            [epoch for epoch, _ in shown],
            [value for _, value in shown],
            color=colours[trial.arm],
            linewidth=2.0 if thick else 0.7,
            alpha=1.0 if thick else 0.45,
            marker="o" if len(shown) == 1 else None,
            markersize=3,
        )


def _remark_1(epoch: EpochView) -> float | None:
    return _ratio(epoch.pair_difference, epoch.prediction_variance, 2)


def _proposition_1(epoch: EpochView) -> float | None:
    return _ratio(epoch.pair_difference, epoch.expectation_gap, 4)


def _ratio(one: float | None, other: float | None, factor: float) -> float | None:
    return None if one is None or not other else one / (factor * other)


def _cycled() -> Sequence[str]:
    """32 arms at most; colours come again after seven."""
    return COLOURS * 5
