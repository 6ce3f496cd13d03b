"""The API's OpenAPI description, completed: what FastAPI cannot know of every operation.

Added are the errors that can come of any request, as problem documents; headers; examples; links from what an
operation answers to those that take it. A route says only what is its own.
"""

from collections.abc import Iterator
from typing import Any

from fastapi.routing import APIRoute

from service.examples import ANSWERS, PROBLEMS, REQUESTS, SWEEP_ID, WEBHOOK_ID
from service.problems import MEDIA_TYPE, plain_problem
from service.refusals import RETRY_AFTER_S
from service.requests import HEADER
from trials.presets import PRESETS

JSON = "application/json"
PROBLEM = {"$ref": "#/components/schemas/ProblemDocument"}
FASTAPIS_OWN = ("HTTPValidationError", "ValidationError")
WITH_BODY = {"post", "put", "patch"}
EVERYWHERE = {
    413: "The body is too large, whatever the request is.",
    500: "The service failed; its log says why, at this request_id.",
}
WITH_A_BODY = {
    400: "The body is not JSON as RFC 8259 has it, or is nested too deep.",
    415: "The body is not sent as application/json in UTF-8.",
}
OF_THE_DATABASE = {503: "The database does not answer; ask again."}
OF_THE_REQUEST = {422: "The request is not what is taken here; each error points to its place."}
CONTACT = {"name": "The people who run this service"}
LICENSE = {"name": "MIT", "identifier": "MIT"}
SERVERS = [{"url": "/", "description": "The service that this description is from"}]
TAGS = [
    {"name": "sweeps", "description": "Ask for sweeps, follow and steer them."},
    {
        "name": "trials",
        "description": "Of one sweep: look at them, steer single ones, fetch what they found.",
    },
    {"name": "events", "description": "What happens in a sweep, as it comes."},
    {"name": "webhooks", "description": "Have what happens sent to a URL."},
    {"name": "health", "description": "For those who run the service, and for what watches it."},
]
NOT_THERE_AT_FIRST = {"getBest", "getBestCheckpoint"}
HEADERS: dict[str, dict[str, Any]] = {
    HEADER: {
        "description": "Names the request in answers and logs; a client's own is taken over if it is sane.",
        "required": True,
        "schema": {"type": "string", "pattern": "^[A-Za-z0-9._:/+=@-]{1,128}$"},
        "example": "7b0c6f7e0c5c4d1f9a55c9d2a4b3e8f1",
    },
    "Location": {
        "description": "Path of what was made.",
        "required": True,
        "schema": {"type": "string", "format": "uri-reference"},
        "example": f"/v1/sweeps/{SWEEP_ID}",
    },
    "ETag": {
        "description": "The sweep's revision: changes with what is asked of it, not with its progress.",
        "required": True,
        "schema": {"type": "string"},
        "example": '"1"',
    },
    "WWW-Authenticate": {
        "description": "How to say who asks (RFC 6750).",
        "required": True,
        "schema": {"type": "string"},
        "example": 'Bearer realm="fraternal"',
    },
    "Retry-After": {
        "description": "Seconds to wait before asking again.",
        "required": True,
        "schema": {"type": "integer", "minimum": 0},
        "example": RETRY_AFTER_S,
    },
}

Description = dict[str, Any]
Operation = dict[str, Any]


def operation_id(route: APIRoute) -> str:
    """`get_sweep` is getSweep in clients that are generated of the description."""
    first, *others = route.name.split("_")
    return first + "".join(word.capitalize() for word in others)


def completed(description: Description) -> Description:
    _add_presets(description["components"]["schemas"])
    for path, method, operation in operations(description):
        _add_errors(path, method, operation)
        for status, response in operation["responses"].items():
            _add_headers(status, response)
            _add_examples(path, status, response)
        _add_request_examples(operation)
        _add_parameter_examples(operation)
    for name in FASTAPIS_OWN:
        description["components"]["schemas"].pop(name, None)
    _add_links(description)
    return description


def _add_presets(schemas: dict[str, Any]) -> None:
    """Of a sweep that is asked for, a preset may have whatever is required elsewhere."""
    request, budget = schemas["SweepRequest"], schemas["Budget"]
    request.pop("required")
    request["properties"]["preset"]["anyOf"][0]["enum"] = sorted(PRESETS)
    request["properties"]["budget"] = {name: value for name, value in budget.items() if name != "required"}
    request["description"] += " A corpus, and the trials of a budget, are required where no preset has them."


