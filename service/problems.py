"""Errors as RFC 9457 problem documents that point into the request's body with RFC 6901 pointers."""

import json
import math
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from inspect import getdoc
from typing import Any, get_args

from fastapi import Response
from pydantic import ConfigDict
from pydantic_core.core_schema import ErrorType

from service.errors import InvalidRequest, Problem, ServiceError
from service.requests import current_request_id
from service.schemas import View

MEDIA_TYPE = "application/problem+json"
MOST_PROBLEMS = 100
"""That are told of one request: it may have more wrong with it than anybody reads, or should be sent."""
EXTRA = {"extra_forbidden", "unexpected_keyword_argument"}
"""What pydantic calls an unknown field, of a model and of a dataclass."""
NO_TAG, WRONG_TAG = "union_tag_not_found", "union_tag_invalid"
NO_OBJECT = {"model_attributes_type", "model_type", "dataclass_type", "dict_type"}
PYDANTICS_OWN = set(get_args(ErrorType))
SPELT_OUT = {"missing", "value_error", NO_TAG, WRONG_TAG} | EXTRA
"""Errors of pydantic's whose message, as we write it, needs no value added."""
PHRASES = {413: "Content Too Large", 416: "Range Not Satisfiable"}
"""The words of RFC 9110 where Python's depend on its version."""

Location = tuple[int | str, ...]
"""Where pydantic found an error: keys and indices, and names of union members, which are not in the body."""
Schema = dict[str, Any]


class ErrorDocument(View):
    """One thing wrong with the request."""

    pointer: str | None
    """RFC 6901 JSON pointer into the request's body; empty for all of it, null where it is elsewhere."""
    parameter: str | None = None
    """Name of the query parameter or header that is wrong; null where it is the body."""
    code: str
    message: str
    """What would be right."""


class ProblemDocument(View):
    """What went wrong, as RFC 9457 says it."""

    model_config = ConfigDict(title="Problem")

    type: str = "about:blank"
    """A URN for errors of this service; `about:blank` where the status says it all."""
    title: str
    status: int
    detail: str
    code: str
    """For programs: does not change when the wording does."""
    errors: tuple[ErrorDocument, ...] = ()
    instance: str | None = None
    """Path of the request."""
    request_id: str | None = None
    """The answer's X-Request-Id, which the lines of the service's log have, too."""


def problem_response(document: ProblemDocument, headers: dict[str, str] | None = None) -> Response:
    document = document.model_copy(update={"request_id": current_request_id()})
    return Response(document.model_dump_json(), document.status, headers, media_type=MEDIA_TYPE)


def refusal(error: ServiceError, instance: str, headers: dict[str, str] | None = None) -> Response:
    """What the service answers where it cannot do as it was asked."""
    later = {} if error.retry_after_s is None else {"retry-after": str(error.retry_after_s)}
    return problem_response(document_of(error, instance), {**later, **(headers or {})})


def document_of(error: ServiceError, instance: str) -> ProblemDocument:
    problems = error.problems if isinstance(error, InvalidRequest) else []
    return ProblemDocument(
        type=f"urn:fraternal:problem:{error.code}",
        title=title_of(type(error)),
        status=error.status,
        detail=str(error),
        code=error.code,
        errors=tuple(map(_document, problems[:MOST_PROBLEMS])),
        instance=instance,
    )


def title_of(kind: type[ServiceError]) -> str:
    return (getdoc(kind) or "").partition("\n")[0].rstrip(".")


def _document(found: Problem) -> ErrorDocument:
    return ErrorDocument(
        pointer=found.pointer if found.parameter is None else None,
        parameter=found.parameter,
        code=found.code,
        message=found.message,
    )


def plain_problem(status: int, detail: str, instance: str | None) -> ProblemDocument:
    """A problem that its HTTP status names well enough."""
    phrase = PHRASES.get(status) or HTTPStatus(status).phrase
    code = phrase.lower().replace(" ", "_").replace("-", "_")
    return ProblemDocument(title=phrase, status=status, detail=detail, code=code, instance=instance)


def problems_in(errors: Sequence[Any], body: Any, schema: Schema) -> list[Problem]:
    """What pydantic's errors say about `body`, each place once, though every member of a union complains.

    `schema` is the JSON schema that the body should follow; `loc` starts at the body's root.
    """
    complaints: dict[str, list[dict[str, Any]]] = {}
    for error in errors:
        complaints.setdefault(_pointer_of(error, body), []).append(error)
    return [
        Problem(pointer, here[0]["type"], _message_of(here, schema)) for pointer, here in complaints.items()
    ]


