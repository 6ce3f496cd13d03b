"""Sweeps, their epochs and events as rows; and what a driver may write, fenced by its generation."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any, NamedTuple

from pydantic_core import from_json, to_json
from sqlalchemy import (
    Connection,
    Engine,
    Integer,
    RowMapping,
    bindparam,
    delete,
    event,
    func,
    insert,
    select,
    update,
)
from sqlalchemy.exc import IntegrityError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.sql import ColumnElement, Select

from service.database import aware, naive, now
from service.errors import (
    ChangedSince,
    IllegalMove,
    PointNotFound,
    PointTaken,
    SweepNotFound,
    UnreadableSpec,
)
from service.event_log import find_ends_told, write_event
from service.lifecycle import (
    MOVES,
    MOVING,
    REQUESTS,
    TERMINAL_STATES,
    WITH_DRIVER,
    State,
    Verb,
    legal_requests,
    legal_words,
)
from service.listing import ORDERS, RESOURCES, marks_of_sweeps, page_of_sweeps
from service.pages import SweepQuery
from service.tables import epochs, events, leases, points, sweeps, totals, trial_wishes, verifications
from trials.ledger import Fenced, JournalAway, Orders, untold
from trials.perplexity import finite_perplexity
from trials.rows import MOST_NAMED
from trials.shares import Claim
from trials.spec import Budget, Resources, SweepSpec
from trials.studies import storable
from trials.verification import Outcome, Verification

LEASE = timedelta(seconds=20)
"""How long a driver may be silent before another one is started."""
FIRST_LEASE = timedelta(seconds=60)
"""The same before its first word: on a busy machine, loading what a driver needs may outlast a lease."""


class Stamp(NamedTuple):
    """What tells a sweep from what it was before: it comes back to a state only by a wish or by a driver."""

    id: str
    generation: int
    state: State
    revision: int


class Mark(NamedTuple):
    """A stamp with what its drivers have written: of what the database says of a sweep, all that is shown is
    the same for as long as this is."""

    id: str
    generation: int
    state: State
    revision: int
    writes: int | None
    """None where the driver is of a version that does not count."""


@dataclass(frozen=True)
class SweepRecord:
    """A sweep's row."""

    id: str
    written_spec: Any
    """As it is in the database: to look at a sweep, or to delete it, it need not make sense."""
    state: State
    state_since: datetime
    state_reason: str | None
    generation: int
    epochs_at_launch: int
    fruitless_launches: int
    driver: dict[str, Any] | None
    lease_until: datetime | None
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    ran_s: float
    running_since: datetime | None
    study: str
    """Name of its study."""
    retry_numbers: list[int] | None
    """Failed trials that the next driver tries again."""
    revision: int
    """Grows with all that clients ask of it."""
    writes: int | None
    """Grows with every transaction that writes something of its trials, to the study too; not with beats."""

    @property
    def stamp(self) -> Stamp:
        return Stamp(self.id, self.generation, self.state, self.revision)

    @property
    def mark(self) -> Mark:
        return Mark(*self.stamp, self.writes)

    @property
    def spec(self) -> SweepSpec:
        """Raises UnreadableSpec."""
        try:
            return _spec(to_json(self.written_spec))
        except ValueError as error:
            first = str(error).partition("\n")[0]
            raise UnreadableSpec(
                f"the spec of sweep {self.id} cannot be read: {first}; it can be cancelled and deleted; "
                "its checkpoints are where they were"
            ) from error

    @property
    def driver_lived_s(self) -> float:
        """How long its latest driver was heard of, about; 0 where that is not known."""
        if self.driver is None or self.lease_until is None or "started" not in self.driver:
            return 0.0
        return (self.lease_until - LEASE).timestamp() - float(self.driver["started"])

    @property
    def lease_expired(self) -> bool:
        return self.lease_until is None or self.lease_until < now()

    def running_s(self) -> float:
        """Seconds that it has run, those in a queue and those paused left out."""
        return _running_s(self.ran_s, self.running_since)


Within = Callable[[Connection, SweepRecord], None]
"""Written in the transaction that carries a request out, once it is: all of it is there, or nothing."""
PointWithin = Callable[[Connection, RowMapping], None]


