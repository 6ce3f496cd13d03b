"""What a report says, as the API answers it. Perplexities are those of each trial's best epoch."""

from datetime import datetime
from typing import Literal

from service.lifecycle import State
from service.schemas import View


class Interval(View):
    """Of 95 %."""

    low: float
    high: float


class Proportion(View):
    """`count` of `n`."""

    count: int
    n: int
    share: float
    interval: Interval
    """Wilson's."""


class ExpectedBest(View):
    """What the best of so many trials is to be expected to have."""

    trials: int
    perplexity: float
    interval: Interval
    """By the bootstrap."""


class TopMean(View):
    """Of the lowest perplexities of an arm."""

    perplexity: float
    interval: Interval
    """By the bootstrap."""


class ArmReport(View):
    """One arm's trials that have ended."""

    arm: str
    n: int
    """Those that had their chance: without what was cancelled, and what lost its workers."""
    complete: int
    pruned: int
    failed: int
    best: float | None
    best_trial: int | None
    """Its number."""
    top5: TopMean | None
    """Null where there are fewer."""
    top10: TopMean | None
    beating: Proportion | None
    """Of the trials, those that beat the baseline. Null for the baseline arm, without a baseline, and without
    a trial."""
    expected_best: list[ExpectedBest]
    """By trials; a failed one has the arm's worst perplexity."""


class Counts(View):
    """Two arms' shares of trials that beat the baseline."""

    first: Proportion
    second: Proportion
    difference: float
    """Of the shares, first - second."""
    interval: Interval
    """Newcombe's, of the difference."""
    p: float
    """Fisher's exact test, two-sided."""
    could_differ: bool
    """Whether any outcome of so many trials could have been significant."""
    trials_for_power: int | None
    """Trials an arm that would find such a difference with 80 % power, corrected for the number of
    comparisons; null: what is seen gives no number."""


class Pairs(View):
    """Draws whose trials came to their ends in both of two arms: the same sampled values and the same seed.

    A trial that failed of itself has come to its end, and is worse than any that completed; one that was
    pruned has not.
    """

    draws: int
    ended: int = 0
    """Draws whose trials have ended in both arms, pruned ones too."""
    failed: int = 0
    """Of `draws`, those that failed in one arm or in both."""
    first_wins: int
    second_wins: int
    ties: int
    ratio: float | None
    """Of the perplexities, first to second, of the draws that differ: Hodges and Lehmann's median."""
    interval: Interval | None
    """Of the ratio; null below six draws that differ. For this comparison alone, however many there are."""
    p: float
    """Wilcoxon's signed-rank test of the differences of best losses, two-sided; ties do not count."""
    ahead: Literal["first", "second"] | None
    """By the statistic of that test."""
    could_differ: bool
    """Whether any outcome of so many draws that differ could have been significant."""
    draws_for_power: int | None
    """Draws that would find such a difference with 80 % power, corrected for the number of comparisons;
    null: what is seen gives no number."""


class Comparison(View):
    """Of two arms."""

    first: str
    second: str
    counts: Counts | None
    """Null where an arm is the baseline, and without a baseline."""
    pairs: Pairs
    test: Literal["pairs", "counts", "none"]
    """Which of them decides: the pairs, where a significant outcome of them was possible and they are at
    least half of the draws that ended; else the counts, where a significant outcome of those was."""
    p: float | None
    """Of that test, corrected for the number of comparisons (Holm)."""
    verdict: Literal["first", "second", "open", "too_few"]
    """Which arm is better at the level of 5 %."""
    further: int | None
    """Draws, or trials an arm, beyond those there are, that would settle it with 80 % power if the difference
    is what it looks like; null: it is settled, or what is seen gives no number."""
    sentence: str


class ReportView(View):
    """What the trials of a sweep, so far, say about its arms."""

    sweep_id: str
    name: str
    state: State
    as_of: datetime
    conclusion: str
    """In a sentence or two."""
    baseline: float | None
    """Perplexity that the trials are counted against."""
    caption: str
    """What is measured, and against what."""
    arms: list[ArmReport]
    comparisons: list[Comparison]
    """Of every two arms."""
    remarks: list[str]
