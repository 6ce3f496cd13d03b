"""What a report says about a sweep, and that it claims no more than the trials do."""

import io
import json
import math
from datetime import UTC, datetime
from typing import Any

import pytest
from rich.console import Console

from service.lifecycle import State
from service.report import build_report
from service.report_schemas import ArmReport, Comparison, ReportView
from service.report_texts import lines, to_markdown, to_rich
from service.schemas import Failure, TrialView
from service.statistics import proportion
from trials.spec import FailureClass, SweepSpec

AS_OF = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)


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


def trials_of(perplexities: dict[str, list[float]]) -> list[TrialView]:
    """Complete trials, those at the same place in two arms being of one draw."""
    return [
        trial(number, arm, best, draw=number)
        for arm, values in perplexities.items()
        for number, best in enumerate(values)
    ]


def told(trials: list[TrialView], state: State = "succeeded", **fields: Any) -> ReportView:
    return build_report("s1", state, spec(**fields), trials, AS_OF)


def report_of(perplexities: dict[str, list[float]], **fields: Any) -> ReportView:
    return told(trials_of(perplexities), **fields)


def row(report: ReportView, arm: str) -> ArmReport:
    return next(row for row in report.arms if row.arm == arm)


def compared(report: ReportView, first: str = "fd", second: str = "eld") -> Comparison:
    return next(c for c in report.comparisons if (c.first, c.second) == (first, second))


# Arms.


def test_an_arm_counts_states_and_takes_the_best_of_complete_and_pruned_trials() -> None:
    trials = [
        trial(0, "fd", 300.0),
        trial(2, "fd", 250.0, "PRUNED"),
        trial(4, "fd", 100.0, "FAIL"),
        trial(6, "fd", 90.0, "RUNNING"),
    ]
    fd = row(told(trials, baseline=275), "fd")
    assert (fd.n, fd.complete, fd.pruned, fd.failed, fd.best, fd.best_trial) == (3, 1, 1, 1, 250.0, 2)
    assert fd.beating == proportion(1, 3)
    assert [point.perplexity for point in fd.expected_best] == pytest.approx([850 / 3, 800 / 3, 250.0]), (
        "the failed one counts as the worst"
    )


def test_means_are_of_the_lowest_and_absent_where_there_are_too_few() -> None:
    report = report_of({"fd": [float(value) for value in range(20, 9, -1)], "eld": [5.0, 4.0, 3.0, 2.0, 1.5]})
    fd, eld = row(report, "fd"), row(report, "eld")
    assert fd.top5 is not None
    assert fd.top10 is not None
    assert eld.top5 is not None
    assert (fd.top5.perplexity, fd.top10.perplexity, eld.top5.perplexity) == (12.0, 14.5, 3.1)
    assert fd.top5.interval.low < 12.0 < fd.top5.interval.high
    assert eld.top10 is None


def test_a_trial_exactly_as_good_as_the_baseline_does_not_beat_it() -> None:
    assert row(report_of({"fd": [60.7, 60.6]}, baseline=60.7), "fd").beating == proportion(1, 2)


def test_a_baseline_arm_is_measured_by_its_best_trial_and_is_not_counted_itself() -> None:
    arms = {arm: {"kappa": kappa} for arm, kappa in (("a", 0), ("plain", 1), ("b", 2))}
    report = report_of(
        {"a": [10.0, 30.0], "plain": [20.0, 40.0], "b": [15.0, 19.0]}, arms=arms, baseline="plain"
    )
    assert [row.beating for row in report.arms] == [proportion(1, 2), None, proportion(2, 2)]
    assert [(c.first, c.second, c.counts is not None) for c in report.comparisons] == [
        ("a", "plain", False),
        ("a", "b", True),
        ("plain", "b", False),
    ]
    assert report.baseline == 20.0
    assert "20.00, the best trial of arm plain" in report.caption


def test_a_baseline_arm_without_a_result_is_said_to_have_none() -> None:
    report = report_of({"fd": [10.0]}, baseline="eld")
    assert "eld has no result yet" in report.caption
    assert row(report, "fd").beating is None


@pytest.mark.parametrize("failure_class", ["cancelled", "infrastructure"])
def test_a_trial_that_had_no_chance_is_left_out_and_said_to_be(failure_class: FailureClass) -> None:
    cancelled = Failure(failure_class=failure_class, message="not its own fault")
    report = told([trial(0, "fd", 40.0), trial(2, "fd", None, "FAIL", failure=cancelled)], baseline=50)
    assert row(report, "fd").beating == proportion(1, 1)
    assert "Left out, as cancelled or lost with their workers: 1." in report.remarks


