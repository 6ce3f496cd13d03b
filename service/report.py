"""What a sweep says, arm by arm: pure functions of its spec and its trials, and three ways to write it down.

An arm's trials count once they have ended. A failed trial counts as one that does not beat the baseline; one
that was cancelled with its sweep, or whose workers kept dying, had no chance and is left out.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from service.schemas import TrialView
from trials.spec import SweepSpec

Z_95 = 1.959963984540054
Z_80 = 0.8416212335729143
SIGNIFICANT = 0.05
MEASURE = "Validation perplexity of each trial's best epoch."
COLUMNS = (
    "arm",
    "n",
    "complete",
    "pruned",
    "failed",
    "best",
    "top-5 mean",
    "top-10 mean",
    "beat baseline",
)


@dataclass(frozen=True)
class Interval:
    low: float
    high: float


@dataclass(frozen=True)
class Proportion:
    """count of n, with Wilson's 95 % interval."""

    count: int
    n: int

    @property
    def share(self) -> float:
        return self.count / self.n

    @property
    def interval(self) -> Interval:
        return wilson(self.count, self.n)


@dataclass(frozen=True)
class ArmRow:
    """One arm's trials. Perplexities are those of each trial's best epoch; None where there are too few."""

    arm: str
    n: int
    complete: int
    pruned: int
    failed: int
    best: float | None
    top5_mean: float | None
    top10_mean: float | None
    beating: Proportion | None
    """None for the baseline arm, without a baseline, and without a trial."""


@dataclass(frozen=True)
class Comparison:
    """Two arms' shares of trials that beat the baseline."""

    first: Proportion
    second: Proportion
    p: float
    """Fisher's exact test, two-sided."""
    interval: Interval
    """Newcombe's 95 % interval of the difference first - second."""

    @property
    def difference(self) -> float:
        return self.first.share - self.second.share


@dataclass(frozen=True)
class Pairs:
    """Draws whose trials completed in both of two arms: the same sampled values and the same seed."""

    first_wins: int
    second_wins: int
    ties: int

    @property
    def p(self) -> float:
        """The sign test, two-sided; ties do not count."""
        return sign_test(self.first_wins, self.second_wins)


@dataclass(frozen=True)
class Report:
    title: str
    caption: str
    """What the trials are counted against."""
    rows: tuple[ArmRow, ...]
    compared: tuple[str, str] | None
    comparison: Comparison | None
    pairs: Pairs | None
    remarks: tuple[str, ...]
    """What may and may not be concluded."""


def build_report(spec: SweepSpec, trials: Sequence[TrialView]) -> Report:
    ended = {arm: [trial for trial in trials if trial.arm == arm and _counts(trial)] for arm in spec.arms}
    threshold = _threshold(spec, ended)
    rows = tuple(_row(arm, ended[arm], None if arm == spec.baseline else threshold) for arm in spec.arms)
    contenders = [row for row in rows if row.arm != spec.baseline][:2]
    compared = (contenders[0].arm, contenders[1].arm) if len(contenders) == 2 else None
    comparison = compare(contenders[0].beating, contenders[1].beating) if compared else None
    pairs = _pairs(ended[compared[0]], ended[compared[1]]) if compared else None
    left_out = sum(_had_no_chance(trial) for trial in trials)
    return Report(
        title=spec.name or "sweep",
        caption=_caption(spec, threshold),
        rows=rows,
        compared=compared,
        comparison=comparison,
        pairs=pairs,
        remarks=(*_share_remarks(rows, compared), *_remarks(compared, comparison, pairs, left_out)),
    )


# Statistics.


def wilson(count: int, n: int) -> Interval:
    """Wilson's score interval of a proportion, 95 % (Wilson 1927). n > 0."""
    share, z2 = count / n, Z_95**2
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = Z_95 / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    return Interval(max(0.0, middle - half), min(1.0, middle + half))


def newcombe(first: Proportion, second: Proportion) -> Interval:
    """Newcombe's hybrid score interval of a difference of proportions, 95 % (Newcombe 1998, method 10)."""
    difference = first.share - second.share
    one, two = first.interval, second.interval
    below = math.hypot(first.share - one.low, two.high - second.share)
    above = math.hypot(one.high - first.share, second.share - two.low)
    return Interval(difference - below, difference + above)


