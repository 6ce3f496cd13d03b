"""A sweep's states and every move between them, in one table. The records carry it out."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

State = Literal[
    "queued",
    "running",
    "pausing",
    "paused",
    "stopping",
    "cancelling",
    "succeeded",
    "failed",
    "cancelled",
    "deleting",
]
TERMINAL_STATES: frozenset[State] = frozenset({"succeeded", "failed", "cancelled"})
"""No trial is open, and nothing happens any more unless a client asks for it."""
WITH_DRIVER: frozenset[State] = frozenset({"running", "pausing", "stopping"})
"""A driver may write."""
MOVING: frozenset[State] = WITH_DRIVER | {"queued", "cancelling", "deleting"}
"""The service has something to do."""

WISHES: Mapping[State, str] = {
    "queued": "running",
    "running": "running",
    "pausing": "paused",
    "paused": "paused",
    "stopping": "stopped",
    "cancelling": "cancelled",
    "succeeded": "succeeded",
    "failed": "failed",
    "cancelled": "cancelled",
    "deleting": "deleted",
}
"""What the service brings a sweep of each state to."""

Verb = Literal[
    # Clients ask for these.
    "pause",
    "resume",
    "stop",
    "cancel",
    "extend",
    "retry_failed",
    "delete",
    # The reconciler's and the driver's.
    "drive",
    "park",
    "succeed",
    "fail",
    "close",
    "give_up",
]
REQUESTS: tuple[Verb, ...] = ("pause", "resume", "stop", "cancel", "extend", "retry_failed", "delete")


@dataclass(frozen=True)
class Move:
    event: str
    """What the sweep's story calls it."""
    states: Mapping[State, State]
    """From, to; from any other state it is illegal."""


def _from(*states: State, to: State) -> dict[State, State]:
    return dict.fromkeys(states, to)


MOVES: Mapping[Verb, Move] = {
    # Running trials save their state and give their resources back. To ask twice is to ask once.
    "pause": Move(
        "pause_requested",
        {"queued": "paused", "running": "pausing", "pausing": "pausing", "paused": "paused"},
    ),
    "resume": Move("resume_requested", {"paused": "queued", "pausing": "running", "stopping": "running"}),
    # Running trials go on to their ends, and no other begins.
    "stop": Move("stop_requested", {"running": "stopping", "stopping": "stopping"}),
    # Running trials end now; what they have reached is kept.
    "cancel": Move(
        "cancel_requested",
        _from("queued", "running", "pausing", "stopping", "paused", "cancelling", to="cancelling"),
    ),
    "extend": Move(
        "extended",
        {
            "queued": "queued",
            "running": "running",
            "pausing": "pausing",
            "paused": "paused",
            **_from("succeeded", "failed", "cancelled", to="queued"),
        },
    ),
    "retry_failed": Move(
        "retry_requested", {"paused": "paused", **_from("succeeded", "failed", "cancelled", to="queued")}
    ),
    "delete": Move(
        "delete_requested",
        _from("queued", "paused", "succeeded", "failed", "cancelled", "deleting", to="deleting"),
    ),
    # A driver's life. It parks a sweep whose trials are not all done: paused on request, or its budget raised
    # at the last moment.
    "drive": Move("driver_started", {"queued": "running", "running": "running", "stopping": "stopping"}),
    "park": Move("sweep_parked", {"pausing": "paused", "running": "queued", "stopping": "stopping"}),
    "succeed": Move("sweep_succeeded", _from("running", "pausing", "stopping", to="succeeded")),
    "fail": Move("sweep_failed", _from("running", "pausing", "stopping", to="failed")),
    "close": Move("sweep_cancelled", {"cancelling": "cancelled"}),
    "give_up": Move("sweep_failed", _from("queued", "running", "pausing", "stopping", to="failed")),
}


def legal_words(state: State) -> str:
    legal = legal_requests(state)
    return f"legal now: {', '.join(legal)}" if legal else "nothing can be asked of it any more"


def legal_requests(state: State) -> list[str]:
    """What clients may ask of a sweep in this state, as the API spells it."""
    return [verb.replace("_", "-") for verb in REQUESTS if state in MOVES[verb].states]
