"""The API's pages for people, /docs: Swagger UI from files of our own, so that it needs no network.

FastAPI's own page loads it from elsewhere and has a script inside, which our content policy would refuse. Of
the package fastapi-offline the files are taken, and no code: it brings the Swagger UI that reads OpenAPI 3.1.
"""

from importlib.resources import files

from fastapi import APIRouter, Response
from fastapi.responses import FileResponse, HTMLResponse
from starlette.exceptions import HTTPException

from service.origins import CONTENT_POLICY, NO_FRAMES

POLICY = (
    "default-src 'none'; script-src 'self'; connect-src 'self'; img-src 'self' data:; "
    f"style-src 'self' 'unsafe-inline'; form-action 'none'; {NO_FRAMES}"
)
"""Swagger UI sets styles of elements."""
ASSETS = ("swagger-ui-bundle.js", "swagger-ui.css")
PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>fraternal: API</title>
<link rel="stylesheet" href="/docs/swagger-ui.css">
<script src="/docs/swagger-ui-bundle.js" defer></script>
<script src="/docs/start.js" defer></script>
</head>
<body>
<div id="api"></div>
<noscript>These pages need JavaScript; <a href="/openapi.json">the description itself</a> does not.</noscript>
</body>
</html>
"""
START = """SwaggerUIBundle({
  url: "/openapi.json",
  dom_id: "#api",
  deepLinking: true,
  validatorUrl: null,
  presets: [SwaggerUIBundle.presets.apis],
});
"""

docs = APIRouter(prefix="/docs", include_in_schema=False)


@docs.get("")
def get_docs() -> HTMLResponse:
    return HTMLResponse(PAGE, headers={CONTENT_POLICY: POLICY})


@docs.get("/start.js")
def get_start() -> Response:
    return Response(START, media_type="text/javascript")


@docs.get("/{name}")
def get_asset(name: str) -> FileResponse:
    if name not in ASSETS:
        raise HTTPException(404)
    return FileResponse(str(files("fastapi_offline") / "static" / name))
