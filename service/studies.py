"""Optuna's storage in our database."""

from optuna.storages import RDBStorage
from sqlalchemy.engine import make_url

from service.records import tune_sqlite


def open_storage(url: str) -> RDBStorage:
    """Optuna's tables, made where they are missing; SQLite as patient as ours."""
    if make_url(url).get_backend_name() != "sqlite":
        return RDBStorage(url, engine_kwargs={"pool_pre_ping": True})
    storage = RDBStorage(url, engine_kwargs={"connect_args": {"timeout": 60}})
    tune_sqlite(storage.engine)
    return storage