class Records:
    """Reads and writes our tables. Every method is one transaction."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def add_sweep(self, sweep_id: str, spec: SweepSpec, within: Within | None = None) -> SweepRecord:
        created_at = naive(now())
        values = {
            "id": sweep_id,
            "spec": spec.model_dump(mode="json"),
            "state": "queued",
            "created_at": created_at,
            "state_since": created_at,
            "study": sweep_id,
        }
        with self.engine.begin() as connection:
            row = connection.execute(_ADD, values).mappings().one()
            given = [_point(sweep_id, point) for point in spec.points]
            if given:
                connection.execute(insert(points).values(given))
            write_event(connection, sweep_id, "sweep_submitted", {})
            record = _record(row)
            if within is not None:
                within(connection, record)
            return record

    def get_sweep(self, sweep_id: str) -> SweepRecord:
        """Raises SweepNotFound."""
        with self.engine.connect() as connection:
            return sweep_in(connection, sweep_id)

    def list_sweeps(self, *states: str) -> list[SweepRecord]:
        """In the order in which they came; of all states if none is named."""
        query = select(sweeps).order_by(sweeps.c.position)
        if states:
            query = query.where(sweeps.c.state.in_(states))
        with self.engine.connect() as connection:
            return [_record(row) for row in connection.execute(query).mappings()]

    def first_in_queue(self, count: int) -> list[SweepRecord]:
        """Of those that are queued, the next to start: by priority, and then as they came."""
        queued = select(sweeps).where(sweeps.c.state == "queued")
        query = queued.order_by(ORDERS["priority"].desc(), sweeps.c.position).limit(count)
        with self.engine.connect() as connection:
            return [_record(row) for row in connection.execute(query).mappings()]

    def page(self, asked: SweepQuery) -> tuple[list[Stamp], str | None]:
        """A page of sweeps, and the token of the next one."""
        with self.engine.connect() as connection:
            rows, token = page_of_sweeps(connection, asked)
        return [Stamp(*row[: len(Stamp._fields)]) for row in rows], token

    def marks(self) -> list[Mark]:
        """Of all sweeps."""
        with self.engine.connect() as connection:
            return [Mark(*row) for row in marks_of_sweeps(connection)]

    def find_sweeps(self, sweep_ids: Collection[str]) -> dict[str, SweepRecord]:
        """Those of them that are there, by id."""
        if not sweep_ids:
            return {}
        query = select(sweeps).where(sweeps.c.id.in_(sweep_ids))
        with self.engine.connect() as connection:
            return {row["id"]: _record(row) for row in connection.execute(query).mappings()}

    def list_left_behind(self) -> list[SweepRecord]:
        """Sweeps at rest whose drivers nobody has cleaned up after."""
        left = sweeps.c.state.not_in(MOVING) & sweeps.c.driver.is_not(None)
        with self.engine.connect() as connection:
            return [_record(row) for row in connection.execute(select(sweeps).where(left)).mappings()]

    def ask(self, sweep_id: str, verb: Verb, within: Within | None = None) -> SweepRecord:
        """Carry out what a client asks for. Raises SweepNotFound, IllegalMove."""
        with self.engine.begin() as connection:
            row = _locked_row(connection, sweep_id)
            _require_legal(row, verb)
            _move(connection, row, verb, {})
            return _done(connection, sweep_id, within)

    def retry(
        self,
        sweep_id: str,
        numbers: Collection[int],
        within: Within | None = None,
    ) -> SweepRecord:
        """Have failed trials tried again, beside those asked for earlier.

        Raises SweepNotFound, IllegalMove.
        """
        with self.engine.begin() as connection:
            row = _locked_row(connection, sweep_id)
            _require_legal(row, "retry_failed")
            again = sorted({*numbers, *(row["retry_numbers"] or [])})
            _move(connection, row, "retry_failed", {"retry_numbers": again})
            connection.execute(  # trained again they come to the same file, which may have been damaged
                delete(verifications).where(
                    (verifications.c.sweep_id == sweep_id) & verifications.c.number.in_(numbers)
                )
            )
            connection.execute(  # what was stopped is not to stop again
                update(trial_wishes)
                .where((trial_wishes.c.sweep_id == sweep_id) & trial_wishes.c.number.in_(numbers))
                .values(stopping=False)
            )
            return _done(connection, sweep_id, within)

    def change(
        self,
        sweep_id: str,
        is_wanted: Callable[[int], bool],
        change: Callable[[SweepRecord], SweepSpec],
        fields: Collection[str],
        within: Within | None = None,
    ) -> SweepRecord:
        """Give a sweep another spec, if it `is_wanted` of the revision that it has.

        Raises SweepNotFound, ChangedSince, and what `change` raises.
        """
        while True:
            record = self.get_sweep(sweep_id)
            if not is_wanted(record.revision):
                raise ChangedSince(f"sweep {sweep_id} is of revision {record.revision} by now: look again")
            spec = change(record).model_dump(mode="json")  # which reads other tables: without a lock
            with self.engine.begin() as connection:
                row = _locked_row(connection, sweep_id)
                if (row["revision"], row["state"]) == (record.revision, record.state):
                    _bump(connection, sweep_id, {"spec": spec})
                    write_event(connection, sweep_id, "sweep_changed", {"fields": sorted(fields)})
                    return _done(connection, sweep_id, within)

    def extend(
        self, sweep_id: str, change: Callable[[SweepRecord], Budget], within: Within | None = None
    ) -> SweepRecord:
        """Change a sweep's budget. Raises SweepNotFound, IllegalMove, and what `change` raises."""
        while True:
            record = self.get_sweep(sweep_id)
            self.require_legal(record, "extend")
            budget = change(record).model_dump(mode="json")  # which reads other tables: without a lock
            with self.engine.begin() as connection:
                row = _locked_row(connection, sweep_id)
                if (row["spec"], row["state"]) == (record.written_spec, record.state):
                    spec = {**record.written_spec, "budget": budget}
                    _move(connection, row, "extend", {"spec": spec})
                    return _done(connection, sweep_id, within)

    def require_legal(self, record: SweepRecord, verb: Verb) -> None:
        """Raises IllegalMove."""
        _require_legal({"id": record.id, "state": record.state}, verb)

    def claim(self, record: SweepRecord, *, fruitless: int, epochs_done: int) -> int | None:
        """Take a sweep over for a new driver: from here on, nothing that an earlier one writes is accepted.

        Returns the new generation, or None if somebody else was faster.
        """
        values = {
            "generation": record.generation + 1,
            "lease_until": naive(now() + FIRST_LEASE),
            "started_at": naive(record.started_at or now()),
            "driver": None,
            "wants": None,
            "writes": 0,
            "fruitless_launches": fruitless,
            "epochs_at_launch": epochs_done,
        }
        return record.generation + 1 if self._try(record.id, record.generation, "drive", values) else None

    def fence(self, record: SweepRecord) -> int | None:
        """As `claim`, but for nobody: a sweep is ended once its driver can write no more."""
        same = (
            (sweeps.c.id == record.id)
            & (sweeps.c.generation == record.generation)
            & (sweeps.c.state == record.state)
        )
        generation = record.generation + 1
        values = {"generation": generation, "driver": None, "lease_until": None}
        with self.engine.begin() as connection:
            fenced = connection.execute(update(sweeps).where(same).values(values)).rowcount == 1
            if fenced:
                write_event(connection, record.id, "driver_fenced", {"generation": generation})
        return generation if fenced else None

    def release(self, record: SweepRecord) -> None:
        """Write down that a driver was stopped for no fault of its own; the next look starts another."""
        same = (sweeps.c.id == record.id) & (sweeps.c.generation == record.generation)
        values = {
            "driver": None,
            "lease_until": None,
            "epochs_at_launch": -1,  # so it was not fruitless
            "ran_s": record.running_s(),
            "running_since": None,
        }
        with self.engine.begin() as connection:
            if connection.execute(update(sweeps).where(same).values(values)).rowcount == 1:
                write_event(connection, record.id, "driver_stopped", {"generation": record.generation})

    def finish(
        self,
        sweep_id: str,
        generation: int,
        verb: Verb,
        reason: str | None = None,
        under: Orders | None = None,
    ) -> bool:
        """Write a sweep's end, or that it rests.

        False where another generation has taken it over, or the orders `under` which that was decided are no
        longer those of now.
        """
        values = {"state_reason": storable(reason)} if reason is not None else {}
        return self._try(sweep_id, generation, verb, {**values, "lease_until": None}, under)

    def switch_study(self, sweep_id: str, generation: int, study: str) -> None:
        """Let a sweep go on with a study in which what was to be tried again is open. Raises Fenced."""
        with self.engine.begin() as connection:
            _renew(connection, sweep_id, generation)
            connection.execute(
                update(sweeps).where(sweeps.c.id == sweep_id).values(study=study, retry_numbers=None)
            )

    def set_driver(self, sweep_id: str, generation: int, driver: dict[str, Any] | None) -> None:
        current = (sweeps.c.id == sweep_id) & (sweeps.c.generation == generation)
        with self.engine.begin() as connection:
            connection.execute(update(sweeps).where(current).values(driver=driver))

    def remove_sweep(self, sweep_id: str) -> None:
        """With its epochs and events; only while it is being deleted."""
        deleting = (sweeps.c.id == sweep_id) & (sweeps.c.state == "deleting")
        epochs_done = self.count_epochs(sweep_id)
        with self.engine.begin() as connection:
            if connection.execute(delete(sweeps).where(deleting)).rowcount == 1:
                _add(connection, "epochs_of_deleted_sweeps", epochs_done)

    def hold_lease(
        self,
        name: str,
        holder: dict[str, Any],
        lasting: timedelta,
        is_dead: Callable[[dict[str, Any]], bool],
    ) -> bool:
        """Take or renew a lease of the whole service; False while somebody else, who is not dead, holds it.

        It is renewed once a third of it is over, so that to ask often costs a look and no write.
        """
        of_name = leases.c.name == name
        values = {"holder": holder, "until": naive(now() + lasting)}
        with self.engine.begin() as connection:
            found = connection.execute(select(leases).where(of_name)).mappings().one_or_none()
            if found is not None:
                left = found["until"] - naive(now())
                if found["holder"] == holder and left > lasting * 2 / 3:
                    return True
                if found["holder"] != holder and left >= timedelta(0) and not is_dead(found["holder"]):
                    return False
                unchanged = of_name & (leases.c.until == found["until"])
                return connection.execute(update(leases).where(unchanged).values(values)).rowcount == 1
        try:
            with self.engine.begin() as connection:
                connection.execute(insert(leases).values(name=name, **values))
        except IntegrityError:  # somebody was faster
            return False
        return True

    def find_lease(self, name: str) -> tuple[dict[str, Any], datetime] | None:
        """Who holds it, and until when; None where nobody does."""
        with self.engine.connect() as connection:
            found = connection.execute(select(leases).where(leases.c.name == name)).mappings().one_or_none()
        until = aware(found["until"]) if found is not None else None
        return (found["holder"], until) if found is not None and until is not None and until > now() else None

    def give_lease_up(self, name: str, holder: dict[str, Any]) -> None:
        with self.engine.begin() as connection:
            found = connection.execute(select(leases).where(leases.c.name == name)).mappings().one_or_none()
            if found is not None and found["holder"] == holder:
                mine = (leases.c.name == name) & (leases.c.until == found["until"])
                connection.execute(delete(leases).where(mine))

    def _try(
        self,
        sweep_id: str,
        generation: int,
        verb: Verb,
        values: dict[str, Any],
        under: Orders | None = None,
    ) -> bool:
        """Move a sweep that is still of this generation, and in a state from which the move is legal."""
        with self.engine.begin() as connection:
            row = _locked_row(connection, sweep_id, required=False)
            if row is None or row["generation"] != generation or row["state"] not in MOVES[verb].states:
                return False
            if under is not None and (row["state"], _budget_of(row)) != (under.state, under.budget):
                return False
            _move(connection, row, verb, values)
        return True

    def count_epochs(self, sweep_id: str, number: int | None = None) -> int:
        of_sweep: ColumnElement[bool] = epochs.c.sweep_id == sweep_id
        if number is not None:
            of_sweep = of_sweep & (epochs.c.number == number)
        with self.engine.connect() as connection:
            return connection.execute(select(func.count()).select_from(epochs).where(of_sweep)).scalar_one()

    def latest_epochs(self, sweep_id: str, numbers: Collection[int] | None = None) -> dict[int, RowMapping]:
        """The latest recorded epoch of every trial, or of some, and its valid_loss, by trial number."""
        few = numbers is not None and len(numbers) <= MOST_NAMED
        query, named = (_LATEST_EPOCHS_OF, {"numbers": numbers}) if few else (_LATEST_EPOCHS, {})
        with self.engine.connect() as connection:
            rows = connection.execute(query, {"sweep_id": sweep_id, **named}).mappings()
            return {row["number"]: row for row in rows}

    def curve(self, sweep_id: str, number: int) -> list[dict[str, Any]]:
        with self.engine.connect() as connection:
            found = connection.execute(_CURVE, {"sweep_id": sweep_id, "number": number})
            names = tuple(found.keys())
            return [dict(zip(names, row, strict=True)) for row in found.all()]

    def epochs_of(self, sweep_id: str, arms: int, every: int) -> Sequence[Any]:
        """What the pictures of a report take of each epoch of every so-manieth draw, by trial and epoch."""
        asked = {"sweep_id": sweep_id, "arms": arms, "every": every}
        with self.engine.connect() as connection:
            return connection.execute(_EPOCHS, asked).all()

    def pinned(self, sweep_id: str) -> set[int]:
        """Numbers of the trials whose best checkpoints stay."""
        with self.engine.connect() as connection:
            return pinned_in(connection, sweep_id)

    def verifications(self, sweep_id: str) -> dict[int, RowMapping]:
        """Of best checkpoints, by trial number."""
        with self.engine.connect() as connection:
            return verifications_in(connection, sweep_id)

    def wish(
        self, sweep_id: str, number: int, kind: str, within: Within | None = None, **wishes: bool
    ) -> SweepRecord:
        """Write down what is wished for one trial: `pinned`, `stopping`. Raises SweepNotFound."""
        of_trial = (trial_wishes.c.sweep_id == sweep_id) & (trial_wishes.c.number == number)
        key = {"sweep_id": sweep_id, "number": number}
        with self.engine.begin() as connection:
            _locked_row(connection, sweep_id)
            if not connection.execute(update(trial_wishes).where(of_trial).values(**wishes)).rowcount:
                values = {"pinned": False, "stopping": False, **wishes, **key}
                connection.execute(insert(trial_wishes).values(values))
            _bump(connection, sweep_id, {})
            write_event(connection, sweep_id, kind, {"number": number})
            return _done(connection, sweep_id, within)

    def add_point(
        self, sweep_id: str, params: Mapping[str, Any], within: PointWithin | None = None
    ) -> RowMapping:
        """To be tried before anything is sampled, after those that came earlier. Raises SweepNotFound."""
        with self.engine.begin() as connection:
            _locked_row(connection, sweep_id)
            made = connection.execute(insert(points).values(_point(sweep_id, params)).returning(points))
            point = made.mappings().one()
            _bump(connection, sweep_id, {})
            write_event(connection, sweep_id, "point_added", {"point": point["id"]})
            if within is not None:
                within(connection, point)
            return point

    def list_points(self, sweep_id: str) -> list[RowMapping]:
        """In the order in which they are tried."""
        query = select(points).where(points.c.sweep_id == sweep_id).order_by(points.c.id)
        with self.engine.connect() as connection:
            return list(connection.execute(query).mappings())

    def remove_point(self, sweep_id: str, point_id: int) -> None:
        """Raises SweepNotFound, PointNotFound, PointTaken."""
        of_point = (points.c.sweep_id == sweep_id) & (points.c.id == point_id)
        with self.engine.begin() as connection:
            _locked_row(connection, sweep_id)
            if connection.execute(delete(points).where(of_point & points.c.draw.is_(None))).rowcount:
                _bump(connection, sweep_id, {})
                write_event(connection, sweep_id, "point_removed", {"point": point_id})
                return
            draw = connection.execute(select(points.c.draw).where(of_point)).scalar_one_or_none()
        if draw is None:
            raise PointNotFound(f"sweep {sweep_id} has no point {point_id}")
        raise PointTaken(
            f"point {point_id} of sweep {sweep_id} is tried as draw {draw}: it cannot be removed"
        )

    def list_events(self, sweep_id: str) -> list[RowMapping]:
        query = select(events).where(events.c.sweep_id == sweep_id).order_by(events.c.id)
        with self.engine.connect() as connection:
            return list(connection.execute(query).mappings())

    def tell_of_ends(self, sweep_id: str, ends: Sequence[dict[str, Any]]) -> None:
        """Write the events of trials that have ended; of those that have been told of, nothing."""
        with self.engine.begin() as connection:
            if _locked_row(connection, sweep_id, required=False) is not None:
                for end in untold(ends, find_ends_told(connection, sweep_id)):
                    write_event(connection, sweep_id, "trial_finished", end)

    def ping(self) -> None:
        """Raises sqlalchemy.exc.SQLAlchemyError if the database does not answer."""
        with self.engine.connect() as connection:
            connection.execute(select(sweeps.c.id).limit(1))


