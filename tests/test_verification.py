"""A checkpoint is evaluated again by a fresh process; what does not come to its loss is never called best."""

import signal
import subprocess
import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
from optuna.storages import InMemoryStorage

import trials.verification
from service.database import now
from service.schemas import VerificationView
from service.views import best_of
from tests.fakes import MemoryJournal, failed, open_ledger, report, spec, verified, wish, with_loss
from tests.test_attempt import small_corpus, small_task
from tests.test_report import trial
from trials.attempt import describe_device, run_attempt
from trials.checkpoints import BestCheckpoint, read_best
from trials.corpora import PathCorpus
from trials.ledger import Fenced, StudyLedger
from trials.spec import Budget
from trials.store import CheckpointStore
from trials.tasks import Task
from trials.verification import Check, InFreshProcess, Verification, Verifier, Verify
from trials.verify import verify

# What the fresh process does.


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> PathCorpus:
    return small_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def task(corpus: PathCorpus) -> Task:
    return small_task(corpus)


@pytest.fixture(scope="module")
def trained(task: Task, tmp_path_factory: pytest.TempPathFactory) -> BestCheckpoint:
    """Of a trial that had begun to average."""
    store = CheckpointStore(tmp_path_factory.mktemp("store").as_uri())
    assert list(run_attempt(task, store, Path()))[-1].finished
    with store.open_best("s1", 0) as file:
        return read_best(file)


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path.as_uri())


def check(store: CheckpointStore, checkpoint: BestCheckpoint, corpus: PathCorpus, **changes: Any) -> Check:
    """Put a checkpoint where the trial would have; what the driver would then have looked at."""
    sha256 = store.save_best("s1", 0, checkpoint.files())
    epoch, loss = checkpoint.metrics.get("epoch", 1), checkpoint.metrics.get("valid_loss", 5.0)
    asked = Check("s1", 0, epoch, loss, sha256, describe_device("cpu"), corpus, "cpu", 1, timeout_s=60)
    return replace(asked, **changes)


def disturbed(checkpoint: BestCheckpoint, by: float) -> BestCheckpoint:
    bias = checkpoint.tensors["decoder_bias"].clone()
    bias[0] += by
    return replace(checkpoint, tensors={**checkpoint.tensors, "decoder_bias": bias})


def test_a_fresh_process_finds_the_loss_that_training_recorded(
    trained: BestCheckpoint, corpus: PathCorpus, store: CheckpointStore, tmp_path: Path
) -> None:
    asked = check(store, trained, corpus)
    found = InFreshProcess(tmp_path.as_uri(), tmp_path, tmp_path / "shared")(asked)
    assert (found.outcome, found.message) == ("verified", None)
    assert found.valid_loss == pytest.approx(trained.metrics["valid_loss"], abs=1e-6, rel=0)
    assert found.recorded_valid_loss == trained.metrics["valid_loss"]
    assert (found.epoch, found.tolerance) == (trained.metrics["epoch"], 1e-6)
    assert found.checkpoint_sha256 == found.recorded_sha256 == asked.checkpoint_sha256
    assert found.device == describe_device("cpu")
    assert "threads 1" in (found.runtime or "")


@pytest.mark.parametrize(("by", "outcome"), [(1e-3, "differs"), (1e-7, "verified")])
def test_weights_that_lose_something_else_are_found_out(
    trained: BestCheckpoint, corpus: PathCorpus, store: CheckpointStore, by: float, outcome: str
) -> None:
    found = verify(check(store, disturbed(trained, by), corpus), store, Path(), None)
    assert found.outcome == outcome
    if outcome == "differs":
        assert f"{trained.metrics['valid_loss']:.9f}" in (found.message or "")
        assert f"{found.valid_loss:.9f}" in (found.message or "")


