"""What the core is given, in memory: a journal, a launcher, a worker, and a way to crash."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import optuna
from optuna.storages import InMemoryStorage
from optuna.trial import FrozenTrial, TrialState

from service.launcher import Capacity
from trials.ledger import Fenced, Orders, StudyLedger
from trials.shares import Claim
from trials.spec import Budget, SweepSpec
from trials.steps import Probe, ProbeOrder, Timed, operations
from trials.store import CheckpointStore
from trials.tasks import Failure, Report, Task
from trials.verification import Check, Outcome, Verification

SWEEP = "s0123456789"


def spec(**changes: Any) -> SweepSpec:
    """Two paired arms of three trials each, three epochs long."""
    small: dict[str, Any] = {
        "corpus": {"name": "sotu"},
        "training": {"epochs": 3},
        "space": {
            "kappa": {"type": "uniform", "low": 0.0, "high": 0.3},
            "batch_size": {"type": "choice", "values": [10, 20, 30]},
        },
        "budget": {"trials": 6},
    }
    return SweepSpec.model_validate({**small, **changes})


class Crash(BaseException):
    """The process is gone. No `except Exception` may stop it."""


class Countdown:
    """Lets `writes` writes pass, and crashes before the next; without a number it lets all of them pass."""

    def __init__(self, writes: int | None = None) -> None:
        self._left = writes

    def __call__(self) -> None:
        if self._left is not None:
            if self._left == 0:
                raise Crash
            self._left -= 1


class CrashingStorage(InMemoryStorage):
    """Optuna's storage in memory; calls `before_write` before anything is changed."""

    def __init__(self) -> None:
        super().__init__()
        self.before_write: Callable[[], None] = Countdown()

    def create_new_study(self, *args: Any, **kwargs: Any) -> int:
        self.before_write()
        return super().create_new_study(*args, **kwargs)

    def set_study_user_attr(self, *args: Any, **kwargs: Any) -> None:
        self.before_write()
        super().set_study_user_attr(*args, **kwargs)

    def set_study_system_attr(self, *args: Any, **kwargs: Any) -> None:
        self.before_write()
        super().set_study_system_attr(*args, **kwargs)

    def create_new_trial(self, *args: Any, **kwargs: Any) -> int:
        self.before_write()
        return super().create_new_trial(*args, **kwargs)

    def set_trial_param(self, *args: Any, **kwargs: Any) -> None:
        self.before_write()
        super().set_trial_param(*args, **kwargs)

    def set_trial_state_values(self, *args: Any, **kwargs: Any) -> bool:
        self.before_write()
        return super().set_trial_state_values(*args, **kwargs)

    def set_trial_intermediate_value(self, *args: Any, **kwargs: Any) -> None:
        self.before_write()
        super().set_trial_intermediate_value(*args, **kwargs)

    def set_trial_user_attr(self, *args: Any, **kwargs: Any) -> None:
        self.before_write()
        super().set_trial_user_attr(*args, **kwargs)

    def set_trial_system_attr(self, *args: Any, **kwargs: Any) -> None:
        self.before_write()
        super().set_trial_system_attr(*args, **kwargs)


