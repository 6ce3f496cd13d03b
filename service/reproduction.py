"""A table of the paper beside ours: pure functions of its declaration, its trials, what was measured."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import groupby
from statistics import fmean, stdev
from typing import Any

from service.report import build_report
from service.report_schemas import ReportView
from service.report_texts import to_markdown
from service.schemas import EpochView, SweepView, TrialView
from trials.perplexity import perplexity
from trials.spec import SweepSpec
from trials.tables import MASK_SAMPLES, Row, Scale, Score, SearchRow, Table

CONFIDENCE = 0.95
CURVE_POINTS = 10
"""Epochs that table.md shows of a curve; table.json has all of them."""
BLANK = "–"


@dataclass(frozen=True)
class Measured:
    """One trial's best checkpoint, after so many fine-tunings, under so many sampled masks (0: the mean)."""

    number: int
    finetunes: int
    masks: int
    valid_loss: float
    """Nats per token."""
    test_loss: float
    """Nats per token."""
    sample: int = 0
    """Which sample of the masks."""


@dataclass(frozen=True)
class Estimate:
    """A mean over trials."""

    n: int
    mean: float
    half_width: float | None
    """Of the 95 % confidence interval, by Student's t; None for a single trial."""
    best: float
    sd_over_masks: float | None = None
    """Standard deviation over samples of the masks for one model, its mean over trials; None without."""


@dataclass(frozen=True)
class ResultRow:
    label: str
    arm: str
    paper_valid: Score | None
    paper_test: Score | None
    valid: Estimate | None
    """Perplexities; None where no trial of the arm has been measured."""
    test: Estimate | None
    best_valid: float | None
    test_of_best: float | None
    """Test perplexity of the trial that validation chose."""


@dataclass(frozen=True)
class Curve:
    """An arm's perplexities epoch by epoch: means over its trials, or those of its best one."""

    arm: str
    train: tuple[float, ...]
    valid: tuple[float, ...]
    activation: tuple[float, ...]
    """Mean hidden activation |m·h|²/d."""


@dataclass(frozen=True)
class Reproduction:
    """All that a finished reproduction is written from."""

    table: Table
    scale: Scale
    sweep_id: str
    as_of: datetime
    spec: SweepSpec
    corpus: str
    trials: tuple[TrialView, ...]
    measured: tuple[Measured, ...]
    curves: tuple[Curve, ...]
    differs: tuple[str, ...]
    """In which parts the sweep is not the paper's own; at its scale, in those that were replaced."""

    @property
    def report(self) -> ReportView:
        return build_report(self.sweep_id, "succeeded", self.spec, self.trials, self.as_of)

    @property
    def comparable(self) -> bool:
        return self.scale == "paper" and not self.differs

    @property
    def warning(self) -> str:
        """How far our numbers can be compared with the paper's."""
        if self.comparable:
            return "The paper's configuration at full length."
        if self.scale == "paper":
            what = f"the paper's configuration: {', '.join(self.differs)} differ"
        else:
            what = "the paper's scale" + (", nor its corpus" if "corpus" in self.differs else "")
        return f"**This is not {what}. Our numbers can only be compared with one another.**"

    @property
    def rows(self) -> tuple[ResultRow, ...]:
        return tuple(result_row(row, self.trials, self.measured) for row in self.table.rows)

    @property
    def seeds(self) -> int:
        return self.spec.budget.trials // len(self.spec.arms)


# What to run.


def stages(table: Table, arm: str) -> list[tuple[int, int, int]]:
    """(fine-tunings, masks, sample of the masks) that a trial of this arm is measured at, in order."""
    return sorted(
        {
            (row.finetunes, row.masks, sample)
            for row in table.rows
            if row.arm == arm
            for sample in range(MASK_SAMPLES if row.masks else 1)
        }
    )


LOST = {"failed", "cancelled", "cancelling", "deleting"}


def sweep_to_go_on_with(sweeps: Iterable[SweepView], labels: Mapping[str, str]) -> SweepView | None:
    """The newest sweep of exactly these labels that is not lost: running, queued, or already through."""
    return next(
        (sweep for sweep in sweeps if sweep.labels == labels and sweep.state not in LOST),
        None,
    )


