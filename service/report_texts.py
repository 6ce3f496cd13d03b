"""A report as a table for terminals, and as Markdown."""

import re
import unicodedata
from collections.abc import Iterable, Iterator

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from service.report_schemas import ArmReport, Comparison, Counts, Pairs, Proportion, ReportView, TopMean

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
MOST_COMPARISONS = 12
"""That are written out; all of them are in the JSON."""


def to_rich(report: ReportView) -> RenderableType:
    table = Table(
        title=printable(title(report)), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "arm" else "right")
    for arm in report.arms:
        table.add_row(*(Text(cell) for cell in _narrow_cells(arm)))
    return Group(printable(report.conclusion), table, *map(printable, lines(report)))


def printable(text: str) -> Text:
    """No markup, and nothing that a terminal would take for a command of its own or turn around."""
    return Text("".join("\ufffd" if unicodedata.category(mark) in {"Cc", "Cf"} else mark for mark in text))


def to_markdown(report: ReportView) -> str:
    written = [
        f"## {escaped(title(report))}",
        "",
        escaped(report.conclusion),
        "",
        _markdown_row(COLUMNS),
        _markdown_row(["---", *["---:"] * (len(COLUMNS) - 1)]),
    ]
    written += [_markdown_row(map(escaped, cells(arm))) for arm in report.arms]
    return "\n".join([*written, "", *(f"- {escaped(line)}" for line in lines(report))]) + "\n"


def title(report: ReportView) -> str:
    return report.name or f"sweep {report.sweep_id}"


def lines(report: ReportView) -> Iterator[str]:
    """What stands below the table of the arms."""
    yield report.caption
    shown = report.comparisons[:MOST_COMPARISONS]
    for comparison in shown:
        yield from comparison_lines(comparison, sentence=len(report.comparisons) > 1)
    if len(shown) < len(report.comparisons):
        yield f"{len(report.comparisons) - len(shown)} more comparisons are in the report as JSON."
    compared = {
        arm for comparison in shown if comparison.counts for arm in (comparison.first, comparison.second)
    }
    for arm in report.arms:
        if arm.beating is not None and arm.arm not in compared:
            yield f"{arm.arm}: {percents(arm.beating)} beat the baseline."
    yield from report.remarks


def comparison_lines(comparison: Comparison, *, sentence: bool) -> Iterator[str]:
    between = f"{comparison.first} against {comparison.second}"
    if sentence:
        yield comparison.sentence
    if comparison.counts is not None:
        yield f"{between}, beating the baseline: {counts_line(comparison.counts)}."
    if comparison.pairs.draws:
        paired = pairs_line(comparison.pairs, comparison.first, comparison.second)
        yield f"{between}, on the same draws: {paired}."


def counts_line(counts: Counts) -> str:
    """Both shares with their intervals, Fisher's p, and the difference with its own."""
    between = f"[{percent(counts.interval.low)}, {percent(counts.interval.high)}]"
    return (
        f"{percents(counts.first)} against {percents(counts.second)}; {p_text(counts.p)}; "
        f"difference {percent(counts.difference)} points {between}"
    )


def pairs_line(pairs: Pairs, first: str, second: str) -> str:
    ties = f", {pairs.ties} ties" if pairs.ties else ""
    ratio = "" if pairs.ratio is None else f"; ratio of perplexities {pairs.ratio:.4f}"
    if pairs.interval is not None:
        ratio += f" [{pairs.interval.low:.4f}, {pairs.interval.high:.4f}]"
    return (
        f"{first} better in {pairs.first_wins}, {second} in {pairs.second_wins}{ties}; "
        f"Wilcoxon {p_text(pairs.p)}{ratio}"
    )


def p_text(value: float) -> str:
    return f"p = {value:.3f}" if value >= 0.0005 else "p < 0.001"


def percents(proportion: Proportion) -> str:
    low, high = proportion.interval.low, proportion.interval.high
    return f"{100 * proportion.share:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"


def percent(share: float) -> str:
    """Without its sign; minus as it is printed."""
    return f"{100 * share:.1f}".replace("-", "−")


def cells(arm: ArmReport) -> list[str]:
    """With intervals."""
    beating = f"{arm.beating.count} of {arm.beating.n}" if arm.beating else "–"
    return [*_counted(arm), number(arm.best), _top(arm.top5), _top(arm.top10), beating]


def _narrow_cells(arm: ArmReport) -> list[str]:
    means = (None if top is None else top.perplexity for top in (arm.top5, arm.top10))
    return [*_counted(arm), number(arm.best), *map(number, means), cells(arm)[-1]]


def _counted(arm: ArmReport) -> list[str]:
    return [arm.arm, *map(str, (arm.n, arm.complete, arm.pruned, arm.failed))]


def _top(top: TopMean | None) -> str:
    if top is None:
        return "–"
    return f"{number(top.perplexity)} [{number(top.interval.low)}, {number(top.interval.high)}]"


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _markdown_row(written: Iterable[str]) -> str:
    return "| " + " | ".join(written) + " |"


def escaped(text: str) -> str:
    """Names are anybody's: none opens a tag, a link or a cell, or calls somebody."""
    return re.sub(r"([\\`*_<>|#~&@]|\](?=[(\[:])|:(?=//)|(?<=www)\.)", r"\\\1", " ".join(text.split()))
