"""The whole API against its own description, by schemathesis: examples, boundaries, fuzzing, sequences.

Every check that schemathesis has is on. Seeds decide what is sent, up to ids that the service makes; what its
reconciler does meanwhile, they do not.
"""

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import pytest
import schemathesis
from fastapi import FastAPI
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.engine import Status, events, from_schema
from schemathesis.python.asgi import shutdown_lifespans
from sqlalchemy import select, update
from starlette.types import ASGIApp, Receive, Scope, Send

from service.app import create_app
from service.database import open_engine
from service.description import operations
from service.lifecycle import State
from service.settings import Settings
from service.tables import sweeps
from tests.fakes import MemoryLauncher
from tests.played_service import close_databases, played_service, submit, wait_for
from trials.corpora import CorpusError

FIRST_SEED = 1
MOST_ROUNDS = 60
REFUSALS = ["2xx", "404", "409", "412", "422", "428"]
"""Of what a schema allows: an empty range, more CPUs than the machine has, an Idempotency-Key of another
request, an event that there is not, a sweep that has changed."""


@dataclass
class Run:
    """What has come of it."""

    cases: Counter[str] = field(default_factory=Counter)
    """By phase."""
    statuses: Counter[int] = field(default_factory=Counter)
    operations: Counter[str] = field(default_factory=Counter)
    checks: Counter[str] = field(default_factory=Counter)
    failures: dict[tuple[str, str], str] = field(default_factory=dict)
    """By check and operation, how to see it again."""

    def __str__(self) -> str:
        return (
            f"{self.cases.total()} cases {dict(self.cases)} of {len(self.operations)} operations, "
            f"{self.checks.total()} checks of {len(self.checks)} kinds, "
            f"answers {dict(sorted(self.statuses.items()))}, {len(self.failures)} failures"
        )

    def note(self, scenario: events.ScenarioFinished) -> None:
        recorder = scenario.recorder
        self.cases[scenario.phase.value] += len(recorder.cases)
        self.operations.update(node.value.operation.label for node in recorder.cases.values())
        answers = [seen.response for seen in recorder.interactions.values()]
        self.statuses.update(answer.status_code for answer in answers if answer is not None)
        for check in [check for checks in recorder.checks.values() for check in checks]:
            self.checks[check.name] += 1
            if check.failure_info is not None:
                failure = check.failure_info.failure
                words = f"{failure.title}: {failure.message}\n{check.failure_info.code_sample}"
                self.failures.setdefault((check.name, failure.operation), words)


def run_schemathesis(app: FastAPI, *, examples: int, in_sequences: int) -> Run:
    """So many examples of every operation, and at least so many calls in sequences.

    A round of them ends where hypothesis finds that a live service does not answer the same twice.
    """
    config = schemathesis.Config.from_dict(
        {
            "seed": FIRST_SEED,
            "generation": {"max-examples": examples, "database": "none"},
            # The links are those of the description; inferred ones lead from a new sweep to its best trial.
            "phases": {"stateful": {"inference": {"algorithms": []}, "max-steps": 12}},
            "checks": {"positive_data_acceptance": {"expected-statuses": REFUSALS}},
        }
    )
    schema = schemathesis.openapi.from_asgi("/openapi.json", _with_pages_of_events(app), config=config)
    schema.hook("after_call")(_wait_until_it_is_gone)
    run = Run()
    _execute(schema, run)
    for phase in ("examples", "coverage", "fuzzing"):
        getattr(schema.config.phases, phase).enabled = False
    for seed in range(FIRST_SEED + 1, FIRST_SEED + MOST_ROUNDS):
        if run.cases["stateful"] < in_sequences:
            schema.config.seed = seed
            _execute(schema, run)
    return run


def _execute(schema: schemathesis.BaseSchema, run: Run) -> None:
    for happened in from_schema(schema).execute():
        if isinstance(happened, events.ScenarioFinished):
            run.note(happened)
        elif isinstance(happened, events.FatalError | events.NonFatalError):
            run.failures["the run itself", type(happened).__name__] = str(happened)
        elif isinstance(happened, events.PhaseFinished) and happened.status == Status.ERROR:
            run.failures["the run itself", happened.phase.name.value] = "it came to an error"


def _with_pages_of_events(app: FastAPI) -> ASGIApp:
    """Asked for as pages: a stream of events has no end while its sweep has none.

    A header of the case would not do: those of schemathesis' session, `Accept: */*` among them, go before it.
    """

    async def asked_for_pages(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].endswith("/events"):
            others = [(name, value) for name, value in scope["headers"] if name != b"accept"]
            scope = {**scope, "headers": [*others, (b"accept", b"application/json")]}
        await app(scope, receive, send)

    return asked_for_pages


def _wait_until_it_is_gone(_: Any, case: schemathesis.Case, response: schemathesis.Response) -> None:
    """202 says that a sweep will be deleted: it is, as soon as the reconciler looks."""
    if case.method == "DELETE" and response.status_code == 202:
        look = case.operation.schema["/v1/sweeps/{sweep_id}"]["GET"]
        deadline = time.monotonic() + 30
        while look.Case(path_parameters=case.path_parameters).call().status_code != 404:
            assert time.monotonic() < deadline, f"{case.path_parameters} is not deleted"
            time.sleep(0.02)


def _no_network(*_: Any) -> None:
    raise CorpusError("the tests ask nobody outside", "/name")


@pytest.fixture
def app(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FastAPI]:
    """Over a database that has a sweep with trials, failures and checkpoints in every state."""
    monkeypatch.setattr("service.reconciler.PERIOD_S", 0.02)
    monkeypatch.setattr("trials.corpora._probe", _no_network)
    with played_service(tmp_path, database_url=url) as client:
        for arms in [{"wild": {"clip": 13}, "tame": {}}] * len(get_args(State)):
            wait_for(client, submit(client, arms=arms), "succeeded")
    engine = open_engine(url)
    with engine.begin() as connection:
        ids = connection.execute(select(sweeps.c.id)).scalars().all()
        for sweep_id, state in zip(ids, get_args(State), strict=True):
            of_id = sweeps.c.id == sweep_id
            connection.execute(update(sweeps).where(of_id).values(state=state, driver=None))
    engine.dispose()
    settings = Settings(data_dir=tmp_path, database_url=url, allowed_hosts=("testserver",), rate_limit="off")
    app = create_app(settings, MemoryLauncher())
    yield app
    shutdown_lifespans()
    close_databases(app)


@pytest.mark.slow
def test_the_api_is_what_it_is_described_to_be_whatever_it_is_asked(app: FastAPI, url: str) -> None:
    on_sqlite = url.startswith("sqlite")
    run = run_schemathesis(app, examples=25 if on_sqlite else 5, in_sequences=1_000 if on_sqlite else 100)
    print(f"\nschemathesis: {run}")
    assert run.failures == {}, "\n\n".join(f"{what}: {words}" for what, words in run.failures.items())
    assert [status for status in run.statuses if status >= 500] == []
    assert run.cases.total() >= (3_000 if on_sqlite else 1_000)
    assert min(run.cases[phase] for phase in ("coverage", "fuzzing", "stateful")) >= 75
    described = {f"{method.upper()} {path}" for path, method, _ in operations(app.openapi())}
    assert set(run.operations) == described


def test_every_check_that_there_is_takes_part() -> None:
    """Some have nothing to look at: of tokens, where there are none."""
    load_all_checks()
    config = schemathesis.Config.from_dict({}).projects.get_default().checks
    assert {name for name in CHECKS.get_all_names() if not config.get_by_name(name=name).enabled} == set()
