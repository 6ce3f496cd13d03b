"""What clients may do with sweeps: create, look, cancel, fetch.

Wishes are written down; the reconciler carries them out.
"""

import hashlib
import logging
import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast, get_args

from optuna.storages import BaseStorage, get_storage
from pydantic import ValidationError
from pydantic_core import PydanticCustomError
from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from service.archives import archive_of, filename_of
from service.changes import changed, extended
from service.database import migrate, open_engine
from service.errors import (
    CommandFailed,
    IllegalMove,
    IllegalTrialMove,
    InvalidSpec,
    NoCheckpointYet,
    PointNotFound,
    Problem,
)
from service.fitting import certain_problems, corpus_stamp, disk_of, find_little_room
from service.launcher import Capacity, Launcher
from service.lifecycle import TERMINAL_STATES, Verb, legal_requests, legal_words
from service.pages import SweepQuery
from service.problems import problems_in
from service.records import Records, SweepRecord, Within
from service.resources import placed, problems_with
from service.revisions import check_schema
from service.schemas import (
    Changes,
    Extension,
    PointView,
    RetryRequest,
    SweepDetail,
    SweepView,
    TrialDetail,
    TrialView,
    View,
)
from service.settings import Settings
from service.studies import open_storage
from service.views import NOTHING_YET, SweepViews, best_of, point_view
from trials.corpora import CorpusError, check_corpus, resolved
from trials.files import StoreAway, StoreRefused
from trials.rows import Remembered
from trials.spec import Budget, FailureClass, Point, SweepRequest, SweepSpec, merged
from trials.steps import Probe, ProbeOrder
from trials.store import CheckpointStore
from trials.studies import rename_study

log = logging.getLogger(__name__)

RETRIED_BY_DEFAULT: frozenset[FailureClass] = frozenset(get_args(FailureClass)) - {"diverged"}


@dataclass(frozen=True)
class OpenCheckpoint:
    """A checkpoint archive, open for reading; whoever asked for it closes it."""

    file: BinaryIO
    size: int
    sha256: str
    filename: str


@contextmanager
def closing_on_error(file: BinaryIO) -> Iterator[None]:
    try:
        yield
    except BaseException:
        file.close()
        raise


Write = Callable[[Connection, View], None]
"""Writes the answer to a request down, in the transaction that carries it out."""


def _within(write: Write | None, look: Callable[[SweepRecord], View]) -> Within | None:
    return None if write is None else lambda connection, record: write(connection, look(record))


