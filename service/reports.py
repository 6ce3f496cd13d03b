"""The reports of a service's sweeps, each made once for a sweep at rest; pages in a process of their own."""

import logging
import sys

from anyio import fail_after, run_process

from service.database import now
from service.errors import ReportFailed
from service.launcher import inherited_environment
from service.records import Stamp, SweepRecord
from service.report_schemas import ReportView
from service.settings import Settings
from service.sweeps import SweepController
from service.turns import Turns, looks
from service.views import CHANGING
from trials.rows import Remembered

log = logging.getLogger(__name__)

DATABASE_URL = "FRATERNAL_DATABASE_URL"

PATIENCE_S = 100.0
"""For a page."""
ROOM = 64 * 2**20
"""Bytes of pages that are kept."""
MOST_REPORTS = 512
reporting = Turns("reports", 1)
"""scipy takes a second to load, and a report milliseconds of a core: who looks does not wait for it."""
drawing = Turns("drawing", 1)
"""Each takes a core for seconds."""


class Reports:
    """Of one service. Every method raises SweepNotFound and UnreadableStudy."""

    def __init__(self, controller: SweepController, settings: Settings) -> None:
        self._controller = controller
        self._environment = {
            "FRATERNAL_DATA_DIR": str(settings.data_dir.resolve()),
            DATABASE_URL: settings.resolved_database_url,  # a command line would show its password
        }
        self._reports: Remembered[Stamp, ReportView] = Remembered(MOST_REPORTS, lambda _: 0)
        self._pages: Remembered[Stamp, bytes] = Remembered(ROOM, len)

    async def report(self, sweep_id: str) -> ReportView:
        record = await looks.take(self._controller.records.get_sweep, sweep_id)
        known = self._reports.find(record.stamp)
        return await reporting.take(self._build, record) if known is None else known

    def _build(self, record: SweepRecord) -> ReportView:
        known = self._reports.find(record.stamp)  # by who had the turn before
        if known is not None:
            return known
        from service.report import build_report  # and scipy

        trials = self._controller.views.trials(record)
        report = build_report(record.id, record.state, record.spec, trials, now())
        return report if record.state in CHANGING else self._reports.keep(record.stamp, report)

    async def page(self, sweep_id: str) -> bytes:
        """As HTML. Raises ReportFailed."""
        record = await looks.take(self._controller.records.get_sweep, sweep_id)
        known = self._pages.find(record.stamp)
        if known is not None:
            return known
        async with drawing.of_this_loop():
            known = self._pages.find(record.stamp)  # by who had the turn before
            page = await self._draw(sweep_id) if known is None else known
        return page if record.state in CHANGING else self._pages.keep(record.stamp, page)

    async def _draw(self, sweep_id: str) -> bytes:
        environment = {**inherited_environment(), **self._environment}
        command = [sys.executable, "-P", "-m", "service.report_page", sweep_id]  # nothing of where we are
        try:
            with fail_after(PATIENCE_S):
                drawn = await run_process(command, check=False, env=environment)
        except TimeoutError as error:
            words = f"the page of sweep {sweep_id} was not drawn in {PATIENCE_S:.0f} s; its report as JSON or"
            raise ReportFailed(f"{words} Markdown has all but the pictures") from error
        if drawn.returncode != 0:
            said = drawn.stderr.decode(errors="replace").strip()
            log.error("the report's page of sweep %s could not be drawn: %s", sweep_id, said)
            last = said.rpartition("\n")[2][:300] or f"exit code {drawn.returncode}"
            raise ReportFailed(f"the page of sweep {sweep_id} could not be drawn: {last}")
        return drawn.stdout
