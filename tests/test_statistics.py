"""The statistics of reports, against the paper's line, against counting by hand, and against simulation."""

import itertools
import math
import tracemalloc
from statistics import fmean, median

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from service.report_schemas import Interval
from service.report_texts import counts_line
from service.statistics import (
    compare_counts,
    compare_pairs,
    expected_best,
    fisher_exact,
    holm,
    newcombe,
    proportion,
    top_mean,
)
from trials.spec import MOST_TRIALS

FD, ELD = proportion(14, 203), proportion(6, 208)
LOSSES = st.lists(st.floats(1, 9, allow_subnormal=False), min_size=1, max_size=12)


def test_the_papers_search_table_reads_as_the_reference_states() -> None:
    assert counts_line(compare_counts(FD, ELD)) == (
        "6.9 % [4.2, 11.2] against 2.9 % [1.3, 6.1]; p = 0.068; difference 4.0 points [−0.3, 8.6]"
    )


def test_about_450_trials_an_arm_would_settle_the_papers_question() -> None:
    assert compare_counts(FD, ELD).trials_for_power == pytest.approx(450, abs=3)


def test_no_p_reads_as_zero() -> None:
    assert "; p < 0.001; " in counts_line(compare_counts(proportion(20, 20), proportion(0, 20)))


@given(st.integers(1, 12), st.integers(1, 12), st.data())
def test_fisher_exact_is_the_probability_of_all_tables_no_likelier(
    n: int, m: int, data: st.DataObject
) -> None:
    a, b = data.draw(st.integers(0, n)), data.draw(st.integers(0, m))
    ways = {k: math.comb(n, k) * math.comb(m, a + b - k) for k in range(max(0, a + b - m), min(a + b, n) + 1)}
    expected = sum(way for way in ways.values() if way <= ways[a]) / math.comb(n + m, a + b)
    assert fisher_exact(proportion(a, n), proportion(b, m)) == pytest.approx(expected, rel=1e-9)


@given(st.integers(1, 300), st.data())
def test_wilson_solves_its_quadratic(n: int, data: st.DataObject) -> None:
    """Its ends are the shares whose score test of the observed one has p = 0.05 exactly."""
    count = data.draw(st.integers(0, n))
    found = proportion(count, n)
    for end in {found.interval.low, found.interval.high} - {0.0, 1.0}:
        z = (found.share - end) / math.sqrt(end * (1 - end) / n)
        assert abs(z) == pytest.approx(1.959964, rel=1e-4)
    assert found.interval.low <= found.share <= found.interval.high


@given(st.integers(1, 50), st.integers(1, 50), st.data())
def test_exchanging_the_arms_turns_newcombes_interval_around(n: int, m: int, data: st.DataObject) -> None:
    first = proportion(data.draw(st.integers(0, n)), n)
    second = proportion(data.draw(st.integers(0, m)), m)
    one, other = newcombe(first, second), newcombe(second, first)
    assert (one.low, one.high) == pytest.approx((-other.high, -other.low))


@pytest.mark.parametrize(("n", "could"), [(3, False), (4, True)])
def test_counts_that_no_outcome_could_tell_apart_are_known(n: int, could: bool) -> None:
    assert compare_counts(proportion(1, n), proportion(0, n)).could_differ is could


# Pairs.


def test_wilcoxon_counts_signed_ranks_by_hand() -> None:
    """Ranks 1 to 6, of which the second wins rank 1 alone: 2 (P(W ≤ 1)) = 2 · 2/64."""
    first = [1.0, 1.0, 1.0, 1.0, 1.0, 1.01]
    second = [1.2, 1.3, 1.4, 1.5, 1.6, 1.0]
    found = compare_pairs(first, second)
    assert found.p == pytest.approx(4 / 64)
    assert (found.first_wins, found.second_wins, found.ties, found.draws) == (5, 1, 0, 6)


@given(LOSSES, st.data())
def test_exchanging_the_arms_turns_all_of_the_pairs_around(first: list[float], data: st.DataObject) -> None:
    second = data.draw(st.lists(st.floats(1, 9), min_size=len(first), max_size=len(first)))
    one, other = compare_pairs(first, second), compare_pairs(second, first)
    assert one.p == pytest.approx(other.p)
    assert (one.first_wins, one.second_wins, one.ties) == (other.second_wins, other.first_wins, other.ties)
    assert {one.ahead, other.ahead} in ({None}, {"first", "second"})
    if one.ratio is not None and other.ratio is not None:
        assert one.ratio == pytest.approx(1 / other.ratio)
    assert one.draws_for_power == other.draws_for_power
    if one.interval is not None and other.interval is not None:
        assert one.interval.low == pytest.approx(1 / other.interval.high)


