"""Whether the service can do its work, and which of several services starts and ends drivers."""

from datetime import timedelta

from sqlalchemy.exc import SQLAlchemyError

from service.database import now
from service.reconciler import LEASE_NAME, Reconciler
from service.records import Records
from service.schemas import ControllerLease, Readiness
from service.sweeps import SweepController

LONG_SILENCE = timedelta(seconds=60)
"""Since the reconciler's last look: one takes a moment, longer where it ends drivers or removes sweeps."""


def check_ready(controller: SweepController, reconciler: Reconciler) -> Readiness:
    missing = [*controller.check_ready(), *_silence(reconciler)]
    return Readiness(
        status="not ready" if missing else "ready",
        not_ready=missing,
        controller=_find_lease(controller.records, reconciler),
    )


def _silence(reconciler: Reconciler) -> list[str]:
    looked_at = reconciler.looked_at
    if looked_at is None:
        return ["the reconciler has not looked at the sweeps yet: nothing is started or ended before"]
    silent = now() - looked_at
    if silent > LONG_SILENCE:
        return [
            f"the reconciler has not looked at the sweeps for {silent.total_seconds():.0f} s: nothing is "
            "started or ended; its log says why, and a restart of the service leaves drivers alone"
        ]
    return []


def _find_lease(records: Records, reconciler: Reconciler) -> ControllerLease | None:
    try:
        lease = records.find_lease(LEASE_NAME)
    except SQLAlchemyError:
        return None
    if lease is None:
        return None
    holder, until = lease
    return ControllerLease(holder=holder, until=until, is_this_service=reconciler.holds_lease)
