"""Tables as they are after many trials: rows of a sweep that was run, copied into others by the database."""

from typing import Any

from optuna.storages._rdb.models import (
    TrialIntermediateValueModel,
    TrialModel,
    TrialParamModel,
    TrialSystemAttributeModel,
    TrialUserAttributeModel,
    TrialValueModel,
)
from sqlalchemy import CTE, Connection, Engine, Table, func, insert, literal, select, text, true

from service.records import Records
from service.tables import epochs
from trials.studies import open_study

OF_A_TRIAL: tuple[Table, ...] = tuple(
    model.__table__
    for model in (
        TrialParamModel,
        TrialUserAttributeModel,
        TrialSystemAttributeModel,
        TrialValueModel,
        TrialIntermediateValueModel,
    )
)
_EVENTS = """
INSERT INTO fraternal_events (sweep_id, at, kind, detail, once)
WITH RECURSIVE
    numbers(nth) AS (SELECT 0 UNION ALL SELECT nth + 1 FROM numbers WHERE nth + 1 < :copies),
    copies(later) AS (SELECT nth * :trials FROM numbers)
SELECT :sweep_id, at, kind, {detail}, kind || ':' || ({number} + later) || ':' || {attempt} || ':' || {epoch}
FROM copies, fraternal_events WHERE sweep_id = :template AND once IS NOT NULL ORDER BY later, id
"""
EVENTS = {
    "sqlite": _EVENTS.format(
        detail="json_set(detail, '$.number', json_extract(detail, '$.number') + later)",
        number="json_extract(detail, '$.number')",
        attempt="json_extract(detail, '$.attempt')",
        epoch="coalesce(json_extract(detail, '$.epoch'), '')",
    ),
    "postgresql": _EVENTS.format(
        detail="jsonb_set(detail::jsonb, '{number}', to_jsonb((detail->>'number')::int + later))::json",
        number="(detail->>'number')::int",
        attempt="(detail->>'attempt')",
        epoch="coalesce(detail->>'epoch', '')",
    ),
}


def fill(records: Records, storage: Any, template: str, sweep_id: str, copies: int) -> None:
    """Give a sweep, which has had no driver yet, the ended trials of another one, so often."""
    study = open_study(records.get_sweep(sweep_id).spec, sweep_id, storage)
    with records.engine.begin() as connection:
        source = _study_id(connection, template)
        trials = _count(connection, source)
        _copy_study(connection, source, study._study_id, trials, _numbers(copies))
        _copy_curves(connection, template, sweep_id, trials, _numbers(copies))
        asked = {"sweep_id": sweep_id, "template": template, "trials": trials, "copies": copies}
        connection.execute(text(EVENTS[connection.dialect.name]), asked)


def _study_id(connection: Connection, name: str) -> int:
    found = connection.execute(text("SELECT study_id FROM studies WHERE study_name = :name"), {"name": name})
    return int(found.scalar_one())


def _count(connection: Connection, study_id: int) -> int:
    trials = TrialModel.__table__.c
    return connection.execute(select(func.count()).where(trials.study_id == study_id)).scalar_one()


def _numbers(count: int) -> CTE:
    """From 0 on, as `nth`."""
    numbers = select(literal(0).label("nth")).cte(recursive=True)
    return numbers.union_all(select(numbers.c.nth + 1).where(numbers.c.nth + 1 < count))


def _copy_study(connection: Connection, source: int, target: int, trials: int, copies: CTE) -> None:
    """Trials with all that is theirs, each copy's numbers so many later than those of the one before."""
    table = TrialModel.__table__
    of_source = table.c.study_id == source
    first, last = connection.execute(
        select(func.min(table.c.trial_id), func.max(table.c.trial_id)).where(of_source)
    ).one()
    end = connection.execute(select(func.max(table.c.trial_id))).scalar_one()
    shift = end + 1 - first + copies.c.nth * (last + 1 - first)
    _insert(
        connection,
        table,
        copies,
        table.c.trial_id.between(first, last) & of_source,
        trial_id=table.c.trial_id + shift,
        number=table.c.number + copies.c.nth * trials,
        study_id=literal(target),
    )
    for part in OF_A_TRIAL:
        between = part.c.trial_id.between(first, last)
        _insert(connection, part, copies, between, trial_id=part.c.trial_id + shift)


def _copy_curves(connection: Connection, template: str, sweep_id: str, trials: int, copies: CTE) -> None:
    number = epochs.c.number + copies.c.nth * trials
    of_template = epochs.c.sweep_id == template
    _insert(connection, epochs, copies, of_template, sweep_id=literal(sweep_id), number=number)


def _insert(connection: Connection, table: Table, copies: CTE, which: Any, **changed: Any) -> None:
    """Rows of a table so many times more, with some columns changed; what numbers itself is numbered anew."""
    own = {column.name for column in table.primary_key if column.autoincrement is not False}
    names = [
        column.name
        for column in table.columns
        if column.name in changed or not (len(table.primary_key) == 1 and column.name in own)
    ]
    values = [changed.get(name, table.c[name]) for name in names]
    selected = select(*values).select_from(table.join(copies, true())).where(which)
    connection.execute(insert(table).from_select(names, selected))


def count_on(engine: Engine) -> None:
    """PostgreSQL gives ids by a sequence, which has not seen those that were written; and count rows anew."""
    with engine.begin() as connection:
        if connection.dialect.name == "postgresql":
            sequence = "pg_get_serial_sequence('trials', 'trial_id')"
            connection.execute(text(f"SELECT setval({sequence}, (SELECT max(trial_id) FROM trials))"))
        connection.execute(text("ANALYZE"))
