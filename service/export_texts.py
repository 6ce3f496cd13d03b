"""An export as text: one table as CSV, or everything as JSON."""

import csv
from collections.abc import Iterable, Sequence
from datetime import datetime
from io import TextIOWrapper
from typing import Any, BinaryIO

from pydantic_core import to_json

from service.database import naive
from service.export_tables import Kind, columns_of, pages_of
from service.exports import Moment, Table

FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")
"""What a spreadsheet takes text that begins so for; whoever named a trial would run it there."""


def write_csv(moment: Moment, table: Table, file: BinaryIO) -> None:
    """RFC 4180, with what pandas reads back: nothing for None, `nan` and `inf`, numbers with all digits.

    Text that begins like a formula has an apostrophe before it; numbers are as they are.
    """
    columns = columns_of(moment, table)
    with _as_text(file) as text:
        writer = csv.writer(text)
        writer.writerow(columns)
        for page in pages_of(moment, table, columns):
            cells = [_cells(kind, values) for kind, values in zip(columns.values(), page, strict=True)]
            writer.writerows(zip(*cells, strict=True))


class _as_text(TextIOWrapper):
    """Leaves the file open in the end."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file, encoding="utf-8", newline="")

    def __exit__(self, *error: Any) -> None:
        self.detach()


def _cells(kind: Kind, values: Sequence[Any]) -> Iterable[Any]:
    if kind is str:
        return [value and _harmless(value) for value in values]
    if kind is datetime:
        return [value and _rfc3339(value) for value in values]
    return values


def _harmless(text: str) -> str:
    return f"'{text}" if text.startswith(FORMULA) else text


def _rfc3339(at: datetime) -> str:
    """Of UTC; six digits always, so that a column is of one form."""
    return (naive(at) if at.tzinfo else at).isoformat(timespec="microseconds") + "Z"


def write_json(moment: Moment, file: BinaryIO) -> None:
    """A SweepExport, a trial a line."""
    found = moment.survey()
    sweep = moment.detail(found)
    first = {"exported_at": moment.at, "environment": moment.environment(found), "sweep": sweep}
    head = b",\n".join(b"%s:%s" % (to_json(name), to_json(value)) for name, value in first.items())
    file.write(b'{%s,\n"trials":[' % head)
    for index, trial in enumerate(moment.details()):
        file.write((b",\n" if index else b"\n") + trial.model_dump_json().encode())
    file.write(b"\n]}\n")