# What may be concluded.


def test_pairs_are_draws_that_completed_in_both_arms() -> None:
    trials = [
        *(trial(2 * draw, "fd", best) for draw, best in enumerate([10.0, 12.0, 14.0, 9.0])),
        *(trial(2 * draw + 1, "eld", best) for draw, best in enumerate([11.0, 11.0, 14.0])),
        trial(7, "eld", 1.0, "PRUNED"),
    ]
    pairs = compared(told(trials)).pairs
    assert (pairs.draws, pairs.first_wins, pairs.second_wins, pairs.ties) == (3, 1, 1, 1)


BETTER = [60.0 + number for number in range(10)]
WORSE = [value * 1.02 for value in BETTER]


def test_an_arm_that_is_better_on_the_same_draws_is_said_to_be_and_by_how_much() -> None:
    for arms in ({"fd": BETTER, "eld": WORSE}, {"fd": WORSE, "eld": BETTER}):
        report = report_of(arms)
        better, worse = ("fd", "eld") if arms["fd"] is BETTER else ("eld", "fd")
        comparison = compared(report)
        assert (comparison.test, comparison.verdict) == ("pairs", "first" if better == "fd" else "second")
        assert comparison.further is None
        assert report.conclusion == (
            f"On the 10 draws that ended in both {better} is better than {worse}: its perplexity is "
            "2.0 % lower [2.0, 2.0] (Wilcoxon, p = 0.002). This is about this corpus, model, budget and "
            "space, and about no other."
        )


def test_draws_that_do_not_settle_it_are_said_not_to_and_how_many_would() -> None:
    report = report_of({"fd": BETTER, "eld": [*WORSE[:6], *(value * 0.97 for value in BETTER[6:])]})
    comparison = compared(report)
    assert comparison.verdict == "open"
    assert "do not tell fd and eld apart" in report.conclusion
    assert "is better than" not in report.conclusion


def test_the_number_of_further_draws_is_what_is_missing() -> None:
    second = [value * (1.01 if number % 3 else 0.99) for number, value in enumerate([*BETTER, *BETTER][:11])]
    report = report_of({"fd": [*BETTER, *BETTER][:11], "eld": second})
    comparison = compared(report)
    assert comparison.verdict == "open"
    assert comparison.pairs.draws_for_power is not None
    assert comparison.further == comparison.pairs.draws_for_power - 11
    assert f"about {comparison.further} further draws would, four times in five" in comparison.sentence
    assert any("judged by themselves" in remark for remark in report.remarks)


def test_the_papers_counts_are_open_and_250_further_trials_an_arm_would_settle_them() -> None:
    """None of its trials are paired."""
    trials = [
        *(trial(n, "fd", 60.0 if n < 14 else 70.0, draw=n) for n in range(203)),
        *(trial(n, "eld", 60.0 if n < 6 else 70.0, draw=1000 + n) for n in range(208)),
    ]
    report = told(trials, baseline=60.7)
    assert (compared(report).test, compared(report).verdict) == ("counts", "open")
    assert report.conclusion == (
        "14 of 203 trials of fd and 6 of 208 trials of eld beat the baseline, which does not tell them apart "
        "(Fisher's exact test, p = 0.068); if fd's share is as much larger as it looks, about 247 further "
        "trials of each arm would, four times in five."
    )


def test_counts_that_settle_it_are_said_to() -> None:
    trials = [
        *(trial(n, "fd", 60.0 if n < 9 else 70.0, draw=n) for n in range(10)),
        *(trial(n, "eld", 70.0, draw=100 + n) for n in range(10)),
    ]
    report = told(trials, baseline=60.7)
    assert compared(report).verdict == "first"
    assert report.conclusion.startswith(
        "9 of 10 trials of fd and 0 of 10 trials of eld beat the baseline: fd does so more often "
        "(Fisher's exact test, p < 0.001). This is about this corpus"
    )