def test_on_another_device_more_rounding_is_allowed(
    trained: BestCheckpoint, corpus: PathCorpus, store: CheckpointStore
) -> None:
    off = {**trained.metrics, "valid_loss": trained.metrics["valid_loss"] + 3e-5}
    asked = check(store, replace(trained, metrics=off), corpus)
    assert verify(asked, store, Path(), None).outcome == "differs"
    elsewhere = verify(replace(asked, device="cuda: another"), store, Path(), None)
    assert (elsewhere.outcome, elsewhere.tolerance) == ("verified", 1e-4)


@pytest.mark.parametrize(
    ("loss", "outcome"),
    [(1e-6, "verified"), (-1e-6, "verified"), (1.0001e-6, "differs"), (nan, "differs"), (inf, "differs")],
)
def test_the_tolerance_is_what_is_said_and_no_more(
    trained: BestCheckpoint,
    corpus: PathCorpus,
    store: CheckpointStore,
    loss: float,
    outcome: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trials.verify.evaluate", lambda model, split: loss)
    nothing_lost = replace(trained, metrics={**trained.metrics, "valid_loss": 0.0})
    found = verify(check(store, nothing_lost, corpus), store, Path(), None)
    assert found.outcome == outcome
    assert (found.message is None) == (outcome == "verified")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda trained: replace(trained, metrics={"epoch": 1}), "valid_loss"),
        (lambda trained: replace(trained, config={}), "describes no model"),
        (lambda trained: replace(trained, tensors={}), "do not fit together"),
        (lambda trained: disturbed(trained, float("nan")), "not all finite"),
    ],
)
def test_a_checkpoint_that_does_not_fit_together_is_damaged(
    trained: BestCheckpoint,
    corpus: PathCorpus,
    store: CheckpointStore,
    damage: Callable[[BestCheckpoint], BestCheckpoint],
    words: str,
) -> None:
    found = verify(check(store, damage(trained), corpus, epoch=1), store, Path(), None)
    assert found.outcome == "damaged"
    assert words in (found.message or "")


def test_a_file_that_is_gone_or_another_than_reported_is_damaged(
    trained: BestCheckpoint, corpus: PathCorpus, store: CheckpointStore
) -> None:
    asked = check(store, trained, corpus)
    other = verify(replace(asked, checkpoint_sha256="0" * 64), store, Path(), None)
    assert (other.outcome, other.recorded_sha256) == ("damaged", "0" * 64)
    assert "SHA-256 differs" in (other.message or "")
    store.discard_best("s1", 0)
    gone = verify(asked, store, Path(), None)
    assert (gone.outcome, gone.message) == ("damaged", "its file is gone")


def test_a_file_of_a_later_epoch_than_reported_is_held_against_its_own_loss(
    trained: BestCheckpoint, corpus: PathCorpus, store: CheckpointStore
) -> None:
    epoch, loss = trained.metrics["epoch"], trained.metrics["valid_loss"]
    earlier = {"epoch": epoch - 1, "valid_loss": loss + 0.1}
    asked = check(store, trained, corpus, checkpoint_sha256="0" * 64, **earlier)
    found = verify(asked, store, Path(), None)
    assert (found.outcome, found.epoch, found.recorded_valid_loss) == ("verified", epoch, loss)
    reported = verify(check(store, trained, corpus, **earlier), store, Path(), None)
    assert reported.outcome == "verified", "an attempt that went on reported the earlier epoch with this file"
    worse = verify(replace(asked, valid_loss=loss - 0.1), store, Path(), None)
    assert worse.outcome == "damaged", "an attempt saves what is better, and nothing else"
    same = verify(replace(asked, epoch=epoch), store, Path(), None)
    assert same.outcome == "damaged", "of one epoch there is one file"


def test_a_loss_on_record_that_the_file_does_not_have_is_not_verified(
    trained: BestCheckpoint, corpus: PathCorpus, store: CheckpointStore
) -> None:
    loss = trained.metrics["valid_loss"] - 1e-3
    found = verify(check(store, trained, corpus, valid_loss=loss), store, Path(), None)
    assert (found.outcome, f"reported {loss:.9f}" in (found.message or "")) == ("damaged", True)


