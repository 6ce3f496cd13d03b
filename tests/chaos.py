"""Sweeps that something dies of every few seconds, and a count of what came of them.

    python -m tests.chaos --rounds 20 --seed 1
    python -m tests.chaos --round 7 --seed 1           # that round alone, once more

In each round a service of its own runs one sweep of small trials, over SQLite and PostgreSQL in turn, and its
parts are killed (kill -9) while it runs: the API, which is started again some seconds later; the driver, a
worker, the raylet, the GCS; the database, away for some seconds (SQLite has no server: somebody keeps its
write lock); or the driver is frozen past its lease and wakes. What dies, in which order and after which
pauses is a function of (seed, round); how far the sweep has come by then is up to the machine. Then it is
counted against an undisturbed twin:

zombies      rows still RUNNING or WAITING, live processes of the sweep, and files: the drivers' folder, and
             whatever but a `best` checkpoint lies in the store
duplicates   trials or epochs that are recorded twice, or missing
budget       whether exactly as many trials ended as were asked for, none failed, and the sweep succeeded
weights      whether each trial has the twin's validation losses, and its `best` checkpoint by SHA-256, as
             recorded and as it lies in the store
redone       seconds of training lost, at most: whenever something but the API was killed, how long ago each
             trial under way had saved what it goes on from; of these, for each trial, the longest ones, as
             many as it had attempts beyond its first

Exits with 1 if anything is not as promised, and keeps that round's folder.
"""

import argparse
import hashlib
import math
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import psutil

from service.lifecycle import TERMINAL_STATES
from tests.databases import Database, PostgreSQL, SQLite
from tests.service_process import (
    ServiceProcess,
    find_process,
    left_of,
    running_service,
    small_spec,
    try_to_kill,
    wait_until,
    write_corpus,
)

OPEN = {"RUNNING", "WAITING"}
EPOCHS = 4
PAUSE_S = (3.0, 8.0)
TIMES = {"API": 6, "driver": 6, "worker": 8, "raylet": 4, "GCS": 2, "database": 6, "frozen driver": 1}
"""How often each dies, relative to the others."""
WORDS = {
    "driver": "service.drive",
    "worker": "ray::ResourceTrainable",
    "raylet": "raylet/raylet",
    "GCS": "gcs_server",
}
"""What their command lines say."""
MEAN_AWAY_S = 4.0
MOST_AWAY_S = FROZEN_S = 25.0
"""Longer than a lease."""
MOST_FRUITLESS = 2
"""Drivers in a row that are killed before an epoch was recorded; then the sweep is left alone for a trial's
epochs. After five it would be given up."""
PATIENCE_TO_FIND_S = 15.0
ROUND_S = 900.0


@dataclass(frozen=True)
class Death:
    after_s: float
    """Since the one before, or since the sweep has got on after it; for the first, since it was submitted."""
    of: str
    away_s: float
    """Of the API, the database, a frozen driver: until it is started again, or wakes."""


def deaths(seed: int, number: int) -> Iterator[Death]:
    """Those of a round, without end."""
    random = Random(f"{seed}/{number}")
    while True:
        (of,) = random.choices(list(TIMES), list(TIMES.values()))
        away_s = min(MOST_AWAY_S, random.expovariate(1 / MEAN_AWAY_S))
        yield Death(random.uniform(*PAUSE_S), of, FROZEN_S if of == "frozen driver" else away_s)


@dataclass(frozen=True)
class Outcome:
    """What can be seen of a sweep that has ended."""

    sweep: dict[str, Any]
    trials: list[dict[str, Any]]
    losses: dict[int, list[tuple[int, float]]]
    """(epoch, validation loss) of each trial, as recorded."""
    files: dict[str, str]
    """SHA-256 of every file in the store, by its path below the sweep's folder."""
    left: list[str]
    """Processes and folders of drivers."""

    @property
    def best(self) -> dict[int, tuple[str, str | None]]:
        """SHA-256 of each trial's best checkpoint: as recorded, and as it lies in the store."""
        return {
            trial["number"]: (
                trial["checkpoint_sha256"],
                self.files.get(f"t{trial['number']:05d}/best.tar"),
            )
            for trial in self.trials
        }