def fisher_exact(first: Proportion, second: Proportion) -> float:
    """Fisher's exact test, two-sided: the probability of all tables no likelier than this one."""
    total, successes = first.n + second.n, first.count + second.count

    def ways(count: int) -> int:
        return math.comb(first.n, count) * math.comb(second.n, successes - count)

    counts = range(max(0, successes - second.n), min(successes, first.n) + 1)
    extreme = sum(ways(count) for count in counts if ways(count) <= ways(first.count))
    return extreme / math.comb(total, successes)


def sign_test(first: int, second: int) -> float:
    """The two-sided sign test. 1 where nothing was won."""
    n = first + second
    tail = sum(math.comb(n, count) for count in range(min(first, second) + 1))
    return float(min(1.0, 2 * tail / 2**n))


def compare(first: Proportion | None, second: Proportion | None) -> Comparison | None:
    if first is None or second is None:
        return None
    return Comparison(first, second, fisher_exact(first, second), newcombe(first, second))


def trials_for_power(comparison: Comparison) -> int | None:
    """Trials an arm that would find this difference at 5 % four times in five; None if there is none."""
    if comparison.difference == 0:
        return None
    spread = sum(share * (1 - share) for share in (comparison.first.share, comparison.second.share))
    return math.ceil((Z_95 + Z_80) ** 2 * spread / comparison.difference**2) or None


def _could_differ(first: int, second: int) -> bool:
    """Whether any result could reach p < 0.05; all of one arm and none of the other is the utmost."""
    return fisher_exact(Proportion(first, first), Proportion(0, second)) < SIGNIFICANT


# Rows.


def _counts(trial: TrialView) -> bool:
    return trial.state in {"COMPLETE", "PRUNED", "FAIL"} and not _had_no_chance(trial)


def _had_no_chance(trial: TrialView) -> bool:
    return trial.failure is not None and trial.failure.failure_class in {"cancelled", "infrastructure"}


def _perplexities(trials: Iterable[TrialView]) -> list[float]:
    """The best perplexity of each trial that completed or was pruned, the lowest first."""
    return sorted(
        trial.best_valid_perplexity
        for trial in trials
        if trial.state in {"COMPLETE", "PRUNED"} and trial.best_valid_perplexity is not None
    )


def _threshold(spec: SweepSpec, ended: dict[str, list[TrialView]]) -> float | None:
    if isinstance(spec.baseline, str):
        return min(_perplexities(ended[spec.baseline]), default=None)
    return spec.baseline


def _row(arm: str, trials: list[TrialView], threshold: float | None) -> ArmRow:
    best = _perplexities(trials)
    beating = sum(perplexity < threshold for perplexity in best) if threshold is not None else 0
    return ArmRow(
        arm=arm,
        n=len(trials),
        complete=_number_in(trials, "COMPLETE"),
        pruned=_number_in(trials, "PRUNED"),
        failed=_number_in(trials, "FAIL"),
        best=best[0] if best else None,
        top5_mean=fmean(best[:5]) if len(best) >= 5 else None,
        top10_mean=fmean(best[:10]) if len(best) >= 10 else None,
        beating=Proportion(beating, len(trials)) if threshold is not None and trials else None,
    )


def _number_in(trials: list[TrialView], state: str) -> int:
    return sum(trial.state == state for trial in trials)


def _pairs(first: list[TrialView], second: list[TrialView]) -> Pairs:
    one, two = (
        {trial.draw: _perplexities([trial]) for trial in arm if trial.state == "COMPLETE"}
        for arm in (first, second)
    )
    both = [(one[draw][0], two[draw][0]) for draw in one.keys() & two.keys() if one[draw] and two[draw]]
    return Pairs(
        first_wins=sum(a < b for a, b in both),
        second_wins=sum(b < a for a, b in both),
        ties=sum(a == b for a, b in both),
    )


# Words.


def _caption(spec: SweepSpec, threshold: float | None) -> str:
    if spec.baseline is None:
        return f"{MEASURE} No baseline was named, so nothing is counted against one."
    if threshold is None:
        return f"{MEASURE} The baseline arm {spec.baseline} has no result yet."
    source = (
        f"the best trial of arm {spec.baseline}" if isinstance(spec.baseline, str) else "as given in the spec"
    )
    return f"{MEASURE} Baseline: {threshold:.2f}, {source}."


