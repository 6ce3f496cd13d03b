"""What a probe has timed tells of all that it has not."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from models.config import AWDLSTMConfig
from regularizers.config import Regularization
from tests.fakes import probe_of
from trials.corpora import NamedCorpus
from trials.spec import TrainingConfig, TrialConfig
from trials.steps import (
    PROBE,
    PROBE_ORDER,
    ProbeOrder,
    StepTimes,
    Timed,
    kind_of,
    mean_random_length,
    operations,
    points_to_probe,
    timed_as,
)
from trials.training import window_lengths

V = 1_000


def config(batch_size: int = 20, bptt: int = 70, regularizer: str = "none", **model: Any) -> TrialConfig:
    return TrialConfig(
        AWDLSTMConfig(**{"embedding_size": 32, "hidden_size": 48, "layers": 2, **model}),
        TrainingConfig(batch_size=batch_size, bptt=bptt, windows="fixed"),
        Regularization(regularizer=regularizer),
    )


def order(*configs: TrialConfig) -> ProbeOrder:
    return ProbeOrder(NamedCorpus(name="sotu"), "cpu", 1, 2, 1.0, points_to_probe(configs))


def epoch(times: StepTimes, of: TrialConfig) -> float:
    found = times.epoch(of, 60.0)
    assert found is not None
    return found.training


def test_what_only_changes_numbers_is_timed_once() -> None:
    alike = [
        replace(
            config(embed_p=p),
            training=TrainingConfig(lr=1 + p, clip=1 + p, epochs=3, weight_decay=p),
            regularization=Regularization("fraternal", kappa=0.1 + p),
        )
        for p in (0.1, 0.2, 0.5)
    ]
    assert len({timed_as(one) for one in alike}) == 1
    assert points_to_probe(alike) == (timed_as(alike[0]),)
    others = [
        config(embed_p=0.0),
        config(batch_size=21),
        config(bptt=71),
        config(hidden_size=49),
        config(regularizer="fraternal"),
        config(regularizer="expectation_linear"),
    ]
    assert len({timed_as(one) for one in [config(), *others]}) == 7


def test_of_many_batch_sizes_the_extremes_and_the_middle_are_timed_the_middle_first() -> None:
    points = points_to_probe(config(batch_size=b) for b in range(5, 86))
    assert [point.training.batch_size for point in points] == [45, 85, 5]


def test_every_kind_has_its_turn_before_any_has_two() -> None:
    names = ["none", "fraternal", "expectation_linear"]
    points = points_to_probe(config(b, regularizer=name) for name in names for b in range(5, 86))
    assert len({kind_of(point) for point in points[:3]}) == 3
    assert len(points) == 9


def test_of_very_many_kinds_some_are_timed_from_the_smallest_to_the_largest() -> None:
    points = points_to_probe(config(hidden_size=h) for h in range(16, 400))
    sizes = [point.model.hidden_size for point in points]
    assert (min(sizes), max(sizes), len(sizes)) == (16, 399, 6)


def test_a_line_gives_back_what_it_was_made_of_and_what_lies_between() -> None:
    """Seconds of a step = 0.01 + L (0.0002 + 0.00003 B)."""

    def seconds(of: TrialConfig) -> float:
        training = of.training
        return 0.01 + training.bptt * (0.0002 + 0.00003 * training.batch_size)

    made = [config(b, bptt) for b in range(10, 90, 7) for bptt in (20, 33, 70)]
    asked = order(*made)
    assert len(asked.points) == 4
    probe = replace(
        probe_of(asked), timed=tuple(Timed(p, (seconds(p),) * 2, 1e-6, 0.0, 0.0) for p in asked.points)
    )
    times = StepTimes(probe)
    for one in made:
        steps = probe.train_tokens // one.training.batch_size - 1
        assert epoch(times, one) == pytest.approx(seconds(one) * steps / one.training.bptt, rel=0.02)


def test_a_kind_that_was_not_timed_takes_what_its_operations_take() -> None:
    made = [config(hidden_size=h) for h in range(16, 400)]
    times = StepTimes(probe_of(order(*made), seconds=1e-11))
    found = [epoch(times, one) for one in made]
    assert found == sorted(found)
    for one, took in zip(made, found, strict=True):
        windows = (60_000 // 20 - 1) / 70
        assert took == pytest.approx(1e-11 * operations(one, V) * windows, rel=0.02)


def test_of_a_kind_of_training_that_was_not_timed_at_all_others_tell() -> None:
    times = StepTimes(probe_of(order(config())))
    told, known = times.epoch(config(regularizer="fraternal"), 60.0), times.epoch(config(), 60.0)
    assert told is not None
    assert known is not None
    assert (told.was_measured, known.was_measured) == (False, True)
    assert told.training == pytest.approx(2 * known.training)


def test_what_is_computed_again_is_an_operation_too() -> None:
    plain = config()
    again = replace(plain, training=replace(plain.training, recompute=True))
    assert operations(plain, V) < operations(again, V) < 1.34 * operations(plain, V)


def test_validation_grows_with_its_text_and_checkpoints_with_the_model() -> None:
    asked = order(config(), config(hidden_size=200))
    few, many = (StepTimes(probe_of(asked, valid_tokens=n)).epoch(config(), 60.0) for n in (20_000, 40_000))
    assert few is not None
    assert many is not None
    assert (many.validation, few.validation) == (pytest.approx(40_000e-6 + 3072e-6), pytest.approx(23_072e-6))
    assert few.training == many.training


def test_checkpoints_in_the_middle_of_long_epochs_take_time_too() -> None:
    slow = StepTimes(probe_of(order(config()), seconds=1e-7))
    often, seldom = slow.epoch(config(), 1.0), slow.epoch(config(), 1e6)
    assert often is not None
    assert seldom is not None
    assert 0 < often.rest - seldom.rest <= often.training / 40


def test_a_text_that_is_too_short_for_so_many_columns_has_no_epoch() -> None:
    times = StepTimes(probe_of(order(config())))
    assert times.epoch(config(batch_size=40_000), 60.0) is None


@pytest.mark.parametrize("bptt", [5, 7, 12, 35, 70, 400])
def test_the_mean_of_random_windows_is_that_of_those_that_training_draws(bptt: int) -> None:
    training = TrainingConfig(bptt=bptt, windows="random")
    drawn = window_lengths(400_000, training, np.random.default_rng(1))
    assert mean_random_length(bptt) == pytest.approx(400_000 / len(drawn), rel=0.01)


def test_orders_and_probes_travel_as_json() -> None:
    asked = order(config(), config(regularizer="fraternal"))
    assert PROBE_ORDER.validate_json(PROBE_ORDER.dump_json(asked)) == asked
    found = probe_of(asked)
    assert PROBE.validate_json(PROBE.dump_json(found)) == found