class SweepJournal:
    """trials.ledger.Journal of one driver generation: refuses to write once another generation has begun."""

    def __init__(self, records: Records, sweep_id: str, generation: int) -> None:
        self._engine = records.engine
        self._sweep_id = sweep_id
        self._generation = generation

    def beat(self) -> Orders:
        mine = trial_wishes.c.sweep_id == self._sweep_id
        with self._reaching() as connection:
            orders = _renew(connection, self._sweep_id, self._generation, writes=0)
            wishes = connection.execute(select(trial_wishes).where(mine)).all()
        return replace(
            orders,
            stopping=frozenset(wish.number for wish in wishes if wish.stopping),
            pinned=frozenset(wish.number for wish in wishes if wish.pinned),
        )

    def claims(self, wants: int) -> list[Claim]:
        mine = (sweeps.c.id == self._sweep_id) & sweeps.c.wants.is_distinct_from(wants)
        with self._reaching() as connection:
            if connection.execute(select(sweeps.c.id).where(mine)).one_or_none() is not None:
                _renew(connection, self._sweep_id, self._generation, writes=0)
                connection.execute(update(sweeps).where(mine).values(wants=wants))
            return list(_claims(connection.execute(_CLAIMS)))

    def record_epoch(self, number: int, attempt: int, epoch: Mapping[str, Any]) -> None:
        key = {"sweep_id": self._sweep_id, "number": number, "epoch": epoch["epoch"]}
        values = {name: value for name, value in epoch.items() if name in epochs.c}
        same = (
            (epochs.c.sweep_id == self._sweep_id)
            & (epochs.c.number == number)
            & (epochs.c.epoch == epoch["epoch"])
        )
        with self._reaching() as connection:
            self._renew(connection)
            connection.execute(delete(epochs).where(same))
            connection.execute(
                insert(epochs).values({**values, **key, "attempt": attempt, "recorded_at": naive(now())})
            )
            write_event(connection, self._sweep_id, "epoch_finished", _told_of(number, attempt, epoch))

    def recorded_epochs(self, number: int) -> int:
        mine = (epochs.c.sweep_id == self._sweep_id) & (epochs.c.number == number)
        with self._reaching() as connection:
            return connection.execute(select(func.max(epochs.c.epoch)).where(mine)).scalar_one() or 0

    def ends_told(self) -> set[tuple[int, int | None]]:
        with self._reaching() as connection:
            return find_ends_told(connection, self._sweep_id)

    def point_of(self, draw: int, *, take: bool) -> Mapping[str, Any] | None:
        mine = select(points).where(points.c.sweep_id == self._sweep_id).order_by(points.c.id).limit(1)
        with self._reaching() as connection:
            found = connection.execute(mine.where(points.c.draw == draw)).one_or_none()
            free = mine.where(points.c.draw.is_(None))
            if found is None and take and connection.execute(free).first() is not None:
                self._renew(connection)  # and look again: until then a client may have taken it back
                found = connection.execute(free).one_or_none()
                if found is not None:
                    connection.execute(update(points).where(points.c.id == found.id).values(draw=draw))
        params: Mapping[str, Any] | None = found.params if found is not None else None
        return params

    def record_event(self, kind: str, **detail: Any) -> None:
        with self._reaching() as connection:
            self._renew(connection)
            write_event(connection, self._sweep_id, kind, detail)

    def ask_to_pause(self, reason: str) -> None:
        with self._reaching() as connection:
            self._renew(connection)
            row = _row(connection, self._sweep_id)
            if row["state"] == "running":
                _move(connection, row, "pause", {"state_reason": storable(reason)})

    def record_waiting(self, reason: str | None) -> None:
        words = reason and storable(reason)
        mine = (sweeps.c.id == self._sweep_id) & (sweeps.c.state == "running")
        with self._reaching() as connection:
            self._renew(connection)
            changed = update(sweeps).where(mine, sweeps.c.state_reason.is_distinct_from(words))
            if connection.execute(changed.values(state_reason=words)).rowcount == 0:
                return
            if words is None:
                write_event(connection, self._sweep_id, "sweep_going_on", {})
            else:
                write_event(connection, self._sweep_id, "sweep_waiting", {"reason": words})

    def verifications(self) -> dict[int, tuple[Outcome, str | None]]:
        with self._reaching() as connection:
            found = verifications_in(connection, self._sweep_id)
        return {number: (row["outcome"], row["recorded_sha256"]) for number, row in found.items()}

    def record_verification(self, number: int, verification: Verification) -> None:
        words = verification.message and storable(verification.message)
        key = {"sweep_id": self._sweep_id, "number": number}
        values = {**asdict(verification), "message": words, "verified_at": naive(now())}
        same = (verifications.c.sweep_id == self._sweep_id) & (verifications.c.number == number)
        with self._reaching() as connection:
            self._renew(connection)
            connection.execute(delete(verifications).where(same))
            connection.execute(insert(verifications).values({**values, **key}))
            told = {name: values[name] for name in ("outcome", "epoch", "valid_loss", "message")}
            write_event(connection, self._sweep_id, "checkpoint_checked", {"number": number, **told})

    def _renew(self, connection: Connection) -> Orders:
        return _renew(connection, self._sweep_id, self._generation)

    @contextmanager
    def _reaching(self) -> Iterator[Connection]:
        """A transaction. Raises JournalAway where the database does not answer."""
        try:
            with self._engine.begin() as connection:
                yield connection
        except (OperationalError, InterfaceError, PoolTimeout) as error:
            raise JournalAway(str(error).partition("\n")[0]) from error