def test_trials_that_were_chosen_by_what_others_came_to_are_neither_paired_nor_tested() -> None:
    outcomes = {"fd": [50.0 + n for n in range(20)], "eld": [60.0 + n for n in range(20)]}
    space = {"kappa": {"type": "uniform", "low": 0, "high": 1}}
    budget = {"trials": 40}
    learnt = report_of(outcomes, baseline=60, sampler={"name": "tpe"}, space=space, budget=budget)
    assert learnt.comparisons == []
    assert learnt.conclusion == (
        "Each arm was searched by itself, and nothing is tested. Best: fd 50.00, eld 60.00."
    )
    assert "Sampler tpe chose" in learnt.remarks[-1]
    assert row(learnt, "fd").expected_best == [], "which is of trials in any order"
    drawn = report_of(outcomes, baseline=60, sampler={"name": "qmc"}, space=space, budget=budget)
    assert (compared(drawn).test, compared(drawn).verdict) == ("pairs", "first")


def test_ties_in_most_draws_turn_nothing_around() -> None:
    """As where a choice makes two arms the same."""
    better = {"fd": [60.0] * 20 + BETTER[:8], "eld": [60.0] * 20 + WORSE[:8]}
    report = report_of(better)
    assert (compared(report).pairs.ties, compared(report).verdict) == (20, "first")
    assert "fd is better than eld: its perplexity is 2.0 % lower [2.0, 2.0] where they differ" in (
        report.conclusion
    )
    assert compared(report_of({"fd": better["eld"], "eld": better["fd"]})).verdict == "second"


def test_two_arms_that_always_came_out_the_same_are_said_to_have() -> None:
    report = report_of({"fd": BETTER, "eld": BETTER})
    assert report.conclusion == (
        "10 draws have come to an end in both fd and eld, 10 of them with the same outcome: too few for any "
        "claim, whatever the outcome; six draws that differ are the least."
    )


def test_an_arm_that_diverges_is_not_judged_by_what_it_left() -> None:
    diverged = Failure(failure_class="diverged", message="the loss is nan")
    trials = [
        *(trial(n, "eld", 60.0 + n, draw=n) for n in range(30)),
        *(trial(30 + n, "fd", 59.5 + n, draw=n) for n in range(6)),
        *(trial(30 + n, "fd", None, "FAIL", draw=n, failure=diverged) for n in range(6, 30)),
    ]
    report = told(trials)
    assert (compared(report).pairs.draws, compared(report).pairs.failed) == (30, 24)
    assert compared(report).verdict == "second"
    assert report.conclusion.startswith(
        "On the 30 draws that ended in both, 24 of them by a failure, eld is better than fd (Wilcoxon, p < "
    )


def test_what_pruning_left_does_not_speak_for_all_draws() -> None:
    trials = [
        trial(
            number,
            arm,
            (60.0 if arm == "fd" else 61.0) + number / 100,
            "COMPLETE" if draw < 8 else "PRUNED",
            draw=draw,
        )
        for draw in range(20)
        for number, arm in ((2 * draw, "fd"), (2 * draw + 1, "eld"))
    ]
    without, counted = told(trials), told(trials, baseline=60.5)
    assert (compared(without).test, compared(without).verdict) == ("none", "too_few")
    assert without.conclusion == (
        "8 of 20 draws that ended in both fd and eld were pruned in neither: too few to speak for all of "
        "them."
    )
    assert compared(counted).test == "counts"


def test_a_number_that_is_there_already_is_not_asked_for() -> None:
    """Thirty draws of six arms: each of 15 comparisons is tested at 5 % / 15."""
    arms = {f"a{number}": {"kappa": number / 10} for number in range(6)}
    values = {arm: [60.0 + n + place * (n % 3 - 0.55) for n in range(30)] for place, arm in enumerate(arms)}
    report = report_of(values, arms=arms)
    for comparison in report.comparisons:
        needed = comparison.pairs.draws_for_power
        if comparison.verdict == "open":
            assert comparison.further == (needed - 30 if needed is not None and needed > 30 else None)
        else:
            assert comparison.further is None
    alone = report_of({"a0": values["a0"], "a1": values["a1"]}, arms={"a0": arms["a0"], "a1": arms["a1"]})
    one, of_many = (compared(told, "a0", "a1").pairs.draws_for_power for told in (alone, report))
    assert one is not None
    assert of_many is not None
    assert of_many > one, "a stricter level needs more draws"


def test_shares_of_one_and_none_are_not_called_alike() -> None:
    arms = {"a": {"kappa": 0.1}, "b": {"kappa": 0.2}, "c": {"kappa": 0.3}}
    trials = [
        trial(10 * place + n, arm, 60.0 if arm == "a" else 70.0, draw=100 * place + n)
        for place, arm in enumerate(arms)
        for n in range(4)
    ]
    report = told(trials, arms=arms, baseline=65)
    sentence = compared(report, "a", "b").sentence
    assert "does not tell them apart (Fisher's exact test, p = 0.086, corrected for 3" in sentence
    assert "from what is seen no number of further ones can be told" in sentence


