"""A service's forecasts: the probe asked for where none is known, and what follows from it put together."""

import hashlib
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from statistics import fmean

import anyio

from service.database import now
from service.errors import ClientGone, InvalidSpec, Problem, Stopping, TooManyForecasts
from service.fitting import (
    SERVICE,
    TORCH,
    checkpoints_bytes,
    corpus_stamp,
    database_bytes,
    disk_of,
    disk_problems,
    is_long_enough,
    memory_problems,
    slots,
    text_problems,
)
from service.forecast_schemas import (
    ArmForecast,
    BandView,
    CorpusView,
    DiskForecast,
    Forecast,
    MemoryForecast,
    ProbeView,
    SampledView,
)
from service.launcher import Capacity, ProbeFailed, TextUnusable
from service.sweeps import SweepController
from service.turns import Turns
from trials.forecast import Band, Load, Overheads, Simulated, epoch_band, simulate
from trials.memory import bytes_on
from trials.plan import Planned, plan
from trials.rows import Remembered
from trials.spec import SweepSpec
from trials.steps import PROBE_ORDER, EpochTime, Probe, ProbeOrder, StepTimes, points_to_probe

log = logging.getLogger(__name__)

KEPT = timedelta(hours=1)
"""A probe; after it the machine may have become another."""
MOST_WAITING = 4
"""Requests that wait for others' probes."""
SAMPLES = 12
LOOK_S = 0.5
"""How often it is looked whether the client is there still."""
BUSY = 0.9
"""Of a probe's share of the cores: less is worth a word."""
NOT_TIMED = 0.1
"""Standard deviation of the logarithm of a time that was not measured, but follows from others."""
NONE_IS_VALID = "nothing is known of its times: no configuration that it draws is valid"
forecasting = Turns("forecasts", 1)
"""Each simulates for up to half a second."""


@dataclass(frozen=True)
class _Known:
    probe: Probe
    at: datetime


