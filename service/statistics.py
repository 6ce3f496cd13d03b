"""The statistics of a report, by scipy where it has them. Pure: the same numbers give the same answers.

scipy takes a second to load, so who serves requests loads this module only when a report is asked for.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Literal

import numpy as np
from scipy import special, stats

from service.report_schemas import Counts, ExpectedBest, Interval, Pairs, Proportion

LEVEL = 0.95
SIGNIFICANT = 0.05
POWER = 0.8
RESAMPLES = 2000
FEWEST_RESAMPLES = 200
MOST_DRAWN = 4_000_000
"""Trials in all resamples, by default: of thousands of trials there are fewer resamples."""
AT_ONCE = 500_000
"""Of these, in memory."""
MOST_PAIRS = 1500
MOST_EXACT = 50
"""Pairs whose distribution is counted out."""
SEED = 0
"""Of the bootstrap: a report that is asked for twice says the same twice."""
MOST_POINTS = 40
"""Of a curve of the expected best."""
MOST_DRAWS = 100_000
"""Who needs more draws than that has found no difference."""
Z = float(stats.norm.ppf(1 - (1 - LEVEL) / 2))
NEAR = 1e-9
"""Of losses in nats per token: what differs by less is a tie."""


# Shares.


def proportion(count: int, n: int) -> Proportion:
    """With Wilson's score interval (Wilson 1927). n > 0."""
    found = stats.binomtest(count, n).proportion_ci(LEVEL, method="wilson")
    return Proportion(
        count=count, n=n, share=count / n, interval=Interval(low=float(found.low), high=float(found.high))
    )


def newcombe(first: Proportion, second: Proportion) -> Interval:
    """Newcombe's hybrid score interval of the difference of two shares (Newcombe 1998, method 10)."""
    difference = first.share - second.share
    one, two = first.interval, second.interval
    below = math.hypot(first.share - one.low, two.high - second.share)
    above = math.hypot(one.high - first.share, second.share - two.low)
    return Interval(low=difference - below, high=difference + above)


def fisher_exact(first: Proportion, second: Proportion) -> float:
    """Fisher's exact test, two-sided."""
    table = [[share.count, share.n - share.count] for share in (first, second)]
    return float(stats.fisher_exact(table).pvalue)


def compare_counts(first: Proportion, second: Proportion, alpha: float = SIGNIFICANT) -> Counts:
    """`alpha` is the level that the number of trials is told for."""
    needed = _trials_for_power(first.share, second.share, alpha)
    return Counts(
        first=first,
        second=second,
        difference=first.share - second.share,
        interval=newcombe(first, second),
        p=fisher_exact(first, second),
        could_differ=_could_differ(first.n, second.n),
        trials_for_power=needed,
    )


def _could_differ(first: int, second: int) -> bool:
    """Whether any result could be significant; all of one arm and none of the other is the utmost."""
    return float(stats.fisher_exact([[first, 0], [0, second]]).pvalue) < SIGNIFICANT


def _trials_for_power(first: float, second: float, alpha: float) -> int | None:
    """Trials an arm that would find this difference of shares four times in five."""
    if first == second:
        return None
    spread = sum(share * (1 - share) for share in (first, second))
    return _whole(_z_squared(alpha) * spread / (first - second) ** 2)


def _z_squared(alpha: float) -> float:
    return float((stats.norm.ppf(1 - alpha / 2) + stats.norm.ppf(POWER)) ** 2)


def _whole(draws: float) -> int | None:
    return max(1, math.ceil(draws)) if draws <= MOST_DRAWS else None


# Pairs.