def test_a_baseline_that_is_an_arm_falls_with_its_trials_and_no_number_is_told() -> None:
    arms = {arm: {"kappa": kappa} for arm, kappa in (("a", 0.1), ("plain", 0.2), ("b", 0.3))}
    trials = [
        *(trial(n, "a", 50.0 if n < 3 else 70.0, draw=n) for n in range(20)),
        *(trial(100 + n, "b", 50.0 if n < 1 else 70.0, draw=100 + n) for n in range(20)),
        trial(300, "plain", 60.0, draw=300),
    ]
    given = told(trials, arms=arms, baseline=60.0)
    of_an_arm = told(trials, arms=arms, baseline="plain")
    assert compared(given, "a", "b").further is not None
    assert compared(of_an_arm, "a", "b").further is None
    assert "taken as fixed" in of_an_arm.caption


def test_what_the_numbers_take_no_account_of_is_said() -> None:
    report = report_of(
        {"fd": BETTER},
        budget={"trials": 20, "target": 50.0},
        space={"kappa": {"type": "uniform", "low": 0, "high": 1}},
        points=[{"kappa": 0.1}],
    )
    assert any("reaches its target" in remark for remark in report.remarks)
    assert "Draws that were chosen by hand, and count as if they were drawn: 1." in report.remarks


def test_too_few_trials_for_any_claim_are_called_that() -> None:
    report = report_of({"fd": [10.0] * 3, "eld": [30.0] * 3}, baseline=20)
    assert (compared(report).test, compared(report).p, compared(report).verdict) == ("none", None, "too_few")
    assert report.conclusion == (
        "3 draws have come to an end in both fd and eld; 3 and 3 trials have ended: too few for any claim, "
        "whatever the outcome; six draws that differ are the least."
    )


def test_which_test_decides_depends_on_how_many_trials_there_are_and_not_on_how_they_came_out() -> None:
    for spread in (1.0, 1.5):
        few = report_of({"fd": [10.0] * 5, "eld": [10.0 * spread] * 5}, baseline=12)
        many = report_of({"fd": BETTER, "eld": [value * spread * 1.001 for value in BETTER]}, baseline=62)
        assert (compared(few).test, compared(many).test) == ("counts", "pairs")


def test_several_comparisons_are_corrected_for_their_number() -> None:
    """p = 0.031 for each of three pairs of arms: a claim for one, none for three."""
    arms = {"a": {"kappa": 0.1}, "b": {"kappa": 0.2}, "c": {"kappa": 0.3}}
    values = {"a": BETTER[:6], "b": [v * 1.01 for v in BETTER[:6]], "c": [v * 1.02 for v in BETTER[:6]]}
    report = report_of(values, arms=arms)
    assert {c.pairs.p for c in report.comparisons} == {0.03125}
    assert [c.p for c in report.comparisons] == [0.09375] * 3
    assert report.conclusion == "Of 3 comparisons of two arms, none tells them apart."
    alone = report_of({"a": values["a"], "b": values["b"]}, arms={"a": arms["a"], "b": arms["b"]})
    assert compared(alone, "a", "b").verdict == "first"
    assert "corrected for 3 comparisons" in compared(report, "a", "b").sentence
    assert "corrected" not in compared(alone, "a", "b").sentence


def test_of_several_comparisons_those_that_settle_something_are_told() -> None:
    arms = {"a": {"kappa": 0.1}, "b": {"kappa": 0.2}, "c": {"kappa": 0.3}}
    mixed = [v * (1.03 if n % 2 else 0.97) for n, v in enumerate(WORSE)]
    report = report_of({"a": BETTER, "b": WORSE, "c": mixed}, arms=arms)
    assert report.conclusion.startswith("On the 10 draws that ended in both a is better than b: ")
    assert "2 of 3 comparisons are open." in report.conclusion
    open_ones = [comparison.sentence for comparison in report.comparisons if comparison.verdict == "open"]
    assert all(" as it looks (its perplexity is " in sentence for sentence in open_ones)
    better = {"a": BETTER, "b": WORSE, "c": [v + (0.5 if n % 2 else -0.5) for n, v in enumerate(WORSE)]}
    assert " 1 of 3 comparisons is open." in report_of(better, arms=arms).conclusion