def look_at(service: ServiceProcess, sweep_id: str) -> Outcome:
    trials = service.trials(sweep_id)
    folder = service.data_dir / "checkpoints" / sweep_id
    return Outcome(
        sweep=service.sweep(sweep_id),
        trials=trials,
        losses={
            trial["number"]: [
                (epoch["epoch"], epoch["valid_loss"]) for epoch in service.curve(sweep_id, trial["number"])
            ]
            for trial in trials
        },
        files={
            str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        },
        left=left_of(sweep_id),
    )


@dataclass(frozen=True)
class Verdict:
    """What is not as promised, in words."""

    zombies: list[str]
    duplicates: list[str]
    budget: list[str]
    weights: list[str]

    @property
    def faults(self) -> list[str]:
        return [*self.zombies, *self.duplicates, *self.budget, *self.weights]


def judge(outcome: Outcome, twin: Outcome) -> Verdict:
    return Verdict(
        zombies=list(zombies(outcome)),
        duplicates=list(duplicates(outcome, len(twin.trials))),
        budget=list(beside_the_budget(outcome, len(twin.trials))),
        weights=list(not_the_twins(outcome, twin)),
    )


def zombies(outcome: Outcome) -> Iterator[str]:
    for trial in outcome.trials:
        if trial["state"] in OPEN:
            yield f"trial {trial['number']} is {trial['state']}"
    for each in [*outcome.left, *(path for path in outcome.files if not path.endswith("/best.tar"))]:
        yield f"{each} is left"


def duplicates(outcome: Outcome, budget: int) -> Iterator[str]:
    numbers = [trial["number"] for trial in outcome.trials]
    if numbers != list(range(budget)):
        yield f"its trials have the numbers {numbers}"
    for number, losses in outcome.losses.items():
        if (epochs := [epoch for epoch, _ in losses]) != list(range(1, EPOCHS + 1)):
            yield f"trial {number} has the epochs {epochs}"


def beside_the_budget(outcome: Outcome, budget: int) -> Iterator[str]:
    ended = [trial for trial in outcome.trials if trial["state"] not in OPEN]
    if len(ended) != budget:
        yield f"{len(ended)} trials ended, of {budget}"
    for trial in ended:
        if trial["state"] == "FAIL":
            yield f"trial {trial['number']} failed: {trial['failure']}"
    if outcome.sweep["state"] != "succeeded":
        yield f"the sweep is {outcome.sweep['state']}: {outcome.sweep['state_reason']}"


def not_the_twins(outcome: Outcome, twin: Outcome) -> Iterator[str]:
    for number, best in twin.best.items():
        found, losses = outcome.best.get(number), outcome.losses.get(number)
        if found != best or len(set(best)) != 1:
            yield f"trial {number} has the checkpoint {found}, its twin {best}"
        if losses != twin.losses[number]:
            yield f"trial {number} has the losses {losses}, its twin {twin.losses[number]}"


@dataclass
class Story:
    """What happened in a round."""

    number: int
    database: str
    deaths: list[str] = field(default_factory=list)
    ages: dict[int, list[float]] = field(default_factory=dict)
    """By trial: at each death, seconds since it had saved what it would go on from."""
    attempts: dict[int, int] = field(default_factory=dict)
    """By trial: how many it took."""
    seconds: float = 0.0
    drivers: int = 0
    verdict: Verdict = field(default_factory=lambda: Verdict([], [], ["it did not end"], ["it did not end"]))

    @property
    def redone_s(self) -> float:
        """At most so much was trained again: nothing that ended in no new attempt was."""
        again = {number: attempts - 1 for number, attempts in self.attempts.items() if attempts > 1}
        return sum(sum(sorted(self.ages.get(number, []))[-count:]) for number, count in again.items())


