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
    MOST_DRAWN,
    MOST_PAIRS,
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
JUDGE_ANEW = (
    "Further draws are judged by themselves, in a sweep of their own with another seed: who adds to these "
    "until p is small finds differences that are none."
)
LARGEST = 1e100
"""Perplexity: of larger ones no mean is finite."""
MOST_SETTLED = 3
"""Comparisons that the conclusion tells of."""
Ahead = Literal["first", "second"]
Test = Literal["pairs", "counts", "none"]


def build_report(
    sweep_id: str, state: State, spec: SweepSpec, trials: Sequence[TrialView], as_of: datetime
) -> ReportView:
    ended = {arm: [trial for trial in trials if trial.arm == arm and trial.counts] for arm in spec.arms}
    threshold = _threshold(spec, ended)
    drawn = MOST_DRAWN // len(spec.arms)
    arms = [_arm(arm, ended[arm], None if arm == spec.baseline else threshold, drawn) for arm in spec.arms]
    if not spec.arms_share_draws:  # what is expected of n trials is of n in any order
        arms = [arm.model_copy(update={"expected_best": []}) for arm in arms]
    comparisons = _comparisons(spec, arms, ended) if spec.arms_share_draws else []
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
        remarks=[
            *_remarks(spec, state, trials),
            *([JUDGE_ANEW] if any(comparison.further for comparison in comparisons) else []),
            *([] if spec.arms_share_draws else [_learnt(spec)]),
        ],
    )


# Arms.


def _usable(trials: Iterable[TrialView]) -> list[tuple[float, int]]:
    """The best perplexity of each trial that completed or was pruned, and its number; the lowest first."""
    return sorted((min(trial.score, LARGEST), trial.number) for trial in trials if trial.score is not None)


def _perplexities(trials: Iterable[TrialView]) -> list[float]:
    return [perplexity for perplexity, _ in _usable(trials)]


def _threshold(spec: SweepSpec, ended: Mapping[str, list[TrialView]]) -> float | None:
    if isinstance(spec.baseline, str):
        return min(_perplexities(ended[spec.baseline]), default=None)
    return spec.baseline


def _arm(arm: str, trials: list[TrialView], threshold: float | None, most_drawn: int) -> ArmReport:
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
        top5=_top(perplexities, 5, most_drawn),
        top10=_top(perplexities, 10, most_drawn),
        beating=proportion(beating, len(trials)) if threshold is not None and trials else None,
        expected_best=expected_best([*perplexities, *without], most_drawn),
    )


def _number_in(trials: list[TrialView], state: str) -> int:
    return sum(trial.state == state for trial in trials)


def _top(perplexities: Sequence[float], k: int, most_drawn: int) -> TopMean | None:
    found = top_mean(perplexities, k, most_drawn)
    return None if found is None else TopMean(perplexity=found[0], interval=found[1])


# Comparisons.


@dataclass(frozen=True)
class _Pair:
    """Two arms, before the number of comparisons is accounted for."""

    first: str
    second: str
    counts: Counts | None
    pairs: Pairs
    baseline_is_an_arm: bool

    @property
    def test(self) -> Test:
        if self.pairs.could_differ and 2 * self.pairs.draws >= self.pairs.ended:
            return "pairs"
        return "counts" if self.counts is not None and self.counts.could_differ else "none"

    @property
    def p(self) -> float | None:
        if self.test == "counts" and self.counts is not None:
            return self.counts.p
        return self.pairs.p if self.test == "pairs" else None

    @property
    def ahead(self) -> Ahead | None:
        if self.test == "counts" and self.counts is not None:
            return _sign_of(self.counts.difference)
        return self.pairs.ahead

    @property
    def further(self) -> int | None:
        """Draws, or trials an arm, beyond those there are. A baseline that is the best of an arm falls with
        every trial of that, and the shares with it: then no number can be told."""
        if self.test == "counts" and self.counts is not None:
            there = min(self.counts.first.n, self.counts.second.n)
            needed = None if self.baseline_is_an_arm else self.counts.trials_for_power
        else:
            needed, there = self.pairs.draws_for_power, self.pairs.draws
        return needed - there if needed is not None and needed > there else None


def _sign_of(difference: float) -> Ahead | None:
    return None if difference == 0 else "first" if difference > 0 else "second"


def _comparisons(
    spec: SweepSpec, arms: Sequence[ArmReport], ended: Mapping[str, list[TrialView]]
) -> list[Comparison]:
    two = list(combinations(arms, 2))
    alpha, most = SIGNIFICANT / max(1, len(two)), max(100, int(MOST_PAIRS / max(1, len(two)) ** 0.5))
    found = [
        _Pair(
            first.arm,
            second.arm,
            None
            if first.beating is None or second.beating is None
            else compare_counts(first.beating, second.beating, alpha),
            _paired(ended[first.arm], ended[second.arm], alpha, most),
            isinstance(spec.baseline, str),
        )
        for first, second in two
    ]
    tested = [pair.p for pair in found if pair.p is not None]
    corrected = iter(holm(tested))
    return [_comparison(pair, None if pair.p is None else next(corrected), len(tested)) for pair in found]


def _paired(first: Sequence[TrialView], second: Sequence[TrialView], alpha: float, most: int) -> Pairs:
    """Draws that came to their ends in both arms, in their order. A trial that failed of itself has: it is
    worse than any that completed, and else an arm that diverges would be judged by what it left."""
    one, two = ({trial.draw: trial for trial in arm} for arm in (first, second))
    ended = sorted(one.keys() & two.keys())
    both = [(one[draw], two[draw]) for draw in ended if "PRUNED" not in {one[draw].state, two[draw].state}]
    losses = [[_loss(trial) for trial in arm] for arm in zip(*both, strict=True)] or [[], []]
    pairs = compare_pairs(losses[0], losses[1], alpha, most)
    failed = sum("FAIL" in {a.state, b.state} for a, b in both)
    return pairs.model_copy(update={"ended": len(ended), "failed": failed})


