"""What a driver settles before any trial runs. Whole drivers run in tests/test_recovery.py."""

from pathlib import Path

import pytest
import ray
import torch
from optuna.storages import InMemoryStorage

from tests.fakes import MemoryJournal, open_ledger, spec
from trials.driver import drive, room_for
from trials.spec import Resources


@pytest.mark.parametrize(
    ("cluster", "resources", "room"),
    [
        ({"CPU": 4}, Resources(), 4),
        ({"CPU": 4}, Resources(cpus=1.5), 2),
        ({"CPU": 16, "GPU": 2}, Resources(gpus=1), 2),
        ({"CPU": 16, "GPU": 2}, Resources(gpus=0.25), 8),
        ({"CPU": 16, "GPU": 2}, Resources(gpus=0.6), 2),
        ({"CPU": 3, "GPU": 2}, Resources(gpus=0.25), 3),
        ({"CPU": 1}, Resources(cpus=2), 1),
    ],
)
def test_there_is_room_for_whole_trials_each_on_one_gpu(
    cluster: dict[str, float], resources: Resources, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "cluster_resources", lambda: cluster)
    assert room_for(resources) == room


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_a_gpu_that_torch_cannot_use_is_said_before_any_trial(tmp_path: Path) -> None:
    asked = spec(resources={"gpus": 0.5})
    ledger = open_ledger(asked, InMemoryStorage(), MemoryJournal())
    with pytest.raises(RuntimeError, match=r"finds no CUDA device: .* resources\.gpus 0"):
        drive(ledger, MemoryJournal(), asked.resources, store_url="", data_dir=tmp_path, scratch=tmp_path)
    task = ledger.next_task()
    assert task is not None
    assert (task.device, task.gpu_share) == ("cuda", 0.5)
