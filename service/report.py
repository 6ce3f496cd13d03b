"""What a sweep says, arm by arm: a pure function of its spec and its trials.

An arm's trials count once they have ended. A failed trial counts as one that does not beat the baseline; one
that was cancelled with its sweep, or whose workers kept dying, had no chance and is left out.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import combinations
from typing import Literal

from service.lifecycle import TERMINAL_STATES, State
from service.report_schemas import ArmReport, Comparison, Counts, Pairs, Proportion, ReportView, TopMean
from service.report_texts import p_text, percent
from service.schemas import TrialView
from service.statistics import (
    SIGNIFICANT,
    compare_counts,
    compare_pairs,
    expected_best,
    holm,
    proportion,
    top_mean,
)
from trials.spec import SweepSpec

MEASURE = "Validation perplexity of each trial's best epoch."
SCOPE = "This is about this corpus, model, budget and space, and about no other."
ONE_LOOK = (
    "The sweep has not ended. Who looks again and again, and stops at the first p below 0.05, finds "
    "differences that are none: let it end as it was planned."
)
LARGEST = 1e100
"""Perplexity: of larger ones no mean is finite."""
Test = Literal["pairs", "counts", "none"]


def build_report(
    sweep_id: str, state: State, spec: SweepSpec, trials: Sequence[TrialView], as_of: datetime
) -> ReportView:
    ended = {arm: [trial for trial in trials if trial.arm == arm and trial.counts] for arm in spec.arms}
    threshold = _threshold(spec, ended)
    arms = [_arm(arm, ended[arm], None if arm == spec.baseline else threshold) for arm in spec.arms]
    if not spec.arms_share_draws:  # what is expected of n trials is of n in any order
        arms = [arm.model_copy(update={"expected_best": []}) for arm in arms]
    comparisons = _comparisons(arms, ended) if spec.arms_share_draws else []
    return ReportView(
        sweep_id=sweep_id,
        name=spec.name,
        state=state,
        as_of=as_of,
        conclusion=_conclusion(arms, comparisons),
        baseline=threshold,
        caption=_caption(spec, threshold),
        arms=arms,
        comparisons=comparisons,
        remarks=[*_remarks(state, trials), *([] if spec.arms_share_draws else [_learnt(spec)])],
    )


# Arms.


def _usable(trials: Iterable[TrialView]) -> list[tuple[float, int]]:
    """The best perplexity of each trial that completed or was pruned, and its number; the lowest first."""
    return sorted(
        (min(trial.best_valid_perplexity, LARGEST), trial.number)
        for trial in trials
        if trial.state in {"COMPLETE", "PRUNED"} and trial.best_valid_perplexity is not None
    )


def _perplexities(trials: Iterable[TrialView]) -> list[float]:
    return [perplexity for perplexity, _ in _usable(trials)]


def _threshold(spec: SweepSpec, ended: Mapping[str, list[TrialView]]) -> float | None:
    if isinstance(spec.baseline, str):
        return min(_perplexities(ended[spec.baseline]), default=None)
    return spec.baseline


def _arm(arm: str, trials: list[TrialView], threshold: float | None) -> ArmReport:
    usable = _usable(trials)
    perplexities = [perplexity for perplexity, _ in usable]
    beating = sum(perplexity < threshold for perplexity in perplexities) if threshold is not None else 0
    without = [max(perplexities)] * (len(trials) - len(usable)) if usable else []
    return ArmReport(
        arm=arm,
        n=len(trials),
        complete=_number_in(trials, "COMPLETE"),
        pruned=_number_in(trials, "PRUNED"),
        failed=_number_in(trials, "FAIL"),
        best=usable[0][0] if usable else None,
        best_trial=usable[0][1] if usable else None,
        top5=_top(perplexities, 5),
        top10=_top(perplexities, 10),
        beating=proportion(beating, len(trials)) if threshold is not None and trials else None,
        expected_best=expected_best([*perplexities, *without]),
    )


def _number_in(trials: list[TrialView], state: str) -> int:
    return sum(trial.state == state for trial in trials)


def _top(perplexities: Sequence[float], k: int) -> TopMean | None:
    found = top_mean(perplexities, k)
    return None if found is None else TopMean(perplexity=found[0], interval=found[1])


# Comparisons.


@dataclass(frozen=True)
class _Pair:
    """Two arms, before the number of comparisons is accounted for."""

    first: str
    second: str
    counts: Counts | None
    pairs: Pairs

    @property
    def test(self) -> Test:
        """By how many there are, never by how they came out."""
        if self.pairs.could_differ:
            return "pairs"
        return "counts" if self.counts is not None and self.counts.could_differ else "none"

    @property
    def p(self) -> float | None:
        if self.test == "counts" and self.counts is not None:
            return self.counts.p
        return self.pairs.p if self.test == "pairs" else None

    @property
    def first_is_ahead(self) -> bool:
        if self.test == "counts" and self.counts is not None:
            return self.counts.difference > 0
        return (self.pairs.ratio or 1.0) < 1

    @property
    def further(self) -> int | None:
        """Draws, or trials an arm, beyond those there are."""
        if self.test == "counts" and self.counts is not None:
            needed, there = self.counts.trials_for_power, min(self.counts.first.n, self.counts.second.n)
        else:
            needed, there = self.pairs.draws_for_power, self.pairs.first_wins + self.pairs.second_wins
        return None if needed is None else max(1, needed - there)


def _comparisons(arms: Sequence[ArmReport], ended: Mapping[str, list[TrialView]]) -> list[Comparison]:
    found = [
        _Pair(
            first.arm,
            second.arm,
            None
            if first.beating is None or second.beating is None
            else compare_counts(first.beating, second.beating),
            compare_pairs(*_losses_of_pairs(ended[first.arm], ended[second.arm])),
        )
        for first, second in combinations(arms, 2)
    ]
    tested = [pair.p for pair in found if pair.p is not None]
    corrected = iter(holm(tested))
    return [_comparison(pair, None if pair.p is None else next(corrected), len(tested)) for pair in found]


def _losses_of_pairs(
    first: Iterable[TrialView], second: Iterable[TrialView]
) -> tuple[list[float], list[float]]:
    """Best losses of the draws that completed in both arms, in the order of the draws."""
    one, two = (
        {
            trial.draw: min(trial.best_valid_loss, math.log(LARGEST))
            for trial in arm
            if trial.state == "COMPLETE" and trial.best_valid_loss is not None
        }
        for arm in (first, second)
    )
    both = sorted(one.keys() & two.keys())
    return [one[draw] for draw in both], [two[draw] for draw in both]


def _comparison(pair: _Pair, p: float | None, tests: int) -> Comparison:
    verdict: Literal["first", "second", "open", "too_few"] = "too_few"
    if p is not None:
        verdict = "open" if p >= SIGNIFICANT else "first" if pair.first_is_ahead else "second"
    further = pair.further if verdict == "open" else None
    return Comparison(
        first=pair.first,
        second=pair.second,
        counts=pair.counts,
        pairs=pair.pairs,
        test=pair.test,
        p=p,
        verdict=verdict,
        further=further,
        sentence=_sentence(pair, verdict, p, tests, further),
    )


# Words.


def _sentence(pair: _Pair, verdict: str, p: float | None, tests: int, further: int | None) -> str:
    if p is None:
        return _too_few(pair)
    ahead, behind = (pair.first, pair.second) if pair.first_is_ahead else (pair.second, pair.first)
    corrected = f", corrected for {tests} comparisons" if tests > 1 else ""
    if pair.test == "counts" and pair.counts is not None:
        first, second = _of(pair.first, pair.counts.first), _of(pair.second, pair.counts.second)
        shown = f"{first} and {second} beat the baseline"
        test = f"Fisher's exact test, {p_text(p)}{corrected}"
        if verdict != "open":
            return f"{shown}: {ahead} does so more often ({test})."
        more = _more(further, "trials of each arm", f"{ahead}'s share is as much larger as it looks")
        return f"{shown}, which does not tell them apart ({test}){more}."
    draws = pair.pairs.draws
    size = _size(pair)
    test = f"Wilcoxon, {p_text(p)}{corrected}"
    if verdict != "open":
        return (
            f"On the {draws} draws that completed in both, {ahead} is better than {behind}: {size} ({test})."
        )
    more = _more(further, "draws", f"{ahead} is better by as much as it looks, {size}")
    apart = f"do not tell {pair.first} and {pair.second} apart"
    return f"The {draws} draws that completed in both {apart} ({test}){more}."


def _of(arm: str, share: Proportion) -> str:
    return f"{share.count} of {share.n} trials of {arm}"


def _size(pair: _Pair) -> str:
    """How far the better arm is ahead, as a share of the other one's perplexity."""
    ratio, interval = pair.pairs.ratio or 1.0, pair.pairs.interval
    ends = (interval.low, interval.high) if interval is not None else None
    if ratio > 1:  # seen from the second arm
        ratio = 1 / ratio
        ends = (1 / ends[1], 1 / ends[0]) if ends is not None else None
    between = "" if ends is None else f" [{percent(1 - ends[1])}, {percent(1 - ends[0])}]"
    return f"its perplexity is {percent(1 - ratio)} % lower{between}"