def to_pointer(parts: Sequence[int | str]) -> str:
    """RFC 6901: `~` and `/` inside a part are written `~0` and `~1`."""
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in parts)


def _pointer_of(error: dict[str, Any], body: Any) -> str:
    below = error.get("ctx", {}).get("pointer", "")
    return f"{to_pointer([*_path_in(body, error['loc'], error['type']), *_tag_field(error)])}{below}"


def _path_in(body: Any, location: Location, kind: str) -> Iterator[int | str]:
    """The parts of `location` that lead somewhere in the body, and the name of a missing field."""
    for index, part in enumerate(location):
        is_missing_field = kind == "missing" and index == len(location) - 1
        if _leads_into(body, part):
            body = body[part]
            yield part
        elif is_missing_field:
            yield part


def _leads_into(body: Any, part: int | str) -> bool:
    if isinstance(body, dict):
        return part in body
    return isinstance(body, list) and isinstance(part, int) and part < len(body)


def _tag_field(error: dict[str, Any]) -> list[str]:
    """The field that tells the members of a union apart, where that is what is wrong."""
    return [error["ctx"]["discriminator"].strip("'")] if error["type"] in {NO_TAG, WRONG_TAG} else []


def _message_of(errors: Sequence[dict[str, Any]], schema: Schema) -> str:
    rules = "; or: ".join(dict.fromkeys(_rule_of(error, schema) for error in errors))
    names_the_value = errors[0]["type"] not in PYDANTICS_OWN or errors[0]["type"] in SPELT_OUT
    return rules if names_the_value else f"{rules}; got {_shown(errors[0]['input'])}"


def _rule_of(error: dict[str, Any], schema: Schema) -> str:
    kind, location = error["type"], error["loc"]
    if kind == "missing":
        return f"{location[-1]!r} is required here" if location else "a JSON body is required"
    if kind in EXTRA:
        return f"unknown field {location[-1]!r}; known here: {_listed(_fields_at(schema, location[:-1]))}"
    if kind == NO_TAG:
        return (
            f"{error['ctx']['discriminator']} is required here; one of: {_listed(_tags_at(schema, location))}"
        )
    if kind == WRONG_TAG:
        return f"{error['ctx']['tag']!r} is none of: {_listed(_tags_at(schema, location))}"
    if kind in NO_OBJECT:
        return "Input should be a JSON object"
    return str(error["msg"]).removeprefix("Value error, ")


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names))


def _shown(value: Any) -> str:
    """A value as JSON would write it, cut where it is long."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    try:
        text = json.dumps(value, ensure_ascii=True)
    except (TypeError, ValueError, RecursionError):
        text = ascii(value)
    return text if len(text) <= 80 else text[:77] + "..."


# What a JSON schema allows at a place: so that messages are derived from the models and stay true.


def _fields_at(schema: Schema, location: Location) -> set[str]:
    return {name for place in _places(schema, location) for name in place.get("properties", {})}


def _tags_at(schema: Schema, location: Location) -> set[str]:
    """The constants that tell the alternatives at a place apart."""
    return {
        str(field["const"])
        for place in _places(schema, location)
        for field in place.get("properties", {}).values()
        if "const" in field
    }


def _places(schema: Schema, location: Location) -> list[Schema]:
    definitions = schema.get("$defs", {})
    places = _alternatives(schema, definitions)
    for part in location:
        below = [lower for place in places for lower in _step(place, part, definitions)]
        places = below or _members_named(places, part) or places
    return places


def _alternatives(schema: Schema, definitions: Schema) -> list[Schema]:
    if "$ref" in schema:
        return _alternatives(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    members = schema.get("anyOf") or schema.get("oneOf")
    return (
        [place for member in members for place in _alternatives(member, definitions)] if members else [schema]
    )


def _step(place: Schema, part: int | str, definitions: Schema) -> list[Schema]:
    if part in place.get("properties", {}):
        return _alternatives(place["properties"][part], definitions)
    inner = place.get("items" if isinstance(part, int) else "additionalProperties")
    return _alternatives(inner, definitions) if isinstance(inner, dict) else []


def _members_named(places: list[Schema], tag: int | str) -> list[Schema]:
    """Those members of a union that pydantic calls by this name: a discriminator's value or a class."""
    return [
        place
        for place in places
        if place.get("title") == tag
        or any(field.get("const") == tag for field in place.get("properties", {}).values())
    ]
