"""The laws of the controller, over a real database and a store, and drivers that are entries of a dict."""

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from optuna.storages import InMemoryStorage, get_storage
from sqlalchemy import event, update

from service.database import open_engine
from service.errors import (
    IllegalMove,
    InvalidSpec,
    NoCheckpointYet,
    SweepNotFound,
    TrialNotFound,
    UnreadableStudy,
)
from service.lifecycle import Verb
from service.live import LiveList
from service.pages import SweepOrder, SweepQuery, read_page
from service.records import Records, SweepJournal
from service.schemas import BudgetChanges, Changes, Extension, RetryRequest, SweepView
from service.studies import open_storage
from service.sweeps import SweepController
from service.tables import sweeps
from service.views import SweepViews
from tests.databases import absent_database
from tests.fakes import MemoryLauncher, checkpoint_files, failed, report, reports, spec, verified, with_loss
from tests.service_process import write_corpus
from trials.ledger import StudyLedger
from trials.spec import Budget, Resources, SweepRequest, SweepSpec
from trials.store import CheckpointStore, unpack
from trials.studies import close_open_trials, find_rows
from trials.tasks import Failure, Task
from trials.verification import Verification


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore((tmp_path / "checkpoints").as_uri())


@pytest.fixture
def controller(records: Records, store: CheckpointStore, tmp_path: Path) -> SweepController:
    (tmp_path / "data").mkdir()
    return SweepController(records, InMemoryStorage(), store, MemoryLauncher(cpus=4), tmp_path / "data")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {"path": str(write_corpus(tmp_path_factory.mktemp("corpus"), tokens=300))}


@pytest.fixture
def asked(corpus: dict[str, Any]) -> SweepSpec:
    return spec(corpus=corpus)


def listed(controller: SweepController) -> list[SweepView]:
    asked = SweepQuery(read_page(SweepOrder, "-created_at", 100, None))
    return [SweepView.model_validate_json(written) for written in controller.list_sweeps(asked)[0]]


def start(controller: SweepController, sweep_id: str, store: CheckpointStore) -> StudyLedger:
    """What its driver would drive."""
    records = controller.records
    generation = records.claim(records.get_sweep(sweep_id), fruitless=0, epochs_done=0)
    assert generation is not None
    journal = SweepJournal(records, sweep_id, generation)
    return StudyLedger(records.get_sweep(sweep_id).spec, sweep_id, controller.storage, journal, store)


def take(ledger: StudyLedger) -> Task:
    task = ledger.next_task()
    assert task is not None
    return task


def test_new_sweep_waits_and_has_nothing_yet(controller: SweepController, asked: SweepSpec) -> None:
    view = controller.create(asked)
    assert (view.state, view.desired_state) == ("queued", "running")
    assert view.spec == asked
    assert view.trials.model_dump() == {
        "budget": 6,
        "running": 0,
        "waiting": 0,
        "complete": 0,
        "pruned": 0,
        "failed": 0,
    }
    assert (view.best, view.time_left_s, view.dashboard_url, view.epochs_done) == (None, None, None, 0)
    assert controller.trials(view.id) == []
    assert controller.get(view.id) == view


def test_resources_that_are_left_to_the_service_are_written_down_as_it_chose_them(
    controller: SweepController, asked: SweepSpec
) -> None:
    for trials, cpus in ((6, 1), (1, 2)):
        body = {**asked.model_dump(mode="json"), "budget": {"trials": trials}, "resources": "auto"}
        view = controller.create(SweepRequest.model_validate(body))
        assert view.spec.resources == Resources(cpus=cpus)
        assert controller.get(view.id) == view


@pytest.mark.parametrize(
    ("changes", "pointers"),
    [
        ({"corpus": {"path": "/no/such/folder"}}, ["/corpus/path"]),
        ({"corpus": {"path": "~/texts"}}, ["/corpus/path"]),
        ({"resources": {"cpus": 5}}, ["/resources/cpus"]),
        ({"resources": {"gpus": 0.5}}, ["/resources/gpus"]),
        (
            {"corpus": {"path": "/no/such/folder"}, "resources": {"cpus": 5, "gpus": 1}},
            ["/corpus/path", "/resources/cpus", "/resources/gpus"],
        ),
    ],
    ids=["missing corpus", "somebody's home", "cpus", "gpus", "everything"],
)
def test_sweep_that_could_not_run_here_is_refused_and_nothing_is_written(
    controller: SweepController, corpus: dict[str, Any], changes: dict[str, Any], pointers: list[str]
) -> None:
    with pytest.raises(InvalidSpec) as refusal:
        controller.create(spec(**{"corpus": corpus, **changes}))
    assert [problem.pointer for problem in refusal.value.problems] == pointers
    assert listed(controller) == []