class SweepController:
    """The verbs of the API, without HTTP."""

    def __init__(
        self,
        records: Records,
        storage: BaseStorage,
        store: CheckpointStore,
        launcher: Launcher,
        data_dir: Path,
        store_url: str | None = None,
    ) -> None:
        """`store_url` is what the store was opened with: its disk is looked at before a sweep is taken."""
        self.records = records
        self.storage = storage
        self.store = store
        self.views = SweepViews(records, storage)
        self._launcher = launcher
        self.data_dir = data_dir
        self.store_url = store_url
        self.vocabularies: Remembered[bytes, int] = Remembered(512, lambda _: 0)
        """Sizes of those that are known, by the stamps of their corpora."""

    def create(self, request: SweepSpec, write: Write | None = None) -> SweepDetail:
        """Queue a sweep. Raises InvalidSpec where it could not run here; nothing is written then."""
        spec = self.checked(request)
        record = self.records.add_sweep(
            f"s{secrets.token_hex(5)}",
            spec,
            _within(write, lambda record: self.views.detail(record, NOTHING_YET)),
        )
        return self.views.detail(record, NOTHING_YET)

    def checked(self, request: SweepSpec) -> SweepSpec:
        """A spec as it would be written down. Raises InvalidSpec where it could not run here."""
        capacity = self._launcher.capacity()
        spec = placed(request, capacity)
        corpus, problems = self._check_corpus(spec)
        problems += problems_with(spec, capacity)
        if problems:
            raise InvalidSpec(problems)
        spec = spec.model_copy(update={"corpus": corpus})
        types = self.vocabularies.find(corpus_stamp(corpus))
        if problems := certain_problems(spec, capacity, types, disk_of(self.store_url)):
            raise InvalidSpec(problems)
        return spec

    def capacity(self) -> Capacity:
        return self._launcher.capacity()

    async def probe(self, order: ProbeOrder) -> Probe:
        """Raises ProbeFailed, TextUnusable."""
        return await self._launcher.probe(order)

    def _check_corpus(self, spec: SweepSpec) -> tuple[Any, list[Problem]]:
        try:
            corpus = resolved(spec.corpus, Path.cwd())
            check_corpus(corpus, self.data_dir)
        except CorpusError as error:
            return None, [Problem(f"/corpus{error.pointer}", "corpus_unusable", str(error))]
        return corpus, []

    def list_sweeps(self, asked: SweepQuery) -> tuple[list[bytes], str | None]:
        """A page of sweeps, each a SweepView in JSON, and the token of the next one."""
        stamps, token = self.records.page(asked)
        return self.views.written_sweeps(stamps), token

    def sweeps_on(self, asked: SweepQuery) -> tuple[list[SweepView], str | None]:
        """The same page, for those who read it themselves."""
        stamps, token = self.records.page(asked)
        return self.views.sweeps(stamps), token

    def get(self, sweep_id: str) -> SweepDetail:
        """Raises SweepNotFound."""
        return self.views.detail(self.records.get_sweep(sweep_id))

    def look(self, sweep_id: str) -> SweepView:
        """As `get`, also where the spec makes no sense. Raises SweepNotFound."""
        return self.views.sweep(self.records.get_sweep(sweep_id))

    def trials(self, sweep_id: str) -> list[TrialView]:
        """In the order of their numbers. Raises SweepNotFound."""
        return self.views.trials(self.records.get_sweep(sweep_id))

    def trial(self, sweep_id: str, number: int) -> TrialDetail:
        """One trial with its whole curve. Raises SweepNotFound, TrialNotFound."""
        return self.views.trial(self.records.get_sweep(sweep_id), number)

    def ask(self, sweep_id: str, verb: Verb, write: Write | None = None) -> SweepView:
        """Pause, resume, stop, cancel or delete. Raises SweepNotFound, IllegalMove."""
        look = self._look(sweep_id)
        return look(self.records.ask(sweep_id, verb, _within(write, look)))

    def _look(self, sweep_id: str) -> Callable[[SweepRecord], SweepView]:
        """How a sweep will look once a request is carried out, which changes nothing of its trials."""
        progress = self.views.progress(self.records.get_sweep(sweep_id))
        return lambda record: self.views.sweep(record, progress)

    def extend(self, sweep_id: str, by: Extension, write: Write | None = None) -> SweepView:
        """Raise a budget; a sweep that has ended goes on. Raises SweepNotFound, IllegalMove, InvalidSpec."""
        look = self._look(sweep_id)
        return look(
            self.records.extend(sweep_id, lambda record: self._extended(record, by), _within(write, look))
        )

    def _extended(self, record: SweepRecord, by: Extension) -> Budget:
        trials = self.views.trials(record)
        larger = extended(record.spec.budget, by)
        _require_room(larger, record, trials)
        return larger

    def change(self, sweep_id: str, is_wanted: Callable[[int], bool], changes: Changes) -> SweepDetail:
        """Give a sweep that is still wanted as it is another name, other labels, another place in the queue.

        Raises SweepNotFound, ChangedSince, IllegalMove, InvalidSpec.
        """
        progress = self.views.progress(self.records.get_sweep(sweep_id))
        record = self.records.change(
            sweep_id, is_wanted, lambda record: self._changed(record, changes), changes.model_fields_set
        )
        if "name" in changes.model_fields_set:
            rename_study(record.study, record.spec.name, self.storage)
        return self.views.detail(record, progress)

    def _changed(self, record: SweepRecord, changes: Changes) -> SweepSpec:
        other_budget = "budget" in changes.model_fields_set
        if other_budget and record.state in {*TERMINAL_STATES, "cancelling", "deleting"}:
            raise IllegalMove(
                f"sweep {record.id} is {record.state}: its budget cannot change; {legal_words(record.state)}",
                legal_requests(record.state),
            )
        spec = changed(record.spec, changes)
        begun = len(self.views.trials(record)) if other_budget else 0
        if spec.budget.trials < begun:
            words = f"{begun} trials have begun: a budget has at least as many; to begin no other, stop it"
            raise InvalidSpec([Problem("/budget/trials", "too_few_trials", words)])
        return spec

    def retry_failed(self, sweep_id: str, request: RetryRequest, write: Write | None = None) -> SweepView:
        """Have failed trials tried again, under their own numbers.

        Raises SweepNotFound, IllegalMove, InvalidSpec.
        """
        classes = set(request.classes if request.classes is not None else RETRIED_BY_DEFAULT)
        record = self.records.get_sweep(sweep_id)
        self.records.require_legal(record, "retry_failed")
        trials = self.views.trials(record)
        again = [trial for trial in trials if trial.failure and trial.failure.failure_class in classes]
        if not again:
            had = sorted({trial.failure.failure_class for trial in trials if trial.failure})
            words = f"no trial of sweep {sweep_id} has failed of {', '.join(sorted(classes))}"
            raise InvalidSpec(
                [Problem("/classes", "nothing_to_retry", f"{words}; failures: {had or 'none'}")]
            )
        return self._retry(record, trials, again, write)

    def _retry(
        self, record: SweepRecord, trials: list[TrialView], again: list[TrialView], write: Write | None
    ) -> SweepView:
        _require_room(record.spec.budget, record, trials, again)
        look = self._look(record.id)
        return look(self.records.retry(record.id, [trial.number for trial in again], _within(write, look)))

    def retry_trial(self, sweep_id: str, number: int, write: Write | None = None) -> SweepView:
        """Have one failed trial tried again.

        Raises SweepNotFound, TrialNotFound, IllegalMove, IllegalTrialMove, InvalidSpec.
        """
        record = self.records.get_sweep(sweep_id)
        self.records.require_legal(record, "retry_failed")
        trial = self.views.trial(record, number)
        if trial.failure is None:
            raise IllegalTrialMove(f"trial {number} of sweep {sweep_id} is {trial.state}: it has not failed")
        trials = self.views.trials(record)
        return self._retry(record, trials, [trials[number]], write)

    def stop_trial(self, sweep_id: str, number: int, write: Write | None = None) -> TrialView:
        """End one trial where it stands. Raises SweepNotFound, TrialNotFound, IllegalMove."""
        record = self.records.get_sweep(sweep_id)
        trial = self.views.trial(record, number)
        if trial.state not in {"RUNNING", "WAITING"}:
            raise IllegalTrialMove(
                f"trial {number} of sweep {sweep_id} is {trial.state}: it has ended already"
            )
        return self._wish(record, trial, "trial_stop_requested", write, stopping=True)

    def pin_trial(self, sweep_id: str, number: int, pinned: bool, write: Write | None = None) -> TrialView:
        """Have a trial's best checkpoint stay, or leave that to `retention` again.

        Raises SweepNotFound, TrialNotFound, IllegalTrialMove.
        """
        record = self.records.get_sweep(sweep_id)
        trial = self.views.trial(record, number)
        if pinned and trial.best_epoch is not None and not self.store.has_best(sweep_id, number):
            raise IllegalTrialMove(f"the checkpoint of trial {number} of sweep {sweep_id} is removed already")
        kind = "trial_pinned" if pinned else "trial_unpinned"
        return self._wish(record, trial.model_copy(update={"pinned": pinned}), kind, write, pinned=pinned)

    def _wish(
        self, record: SweepRecord, trial: TrialDetail, kind: str, write: Write | None, **wishes: bool
    ) -> TrialView:
        view = trial.in_short
        self.records.wish(record.id, trial.number, kind, _within(write, lambda _: view), **wishes)
        return view

    def add_point(self, sweep_id: str, params: Point, write: Write | None = None) -> PointView:
        """Have these values tried next. Raises SweepNotFound, InvalidSpec."""
        spec = self.records.get_sweep(sweep_id).spec
        try:
            spec.taken(params, "/params")
        except PydanticCustomError as error:
            context = error.context or {}
            raise InvalidSpec([Problem(context["pointer"], error.type, error.message())]) from error
        within = None if write is None else lambda c, row: write(c, point_view(row))
        return point_view(self.records.add_point(sweep_id, params, within))

    def points(self, sweep_id: str) -> list[PointView]:
        """Those tried already, too, in their order. Raises SweepNotFound."""
        self.records.get_sweep(sweep_id)
        return [point_view(row) for row in self.records.list_points(sweep_id)]

    def point(self, sweep_id: str, point_id: int) -> PointView:
        """Raises SweepNotFound, PointNotFound."""
        for point in self.points(sweep_id):
            if point.id == point_id:
                return point
        raise PointNotFound(f"sweep {sweep_id} has no point {point_id}")

    def clone(self, sweep_id: str, changes: dict[str, Any], write: Write | None = None) -> SweepDetail:
        """Queue a new sweep with this one's spec and some changes. Raises SweepNotFound, InvalidSpec."""
        if "preset" in changes:
            words = "a clone has the spec of its origin: change its fields, or submit a sweep with the preset"
            raise InvalidSpec([Problem("/preset", "no_preset", words)])
        written = self.records.get_sweep(sweep_id).spec.model_dump(mode="json")
        body = merged({**written, "preset": None}, changes)
        try:
            request = SweepRequest.model_validate(body)
        except ValidationError as error:
            raise InvalidSpec(problems_in(error.errors(), body, SweepRequest.model_json_schema())) from error
        return self.create(request, write)

    def best(self, sweep_id: str) -> TrialView:
        """The trial with the lowest validation loss so far, whatever became of it. Raises NoCheckpointYet."""
        trials = self.trials(sweep_id)
        best = best_of(trials)
        if best is None and any(trial.verification is not None for trial in trials):
            raise NoCheckpointYet(
                f"no checkpoint of sweep {sweep_id} may be called best: evaluated again, none was what its "
                "trial had reported; each trial's `verification` says why"
            )
        if best is None:
            state = self.records.get_sweep(sweep_id).state
            later = "" if state in TERMINAL_STATES else "; ask again later"
            raise NoCheckpointYet(f"no trial of sweep {sweep_id} has finished an epoch{later}")
        return best

    def best_checkpoint(self, sweep_id: str) -> OpenCheckpoint:
        """The best trial's archive as it is now: a better one, written later, does not disturb its reader."""
        return self.open_checkpoint(sweep_id, self.best(sweep_id).number)

    def trial_checkpoint(self, sweep_id: str, number: int) -> OpenCheckpoint:
        """A trial's best archive as it is now. Raises SweepNotFound, TrialNotFound, NoCheckpointYet."""
        if self.trial(sweep_id, number).best_epoch is None:
            raise NoCheckpointYet(f"trial {number} of sweep {sweep_id} has finished no epoch")
        return self.open_checkpoint(sweep_id, number)

    def open_checkpoint(self, sweep_id: str, number: int) -> OpenCheckpoint:
        """Raises NoCheckpointYet."""
        record = self.records.get_sweep(sweep_id)
        trial = self.views.trial(record, number)  # first: what its rows tell of is in the file by then
        try:
            file = self.store.open_best(sweep_id, number)
        except FileNotFoundError as error:
            raise NoCheckpointYet(f"the checkpoint of trial {number} of sweep {sweep_id} is gone") from error
        with closing_on_error(file):
            archive = archive_of(file, record, trial)
            sha256 = hashlib.file_digest(cast(Any, archive), "sha256").hexdigest()
            archive.seek(0)
        return OpenCheckpoint(cast(BinaryIO, archive), archive.size, sha256, filename_of(sweep_id, number))

    def check_ready(self) -> list[str]:
        """What does not work, in words; nothing when all is well."""
        try:
            self.records.ping()
        except SQLAlchemyError as error:
            return [f"the database does not answer: {type(error).__name__}"]
        return [words for words in (find_little_room(self.data_dir), self.store.check()) if words is not None]