class MemoryJournal:
    """trials.ledger.Journal. `fenced` says that another driver has taken over."""

    def __init__(self) -> None:
        self.before_write: Callable[[], None] = Countdown()
        self.fenced = False
        self.orders = Orders("running", Budget(trials=1), 0.0)
        self.epochs: dict[tuple[int, int], dict[str, Any]] = {}
        """Records by trial number and epoch."""
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.points: list[dict[str, Any]] = []
        """That no draw has yet."""
        self.points_of_draws: dict[int, dict[str, Any]] = {}
        self.verified: dict[int, Verification] = {}
        self.wants = 0
        self.others: list[Claim] = []
        """What running sweeps say, its own too."""

    def beat(self) -> Orders:
        if self.fenced:
            raise Fenced("another driver has this sweep")
        return self.orders

    def claims(self, wants: int) -> Sequence[Claim]:
        self.beat()
        self.wants = wants
        return self.others

    def ask_to_pause(self, reason: str) -> None:
        self.beat()
        self.before_write()
        self.orders = replace(self.orders, state="pausing")
        self.events.append(("pause_requested", {"reason": reason}))

    def record_waiting(self, reason: str | None) -> None:
        self.beat()
        self.events.append(("sweep_waiting", {"reason": reason}))

    def record_epoch(self, number: int, attempt: int, epoch: Mapping[str, Any]) -> None:
        self.beat()
        self.before_write()
        self.epochs[number, epoch["epoch"]] = {**epoch, "attempt": attempt}

    def point_of(self, draw: int, *, take: bool) -> Mapping[str, Any] | None:
        if draw not in self.points_of_draws and take and self.points:
            self.before_write()
            self.points_of_draws[draw] = self.points.pop(0)
        return self.points_of_draws.get(draw)

    def recorded_epochs(self, number: int) -> int:
        return max((epoch for of, epoch in self.epochs if of == number), default=0)

    def record_event(self, kind: str, **detail: Any) -> None:
        self.beat()
        self.before_write()
        once = {name: detail.get(name) for name in ("number", "attempt")}
        of_kind = [told for of, told in self.events if of == kind]
        if None in once.values() or not any(once.items() <= told.items() for told in of_kind):
            self.events.append((kind, detail))

    def verifications(self) -> Mapping[int, tuple[Outcome, str | None]]:
        return {number: (of.outcome, of.recorded_sha256) for number, of in self.verified.items()}

    def record_verification(self, number: int, verification: Verification) -> None:
        self.beat()
        self.before_write()
        self.verified[number] = verification

    def ends_told(self) -> set[tuple[int, int | None]]:
        return {(told["number"], told["attempt"]) for of, told in self.events if of == "trial_finished"}


def wish(journal: MemoryJournal, **changes: Any) -> None:
    """Have the next beat say something else."""
    journal.orders = replace(journal.orders, **changes)


def valid_loss(number: int, epoch: int) -> float:
    """What the fake worker's models lose: falls, and rises in the last third of every other trial."""
    return 4.0 + (number * 7 % 5) / 10 - epoch / 10 + (0.25 if number % 2 and epoch == 3 else 0)


def epoch_fields(number: int, epoch: int) -> dict[str, Any]:
    """What trials.training.EpochResult has."""
    loss = valid_loss(number, epoch)
    return {
        "epoch": epoch,
        "train_loss": loss + 0.1,
        "valid_loss": loss,
        "raw_valid_loss": loss,
        "averaged": False,
        "penalty": 0.5,
        "ar": 0.0,
        "tar": 0.0,
        "optimised": loss + 0.2,
        "lr": 30.0,
        "pair_difference": 0.2,
        "prediction_variance": 0.1,
        "expectation_gap": 0.1,
        "tokens_per_s": 1000.0,
        "gradient_norm": 1.5,
        "tokens": 1000,
        "seconds": 0.25,
        "is_best": all(loss < valid_loss(number, earlier) for earlier in range(1, epoch)),
    }


def report(task: Task, epoch: int) -> Report:
    best = min(range(1, epoch + 1), key=lambda earlier: valid_loss(task.number, earlier))
    return Report(
        epoch=epoch_fields(task.number, epoch),
        finished=epoch == task.config.training.epochs,
        best_epoch=best,
        best_valid_loss=valid_loss(task.number, best),
        checkpoint_sha256=f"sha256 of {task.number} after {best}" if best == epoch else None,
        device=task.device,
    )


def checkpoint_files(task: Task, epoch: int, loss: float) -> dict[str, bytes]:
    """What a `best` of this trial holds, but for weights that are none."""
    config = {
        **asdict(task.config),
        "corpus": task.corpus.model_dump(mode="json"),
        "corpus_sha256": {"train": "1a", "valid": "2b", "test": "3c"},
        "seed": task.seed,
    }
    return {
        "model.safetensors": bytes(range(256)) * 4000,
        "config.json": json.dumps(config).encode(),
        "vocabulary.txt": b"<eos>\n<unk>\nthe\n",
        "metrics.json": json.dumps({"epoch": epoch, "valid_loss": loss}).encode(),
    }


def verified(check: Check) -> Verification:
    """trials.verification.Verify that finds all well."""
    sha256 = check.checkpoint_sha256
    return Verification("verified", sha256, sha256, check.epoch, 4.5, 4.5, 1e-6, "cpu", "torch", 2.5)