def test_for_a_file_that_is_gone_no_process_is_started(
    trained: BestCheckpoint, corpus: PathCorpus, store: CheckpointStore, tmp_path: Path
) -> None:
    asked = check(store, trained, corpus, timeout_s=0.01)
    store.discard_best("s1", 0)
    found = InFreshProcess(tmp_path.as_uri(), tmp_path, None)(asked)
    assert (found.outcome, found.message) == ("damaged", "its file is gone")


def test_without_the_text_that_it_was_trained_on_nothing_is_known(
    trained: BestCheckpoint, corpus: PathCorpus, store: CheckpointStore, tmp_path: Path
) -> None:
    nowhere = check(store, trained, PathCorpus(path=str(tmp_path / "nowhere")))
    found = verify(nowhere, store, Path(), None)
    assert (found.outcome, "nowhere" in (found.message or "")) == ("impossible", True)
    changed = Path(small_corpus(tmp_path / "changed").path)
    (changed / "valid.txt").write_text((Path(corpus.path) / "valid.txt").read_text() + "a b\n")
    found = verify(check(store, trained, PathCorpus(path=str(changed))), store, Path(), None)
    assert (found.outcome, "the text has changed" in (found.message or "")) == ("impossible", True)


def test_a_process_that_fails_or_hangs_is_no_result(
    trained: BestCheckpoint, corpus: PathCorpus, store: CheckpointStore, tmp_path: Path
) -> None:
    process = InFreshProcess(tmp_path.as_uri(), tmp_path, None)
    failing = process(check(store, trained, corpus, on="no device"))
    assert (failing.outcome, "no device" in (failing.message or "")) == ("impossible", True)
    dead = prepared(process)
    dead.kill()
    dead.wait()
    assert process(check(store, trained, corpus)).outcome == "verified"
    hanging = process(check(store, trained, corpus, timeout_s=0.01))
    assert (hanging.outcome, "retry.hang_s" in (hanging.message or "")) == ("impossible", True)


def test_a_process_that_was_prepared_is_used_once_and_ended_in_the_end(
    trained: BestCheckpoint, corpus: PathCorpus, store: CheckpointStore, tmp_path: Path
) -> None:
    process = InFreshProcess(tmp_path.as_uri(), tmp_path, None)
    started = [prepared(process), prepared(process)]
    assert started[0] is started[1]
    assert process(check(store, trained, corpus)).outcome == "verified"
    assert started[0].returncode == 0
    left = prepared(process)
    process.close()
    assert left.returncode == -signal.SIGKILL
    process.close()


def prepared(process: InFreshProcess) -> subprocess.Popen[str]:
    process.prepare()
    assert process._waiting is not None
    return process._waiting


# What the driver makes of it.


@pytest.fixture
def journal() -> MemoryJournal:
    return MemoryJournal()


@pytest.fixture
def ledger(journal: MemoryJournal) -> StudyLedger:
    """Of a sweep whose trials lost 3, 1, 2 and 1 nats, each in its only epoch."""
    ledger = open_ledger(spec(training={"epochs": 1}, budget={"trials": 4}), InMemoryStorage(), journal)
    for loss in (3.0, 1.0, 2.0, 1.0):
        task = ledger.next_task()
        assert task is not None
        ledger.record(task, with_loss(report(task, 1), loss))
    return ledger


def refused(check: Check) -> Verification:
    return replace(verified(check), outcome="differs")


def test_the_best_is_verified_once(ledger: StudyLedger, journal: MemoryJournal) -> None:
    looked_at: list[int] = []

    def noting(check: Check) -> Verification:
        looked_at.append(check.number)
        return verified(check)

    for _ in range(2):
        Verifier(ledger, noting).settle()
    assert looked_at == [1]
    assert journal.verified[1].outcome == "verified"


def test_where_one_is_refused_the_next_best_is_looked_at(ledger: StudyLedger, journal: MemoryJournal) -> None:
    Verifier(ledger, lambda check: refused(check) if check.number in {1, 3} else verified(check)).settle()
    assert {number: of.outcome for number, of in journal.verified.items()} == {
        1: "differs",
        3: "differs",
        2: "verified",
    }