def build_controller(settings: Settings, launcher: Launcher) -> SweepController:
    """Open the database and the store, making what is missing."""
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    check_schema(settings.resolved_database_url)
    engine = open_engine(settings.resolved_database_url)
    migrate(engine)
    storage = get_storage(open_storage(settings.resolved_database_url))
    store = open_store(settings)
    data_dir, store_url = settings.data_dir.resolve(), settings.resolved_store_url
    return SweepController(Records(engine), storage, store, launcher, data_dir, store_url)


def open_store(settings: Settings) -> CheckpointStore:
    """Of checkpoints. One that is away may come back; raises CommandFailed where somebody must see to it."""
    try:
        store = CheckpointStore(settings.resolved_store_url)
        store.require()
    except StoreAway as error:
        log.warning("%s; until then no checkpoint can be saved or fetched", error)
    except StoreRefused as error:
        raise CommandFailed(str(error)) from error
    return store


def _require_room(
    budget: Budget, record: SweepRecord, trials: list[TrialView], again: Sequence[TrialView] = ()
) -> None:
    """Raises InvalidSpec where a sweep that has ended would end at once, though these are tried again."""
    used_up = _used_up(budget, record, trials, again) if record.state in TERMINAL_STATES else None
    if used_up is not None:
        raise InvalidSpec([Problem("", "still_used_up", used_up)])


def _used_up(
    budget: Budget, record: SweepRecord, trials: list[TrialView], again: Sequence[TrialView]
) -> str | None:
    """Which limit it would end at, in words."""
    best = best_of(trials)
    failed = [trial for trial in trials if _has_failed(trial) and trial not in again]
    if len(trials) >= budget.trials and not again and all(trial.state != "WAITING" for trial in trials):
        return f"all {budget.trials} trials of the budget have ended: extend trials"
    if budget.wall_s is not None and record.running_s() >= budget.wall_s:
        return f"the sweep has run for {record.running_s():.0f} s of {budget.wall_s:g}: extend wall_s"
    if budget.max_failed is not None and len(failed) > budget.max_failed:
        return f"{len(failed)} trials have failed, of {budget.max_failed} that may: extend max_failed"
    if (
        budget.target is not None
        and best is not None
        and (best.best_valid_perplexity or math.inf) <= budget.target
    ):
        return f"trial {best.number} has reached the target of {budget.target:g}: give a lower one"
    return None


def _has_failed(trial: TrialView) -> bool:
    return trial.failure is not None and trial.failure.failure_class != "cancelled"