def with_loss(said: Report, loss: float) -> Report:
    """The same report of another validation loss, the best so far."""
    assert said.epoch is not None
    epoch = {**said.epoch, "valid_loss": loss, "raw_valid_loss": loss}
    return replace(said, epoch=epoch, best_epoch=epoch["epoch"], best_valid_loss=loss)


def failed(failure_class: Any, message: str = "no words") -> Report:
    return Report(epoch=None, finished=True, failure=Failure(failure_class, message))


def reports(task: Task) -> Iterator[Report]:
    """As trials.attempt does it: the latest recorded epoch again, then the others."""
    for epoch in range(max(1, task.recorded_epochs), task.config.training.epochs + 1):
        yield report(task, epoch)


def open_ledger(spec: SweepSpec, storage: Any, journal: MemoryJournal) -> StudyLedger:
    journal.orders = replace(journal.orders, budget=spec.budget)
    return StudyLedger(spec, SWEEP, storage, journal, CheckpointStore("memory://ledger"))


def taken(ledger: StudyLedger) -> Task:
    task = ledger.next_task()
    assert task is not None
    return task


def drive(ledger: StudyLedger, work: Callable[[Task], Iterator[Report]] = reports) -> None:
    """One task after another until none is left."""
    while (task := ledger.next_task()) is not None:
        for said in work(task):
            if not ledger.record(task, said):
                break


def rows(storage: Any) -> list[FrozenTrial]:
    return optuna.load_study(study_name=SWEEP, storage=storage).get_trials()


def states(storage: Any) -> list[TrialState]:
    return [row.state for row in rows(storage)]


def probe_of(order: ProbeOrder, seconds: float = 1e-12, **changes: Any) -> Probe:
    """A probe of a machine on which an operation takes so many seconds, and training nothing else."""
    found = Probe(
        device="cpu: none",
        train_tokens=60_000,
        valid_tokens=10_000,
        vocabulary_size=1_000,
        start_s=4.0,
        took_s=0.0,
        share=1.0,
        timed=tuple(
            Timed(point, (seconds * operations(point, 1_000),), 1e-6, 0.01, 0.01) for point in order.points
        ),
    )
    return replace(found, **changes)


class MemoryLauncher:
    """service.launcher.Launcher whose drivers are entries of a dict, and do nothing."""

    def __init__(self, cpus: float = 4, gpus: float = 0, cpus_have_bf16: bool = False) -> None:
        self.calls: list[str] = []
        self.alive: dict[str, int] = {}
        """Generation of each sweep's living driver."""
        self.frozen: set[str] = set()
        """Sweeps whose drivers do not run."""
        self.broken: set[str] = set()
        """Sweeps whose drivers cannot be started."""
        self.log = ""
        self.me: dict[str, Any] = {"controller": 1}
        self.dead_controllers: list[int] = []
        self.probed: list[ProbeOrder] = []
        self._capacity = Capacity(cpus, gpus, cpus_have_bf16)

    def capacity(self) -> Capacity:
        return self._capacity

    async def probe(self, order: ProbeOrder) -> Probe:
        self.probed.append(order)
        return probe_of(order)

    def launch(self, sweep_id: str, generation: int) -> dict[str, Any]:
        self.calls.append(f"launch {sweep_id}")
        if sweep_id in self.broken:
            raise OSError(f"no process for {sweep_id}")
        assert sweep_id not in self.alive, f"two drivers of {sweep_id}"
        self.alive[sweep_id] = generation
        return {"sweep": sweep_id, "generation": generation}

    def is_alive(self, driver: dict[str, Any]) -> bool:
        if "controller" in driver:
            return driver["controller"] not in self.dead_controllers
        return bool(self.alive.get(driver["sweep"]) == driver["generation"])

    def is_stopped(self, driver: dict[str, Any]) -> bool:
        return driver.get("sweep") in self.frozen

    def identity(self) -> dict[str, Any]:
        return self.me

    def forget(self, sweep_id: str) -> None:
        self.calls.append(f"forget {sweep_id}")

    def end(self, sweep_id: str) -> None:
        self.calls.append(f"end {sweep_id}")
        self.alive.pop(sweep_id, None)

    def log_tail(self, sweep_id: str) -> str:
        return self.log