def test_a_report_of_nothing_says_so() -> None:
    assert told([]).conclusion == "No trial has ended yet."
    alone = told([trial(0, "fd", 60.0)], arms={"fd": {"kappa": 0.1}})
    assert alone.conclusion == "There is one arm, fd: nothing is compared."


def test_a_sweep_that_has_not_ended_is_not_to_be_looked_at_until_it_pleases() -> None:
    trials = trials_of({"fd": BETTER, "eld": WORSE})
    assert any("has not ended" in remark for remark in told(trials, "running").remarks)
    assert not any("has not ended" in remark for remark in told(trials).remarks)


def test_trials_that_were_pruned_or_stopped_are_spoken_of() -> None:
    trials = [trial(0, "fd", 60.0, "PRUNED"), trial(2, "fd", 61.0, stopped=True)]
    remarks = " ".join(told(trials).remarks)
    assert "Pruned trials count with the best epoch" in remarks
    assert "Ended on request, before their time, and counted as they stood: 1." in remarks


# Forms.


@pytest.fixture
def report() -> ReportView:
    return report_of({"fd": [10.0, 30.0], "eld": [25.0, 35.0]}, baseline=20, name="a sweep")


def test_markdown_has_a_line_for_each_arm_with_as_many_cells_as_the_head(report: ReportView) -> None:
    table = [line for line in to_markdown(report).splitlines() if line.startswith("|")]
    assert len(table) == 2 + 2
    assert len({line.count("|") for line in table}) == 1
    assert table[2] == "| fd | 2 | 2 | 0 | 0 | 10.00 | – | – | 1 of 2 |"


def test_markdown_opens_no_tag_no_link_and_no_cell_for_a_name() -> None:
    hostile = "<img src=x> | [here](http://x) `code` *loud*\n# head"
    written = to_markdown(report_of({"fd": [10.0]}, name=hostile.replace("\n", " ")))
    first = written.splitlines()[0]
    assert first == r"## \<img src=x\> \| [here\](http\://x) \`code\` \*loud\* \# head"
    assert r"www\.evil.org \@all \~x\~ \&lt;" in to_markdown(
        report_of({"fd": [10.0]}, name="www.evil.org @all ~x~ &lt;")
    )


def test_a_name_is_no_markup_of_the_terminal() -> None:
    console = Console(width=80, file=io.StringIO(), record=True, force_terminal=True)
    console.print(to_rich(report_of({"fd": [10.0]}, name="[/x] [link=http://e]c[/link] :skull: \u202e")))
    printed = console.export_text()
    assert "[/x] [link=http://e]c[/link] :skull: \ufffd" in printed


def test_the_report_has_no_bare_infinity_in_json() -> None:
    same = report_of({"fd": [1.7e308] * 12, "eld": [60.0] * 12}, baseline=1e308)
    document = json.loads(json.dumps(same.model_dump(mode="json"), allow_nan=False))
    assert ReportView.model_validate(document) == same


def test_a_loss_that_no_perplexity_has_is_the_largest_there_is() -> None:
    trials = trials_of({"fd": BETTER, "eld": WORSE})
    trials[3] = trials[3].model_copy(update={"best_valid_loss": 5000.0, "best_valid_perplexity": None})
    pairs = compared(told(trials)).pairs
    assert (pairs.draws, pairs.second_wins) == (10, 1)
    assert pairs.ratio is not None
    assert math.isfinite(pairs.ratio)


def test_of_many_comparisons_the_first_are_written_out_and_the_others_are_counted() -> None:
    arms = {f"a{number}": {"kappa": number / 10} for number in range(8)}
    many = report_of({arm: BETTER for arm in arms}, arms=arms)
    assert len(many.comparisons) == 28
    assert sum(", on the same draws: " in line for line in lines(many)) == 12
    assert "16 more comparisons are in the report as JSON." in list(lines(many))


def test_the_papers_table_fits_into_80_columns() -> None:
    report = report_of({"fd": [60.0] * 14 + [1061.25] * 189, "eld": [60.0] * 6 + [61.0] * 202}, baseline=60.7)
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(to_rich(report), soft_wrap=True)
    printed = console.export_text().splitlines()
    table = [line for line in printed if line.startswith((" arm", " fd", " eld"))]
    assert len(table) == 3
    assert " fd 203 203 0 0 60.00 60.00 60.00 14 of 203 " in " ".join(" ".join(table).split()) + " "
    assert max(map(len, table)) <= 80