def _renew(connection: Connection, sweep_id: str, generation: int, writes: int = 1) -> Orders:
    """Renew the lease and take the row's write lock: what follows in this transaction is fenced, and counted
    as one of the driver's writes."""
    mine = (sweeps.c.id == sweep_id) & (sweeps.c.generation == generation) & sweeps.c.state.in_(WITH_DRIVER)
    renewed = connection.execute(
        update(sweeps)
        .where(mine)
        .values(lease_until=naive(now() + LEASE), writes=sweeps.c.writes + writes)
        .returning(
            sweeps.c.state,
            sweeps.c.spec["budget"],
            sweeps.c.spec["resources"],
            sweeps.c.ran_s,
            sweeps.c.running_since,
        )
    ).one_or_none()
    if renewed is None:
        raise Fenced(f"sweep {sweep_id} is no longer driver generation {generation}'s")
    state, budget, resources, ran_s, since = renewed
    most = resources.get("max_concurrent")
    return Orders(state, _budget(to_json(budget)), _running_s(ran_s, aware(since)), most)


_CLAIMS = select(sweeps.c.id, ORDERS["priority"], sweeps.c.position, RESOURCES, sweeps.c.wants).where(
    sweeps.c.state.in_(("running", "stopping"))
)
"""One that pauses frees what it has."""


