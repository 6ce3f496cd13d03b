"""Nothing grows: not with the trials of a driver, nor with the epochs of a training."""

import gc
from itertools import islice
from pathlib import Path

import psutil
import pytest
import torch

from models.config import AWDLSTMConfig
from regularizers.config import Regularization
from tests.leaks import WARM_UP, Sample, grown, no_op_spec, watch
from tests.service_process import running_service, write_corpus
from tests.test_recovery import assert_nothing_left
from trials.corpora import PathCorpus, load_corpus
from trials.spec import TrainingConfig
from trials.training import Training


def samples(**slopes: float) -> list[Sample]:
    """Of trials that each add so much; the first 200 add more."""
    return [
        Sample(
            trials,
            {
                name.replace("_", ", "): slope * trials + min(trials, WARM_UP) + trials % 3
                for name, slope in slopes.items()
            },
        )
        for trials in range(20, 420, 20)
    ]


@pytest.mark.parametrize(
    ("slopes", "what"),
    [
        ({"driver_MiB": 0.005, "raylet_MiB": 0.005, "workers_files": 0.005}, []),
        ({"driver_MiB": 0.05}, ["driver, MiB"]),
        ({"raylet_MiB": 0.03, "GCS_threads": 0.0}, ["raylet, MiB"]),
        ({"workers_files": 0.02, "driver_threads": 1.0}, ["driver, threads", "workers, files"]),
    ],
)
def test_growth_after_the_warm_up_is_noticed_and_that_before_is_not(
    slopes: dict[str, float], what: list[str]
) -> None:
    assert [breach.partition(":")[0] for breach in grown(samples(**slopes))] == what


def test_one_odd_sample_is_no_growth() -> None:
    odd = samples(driver_MiB=0.0)
    odd[-1] = Sample(odd[-1].trials, {"driver, MiB": 900.0})
    assert grown(odd) == []


@pytest.mark.slow
def test_nothing_grows_with_the_trials_of_a_driver_and_nothing_is_left(tmp_path: Path) -> None:
    with running_service(tmp_path / "data") as service:
        sweep_id = service.submit(no_op_spec(write_corpus(tmp_path / "corpus"), 400))
        assert grown(list(watch(service, sweep_id, 20))) == []
        assert service.wait_for_end(sweep_id)["state"] == "succeeded"
        assert_nothing_left(service, sweep_id)


def test_fifty_averaged_epochs_take_no_more_memory_than_the_first_ten(tmp_path: Path) -> None:
    corpus = load_corpus(PathCorpus(path=str(write_corpus(tmp_path, tokens=200))), tmp_path)
    training = Training(
        AWDLSTMConfig(embedding_size=128, hidden_size=128, layers=1),
        TrainingConfig(epochs=100, batch_size=4, bptt=15, non_monotone_interval=0, lr=30.0),
        Regularization("fraternal"),
        len(corpus.vocabulary),
        corpus.train,
        corpus.valid[:100],
        seed=1,
    )
    averaged = (epoch for epoch in training.epochs() if epoch.averaged)
    next(islice(averaged, 9, None))
    after_ten = memory_and_tensors()
    next(islice(averaged, 39, None))
    rss, tensors = memory_and_tensors()
    assert tensors == after_ten[1]
    assert rss - after_ten[0] < 8 * 2**20, "a copy of the model an epoch would be 20 MiB"


def memory_and_tensors() -> tuple[int, int]:
    """Of this process: resident bytes, and how many tensors there are."""
    gc.collect()
    tensors = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
    return psutil.Process().memory_info().rss, tensors