def test_corpus_path_is_written_down_absolute(
    controller: SweepController, corpus: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(corpus["path"]).parent)
    view = controller.create(spec(corpus={"path": Path(corpus["path"]).name}))
    assert view.spec.corpus.model_dump()["path"] == corpus["path"]


def test_sweeps_are_listed_newest_first(controller: SweepController, asked: SweepSpec) -> None:
    ids = [controller.create(asked).id for _ in range(3)]
    assert [view.id for view in listed(controller)] == ids[::-1]


def test_unknown_sweep_is_not_found_by_any_verb(controller: SweepController) -> None:
    verbs: list[Callable[[str], Any]] = [
        controller.get,
        controller.trials,
        lambda sweep_id: controller.ask(sweep_id, "cancel"),
        controller.best,
        controller.best_checkpoint,
        lambda sweep_id: controller.trial(sweep_id, 0),
    ]
    for verb in verbs:
        with pytest.raises(SweepNotFound, match="s-none"):
            verb("s-none")


@pytest.mark.parametrize("number", [-1, 1, 99])
def test_trial_that_is_not_there_is_not_found(
    controller: SweepController, asked: SweepSpec, store: CheckpointStore, number: int
) -> None:
    sweep_id = controller.create(asked).id
    take(start(controller, sweep_id, store))
    with pytest.raises(TrialNotFound, match="it has 1 so far"):
        controller.trial(sweep_id, number)


def test_counts_and_curves_follow_the_trials(
    controller: SweepController, asked: SweepSpec, store: CheckpointStore
) -> None:
    sweep_id = controller.create(asked).id
    ledger = start(controller, sweep_id, store)
    done, broken, running = (take(ledger) for _ in range(3))
    for said in reports(done):
        ledger.record(done, said)
    ledger.record(broken, failed("diverged", "the loss is nan"))
    ledger.record(running, report(running, 1))
    view = controller.get(sweep_id)
    assert view.state == "running"
    assert view.trials.model_dump() == {
        "budget": 6,
        "running": 1,
        "waiting": 0,
        "complete": 1,
        "pruned": 0,
        "failed": 1,
    }
    assert view.epochs_done == 4
    assert view.dashboard_url == "/dashboard/studies/0"
    first, second, third = controller.trials(sweep_id)
    assert [trial.epochs_done for trial in (first, second, third)] == [3, 0, 1]
    assert second.failure is not None
    assert (second.failure.failure_class, second.failure.message) == ("diverged", "the loss is nan")
    assert first.failure is None
    assert [epoch.epoch for epoch in controller.trial(sweep_id, 0).curve] == [1, 2, 3]
    assert controller.trial(sweep_id, 0).config["training"]["epochs"] == 3
    assert (first.draw, first.seed) == (second.draw, second.seed)
    assert first.draw != third.draw


def test_where_all_are_refused_none_is_called_best_and_it_is_said_why(
    controller: SweepController, asked: SweepSpec, store: CheckpointStore
) -> None:
    sweep_id = controller.create(asked).id
    ledger = start(controller, sweep_id, store)
    task = take(ledger)
    ledger.record(task, report(task, 1))
    journal = SweepJournal(controller.records, sweep_id, 1)
    sha256 = controller.trial(sweep_id, 0).checkpoint_sha256
    journal.record_verification(0, Verification("differs", sha256, message="it is another one"))
    with pytest.raises(NoCheckpointYet, match=r"may be called best: .* `verification` says why"):
        controller.best(sweep_id)
    assert controller.get(sweep_id).best is None
    journal.record_verification(0, Verification("differs", "0f" * 32, message="it was of an earlier epoch"))
    assert controller.best(sweep_id).verification is None
    assert controller.trial(sweep_id, 0).verification is None


def test_time_left_is_what_the_pace_so_far_makes_of_the_rest(
    controller: SweepController, asked: SweepSpec, store: CheckpointStore
) -> None:
    sweep_id = controller.create(asked).id
    ledger = start(controller, sweep_id, store)
    assert controller.get(sweep_id).time_left_s is None
    for _ in range(2):
        task = take(ledger)
        for said in reports(task):
            ledger.record(task, said)
    first, later = controller.get(sweep_id).time_left_s, controller.get(sweep_id).time_left_s
    assert first is not None
    assert later is not None
    assert 0 < first < later < 60
    controller.records.finish(sweep_id, 1, "succeed")
    assert controller.get(sweep_id).time_left_s is None


