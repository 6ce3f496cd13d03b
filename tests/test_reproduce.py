"""The paper's tables: what each would run, what is written of it, and that nothing is done twice."""

import json
import math
import subprocess
import sys
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from scipy import stats

from service.cli import with_overrides
from service.client import FraternalClient
from service.errors import CommandFailed
from service.looks import LOG
from service.reproduce import (
    Checkpoints,
    Notebook,
    _require_room,
    _train,
    differing,
    kept_as_it_began,
    labels_of,
    validated,
)
from service.reproduction import (
    Curve,
    Measured,
    Reproduction,
    estimate,
    mean_curve,
    plan,
    result_row,
    stages,
    student_t,
    sweep_to_go_on_with,
    table_json,
    table_markdown,
)
from service.running import Signals, _without_settings
from service.schemas import EpochView, SweepView, TrialCounts
from tests.played_service import played_service
from tests.test_report import AS_OF, trial
from trials.corpora import PUBLISHED, SPLITS, Corpus, Split, Vocabulary
from trials.spec import Resources, SweepSpec
from trials.store import CheckpointStore
from trials.tables import MASK_SAMPLES, SCALES, TABLES, Row, Scale, build_spec

EVERY = [(name, scale) for name in TABLES for scale in SCALES]


def spec_of(name: str, scale: Scale, **changes: Any) -> SweepSpec:
    return validated({**build_spec(TABLES[name], scale), **changes})


# What is run.


@pytest.mark.parametrize(("name", "scale"), EVERY)
def test_a_table_is_one_sweep_of_its_rows_and_seeds(name: str, scale: Scale) -> None:
    table, spec = TABLES[name], spec_of(name, scale)
    assert spec.budget.trials == table.draws[scale] * len(spec.arms)
    assert {row.arm for row in (*table.rows, *table.search)} <= set(spec.arms)
    assert spec.pruner.name == "none", "every row runs to its end"


@pytest.mark.parametrize("name", TABLES)
def test_tiny_is_the_quick_starts_text_and_size_and_small_is_the_papers_text(name: str) -> None:
    tiny, small, paper = (spec_of(name, scale) for scale in SCALES)
    assert getattr(tiny.corpus, "name", None) == "sotu"
    assert (tiny.model.layers, small.model.layers) == (1, 1)
    assert small.corpus == paper.corpus
    assert max(tiny.training.epochs, small.training.epochs) <= 6 < paper.training.epochs


@pytest.mark.parametrize(
    ("name", "data"), [("ptb", "ptb"), ("finetune", "ptb"), ("mc-eval", "ptb"), ("wt2", "wt2")]
)
def test_at_the_papers_scale_the_arms_are_the_presets(name: str, data: str) -> None:
    spec = spec_of(name, "paper")
    for arm in ("awd-lstm", "fraternal"):
        preset = SweepSpec.model_validate({"preset": f"{arm}-{data}"})
        assert spec.trial_config(arm, {}) == preset.trial_config(arm, {})


def test_the_comparison_of_fd_and_eld_at_the_small_scale_is_twenty_paired_draws() -> None:
    spec = spec_of("fd-vs-eld", "small")
    assert (list(spec.arms), spec.budget.trials) == (["fd", "eld"], 40)
    assert (spec.training.epochs, spec.training.bptt) == (3, 70), "a table replaces one value of a section"
    assert spec.space.keys() == SweepSpec.model_validate({"preset": "paper-search"}).space.keys()


def test_below_the_papers_scale_a_table_compares_methods_under_equal_conditions() -> None:
    tiny = spec_of("ptb", "tiny")
    one, other = (tiny.trial_config(arm, {}) for arm in tiny.arms)
    assert one.training == other.training
    assert (other.regularization.regularizer, other.regularization.alpha) == ("fraternal", 0.0)


