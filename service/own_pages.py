"""Pages of the service itself: how they are answered, and the few files that they need.

A file's address has a digest of its bytes in it, so that browsers keep it for good and none is out of date.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from importlib.resources import files
from typing import Annotated, Any
from urllib.parse import parse_qsl

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import HTMLResponse
from pydantic_core import from_json
from starlette.exceptions import HTTPException

from service.html import environment, rendered
from service.origins import CONTENT_POLICY, NO_FRAMES

POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self'; "
    f"form-action 'self'; {NO_FRAMES}"
)
KEPT_FOR_GOOD = "public, max-age=31536000, immutable"
MEDIA_TYPES = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
LARGEST_FORM = 10_000
"""Bytes; none of ours has a tenth of it."""


@dataclass(frozen=True)
class Asset:
    content: bytes
    media_type: str
    digest: str


def _assets() -> dict[str, Asset]:
    """By the last part of its address, `page-0123456789ab.css`."""
    found = {}
    for file in files("service").joinpath("assets").iterdir():
        stem, _, kind = file.name.partition(".")
        if kind in MEDIA_TYPES:
            content = file.read_bytes()
            digest = hashlib.sha256(content).hexdigest()[:12]
            found[f"{stem}-{digest}.{kind}"] = Asset(content, MEDIA_TYPES[kind], digest)
    return found


ASSETS = _assets()
_NAMES = {name.replace(f"-{asset.digest}", ""): name for name, asset in ASSETS.items()}


def asset(name: str) -> str:
    """The address of a file, by the name that it has here."""
    return f"/assets/{_NAMES[name]}"


environment().globals["asset"] = asset


def page(template: str, status: int = HTTPStatus.OK, **values: Any) -> HTMLResponse:
    return HTMLResponse(
        rendered(template, **values), status, {CONTENT_POLICY: POLICY, "cache-control": "no-store"}
    )


def problem_page(response: Response) -> Response:
    """What a problem document says, for a person."""
    said = page("problem.html", response.status_code, problem=from_json(bytes(response.body)))
    ours = said.headers.keys()
    said.headers.update({name: value for name, value in response.headers.items() if name not in ours})
    return said


async def _form(request: Request) -> Mapping[str, str]:
    """Empty where it is larger than any of ours."""
    body = await request.body()
    return dict(parse_qsl(body.decode(errors="replace"))) if len(body) <= LARGEST_FORM else {}


Form = Annotated[Mapping[str, str], Depends(_form)]

assets = APIRouter(prefix="/assets", include_in_schema=False)


@assets.get("/{name}")
async def get_asset(name: str, request: Request) -> Response:
    found = ASSETS.get(name)
    if found is None:
        raise HTTPException(404)
    headers = {"etag": f'"{found.digest}"', "cache-control": KEPT_FOR_GOOD}
    if headers["etag"] in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(found.content, headers=headers, media_type=found.media_type)