class Forecasts:
    """Of one service."""

    def __init__(self, controller: SweepController, overheads: Overheads | None = None) -> None:
        self._controller = controller
        self._overheads = overheads or Overheads()
        self._probes: Remembered[bytes, _Known] = Remembered(64, lambda _: 0)
        self._probing = Turns("probes", 1)
        self._waiting = 0
        self._is_closed = False

    async def forecast(self, spec: SweepSpec, is_gone: Callable[[], Awaitable[bool]]) -> Forecast:
        """Of a spec that was checked. Raises InvalidSpec where it cannot fit, TooManyForecasts; ClientGone
        where `is_gone` comes to say so while a probe is made, Stopping where the service is closed then.
        """
        capacity = self._controller.capacity()
        planned, order = await forecasting.take(_planned, spec, capacity)
        if not planned:
            return await forecasting.take(
                self._put_together, spec, capacity, planned, None, [NONE_IS_VALID], False
            )
        key = _key(order)
        known, unknown, from_memory = self._find(key), list[str](), True
        if known is None:
            try:
                async with _until(self._is_gone(is_gone)):
                    known, from_memory = await self._probe(key, order)
            except TextUnusable as error:
                problem = Problem(f"/corpus{error.pointer}", "corpus_unusable", str(error))
                raise InvalidSpec([problem]) from error
            except ProbeFailed as error:
                unknown = [f"times, and all that needs the vocabulary, are not known: {error}"]
        if known is not None:
            self._controller.vocabularies.keep(corpus_stamp(spec.corpus), known.probe.vocabulary_size)
        return await forecasting.take(
            self._put_together, spec, capacity, planned, known, unknown, from_memory
        )

    def close(self) -> None:
        """Call probes off: none is waited for."""
        self._is_closed = True

    def _is_gone(self, is_gone: Callable[[], Awaitable[bool]]) -> Callable[[], Awaitable[bool]]:
        async def look() -> bool:
            self._require_open()
            return await is_gone()

        return look

    def _require_open(self) -> None:
        if self._is_closed:
            raise Stopping("the service is being stopped, and nothing is measured any more")

    def _find(self, key: bytes) -> _Known | None:
        known = self._probes.find(key)
        return known if known is not None and now() - known.at < KEPT else None

    async def _probe(self, key: bytes, order: ProbeOrder) -> tuple[_Known, bool]:
        """Raises ProbeFailed, TooManyForecasts, Stopping."""
        if self._waiting > MOST_WAITING:
            raise TooManyForecasts(
                f"{self._waiting} other forecasts wait for their probes: ask again later, or leave the times "
                "out with forecast=false"
            )
        self._waiting += 1
        try:
            async with self._probing.of_this_loop():
                if (known := self._find(key)) is not None:  # by who had the turn before
                    return known, True
                self._require_open()
                probe = await self._controller.probe(order)
                known = _Known(probe, now())
                return known if probe.is_of_the_moment else self._probes.keep(key, known), False
        finally:
            self._waiting -= 1

    def _put_together(
        self,
        spec: SweepSpec,
        capacity: Capacity,
        planned: Sequence[Planned],
        known: _Known | None,
        unknown: list[str],
        from_memory: bool,
    ) -> Forecast:
        """Raises InvalidSpec."""
        probe = known.probe if known is not None else None
        types = probe.vocabulary_size if probe is not None else None
        disk = disk_of(self._controller.store_url)
        if probe is not None:
            problems = [
                *text_problems(spec, probe.train_tokens),
                *memory_problems(spec, planned, capacity, probe.vocabulary_size),
                *disk_problems(spec, planned, probe.vocabulary_size, disk),
            ]
            if problems:
                raise InvalidSpec(problems)
            unknown = [*unknown, *probe.not_timed]
            failing = [trial for trial in planned if not _has_text(trial, probe)]
            if failing:
                unknown.append(
                    f"{len(failing)} of the first {len(planned)} trials will fail: {probe.train_tokens:,} "
                    "training tokens are too few for their batch_size"
                )
        times, simulated, drift = self._simulated(spec, capacity, planned, probe)
        share, slowdown = 1.0 if probe is None else probe.share, self._overheads.slowdown
        if probe is not None and simulated is None:
            unknown.append("times are not known: the probe has timed none of the configurations")
        seconds = [None if time is None else slowdown * time.seconds for time in times]
        at_once = slots(spec, capacity)
        hours = spec.resources.gpus or max(1, int(spec.resources.cpus))
        device = spec.resources.device
        peaks = [None if types is None else bytes_on(device, trial.config, types) for trial in planned]
        largest = max((peak for peak in peaks if peak is not None), default=None)
        available = capacity.gpu_bytes if spec.resources.gpus else capacity.memory_bytes
        memory = MemoryForecast(
            per_trial_bytes=largest,
            at_once=at_once,
            all_trials_bytes=None if largest is None else at_once * (largest + TORCH),
            service_bytes=SERVICE,
            available_bytes=_finite(available),
        )
        return Forecast(
            wall_s=_view(simulated.wall_s if simulated else None),
            device="gpus" if spec.resources.gpus else "cpu_threads",
            device_hours=_view(simulated.busy_s if simulated else None, hours / 3600),
            epochs=_view(simulated.epochs if simulated else None),
            samples=[
                SampledView(
                    number=trial.number,
                    arm=trial.arm,
                    draw=trial.draw,
                    seed=trial.seed,
                    params=dict(trial.params),
                    exact=trial.is_exact,
                    epoch_s=_view(epoch_band([epoch_s], drift, share) if epoch_s else None),
                    timed=time is not None and time.was_measured,
                    memory_bytes=peak,
                )
                for trial, time, epoch_s, peak in islice(
                    zip(planned, times, seconds, peaks, strict=True), SAMPLES
                )
            ],
            arms=[_of_arm(spec, arm, planned, seconds, drift, share) for arm in spec.arms],
            corpus=None
            if probe is None
            else CorpusView(
                train_tokens=probe.train_tokens,
                valid_tokens=probe.valid_tokens,
                vocabulary_size=probe.vocabulary_size,
            ),
            memory=memory,
            disk=DiskForecast(
                checkpoints_bytes=None if types is None else checkpoints_bytes(spec, planned, types, at_once),
                database_bytes=database_bytes(spec),
                free_bytes=_finite(disk.free_bytes),
            ),
            probe=None if known is None else _probe_view(known, spec, at_once, from_memory),
            unknown=unknown,
            assumptions=_assumptions(spec, planned, probe, simulated, memory),
        )

    def _simulated(
        self, spec: SweepSpec, capacity: Capacity, planned: Sequence[Planned], probe: Probe | None
    ) -> tuple[list[EpochTime | None], Simulated | None, float]:
        """Each trial's epochs, the whole sweep's time, and how unsure they are: see `simulate`."""
        if probe is None or not probe.timed:
            return [None] * len(planned), None, 0.0
        step_times = StepTimes(probe)
        every_s = spec.retry.checkpoint_every_s
        times = [step_times.epoch(trial.config, every_s) for trial in planned]
        loads = [_load(trial, time) for trial, time in zip(planned, times, strict=True)]
        not_timed = fmean(time is None or not time.was_measured for time in times)
        drift = math.hypot(self._overheads.drift, step_times.spread, NOT_TIMED * not_timed)
        seed = int.from_bytes(hashlib.sha256(spec.model_dump_json().encode()).digest()[:4])
        whole_draws = loads[: len(loads) // len(spec.arms) * len(spec.arms)] or loads
        loads = whole_draws if len(loads) < spec.budget.trials else loads
        at_once = slots(spec, capacity)
        simulated = simulate(spec, loads, at_once, probe.start_s, self._overheads, drift, probe.share, seed)
        return times, simulated, drift


def _planned(spec: SweepSpec, capacity: Capacity) -> tuple[list[Planned], ProbeOrder]:
    planned = plan(spec)
    return planned, ProbeOrder(
        corpus=spec.corpus,
        device=spec.resources.device,
        threads=max(1, int(spec.resources.cpus)),
        processes=slots(spec, capacity),
        gpu_share=spec.resources.gpus or 1.0,
        points=points_to_probe(trial.config for trial in planned),
        stamp=corpus_stamp(spec.corpus).hex(),
    )


def _key(order: ProbeOrder) -> bytes:
    return hashlib.sha256(PROBE_ORDER.dump_json(order)).digest()


@asynccontextmanager
async def _until(is_gone: Callable[[], Awaitable[bool]]) -> AsyncIterator[None]:
    """Ends what is done within once the client is gone, and raises ClientGone; or what `is_gone` raises."""
    failed: Exception | None = None

    async def look() -> None:
        nonlocal failed
        try:
            while not await is_gone():
                await anyio.sleep(LOOK_S)
            failed = ClientGone("whoever asked for the forecast is gone")
        except Stopping as error:
            failed = error
        group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        group.start_soon(look)
        try:
            yield
        except Exception as error:  # a task group would wrap it
            failed = error
        group.cancel_scope.cancel()
    if failed is not None:
        raise failed


def _load(trial: Planned, time: EpochTime | None) -> Load:
    """One that has no epoch fails for its text's length."""
    training = trial.config.training
    if time is None:
        return Load(0.0, 0.0, training.epochs + 1, fails=True)
    begins = {"none": training.epochs + 1, "from-start": 1, "nt-asgd": training.non_monotone_interval + 3}
    return Load(time.seconds, time.validation, begins[training.averaging])


def _has_text(trial: Planned, probe: Probe) -> bool:
    return is_long_enough(probe.train_tokens, trial.config.training.batch_size)


def _of_arm(
    spec: SweepSpec,
    arm: str,
    planned: Sequence[Planned],
    seconds: Sequence[float | None],
    drift: float,
    share: float,
) -> ArmForecast:
    its = [s for trial, s in zip(planned, seconds, strict=True) if trial.arm == arm and s is not None]
    trials = -((list(spec.arms).index(arm) - spec.budget.trials) // len(spec.arms))
    epoch_s = _view(epoch_band(its, drift, share) if its else None)
    return ArmForecast(arm=arm, trials=trials, epoch_s=epoch_s)


def _view(of: Band | None, factor: float = 1.0) -> BandView | None:
    return None if of is None else BandView(**{name: factor * value for name, value in asdict(of).items()})


def _finite(value: float | None) -> int | None:
    return None if value is None or not math.isfinite(value) else int(value)


def _probe_view(known: _Known, spec: SweepSpec, at_once: int, from_memory: bool) -> ProbeView:
    return ProbeView(
        measured_at=known.at.astimezone(UTC),
        from_memory=from_memory,
        took_s=known.probe.took_s,
        start_s=known.probe.start_s,
        device=known.probe.device,
        processes=at_once,
        threads=max(1, int(spec.resources.cpus)),
        configurations=len(known.probe.timed),
        share=known.probe.share,
    )


def _assumptions(
    spec: SweepSpec,
    planned: Sequence[Planned],
    probe: Probe | None,
    simulated: Simulated | None,
    memory: MemoryForecast,
) -> list[str]:
    said = ["No trial fails, and no other sweep or program takes part of the machine: that makes it longer."]
    if probe is not None and probe.share < BUSY:
        said.append(
            f"While it was measured, other work took {1 - probe.share:.0%} of the time: the bands are from "
            "without that to as it was."
        )
    if not all(trial.is_exact for trial in planned):
        said.append(
            f"Sampler {spec.sampler.name} will learn: after its first draws, configurations are examples, "
            "drawn at random."
        )
    if len(planned) < spec.budget.trials:
        said.append(f"The first {len(planned)} trials stand for all {spec.budget.trials}.")
    if spec.pruner.name != "none":
        said.append("Which trials are pruned is drawn at random, at the pruner's own rungs.")
    if spec.budget.target is not None:
        said.append("budget.target may end it sooner.")
    if (
        not spec.resources.gpus
        and memory.all_trials_bytes is not None
        and memory.available_bytes is not None
        and memory.all_trials_bytes + memory.service_bytes > memory.available_bytes
    ):
        said.append(
            f"Not all of its {memory.at_once} trials at once take as much memory as they may: together, and "
            "with the service, that is more than there is. A lower resources.max_concurrent is safe."
        )
    if any(trial.config.training.averaging == "from-start" for trial in planned):
        said.append("Trials that average from-start go on to their last epochs: one that stalls ends sooner.")
    if simulated is not None and simulated.capped:
        said.append(
            f"budget.wall_s ends it before its last trial in {simulated.capped:.0%} of the simulations."
        )
    return said