def plan(table: Table, spec: SweepSpec) -> str:
    """What is about to be done, in one sentence."""
    trials, epochs, arms = spec.budget.trials, spec.training.epochs, len(spec.arms)
    line = f"{trials} trials ({arms} arms), {epochs} epochs each at most: {trials * epochs} epochs"
    each = [stages(table, spec.arm_of(number)) for number in range(trials)]
    finetunes = sum(max((count for count, *_ in found), default=0) for found in each)
    evaluations = sum(map(len, each))
    then = [f"{finetunes} fine-tunings"] * bool(finetunes) + [f"{evaluations} evaluations"] * bool(
        evaluations
    )
    return line + (f"; then {' and '.join(then)}" if then else "")


# Statistics.


def estimate(samples: Mapping[int, Sequence[float]]) -> Estimate | None:
    """Of the mean over trials, each of which has its samples."""
    values = [fmean(of_trial) for of_trial in samples.values()]
    if not values:
        return None
    finite = all(map(math.isfinite, values))
    half = (
        student_t(len(values) - 1) * stdev(values) / math.sqrt(len(values))
        if len(values) > 1 and finite
        else None
    )
    repeated = finite and all(len(of_trial) > 1 for of_trial in samples.values())
    return Estimate(
        len(values),
        fmean(values),
        half,
        min(values),
        sd_over_masks=fmean(map(stdev, samples.values())) if repeated else None,
    )


def student_t(degrees: int, confidence: float = CONFIDENCE) -> float:
    """t with P(|T| < t) = confidence for whole degrees of freedom >= 1 (Abramowitz & Stegun 26.7.3-4)."""
    low, high = 0.0, math.pi / 2
    while high - low > 1e-15:
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, degrees) < confidence else (low, middle)
    return math.sqrt(degrees) * math.tan(low)


def _within(theta: float, degrees: int) -> float:
    """P(|T| < t) where tan(theta) = t / sqrt(degrees)."""
    odd, cosine = degrees % 2, math.cos(theta)
    term, total = (cosine if odd else 1.0), 0.0
    for k in range(1 + odd, degrees, 2):
        total += term
        term *= k / (k + 1) * cosine**2
    series = math.sin(theta) * total
    return 2 / math.pi * (theta + series) if odd else series


# Results.


def result_row(row: Row, trials: Iterable[TrialView], measured: Iterable[Measured]) -> ResultRow:
    of_arm = {trial.number for trial in trials if trial.arm == row.arm}
    found = sorted(
        (
            one
            for one in measured
            if one.number in of_arm and (one.finetunes, one.masks) == (row.finetunes, row.masks)
        ),
        key=lambda one: one.number,
    )
    grouped = {number: list(ones) for number, ones in groupby(found, key=lambda one: one.number)}
    valid = {number: [perplexity(one.valid_loss) for one in ones] for number, ones in grouped.items()}
    test = {number: [perplexity(one.test_loss) for one in ones] for number, ones in grouped.items()}
    chosen = min(valid, key=lambda number: fmean(valid[number]), default=None)
    return ResultRow(
        label=row.label,
        arm=row.arm,
        paper_valid=row.valid,
        paper_test=row.test,
        valid=estimate(valid),
        test=estimate(test),
        best_valid=None if chosen is None else fmean(valid[chosen]),
        test_of_best=None if chosen is None else fmean(test[chosen]),
    )


def mean_curve(arm: str, curves: Sequence[Sequence[EpochView]]) -> Curve:
    """The mean over trials, as far as the shortest of them goes."""
    epochs = list(zip(*curves, strict=False))
    return Curve(
        arm,
        train=tuple(fmean(perplexity(one.train_loss) for one in epoch) for epoch in epochs),
        valid=tuple(fmean(perplexity(one.valid_loss) for one in epoch) for epoch in epochs),
        activation=tuple(fmean(one.ar for one in epoch) for epoch in epochs),
    )


# Forms.


def table_markdown(result: Reproduction) -> str:
    table, spec = result.table, result.spec
    parts = [
        f"# {table.title}: {table.name}, {result.scale}\n",
        f"{result.warning}\n",
        f"{table.where} of Zolna et al. 2018: {table.compares}.\n",
        f"Ours: {result.corpus}; {_count(spec.model.layers, 'LSTM layer')}, E = {spec.model.embedding_size}, "
        f"H = {spec.model.hidden_size}; {_count(spec.training.epochs, 'epoch')}; "
        f"{_count(result.seeds, 'draw')} an arm.\n",
        _search_markdown(result) if table.search else _rows_markdown(result),
        *([_curves_markdown("train/valid", result.curves, _perplexities)] if table.curves else []),
        *([_curves_markdown("hidden activation", result.curves, _activation)] if table.activation else []),
        *(f"- {remark}\n" for remark in table.remarks),
    ]
    return "\n".join(parts)