def _claims(rows: Iterable[Any]) -> Iterator[Claim]:
    """Of the sweeps that can be read: one that is damaged keeps no other from its share."""
    for row in rows:
        with suppress(ValueError):
            yield Claim(row[0], row[1], row[2], _resources(row[3]), row[4])


@lru_cache(maxsize=256)
def _resources(written: str | None) -> Resources:
    return Resources.model_validate_json(written or "null")


def _told_of(number: int, attempt: int, epoch: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "number": number,
        "attempt": attempt,
        **{name: epoch[name] for name in ("epoch", "train_loss", "valid_loss", "is_best")},
        "valid_perplexity": finite_perplexity(epoch["valid_loss"]),
    }


def _hold(connection: Connection, sweep_id: str, generation: int) -> None:
    """Take the row's write lock, if the sweep is still of this generation."""
    mine = (sweeps.c.id == sweep_id) & (sweeps.c.generation == generation)
    if not connection.execute(update(sweeps).where(mine).values(writes=sweeps.c.writes + 1)).rowcount:
        raise Fenced(f"sweep {sweep_id} is no longer of generation {generation}")


def fence_writes(engine: Engine, sweep_id: str, generation: int, *, of_driver: bool = True) -> None:
    """From now on nothing is written through this engine once another generation has begun.

    A process may sleep between asking whether it may write and writing. So each transaction, before its first
    write, takes the lock of the sweep's row, and with it the answer: a driver renews its lease; who closes a
    sweep from outside only looks. Raises Fenced from within the write.
    """
    hold = _renew if of_driver else _hold

    @event.listens_for(engine, "before_cursor_execute")
    def fence(connection: Connection, _cursor: Any, statement: str, *_rest: Any) -> None:
        writes = statement.lstrip()[:6].upper() in {"INSERT", "UPDATE", "DELETE"}
        if writes and not connection.info.get("fenced"):
            connection.info["fenced"] = True  # the renewal is a write, too
            hold(connection, sweep_id, generation)

    @event.listens_for(engine, "commit")
    @event.listens_for(engine, "rollback")
    def forget(connection: Connection) -> None:
        if not connection.invalidated:  # what was known of one that is lost, is lost with it
            connection.info.pop("fenced", None)