def test_best_is_the_lowest_loss_of_all_but_failed_trials_and_zero_counts(
    controller: SweepController, asked: SweepSpec, store: CheckpointStore
) -> None:
    sweep_id = controller.create(asked).id
    ledger = start(controller, sweep_id, store)
    with pytest.raises(NoCheckpointYet, match="ask again later"):
        controller.best(sweep_id)
    losses = [3.0, 0.0, -1.0]
    for task, loss in zip([take(ledger) for _ in losses], losses, strict=True):
        ledger.record(task, with_loss(report(task, 1), loss))
        if loss < 0:
            ledger.record(task, failed("diverged"))
    assert controller.best(sweep_id).number == 1
    close_open_trials(sweep_id, controller.storage, Failure("cancelled", "the sweep was cancelled"))
    assert controller.best(sweep_id).number == 1, "what a trial had reached outlives its sweep's cancelling"
    best = controller.get(sweep_id).best
    assert best is not None
    assert (best.number, best.best_valid_loss, best.best_valid_perplexity) == (1, 0.0, 1.0)


def test_best_checkpoint_is_the_best_trials_and_is_not_disturbed(
    controller: SweepController, asked: SweepSpec, store: CheckpointStore
) -> None:
    sweep_id = controller.create(asked).id
    ledger = start(controller, sweep_id, store)
    task = take(ledger)
    good, better = (checkpoint_files(task, epoch, 5 - epoch) for epoch in (1, 2))
    store.save_best(sweep_id, 0, good)
    ledger.record(task, report(task, 1))
    checkpoint = controller.best_checkpoint(sweep_id)
    store.save_best(sweep_id, 0, {**better, "model.safetensors": b"better"})
    with checkpoint.file as file:
        content = file.read()
    assert (checkpoint.sha256, checkpoint.size) == (hashlib.sha256(content).hexdigest(), len(content))
    assert unpack(content, "best")["model.safetensors"] == good["model.safetensors"]
    assert checkpoint.filename == f"{sweep_id}-t00000-best.tar"


