"""The exception tree of the service. A class carries its HTTP status; its docstring is the default title."""

from dataclasses import dataclass
from typing import ClassVar

MOST_IN_A_SENTENCE = 5
INTERRUPTED = 130
"""Exit code after SIGINT, as shells have it."""


class ServiceError(Exception):
    """The request cannot be carried out."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"


class SweepNotFound(ServiceError):
    """There is no such sweep."""

    status = 404
    code = "sweep_not_found"


class TrialNotFound(ServiceError):
    """There is no such trial in this sweep."""

    status = 404
    code = "trial_not_found"


class NoCheckpointYet(ServiceError):
    """No trial of this sweep has a checkpoint yet."""

    status = 404
    code = "no_checkpoint_yet"


class IllegalMove(ServiceError):
    """The sweep's state does not allow this."""

    status = 409
    code = "illegal_move"

    def __init__(self, message: str, legal: list[str]) -> None:
        super().__init__(message)
        self.legal = legal
        """What may be asked of the sweep instead."""


class UnreadableSpec(ServiceError):
    """The sweep's spec in the database makes no sense."""

    status = 500
    code = "unreadable_spec"


class UnreadableStudy(ServiceError):
    """The sweep's trials in the database make no sense."""

    status = 500
    code = "unreadable_study"


class DatabaseAway(ServiceError):
    """The database does not answer."""

    status = 503
    code = "database_away"


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a request: where, as a JSON pointer into the body, and what would be right."""

    pointer: str
    code: str
    message: str
    parameter: str | None = None
    """Name of the query parameter or header that is wrong, in place of the pointer."""


class InvalidRequest(ServiceError):
    """The request is not what is taken here."""

    status = 422
    code = "invalid_request"

    def __init__(self, problems: list[Problem]) -> None:
        told = [problem.message for problem in problems[:MOST_IN_A_SENTENCE]]
        more = [f"and {len(problems) - len(told)} more"] if len(problems) > len(told) else []
        super().__init__("; ".join([*told, *more]))
        self.problems = problems


class InvalidSpec(InvalidRequest):
    """The sweep cannot run here as it is asked for."""

    code = "invalid_spec"


class CommandFailed(Exception):
    """A command of the command line cannot go on; the message is for people."""


class IncompatibleDatabase(CommandFailed):
    """The database is of a version that this program must not touch."""