def test_the_papers_grids_are_searched_at_the_papers_scale_only() -> None:
    paper, tiny = spec_of("activations", "paper"), spec_of("activations", "tiny")
    opened = {arm: sorted(name for name, _ in paper.sampled(arm)) for arm in paper.arms}
    assert opened == {"baseline": [], "tar": ["beta"], "pr": ["kappa"], "ar": ["alpha"], "fd": ["kappa"]}
    assert tiny.space == {}


def test_another_corpus_and_another_number_of_seeds_can_be_asked_for() -> None:
    body = build_spec(TABLES["seeds"], "small", {"path": "/texts/ptb"}, 3)
    assert (body["corpus"], body["budget"]) == ({"path": "/texts/ptb"}, {"trials": 3})


def test_tiny_stays_tiny_on_another_corpus_unless_its_options_are_given() -> None:
    body = build_spec(TABLES["seeds"], "tiny", {"name": "ptb", "valid_tokens": 7})
    limits = build_spec(TABLES["seeds"], "tiny")["corpus"]
    assert body["corpus"] == {**limits, "name": "ptb", "valid_tokens": 7}
    by_path = build_spec(TABLES["seeds"], "tiny", {"path": "x"})["corpus"]
    assert (by_path["train_tokens"], "name" in by_path) == (limits["train_tokens"], False)


def test_building_a_spec_leaves_the_presets_as_they_are() -> None:
    before = json.dumps(build_spec(TABLES["fd-vs-eld"], "paper"))
    build_spec(TABLES["fd-vs-eld"], "tiny", {"path": "x"}, 1)
    assert json.dumps(build_spec(TABLES["fd-vs-eld"], "paper")) == before


def test_what_is_set_in_a_spec_is_set_nowhere_else() -> None:
    before = build_spec(TABLES["fd-vs-eld"], "tiny")
    changed = build_spec(TABLES["fd-vs-eld"], "tiny")
    with_overrides(changed, ["arms.fd.kappa=0.9", "corpus.train_tokens=7", "model.layers=5"])
    assert build_spec(TABLES["fd-vs-eld"], "tiny") == before != changed


def test_a_plan_counts_what_is_trained_and_what_follows() -> None:
    assert plan(TABLES["finetune"], spec_of("finetune", "tiny")) == (
        "6 trials (2 arms), 4 epochs each at most: 24 epochs; then 9 fine-tunings and 15 evaluations"
    )
    assert "then" not in plan(TABLES["fd-vs-eld"], spec_of("fd-vs-eld", "small"))


def test_an_arm_is_measured_once_for_each_of_its_rows() -> None:
    sampled = [(0, masks, sample) for masks in (1, 10, 50) for sample in range(MASK_SAMPLES)]
    assert stages(TABLES["mc-eval"], "awd-lstm") == [(0, 0, 0), *sampled]
    assert stages(TABLES["finetune"], "fraternal") == [(0, 0, 0), (1, 0, 0), (2, 0, 0)]
    assert stages(TABLES["fd-vs-eld"], "fd") == []


# The paper's numbers.

SEARCH_ROW = ("label", "arm", "best", "top5_mean", "top10_mean", "beating", "n")


def test_the_papers_numbers_are_references() -> None:
    def numbers(name: str) -> list[Any]:
        return [(row.valid and row.valid.mean, row.test and row.test.mean) for row in TABLES[name].rows]

    assert numbers("ptb") == [(60.0, 57.3), (58.9, 56.8)]
    assert numbers("wt2") == [(68.6, 65.8), (66.8, 64.1)]
    assert numbers("finetune") == [(60.7, 58.8), (60.0, 57.3), (59.8, 58.0), (58.9, 56.8), (58.5, 56.2)]
    assert numbers("finetune-wt2") == [(69.1, 66.0), (68.6, 65.8), (68.3, 65.3), (66.8, 64.1)]
    assert numbers("mc-eval") == [(92.2, 89.2), (66.2, 63.7), (64.4, 62.1), (60.7, 58.8), (59.8, 58.0)]
    assert set(numbers("ablation") + numbers("activations") + numbers("convergence")) == {(None, None)}
    spreads = [
        score.plus_minus for row in TABLES["mc-eval"].rows[:3] for score in (row.valid, row.test) if score
    ]
    assert spreads == [0.5, 0.5, 0.2, 0.2, 0.1, 0.1]
    assert [asdict(row) for row in TABLES["fd-vs-eld"].search] == [
        dict(zip(SEARCH_ROW, ("Expectation linear dropout", "eld", 59.4, 60.1, 60.5, 6, 208), strict=True)),
        dict(zip(SEARCH_ROW, ("Fraternal dropout", "fd", 59.4, 59.6, 59.9, 14, 203), strict=True)),
    ]


