"""Errors as RFC 9457 problem documents that point into the request's body with RFC 6901 pointers."""

import json
import math
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import Response
from pydantic import ConfigDict

from service.errors import Problem
from service.schemas import View

MEDIA_TYPE = "application/problem+json"
EXTRA = {"extra_forbidden", "unexpected_keyword_argument"}
"""What pydantic calls an unknown field, of a model and of a dataclass."""
NO_TAG, WRONG_TAG = "union_tag_not_found", "union_tag_invalid"

Location = tuple[int | str, ...]
"""Where pydantic found an error: keys and indices, and names of union members, which are not in the body."""
Schema = dict[str, Any]


class ErrorDocument(View):
    """One thing wrong with the request."""

    pointer: str
    """RFC 6901 JSON pointer into the request's body; empty for the whole of it."""
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


def problem_response(document: ProblemDocument, headers: dict[str, str] | None = None) -> Response:
    return Response(document.model_dump_json(), document.status, headers, media_type=MEDIA_TYPE)


def plain_problem(status: int, detail: str, instance: str) -> ProblemDocument:
    """A problem that its HTTP status names well enough."""
    phrase = HTTPStatus(status).phrase
    code = phrase.lower().replace(" ", "_").replace("-", "_")
    return ProblemDocument(title=phrase, status=status, detail=detail, code=code, instance=instance)


def problems_in(errors: Sequence[dict[str, Any]], body: Any, schema: Schema) -> list[Problem]:
    """What pydantic's errors say about `body`, each place in it once.

    `schema` is the JSON schema that the body should follow; `loc` starts at the body's root.
    """
    found: dict[str, Problem] = {}
    for error in errors:
        pointer = _pointer_of(error, body)
        problem = Problem(pointer, error["type"], _message_of(error, schema))
        found[pointer] = _joined(found[pointer], problem) if pointer in found else problem
    return list(found.values())


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


def _joined(first: Problem, second: Problem) -> Problem:
    """One problem out of two at one place: members of a union each say why the value is none of theirs."""
    if second.message in first.message:
        return first
    return Problem(first.pointer, first.code, f"{first.message}; or: {second.message}")


def _message_of(error: dict[str, Any], schema: Schema) -> str:
    kind, location = error["type"], error["loc"]
    if "pointer" in error.get("ctx", {}):
        return str(error["msg"])
    if kind == "missing":
        return f"{_last(location)!r} is required here"
    if kind in EXTRA:
        known = ", ".join(sorted(_fields_at(schema, location[:-1])))
        return f"unknown field {_last(location)!r}; known here: {known}"
    if kind == NO_TAG:
        tags = ", ".join(sorted(_tags_at(schema, location)))
        return f"{error['ctx']['discriminator']} is required here; one of: {tags}"
    return f"{error['msg']}; got {_shown(error.get('input'))}"


def _last(location: Location) -> str:
    return str(location[-1]) if location else "body"


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