def operations(description: Description) -> Iterator[tuple[str, str, Operation]]:
    """(path, method, operation) for each."""
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def _add_errors(path: str, method: str, operation: Operation) -> None:
    responses = operation["responses"]
    if _ref(responses.get("422", {})).endswith(FASTAPIS_OWN[0]):  # what is wrong with a path is 404 here
        del responses["422"]
    can_happen = dict(EVERYWHERE)
    if method in WITH_BODY:
        can_happen |= WITH_A_BODY
    if path.startswith("/v1/"):
        can_happen |= OF_THE_DATABASE
    outside_the_path = [given for given in operation.get("parameters", []) if given["in"] != "path"]
    if outside_the_path or "requestBody" in operation:
        can_happen |= OF_THE_REQUEST
    for status, words in can_happen.items():
        responses.setdefault(str(status), {"description": words, "content": {JSON: {"schema": PROBLEM}}})
    operation["responses"] = dict(sorted(responses.items()))


def _ref(response: dict[str, Any]) -> str:
    return str(response.get("content", {}).get(JSON, {}).get("schema", {}).get("$ref", ""))


def _add_headers(status: str, response: dict[str, Any]) -> None:
    headers = response.setdefault("headers", {})
    headers[HEADER] = HEADERS[HEADER]
    if status == "201":
        headers["Location"] = HEADERS["Location"]
    if status in {"429", "503"} and _ref(response) == PROBLEM["$ref"]:
        headers["Retry-After"] = HEADERS["Retry-After"]
    if status == "401":
        headers["WWW-Authenticate"] = HEADERS["WWW-Authenticate"]
    if _ref(response).rpartition("/")[2] in {"SweepView", "SweepDetail"}:
        headers["ETag"] = HEADERS["ETag"]


def _add_examples(path: str, status: str, response: dict[str, Any]) -> None:
    content = response.get("content", {})
    schema = _ref(response).rpartition("/")[2]
    if schema == "ProblemDocument":
        content[MEDIA_TYPE] = content.pop(JSON)  # FastAPI files every documented body under JSON's own type
        where = path.replace("{sweep_id}", SWEEP_ID)
        example = PROBLEMS.get(int(status)) or plain_problem(int(status), response["description"], where)
        about = {"instance": where, "request_id": HEADERS[HEADER]["example"]}
        content[MEDIA_TYPE]["example"] = {**example.model_dump(mode="json"), **about}
    elif schema in ANSWERS:
        content[JSON].setdefault("example", ANSWERS[schema])


def _add_request_examples(operation: Operation) -> None:
    for content in operation.get("requestBody", {}).get("content", {}).values():
        named = {schema["$ref"].rpartition("/")[2] for schema in _alternatives(content["schema"])}
        for name in (operation["operationId"], *named):
            if name in REQUESTS:
                content.setdefault("examples", REQUESTS[name])


def _alternatives(schema: dict[str, Any]) -> list[dict[str, Any]]:
    return [member for member in schema.get("anyOf", [schema]) if "$ref" in member]


def _add_parameter_examples(operation: Operation) -> None:
    examples = {"sweep_id": SWEEP_ID, "number": 2, "point_id": 3, "webhook_id": WEBHOOK_ID}
    for parameter in operation.get("parameters", []):
        if parameter["name"] in examples:
            parameter.setdefault("example", examples[parameter["name"]])


def _add_links(description: Description) -> None:
    """From an answer that has a sweep, or a trial, to whatever may be asked of it.

    What is not there before an epoch is done, no link leads to from where a sweep was made.
    """
    targets = {operation["operationId"]: operation for _, _, operation in operations(description)}
    for path, method, operation in operations(description):
        for status, response in operation["responses"].items():
            schema = _ref(response).rpartition("/")[2]
            if not status.startswith("2") or method == "delete":
                continue
            absent = NOT_THERE_AT_FIRST if status == "201" else set()
            links = {
                name: {"operationId": name, "description": target["summary"], "parameters": known}
                for name, target in targets.items()
                if name not in absent and (known := _known(description, path, schema, target))
            }
            if links:
                response["links"] = links


def _known(description: Description, path: str, schema: str, target: Operation) -> dict[str, str] | None:
    """Where an answer of this schema, to a request at this path, has what the target takes in its path."""
    schemas = description["components"]["schemas"]
    places = {name: f"$request.path.{name}" for name in ("sweep_id", "number") if f"{{{name}}}" in path}
    for pointer, fields in _objects(schema, schemas):
        if "id" in fields and "state" in fields:
            places["sweep_id"] = f"$response.body#{pointer}/id"
        if "number" in fields and "sweep_id" in places:
            places["number"] = f"$response.body#{pointer}/number"
    taken = [given["name"] for given in target.get("parameters", []) if given["in"] == "path"]
    from_the_answer = any(places.get(name, "").startswith("$response") for name in taken)
    return {name: places[name] for name in taken} if from_the_answer and places.keys() >= set(taken) else None


def _objects(schema: str, schemas: dict[str, Any]) -> Iterator[tuple[str, set[str]]]:
    """(pointer, fields) of the object that an answer is, or of the first one in its list."""
    properties = schemas.get(schema, {}).get("properties", {})
    yield "", set(properties)
    for name, below in properties.items():
        item = below.get("items", {}).get("$ref", "").rpartition("/")[2]
        if item:
            yield f"/{name}/0", set(schemas[item].get("properties", {}))
