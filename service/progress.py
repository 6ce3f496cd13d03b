"""How far something is: one live line on a terminal, now and then a plain one elsewhere."""

import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from service.client import UNREACHABLE_S, FraternalClient, ServiceUnreachable
from service.events import AnyEvent
from service.lifecycle import TERMINAL_STATES
from service.schemas import SweepView
from trials.perplexity import perplexity

SECONDS_BETWEEN_LINES = 5.0
SLICE_S = 0.1
SLICES_BETWEEN_LOOKS = 10
LOOK_S = 10.0
"""A watched sweep is looked at so often where no event asks for it."""


@dataclass(frozen=True)
class Snapshot:
    """One look at a sweep or a training run."""

    title: str
    done: int
    total: int
    unit: str
    """What is counted: trials or epochs."""
    facts: tuple[str, ...]
    elapsed_s: float
    time_left_s: float | None
    """None where nothing is known yet."""

    def line(self) -> str:
        times = f"{duration(self.elapsed_s)} elapsed, {_time_left(self)}"
        return " · ".join([self.title, f"{self.done}/{self.total} {self.unit}", *self.facts, times])


class Epoch(Protocol):
    """What the display needs of a trained epoch."""

    @property
    def epoch(self) -> int: ...
    @property
    def train_loss(self) -> float: ...
    @property
    def valid_perplexity(self) -> float: ...


def of_sweep(sweep: SweepView, now: datetime | None = None) -> Snapshot:
    counts, best = sweep.trials, sweep.best
    facts = [
        f"{counts.running} running",
        f"{counts.complete} complete",
        f"{counts.pruned} pruned",
        f"{counts.failed} failed",
        f"{sweep.epochs_done} epochs",
    ]
    if best is not None:
        facts.append(
            f"best {format_perplexity(best.best_valid_perplexity)} (trial {best.number}, {best.arm})"
        )
    until = sweep.finished_at or now or datetime.now(UTC)
    return Snapshot(
        title=f"{sweep.name or sweep.id} {sweep.state}",
        done=counts.done,
        total=counts.budget,
        unit="trials",
        facts=tuple(facts),
        elapsed_s=(until - (sweep.started_at or sweep.created_at)).total_seconds(),
        time_left_s=0.0 if sweep.state in TERMINAL_STATES else sweep.time_left_s,
    )


def of_training(epochs: Sequence[Epoch], total: int, elapsed_s: float) -> Snapshot:
    facts: tuple[str, ...] = ()
    if epochs:
        last, best = epochs[-1], min(epochs, key=lambda epoch: epoch.valid_perplexity)
        facts = (
            f"train {format_perplexity(perplexity(last.train_loss))}",
            f"valid {format_perplexity(last.valid_perplexity)}",
            f"best {format_perplexity(best.valid_perplexity)} (epoch {best.epoch})",
        )
    left = elapsed_s / len(epochs) * (total - len(epochs)) if epochs else None
    return Snapshot("training", len(epochs), total, "epochs", facts, elapsed_s, left)


class ProgressDisplay:
    """Shows snapshots. On a pipe: a line for a change, at most one in so many seconds, and the last."""

    def __init__(
        self,
        console: Console,
        clock: Callable[[], float] = time.monotonic,
        pause_s: float = SECONDS_BETWEEN_LINES,
    ) -> None:
        self._console = console
        self._clock = clock
        self._pause_s = pause_s
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._shown: Snapshot | None = None
        self._shown_at = -math.inf
        self._latest: Snapshot | None = None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
        elif self._latest is not None and _changed(self._shown, self._latest):
            self._print(self._latest)

    def show(self, snapshot: Snapshot) -> None:
        self._latest = snapshot
        if self._live is not None:
            self._live.update(_bar(snapshot), refresh=True)
        elif _changed(self._shown, snapshot) and self._clock() - self._shown_at >= self._pause_s:
            self._print(snapshot)

    def _print(self, snapshot: Snapshot) -> None:
        self._console.print(snapshot.line(), soft_wrap=True, markup=False, highlight=False)
        self._shown, self._shown_at = snapshot, self._clock()


