"""The pictures of a report: SVG by matplotlib, in colours that colour-blind readers can tell apart.

Narrow enough to be read on a phone. Each function has one picture; None where there is nothing to show yet.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from io import BytesIO
from itertools import cycle
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator
from scipy.interpolate import make_smoothing_spline

from service.plots import COLOURS, PlainNumbers
from service.report import LARGEST
from service.report_schemas import ReportView
from service.schemas import TrialView
from trials.spec import Choice, LogUniform, SweepSpec

DASHES = ("-", "--", "-.", ":")
"""An arm is told by its line, too."""
WIDTH, HEIGHT = 5.2, 3.2
"""Inches."""
MOST_POINTS = 60
"""Of a curve: more cannot be told apart, and make the page heavy."""
MOST_DRAWN = 1000
"""Trials."""
MOST_EPOCHS = 100_000
MOST_THIN = 250
"""Trials that have a line of their own in a picture of all."""
FEWEST_TO_SMOOTH = 8
BINS = 40
NO_LINE = np.array([]), np.array([])
STYLE: Any = {
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "svg.hashsalt": "fraternal",
    "text.parse_math": False,  # a value may be any text
}
MARKS = {"COMPLETE": "o", "PRUNED": "x", "FAIL": "v", "RUNNING": ">", "WAITING": ">"}
ENDS = {
    "COMPLETE": "complete",
    "PRUNED": "pruned",
    "FAIL": "failed",
    "RUNNING": "running",
    "WAITING": "waiting",
}


@dataclass(frozen=True)
class Epoch:
    """What the pictures take of one."""

    number: int
    """Of the trial."""
    epoch: int
    perplexity: float | None
    recorded_at: datetime
    seconds: float
    tokens: int


@dataclass(frozen=True)
class Story:
    """All that is drawn."""

    spec: SweepSpec
    report: ReportView
    trials: Sequence[TrialView]
    epochs: Sequence[Epoch]
    """By trial and epoch, of the trials that are drawn."""
    ran_s: float = 0.0
    """Of the sweep."""
    every: int = 1
    """Of very many, every so-manieth draw is drawn, in all arms."""

    @property
    def drawn(self) -> list[TrialView]:
        return [trial for trial in self.trials if trial.number // len(self.spec.arms) % self.every == 0]

    @property
    def looks(self) -> Mapping[str, tuple[str, str]]:
        """Colour and line of each arm."""
        return dict(zip(self.spec.arms, zip(cycle(COLOURS), cycle(DASHES), strict=False), strict=False))

    def curves(self) -> dict[int, list[tuple[int, float]]]:
        """By trial: epochs and their perplexities, where they are finite."""
        found: dict[int, list[tuple[int, float]]] = {}
        for epoch in self.epochs:
            if epoch.perplexity is not None:
                found.setdefault(epoch.number, []).append((epoch.epoch, epoch.perplexity))
        return found


@dataclass(frozen=True)
class Picture:
    title: str
    svg: bytes
    alternative: str
    """What it shows, for who cannot see it."""
    caption: str


def every_of(trials: int, epochs: int) -> int:
    """Of which draws a picture can be made in seconds."""
    return max(1, math.ceil(max(trials / MOST_DRAWN, epochs / MOST_EPOCHS)))


def draw_all(story: Story) -> Iterator[Picture]:
    """Whatever there is to see."""
    with matplotlib.rc_context(STYLE):
        for draw in DRAWN:
            picture = draw(story)
            if picture is not None:
                yield picture


# Pictures.


def learning_curves(story: Story) -> Picture | None:
    curves = story.curves()
    if not curves:
        return None
    figure, axes = _figure()
    for arm, (colour, dashes) in story.looks.items():
        mine = [curves[trial.number] for trial in story.drawn if trial.arm == arm and trial.number in curves]
        for curve in mine[:MOST_THIN]:
            _plot(axes, _thinned(curve), colour, "-", linewidth=0.5, alpha=0.3)
        if mine:
            epochs, quartiles = _quartiles(mine)
            axes.fill_between(epochs, quartiles[0], quartiles[2], color=colour, alpha=0.18, linewidth=0)
            axes.plot(epochs, quartiles[1], color=colour, linestyle=dashes, linewidth=2, label=arm)
    _perplexity_axis(axes.yaxis, axes.set_yscale)
    axes.set_ylim(*_robust(_after_the_plunge(list(curves.values()))))
    axes.set(xlabel="epoch", ylabel="validation perplexity")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _legend(figure, axes)
    ends = ", ".join(f"{arm.arm} {arm.best:.1f}" for arm in story.report.arms if arm.best is not None)
    return _picture(
        figure,
        "Learning curves",
        f"Validation perplexity by epoch of {len(curves)} trials. Best of each arm: {ends}.",
        "Thick: the median of the trials that reached the epoch; the band is between their quartiles. Thin: "
        "single trials.",
    )


def expected_best(story: Story) -> Picture | None:
    arms = [arm for arm in story.report.arms if len(arm.expected_best) > 1]
    if not arms:
        return None
    figure, axes = _figure()
    for arm in arms:
        colour, dashes = story.looks[arm.arm]
        m = [point.trials for point in arm.expected_best]
        low = [point.interval.low for point in arm.expected_best]
        high = [point.interval.high for point in arm.expected_best]
        axes.fill_between(m, low, high, color=colour, alpha=0.18, linewidth=0)
        mean = [point.perplexity for point in arm.expected_best]
        axes.plot(m, mean, color=colour, linestyle=dashes, linewidth=2, label=arm.arm)
    if story.report.baseline is not None:
        axes.axhline(story.report.baseline, color="#666666", linewidth=1, linestyle=":", label="baseline")
    _perplexity_axis(axes.yaxis, axes.set_yscale)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.xaxis.set_minor_formatter(FuncFormatter(lambda x, _: ""))
    axes.set(xlabel="trials", ylabel="best validation perplexity to expect")
    _legend(figure, axes)
    ends = ", ".join(f"{arm.arm} {arm.expected_best[-1].perplexity:.1f}" for arm in arms)
    return _picture(
        figure,
        "What so many trials find",
        f"The best perplexity that a search of so many trials is to be expected to find. At the end: {ends}.",
        "The mean over every choice of so many of an arm's trials, with its 95 % bootstrap band. A failed "
        "trial counts as the arm's worst.",
    )


def by_parameter(story: Story) -> Picture | None:
    names = [name for name in story.spec.space if any(name in trial.params for trial in _scored(story))]
    if not names:
        return None
    columns = min(2, len(names))
    rows = math.ceil(len(names) / columns)
    figure = Figure(figsize=(WIDTH, 0.4 + 1.9 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharey=True)
    for axes in list(grid.flat)[len(names) :]:
        axes.remove()
    for axes, name in zip(grid.flat, names, strict=False):
        _draw_parameter(axes, story, name)
    completed = [trial for trial in _scored(story) if trial.state == "COMPLETE"]
    grid[0][0].set_ylim(*_robust([trial.best_valid_perplexity for trial in completed or _scored(story)]))
    figure.supylabel("best validation perplexity", fontsize="medium")
    _legend(figure, grid[0][0])
    return _picture(
        figure,
        "What each parameter does",
        f"Best validation perplexity of each trial against {', '.join(names)}.",
        "A point is a trial, a cross one that was pruned; those far above are cut off. The line is a "
        "smoothing spline through an arm's completed trials; other parameters vary along it, too.",
    )


def _draw_parameter(axes: Axes, story: Story, name: str) -> None:
    space = story.spec.space[name]
    choices = [str(value) for value in space.values] if isinstance(space, Choice) else None
    for offset, (arm, (colour, dashes)) in enumerate(story.looks.items()):
        mine = [trial for trial in _scored(story) if trial.arm == arm and name in trial.params]
        for state in ("COMPLETE", "PRUNED"):
            some = [trial for trial in mine if trial.state == state]
            if choices is not None:
                shift = 0.12 * (offset - (len(story.looks) - 1) / 2)
                x = [choices.index(str(trial.params[name])) + shift for trial in some]
            else:
                x = [float(trial.params[name]) for trial in some]
            y = [trial.best_valid_perplexity or math.nan for trial in some]
            axes.scatter(x, y, s=9, marker=MARKS[state], color=colour, alpha=0.6, linewidth=0.8)
            if state == "COMPLETE":
                line_x, line_y = _smoothed(x, y, log=_is_log(space)) if choices is None else NO_LINE
                axes.plot(line_x, line_y, color=colour, linestyle=dashes, linewidth=2, label=arm)
    _perplexity_axis(axes.yaxis, axes.set_yscale)
    axes.set_xlabel(name)
    if choices is not None:
        axes.set_xticks(range(len(choices)), [choice[:12] for choice in choices])
    elif _is_log(space):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(PlainNumbers())
        axes.xaxis.set_minor_formatter(FuncFormatter(lambda x, _: ""))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(4))


def _smoothed(x: list[float], y: list[float], *, log: bool) -> tuple[np.ndarray, np.ndarray]:
    """A line through the points; nothing where there are too few of them.

    In bins: scipy's choice of how smooth it is breaks down where points lie close together.
    """
    if len(set(x)) < FEWEST_TO_SMOOTH:
        return NO_LINE
    at = np.log(x) if log else np.asarray(x)
    low, high = float(at.min()), float(at.max())
    places, inverse = np.unique(np.round((at - low) / (high - low) * BINS) / BINS, return_inverse=True)
    if len(places) < FEWEST_TO_SMOOTH:
        return NO_LINE
    counts = np.bincount(inverse)
    means = np.bincount(inverse, weights=np.log(np.minimum(y, LARGEST))) / counts
    spline = make_smoothing_spline(places, means, w=counts.astype(float))
    shown = np.linspace(0, 1, 60)
    back = low + shown * (high - low)
    return np.exp(back) if log else back, np.exp(spline(shown))


def parallel_coordinates(story: Story) -> Picture | None:
    names = list(story.spec.space)
    drawn = sorted(_scored(story), key=lambda trial: -trial.rank)[-MOST_THIN:]
    if len(names) < 2 or len(drawn) < 2:
        return None
    figure = Figure(figsize=(max(WIDTH, 0.75 * (len(names) + 2)), HEIGHT), layout="constrained")
    axes = figure.subplots()
    places = {name: _place(story.spec.space[name]) for name in names}
    arms = list(story.spec.arms)
    colours = matplotlib.colormaps["cividis_r"]
    for rank, trial in enumerate(drawn):  # the best is drawn last
        share = rank / max(1, len(drawn) - 1)
        values = {name: places[name](value) for name, value in trial.params.items() if name in places}
        ends = arms.index(trial.arm) / max(1, len(arms) - 1), share
        heights = (ends[0], *map(values.get, names), ends[1])
        known = [(x, height) for x, height in enumerate(heights) if height is not None]
        is_best = rank == len(drawn) - 1
        axes.plot(
            [x for x, _ in known],
            [height for _, height in known],
            color="#c00000" if is_best else colours(share),
            linewidth=2.2 if is_best else 0.8,
            alpha=1.0 if is_best else 0.55,
        )
    axes.set_xticks(range(len(names) + 2), ("arm", *names, "rank"), rotation=35)
    for label in axes.get_xticklabels():
        label.set_horizontalalignment("right")
    axes.set_yticks([])
    axes.grid(visible=True, axis="x", alpha=0.6)
    for x, name in enumerate(names, start=1):
        low, high = _ends(story.spec.space[name])
        axes.annotate(low, (x, -0.02), ha="center", va="top", fontsize=6.5)
        axes.annotate(high, (x, 1.02), ha="center", va="bottom", fontsize=6.5)
    for index, arm in enumerate(arms):
        axes.annotate(arm, (-0.05, index / max(1, len(arms) - 1)), ha="right", va="center", fontsize=6.5)
    axes.annotate("best", (len(names) + 1.05, 1), va="center", fontsize=6.5)
    axes.annotate("worst", (len(names) + 1.05, 0), va="center", fontsize=6.5)
    axes.set_xlim(-0.6, len(names) + 1.6)
    axes.set_ylim(-0.1, 1.1)
    return _picture(
        figure,
        "Trials as lines",
        f"Parallel coordinates of {len(drawn)} trials; the best is trial {drawn[-1].number}.",
        "Each line is a trial, from its arm through its values to its rank: dark is better, red the best. "
        "At the ends of an axis are those of its range.",
    )


def importance(story: Story) -> Picture | None:
    from service.importance import find_importances

    found = find_importances(story.spec, story.trials)
    if not found:
        return None
    figure = Figure(figsize=(WIDTH, 0.9 + 0.28 * len(found)), layout="constrained")
    axes = figure.subplots()
    names, shares = list(found)[::-1], list(found.values())[::-1]
    axes.barh(names, shares, color=COLOURS[0])
    for index, share in enumerate(shares):
        axes.annotate(f" {100 * share:.0f} %", (share, index), va="center", fontsize=8)
    axes.set(xlabel="share of what the parameters explain", xlim=(0, max(shares) * 1.15))
    axes.grid(visible=False, axis="y")
    first = next(iter(found))
    return _picture(
        figure,
        "Which parameters matter",
        f"Importance of each parameter; the first is {first} with {100 * found[first]:.0f} %.",
        "PED-ANOVA (Watanabe et al. 2023, by Optuna) over completed trials of all arms that sampled it: what "
        "tells the best tenth from the rest. From few trials it is no more than a hint.",
    )


def timeline(story: Story) -> Picture | None:
    begun = [trial for trial in story.drawn if trial.started_at is not None]
    if not begun:
        return None
    start = min(trial.started_at for trial in begun if trial.started_at is not None)
    scale, unit = _time_unit(
        max((trial.finished_at or story.report.as_of) - start for trial in begun).total_seconds()
    )
    figure, axes = _figure(height=min(4.5, 1.4 + 0.06 * len(begun)))
    for state, mark in MARKS.items():
        some = [trial for trial in begun if trial.state == state]
        for trial in some:
            assert trial.started_at is not None
            end = trial.finished_at or story.report.as_of
            span = [(trial.started_at - start).total_seconds() / scale, (end - start).total_seconds() / scale]
            colour = story.looks[trial.arm][0] if trial.arm in story.looks else "#666666"
            axes.plot(span, [trial.number, trial.number], color=colour, linewidth=1.6, solid_capstyle="butt")
            axes.plot(span[1:], [trial.number], mark, color=colour, markersize=3.5)
    handles = [Line2D([], [], color=look[0], label=arm) for arm, look in story.looks.items()]
    present = {trial.state for trial in begun}
    handles += [
        Line2D([], [], color="#444444", marker=mark, linestyle="", markersize=4, label=ENDS[state])
        for state, mark in MARKS.items()
        if state in present and state != "WAITING"
    ]
    axes.set(xlabel=f"{unit} since the first trial began", ylabel="trial")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    figure.legend(handles=handles, loc="outside upper center", ncols=4, fontsize=8)
    counts = ", ".join(
        f"{sum(trial.state == state for trial in begun)} {ENDS[state]}" for state in sorted(present)
    )
    return _picture(
        figure,
        "When each trial ran",
        f"The timeline of {len(begun)} trials: {counts}.",
        "From a trial's first beginning to its end; what was paused or tried again has its gap in it.",
    )


def use(story: Story) -> Picture | None:
    spans = [
        (epoch.recorded_at.timestamp() - epoch.seconds, epoch.recorded_at.timestamp(), epoch.tokens)
        for epoch in story.epochs
        if epoch.seconds > 0
    ]
    if len(spans) < 2:
        return None
    begun, ended, trained = np.array(spans).T
    start, end = float(begun.min()), float(ended.max())
    scale, unit = _time_unit(end - start)
    edges = np.linspace(start, end, 120)
    busy = _rate(begun, ended, ended - begun, edges)
    tokens = _rate(begun, ended, trained, edges)
    busy, tokens = busy * story.every, tokens * story.every
    resources = story.spec.resources
    what, each = ("GPUs", resources.gpus) if resources.gpus else ("cores", resources.cpus)
    figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    at = (edges[:-1] - start) / scale
    upper.fill_between(at, busy * each, step="post", color=COLOURS[0], alpha=0.5, linewidth=0)
    upper.set(ylabel=f"{what} training", ylim=(0, None))
    lower.fill_between(at, tokens, step="post", color=COLOURS[2], alpha=0.5, linewidth=0)
    lower.set(ylabel="trained tokens/s", xlabel=f"{unit} since the first epoch began", ylim=(0, None))
    lower.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.0f}"))
    hours = f"{float((ended - begun).sum()) * story.every * each / 3600:.2f} {what[:-1]}-hours"
    tokens_trained = round(float(trained.sum())) * story.every
    share = f"{each:g} {what if each != 1 else what[:-1]}"
    return _picture(
        figure,
        f"What of the {'GPUs' if resources.gpus else 'cores'} was used",
        f"{hours} of training and validation, {tokens_trained:,} tokens.",
        f"By the epochs on record: each trial has {share} while it trains or validates. In all {hours}.",
    )


DRAWN: tuple[Callable[[Story], Picture | None], ...] = (
    learning_curves,
    expected_best,
    by_parameter,
    parallel_coordinates,
    importance,
    use,
    timeline,
)


# Parts.


def _rate(begun: np.ndarray, ended: np.ndarray, amounts: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """How much a second of what each span has, evenly over its length, falls between each two edges."""
    order, after = np.argsort(begun), np.argsort(ended)
    speeds = amounts / (ended - begun)

    def done_by(times: np.ndarray, at: np.ndarray, speed: np.ndarray) -> np.ndarray:
        """The sum of speed * (at - time) over the times that are past."""
        past = np.searchsorted(times, at)
        of_speed, of_time = (np.concatenate([[0.0], np.cumsum(x)]) for x in (speed, speed * times))
        return np.asarray(of_speed[past] * at - of_time[past])

    first = edges[0]  # times since 1970 squared would leave no digits
    done = done_by(begun[order] - first, edges - first, speeds[order])
    done = done - done_by(ended[after] - first, edges - first, speeds[after])
    return np.asarray(np.maximum(np.diff(done) / np.diff(edges), 0.0))


def _figure(height: float = HEIGHT) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.subplots()


def _picture(figure: Figure, title: str, alternative: str, caption: str) -> Picture:
    drawing = BytesIO()
    figure.savefig(drawing, format="svg", metadata={"Date": None})
    return Picture(title, drawing.getvalue(), alternative, caption)


def _plot(axes: Axes, curve: Sequence[tuple[int, float]], colour: str, style: str, **how: Any) -> None:
    x, y = zip(*curve, strict=True)
    axes.plot(x, y, color=colour, linestyle=style, marker="." if len(curve) == 1 else "", **how)


def _thinned(curve: Sequence[tuple[int, float]]) -> Sequence[tuple[int, float]]:
    if len(curve) <= MOST_POINTS:
        return curve
    return [curve[int(place)] for place in np.unique(np.linspace(0, len(curve) - 1, MOST_POINTS).round())]


def _after_the_plunge(curves: Sequence[Sequence[tuple[int, float]]]) -> list[float]:
    """Without the first epochs, which would leave no room for what sets trials apart."""
    first = 0.15 * max(epoch for curve in curves for epoch, _ in curve)
    found = [perplexity for curve in curves for epoch, perplexity in curve if epoch > first]
    return found or [perplexity for curve in curves for _, perplexity in curve]


def _quartiles(curves: Sequence[Sequence[tuple[int, float]]]) -> tuple[list[int], list[list[float]]]:
    """Of the curves that reach each epoch."""
    by_epoch: dict[int, list[float]] = {}
    for curve in curves:
        for epoch, perplexity in curve:
            by_epoch.setdefault(epoch, []).append(perplexity)
    epochs = [epoch for epoch, _ in _thinned([(epoch, 0.0) for epoch in sorted(by_epoch)])]
    found = [np.quantile(by_epoch[epoch], [0.25, 0.5, 0.75]) for epoch in epochs]
    return epochs, [[float(of[k]) for of in found] for k in range(3)]


def _robust(values: Sequence[float | None]) -> tuple[float, float]:
    """Limits of a logarithmic axis that a few trials that went wrong do not stretch."""
    known = np.minimum([value for value in values if value is not None], LARGEST)
    low, middle, high = float(known.min()), float(np.median(known)), float(np.quantile(known, 0.97))
    high = max(high, middle * (middle / low) ** 0.5, low * 1.02)
    margin = (high / low) ** 0.05
    return low / margin, high * margin


def _perplexity_axis(axis: Any, set_scale: Callable[[str], Any]) -> None:
    set_scale("log")
    axis.set_major_formatter(PlainNumbers())
    axis.set_minor_formatter(PlainNumbers(minor_thresholds=(1.2, 0.5)))


def _legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) > 1:
        figure.legend(handles, labels, loc="outside upper center", ncols=4, fontsize=8, handlelength=3)


def _scored(story: Story) -> list[TrialView]:
    return [trial for trial in story.drawn if trial.score is not None]


def _is_log(space: Any) -> bool:
    return isinstance(space, LogUniform)


def _place(space: Any) -> Callable[[Any], float]:
    """Where on its axis, from 0 to 1, a value is."""
    if isinstance(space, Choice):
        known = [str(value) for value in space.values]
        return lambda value: known.index(str(value)) / max(1, len(known) - 1) if str(value) in known else 0.5
    low, high = float(space.low), float(space.high)
    if _is_log(space):
        return lambda value: (math.log(value) - math.log(low)) / (math.log(high) - math.log(low))
    return lambda value: (float(value) - low) / (high - low)


def _ends(space: Any) -> tuple[str, str]:
    if isinstance(space, Choice):
        return str(space.values[0])[:8], str(space.values[-1])[:8]
    return f"{space.low:.3g}", f"{space.high:.3g}"


def _time_unit(seconds: float) -> tuple[float, str]:
    if seconds > 2 * 86_400:
        return 86_400.0, "days"
    if seconds > 3 * 3600:
        return 3600.0, "hours"
    return (60.0, "minutes") if seconds > 180 else (1.0, "seconds")
