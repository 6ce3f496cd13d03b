"""The OpenAPI description: complete for every operation there is, also for those that are yet to come."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator

from service import comparison_schemas, events, forecast_schemas, report_schemas, schemas, webhook_schemas
from service.app import create_app
from service.description import operations
from service.examples import ANSWERS, MODELS, REQUESTS, SMALL
from service.problems import MEDIA_TYPE, ProblemDocument
from service.requests import HEADER
from service.settings import Settings
from tests.fakes import MemoryLauncher
from tests.played_service import played_service, submit, wait_for

JSON = "application/json"


@pytest.fixture(scope="module")
def description(tmp_path_factory: pytest.TempPathFactory) -> Any:
    settings = Settings(data_dir=tmp_path_factory.mktemp("data"))
    return create_app(settings, MemoryLauncher()).openapi()


def every(description: Any) -> Iterator[tuple[str, Any]]:
    for path, method, operation in operations(description):
        yield f"{method.upper()} {path}", operation


def responses(description: Any) -> Iterator[tuple[str, str, Any]]:
    for where, operation in every(description):
        for status, response in operation["responses"].items():
            yield f"{where} {status}", status, response


def assert_valid(description: Any, schema: Any, value: Any, where: str) -> None:
    """By the schema as it stands in the document, with what it refers to."""
    whole = {**schema, "components": description["components"]}
    assert [error.message for error in Draft202012Validator(whole).iter_errors(value)] == [], where


def test_it_says_whose_it_is_and_where(description: Any) -> None:
    assert description["openapi"].startswith("3.1")
    assert {"title", "version", "description", "contact", "license"} <= description["info"].keys()
    assert description["servers"]
    described = {tag["name"] for tag in description["tags"] if tag["description"]}
    assert described == {tag for _, operation in every(description) for tag in operation["tags"]}


def test_every_operation_has_a_name_of_its_own_and_words(description: Any) -> None:
    names = [operation["operationId"] for _, operation in every(description)]
    assert len(set(names)) == len(names)
    for where, operation in every(description):
        assert re.fullmatch(r"[a-z]+([A-Z][a-z]*)*", operation["operationId"]), where
        assert operation["summary"], where
        assert operation["description"], where
        assert operation["tags"], where


def test_every_parameter_and_every_answer_has_words(description: Any) -> None:
    for where, operation in every(description):
        for parameter in operation.get("parameters", []):
            assert parameter.get("description"), f"{where}: {parameter['name']}"
    for where, _, response in responses(description):
        assert response["description"], where


def test_every_error_that_can_come_of_any_request_is_there(description: Any) -> None:
    for where, operation in every(description):
        method, path = where.split()
        expected = {"413", "500"}
        if method in {"POST", "PUT", "PATCH"}:
            expected |= {"400", "415"}
        if path.startswith("/v1/"):
            expected.add("503")
        if "{" in path:
            expected.add("404")
        if "requestBody" in operation or any(
            found["in"] != "path" for found in operation.get("parameters", [])
        ):
            expected.add("422")
        assert expected <= operation["responses"].keys(), where


def test_every_error_is_a_problem_document_with_an_example_of_its_status(description: Any) -> None:
    for where, status, response in responses(description):
        if status < "400" or where.startswith("GET /readyz 503"):
            continue
        assert response["content"].keys() == {MEDIA_TYPE}, where
        content = response["content"][MEDIA_TYPE]
        assert content["schema"] == {"$ref": "#/components/schemas/ProblemDocument"}, where
        assert_valid(description, content["schema"], content["example"], where)
        document = ProblemDocument.model_validate(content["example"])
        assert (str(document.status), bool(document.request_id)) == (status, True), where


def test_nothing_of_the_frameworks_own_errors_is_left(description: Any) -> None:
    assert not {"HTTPValidationError", "ValidationError"} & description["components"]["schemas"].keys()
    assert "HTTPValidationError" not in str(description["paths"])


def test_every_answer_has_the_headers_that_are_sent(description: Any) -> None:
    for where, status, response in responses(description):
        headers = response["headers"]
        assert headers[HEADER]["required"], where
        assert ("Location" in headers) == (status == "201"), where
        assert ("Retry-After" in headers) == (status in {"429", "503"} and "/readyz" not in where), where
        for header in headers.values():
            assert header["description"], where
            assert header["schema"], where


def test_every_answer_in_json_has_an_example_that_its_schema_allows(description: Any) -> None:
    for where, _, response in responses(description):
        content = response.get("content", {}).get(JSON)
        if content is not None:
            assert "example" in content, f"{where}: name it in service/examples.py"
            assert_valid(description, content["schema"], content["example"], where)


def test_every_request_body_has_examples_that_its_schema_allows(description: Any) -> None:
    for where, operation in every(description):
        for content in operation.get("requestBody", {}).get("content", {}).values():
            assert content.get("examples"), f"{where}: name it in service/examples.py"
            for name, example in content["examples"].items():
                assert example["summary"], where
                assert_valid(description, content["schema"], example["value"], f"{where} {name}")


def test_examples_are_what_the_models_read_and_write() -> None:
    for name, answer in ANSWERS.items():
        assert model_named(name).model_validate(answer).model_dump(mode="json") == answer
    for name, model in MODELS.items():
        for example in REQUESTS[name].values():
            model.model_validate(example["value"])


def model_named(name: str) -> Any:
    modules = (schemas, forecast_schemas, report_schemas, comparison_schemas, webhook_schemas, events)
    return next(getattr(module, name) for module in modules if hasattr(module, name))


def test_every_link_leads_to_an_operation_with_all_that_its_path_takes(description: Any) -> None:
    targets = {operation["operationId"]: operation for _, operation in every(description)}
    links = [
        (where, link)
        for where, _, response in responses(description)
        for link in response.get("links", {}).values()
    ]
    assert len(links) > 50
    for where, link in links:
        parameters = targets[link["operationId"]].get("parameters", [])
        in_path = {parameter["name"] for parameter in parameters if parameter["in"] == "path"}
        assert link["parameters"].keys() == in_path, where


def test_every_schema_says_what_its_fields_mean_where_their_names_do_not(description: Any) -> None:
    for name, schema in description["components"]["schemas"].items():
        assert schema.get("title") or schema.get("properties"), name
    problem = description["components"]["schemas"]["ErrorDocument"]["properties"]
    assert problem["pointer"]["description"]
    assert problem["parameter"]["description"]


def test_the_examples_of_requests_do_what_they_say(tmp_path: Path) -> None:
    """Sent as they are, to a service that could run them."""
    with played_service(tmp_path) as client:
        sweep_id = submit(client, arms={"wild": {"clip": 13}, "tame": {}})
        wait_for(client, sweep_id, "succeeded")
        assert ask(client, sweep_id, "extend", REQUESTS["Extension"]) == {202}
    with played_service(tmp_path, plays=False) as client:
        assert ask(client, sweep_id, "clone", REQUESTS["cloneSweep"]) == {201}
        waits = client.post("/v1/sweeps", json=SMALL).headers["location"]
        for example in REQUESTS["Changes"].values():
            changed = client.patch(waits, json=example["value"], headers={"if-match": "*"})
            assert changed.status_code == 200, changed.text
        for example in REQUESTS["PointRequest"].values():
            made = client.post(f"{waits}/points", json=example["value"])
            assert client.get(made.headers["location"]).json() == made.json()
        for example in REQUESTS["SweepRequest"].values():
            assert client.post("/v1/sweeps", json=example["value"]).status_code == 201, example


def ask(client: httpx.Client, sweep_id: str, verb: str, examples: Any) -> set[int]:
    return {
        client.post(f"/v1/sweeps/{sweep_id}:{verb}", json=example["value"]).status_code
        for example in examples.values()
    }


def test_the_checkpoints_headers_are_those_that_are_described(description: Any, tmp_path: Path) -> None:
    with played_service(tmp_path) as client:
        sweep_id = submit(client)
        wait_for(client, sweep_id, "succeeded")
        path = f"/v1/sweeps/{sweep_id}/best/checkpoint"
        etag = client.get(path).headers["etag"]
        answers = {
            "200": client.get(path),
            "206": client.get(path, headers={"range": "bytes=0-1"}),
            "304": client.get(path, headers={"if-none-match": etag}),
            "416": client.get(path, headers={"range": "bytes=99999999-"}),
        }
    described = description["paths"]["/v1/sweeps/{sweep_id}/best/checkpoint"]["get"]["responses"]
    for status, answer in answers.items():
        assert str(answer.status_code) == status
        assert described[status]["headers"].keys() - {HEADER}, status
        for name, header in described[status]["headers"].items():
            assert name.lower() in answer.headers, f"{status} {name}"
            assert header["required"]