def follow(
    client: FraternalClient,
    sweep_id: str,
    console: Console,
    pause: Callable[[float], Any] = time.sleep,
    *,
    until_paused: bool = False,
) -> SweepView:
    """Show a sweep's progress until it ends, or is paused; returns how it stands then.

    It is looked at when something happens, at most once a second.
    A service that goes away is waited for. Raises ServiceUnreachable if it does not return, or never was.
    """
    answered_at, was_paused = -math.inf, False
    waited_for: str | None = None
    news = _News(client, sweep_id)
    with ProgressDisplay(console) as display:
        while True:
            try:
                sweep = client.get(sweep_id)
                answered_at = time.monotonic()
                display.show(of_sweep(sweep))
                is_paused = sweep.state == "paused"
                if sweep.state in TERMINAL_STATES or (is_paused and until_paused):
                    return sweep
                if is_paused and not was_paused:
                    why = sweep.state_reason or "as was asked for"
                    console.print(f"paused: {why}\ngo on with: fraternal resume {sweep.id}", markup=False)
                was_paused = is_paused
                waits_for = sweep.state_reason if sweep.state == "running" else None
                if waits_for is not None and waits_for != waited_for:
                    console.print(f"waiting: {waits_for}", markup=False)
                waited_for = waits_for
            except ServiceUnreachable:
                if time.monotonic() - answered_at > UNREACHABLE_S:
                    raise
            news.wait(pause, partial(_redraw, display, sweep))


def _redraw(display: ProgressDisplay, sweep: SweepView) -> None:
    display.show(of_sweep(sweep))


class _News:
    """Whether something has happened in a sweep, by its stream of events, which a thread follows."""

    def __init__(self, client: FraternalClient, sweep_id: str) -> None:
        self._client = client
        self._sweep_id = sweep_id
        self._told = threading.Event()
        self._following = threading.Thread(target=self._follow)

    def wait(self, pause: Callable[[float], Any], tick: Callable[[], None]) -> None:
        """A second, then until something happens; `tick` once a second. Without a stream, a second."""
        if not self._following.is_alive():
            self._told.set()  # something may have happened before the stream was there
            self._following = threading.Thread(target=self._follow, name="news", daemon=True)
            self._following.start()
        for number in range(1, round(LOOK_S / SLICE_S)):
            pause(SLICE_S)
            if number < SLICES_BETWEEN_LOOKS:
                continue
            if self._told.is_set() or not self._following.is_alive():
                break
            if number % SLICES_BETWEEN_LOOKS == 0:
                tick()
        self._told.clear()

    def _follow(self) -> None:
        with suppress(Exception):  # who asks for the sweep itself hears what is wrong
            for _ in self._client.events(self._sweep_id, "newest"):
                self._told.set()


def event_line(event: AnyEvent) -> str:
    """An event for people: when, which, what."""
    detail = event.detail if isinstance(event.detail, dict) else event.detail.model_dump()
    said = ", ".join(f"{name} {_shown(value)}" for name, value in detail.items() if value is not None)
    return f"{event.at:%Y-%m-%d %H:%M:%S}  {event.id:>6}  {event.kind:<16}  {said}".rstrip()


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value).strip().rpartition("\n")[2]


def _changed(before: Snapshot | None, after: Snapshot) -> bool:
    """Whether more than the time has moved on."""
    return before is None or (before.title, before.done, before.facts) != (
        after.title,
        after.done,
        after.facts,
    )


def _bar(snapshot: Snapshot) -> Group:
    head = Table.grid(padding=(0, 1))
    head.add_row(
        Text(snapshot.title, style="bold"),
        ProgressBar(total=max(1, snapshot.total), completed=snapshot.done, width=16),
        f"{snapshot.done}/{snapshot.total} {snapshot.unit}",
        f"{duration(snapshot.elapsed_s)} elapsed, {_time_left(snapshot)}",
    )
    return Group(head, Text(" · ".join(snapshot.facts)))


def format_perplexity(value: float | None) -> str:
    """Two decimals; `inf` where there is no number for it."""
    return "inf" if value is None or not math.isfinite(value) else f"{value:.2f}"


def duration(seconds: float) -> str:
    """1:05 or 2:01:05."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _time_left(snapshot: Snapshot) -> str:
    return "time left unknown" if snapshot.time_left_s is None else f"{duration(snapshot.time_left_s)} left"