# Statistics.


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 5, 9, 10, 19, 100, 205])
def test_students_t_is_scipys(degrees: int) -> None:
    assert student_t(degrees) == pytest.approx(stats.t.ppf(0.975, degrees), rel=1e-9)


def one_each(values: list[float]) -> dict[int, list[float]]:
    return {number: [value] for number, value in enumerate(values)}


def test_an_interval_of_the_mean_is_scipys() -> None:
    values = [60.3, 60.6, 60.9, 60.5]
    found = estimate(one_each(values))
    assert found is not None
    low, high = stats.t.interval(0.95, 3, loc=np.mean(values), scale=stats.sem(values))
    assert (found.mean - (found.half_width or 0), found.mean + (found.half_width or 0)) == pytest.approx(
        (low, high)
    )


def test_one_seed_has_no_interval_and_none_no_estimate() -> None:
    assert (one := estimate(one_each([60.0]))) is not None
    assert one.half_width is None
    assert estimate({}) is None


def test_a_seed_whose_perplexity_overflows_leaves_no_interval() -> None:
    found = estimate(one_each([60.0, math.inf]))
    assert found is not None
    assert (found.mean, found.half_width) == (math.inf, None)


def test_samples_of_the_masks_count_as_one_trial_and_leave_their_own_spread() -> None:
    found = estimate({0: [60.0, 62.0], 3: [70.0, 74.0]})
    assert found is not None
    assert (found.n, found.mean) == (2, 66.5)
    assert found.half_width == pytest.approx(stats.t.ppf(0.975, 1) * stats.sem([61, 72]))
    assert found.sd_over_masks == pytest.approx((np.std([60, 62], ddof=1) + np.std([70, 74], ddof=1)) / 2)
    assert estimate(one_each([60.0, 61.0])).sd_over_masks is None  # type: ignore[union-attr]


def test_the_spread_over_masks_stands_in_the_table_also_for_a_single_training() -> None:
    result = reproduction("mc-eval", "paper", measured_everywhere("mc-eval", "paper"))
    line = next(line for line in table_markdown(result).splitlines() if line.startswith("| MC10 |"))
    assert "| 0.00 / 0.00 |" in line
    assert "ours valid | ours test | sd over masks |" in table_markdown(result)
    assert "sd over masks |" not in table_markdown(reproduction("finetune", "paper", ()))


def test_the_test_perplexity_of_the_best_is_of_the_trial_that_validation_chose() -> None:
    measured = [Measured(0, 0, 0, math.log(50), math.log(80)), Measured(1, 0, 0, math.log(60), math.log(40))]
    row = result_row(Row("x", "a"), [trial(0, "a", 50.0), trial(1, "a", 60.0)], measured)
    assert row.best_valid == pytest.approx(50)
    assert row.test_of_best == pytest.approx(80), "40 is the lower, but nobody may look at it"


