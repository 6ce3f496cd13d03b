"""What cannot fit is refused, with the place of what makes it so; what can is not."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from service.errors import Problem
from service.fitting import (
    FEWEST_TYPES,
    Disk,
    best_bytes,
    certain_problems,
    checkpoints_bytes,
    corpus_stamp,
    database_bytes,
    disk_of,
    disk_problems,
    last_bytes,
    memory_problems,
    slots,
    text_problems,
    weights_bytes,
)
from service.launcher import Capacity
from tests.fakes import spec
from trials.checkpoints import BestCheckpoint, pack_state
from trials.corpora import PathCorpus, Vocabulary
from trials.memory import GPU_CONTEXT, bytes_on, peak_bytes
from trials.plan import plan
from trials.spec import SweepSpec
from trials.store import CheckpointStore

GIB = 2**30
ANY = Disk(math.inf)
SMALL = {"embedding_size": 8, "hidden_size": 8, "layers": 1}


def machine(gib: float = 8, cpus: float = 2, gpus: float = 0) -> Capacity:
    return Capacity(cpus, gpus, memory_bytes=gib * GIB)


def certain(asked: SweepSpec, there: Capacity, disk: Disk = ANY, types: int | None = None) -> list[Problem]:
    return certain_problems(asked, there, types, disk)


@pytest.mark.parametrize(
    ("changes", "pointer"),
    [
        ({"model": {"hidden_size": 100_000}}, "/model/hidden_size"),
        ({"model": {"embedding_size": 10_000_000, "layers": 1}}, "/model/embedding_size"),
        ({"arms": {"a": {}, "b": {"hidden_size": 100_000}}}, "/arms/b/hidden_size"),
        (
            {
                "space": {"hidden_size": {"type": "choice", "values": [100, 100_000]}},
                "budget": {"trials": 12},
            },
            "/space/hidden_size",
        ),
        (
            {
                "space": {"bptt": {"type": "integer", "low": 9_000, "high": 10_000}},
                "training": {"batch_size": 5_000},
            },
            "/space/bptt",
        ),
        ({"training": {"batch_size": 60_000}, "space": {}}, "/training/batch_size"),
    ],
)
def test_a_configuration_that_never_fits_is_refused_at_what_makes_it_large(
    changes: dict[str, Any], pointer: str
) -> None:
    """Whatever the vocabulary is: with the fewest types there are."""
    (problem,) = certain(spec(**changes), machine())
    assert (problem.pointer, problem.code) == (pointer, "too_little_memory")
    assert "takes up to" in problem.message
    assert "8.0 GiB in all: lower" in problem.message


def test_a_large_choice_that_no_draw_takes_refuses_nothing() -> None:
    space = {"hidden_size": {"type": "choice", "values": [100, 100_000]}}
    for seed in range(20):
        asked = spec(space=space, sampler={"seed": seed}, budget={"trials": 2})
        drawn = plan(asked)[0].config.model.hidden_size
        assert bool(certain(asked, machine())) == (drawn == 100_000)


def test_trials_at_once_that_do_not_fit_together_are_refused_with_how_many_do() -> None:
    asked = spec(space={})
    peak = peak_bytes(plan(asked)[0].config, FEWEST_TYPES)
    there = Capacity(4, 0, memory_bytes=3.5 * peak)
    (problem,) = certain(asked, there)
    assert (problem.pointer, problem.code) == ("/resources/max_concurrent", "too_little_memory")
    assert "set resources.max_concurrent to 3" in problem.message
    fits = asked.model_copy(update={"resources": asked.resources.model_copy(update={"max_concurrent": 3})})
    assert (slots(fits, there), certain(fits, there)) == (3, [])


def test_a_gpus_memory_is_not_the_machines() -> None:
    asked = spec(space={}, resources={"gpus": 0.5}, model={"hidden_size": 100_000})
    assert certain(asked, machine(gpus=1)) == [], "of a cluster's GPUs it is not known"
    assert slots(asked, machine(gpus=2, cpus=16)) == 4


@pytest.mark.parametrize("searched", [{}, {"lr": {"type": "choice", "values": [1.0, 2.0]}}])
def test_a_trial_has_room_in_its_part_of_a_gpu_beside_what_cuda_takes(searched: dict[str, Any]) -> None:
    asked = spec(space=searched, resources={"gpus": 0.25}, model={"hidden_size": 1150})
    needed = max(bytes_on("cuda", trial.config, 10_000) for trial in plan(asked))
    assert needed - GPU_CONTEXT == max(peak_bytes(trial.config, 10_000, "cuda") for trial in plan(asked))
    fits = replace(machine(gib=0.1, cpus=16, gpus=1), gpu_bytes=4.0 * needed)
    assert certain(asked, fits, types=10_000) == []
    (problem,) = certain(asked, replace(fits, gpu_bytes=4.0 * needed - 4), types=10_000)
    assert (problem.code, problem.pointer) == ("too_little_memory", "/training/batch_size")
    assert "for a share of 0.25 of the smallest GPU here: lower batch_size" in problem.message
    assert problem.message.endswith("or raise resources.gpus")


def test_more_types_than_the_fewest_are_refused_once_they_are_known() -> None:
    asked = spec(space={}, model={"layers": 1})
    there = Capacity(1, 0, memory_bytes=1.5 * peak_bytes(plan(asked)[0].config, FEWEST_TYPES))
    assert certain(asked, there) == []
    assert [problem.pointer for problem in certain(asked, there, types=200_000)] == ["/model/embedding_size"]


def test_checkpoints_that_do_not_fit_the_disk_are_refused_unless_few_are_kept() -> None:
    asked = spec(space={}, budget={"trials": 200})
    size = best_bytes(plan(asked)[0].config, FEWEST_TYPES)
    disk = Disk(100 * size, floor_bytes=size)
    (problem,) = certain(asked, machine(), disk)
    assert (problem.pointer, problem.code) == ("/retention/bests_per_arm", "too_little_disk")
    assert "GiB of disk can be filled" in problem.message
    for changes in ({"retention": {"bests_per_arm": 3}}, {"budget": {"trials": 50}}):
        assert certain(spec(**{"space": {}, "budget": {"trials": 200}, **changes}), machine(), disk) == []
    for limit in ({"wall_s": 60}, {"target": 100}):  # may end it before its disk is full
        assert certain(spec(space={}, budget={"trials": 200, **limit}), machine(), disk) == []


def test_room_that_has_to_stay_free_is_no_room() -> None:
    asked = spec(space={}, budget={"trials": 10}, model=SMALL)
    needed = weights_bytes(asked, plan(asked), 100)
    for floor, problems in ((0.0, 0), (1.0, 1)):
        found = disk_problems(asked, plan(asked), 100, Disk(needed, floor))
        assert len(found) == problems


def test_sizes_of_checkpoints_are_those_of_the_files(tmp_path: Path) -> None:
    import numpy as np

    from trials.training import Training

    config = plan(spec(space={}, model=SMALL, training={"averaging": "from-start", "epochs": 1}))[0].config
    ids = np.zeros(4_000, dtype=np.int32)
    training = Training(config.model, config.training, config.regularization, 50, ids, ids[:300], 1)
    next(training.epochs())
    store = CheckpointStore(tmp_path.as_uri())
    words = Vocabulary(tuple(f"word{i}" for i in range(50)))
    store.save_best("s", 0, BestCheckpoint(training.weights_to_use(), {}, words, {}).files())
    store.save_last("s", 0, pack_state(*training.state()))
    for name, said in (("best.tar", best_bytes(config, 50)), ("last.tar", last_bytes(config, 50))):
        size = (tmp_path / "s" / "t00000" / name).stat().st_size
        assert size <= said + 10_240 <= size + 40_000  # a tar has headers, and is filled up to 10 KiB


def test_each_trial_that_runs_has_two_states_for_a_moment() -> None:
    asked = spec(space={}, budget={"trials": 10}, model=SMALL)
    planned = plan(asked)
    one, two = (checkpoints_bytes(asked, planned, 100, at_once) for at_once in (1, 2))
    config = planned[0].config
    assert two - one == best_bytes(config, 100) + 2 * last_bytes(config, 100)
    assert one == 11 * best_bytes(config, 100) + 2 * last_bytes(config, 100)


def test_few_kept_checkpoints_take_less_and_more_epochs_take_rows() -> None:
    asked, kept = (spec(space={}, budget={"trials": 100}, retention=r) for r in ({}, {"bests_per_arm": 2}))
    assert 0 < weights_bytes(kept, plan(kept), 1_000) < weights_bytes(asked, plan(asked), 1_000) / 20
    assert weights_bytes(asked, plan(asked), 1_000) < checkpoints_bytes(asked, plan(asked), 1_000, 2)
    assert checkpoints_bytes(kept, plan(kept), 1_000, 2) < checkpoints_bytes(asked, plan(asked), 1_000, 2) / 5
    longer = spec(space={}, budget={"trials": 100}, training={"epochs": 50})
    assert database_bytes(longer) > database_bytes(asked) > 0


def test_a_store_elsewhere_has_no_disk_of_ours(tmp_path: Path) -> None:
    assert disk_of("s3://bucket/path").room == math.inf
    here = disk_of((tmp_path / "not" / "there yet").as_uri())
    assert 0 < here.room < here.free_bytes < math.inf


def test_a_text_that_is_written_to_has_another_stamp(tmp_path: Path) -> None:
    corpus = PathCorpus(path=str(tmp_path))
    missing = corpus_stamp(corpus)
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.txt").write_text("a b c\n")
    first = corpus_stamp(corpus)
    assert corpus_stamp(corpus) == first != missing
    (tmp_path / "valid.txt").write_text("a b c d\n")
    assert corpus_stamp(corpus) != first
    assert corpus_stamp(PathCorpus(path=str(tmp_path), vocabulary_size=9)) != corpus_stamp(corpus)


def test_as_many_at_once_as_are_advised_fit() -> None:
    """Large and small ones by turns: three may have two large ones, though four have no more."""
    arms = {"large": {"hidden_size": 3_000}, "small": {"hidden_size": 10}}
    asked = spec(space={}, arms=arms, budget={"trials": 8})
    large, small = (peak_bytes(trial.config, 1_000) for trial in plan(asked)[:2])
    there = Capacity(4, 0, memory_bytes=1.5 * (large + small))
    assert 2 * large + small > there.memory_bytes
    (problem,) = memory_problems(asked, plan(asked), there, 1_000)
    assert "set resources.max_concurrent to 2," in problem.message
    advised = spec(space={}, arms=arms, budget={"trials": 8}, resources={"max_concurrent": 2})
    assert memory_problems(advised, plan(advised), there, 1_000) == []


def test_all_that_run_at_once_are_looked_at_however_many() -> None:
    asked = spec(space={}, budget={"trials": 200})
    peak = peak_bytes(plan(asked)[0].config, FEWEST_TYPES)
    (problem,) = certain(asked, Capacity(100, 0, memory_bytes=80 * peak))
    assert problem.pointer == "/resources/max_concurrent"
    assert "100 trials at once" in problem.message


@pytest.mark.parametrize(
    ("changes", "pointer"),
    [
        ({"space": {}, "training": {"batch_size": 40}}, "/training/batch_size"),
        ({"space": {"batch_size": {"type": "integer", "low": 30, "high": 50}}}, "/space/batch_size"),
        ({"arms": {"a": {"batch_size": 40}, "b": {"batch_size": 30}}}, "/arms/b/batch_size"),
    ],
)
def test_a_text_that_is_too_short_for_every_batch_is_a_problem(changes: dict[str, Any], pointer: str) -> None:
    (problem,) = text_problems(spec(**changes), 59)
    assert (problem.pointer, problem.code) == (pointer, "text_too_short")
    assert "lower it to 29" in problem.message
    assert text_problems(spec(**changes), 80) == []


@pytest.mark.parametrize("size", [10**200, 2**31])
def test_a_width_that_no_machine_has_numbers_for_is_out_of_bounds(size: int) -> None:
    for changes in ({"model": {"hidden_size": size}}, {"arms": {"a": {"embedding_size": size}}}):
        with pytest.raises(ValidationError, match="less than or equal to 2147483647"):
            spec(space={}, **changes)


def test_trials_that_fit_one_by_one_are_no_problem_alone() -> None:
    asked = spec(space={}, resources={"max_concurrent": 1})
    peak = peak_bytes(plan(asked)[0].config, 1_000)
    assert memory_problems(asked, plan(asked), Capacity(64, 0, memory_bytes=peak), 1_000) == []