def _more(further: int | None, what: str, condition: str) -> str:
    if further is None:
        return "; they are so much alike that no number of draws within reason would"
    return f"; if {condition}, about {further:,} further {what} would"


def _too_few(pair: _Pair) -> str:
    said = f"{_draws(pair.pairs.draws)} completed in both {pair.first} and {pair.second}"
    if pair.counts is not None:
        said += f", {pair.counts.first.n} and {pair.counts.second.n} trials have ended"
    return f"{said}: too few for any claim, whatever the outcome; six draws are the least."


def _draws(n: int) -> str:
    return {0: "No draw has", 1: "One draw has"}.get(n, f"{n} draws have")


def _conclusion(arms: Sequence[ArmReport], comparisons: Sequence[Comparison]) -> str:
    if not any(arm.n for arm in arms):
        return "No trial has ended yet."
    if len(arms) == 1:
        return f"There is one arm, {arms[0].arm}: nothing is compared."
    if not comparisons:
        bests = ", ".join(f"{arm.arm} {arm.best:.2f}" for arm in arms if arm.best is not None)
        return f"Each arm was searched by itself, and nothing is tested. Best: {bests or 'none yet'}."
    if len(comparisons) == 1:
        told_apart = comparisons[0].verdict in {"first", "second"}
        return f"{comparisons[0].sentence} {SCOPE}" if told_apart else comparisons[0].sentence
    settled = [comparison for comparison in comparisons if comparison.verdict in {"first", "second"}]
    if not settled:
        return f"Of {len(comparisons)} comparisons of two arms, none tells them apart."
    said = " ".join(comparison.sentence for comparison in settled)
    return f"{said} {len(comparisons) - len(settled)} of {len(comparisons)} comparisons are open. {SCOPE}"