def test_a_row_takes_only_its_own_arm_and_stage() -> None:
    measured = [
        Measured(0, 0, 0, math.log(50), math.log(51)),
        Measured(0, 1, 0, math.log(40), math.log(41)),
        Measured(1, 1, 0, math.log(30), math.log(31)),
        Measured(0, 0, 10, math.log(20), math.log(21)),
    ]
    trials = [trial(0, "a", 50.0), trial(1, "b", 60.0)]
    row = result_row(Row("x", "a", finetunes=1), trials, measured)
    assert row.valid is not None
    assert (row.valid.n, row.valid.mean) == (1, pytest.approx(40))


# What is written.


def reproduction(name: str, scale: Scale, measured: tuple[Measured, ...], **fields: Any) -> Reproduction:
    spec = spec_of(name, scale)
    trials = tuple(
        trial(number, spec.arm_of(number), 100.0 + number, draw=spec.draw_of(number))
        for number in range(spec.budget.trials)
    )
    values = {"corpus": "corpus sotu", "trials": trials, "measured": measured, "curves": (), **fields}
    return Reproduction(TABLES[name], scale, "s1", AS_OF, spec, **{"differs": (), **values})


def measured_everywhere(name: str, scale: Scale) -> tuple[Measured, ...]:
    spec = spec_of(name, scale)
    return tuple(
        Measured(number, finetunes, masks, math.log(100.0 + number), math.log(90.0 + number), sample)
        for number in range(spec.budget.trials)
        for finetunes, masks, sample in stages(TABLES[name], spec.arm_of(number))
    )


@pytest.mark.parametrize(("name", "scale"), EVERY)
def test_a_table_has_the_papers_number_beside_ours_in_every_row(name: str, scale: Scale) -> None:
    result = reproduction(name, scale, measured_everywhere(name, scale))
    written, document = table_markdown(result), table_json(result)
    for row in TABLES[name].rows:
        line = next(line for line in written.splitlines() if line.startswith(f"| {row.label} |"))
        assert (str(row.valid.mean) in line) if row.valid else line.count("–") >= 2
    assert json.loads(json.dumps(document, allow_nan=False))["table"] == name
    assert all(row["valid"]["n"] == result.seeds for row in document["rows"])


@pytest.mark.parametrize("name", TABLES)
def test_a_tiny_table_says_first_that_it_is_not_the_papers(name: str) -> None:
    top = table_markdown(reproduction(name, "tiny", (), differs=("corpus",))).splitlines()[:3]
    assert "This is not the paper's scale, nor its corpus." in " ".join(top)
    assert "one another" in " ".join(top)
    assert "nor its corpus" not in table_markdown(reproduction(name, "tiny", ()))
    assert table_json(reproduction(name, "tiny", ()))["comparable_with_the_paper"] is False


def test_what_could_not_be_measured_is_blank() -> None:
    line = next(
        line
        for line in table_markdown(reproduction("seeds", "tiny", ())).splitlines()
        if line.startswith("| AWD")
    )
    assert line.endswith("| 60.64 ± 0.15 (min 60.33) | 58.32 ± 0.14 (min 58.05) | 0 | – | – | – | – |")


def test_the_search_has_the_whole_report_and_the_papers_rows() -> None:
    result = reproduction("fd-vs-eld", "paper", ())
    written, document = table_markdown(result), table_json(result)
    assert "| Fraternal dropout | 59.4 | 59.6 | 59.9 | 14 of 203 |" in written
    assert "fd better in " in written
    assert document["report"]["comparisons"][0]["counts"]["p"] == 1.0


def test_a_search_without_a_baseline_says_how_to_get_one() -> None:
    written = table_markdown(reproduction("fd-vs-eld", "small", ()))
    epochs = spec_of("fd-vs-eld", "small").training.epochs
    assert f"reproduce seeds --scale small --set training.epochs={epochs}`" in written