def test_when_all_are_refused_it_ends(ledger: StudyLedger, journal: MemoryJournal) -> None:
    Verifier(ledger, refused).settle()
    assert sorted(journal.verified) == [0, 1, 2, 3]


def test_what_cannot_be_evaluated_is_said_and_does_not_keep_the_sweep(
    ledger: StudyLedger, journal: MemoryJournal
) -> None:
    Verifier(ledger, lambda check: replace(verified(check), outcome="impossible")).settle()
    assert {number: of.outcome for number, of in journal.verified.items()} == {1: "impossible"}
    Verifier(ledger, verified).settle()  # of the next driver: the text may be back
    assert {number: of.outcome for number, of in journal.verified.items()} == {1: "verified"}


def test_while_trials_run_it_verifies_now_and_then_and_prepares_for_the_end(
    journal: MemoryJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FIRST_AFTER_S", "LOOK_EVERY_S"):
        monkeypatch.setattr(trials.verification, name, 0.01)
    ledger = open_ledger(spec(training={"epochs": 1}, budget={"trials": 2}), InMemoryStorage(), journal)
    seen, is_prepared = threading.Event(), threading.Event()

    def noting(check: Check) -> Verification:
        seen.set()
        return verified(check)

    verifier = Verifier(ledger, noting, is_prepared.set)
    verifier.start()
    first = ledger.next_task()
    assert first is not None
    ledger.record(first, with_loss(report(first, 1), 2.0))
    assert seen.wait(30)
    assert not is_prepared.is_set()
    assert ledger.next_task() is not None
    assert is_prepared.wait(30)
    verifier.settle()
    assert set(journal.verified) == {0}


def test_a_pause_is_not_kept_waiting(ledger: StudyLedger, journal: MemoryJournal) -> None:
    wish(journal, state="pausing", budget=Budget(trials=5))
    Verifier(ledger, verified).settle()
    assert journal.verified == {}


def test_a_pause_asked_for_when_all_trials_have_ended_leaves_no_end_without_verifying(
    ledger: StudyLedger, journal: MemoryJournal
) -> None:
    """Such a sweep is not paused: it ends."""
    wish(journal, state="pausing")
    Verifier(ledger, verified).settle()
    assert ledger.done
    assert journal.verified[1].outcome == "verified"


def test_a_process_has_time_to_load_torch_however_soon_a_trial_is_taken_for_hung(
    journal: MemoryJournal,
) -> None:
    for hang_s, timeout_s in ((1, 300), (1800, 1800)):
        asked = spec(training={"epochs": 1}, retry={"hang_s": hang_s})
        ledger = open_ledger(asked, InMemoryStorage(), journal)
        task = ledger.next_task()
        assert task is not None
        ledger.record(task, report(task, 1))
        check = ledger.next_check()
        assert check is not None
        assert check.timeout_s == timeout_s


def test_a_trial_that_went_on_is_looked_at_again(ledger: StudyLedger, journal: MemoryJournal) -> None:
    Verifier(ledger, verified).settle()
    journal.verified[1] = replace(journal.verified[1], recorded_sha256="of an earlier epoch")
    asked = ledger.next_check()
    assert asked is not None
    assert asked.number == 1


def test_trials_that_run_or_failed_of_themselves_are_not_looked_at(journal: MemoryJournal) -> None:
    ledger = open_ledger(spec(training={"epochs": 2}), InMemoryStorage(), journal)
    running, diverged = ledger.next_task(), ledger.next_task()
    assert running is not None
    assert diverged is not None
    ledger.record(running, report(running, 1))
    ledger.record(diverged, report(diverged, 1))
    ledger.record(diverged, failed("diverged"))
    assert ledger.next_check() is None
    ledger.record(running, report(running, 2))
    asked = ledger.next_check()
    assert asked is not None
    assert (asked.number, asked.epoch, asked.on) == (running.number, 2, "cpu")


class Clock:
    """The module's time, which passes where it is waited for, and the event that is waited for."""

    def __init__(self, until: float) -> None:
        self.at, self._until = 0.0, until

    def monotonic(self) -> float:
        return self.at

    def is_set(self) -> bool:
        return False

    def wait(self, pause_s: float) -> bool:
        self.at += pause_s
        return self.at > self._until


def run_in_passing(
    ledger: StudyLedger, journal: MemoryJournal, verify: Verify, monkeypatch: pytest.MonkeyPatch
) -> list[float]:
    """When in a thousand seconds it verifies, with a verification that takes ten of them."""
    wish(journal, budget=Budget(trials=5))
    ledger.heed(journal.beat())
    clock = Clock(1000)
    began_at: list[float] = []

    def verify_slowly(check: Check) -> Verification:
        began_at.append(clock.at)
        clock.at += 10
        return verify(check)

    monkeypatch.setattr(trials.verification, "time", clock)
    verifier = Verifier(ledger, verify_slowly)
    monkeypatch.setattr(verifier, "_over", clock)
    verifier._run()
    return began_at


def test_while_trials_run_the_best_is_verified_once(
    ledger: StudyLedger, journal: MemoryJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_in_passing(ledger, journal, verified, monkeypatch) == [200]
    assert journal.verified[1].outcome == "verified"


def test_what_cannot_be_evaluated_in_passing_takes_a_fortieth_of_the_time_and_is_left_to_the_end(
    ledger: StudyLedger, journal: MemoryJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    def vain(check: Check) -> Verification:
        return replace(verified(check), outcome="impossible")

    assert run_in_passing(ledger, journal, vain, monkeypatch) == [200, 610]
    assert journal.verified == {}


def test_trouble_in_passing_is_no_end_of_it_and_takes_no_more_of_the_time(
    ledger: StudyLedger, journal: MemoryJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    troubles = [OSError("the store is away")]

    def troubled(check: Check) -> Verification:
        if troubles:
            raise troubles.pop()
        return verified(check)

    assert run_in_passing(ledger, journal, troubled, monkeypatch) == [200, 610]
    assert journal.verified[1].outcome == "verified"


def test_the_end_waits_for_what_is_being_verified_and_does_not_do_it_again(
    ledger: StudyLedger, journal: MemoryJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at: list[int] = []
    looking, twice = threading.Event(), threading.Event()

    def long(check: Check) -> Verification:
        looked_at.append(check.number)
        if len(looked_at) > 1:
            twice.set()
        looking.set()
        twice.wait(0.3)
        return verified(check)

    monkeypatch.setattr(trials.verification, "FIRST_AFTER_S", 0)
    monkeypatch.setattr(trials.verification, "LOOK_EVERY_S", 0.01)
    wish(journal, budget=Budget(trials=5))
    ledger.heed(journal.beat())
    verifier = Verifier(ledger, long)
    verifier.start()
    assert looking.wait(10)
    verifier.settle()
    assert looked_at == [1]
    assert verifier._over.is_set(), "nothing is verified in passing any more"


def test_who_was_fenced_is_not_asked_what_to_verify(ledger: StudyLedger, journal: MemoryJournal) -> None:
    journal.fenced = True
    with pytest.raises(Fenced):
        Verifier(ledger, verified).settle()


@pytest.mark.parametrize(
    ("outcome", "best"), [("verified", 1), ("impossible", 1), ("differs", 2), ("damaged", 2)]
)
def test_what_is_refused_is_never_called_best(outcome: Any, best: int) -> None:
    found = verified_view(outcome)
    trials = [trial(0, "fd", 99.0), trial(1, "fd", 88.0, verification=found), trial(2, "fd", 90.0)]
    chosen = best_of(trials)
    assert chosen is not None
    assert chosen.number == best


def verified_view(outcome: Any) -> VerificationView:
    found = verified(Check("s1", 1, 3, 4.5, "0f" * 32, "cpu", PathCorpus(path="/text"), "cpu", 1, 60.0))
    return VerificationView(**{**asdict(found), "outcome": outcome}, verified_at=now())
