"""What a report says about a sweep, against the paper's line, against scipy, and against counting by hand."""

import io
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from scipy import stats

from service.report import (
    Proportion,
    Report,
    build_report,
    compare,
    comparison_line,
    fisher_exact,
    newcombe,
    sign_test,
    to_json,
    to_markdown,
    to_rich,
    trials_for_power,
    wilson,
)
from service.schemas import Failure, TrialView
from trials.spec import FailureClass, SweepSpec

FD, ELD = Proportion(14, 203), Proportion(6, 208)


def spec(**fields: Any) -> SweepSpec:
    return SweepSpec.model_validate({"corpus": {"name": "sotu"}, "budget": {"trials": 8}, **fields})


def trial(number: int, arm: str, best: float | None, state: str = "COMPLETE", **fields: Any) -> TrialView:
    return TrialView.model_validate(
        {
            "number": number,
            "arm": arm,
            "draw": number // 2,
            "seed": 0,
            "attempt": 1,
            "state": state,
            "params": {},
            "epochs_done": 1,
            "best_epoch": None if best is None else 1,
            "best_valid_loss": None if best is None else math.log(best),
            "best_valid_perplexity": best,
            "valid_perplexity": best,
            "failure": None,
            "checkpoint_sha256": None,
            "device": "cpu",
            "runtime": None,
            "started_at": None,
            "finished_at": None,
            **fields,
        }
    )


def report_of(perplexities: dict[str, list[float]], **fields: Any) -> Report:
    """A report of complete trials, those at the same place in two arms being of one draw."""
    trials = [
        trial(number, arm, best, draw=number)
        for arm, values in perplexities.items()
        for number, best in enumerate(values)
    ]
    return build_report(spec(**fields), trials)


def row(report: Report, arm: str) -> Any:
    return next(row for row in report.rows if row.arm == arm)


# Statistics.


def test_the_papers_search_table_reads_as_the_reference_states() -> None:
    comparison = compare(FD, ELD)
    assert comparison is not None
    assert comparison_line(comparison) == (
        "6.9 % [4.2, 11.2] against 2.9 % [1.3, 6.1]; p = 0.068; difference 4.0 points [−0.3, 8.6]"
    )


def test_no_p_reads_as_zero() -> None:
    comparison = compare(Proportion(20, 20), Proportion(0, 20))
    assert comparison is not None
    assert "; p < 0.001; " in comparison_line(comparison)


def test_about_450_trials_an_arm_would_settle_the_papers_question() -> None:
    comparison = compare(FD, ELD)
    assert comparison is not None
    assert trials_for_power(comparison) == pytest.approx(450, abs=3)


@given(st.integers(1, 40), st.integers(1, 40), st.data())
def test_fisher_exact_is_scipys(n: int, m: int, draw: st.DataObject) -> None:
    a, b = draw.draw(st.integers(0, n)), draw.draw(st.integers(0, m))
    expected = stats.fisher_exact([[a, n - a], [b, m - b]]).pvalue
    assert fisher_exact(Proportion(a, n), Proportion(b, m)) == pytest.approx(expected, rel=1e-9)


@given(st.integers(1, 300), st.data())
def test_wilson_is_scipys(n: int, draw: st.DataObject) -> None:
    count = draw.draw(st.integers(0, n))
    expected = stats.binomtest(count, n).proportion_ci(method="wilson")
    interval = wilson(count, n)
    assert (interval.low, interval.high) == pytest.approx((expected.low, expected.high), abs=1e-12)


@given(st.integers(0, 60), st.integers(0, 60))
def test_the_sign_test_is_scipys_binomial_test(wins: int, losses: int) -> None:
    expected = stats.binomtest(wins, wins + losses).pvalue if wins + losses else 1.0
    assert sign_test(wins, losses) == pytest.approx(expected, rel=1e-9)


@given(st.integers(1, 50), st.integers(1, 50), st.data())
def test_exchanging_the_arms_turns_newcombes_interval_around(n: int, m: int, draw: st.DataObject) -> None:
    first = Proportion(draw.draw(st.integers(0, n)), n)
    second = Proportion(draw.draw(st.integers(0, m)), m)
    one, other = newcombe(first, second), newcombe(second, first)
    assert (one.low, one.high) == pytest.approx((-other.high, -other.low))


# Rows.


def test_a_row_counts_states_and_takes_the_best_of_complete_and_pruned_trials() -> None:
    trials = [
        trial(0, "fd", 300.0),
        trial(2, "fd", 250.0, "PRUNED"),
        trial(4, "fd", 100.0, "FAIL"),
        trial(6, "fd", 90.0, "RUNNING"),
    ]
    fd = row(build_report(spec(baseline=275), trials), "fd")
    assert (fd.n, fd.complete, fd.pruned, fd.failed, fd.best) == (3, 1, 1, 1, 250.0)
    assert fd.beating == Proportion(1, 3)