@given(LOSSES, st.floats(-0.5, 0.5).filter(lambda shift: abs(shift) > 1e-6))
def test_a_constant_difference_is_the_ratio_of_the_perplexities(losses: list[float], shift: float) -> None:
    found = compare_pairs([loss + shift for loss in losses], losses)
    assert found.ratio == pytest.approx(math.exp(shift), rel=1e-6)


def test_ties_say_nothing() -> None:
    tied = compare_pairs([4.0] * 9, [4.0] * 9)
    assert (tied.ties, tied.p, tied.could_differ) == (9, 1.0, False)
    assert tied.ratio is tied.ahead is tied.draws_for_power is None
    none = compare_pairs([], [])
    assert (none.draws, none.p, none.could_differ, none.ratio, none.interval) == (0, 1.0, False, None, None)


@given(st.lists(st.sampled_from([-3, -2, -1, 1, 2, 3]), min_size=1, max_size=9))
def test_the_test_is_exact_also_where_ranks_are_tied(differences: list[int]) -> None:
    ranks = stats.rankdata(np.abs(differences))
    sums = [ranks[np.array(signs)].sum() for signs in itertools.product([False, True], repeat=len(ranks))]
    above = ranks[np.array(differences) > 0].sum()
    least = min(above, ranks.sum() - above)
    expected = min(1.0, 2 * fmean(total <= least + 1e-9 for total in sums))
    found = compare_pairs([d / 8 for d in differences], [0.0] * len(differences))
    assert found.p == pytest.approx(expected)


@pytest.mark.parametrize("n", [6, 7, 12, 13, 25, 50, 51, 200])
def test_wilcoxon_is_scipys(n: int) -> None:
    differences = np.random.default_rng(n).normal(0.03, 0.1, n)
    method = "exact" if n <= 50 else "asymptotic"
    expected = stats.wilcoxon(differences, method=method).pvalue
    assert compare_pairs(differences, np.zeros(n)).p == pytest.approx(expected)


@pytest.mark.parametrize("n", range(6, 51))
def test_the_interval_leaves_out_one_exactly_where_the_test_is_significant(n: int) -> None:
    generator = np.random.default_rng(n)
    seen = set()
    for shift in (0.0, 0.02, 0.04, 0.06, 0.08, 0.1):
        for _ in range(4):
            found = compare_pairs(generator.normal(shift, 0.1, n), np.zeros(n))
            assert found.interval is not None
            apart = not found.interval.low <= 1 <= found.interval.high
            assert apart is (found.p < 0.05)
            seen.add(apart)
    assert seen == {True, False}


def test_of_more_pairs_than_are_looked_at_the_arm_that_is_ahead_is_the_one_that_the_test_means() -> None:
    generator = np.random.default_rng(7)
    for _ in range(20):
        found = compare_pairs(generator.normal(-0.003, 0.1, 6000), np.zeros(6000))
        assert found.ratio is not None
        assert found.interval is not None
        if found.p < 0.05:
            assert found.ahead == ("first" if found.interval.high < 1 else "second")


@pytest.mark.parametrize("n", range(1, 9))
def test_six_draws_are_the_fewest_that_can_say_anything(n: int) -> None:
    found = compare_pairs([4.0 - i / 100 for i in range(n)], [5.0] * n)
    assert found.could_differ is (found.p < 0.05) is (n >= 6)


def test_the_interval_of_the_shift_belongs_to_the_test() -> None:
    """Moved to just inside of the interval's end, p is above 5 %, and just outside below it."""
    generator = np.random.default_rng(1)
    second = generator.normal(4.5, 0.1, 40)
    first = second - 0.03 + generator.normal(0, 0.08, 40)
    interval = compare_pairs(first, second).interval
    assert interval is not None
    for end, outward in ((interval.low, -1), (interval.high, 1)):
        for moved, significant in ((0.004, True), (-0.004, False)):
            at = first - (math.log(end) + outward * moved)
            assert bool(stats.wilcoxon(at - second).pvalue < 0.05) is significant