def test_trial_that_ends_while_its_checkpoint_is_opened_is_not_called_damaged(
    controller: SweepController, asked: SweepSpec, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep_id = controller.create(asked).id
    ledger = start(controller, sweep_id, store)
    task = take(ledger)
    store.save_best(sweep_id, 0, checkpoint_files(task, 1, 4.0))
    ledger.record(task, report(task, 1))
    opening = controller.store.open_best

    def opening_slowly(*which: Any) -> Any:
        file = opening(*which)
        sha256 = store.save_best(sweep_id, 0, checkpoint_files(task, 2, 3.0))
        ledger.record(task, replace(report(task, 2), checkpoint_sha256=sha256, finished=True))
        return file

    monkeypatch.setattr(controller.store, "open_best", opening_slowly)
    with controller.trial_checkpoint(sweep_id, 0).file as file:
        assert json.loads(unpack(file.read(), "it")["metrics.json"])["epoch"] == 1
    assert controller.trial(sweep_id, 0).state == "COMPLETE"


def test_checkpoint_that_is_gone_from_the_store_is_said_to_be(
    controller: SweepController, asked: SweepSpec, store: CheckpointStore
) -> None:
    sweep_id = controller.create(asked).id
    ledger = start(controller, sweep_id, store)
    task = take(ledger)
    ledger.record(task, report(task, 1))
    with pytest.raises(NoCheckpointYet, match="trial 0"):
        controller.best_checkpoint(sweep_id)


def test_cancel_is_a_wish_that_may_be_repeated(controller: SweepController, asked: SweepSpec) -> None:
    sweep_id = controller.create(asked).id
    for _ in range(2):
        assert controller.ask(sweep_id, "cancel").desired_state == "cancelled"
    assert controller.get(sweep_id).state == "cancelling"


@pytest.mark.parametrize(("verb", "state"), [("succeed", "succeeded"), ("fail", "failed")])
def test_sweep_that_has_ended_cannot_be_cancelled(
    controller: SweepController, asked: SweepSpec, store: CheckpointStore, verb: Verb, state: str
) -> None:
    sweep_id = controller.create(asked).id
    start(controller, sweep_id, store)
    controller.records.finish(sweep_id, 1, verb)
    with pytest.raises(IllegalMove, match=state):
        controller.ask(sweep_id, "cancel")


def numbers_in(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from numbers_in(each)
    elif isinstance(value, float):
        yield value


def test_no_view_holds_nan_or_infinity_however_large_the_losses(
    controller: SweepController, asked: SweepSpec, store: CheckpointStore
) -> None:
    sweep_id = controller.create(asked).id
    ledger = start(controller, sweep_id, store)
    huge, diverged = take(ledger), take(ledger)
    for epoch in (1, 2, 3):
        ledger.record(huge, with_loss(report(huge, epoch), 1e300))
    ledger.record(diverged, with_loss(report(diverged, 1), 1e5))
    ledger.record(diverged, failed("diverged", "the loss is nan"))
    views = [
        controller.get(sweep_id),
        *listed(controller),
        *controller.trials(sweep_id),
        *(controller.trial(sweep_id, number) for number in (0, 1)),
        controller.best(sweep_id),
    ]
    for view in views:
        dumped = view.model_dump()
        assert all(map(math.isfinite, numbers_in(dumped))), dumped
        json.dumps(view.model_dump(mode="json"), allow_nan=False)
    assert controller.best(sweep_id).best_valid_loss == 1e300
    assert controller.best(sweep_id).best_valid_perplexity is None


def test_readiness_names_what_does_not_answer(
    controller: SweepController, records: Records, tmp_path: Path
) -> None:
    assert controller.check_ready() == []
    broken = Records(open_engine(absent_database(tmp_path)))
    controller.records = broken
    assert controller.check_ready() == ["the database does not answer: OperationalError"]


def test_failed_trials_are_not_tried_again_where_the_budget_would_end_them_at_once(
    controller: SweepController, asked: SweepSpec, store: CheckpointStore
) -> None:
    limited = asked.model_copy(update={"budget": Budget(trials=6, wall_s=100)})
    sweep_id = controller.create(limited).id
    ledger = start(controller, sweep_id, store)
    ledger.record(take(ledger), failed("user_error", "division by zero"))
    controller.records.finish(sweep_id, 1, "fail")
    with controller.records.engine.begin() as connection:
        connection.execute(update(sweeps).values(ran_s=100.0))
    with pytest.raises(InvalidSpec, match="extend wall_s"):
        controller.retry_failed(sweep_id, RetryRequest())
    controller.extend(sweep_id, Extension(wall_s=50))
    assert controller.get(sweep_id).state == "queued"


def test_budget_below_what_has_begun_is_refused(
    controller: SweepController, asked: SweepSpec, store: CheckpointStore
) -> None:
    sweep_id = controller.create(asked).id
    ledger = start(controller, sweep_id, store)
    for _ in range(3):
        take(ledger)
    with pytest.raises(InvalidSpec, match="3 trials have begun") as refusal:
        controller.change(sweep_id, lambda revision: True, Changes(budget=BudgetChanges(trials=2)))
    assert [problem.pointer for problem in refusal.value.problems] == ["/budget/trials"]
    assert controller.get(sweep_id).trials.budget == 6
    controller.change(sweep_id, lambda revision: True, Changes(budget=BudgetChanges(trials=3)))
    assert controller.get(sweep_id).trials.budget == 3


def test_second_request_to_try_again_adds_to_the_first(
    controller: SweepController, asked: SweepSpec, store: CheckpointStore
) -> None:
    sweep_id = controller.create(asked).id
    ledger = start(controller, sweep_id, store)
    for failure_class in ("out_of_memory", "user_error"):
        ledger.record(take(ledger), failed(failure_class))
    controller.records.ask(sweep_id, "pause")
    controller.records.finish(sweep_id, 1, "park")
    for failure_class in ("out_of_memory", "user_error"):
        controller.retry_failed(sweep_id, RetryRequest(classes=[failure_class]))
    assert controller.records.get_sweep(sweep_id).retry_numbers == [0, 1]


@pytest.mark.parametrize(
    ("attribute", "value"),
    [
        ("best_valid_loss", "x"),
        pytest.param("best_valid_loss", 10**400, id="too large"),
        ("best_epoch", [1]),
        ("attempt", None),
        ("device", {}),
    ],
)
def test_sweep_with_an_attribute_of_the_wrong_type_hides_no_other_and_says_so(
    controller: SweepController, asked: SweepSpec, store: CheckpointStore, attribute: str, value: Any
) -> None:
    damaged, whole = controller.create(asked).id, controller.create(asked).id
    take(start(controller, damaged, store))
    (trial,) = find_rows(damaged, controller.storage)
    controller.storage.set_trial_user_attr(trial._trial_id, attribute, value)
    views = {view.id: view for view in listed(controller)}
    assert "cannot be read" in (views[damaged].state_reason or "")
    assert views[whole].state_reason is None
    with pytest.raises(UnreadableStudy, match=damaged):
        controller.trials(damaged)
    with pytest.raises(UnreadableStudy, match=damaged):
        controller.trial(damaged, 0)
    rows = LiveList(controller.records, controller.views).rows([damaged, whole], lambda view: view.id)
    assert rows.keys() == {damaged, whole}


def test_a_row_that_cannot_be_written_is_left_out_of_the_live_list(
    controller: SweepController, asked: SweepSpec, caplog: pytest.LogCaptureFixture
) -> None:
    strange, whole = controller.create(asked).id, controller.create(asked).id

    def row(view: SweepView) -> str:
        if view.id == strange:
            raise RuntimeError("strange")
        return view.id

    rows = LiveList(controller.records, controller.views).rows([strange, whole], row)
    assert rows.keys() == {whole}
    assert f"the row of sweep {strange}" in caplog.text


def test_sweep_whose_trials_are_damaged_hides_no_other_and_says_so(
    controller: SweepController, asked: SweepSpec, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged, whole = controller.create(asked).id, controller.create(asked).id
    start(controller, damaged, store)

    def broken(*arguments: Any, **named: Any) -> Any:
        return json.loads("{dam")

    monkeypatch.setattr(controller.storage, "get_all_trials", broken)
    views = {view.id: view for view in listed(controller)}
    assert "cannot be read" in (views[damaged].state_reason or "")
    assert views[whole].state_reason is None
    with pytest.raises(UnreadableStudy, match=damaged):
        controller.trials(damaged)
    assert controller.ask(damaged, "cancel").state == "cancelling"


def test_what_a_running_sweep_has_come_to_is_the_same_however_often_it_was_looked_at(
    records: Records, store: CheckpointStore, tmp_path: Path, asked: SweepSpec
) -> None:
    """A view that remembers the trials that have ended, beside one that has never looked."""
    storage = get_storage(open_storage(records.engine.url.render_as_string(hide_password=False)))
    controller = SweepController(records, storage, store, MemoryLauncher(cpus=4), tmp_path / "data")
    sweep_id = records.add_sweep("s1", asked).id
    ledger = start(controller, sweep_id, store)

    def told() -> SweepView:
        remembered, fresh = (
            views.sweep(records.get_sweep(sweep_id))
            for views in (controller.views, SweepViews(records, storage))
        )
        steady = {"ran_s": 0.0, "time_left_s": None}
        assert remembered.model_copy(update=steady) == fresh.model_copy(update=steady)
        return fresh

    told()
    first, second = take(ledger), take(ledger)
    ledger.record(first, with_loss(report(first, 1), 4.0))
    assert told().best is not None
    ledger.record(second, with_loss(report(second, 1), 3.0))
    ledger.record(second, failed("infrastructure"))  # tried again
    for task in (first, take(ledger)):
        for epoch in (2, 3):
            ledger.record(task, with_loss(report(task, epoch), 4.0 - task.number - epoch / 10))
            told()
    ended = told()
    assert (ended.trials.complete, ended.epochs_done, ended.trials.running) == (2, 6, 0)
    assert ended.best is not None
    assert ended.best.number == second.number
    check = ledger.next_check()
    assert check is not None
    ledger.record_verification(check.number, replace(verified(check), outcome="differs", valid_loss=9.0))
    refuted = told()
    assert refuted.best is not None
    assert refuted.best.number == first.number
    diverged = take(ledger)
    ledger.record(diverged, with_loss(report(diverged, 1), 1.0))
    ledger.record(diverged, failed("diverged"))
    assert told().best == refuted.best
    statements: list[str] = []
    event.listen(records.engine, "before_cursor_execute", lambda *given: statements.append(given[2]))
    controller.views.sweep(records.get_sweep(sweep_id))
    assert not [words for words in statements if "GROUP BY" in words and " IN (" not in words]
    records.wish(sweep_id, first.number, "trial_pinned", pinned=True)
    assert told().best is not None
    storage._backend.engine.dispose()  # type: ignore[attr-defined]  # behind Optuna's cache