class Disturbance:
    """Does to one sweep what a round has in store for it."""

    def __init__(self, service: ServiceProcess, database: Database, sweep_id: str, story: Story) -> None:
        self._service = service
        self._database = database
        self._sweep_id = sweep_id
        self._story = story
        self._began = time.monotonic()
        self._cut_at: dict[int, float] = {}
        """When the training of a trial may have been cut off last."""
        self._away: dict[str, threading.Timer] = {}
        self._sweep: dict[str, Any] = {"state": "queued", "epochs_done": 0}
        self._fruitless, self._epochs_then = 0, 0
        self.api_away_s = 0.0

    def run(self, deaths: Iterator[Death]) -> None:
        """Until the sweep has ended and everything is back."""
        try:
            while not self._has_ended():
                self._suffer(next(deaths))
        finally:
            for timer in self._away.values():
                timer.join()

    def _suffer(self, death: Death) -> None:
        if self._fruitless >= MOST_FRUITLESS:
            self._until(lambda: self._sweep["epochs_done"] >= self._epochs_then + EPOCHS, math.inf)
            self._fruitless = 0
        self._until(lambda: False, death.after_s)
        self._until(lambda: self._strike(death), PATIENCE_TO_FIND_S)

    def _until(self, is_so: Callable[[], bool], most_s: float) -> None:
        """Or until the sweep has ended, or that many seconds have passed."""
        until = time.monotonic() + most_s
        while not self._has_ended() and time.monotonic() < until and not is_so():
            assert self._seconds() < ROUND_S, f"the sweep has not ended in {ROUND_S:.0f} s"
            time.sleep(0.25)

    def _has_ended(self) -> bool:
        self._sweep = self._service.find_sweep(self._sweep_id) or self._sweep
        return self._sweep["state"] in TERMINAL_STATES

    def _seconds(self) -> float:
        return time.monotonic() - self._began

    def _strike(self, death: Death) -> bool:
        """Whether it was there to be struck."""
        ages = self._ages()
        if not self._is_struck(death):
            return False
        away = f" for {death.away_s:.1f} s" if death.of in {"API", "database", "frozen driver"} else ""
        self._story.deaths.append(death.of)
        print(f"  {self._seconds():6.1f} s  {death.of}{away}", flush=True)
        if death.of != "API":
            for number, age in ages.items():
                self._story.ages.setdefault(number, []).append(age)
                self._cut_at[number] = time.time()
        if death.of not in {"API", "worker"}:
            epochs_now = self._sweep["epochs_done"]
            self._fruitless = self._fruitless + 1 if epochs_now == self._epochs_then else 1
            self._epochs_then = epochs_now
        return True

    def _is_struck(self, death: Death) -> bool:
        if death.of in WORDS:
            return try_to_kill(self._sweep_id, WORDS[death.of])
        if death.of in self._away and self._away[death.of].is_alive():
            return False
        match death.of:
            case "API":
                if not self._service.is_ready():
                    return False
                self.api_away_s = death.away_s
                self._service.strike()
            case "database":
                self._database.take_away()
                self._later(death, self._database.give_back)
            case "frozen driver":
                driver = find_process(self._sweep_id, WORDS["driver"])
                if driver is None:
                    return False
                driver.suspend()
                self._later(death, lambda: _wake(driver))
        return True

    def _later(self, death: Death, back: Callable[[], None]) -> None:
        self._away[death.of] = threading.Timer(death.away_s, back)
        self._away[death.of].start()

    def _ages(self) -> dict[int, float]:
        """For each trial that trained since the last death: seconds since it saved what it goes on from."""
        saved: dict[int, float] = {}
        for path in (self._service.data_dir / "checkpoints" / self._sweep_id).glob("t*/last.tar"):
            number = int(path.parent.name[1:])
            with suppress(FileNotFoundError):  # just now replaced
                saved[number] = path.stat().st_mtime
        return {number: time.time() - at for number, at in saved.items() if at > self._cut_at.get(number, 0)}


