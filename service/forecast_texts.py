"""A forecast for a terminal."""

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from service.forecast_schemas import ArmForecast, BandView, Forecast, ProbeView, SampledView
from trials.memory import amount


def show(forecast: Forecast, console: Console) -> None:
    """The first configurations, seconds by arm, then how long and how much in all.

    What is between brackets is the band from P10 to P90.
    """
    console.print(samples_table(forecast.samples))
    if any(arm.epoch_s for arm in forecast.arms):
        console.print(arms_table(forecast.arms))
    for name, value in facts(forecast):
        console.print(f"[bold]{name:<13}[/]{value}", highlight=False, soft_wrap=True)
    if forecast.wall_s is not None:
        console.print("In brackets: P10 to P90.", style="dim")
    for sentence in (*forecast.unknown, *forecast.assumptions):
        console.print(sentence, style="dim", highlight=False, markup=False, soft_wrap=True)


def samples_table(samples: Sequence[SampledView]) -> Table:
    table = Table(title="First configurations", title_justify="left")
    table.add_column("trial", justify="right")
    table.add_column("arm")
    table.add_column("values", ratio=1)
    table.add_column("seconds an epoch", no_wrap=True)
    for sample in samples:
        values = [f"{name} {_value(value)}" for name, value in sample.params.items()]
        words = ", ".join(values) or "as the sweep has them"
        table.add_row(
            str(sample.number),
            sample.arm,
            words if sample.exact else f"for example {words}",
            seconds(sample.epoch_s),
        )
    return table


def arms_table(arms: Sequence[ArmForecast]) -> Table:
    table = Table("arm", "trials", "seconds an epoch", title="All of them", title_justify="left")
    for arm in arms:
        table.add_row(arm.arm, str(arm.trials), seconds(arm.epoch_s))
    return table


def facts(forecast: Forecast) -> Iterator[tuple[str, str]]:
    """(name, value) for each thing that there is to say."""
    if forecast.wall_s is not None:
        wall = forecast.wall_s
        yield "wall time", f"{in_words(wall.p50)} ({in_words(wall.p10)} to {in_words(wall.p90)})"
    if forecast.device_hours is not None:
        unit = "of a GPU" if forecast.device == "gpus" else "of a CPU thread"
        yield "device-hours", f"{banded(forecast.device_hours)} {unit}"
    if forecast.epochs is not None:
        yield "epochs", banded(forecast.epochs)
    disk, memory = forecast.disk, forecast.memory
    if disk.checkpoints_bytes is not None:
        free = "" if disk.free_bytes is None else f"; {amount(disk.free_bytes)} free"
        yield "disk", f"up to {amount(disk.checkpoints_bytes + disk.database_bytes)}{free}"
    if memory.all_trials_bytes is not None and memory.per_trial_bytes is not None:
        there = "" if memory.available_bytes is None else f" of {amount(memory.available_bytes)}"
        yield (
            "memory",
            f"up to {amount(memory.per_trial_bytes)} a trial, {amount(memory.all_trials_bytes)}{there} "
            f"for {memory.at_once} at once; {amount(memory.service_bytes)} for service and driver",
        )
    if forecast.probe is not None:
        yield "measured", measured(forecast.probe)


def measured(probe: ProbeView) -> str:
    how = "remembered from" if probe.from_memory else "at"
    return (
        f"{how} {probe.measured_at:%H:%M:%S} UTC on {probe.device}: {probe.configurations} configurations in "
        f"{probe.took_s:.0f} s, {probe.processes} processes of {probe.threads} "
        f"thread{'' if probe.threads == 1 else 's'} at once, with {probe.share:.0%} of their cores"
    )


def seconds(band: BandView | None) -> str:
    return "–" if band is None else banded(band)


def in_words(seconds: float) -> str:
    """43 s, 2 min 41 s, 27 min, 3 h 20 min or 2 days 5 h: as fine as a band needs."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 20:
        return f"{minutes} min {rest} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    days, hours = divmod(hours, 24)
    return f"{days} days {hours} h"


def banded(band: BandView) -> str:
    """The median, and the band where there is one."""
    middle, low, high = (_value(value) for value in (band.p50, band.p10, band.p90))
    return middle if low == high else f"{middle} ({low} to {high})"


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return "–" if value is None else str(value)