def _locked_row(connection: Connection, sweep_id: str, *, required: bool = True) -> Any:
    """As `_row`, with the row's write lock: nobody changes it before this transaction has ended."""
    connection.execute(update(sweeps).where(sweeps.c.id == sweep_id).values(generation=sweeps.c.generation))
    return _row(connection, sweep_id, required=required)


# Built once: to build a statement takes longer than SQLite does to run it.
_ADD = insert(sweeps).returning(sweeps)
_OF_ID = select(sweeps).where(sweeps.c.id == bindparam("sweep_id"))
_CURVE = (
    select(epochs)
    .where(epochs.c.sweep_id == bindparam("sweep_id"), epochs.c.number == bindparam("number"))
    .order_by(epochs.c.epoch)
)
_DRAW = epochs.c.number // bindparam("arms", type_=Integer)
_EPOCHS = (
    select(
        epochs.c.number,
        epochs.c.epoch,
        epochs.c.valid_loss,
        epochs.c.recorded_at,
        epochs.c.seconds,
        epochs.c.tokens,
    )
    .where(epochs.c.sweep_id == bindparam("sweep_id"), _DRAW % bindparam("every") == 0)
    .order_by(epochs.c.number, epochs.c.epoch)
)


def latest_epochs_where(*conditions: ColumnElement[bool]) -> Select[Any]:
    """Of each trial of a sweep, `sweep_id`, that meets these conditions."""
    of_sweep = epochs.c.sweep_id == bindparam("sweep_id")
    newest = (
        select(epochs.c.number, func.max(epochs.c.epoch).label("epoch"))
        .where(of_sweep, *conditions)
        .group_by(epochs.c.number)
        .subquery()
    )
    latest = (epochs.c.number == newest.c.number) & (epochs.c.epoch == newest.c.epoch)
    return select(epochs.c.number, epochs.c.epoch, epochs.c.valid_loss).join(newest, latest).where(of_sweep)