def _wake(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        process.resume()


@contextmanager
def kept_up(service: ServiceProcess, disturbance: Disturbance) -> Iterator[None]:
    """Starts the API again when it has died: its supervisor."""
    over = threading.Event()

    def supervise() -> None:
        while not over.wait(0.1):
            if service.has_died():
                over.wait(disturbance.api_away_s)
                service.try_to_start()  # in vain while its database is away

    supervisor = threading.Thread(target=supervise)
    supervisor.start()
    try:
        yield
        wait_until(service.is_ready, "the API is up again")
    finally:
        over.set()
        supervisor.join()


def run_round(story: Story, seed: int, folder: Path, spec: dict[str, Any], twin: Outcome) -> None:
    """Raises AssertionError where it does not come to an end."""
    print(f"round {story.number}, {story.database}", flush=True)
    folder.mkdir()
    made = PostgreSQL(folder) if story.database == "postgresql" else SQLite(folder / "fraternal.db")
    with (
        closing(made) as database,
        running_service(folder, {"FRATERNAL_DATABASE_URL": database.url}) as service,
    ):
        sweep_id = service.submit(spec)
        began = time.monotonic()
        disturbance = Disturbance(service, database, sweep_id, story)
        with kept_up(service, disturbance):
            disturbance.run(deaths(seed, story.number))
        story.seconds = time.monotonic() - began
        with suppress(AssertionError):  # it is judged
            wait_until(lambda: not left_of(sweep_id), "nothing is left")
        outcome = look_at(service, sweep_id)
        story.drivers = outcome.sweep["driver_generation"]
        story.attempts = {trial["number"]: trial["attempt"] for trial in outcome.trials}
        story.verdict = judge(outcome, twin)


def run_undisturbed(folder: Path, spec: dict[str, Any]) -> Outcome:
    with running_service(folder) as service:
        sweep_id = service.submit(spec)
        service.wait_for_end(sweep_id)
        wait_until(lambda: not left_of(sweep_id), "nothing is left")
        return look_at(service, sweep_id)


def chaos_spec(corpus: Path, trials: int) -> dict[str, Any]:
    """Trials of a few seconds, each as patient as many kills want."""
    spec = small_spec(corpus, budget={"trials": trials})
    spec["training"]["epochs"] = EPOCHS
    return {**spec, "retry": {"max_failures": 100, "checkpoint_every_s": 0.1}}


def run(
    numbers: Sequence[int], seed: int, trials: int, databases: Sequence[str], folder: Path
) -> list[Story]:
    spec = chaos_spec(write_corpus(folder / "corpus", tokens=4_000), trials)
    print("the undisturbed twin", flush=True)
    twin = run_undisturbed(folder / "twin", spec)
    assert not judge(twin, twin).faults, judge(twin, twin).faults
    stories = []
    for number in numbers:
        story = Story(number, databases[(number - 1) % len(databases)])
        try:
            run_round(story, seed, folder / f"round-{number}", spec, twin)
        except AssertionError as error:
            print(f"  {error}")
        for fault in story.verdict.faults:
            print(f"  NOT AS PROMISED: {fault}", flush=True)
        if not story.verdict.faults:
            shutil.rmtree(folder / f"round-{number}")
        stories.append(story)
    return stories


def to_markdown(stories: Sequence[Story]) -> str:
    columns = "round database deaths drivers attempts seconds zombies duplicates budget weights redone"
    lines = [" | ".join(["", *columns.split(), ""]).strip(), "|---:|---|---|" + "---:|" * 8]
    for story in stories:
        verdict, counts = story.verdict, Counter(story.deaths)
        dead = ", ".join(f"{count} {of}" for of, count in sorted(counts.items()))
        cells = (
            story.number,
            story.database,
            dead or "none",
            story.drivers,
            sum(story.attempts.values()),
            f"{story.seconds:.0f}",
            len(verdict.zombies),
            len(verdict.duplicates),
            "wrong" if verdict.budget else "exact",
            "different" if verdict.weights else "identical",
            f"{story.redone_s:.1f} s",
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def summary(stories: Sequence[Story]) -> str:
    rounds = len(stories)
    return (
        f"{sum(len(story.deaths) for story in stories)} deaths in {rounds} rounds: "
        f"zombies {sum(len(story.verdict.zombies) for story in stories)}, "
        f"duplicates {sum(len(story.verdict.duplicates) for story in stories)}, "
        f"budget exact {sum(not story.verdict.budget for story in stories)}/{rounds}, "
        f"weights bit-identical {sum(not story.verdict.weights for story in stories)}/{rounds}, "
        f"{sum(story.redone_s for story in stories):.1f} s of work redone at most"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--first", type=int, default=1, help="begin with this one")
    parser.add_argument("--round", type=int, help="only this one")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--databases", default="sqlite,postgresql", help="in turn")
    given = parser.parse_args(arguments)
    numbers = [given.round] if given.round else range(given.first, given.rounds + 1)
    folder = Path(tempfile.mkdtemp(prefix="fraternal-chaos-"))
    stories = run(numbers, given.seed, given.trials, given.databases.split(","), folder)
    print(
        f"\nseed {given.seed}, {given.trials} trials a round\n\n{to_markdown(stories)}\n\n{summary(stories)}"
    )
    failed = [story.number for story in stories if story.verdict.faults]
    if failed:
        print(f"not as promised: rounds {failed}; their databases, logs and checkpoints are in {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that nothing is left
    sys.exit(main())
