"""A sweep's report over HTTP, in three forms."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response

from service.accepting import preferred
from service.html import policy_for
from service.origins import CONTENT_POLICY
from service.problems import ProblemDocument
from service.report_schemas import ReportView
from service.report_texts import to_markdown
from service.reports import Reports
from service.routes import NO_SUCH, SweepId

JSON, MARKDOWN, PAGE = "application/json", "text/markdown", "text/html"
STYLE = "report.css"
FORMS = (JSON, MARKDOWN, PAGE)
RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "As JSON, unless `Accept` wishes for one of the others more.",
        "content": {
            MARKDOWN: {"schema": {"type": "string"}},
            PAGE: {
                "schema": {"type": "string", "description": "One page with pictures, complete in itself."}
            },
        },
    },
    500: {"model": ProblemDocument, "description": "The trials make no sense, or the page was not drawn."},
}

reports = APIRouter(prefix="/v1/sweeps", tags=["trials"])


async def _reports(request: Request) -> Reports:
    found: Reports = request.app.state.reports
    return found


@reports.get("/{sweep_id}/report", response_model=ReportView, responses={**NO_SUCH, **RESPONSES})
async def get_report(
    sweep_id: SweepId, request: Request, reports: Annotated[Reports, Depends(_reports)]
) -> Response:
    """What the trials so far say about the arms: the best, how many beat the baseline, arm against arm.

    With `Accept: text/markdown` or `text/html` to be read; the page, which a browser gets, has pictures,
    needs no network and may be kept. It takes seconds to draw the first time, and while the sweep runs.
    """
    form = preferred(", ".join(request.headers.getlist("accept")), FORMS)
    if form == PAGE:
        headers = {CONTENT_POLICY: policy_for(STYLE), "vary": "accept"}
        return Response(await reports.page(sweep_id), media_type=PAGE, headers=headers)
    report = await reports.report(sweep_id)
    body = to_markdown(report) if form == MARKDOWN else report.model_dump_json()
    return Response(body, media_type=form, headers={"vary": "accept"})
