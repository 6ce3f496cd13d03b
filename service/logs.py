"""The log of the service, on standard error: lines for people, or a JSON object a line for programs.

Whatever is logged, a line of it is one record: nobody can write a second one into the first.
"""

import logging
from datetime import UTC, datetime
from typing import Any, Literal

import optuna
from pythonjsonlogger.json import JsonFormatter

from service.requests import current_fields

LEVELS: dict[str, int] = {"text": logging.WARNING, "json": logging.INFO}
"""What is logged at least, by format, unless it is said."""
TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
RENAMED = {"levelname": "level", "name": "logger", "exc_info": "traceback"}


def log_to_standard_error(form: Literal["text", "json"], level: str | None) -> None:
    """Everything that anything in this process logs, and Python's warnings."""
    least = LEVELS[form] if level is None else logging.getLevelNamesMapping()[level.upper()]
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if form == "json" else TextLines(TEXT))
    handler.addFilter(_with_request)
    handler.setLevel(least)  # Optuna's logger has a level of its own
    logging.basicConfig(level=least, handlers=[handler], force=True)
    logging.captureWarnings(True)
    optuna.logging.disable_default_handler()
    optuna.logging.enable_propagation()


def _with_request(record: logging.LogRecord) -> bool:
    """Add the request's fields, unless the record has its own; the filter of a handler sees every record."""
    for name, value in current_fields().items():
        if not hasattr(record, name):
            setattr(record, name, value)
    return True


class JsonLines(JsonFormatter):
    def __init__(self) -> None:
        super().__init__("%(levelname)s %(name)s %(message)s", rename_fields=RENAMED, timestamp=True)

    def process_log_record(self, log_data: dict[str, object]) -> dict[str, object]:
        """The time first, in UTC, as RFC 3339 has it."""
        at = log_data.pop("timestamp")
        assert isinstance(at, datetime)
        return {"timestamp": at.astimezone(UTC).isoformat().replace("+00:00", "Z"), **log_data}


class TextLines(logging.Formatter):
    """A record begins at the margin, and nothing else does: its traceback is indented."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = _on_one_line(record.message.rstrip())
        fields = {name: getattr(record, name, None) for name in ("request_id", "sweep_id")}
        about = " ".join(f"{name}={value}" for name, value in fields.items() if value)
        line = super().formatMessage(record)
        return f"{line} [{about}]" if about else line

    def formatException(self, ei: Any) -> str:
        return "\n".join(f"  {_on_one_line(line)}" for line in super().formatException(ei).split("\n"))


def _on_one_line(text: str) -> str:
    """With what would end a line, or move a terminal's cursor, written out."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text
    )