def test_curves_are_means_over_the_seeds_as_far_as_all_go() -> None:
    def epochs(*losses: float) -> list[EpochView]:
        return [EpochView.model_construct(train_loss=loss + 1, valid_loss=loss, ar=loss) for loss in losses]

    curve = mean_curve("fd", [epochs(math.log(10), math.log(4), 0.0), epochs(math.log(20), math.log(6))])
    assert curve.valid == pytest.approx((15, 5))
    assert curve.train == pytest.approx((15 * math.e, 5 * math.e))
    assert curve.activation == pytest.approx(((math.log(10) + math.log(20)) / 2, math.log(24) / 2))


def test_curves_are_shown_to_their_last_epoch() -> None:
    curve = Curve(
        "fd",
        train=tuple(np.arange(25.0) + 200),
        valid=tuple(np.arange(25.0) + 100),
        activation=(0.5,) * 24 + (0.25,),
    )
    written = table_markdown(reproduction("ablation", "tiny", (), curves=(curve,)))
    assert "| 25 |" in written
    assert "224.0/124.0 |" in written
    assert "hidden activation after" not in written
    written = table_markdown(reproduction("activations", "tiny", (), curves=(curve,)))
    assert "| 0.5000 | 0.2500 |" in written


# Going on.


def view(sweep_id: str, state: str, labels: dict[str, str]) -> SweepView:
    counts = TrialCounts(budget=1, running=0, waiting=0, complete=0, pruned=0, failed=0)
    return SweepView.model_construct(
        id=sweep_id, labels=labels, state=state, trials=counts, created_at=datetime.now(UTC)
    )


def test_the_newest_sweep_of_the_same_table_that_is_not_lost_is_gone_on_with() -> None:
    mine, other = {"reproduces": "ptb", "scale": "tiny"}, {"reproduces": "ptb", "scale": "small"}
    sweeps = [
        view("lost", "failed", mine),
        view("given-up", "cancelled", mine),
        view("another", "running", other),
        view("newer", "running", mine),
        view("older", "succeeded", mine),
    ]
    found = sweep_to_go_on_with(sweeps, mine)
    assert found is not None
    assert found.id == "newer"
    assert sweep_to_go_on_with(sweeps[:3], mine) is None


def test_a_finished_sweep_is_not_trained_again() -> None:
    assert sweep_to_go_on_with([view("a", "succeeded", {"x": "y"})], {"x": "y"}) is not None


@pytest.mark.parametrize(
    ("field", "value", "same"),
    [
        ("baseline", 150.0, True),
        ("retry", {"max_failures": 1}, True),
        ("training", {"epochs": 3}, False),
        ("budget", {"trials": 2}, False),
        ("sampler", {"seed": 1}, False),
        ("corpus", {"name": "sotu"}, False),
        ("resources", {"cpus": 2}, True),
        ("resources", {"gpus": 1}, False),
    ],
)
def test_a_sweep_is_found_again_if_its_trials_would_be_the_same(field: str, value: Any, same: bool) -> None:
    before = labels_of(TABLES["seeds"], "tiny", spec_of("seeds", "tiny"), text("a"))
    after = labels_of(TABLES["seeds"], "tiny", spec_of("seeds", "tiny", **{field: value}), text("a"))
    assert (before == after) is same


def test_a_sweep_is_found_again_by_its_text_wherever_that_lies() -> None:
    here, there = (spec_of("seeds", "small", corpus={"path": path}) for path in ("/here", "/there"))
    found = labels_of(TABLES["seeds"], "small", here, text("a"))
    assert labels_of(TABLES["seeds"], "small", there, text("a")) == found
    assert labels_of(TABLES["seeds"], "small", here, text("b")) != found


