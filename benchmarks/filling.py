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
from sqlalchemy import Connection, Engine, Table, func, insert, literal, select, text

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
SELECT :sweep_id, at, kind, {detail}, kind || ':' || ({number} + :by) || ':' || {attempt} || ':' || {epoch}
FROM fraternal_events WHERE sweep_id = :template AND once IS NOT NULL ORDER BY id
"""
EVENTS = {
    "sqlite": _EVENTS.format(
        detail="json_set(detail, '$.number', json_extract(detail, '$.number') + :by)",
        number="json_extract(detail, '$.number')",
        attempt="json_extract(detail, '$.attempt')",
        epoch="coalesce(json_extract(detail, '$.epoch'), '')",
    ),
    "postgresql": _EVENTS.format(
        detail="jsonb_set(detail::jsonb, '{number}', to_jsonb((detail->>'number')::int + :by))::json",
        number="(detail->>'number')::int",
        attempt="(detail->>'attempt')",
        epoch="coalesce(detail->>'epoch', '')",
    ),
}


def fill(records: Records, storage: Any, template: str, sweep_ids: list[str], copies: int) -> None:
    """Give each of these sweeps, which have had no driver yet, the ended trials of another one, so often."""
    for sweep_id in sweep_ids:
        study = open_study(records.get_sweep(sweep_id).spec, sweep_id, storage)
        with records.engine.begin() as connection:
            source = _study_id(connection, template)
            trials = _count(connection, source)
            for copy in range(copies):
                _copy_study(connection, source, study._study_id, by=copy * trials)
                _copy_curves(connection, template, sweep_id, by=copy * trials)
    _count_on(records.engine)


def _study_id(connection: Connection, name: str) -> int:
    found = connection.execute(text("SELECT study_id FROM studies WHERE study_name = :name"), {"name": name})
    return int(found.scalar_one())


def _count(connection: Connection, study_id: int) -> int:
    trials = TrialModel.__table__.c
    return connection.execute(select(func.count()).where(trials.study_id == study_id)).scalar_one()


def _copy_study(connection: Connection, source: int, target: int, by: int) -> None:
    """Trials with all that is theirs, `by` numbers later."""
    table = TrialModel.__table__
    of_source = table.c.study_id == source
    first, last = connection.execute(
        select(func.min(table.c.trial_id), func.max(table.c.trial_id)).where(of_source)
    ).one()
    shift = connection.execute(select(func.max(table.c.trial_id))).scalar_one() + 1 - first
    _insert(
        connection,
        table,
        table.c.trial_id.between(first, last) & of_source,
        trial_id=table.c.trial_id + shift,
        number=table.c.number + by,
        study_id=literal(target),
    )
    for part in OF_A_TRIAL:
        between = part.c.trial_id.between(first, last)
        _insert(connection, part, between, trial_id=part.c.trial_id + shift)


def _copy_curves(connection: Connection, template: str, sweep_id: str, by: int) -> None:
    number = epochs.c.number + by
    _insert(connection, epochs, epochs.c.sweep_id == template, sweep_id=literal(sweep_id), number=number)
    connection.execute(
        text(EVENTS[connection.dialect.name]), {"sweep_id": sweep_id, "template": template, "by": by}
    )


def _insert(connection: Connection, table: Table, which: Any, **changed: Any) -> None:
    """Rows of a table once more, with some columns changed; what numbers itself is numbered anew."""
    own = {column.name for column in table.primary_key if column.autoincrement is not False}
    names = [
        column.name
        for column in table.columns
        if column.name in changed or not (len(table.primary_key) == 1 and column.name in own)
    ]
    values = [changed.get(name, table.c[name]) for name in names]
    connection.execute(insert(table).from_select(names, select(*values).where(which)))


def _count_on(engine: Engine) -> None:
    """PostgreSQL gives ids by a sequence, which has not seen those that were written; and count rows anew."""
    with engine.begin() as connection:
        if connection.dialect.name == "postgresql":
            sequence = "pg_get_serial_sequence('trials', 'trial_id')"
            connection.execute(text(f"SELECT setval({sequence}, (SELECT max(trial_id) FROM trials))"))
        connection.execute(text("ANALYZE"))
