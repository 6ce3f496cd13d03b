"""`fraternal plot`: the learning dynamics of a sweep's trials, one panel a quantity. No torch.

A trial is a thin line in its arm's colour; the best trial of each arm is a thick one. Where a panel has two
sides, the other one is dashed. A dot is the first epoch whose validated weights are averaged.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from operator import attrgetter
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogFormatter, MaxNLocator

from service.errors import CommandFailed
from service.schemas import EpochView, TrialDetail
from trials.files import write_whole
from trials.perplexity import perplexity

FORMATS = (".png", ".svg", ".pdf")
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Okabe and Ito's, which colour-blind readers can tell apart."""
COLUMNS = 3

Value = Callable[[EpochView], float | None]


@dataclass(frozen=True)
class Panel:
    title: str
    value: Value
    other: Value | None = None
    """What is dashed."""
    logarithmic: bool = True


PANELS = (
    Panel("train perplexity", lambda epoch: perplexity(epoch.train_loss)),
    Panel(
        "validation perplexity (dashed: raw weights)",
        lambda epoch: epoch.valid_perplexity,
        lambda epoch: perplexity(epoch.raw_valid_loss) if epoch.averaged else None,
    ),
    Panel("what is optimised, nats per token", lambda epoch: epoch.optimised, logarithmic=False),
    Panel("penalty, not scaled by κ", lambda epoch: epoch.penalty),
    Panel("AR: mean hidden activation |m·h|²/d", lambda epoch: epoch.ar),
    Panel("TAR: mean squared step of h", lambda epoch: epoch.tar),
    Panel(
        "Remark 1: R_FD / m = 2 × variance (dashed)",
        lambda epoch: epoch.pair_difference,
        lambda epoch: _times(2, epoch.prediction_variance),
    ),
    Panel(
        "Proposition 1: R_FD / m ≤ 4 R_ELD / m (dashed)",
        lambda epoch: epoch.pair_difference,
        lambda epoch: _times(4, epoch.expectation_gap),
    ),
    Panel("gradient norm before clipping", lambda epoch: epoch.gradient_norm),
    Panel("learning rate", lambda epoch: epoch.lr),
    Panel("trained tokens per second", lambda epoch: epoch.tokens_per_s, logarithmic=False),
)


def plot_dynamics(title: str, trials: Sequence[TrialDetail], out: Path) -> None:
    """Write a figure whose kind its name tells. Raises CommandFailed where there is nothing to draw."""
    kind = out.suffix.lower()
    if kind not in FORMATS:
        raise CommandFailed(f"a plot is one of {', '.join(FORMATS)}; {out.name!r} ends in none of them")
    drawn = [trial for trial in trials if trial.curve]
    if not drawn:
        raise CommandFailed("no trial has finished an epoch: there is nothing to draw yet")
    colours = dict(zip(sorted({trial.arm for trial in drawn}), _cycled(), strict=False))
    rows = math.ceil(len(PANELS) / COLUMNS)
    figure = Figure(figsize=(5 * COLUMNS, 3.2 * rows), layout="constrained")
    figure.suptitle(title, parse_math=False)
    grid = list(figure.subplots(rows, COLUMNS).flat)
    for axes in grid[len(PANELS) :]:
        axes.remove()
    for axes, panel in zip(grid, PANELS, strict=False):
        _draw(axes, panel, drawn, colours)
    lines = [Line2D([], [], color=colour, label=arm) for arm, colour in colours.items()]
    lines.append(Line2D([], [], color="grey", marker="o", linestyle="", label="averaging from here on"))
    figure.legend(handles=lines, loc="outside lower center", ncols=len(lines))
    drawing = BytesIO()
    figure.savefig(drawing, format=kind[1:], dpi=120)
    write_whole(out, drawing.getvalue())


class PlainNumbers(LogFormatter):
    """0.06 where matplotlib has 6e-02."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        return f"{x:.4g}" if super().__call__(x, pos) else ""


def _draw(axes: Axes, panel: Panel, trials: Sequence[TrialDetail], colours: Mapping[str, str]) -> None:
    axes.set_title(panel.title, fontsize="medium")
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if panel.logarithmic:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(PlainNumbers())
        axes.yaxis.set_minor_formatter(PlainNumbers(minor_thresholds=(1.0, 0.4)))
    best = {trial.arm: trial.number for trial in sorted(trials, key=attrgetter("rank"), reverse=True)}
    sides = [(panel.value, "-"), *([(panel.other, "--")] if panel.other is not None else [])]
    for value, style in sides:
        for trial in trials:
            shown = list(_points(trial.curve, value, panel.logarithmic))
            switch = next((epoch.epoch for epoch in trial.curve if epoch.averaged), None)
            thick = best[trial.arm] == trial.number
            axes.plot(
                [epoch for epoch, _ in shown],
                [number for _, number in shown],
                linestyle=style,
                color=colours[trial.arm],
                linewidth=2.0 if thick else 0.7,
                alpha=1.0 if thick else 0.45,
                marker="o",
                markersize=4 if style == "-" else 2,
                markevery=[i for i, (epoch, _) in enumerate(shown) if epoch == switch or len(shown) == 1],
            )


def _points(curve: Sequence[EpochView], value: Value, logarithmic: bool) -> Iterator[tuple[int, float]]:
    """What can be shown of a curve."""
    for epoch in curve:
        number = value(epoch)
        if number is not None and math.isfinite(number) and (number > 0 or not logarithmic):
            yield epoch.epoch, number


def _times(factor: float, value: float | None) -> float | None:
    return None if value is None else factor * value


def _cycled() -> Sequence[str]:
    """32 arms at most; colours come again after seven."""
    return COLOURS * 5
