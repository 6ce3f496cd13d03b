"""A sweep's study as an Optuna database of its own: one SQLite file that `optuna-dashboard` opens.

Optuna makes the database and the study; the rows are copied as they are, between tables that Optuna made
both times, since it takes some ten milliseconds for each trial that is added through it.
"""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from optuna import create_study
from optuna.exceptions import ExperimentalWarning
from optuna.storages import RDBStorage
from optuna.storages._rdb.models import (
    StudyModel,
    StudySystemAttributeModel,
    StudyUserAttributeModel,
    TrialIntermediateValueModel,
    TrialModel,
    TrialParamModel,
    TrialSystemAttributeModel,
    TrialUserAttributeModel,
    TrialValueModel,
)
from optuna_dashboard import save_note
from sqlalchemy import Select, insert, literal, select

from service.exports import Moment
from service.views import find_spec
from trials.version import own_version

ROWS_AT_ONCE = 1000
NUMBERED = {"study_id", "trial_id"}
"""Columns that say whose a row is: the file's study is its first, and its trials are numbered from one."""
OF_STUDIES = (StudyUserAttributeModel, StudySystemAttributeModel)
OF_TRIALS = (
    TrialParamModel,
    TrialValueModel,
    TrialIntermediateValueModel,
    TrialUserAttributeModel,
    TrialSystemAttributeModel,
)


def write_study(moment: Moment, path: Path) -> None:
    """A trial that runs is RUNNING in the file, and stays so there: a note says of which moment that is."""
    sweep = moment.record
    spec = find_spec(sweep)
    name = f"{spec.name} ({sweep.id})" if spec and spec.name else sweep.id
    storage = RDBStorage(f"sqlite:///{path}")
    try:
        study = create_study(storage=storage, study_name=name, direction="minimize")
        with storage.engine.begin() as target:
            for query, table in _rows(sweep.study, study._study_id):
                with moment.connection.execute(query) as found:
                    for rows in found.mappings().partitions(ROWS_AT_ONCE):
                        moment.go_on()
                        target.execute(insert(table), [dict(row) for row in rows])
        study.set_user_attr("sweep_id", sweep.id)
        study.set_user_attr("exported_at", moment.at.isoformat())
        with warnings.catch_warnings(category=ExperimentalWarning, action="ignore"):
            save_note(study, _note(moment))
    finally:
        storage.remove_session()
        storage.engine.dispose()


def _rows(study_name: str, study_id: int) -> Iterator[tuple[Select[Any], Any]]:
    """What to copy, and into which table, the trials before what belongs to them."""
    studies, trials = StudyModel.__table__, TrialModel.__table__
    its = studies.c.study_name == study_name
    of_file = literal(study_id).label("study_id")
    for table in (model.__table__ for model in OF_STUDIES):
        query = select(of_file, *_others(table))
        yield query.join(studies, studies.c.study_id == table.c.study_id).where(its), table
    trial_id = (trials.c.number + 1).label("trial_id")
    query = select(trial_id, of_file, *_others(trials))
    query = query.join(studies, studies.c.study_id == trials.c.study_id).where(its)
    yield query.order_by(trials.c.number).execution_options(yield_per=ROWS_AT_ONCE), trials
    for table in (model.__table__ for model in OF_TRIALS):
        query = select(trial_id, *_others(table)).join(trials, trials.c.trial_id == table.c.trial_id)
        query = query.join(studies, studies.c.study_id == trials.c.study_id).where(its)
        yield query.execution_options(yield_per=ROWS_AT_ONCE), table


def _others(table: Any) -> list[Any]:
    return [column for column in table.c if column.name not in NUMBERED and not column.primary_key]


def _note(moment: Moment) -> str:
    return (
        f"Sweep `{moment.record.id}` of fraternal {own_version()}, as it was at "
        f"{moment.at:%Y-%m-%d %H:%M:%S} UTC. The objective is the validation perplexity of a trial's best "
        "epoch; trials that ran at that moment are listed as running. At most 50 values of each curve are "
        "here: exports as CSV, Parquet or JSON have every epoch."
    )
