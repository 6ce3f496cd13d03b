"""How many trials share a GPU: measured by real training, here on CPUs, and then a rule."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

import service.launcher
from models.config import AWDLSTMConfig
from service.launcher import Capacity, LocalLauncher, ProbeFailed, local_capacity
from service.packing import (
    FILE,
    SHAPES,
    Measured,
    Packing,
    measure,
    packing_of,
    read_packings,
    share_of_each,
    step_operations,
    trials_together,
    write_packing,
)
from service.resources import placed, problems_with
from service.settings import Settings
from tests.fakes import spec
from tests.nvml import Card, Nvml, installed
from tests.test_cli import run
from trials.memory import bytes_on
from trials.spec import Resources, SweepRequest
from trials.steps import Probe, ProbeOrder, Timed

H100 = "NVIDIA H100 80GB HBM3"
SMALL, LARGE = SHAPES["small"], SHAPES["ptb, batch 80"]


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    """What GPUs this machine has."""
    service.launcher._known_gpus.cache_clear()
    yield
    service.launcher._known_gpus.cache_clear()


def packing(name: str = H100, **best: int) -> Packing:
    """Of shapes of which so many do best, up to four."""
    shapes = [
        Measured(
            shape=shape,
            operations=step_operations(SHAPES[shape]),
            tokens_per_s={count: 100.0 * min(count, most) for count in (1, 2, 3, 4)},
        )
        for shape, most in best.items()
    ]
    return packing_of(name, "580.65.06", "2.13.0", shapes)


@pytest.mark.parametrize(
    ("rates", "best"),
    [
        ({1: 100.0}, 1),
        ({1: 100.0, 2: 104.0, 3: 90.0}, 1),
        ({1: 100.0, 2: 106.0, 3: 90.0}, 2),
        ({1: 100.0, 2: 180.0, 3: 220.0, 4: 230.0}, 3),
        ({1: 100.0, 2: 90.0, 3: 200.0}, 3),
        ({}, 1),
    ],
)
def test_the_best_number_is_the_fewest_that_do_about_as_much_as_any(
    rates: dict[int, float], best: int
) -> None:
    assert Measured(shape="a", operations=1, tokens_per_s=rates).best == best


def test_a_model_is_packed_as_the_next_larger_one_that_was_measured() -> None:
    measured = packing(small=4, ptb=2, medium=3)
    assert [measured.best_for(SHAPES[name]) for name in ("small", "medium", "ptb")] == [4, 3, 2]
    between = replace(SMALL, model=replace(SMALL.model, embedding_size=100))
    assert step_operations(SMALL) < step_operations(between) < step_operations(SHAPES["medium"])
    assert measured.best_for(between) == 3
    assert measured.best_for(LARGE) == 2, "nothing larger was measured"
    tiny = replace(SMALL, model=AWDLSTMConfig(4, 4, 1))
    assert measured.best_for(tiny) == 4
    assert packing().best_for(SMALL) == 1


def test_work_is_of_a_time_step_whatever_the_windows_length() -> None:
    longer = replace(SMALL, training=replace(SMALL.training, bptt=2 * SMALL.training.bptt))
    assert step_operations(longer) == step_operations(SMALL)
    wider = replace(SMALL, training=replace(SMALL.training, batch_size=2 * SMALL.training.batch_size))
    assert step_operations(wider) == 2 * step_operations(SMALL)


def test_the_largest_model_the_slowest_card_the_memory_and_the_cores_limit_how_many() -> None:
    measured, other = packing(small=4, ptb=2), packing("NVIDIA A40", small=3)
    peak = bytes_on("cuda", SMALL, 50_000)
    assert trials_together([SMALL], [measured], 2.0**37, 16) == 4
    assert trials_together([SMALL, SHAPES["ptb"]], [measured], 2.0**37, 16) == 2
    assert trials_together([SMALL], [measured, other], 2.0**37, 16) == 3
    assert trials_together([SMALL], [measured], 3.5 * peak, 16) == 3
    assert trials_together([SMALL], [measured], 0.5 * peak, 16) == 1
    assert trials_together([SMALL], [measured], 2.0**37, 2) == 2
    assert trials_together([SMALL], [], 2.0**37, 16) == 1


@pytest.mark.parametrize("count", [1, 2, 3, 4, 6, 7, 8, 12, 16, 100])
def test_as_many_as_share_a_gpu_have_room_on_it(count: int) -> None:
    assert Resources(cpus=0.1, gpus=share_of_each(count)).room(100, 1) == count


@pytest.mark.parametrize(
    ("trials", "capacity", "gpus"),
    [
        (20, Capacity(16, 1, gpu_bytes=2.0**37, packings=(packing(small=4),)), 0.25),
        (20, Capacity(16, 1, gpu_bytes=2.0**37), 1),
        (20, Capacity(16, 1, packings=(packing(small=4),)), 1),
        (20, Capacity(6, 2, gpu_bytes=2.0**37, packings=(packing(small=4),)), 0.3333),
        (3, Capacity(16, 2, gpu_bytes=2.0**37, packings=(packing(small=4),)), 0.5),
        (1, Capacity(16, 1, gpu_bytes=2.0**37, packings=(packing(small=4),)), 1),
        (20, Capacity(1, 4, gpu_bytes=2.0**37, packings=(packing(small=4),)), 1),
    ],
)
def test_auto_packs_gpus_as_was_measured(trials: int, capacity: Capacity, gpus: float) -> None:
    asked = TypeAdapter(SweepRequest).validate_python(
        {**spec(budget={"trials": trials}).model_dump(mode="json"), "resources": "auto"}
    )
    chosen = placed(asked, capacity)
    assert chosen.resources == Resources(gpus=gpus)
    assert problems_with(chosen, capacity) == []


def test_what_was_measured_is_kept_for_each_kind_of_card_and_used_where_all_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(Nvml(Card("GPU-1"), Card("GPU-2", "NVIDIA A40", 48)), monkeypatch)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(service.launcher, "torch_version", lambda: "2.13.0")
    first = packing(small=4)
    write_packing(tmp_path / "new", first)
    assert read_packings(tmp_path / "new") == {H100: first}
    assert local_capacity(tmp_path / "new").packings == ()
    other = packing("NVIDIA A40", small=2)
    write_packing(tmp_path / "new", other)
    again = packing(small=3)
    write_packing(tmp_path / "new", again)
    assert local_capacity(tmp_path / "new").packings == (other, again)
    assert local_capacity().packings == ()


@pytest.mark.parametrize("written", [b"", b"{}", b"[1]", b'[{"gpu": "a"}]', b"\xff"])
def test_a_file_that_is_none_of_ours_is_as_if_nothing_were_measured(written: bytes, tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(written)
    assert read_packings(tmp_path) == {}
    write_packing(tmp_path, packing(small=4))
    assert list(read_packings(tmp_path)) == [H100]


@pytest.mark.slow
def test_trials_are_trained_side_by_side_to_measure_it(tmp_path: Path) -> None:
    launcher = LocalLauncher(Settings(data_dir=tmp_path))

    async def found(memory_bytes: float, most: int) -> list[Measured]:
        return [one async for one in measure(launcher, "cpu", memory_bytes, most, {"small": SMALL})]

    (one,) = asyncio.run(found(2.0**40, 2))
    assert (one.shape, one.operations) == ("small", step_operations(SMALL))
    assert list(one.tokens_per_s) == [1, 2]
    assert min(one.tokens_per_s.values()) > 0
    (alone,) = asyncio.run(found(1.5 * bytes_on("cpu", SMALL, 10_000), 16))
    assert list(alone.tokens_per_s) == [1], "there is no memory for two"


def test_the_command_lists_gpus_and_what_is_known_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(
        Nvml(Card("GPU-1"), Card("GPU-2", parts=[Card("MIG-3", f"{H100} MIG 1g.10gb", 10)])), monkeypatch
    )
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(service.launcher, "torch_version", lambda: "2.13.0")
    write_packing(tmp_path, packing(small=4, ptb=2))
    lines = run("gpus", "--data-dir", str(tmp_path)).stdout.splitlines()
    assert lines[:3] == [
        "NVIDIA's driver 580.65.06",
        f"{H100}  80.0 GiB  GPU-1",
        f"{H100} MIG 1g.10gb  10.0 GiB  MIG-3",
    ]
    assert f"{H100}: tokens/s of all trials that share it, {datetime.now(UTC):%Y-%m-%d}" in lines
    (row,) = [line.replace("│", " ").split() for line in lines if "small" in line]
    assert row == ["small", "100", "200", "300", "400", "4"]
    assert lines[-1].startswith(f"{H100} MIG 1g.10gb: `auto` gives each trial its own")
    told = json.loads(run("gpus", "--json", "--data-dir", str(tmp_path)).stdout)
    assert [gpu["uuid"] for gpu in told["gpus"]] == ["GPU-1", "MIG-3"]
    assert told["gpus"][0]["packing"]["shapes"][0]["tokens_per_s"]["4"] == 400
    assert told["gpus"][1]["packing"] is None


class Probing:
    """A launcher whose probes come to what is given, by how many processes they have."""

    def __init__(self, found: dict[int, bool | None]) -> None:
        self._found = found

    async def probe(self, order: ProbeOrder) -> Probe:
        found = self._found[order.processes]
        if found is None:
            raise ProbeFailed("CUDA out of memory")
        (config,) = order.points
        step_s = (0.1,) if found else ()
        timed = [Timed(config=config, step_s=step_s, word_s=1, dynamics_s=1, save_s=1)] if found else []
        return Probe(
            device="cuda: a card", train_tokens=9, valid_tokens=9, vocabulary_size=9, start_s=1, took_s=1,
            share=1, timed=tuple(timed), not_timed=(), is_of_the_moment=False,
        )  # fmt: skip


@pytest.mark.parametrize("third", [None, False])
def test_more_than_have_room_are_too_many_and_cost_nothing_of_what_was_measured(third: bool | None) -> None:
    async def measured(launcher: Any) -> list[Measured]:
        return [one async for one in measure(launcher, "cuda", 2.0**40, 16, {"small": SMALL})]

    (small,) = asyncio.run(measured(Probing({1: True, 2: True, 3: third})))
    assert list(small.tokens_per_s) == [1, 2]
    with pytest.raises(ProbeFailed, match="CUDA out of memory"):
        asyncio.run(measured(Probing({1: None})))


@pytest.mark.parametrize(
    ("version", "nvml", "visible", "words"),
    [
        ("2.13.0+cpu", Nvml(Card("GPU-1")), "0", "is built for CPUs alone; install its CUDA build"),
        ("2.13.0", Nvml(), "0", "NVIDIA's driver is not there"),
        ("2.13.0", Nvml(Card("GPU-1")), "", "CUDA_VISIBLE_DEVICES leaves none"),
    ],
)
def test_a_machine_without_gpus_says_why(
    version: str, nvml: Nvml, visible: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(nvml, monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(service.launcher, "torch_version", lambda: version)
    listed = run("gpus", "--data-dir", str(tmp_path))
    assert listed.exit_code == 0
    assert words in listed.stdout
    measured = run("gpus", "--measure", "--data-dir", str(tmp_path))
    assert measured.exit_code == 1
    assert words in measured.stderr