def test_what_differs_from_the_paper_is_named_and_then_nothing_is_comparable() -> None:
    paper = spec_of("seeds", "paper")
    ptb = replace(text("a"), sha256=PUBLISHED["ptb"].sha256)
    by_path = spec_of("seeds", "paper", corpus={"path": "/ptb"})
    shorter = spec_of("seeds", "paper", training={**asdict(paper.training), "epochs": 1})
    cut = spec_of("seeds", "paper", corpus={"name": "ptb", "train_tokens": 1000})
    table = TABLES["seeds"]
    assert differing(table, paper, ptb) == differing(table, by_path, ptb) == ()
    assert differing(table, shorter, ptb) == ("training",)
    pruned = spec_of("seeds", "paper", pruner={"name": "successive_halving"}, budget={"trials": 3})
    assert differing(table, pruned, ptb) == ("pruner", "number of draws")
    assert differing(table, paper, text("a")) == differing(table, cut, ptb) == ("corpus",)
    for differs in ((), ("training", "corpus")):
        result = reproduction("seeds", "paper", (), differs=differs)
        assert table_json(result)["comparable_with_the_paper"] is (not differs)
        said = "training, corpus differ" in table_markdown(result).splitlines()[2]
        assert said is bool(differs)
    assert not table_json(reproduction("seeds", "tiny", ()))["comparable_with_the_paper"]


def test_a_service_of_ones_own_has_none_of_the_settings_of_another() -> None:
    settings = {"FRATERNAL_DATABASE_URL": "postgresql://", "FRATERNAL_STORE_URL": "s3://"}
    assert _without_settings({**settings, "PATH": "/bin"}) == {"PATH": "/bin"}


def text(digest: str) -> Corpus:
    """A corpus of one word, and of this digest."""
    ids = np.zeros(3, np.int32)
    digests: dict[Split, str] = dict.fromkeys(SPLITS, digest)
    return Corpus(Vocabulary(("a",)), ids, ids, ids, unk_counts={}, sha256=digests)


def test_an_interrupted_reproduction_goes_on_with_its_sweep(tmp_path: Path) -> None:
    table = TABLES["ablation"]
    body = {**build_spec(table, "tiny", seeds=1), "labels": {"reproduces": "ablation"}}
    with (
        played_service(tmp_path) as http,
        FraternalClient(str(http.base_url)) as client,
        Signals() as signals,
    ):
        first = _train(client, body, table, signals, Console(quiet=True))
        again = _train(client, body, table, signals, Console(quiet=True))
    assert first.sweep.id == again.sweep.id
    assert first.sweep.state == "succeeded"
    assert [curve.arm for curve in first.curves] == list(table.arms)
    assert len(first.curves[0].valid) == first.sweep.spec.training.epochs


def test_what_was_measured_is_not_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "measured.json"
    Notebook(path).add(Measured(3, 1, 0, 4.0, 4.1))
    assert Notebook(path).has(3, 1, 0, 0)
    assert not Notebook(path).has(3, 2, 0, 0)
    assert not Notebook(path).has(3, 1, 0, 1)


def test_a_result_is_not_replaced_by_another_one(tmp_path: Path) -> None:
    labels = {"reproduces": "seeds", "scale": "tiny", "trials": "1"}
    _require_room(tmp_path, labels)
    (tmp_path / "manifest.json").write_text(json.dumps({"labels": labels}))
    _require_room(tmp_path, labels)
    with pytest.raises(CommandFailed, match=r"holds another result: seeds, tiny, .* name another --out"):
        _require_room(tmp_path, {**labels, "trials": "2"})


def test_fine_tuning_twice_starts_from_the_first_and_is_done_once(tmp_path: Path) -> None:
    store, done = CheckpointStore((tmp_path / "store").as_uri()), []
    store.save_best("s", 7, {"model": b"weights"})

    def finetune(file: Path, out: Path) -> None:
        done.append(file.name)
        out.write_bytes(file.read_bytes() + b"+")

    files = Checkpoints(store, "s", 7, tmp_path / "out", finetune)
    twice = files.get(2)
    assert twice.read_bytes().endswith(b"++")
    assert files.get(2) == twice
    assert done == ["s-t00007-finetuned-0.tar", "s-t00007-finetuned-1.tar"]