def compare_pairs(
    first: Sequence[float], second: Sequence[float], alpha: float = SIGNIFICANT, most: int = MOST_PAIRS
) -> Pairs:
    """Best losses, in nats per token, of the draws that two arms share; those at the same place are a pair.

    Wilcoxon's signed-rank test of their differences, two-sided; ties do not count. The shift is Hodges and
    Lehmann's, the median of the means of every two differences, with the interval that belongs to the test.
    Of more than `most` pairs, so many are looked at, evenly chosen. `alpha` is the level that the number of
    draws is told for.
    """
    differences = np.asarray(first, dtype=float) - np.asarray(second, dtype=float)
    differences = np.where(np.abs(differences) < NEAR, 0.0, differences)
    decided = _chosen(differences[differences != 0], most)
    wins, losses = int((differences < 0).sum()), int((differences > 0).sum())
    shift, interval = _hodges_lehmann(decided)
    needed = _pairs_for_power(decided, alpha)
    return Pairs(
        draws=len(differences),
        first_wins=wins,
        second_wins=losses,
        ties=len(differences) - wins - losses,
        p=_wilcoxon(decided),
        ahead=_ahead(decided),
        could_differ=2 * 0.5 ** len(decided) < SIGNIFICANT,
        ratio=None if shift is None else math.exp(shift),
        interval=interval,
        draws_for_power=None if needed is None else _whole(needed * len(differences) / (wins + losses)),
    )


def _chosen(decided: np.ndarray, most: int) -> np.ndarray:
    if len(decided) <= most:
        return decided
    chosen: np.ndarray = decided[np.linspace(0, len(decided) - 1, most).astype(int)]
    return chosen


def _signed_ranks(decided: np.ndarray) -> tuple[np.ndarray, float]:
    """Of the absolute differences, equal ones sharing their mean; and their sum where a difference is > 0."""
    ranks = stats.rankdata(np.abs(decided))
    return ranks, float(ranks[decided > 0].sum())


def _ahead(decided: np.ndarray) -> Literal["first", "second"] | None:
    """By the statistic of the test, so that the two never contradict each other."""
    ranks, above = _signed_ranks(decided)
    below = float(ranks.sum()) - above
    return None if above == below else "first" if above < below else "second"


def _wilcoxon(decided: np.ndarray) -> float:
    """Exact up to MOST_EXACT pairs, also where ranks are tied, for which scipy takes seconds."""
    if decided.size == 0:
        return 1.0
    if decided.size > MOST_EXACT:
        return float(stats.wilcoxon(decided, method="asymptotic").pvalue)
    ranks, above = _signed_ranks(decided)
    least = min(above, float(ranks.sum()) - above)
    return min(1.0, 2 * float(_chances(ranks)[: round(2 * least) + 1].sum()))


def _chances(ranks: np.ndarray) -> np.ndarray:
    """Of each value of twice the sum of the ranks that a fair coin picks."""
    chances = np.zeros(round(2 * ranks.sum()) + 1)
    chances[0] = 1.0
    for rank in np.rint(2 * ranks).astype(int):
        shifted = np.zeros_like(chances)
        shifted[rank:] = chances[: len(chances) - rank]
        chances = (chances + shifted) / 2
    return chances


def _walsh(differences: np.ndarray) -> np.ndarray:
    """The means of every two, each with itself too; sorted."""
    first, second = np.triu_indices(len(differences))
    return np.sort((differences[first] + differences[second]) / 2)


def _hodges_lehmann(decided: np.ndarray) -> tuple[float | None, Interval | None]:
    """In nats per token; the interval as a ratio of perplexities, None where there are too few for one."""
    n = len(decided)
    if n == 0:
        return None, None
    walsh = _walsh(decided)
    shift, skipped = float(np.median(walsh)), _rejected(n) - 1
    if skipped < 0:
        return shift, None
    low, high = walsh[skipped], walsh[len(walsh) - 1 - skipped]
    return shift, Interval(low=math.exp(low), high=math.exp(high))


def _rejected(n: int) -> int:
    """How many of the lowest values of the statistic, 0, 1, …, are significant (Hollander and Wolfe 1999)."""
    if n > MOST_EXACT:
        middle, spread = n * (n + 1) / 4, math.sqrt(n * (n + 1) * (2 * n + 1) / 24)
        return math.floor(middle - Z * spread) + 1
    below = np.cumsum(_chances(np.arange(1, n + 1)))[::2]
    return int((2 * below < SIGNIFICANT).sum())