def test_the_draws_that_are_asked_for_find_the_difference_at_least_four_times_in_five() -> None:
    generator = np.random.default_rng(2)
    pilot = generator.normal(0.05, 0.1, 4000)
    needed = compare_pairs(pilot, np.zeros(4000)).draws_for_power
    assert needed is not None
    found = [stats.wilcoxon(generator.normal(0.05, 0.1, needed)).pvalue < 0.05 for _ in range(1500)]
    assert 0.78 <= fmean(found) <= 0.9, "Noether's number is a little on the safe side"


@given(st.lists(st.floats(0, 1), max_size=8))
def test_holm_corrects_as_its_definition_says(ps: list[float]) -> None:
    found = holm(ps)
    for p, corrected in zip(ps, found, strict=True):
        smaller = [other for other in ps if other <= p]
        assert p <= corrected <= 1
        expected = max((sum(x >= other for x in ps)) * other for other in smaller)
        assert corrected == pytest.approx(min(1.0, expected))


def test_one_test_is_not_corrected() -> None:
    assert holm([0.04]) == [0.04]


# The best of many.


@given(st.lists(st.floats(20, 2000), min_size=1, max_size=7))
def test_the_expected_best_is_the_mean_over_every_choice(perplexities: list[float]) -> None:
    for point in expected_best(perplexities):
        choices = itertools.combinations(perplexities, point.trials)
        assert point.perplexity == pytest.approx(fmean(map(min, choices)))


@settings(max_examples=25)
@given(st.lists(st.floats(20, 2000), min_size=2, max_size=300))
def test_the_expected_best_falls_from_the_mean_to_the_best(perplexities: list[float]) -> None:
    curve = expected_best(perplexities)
    assert (curve[0].trials, curve[-1].trials) == (1, len(perplexities))
    assert curve[0].perplexity == pytest.approx(fmean(perplexities))
    assert curve[-1].perplexity == pytest.approx(min(perplexities))
    assert all(a.perplexity >= b.perplexity - 1e-9 for a, b in itertools.pairwise(curve))
    assert all(point.interval.low <= point.interval.high for point in curve)
    assert len(curve) <= 40


def test_the_band_of_the_first_trial_is_that_of_a_mean() -> None:
    perplexities = np.random.default_rng(3).normal(70, 4, 200)
    first = expected_best(perplexities.tolist())[0]
    half = 1.96 * perplexities.std() / math.sqrt(200)
    assert first.interval.low == pytest.approx(perplexities.mean() - half, abs=0.15)
    assert first.interval.high == pytest.approx(perplexities.mean() + half, abs=0.15)


def test_the_largest_sweep_there_can_be_takes_little_memory() -> None:
    """Of two arms: 50,000 trials each."""
    generator = np.random.default_rng(4)
    first, second = generator.normal(4.5, 0.1, (2, MOST_TRIALS // 2))
    tracemalloc.start()
    try:
        pairs = compare_pairs(first, second - 0.01)
        curve, mean = expected_best(np.exp(first).tolist()), top_mean(np.exp(first).tolist(), 5)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 64 * 2**20
    assert pairs.ratio == pytest.approx(math.exp(0.01), abs=0.005)
    assert curve[-1].perplexity == pytest.approx(math.exp(first.min()))
    assert mean is not None
    assert mean[0] == pytest.approx(np.exp(np.sort(first)[:5]).mean())


def test_no_trial_has_no_curve() -> None:
    assert expected_best([]) == []


def test_the_top_mean_is_of_the_lowest_and_its_interval_says_what_resamples_do() -> None:
    perplexities = [60.0 + number for number in range(40)]
    assert top_mean(perplexities[:4], 5) is None
    found = top_mean(perplexities, 5)
    assert found is not None
    assert found[0] == 62.0
    generator = np.random.default_rng(9)
    resampled = [fmean(sorted(generator.choice(perplexities, 40))[:5]) for _ in range(4000)]
    low, high = np.quantile(resampled, [0.025, 0.975])
    assert found[1].low == pytest.approx(low, abs=0.3)
    assert found[1].high == pytest.approx(high, abs=0.6)
    assert median(resampled) > found[0], "no resample has a better trial than the best one"


def test_equal_trials_have_no_spread() -> None:
    assert top_mean([60.0] * 7, 5) == (60.0, Interval(low=60.0, high=60.0))


def test_the_same_trials_say_the_same_twice() -> None:
    perplexities = [60.0 + number**0.5 for number in range(30)]
    assert expected_best(perplexities) == expected_best(perplexities)
    assert top_mean(perplexities, 10) == top_mean(perplexities, 10)
