"""What a sweep's events are: the closed list of their kinds, what each one says, how it is written out."""

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, TypeAdapter
from pydantic_core import to_json
from sqlalchemy import RowMapping

from service.database import aware
from service.lifecycle import State
from service.schemas import View
from trials.spec import FailureClass
from trials.verification import Outcome

MoveKind = Literal[
    "pause_requested",
    "resume_requested",
    "stop_requested",
    "cancel_requested",
    "extended",
    "retry_requested",
    "delete_requested",
    "driver_started",
    "sweep_parked",
    "sweep_succeeded",
    "sweep_failed",
    "sweep_cancelled",
]
"""What service.lifecycle.MOVES call themselves."""
WishKind = Literal["trial_stop_requested", "trial_pinned", "trial_unpinned"]
EventKind = Literal[
    "sweep_submitted",
    "sweep_changed",
    "point_added",
    "point_removed",
    MoveKind,
    WishKind,
    "driver_fenced",
    "driver_stopped",
    "sweep_waiting",
    "sweep_going_on",
    "trial_started",
    "epoch_finished",
    "trial_paused",
    "trial_lost",
    "trial_finished",
    "checkpoint_checked",
]
KINDS: tuple[EventKind, ...] = get_args(EventKind)


class Nothing(View):
    """The kind says it all."""


class Change(View):
    fields: list[str]
    """Of the spec, that a client has changed."""


class Point(View):
    point: int
    """Its id."""


class Wish(View):
    """A client asked for something of one trial."""

    number: int


class Move(View):
    """A sweep came from one state into another, or was asked to."""

    generation: int
    """How many drivers the sweep had had."""
    state: State
    """Afterwards."""


class Driver(View):
    generation: int


class Wait(View):
    """Nothing of a running sweep runs, and none of it can."""

    reason: str


class TrialStart(View):
    number: int
    arm: str
    attempt: int
    """1-based; a later one goes on from where the one before had saved."""


class Epoch(View):
    """Losses are in nats per token; null is what is not finite, or too large for a float."""

    number: int
    attempt: int
    epoch: int
    """1-based."""
    train_loss: float | None
    valid_loss: float | None
    valid_perplexity: float | None
    is_best: bool
    """Of its trial, so far."""


class TrialPause(View):
    number: int
    attempt: int


class TrialLoss(View):
    """An attempt came to nothing; another one follows."""

    number: int
    attempt: int
    message: str


class TrialEnd(View):
    """What an earlier version of this service wrote has number and state only."""

    number: int
    state: Literal["COMPLETE", "PRUNED", "FAIL"]
    attempt: int | None = None
    arm: str | None = None
    best_epoch: int | None = None
    best_valid_loss: float | None = None
    best_valid_perplexity: float | None = None
    failure_class: FailureClass | None = None
    failure_message: str | None = None


class CheckpointCheck(View):
    """The best checkpoint so far of the trials that have ended was evaluated again by a fresh process."""

    number: int
    outcome: Outcome
    """`differs` and `damaged` ones are never called best."""
    epoch: int | None
    valid_loss: float | None
    """Nats per token, evaluated again."""
    message: str | None
    """Why it is not verified."""


class EventBase(View):
    id: int
    """Grows within a sweep; other sweeps have ids in between."""
    sweep_id: str
    at: datetime


class SweepSubmitted(EventBase):
    kind: Literal["sweep_submitted"]
    detail: Nothing


class SweepChanged(EventBase):
    kind: Literal["sweep_changed"]
    detail: Change


class PointMoved(EventBase):
    kind: Literal["point_added", "point_removed"]
    detail: Point


class TrialWished(EventBase):
    kind: WishKind
    detail: Wish


class SweepMoved(EventBase):
    kind: MoveKind
    detail: Move


class DriverEnded(EventBase):
    """The service ended a sweep's driver: for good (`driver_fenced`), or until its own next start."""

    kind: Literal["driver_fenced", "driver_stopped"]
    detail: Driver


class SweepWaiting(EventBase):
    """For the Ray cluster, say, or for a machine that has room."""

    kind: Literal["sweep_waiting"]
    detail: Wait


class SweepGoingOn(EventBase):
    """What it waited for is there."""

    kind: Literal["sweep_going_on"]
    detail: Nothing


class TrialStarted(EventBase):
    kind: Literal["trial_started"]
    detail: TrialStart


class EpochFinished(EventBase):
    kind: Literal["epoch_finished"]
    detail: Epoch


class TrialPaused(EventBase):
    kind: Literal["trial_paused"]
    detail: TrialPause


class TrialLost(EventBase):
    kind: Literal["trial_lost"]
    detail: TrialLoss


class TrialFinished(EventBase):
    kind: Literal["trial_finished"]
    detail: TrialEnd


class CheckpointChecked(EventBase):
    kind: Literal["checkpoint_checked"]
    detail: CheckpointCheck


class OtherEvent(EventBase):
    """Of a kind that a client of this version does not know."""

    kind: str
    detail: dict[str, Any]


KnownEvent = Annotated[
    SweepSubmitted
    | SweepChanged
    | PointMoved
    | TrialWished
    | SweepMoved
    | DriverEnded
    | SweepWaiting
    | SweepGoingOn
    | TrialStarted
    | EpochFinished
    | TrialPaused
    | TrialLost
    | TrialFinished
    | CheckpointChecked,
    Field(discriminator="kind"),
]
AnyEvent = Annotated[KnownEvent | OtherEvent, Field(union_mode="left_to_right")]
"""As a client reads it, whose service may be newer than itself."""
_ANY: TypeAdapter[KnownEvent | OtherEvent] = TypeAdapter(AnyEvent)


class EventPage(View):
    """Some of a sweep's events, the earliest first."""

    events: list[KnownEvent]
    next_after: int
    """What to give as `after` to go on from here, now or later."""
    has_more: bool
    """Whether there are later ones already."""


class AnyEventPage(View):
    """EventPage as a client reads it."""

    events: list[AnyEvent]
    next_after: int
    has_more: bool


def read_event(written: str | bytes) -> KnownEvent | OtherEvent:
    """What encode_event wrote, by this version of the service or another."""
    return _ANY.validate_json(written)


def encode_event(row: RowMapping | Mapping[str, Any]) -> bytes:
    """An event's row as JSON on one line. A damaged detail is an empty one: it hides nothing that follows."""
    detail = row["detail"]
    document = {
        "id": row["id"],
        "sweep_id": row["sweep_id"],
        "at": aware(row["at"]),
        "kind": row["kind"],
        "detail": detail if isinstance(detail, dict) else {},
    }
    return to_json(document, inf_nan_mode="null")


def encode_message(kind: str, at: datetime, data: bytes) -> str:
    """What is sent to a webhook, in the form that Standard Webhooks recommend."""
    type_and_time = to_json({"type": kind, "timestamp": aware(at)}).decode().removesuffix("}")
    return f'{type_and_time},"data":{data.decode()}}}'


def without_surrogates(value: Any) -> Any:
    """JSON without the halves of surrogate pairs that its text may have, say of a file's name in a message:
    they can be written, and then whoever reads strictly reads nothing of it."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {name: without_surrogates(inner) for name, inner in value.items()}
    return [without_surrogates(inner) for inner in value] if isinstance(value, list) else value
