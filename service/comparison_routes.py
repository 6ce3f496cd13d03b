"""Two sweeps or trials, compared in the service: whoever asks needs no code of ours."""

from typing import Annotated

from fastapi import APIRouter, Query

from service.comparison import REFERENCE, Side, compare, parse_reference
from service.comparison_schemas import SideBySide
from service.errors import BadParameter
from service.routes import BAD_QUERY, NO_SUCH, Controller
from service.sweeps import SweepController
from service.turns import compares
from service.views import best_of

Reference = Annotated[
    str,
    Query(pattern=REFERENCE, description="Id of a sweep, or `SWEEP:NUMBER` for a trial of it."),
]

comparing = APIRouter(prefix="/v1", tags=["sweeps"])


@comparing.get("/compare", responses={**NO_SUCH, **BAD_QUERY})
@compares
def compare_two(a: Reference, b: Reference, controller: Controller) -> SideBySide:
    """Two sweeps, or two trials, also of different sweeps: what differs in what was asked for, in what it ran
    on, and in what came of it. Of two sweeps, the trials that are looked at closely are their best ones.
    """
    of_trials = ":" in a
    if (":" in b) != of_trials:
        words = f"{a!r} and {b!r} are of two kinds: name two sweeps, or two trials as SWEEP:NUMBER"
        raise BadParameter("b", "not_comparable", words)
    return compare(_side(controller, a), _side(controller, b), of_trials=of_trials)


def _side(controller: SweepController, written: str) -> Side:
    """Raises SweepNotFound, TrialNotFound, UnreadableSpec, UnreadableStudy."""
    sweep_id, number = parse_reference(written)
    record = controller.records.get_sweep(sweep_id)
    trials = controller.views.trials(record)
    best = best_of(trials)
    if number is None and best is not None:
        number = best.number
    trial = None if number is None else controller.views.trial(record, number)
    environment = controller.views.environment(record, trials)
    return Side(record.id, record.state, record.spec, environment, trials, trial)
