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
    retry_after_s: int | None = None
    """When to ask again, where that helps."""


class ClusterAway(ServiceError):
    """The Ray cluster does not answer, and nothing is known of what it has."""

    status = 503
    code = "cluster_away"
    retry_after_s = 10


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


class CheckpointDamaged(ServiceError):
    """The checkpoint is not what was written."""

    status = 500
    code = "checkpoint_damaged"


class InvalidCursor(ServiceError):
    """No event of this sweep has this id."""

    status = 422
    code = "invalid_cursor"


class IllegalMove(ServiceError):
    """The sweep's state does not allow this."""

    status = 409
    code = "illegal_move"

    def __init__(self, message: str, legal: list[str]) -> None:
        super().__init__(message)
        self.legal = legal
        """What may be asked of the sweep instead."""


class PointNotFound(ServiceError):
    """There is no such point in this sweep."""

    status = 404
    code = "point_not_found"


class PointTaken(ServiceError):
    """The point is being tried, or was."""

    status = 409
    code = "point_taken"


class IllegalTrialMove(ServiceError):
    """The trial's state does not allow this."""

    status = 409
    code = "illegal_trial_move"


class RevisionRequired(ServiceError):
    """Whoever changes a sweep says which revision of it was looked at."""

    status = 428
    code = "revision_required"


class ChangedSince(ServiceError):
    """The sweep is no longer as it was when it was looked at."""

    status = 412
    code = "changed_since"


class KeyReused(ServiceError):
    """The Idempotency-Key came with another request before."""

    status = 422
    code = "idempotency_key_reused"


class StillCarriedOut(ServiceError):
    """The request with this Idempotency-Key is still being carried out."""

    status = 409
    code = "request_in_flight"
    retry_after_s = 1


class UnreadableSpec(ServiceError):
    """The sweep's spec in the database makes no sense."""

    status = 500
    code = "unreadable_spec"


class ReportFailed(ServiceError):
    """The report could not be made."""

    status = 500
    code = "report_failed"


class UnreadableStudy(ServiceError):
    """The sweep's trials in the database make no sense."""

    status = 500
    code = "unreadable_study"


class NotSignedIn(ServiceError):
    """This needs a token."""

    status = 401
    code = "not_signed_in"


class InvalidToken(ServiceError):
    """The token is not valid."""

    status = 401
    code = "invalid_token"


class InsufficientScope(ServiceError):
    """The token is not for this."""

    status = 403
    code = "insufficient_scope"

    def __init__(self, message: str, needed: str) -> None:
        super().__init__(message)
        self.needed = needed
        """The scope that would do."""


class ForeignOrigin(ServiceError):
    """A page of another site has asked for this."""

    status = 403
    code = "foreign_origin"


class UnknownHost(ServiceError):
    """The service is not known by this name."""

    status = 421
    code = "unknown_host"


class TooManyRequests(ServiceError):
    """That was asked too often."""

    status = 429
    code = "too_many_requests"

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class TooManyExports(ServiceError):
    """As many exports as there may be are being made or sent."""

    status = 503
    code = "too_many_exports"
    retry_after_s = 10


class TooManyForecasts(ServiceError):
    """As many forecasts as there may be wait for their probes."""

    status = 503
    code = "too_many_forecasts"
    retry_after_s = 20


class ClientGone(ServiceError):
    """Whoever asked is not there any more."""

    status = 499
    code = "client_gone"


class Stopping(ServiceError):
    """The service is being stopped."""

    status = 503
    code = "stopping"
    retry_after_s = 2


class DiskFull(ServiceError):
    """There is no room for this on the service's disk."""

    status = 507
    code = "disk_full"


class DatabaseAway(ServiceError):
    """The database does not answer."""

    status = 503
    code = "database_away"
    retry_after_s = 1


class CheckpointsAway(ServiceError):
    """The checkpoint store does not answer, or refuses the service."""

    status = 503
    code = "checkpoints_away"


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
        told = [
            f"{problem.parameter}: {problem.message}" if problem.parameter else problem.message
            for problem in problems[:MOST_IN_A_SENTENCE]
        ]
        more = [f"and {len(problems) - len(told)} more"] if len(problems) > len(told) else []
        super().__init__("; ".join([*told, *more]))
        self.problems = problems


class InvalidSpec(InvalidRequest):
    """The sweep cannot run here as it is asked for."""

    code = "invalid_spec"


class BadParameter(InvalidRequest):
    """A parameter of the request makes no sense."""

    code = "bad_parameter"

    def __init__(self, parameter: str, code: str, message: str) -> None:
        super().__init__([Problem("", code, message, parameter)])


class InvalidWebhook(InvalidRequest):
    """Nothing can be sent there, or not of that."""

    code = "invalid_webhook"


class WebhookNotFound(ServiceError):
    """There is no such webhook."""

    status = 404
    code = "webhook_not_found"


class CommandFailed(Exception):
    """A command of the command line cannot go on; the message is for people."""


class UnknownToken(CommandFailed):
    """There is no token of this id."""


class IncompatibleDatabase(CommandFailed):
    """The database is of a version that this program must not touch."""