def _remarks(
    compared: tuple[str, str] | None, comparison: Comparison | None, pairs: Pairs | None, left_out: int
) -> Iterable[str]:
    if compared and comparison:
        yield from _comparison_remarks(compared, comparison)
    if compared and pairs:
        yield _pairs_remark(compared, pairs)
    if left_out:
        yield f"Left out, as cancelled or lost with their workers: {left_out}."


def _share_remarks(rows: Iterable[ArmRow], compared: tuple[str, str] | None) -> Iterable[str]:
    """The share of each arm that no comparison below states."""
    for row in rows:
        if row.beating is not None and (compared is None or row.arm not in compared):
            yield f"{row.arm}: {_percent(row.beating)} beat the baseline."


def _comparison_remarks(compared: tuple[str, str], comparison: Comparison) -> Iterable[str]:
    yield f"{compared[0]} against {compared[1]}: {comparison_line(comparison)}."
    first, second = comparison.first.n, comparison.second.n
    if not _could_differ(first, second):
        yield f"{first} against {second} trials are too few for any claim: no p could be below {SIGNIFICANT}."
    elif comparison.p >= SIGNIFICANT:
        needed = trials_for_power(comparison)
        more = (
            f"; about {needed} trials an arm would find such a difference with 80 % power" if needed else ""
        )
        yield f"By these counts the two arms cannot be told apart{more}."


def _pairs_remark(compared: tuple[str, str], pairs: Pairs) -> str:
    decided = pairs.first_wins + pairs.second_wins
    ties = f", {pairs.ties} ties" if pairs.ties else ""
    line = (
        f"Draws that completed in both: {compared[0]} better in {pairs.first_wins}, "
        f"{compared[1]} in {pairs.second_wins}{ties}; sign test {_p(pairs.p)}"
    )
    few = sign_test(decided, 0) >= SIGNIFICANT
    return f"{line}. {decided} decided pairs are too few for any claim." if few else f"{line}."


def comparison_line(comparison: Comparison) -> str:
    """Both shares with their intervals, Fisher's p, and the difference with its own."""
    between = f"[{_points(comparison.interval.low)}, {_points(comparison.interval.high)}]"
    return (
        f"{_percent(comparison.first)} against {_percent(comparison.second)}; {_p(comparison.p)}; "
        f"difference {_points(comparison.difference)} points {between}"
    )


def _p(value: float) -> str:
    return f"p = {value:.3f}" if value >= 0.0005 else "p < 0.001"


def _percent(proportion: Proportion) -> str:
    low, high = proportion.interval.low, proportion.interval.high
    return f"{100 * proportion.share:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"


def _points(share: float) -> str:
    return f"{100 * share:.1f}".replace("-", "−")


# Forms.


def to_rich(report: Report) -> RenderableType:
    table = Table(title=report.title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "arm" else "right")
    for row in report.rows:
        table.add_row(*(Text(cell) for cell in _cells(row)))
    return Group(table, *(Text(line) for line in (report.caption, *report.remarks)))


def to_markdown(report: Report) -> str:
    lines = [
        f"## {report.title}",
        "",
        _markdown_row(COLUMNS),
        _markdown_row(["---", *["---:"] * (len(COLUMNS) - 1)]),
    ]
    lines += [_markdown_row(_cells(row)) for row in report.rows]
    return "\n".join([*lines, "", report.caption, *(f"- {remark}" for remark in report.remarks)]) + "\n"


def to_json(report: Report) -> dict[str, Any]:
    """The same numbers, unrounded."""
    document = asdict(report)
    for row, written in zip(report.rows, document["rows"], strict=True):
        if row.beating is not None:
            written["beating"] |= {"share": row.beating.share, "interval": asdict(row.beating.interval)}
    if report.comparison is not None:
        document["comparison"]["difference"] = report.comparison.difference
    if report.pairs is not None:
        document["pairs"]["p"] = report.pairs.p
    return document


def _cells(row: ArmRow) -> list[str]:
    beating = f"{row.beating.count} of {row.beating.n}" if row.beating else "–"
    counts = (row.n, row.complete, row.pruned, row.failed)
    return [row.arm, *map(str, counts), *map(_number, (row.best, row.top5_mean, row.top10_mean)), beating]


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