_LATEST_EPOCHS = latest_epochs_where()
_LATEST_EPOCHS_OF = latest_epochs_where(epochs.c.number.in_(bindparam("numbers", expanding=True)))
_PINNED = select(trial_wishes.c.number).where(
    trial_wishes.c.sweep_id == bindparam("sweep_id"), trial_wishes.c.pinned
)
_VERIFICATIONS = select(verifications).where(verifications.c.sweep_id == bindparam("sweep_id"))


def sweep_in(connection: Connection, sweep_id: str) -> SweepRecord:
    """Raises SweepNotFound."""
    return _record(_row(connection, sweep_id))


def verifications_in(connection: Connection, sweep_id: str) -> dict[int, RowMapping]:
    rows = connection.execute(_VERIFICATIONS, {"sweep_id": sweep_id}).mappings()
    return {row["number"]: row for row in rows}


def pinned_in(connection: Connection, sweep_id: str) -> set[int]:
    return set(connection.execute(_PINNED, {"sweep_id": sweep_id}).scalars())


def _row(connection: Connection, sweep_id: str, *, required: bool = True) -> Any:
    """A sweep's row; raises SweepNotFound where it is required and not there."""
    row = connection.execute(_OF_ID, {"sweep_id": sweep_id}).mappings().one_or_none()
    if row is None and required:
        raise SweepNotFound(f"there is no sweep {sweep_id!r}; GET /v1/sweeps lists them")
    return row