def _loss(trial: TrialView) -> float:
    worst = math.log(LARGEST)
    return worst if trial.state == "FAIL" else min(trial.rank, worst)


def _comparison(pair: _Pair, p: float | None, tests: int) -> Comparison:
    verdict: Literal["first", "second", "open", "too_few"] = "too_few"
    if p is not None:
        verdict = pair.ahead if p < SIGNIFICANT and pair.ahead is not None else "open"
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
        sentence=_too_few(pair) if p is None else _sentence(pair, verdict, p, tests, further),
    )


# Words.


def _sentence(pair: _Pair, verdict: str, p: float, tests: int, further: int | None) -> str:
    by = f"{p_text(p)}{f', corrected for {tests} comparisons' if tests > 1 else ''}"
    ahead, behind = (pair.first, pair.second) if pair.ahead == "first" else (pair.second, pair.first)
    if pair.test == "counts" and pair.counts is not None:
        first, second = _of(pair.first, pair.counts.first), _of(pair.second, pair.counts.second)
        shown = f"{first} and {second} beat the baseline"
        if verdict != "open":
            return f"{shown}: {ahead} does so more often (Fisher's exact test, {by})."
        more = _more(further, "trial of each arm", "trials of each arm", f"{ahead}'s share is as much larger")
        return f"{shown}, which does not tell them apart (Fisher's exact test, {by}){more}."
    draws = f"{pair.pairs.draws} draws that ended in both"
    if pair.pairs.failed:
        draws += f", {pair.pairs.failed} of them by a failure,"
    if verdict != "open":
        return f"On the {draws} {ahead} is better than {behind}{_size(pair, ': ')} (Wilcoxon, {by})."
    size = _size(pair, "")
    more = _more(further, "draw", "draws", f"{ahead} is as much better", f" ({size})" if size else "")
    return f"The {draws} do not tell {pair.first} and {pair.second} apart (Wilcoxon, {by}){more}."


def _of(arm: str, share: Proportion) -> str:
    return f"{share.count} of {share.n} trials of {arm}"


def _size(pair: _Pair, before: str) -> str:
    """How far the better arm is ahead, as a share of the other one's perplexity; nothing where that makes no
    sense, as of trials that failed."""
    ratio, interval = pair.pairs.ratio or 1.0, pair.pairs.interval
    ends = (interval.low, interval.high) if interval is not None else (ratio, ratio)
    if pair.ahead == "second":
        ratio, ends = 1 / ratio, (1 / ends[1], 1 / ends[0])
    if not (ends[0] > 0.1 and ends[1] < 10):
        return ""
    between = "" if interval is None else f" [{percent(1 - ends[1])}, {percent(1 - ends[0])}]"
    where = " where they differ" if pair.pairs.ties else ""
    return f"{before}its perplexity is {percent(1 - ratio)} % lower{between}{where}"


def _more(further: int | None, one: str, many: str, condition: str, aside: str = "") -> str:
    if further is None:
        return "; from what is seen no number of further ones can be told that would"
    what = one if further == 1 else many
    return f"; if {condition} as it looks{aside}, about {further:,} further {what} would, four times in five"


def _too_few(pair: _Pair) -> str:
    """Why nothing of what there is could have been significant."""
    pairs = pair.pairs
    if pairs.could_differ:
        words = f"{pairs.draws} of {pairs.ended} draws that ended in both {pair.first} and {pair.second}"
        return f"{words} were pruned in neither: too few to speak for all of them."
    said = f"{_draws(pairs.draws)} come to an end in both {pair.first} and {pair.second}"
    if pairs.ties:
        said += f", {pairs.ties} of them with the same outcome"
    if pair.counts is not None:
        said += f"; {pair.counts.first.n} and {pair.counts.second.n} trials have ended"
    return f"{said}: too few for any claim, whatever the outcome; six draws that differ are the least."


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
    said = " ".join(comparison.sentence for comparison in settled[:MOST_SETTLED])
    if len(settled) > MOST_SETTLED:
        said += f" {len(settled) - MOST_SETTLED} more comparisons tell two arms apart."
    left = len(comparisons) - len(settled)
    return f"{said} {left} of {len(comparisons)} comparisons {'is' if left == 1 else 'are'} open. {SCOPE}"


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
        f"the best trial of arm {spec.baseline}, taken as fixed"
        if isinstance(spec.baseline, str)
        else "as given in the spec"
    )
    return f"{MEASURE} Baseline: {threshold:.2f}, {source}."


def _remarks(spec: SweepSpec, state: State, trials: Sequence[TrialView]) -> Iterator[str]:
    if state not in TERMINAL_STATES:
        yield ONE_LOOK
    left_out = sum(not trial.had_its_chance for trial in trials)
    if left_out:
        yield f"Left out, as cancelled or lost with their workers: {left_out}."
    if any(trial.state == "PRUNED" for trial in trials):
        yield "Pruned trials count with the best epoch that they reached; their draws are no pairs."
    if spec.budget.target is not None:
        yield "The sweep ends once a trial reaches its target, which no interval and no test accounts for."
    if spec.points:
        yield f"Draws that were chosen by hand, and count as if they were drawn: {len(spec.points)}."
    stopped = sum(trial.stopped for trial in trials)
    if stopped:
        yield f"Ended on request, before their time, and counted as they stood: {stopped}."