def _learnt(spec: SweepSpec) -> str:
    return (
        f"Sampler {spec.sampler.name} chose an arm's trials by what earlier ones of it had come to: they are "
        "neither paired nor independent, and intervals hold for independent ones. What compares is the best "
        "of searches of one size, over several seeds: fraternal clone SWEEP --set sampler.seed=1."
    )


def _caption(spec: SweepSpec, threshold: float | None) -> str:
    if spec.baseline is None:
        return f"{MEASURE} No baseline was named, so nothing is counted against one."
    if threshold is None:
        return f"{MEASURE} The baseline arm {spec.baseline} has no result yet."
    source = (
        f"the best trial of arm {spec.baseline}" if isinstance(spec.baseline, str) else "as given in the spec"
    )
    return f"{MEASURE} Baseline: {threshold:.2f}, {source}."


def _remarks(state: State, trials: Sequence[TrialView]) -> Iterator[str]:
    if state not in TERMINAL_STATES:
        yield ONE_LOOK
    left_out = sum(not trial.had_its_chance for trial in trials)
    if left_out:
        yield f"Left out, as cancelled or lost with their workers: {left_out}."
    if any(trial.state == "PRUNED" for trial in trials):
        yield "Pruned trials count with the best epoch that they reached; pairs are of completed ones alone."
    stopped = sum(trial.stopped for trial in trials)
    if stopped:
        yield f"Ended on request, before their time, and counted as they stood: {stopped}."