def _move(connection: Connection, row: RowMapping, verb: Verb, values: dict[str, Any]) -> State:
    """Make a legal move of a row whose lock is held."""
    after = MOVES[verb].states[row["state"]]
    changes = {**_clock(row, after), "state": after, **values}
    if verb in REQUESTS and after == "queued":  # what was fruitless before says nothing any more
        changes |= {"epochs_at_launch": -1, "fruitless_launches": 0}
    if verb == "cancel":
        changes["retry_numbers"] = None
    if verb in REQUESTS:
        changes["revision"] = row["revision"] + 1
    if verb == "drive":
        changes |= _clock_of_a_new_driver(row)
        _add(connection, "driver_starts" if row["state"] == "queued" else "driver_restarts", 1)
    connection.execute(update(sweeps).where(sweeps.c.id == row["id"]).values(changes))
    generation = changes.get("generation", row["generation"])
    write_event(connection, row["id"], MOVES[verb].event, {"generation": generation, "state": after})
    return after


def _bump(connection: Connection, sweep_id: str, values: dict[str, Any]) -> None:
    """Write what a client has changed of a sweep whose row's lock is held."""
    connection.execute(
        update(sweeps).where(sweeps.c.id == sweep_id).values(revision=sweeps.c.revision + 1, **values)
    )


def _done(connection: Connection, sweep_id: str, within: "Within | None") -> SweepRecord:
    """The sweep as it stands at the end of a transaction; `within` may write something more into that."""
    record = _record(_row(connection, sweep_id))
    if within is not None:
        within(connection, record)
    return record


def _point(sweep_id: str, params: Mapping[str, Any]) -> dict[str, Any]:
    return {"sweep_id": sweep_id, "params": dict(params), "created_at": naive(now())}


def _add(connection: Connection, total: str, amount: int) -> None:
    """Only the controller does: there are never two at it."""
    of_name = totals.c.name == total
    more = update(totals).where(of_name).values(value=totals.c.value + amount)
    if connection.execute(more).rowcount == 0:
        connection.execute(insert(totals).values(name=total, value=amount))


def _require_legal(row: Any, verb: Verb) -> None:
    if row["state"] not in MOVES[verb].states:
        raise _illegal(row["id"], verb, row["state"])


def _clock(row: RowMapping, after: State) -> dict[str, Any]:
    """What a new state makes of the times: when it began, and how long the sweep has run."""
    at = naive(now())
    changes: dict[str, Any] = {}
    if after != row["state"]:
        changes["state_since"] = at
    if after in WITH_DRIVER and row["running_since"] is None:
        changes["running_since"] = at
    if after not in WITH_DRIVER and row["running_since"] is not None:
        changes["ran_s"] = _running_s(row["ran_s"], aware(row["running_since"]))
        changes["running_since"] = None
    if after in TERMINAL_STATES:
        changes |= {"finished_at": at, "state_reason": None}
    elif row["state"] in TERMINAL_STATES and after != "deleting":
        changes |= {"finished_at": None, "state_reason": None}
    elif after in {"queued", "running"} or row["state"] == "running":  # what it waited for is no reason now
        changes["state_reason"] = None
    return changes


def _clock_of_a_new_driver(row: RowMapping) -> dict[str, Any]:
    """The one before it has run until it was last heard of: an outage is no time that the sweep has had."""
    if row["running_since"] is None:
        return {}
    at, heard_until = naive(now()), row["lease_until"]
    ended = min(at, heard_until - LEASE) if heard_until is not None else row["running_since"]
    ran_s = row["ran_s"] + max(0.0, (ended - row["running_since"]).total_seconds())
    return {"ran_s": ran_s, "running_since": at}


def _running_s(ran_s: float, since: datetime | None) -> float:
    return ran_s + (max(0.0, (now() - since).total_seconds()) if since is not None else 0.0)


def _illegal(sweep_id: str, verb: Verb, state: State) -> IllegalMove:
    words = f"sweep {sweep_id} is {state}: it cannot {verb.replace('_', '-')}; {legal_words(state)}"
    return IllegalMove(words, legal_requests(state))


def _record(row: RowMapping) -> SweepRecord:
    values = {name: value for name, value in row.items() if name not in {"position", "spec", "key", "wants"}}
    for name in ("state_since", "lease_until", "created_at", "started_at", "finished_at", "running_since"):
        values[name] = aware(values[name])
    return SweepRecord(**values, written_spec=row["spec"])


@lru_cache(maxsize=256)
def _spec(written: bytes) -> SweepSpec:
    """Read a stored spec, whose every value is checked anew: milliseconds. Its readers share it, and change
    nothing in it."""
    values = from_json(written)
    if not isinstance(values, dict):
        raise ValueError(f"it is no JSON object: {values!r:.60}")
    # It was laid out in full when it came: what its preset says by now must not matter.
    spec = SweepSpec.model_validate({**values, "preset": None})
    return spec.model_copy(update={"preset": values.get("preset")})


def _budget_of(row: RowMapping) -> Budget:
    return _budget(to_json(row["spec"]["budget"]))


@lru_cache(maxsize=256)
def _budget(written: bytes) -> Budget:
    return Budget.model_validate(from_json(written))