def table_json(result: Reproduction) -> dict[str, Any]:
    """The same numbers, unrounded; null for what is no finite number."""
    table = result.table
    document: dict[str, Any] = {
        "table": table.name,
        "title": table.title,
        "where": table.where,
        "scale": result.scale,
        "comparable_with_the_paper": result.comparable,
        "differs_from_the_paper": list(result.differs),
        "corpus": result.corpus,
        "seeds": result.seeds,
        "rows": [asdict(row) for row in result.rows],
        "paper_search": [asdict(row) for row in table.search],
        "report": result.report.model_dump(mode="json") if table.search else None,
        "curves": [asdict(curve) for curve in result.curves],
        "remarks": list(table.remarks),
    }
    return {key: _finite(value) for key, value in document.items()}


def _finite(value: Any) -> Any:
    """JSON has no infinity."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list | tuple) else value


def _rows_markdown(result: Reproduction) -> str:
    masks = any(row.masks for row in result.table.rows)
    head = [
        *["row", "paper valid", "paper test", "n", "ours valid", "ours test"],
        *(["sd over masks"] if masks else []),
        *["best valid", "its test"],
    ]
    rows = [
        [
            row.label,
            _score(row.paper_valid),
            _score(row.paper_test),
            str(row.valid.n) if row.valid else "0",
            _estimate(row.valid),
            _estimate(row.test),
            *([_sd_over_masks(row)] if masks else []),
            _number(row.best_valid),
            _number(row.test_of_best),
        ]
        for row in result.rows
    ]
    drawn = ", whose searched factors differ" if result.spec.space else ""
    words = f"Perplexities; ours as the mean over trials{drawn}, with its 95 % interval (Student's t).\n"
    return _grid(head, rows) + "\n" + words


def _search_markdown(result: Reproduction) -> str:
    head = ["paper", "best", "top-5 mean", "top-10 mean", "beat baseline"]
    paper = _grid(head, [_search_cells(row) for row in result.table.search])
    ours = to_markdown(result.report)
    no_baseline = (
        "\nThe paper's 60.7 is of another model. To count against a baseline, measure one on the same corpus "
        f"(`fraternal reproduce seeds --scale {result.scale} --set training.epochs="
        f"{result.spec.training.epochs}`) and run this again with `--set baseline=PERPLEXITY`: nothing is "
        "trained twice.\n"
    )
    return f"{paper}\n{ours}" + (no_baseline if result.spec.baseline is None else "")


def _search_cells(row: SearchRow) -> list[str]:
    return [
        row.label,
        *(f"{value:.1f}" for value in (row.best, row.top5_mean, row.top10_mean)),
        f"{row.beating} of {row.n}",
    ]


def _curves_markdown(what: str, curves: Sequence[Curve], point: Callable[[Curve, int], str]) -> str:
    """A value at a few epochs, the last among them."""
    length = max((len(curve.valid) for curve in curves), default=0)
    shown = sorted({round(length * part / CURVE_POINTS) for part in range(1, CURVE_POINTS + 1)} - {0})
    rows = [
        [curve.arm, *(point(curve, epoch - 1) if epoch <= len(curve.valid) else BLANK for epoch in shown)]
        for curve in curves
    ]
    return _grid([f"{what} after epoch", *map(str, shown)], rows)


def _perplexities(curve: Curve, index: int) -> str:
    return f"{curve.train[index]:.1f}/{curve.valid[index]:.1f}"


def _activation(curve: Curve, index: int) -> str:
    return f"{curve.activation[index]:.4f}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _grid(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in (head, rule, *rows))


def _score(score: Score | None) -> str:
    if score is None:
        return BLANK
    spread = f" ± {score.plus_minus}" if score.plus_minus is not None else ""
    return f"{score.mean}{spread}" + (f" (min {score.best})" if score.best is not None else "")


def _estimate(found: Estimate | None) -> str:
    if found is None:
        return BLANK
    spread = f" ± {found.half_width:.2f}" if found.half_width is not None else ""
    return f"{found.mean:.2f}{spread}"


def _sd_over_masks(row: ResultRow) -> str:
    """Of validation and of test."""
    spreads = [one.sd_over_masks for one in (row.valid, row.test) if one is not None]
    return " / ".join("–" if spread is None else f"{spread:.2f}" for spread in spreads) or BLANK


def _number(value: float | None) -> str:
    return BLANK if value is None else f"{value:.2f}"
