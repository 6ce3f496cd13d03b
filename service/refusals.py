"""Every error of the web application as a problem document: ours, the frameworks', the unforeseen ones."""

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from http import HTTPStatus
from typing import Any, get_args, get_type_hints

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from optuna.exceptions import StorageInternalError
from pydantic import BaseModel
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route, compile_path

from service.access import opens_a_page
from service.errors import CheckpointsAway, DatabaseAway, InvalidRequest, Problem, ServiceError
from service.origins import secure
from service.own_pages import problem_page
from service.problems import MOST_PROBLEMS, Schema, plain_problem, problem_response, problems_in, refusal
from trials.files import StoreAway, StoreRefused

log = logging.getLogger(__name__)

RETRY_AFTER_S = 5
OF_THE_DATABASE = (OperationalError, InterfaceError, PoolTimeout, StorageInternalError)
"""What SQLAlchemy and Optuna raise where the database is away, locked or full, whatever was asked of it."""


Answer = Callable[[Request, Exception], Response]


def answer_errors_as_problems(app: FastAPI) -> None:
    answers: dict[type[Exception], Answer] = {
        ServiceError: _on_service_error,
        RequestValidationError: _on_invalid_request,
        HTTPException: _on_http_error,
        Exception: _on_crash,
        **dict.fromkeys(OF_THE_DATABASE, _on_database_away),
        **dict.fromkeys((StoreAway, StoreRefused), _on_checkpoints_away),
    }
    for kind, answer in answers.items():
        app.add_exception_handler(kind, _fit_for_the_asker(answer))


def _fit_for_the_asker(answer: Answer) -> Answer:
    """In a page where a person has opened one."""

    def answer_so(request: Request, error: Exception) -> Response:
        said = answer(request, error)
        return problem_page(said) if opens_a_page(request) else said

    return answer_so


def _on_service_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServiceError)
    return refusal(error, request.scope["path"])


def _on_invalid_request(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    errors, path = error.errors()[:MOST_PROBLEMS], request.scope["path"]
    if any(found["loc"][0] == "path" for found in errors):
        methods = _methods_at(request)
        if methods and request.method not in methods:  # a verb, asked for as if it were a part of the id
            return _wrong_method(request, methods)
        return problem_response(plain_problem(404, f"nothing can have the path {path}", path))
    in_body = [{**found, "loc": found["loc"][1:]} for found in errors if found["loc"][0] == "body"]
    elsewhere = [found for found in errors if found["loc"][0] != "body"]
    problems = list(_problems_of_parameters(elsewhere, request))
    if in_body:
        problems += problems_in(in_body, error.body, _body_schema(request.scope["endpoint"]))
    return refusal(InvalidRequest(problems), path)


def _problems_of_parameters(errors: Sequence[Any], request: Request) -> Iterator[Problem]:
    """What is wrong with the query and the headers, in the words of what is wrong with bodies."""
    places: dict[tuple[str, str], list[Any]] = {}
    for found in errors:
        kind, *below = found["loc"]
        name = str(below[0]) if below else kind
        places.setdefault((kind, name), []).append({**found, "loc": below})
    for (kind, name), here in places.items():
        schema: Schema = {"properties": {known: {} for known in _parameters(request.scope["route"], kind)}}
        for problem in problems_in(here, {name: here[0]["input"]}, schema):
            yield Problem("", problem.code, problem.message, parameter=name)


def _parameters(route: APIRoute, kind: str) -> set[str]:
    """Names of what a route takes of this kind, those of a model one by one."""
    fields = getattr(route.dependant, f"{kind}_params", [])
    models = [field.field_info.annotation for field in fields]
    return {
        name
        for field, model in zip(fields, models, strict=True)
        for name in (
            model.model_fields if isinstance(model, type) and issubclass(model, BaseModel) else [field.alias]
        )
    }


def _on_http_error(request: Request, error: Exception) -> Response:
    """What Starlette and FastAPI say by themselves, in better words where theirs say little."""
    assert isinstance(error, HTTPException)
    path, headers = request.scope["path"], dict(error.headers or {})
    status, detail = error.status_code, error.detail
    verbs = _verbs_at(path) if status in {404, 405} and request.method == "POST" else []
    if verbs:
        status, headers = 404, {}
        detail = f"{path} has no verb that we know; there are {', '.join(verbs)}"
    elif status == 404 and detail == HTTPStatus(404).phrase:
        detail = f"nothing has the path {path}; see /docs"
    elif status == 405 and detail == HTTPStatus(405).phrase:
        return _wrong_method(request, _methods_at(request))
    return problem_response(plain_problem(status, detail, path), headers)


def _methods_at(request: Request) -> set[str]:
    """Every method that a route has for the request's path; Starlette names those of the first one.

    A route that would take the colon of a verb for a part of an id is not at the path.
    """
    matches = [(route, *route.matches(request.scope)) for route in _routes()]
    return {
        method
        for route, match, found in matches
        if match != Match.NONE and not any(":" in str(value) for value in found["path_params"].values())
        for method in route.methods or ()
    }


def _wrong_method(request: Request, methods: set[str]) -> Response:
    path, allow = request.scope["path"], ", ".join(sorted(methods))
    return problem_response(
        plain_problem(405, f"{path} is for {allow}, not for {request.method}", path), {"allow": allow}
    )


def _verbs_at(path: str) -> list[str]:
    """As `:pause`, what may be asked of the thing that a path with an unknown verb names."""
    thing, colon, _ = path.rpartition(":")
    if not colon or "/" in path[len(thing) :]:
        return []
    with_verbs = [route.path_format.rpartition(":") for route in _routes() if ":" in route.path_format]
    return sorted({f":{verb}" for of, _, verb in with_verbs if compile_path(of)[0].match(thing)})


def _routes() -> list[Route]:
    from service.routers import ALL

    return [route for router in ALL for route in router.routes if isinstance(route, Route)]


def _on_database_away(request: Request, error: Exception) -> Response:
    log.error("the database did not do as it was asked", exc_info=error)
    words = f"the database does not answer: {type(error).__name__}; ask again in {RETRY_AFTER_S} seconds"
    return refusal(DatabaseAway(words), request.scope["path"], {"retry-after": str(RETRY_AFTER_S)})


def _on_checkpoints_away(request: Request, error: Exception) -> Response:
    log.error("the checkpoint store did not do as it was asked", exc_info=error)
    retry = {"retry-after": str(RETRY_AFTER_S)}
    return refusal(CheckpointsAway(str(error)), request.scope["path"], retry)


def _on_crash(request: Request, error: Exception) -> Response:
    """The traceback goes to the log, not to the client."""
    words = "the service failed; its log says why, at this request_id"
    # The server closes a connection on which something failed.
    response = problem_response(plain_problem(500, words, request.scope["path"]), {"connection": "close"})
    secure(response.headers)  # it is sent from outside of all middleware
    return response


@cache
def _body_schema(endpoint: Callable[..., Any]) -> Schema:
    """Of what a route takes: the model among its parameters."""
    hints = [hint for kind in get_type_hints(endpoint).values() for hint in get_args(kind) or (kind,)]
    models = [hint for hint in hints if isinstance(hint, type) and issubclass(hint, BaseModel)]
    return models[0].model_json_schema() if models else {}