def test_means_are_of_the_lowest_and_absent_where_there_are_too_few() -> None:
    report = report_of({"fd": [float(value) for value in range(20, 9, -1)], "eld": [5.0, 4.0, 3.0, 2.0, 1.5]})
    assert row(report, "fd").top5_mean == 12.0
    assert row(report, "fd").top10_mean == 14.5
    assert row(report, "eld").top5_mean == pytest.approx(3.1)
    assert row(report, "eld").top10_mean is None


def test_a_trial_exactly_as_good_as_the_baseline_does_not_beat_it() -> None:
    assert row(report_of({"fd": [60.7, 60.6]}, baseline=60.7), "fd").beating == Proportion(1, 2)


def test_a_baseline_arm_is_measured_by_its_best_trial_and_is_not_counted_itself() -> None:
    arms = {arm: {"kappa": kappa} for arm, kappa in (("a", 0), ("plain", 1), ("b", 2))}
    report = report_of(
        {"a": [10.0, 30.0], "plain": [20.0, 40.0], "b": [15.0, 19.0]}, arms=arms, baseline="plain"
    )
    assert [row.beating for row in report.rows] == [Proportion(1, 2), None, Proportion(2, 2)]
    assert report.compared == ("a", "b")
    assert "20.00, the best trial of arm plain" in report.caption


def test_a_baseline_arm_without_a_result_is_said_to_have_none() -> None:
    report = report_of({"fd": [10.0]}, baseline="eld")
    assert "eld has no result yet" in report.caption
    assert row(report, "fd").beating is None


@pytest.mark.parametrize("failure_class", ["cancelled", "infrastructure"])
def test_a_trial_that_had_no_chance_is_left_out_and_said_to_be(failure_class: FailureClass) -> None:
    cancelled = Failure(failure_class=failure_class, message="not its own fault")
    report = build_report(
        spec(baseline=50), [trial(0, "fd", 40.0), trial(2, "fd", None, "FAIL", failure=cancelled)]
    )
    assert row(report, "fd").beating == Proportion(1, 1)
    assert "Left out, as cancelled or lost with their workers: 1." in report.remarks


# What may be concluded.


def test_pairs_are_draws_that_completed_in_both_arms() -> None:
    trials = [
        *(trial(2 * draw, "fd", best) for draw, best in enumerate([10.0, 12.0, 14.0, 9.0])),
        *(trial(2 * draw + 1, "eld", best) for draw, best in enumerate([11.0, 11.0, 14.0])),
        trial(7, "eld", 1.0, "PRUNED"),
    ]
    pairs = build_report(spec(), trials).pairs
    assert pairs is not None
    assert (pairs.first_wins, pairs.second_wins, pairs.ties) == (1, 1, 1)


def test_too_few_trials_for_any_claim_are_called_that() -> None:
    report = report_of({"fd": [10.0] * 3, "eld": [30.0] * 3}, baseline=20)
    assert any("3 against 3 trials are too few for any claim" in remark for remark in report.remarks)


def test_enough_trials_are_not_called_too_few() -> None:
    report = report_of({"fd": [10.0] * 4, "eld": [30.0] * 4}, baseline=20)
    assert not any("4 trials are too few for any claim" in remark for remark in report.remarks)


def test_a_difference_that_may_be_chance_is_not_sold_as_one() -> None:
    report = report_of(
        {"fd": [10.0, 10.0, 30.0, 30.0, 30.0], "eld": [10.0, 30.0, 30.0, 30.0, 30.0]}, baseline=20
    )
    assert any(
        remark.startswith("By these counts the two arms cannot be told apart") for remark in report.remarks
    )


# Forms.


@pytest.fixture
def report() -> Report:
    return report_of({"fd": [10.0, 30.0], "eld": [25.0, 35.0]}, baseline=20, name="a sweep")


def test_markdown_has_a_line_for_each_arm_with_as_many_cells_as_the_head(report: Report) -> None:
    table = [line for line in to_markdown(report).splitlines() if line.startswith("|")]
    assert len(table) == 2 + 2
    assert len({line.count("|") for line in table}) == 1
    assert table[2] == "| fd | 2 | 2 | 0 | 0 | 10.00 | – | – | 1 of 2 |"


def test_json_has_the_same_numbers_and_no_bare_infinity(report: Report) -> None:
    document = json.loads(json.dumps(to_json(report), allow_nan=False))
    assert document["rows"][0]["beating"]["share"] == 0.5
    assert document["comparison"]["difference"] == 0.5
    assert document["pairs"]["p"] == 0.5


def test_the_papers_table_fits_into_80_columns() -> None:
    report = report_of({"fd": [60.0] * 14 + [1061.25] * 189, "eld": [60.0] * 6 + [61.0] * 202}, baseline=60.7)
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(to_rich(report), soft_wrap=True)
    table = console.export_text().partition("Validation")[0]
    assert " fd 203 203 0 0 60.00 60.00 60.00 14 of 203 " in " ".join(table.split()) + " "
    assert max(map(len, table.splitlines())) <= 80