def _pairs_for_power(decided: np.ndarray, alpha: float) -> float | None:
    """Pairs that would find such a difference four times in five (Noether 1987); None: none is seen."""
    if decided.size < 2:
        return None
    first, second = np.triu_indices(len(decided), k=1)
    sums = decided[first] + decided[second]
    chance = float(np.mean((sums > 0) + 0.5 * (sums == 0)))
    return None if chance == 0.5 else _z_squared(alpha) / (3 * (chance - 0.5) ** 2)


def holm(ps: Sequence[float]) -> list[float]:
    """Each p as Holm 1979 corrects it for there being several tests."""
    order = sorted(range(len(ps)), key=ps.__getitem__)
    corrected, largest = [0.0] * len(ps), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(ps) - rank) * ps[index]))
        corrected[index] = largest
    return corrected


# The best of many.


def top_mean(
    perplexities: Sequence[float], k: int, most_drawn: int = MOST_DRAWN
) -> tuple[float, Interval] | None:
    """The mean of the k lowest, with its bootstrap interval (percentiles); None where there are fewer.

    No resample has a better trial than the best one: most of the interval lies above the mean.
    """
    if len(perplexities) < k:
        return None
    values = np.asarray(perplexities, dtype=float)
    mean = float(np.sort(values)[:k].mean())
    if len(set(perplexities)) == 1:
        return mean, Interval(low=mean, high=mean)
    found = stats.bootstrap(
        (values,),
        partial(_mean_of_lowest, k),
        n_resamples=_resamples(len(values), most_drawn),
        batch=max(1, AT_ONCE // len(values)),
        vectorized=True,
        confidence_level=LEVEL,
        method="percentile",
        rng=np.random.default_rng(SEED),
    ).confidence_interval
    return mean, Interval(low=float(found.low), high=float(found.high))


def _resamples(n: int, most_drawn: int) -> int:
    return max(FEWEST_RESAMPLES, min(RESAMPLES, most_drawn // n))


def _mean_of_lowest(k: int, values: np.ndarray, axis: int = -1) -> np.ndarray:
    lowest: np.ndarray = np.partition(values, k - 1, axis=axis).take(range(k), axis=axis).mean(axis=axis)
    return lowest


def expected_best(perplexities: Sequence[float], most_drawn: int = MOST_DRAWN) -> list[ExpectedBest]:
    """The lowest perplexity of m trials that is to be expected, by m, with its bootstrap band (percentiles).

    The mean over every choice of m of these trials, which is unbiased (Tang et al. 2020, arXiv 2004.13705;
    the curve itself is that of Dodge et al. 2019). At the right end the band is narrower than the truth: no
    resample has a better trial than the best.
    """
    n = len(perplexities)
    if n == 0:
        return []
    sizes = np.unique(np.geomspace(1, n, min(n, MOST_POINTS)).round().astype(int))
    weights_NM = _chances_to_be_best(n, sizes)
    values = np.sort(np.asarray(perplexities, dtype=float))
    generator, left, curves = np.random.default_rng(SEED), _resamples(n, most_drawn), []
    while left > 0:
        rows = min(left, max(1, AT_ONCE // n))
        curves.append(np.sort(generator.choice(values, (rows, n)), axis=1) @ weights_NM)
        left -= rows
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(np.concatenate(curves), [tail, 1 - tail], axis=0)
    return [
        ExpectedBest(trials=int(m), perplexity=float(mean), interval=Interval(low=float(a), high=float(b)))
        for m, mean, a, b in zip(sizes, values @ weights_NM, low, high, strict=True)
    ]


def _chances_to_be_best(n: int, sizes: np.ndarray) -> np.ndarray:
    """Shape (n, len(sizes)): that the i-th lowest of n is the lowest of m that are chosen."""
    above = np.arange(n - 1, -1, -1)[:, None]

    def log_ways(of: np.ndarray | int, chosen: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore", invalid="ignore"):
            ways = special.gammaln(of + 1.0) - special.gammaln(chosen + 1.0)
            return np.where(chosen > of, -np.inf, ways - special.gammaln(np.maximum(of - chosen, 0) + 1.0))

    chances: np.ndarray = np.exp(log_ways(above, sizes - 1) - log_ways(n, sizes))
    return chances