def test_fine_tuning_that_was_interrupted_leaves_nothing_to_be_taken_for_its_result(tmp_path: Path) -> None:
    store = CheckpointStore((tmp_path / "store").as_uri())
    store.save_best("s", 0, {"model": b"weights"})

    def interrupted(file: Path, out: Path) -> None:
        out.write_bytes(b"half")
        raise KeyboardInterrupt

    files = Checkpoints(store, "s", 0, tmp_path / "out", interrupted)
    with pytest.raises(KeyboardInterrupt):
        files.get(1)
    assert not (tmp_path / "out" / "s-t00000-finetuned-1.tar").exists()


def test_a_spec_that_is_refused_says_where(tmp_path: Path) -> None:
    with pytest.raises(CommandFailed, match="/training/epochs"):
        validated({**build_spec(TABLES["seeds"], "tiny"), "training": {"epochs": 0}})


# Measuring.


def test_a_sweep_that_goes_on_says_what_it_does_not_take_up() -> None:
    began = spec_of("seeds", "tiny")
    asked = began.model_copy(update={"resources": Resources(max_concurrent=1), "baseline": 60.7})
    (said,) = kept_as_it_began(asked, began)
    assert "max_concurrent=None" in said, "what holds, not what was asked for"
    assert kept_as_it_began(began, began) == []


def test_a_sweep_whose_text_has_moved_does_not_go_on_to_fail(tmp_path: Path) -> None:
    body = {**build_spec(TABLES["seeds"], "tiny", {"path": str(tmp_path / "text")}, 1), "labels": {"x": "y"}}
    (tmp_path / "text").mkdir()
    for split in SPLITS:
        (tmp_path / "text" / f"{split}.txt").write_text("a b c d " * 2000)
    with (
        played_service(tmp_path) as http,
        FraternalClient(str(http.base_url)) as client,
        Signals() as signals,
    ):
        client.create(body)
        (tmp_path / "text").rename(tmp_path / "moved")
        moved = {**body, "corpus": {**body["corpus"], "path": str(tmp_path / "moved")}}
        with pytest.raises(CommandFailed, match=f"corpus at {tmp_path / 'text'}, .* put it back"):
            _train(client, moved, TABLES["seeds"], signals, Console(quiet=True))


# End to end.


@pytest.mark.slow
@pytest.mark.sqlite("a service for the length of a command is told of no database")
def test_the_smallest_table_comes_out_of_the_command_line(tmp_path: Path) -> None:
    command = [
        *[
            sys.executable,
            "-m",
            "service.cli",
            "reproduce",
            "seeds",
            "--seeds",
            "2",
            "--out",
            str(tmp_path / "out"),
        ],
        *[
            "--set",
            "training.epochs=1",
            "--set",
            "corpus.train_tokens=3000",
            "--set",
            "corpus.valid_tokens=500",
        ],
        *["--set", "corpus.test_tokens=500"],
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 trials (1 arms), 1 epochs each at most: 2 epochs; then 2 evaluations" in done.stdout
    document = json.loads((tmp_path / "out" / "table.json").read_text())
    assert document["rows"][0]["test"]["n"] == 2
    described = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert set(described["versions"]) == {"python", "fraternal", "torch", "ray", "optuna"}
    assert set(described["corpus"]["sha256"]) == {"train", "valid", "test"}
    assert len(set(described["seeds"].values())) == 2
    assert "This is not the paper's scale, nor its corpus" in (tmp_path / "out" / "table.md").read_text()
    assert "looks at the test split: 2, and 0 before; logged in" in done.stdout
    looks = [json.loads(line) for line in (tmp_path / "out" / "data" / LOG).read_text().splitlines()]
    assert [look["command"] for look in looks] == ["reproduce seeds"] * 2
    assert len({look["sha256"] for look in looks}) == 2
    again = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "looks at" not in again.stdout, "what was measured is not measured again"
    assert "going on with sweep" in again.stdout
    assert json.loads((tmp_path / "out" / "table.json").read_text()) == document
