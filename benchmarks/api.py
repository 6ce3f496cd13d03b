"""How long the API takes to answer, with a database that has been used for a while.

    .venv/bin/python -m benchmarks.api --sweeps 200 --trials 50 --epochs 20 --clients 20 --seconds 5

Fills a database with ended sweeps, serves it with `fraternal serve`, and has so many clients ask one thing
after another, each as soon as it has its answer, one kind of request at a time: every GET but checkpoints
and exports, which are as long as their files (benchmarks.exports), and streams (benchmarks.events). Prints
Markdown: answers a second, and the median and 95th percentile of the times to an answer, in milliseconds,
beside those of a lone client. Exits with 1 where a bound is missed.
"""

import argparse
import asyncio
import itertools
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import FloatDistribution
from optuna.storages._rdb.models import (
    TrialIntermediateValueModel,
    TrialModel,
    TrialParamModel,
    TrialUserAttributeModel,
    TrialValueModel,
)
from optuna.trial import TrialState, create_trial
from rich.console import Console
from sqlalchemy import Connection, insert, literal, select, update

from service.database import migrate, naive, now, open_engine
from service.launcher import findable
from service.reconciler import LEASE_NAME
from service.records import Records
from service.running import Signals, running_service
from service.settings import Settings
from service.studies import open_storage
from service.tables import epochs, events, sweeps
from trials.spec import SweepSpec
from trials.studies import open_study

GET_BOUND_MS, SUBMIT_BOUND_MS = 100.0, 150.0
BODY = {
    "name": "bench",
    "labels": {"team": "nlp"},
    "corpus": {"name": "sotu"},
    "training": {"epochs": 20},
    "space": {"kappa": {"type": "uniform", "low": 0.05, "high": 0.2}},
}
MODELS: Any = (
    TrialModel,
    TrialParamModel,
    TrialValueModel,
    TrialIntermediateValueModel,
    TrialUserAttributeModel,
)
Request = tuple[str, str, bytes | None]
"""Method, path, body."""


def fill(settings: Settings, count: int, trials: int, curve: int) -> list[str]:
    """Ended sweeps with so many trials and epochs each; their ids."""
    engine = open_engine(settings.resolved_database_url)
    migrate(engine)
    storage = open_storage(settings.resolved_database_url)
    records = Records(engine)
    spec = SweepSpec.model_validate({**BODY, "budget": {"trials": trials}})
    ids = [f"s{number:010x}" for number in range(count)]
    for number, sweep_id in enumerate(ids):
        named = {"name": f"sweep {number}", "labels": {"team": ["nlp", "vision"][number % 2]}}
        records.add_sweep(sweep_id, spec.model_copy(update=named))
        study = open_study(spec, sweep_id, storage)
        if number == 0:
            study.add_trials([_ended_trial(spec, trial) for trial in range(trials)])
        with engine.begin() as connection:
            if number > 0:
                _copy_trials(connection, study._study_id, number * trials)
            connection.execute(
                insert(epochs),
                [_epoch(sweep_id, trial, epoch) for trial in range(trials) for epoch in range(1, curve + 1)],
            )
            connection.execute(
                insert(events),
                [_event(sweep_id, trial, epoch) for trial in range(trials) for epoch in range(1, curve + 1)],
            )
        records.add_point(sweep_id, {"kappa": 0.15})
    at = naive(now())
    with engine.begin() as connection:
        ended = {"state": "succeeded", "started_at": at, "finished_at": at, "generation": 1, "ran_s": 60.0}
        connection.execute(update(sweeps).values(ended))
    # What is submitted while we measure is to stay queued: somebody else acts, as far as the service knows.
    assert records.hold_lease(LEASE_NAME, findable(os.getpid()), timedelta(hours=1), lambda holder: False)
    storage.remove_session()
    storage.engine.dispose()
    engine.dispose()
    return ids


def _copy_trials(connection: Connection, study_id: int, beyond: int) -> None:
    """Those of the first study into another one: Optuna takes two seconds for a sweep's."""
    trials, *of_trials = (model.__table__ for model in MODELS)
    columns = [trials.c.trial_id + beyond, literal(study_id)]
    names = ["number", "state", "datetime_start", "datetime_complete"]
    first = select(*columns, *(trials.c[name] for name in names)).where(trials.c.study_id == 1)
    connection.execute(insert(trials).from_select(["trial_id", "study_id", *names], first))
    for table in of_trials:
        names = [
            column.name for column in table.columns if not column.primary_key and column.name != "trial_id"
        ]
        of_first = select(table.c.trial_id + beyond, *(table.c[name] for name in names))
        of_first = of_first.join(trials, trials.c.trial_id == table.c.trial_id).where(trials.c.study_id == 1)
        connection.execute(insert(table).from_select(["trial_id", *names], of_first))


def _ended_trial(spec: SweepSpec, number: int) -> Any:
    loss = 5.0 - number % 7 / 10
    return create_trial(
        state=TrialState.COMPLETE,
        value=2.718**loss,
        params={"kappa": 0.1},
        distributions={"kappa": FloatDistribution(0.05, 0.2)},
        intermediate_values={epoch: 200.0 / epoch for epoch in range(1, 21)},
        user_attrs={
            "arm": spec.arm_of(number),
            "draw": spec.draw_of(number),
            "seed": spec.seed_of(number),
            "attempt": 1,
            "config": {"model": {"embedding_size": 400}, "training": {"epochs": 20}, "regularization": {}},
            "best_epoch": 20,
            "best_valid_loss": loss,
            "checkpoint_sha256": "0" * 64,
            "device": "cpu",
            "runtime": "a benchmark's",
        },
    )


def _epoch(sweep_id: str, number: int, epoch: int) -> dict[str, Any]:
    losses = dict.fromkeys(("train_loss", "valid_loss", "raw_valid_loss", "optimised"), 6.0 - epoch / 20)
    others = dict.fromkeys(("penalty", "ar", "tar", "gradient_norm", "lr", "seconds", "tokens_per_s"), 1.0)
    key = {"sweep_id": sweep_id, "number": number, "epoch": epoch, "attempt": 1}
    at = naive(now() - timedelta(days=1))
    return {**key, **losses, **others, "recorded_at": at, "averaged": False, "tokens": 100, "is_best": True}


def _event(sweep_id: str, number: int, epoch: int) -> dict[str, Any]:
    detail = {"number": number, "attempt": 1, "epoch": epoch, "valid_loss": 5.0, "valid_perplexity": 148.4}
    return {"sweep_id": sweep_id, "at": naive(now()), "kind": "epoch_finished", "detail": detail}


def requests_of(ids: list[str], trials: int) -> dict[str, Callable[[int], Request]]:
    """By the template of its path: the n-th request."""

    def get(path: str) -> Callable[[int], Request]:
        def made(n: int) -> Request:
            return "GET", path.format(sweep=ids[n * 37 % len(ids)], number=n * 7 % trials), None

        return made

    body = {**BODY, "budget": {"trials": trials}}
    return {
        "GET /v1/sweeps": get("/v1/sweeps"),
        "GET /v1/sweeps?label=…&order_by=name": get("/v1/sweeps?label=team%3Dnlp&order_by=name"),
        "GET /v1/sweeps/{sweep_id}": get("/v1/sweeps/{sweep}"),
        "GET …/trials": get("/v1/sweeps/{sweep}/trials"),
        "GET …/trials?arm=fd&order_by=…": get(
            "/v1/sweeps/{sweep}/trials?arm=fd&order_by=best_valid_perplexity"
        ),
        "GET …/trials/{number}": get("/v1/sweeps/{sweep}/trials/{number}"),
        "GET …/report": get("/v1/sweeps/{sweep}/report"),
        "GET …/best": get("/v1/sweeps/{sweep}/best"),
        "GET …/points": get("/v1/sweeps/{sweep}/points"),
        "GET …/points/{point_id}": lambda n: (
            "GET",
            f"/v1/sweeps/{ids[n % len(ids)]}/points/{n % len(ids) + 1}",
            None,
        ),
        "GET …/events": get("/v1/sweeps/{sweep}/events"),
        "GET /v1/compare": lambda n: (
            "GET",
            f"/v1/compare?a={ids[n * 37 % len(ids)]}&b={ids[n * 41 % len(ids)]}",
            None,
        ),
        "GET /v1/webhooks": get("/v1/webhooks"),
        "GET /, the home page": get("/"),
        "GET /healthz": get("/healthz"),
        "GET /readyz": get("/readyz"),
        "GET /metrics": get("/metrics"),
        "POST /v1/sweeps": lambda n: ("POST", "/v1/sweeps", json.dumps(body).encode()),
        "POST /v1/sweeps?validate_only": lambda n: (
            "POST",
            "/v1/sweeps?validate_only=true&forecast=false",
            json.dumps(body).encode(),
        ),
    }


class _Client(asyncio.Protocol):
    """Asks one thing after another. As small as can be: the service has to share the cores with its clients,
    and what those take is time that an answer seems to take."""

    def __init__(self, made: Callable[[int], Request], numbers: Iterator[int], until: float) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.took: list[float] = []
        """Milliseconds to each answer."""
        self._made, self._numbers, self._until = made, numbers, until
        self._received = bytearray()
        self._length: int | None = None
        """Of the answer that is coming in, once that is known."""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._ask()

    def _ask(self) -> None:
        self._asked = self._made(next(self._numbers))
        method, path, body = self._asked
        head = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\naccept: application/json\r\n"
        if body is not None:
            head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self._received.clear()
        self._length = None
        self._began = time.perf_counter()
        self._transport.write(f"{head}\r\n".encode() + (body or b""))

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self._length is None:
            head, end, _ = self._received.partition(b"\r\n\r\n")
            if not end:
                return
            found = re.search(rb"\r\ncontent-length: *(\d+)", head, re.IGNORECASE)
            assert found is not None, f"an answer without a length: {head.decode('latin-1')}"
            self._length = len(head) + len(end) + int(found[1])
        if len(self._received) >= self._length:
            self.took.append((time.perf_counter() - self._began) * 1000)
            self._answered(int(self._received[9:12]))

    def _answered(self, status: int) -> None:
        if status >= 300:
            said = self._received[:400].decode("latin-1")
            self.done.set_exception(RuntimeError(f"{self._asked[0]} {self._asked[1]}: {said}"))
        elif time.perf_counter() < self._until:
            return self._ask()
        else:
            self.done.set_result(None)
        self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(ConnectionError(f"the service hung up on {self._asked[1]}: {error}"))


def measure(port: int, made: Callable[[int], Request], clients: int, seconds: float) -> list[float]:
    """Milliseconds to each answer, sorted."""

    async def ask() -> list[float]:
        loop, numbers, until = asyncio.get_running_loop(), itertools.count(), time.perf_counter() + seconds
        asking = [
            (await loop.create_connection(lambda: _Client(made, numbers, until), "127.0.0.1", port))[1]
            for _ in range(clients)
        ]
        await asyncio.gather(*(client.done for client in asking))
        return sorted(took for client in asking for took in client.took)

    return asyncio.run(ask())


def percentile(took: list[float], share: float) -> float:
    return took[min(len(took) - 1, int(share * len(took)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sweeps", type=int, default=200)
    parser.add_argument("--trials", type=int, default=50, help="of a sweep")
    parser.add_argument("--epochs", type=int, default=20, help="of a trial")
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=5, help="for each kind of request")
    given = parser.parse_args()
    errors = Console(stderr=True)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    missed = []
    with tempfile.TemporaryDirectory(prefix="fraternal-bench-") as folder, Signals() as signals:
        settings = Settings(data_dir=Path(folder) / "data")
        settings.data_dir.mkdir()
        began = time.monotonic()
        ids = fill(settings, given.sweeps, given.trials, given.epochs)
        errors.print(
            f"filled: {given.sweeps} sweeps, {given.sweeps * given.trials} trials, "
            f"{time.monotonic() - began:.0f} s"
        )
        with running_service(settings.data_dir, signals, errors) as client:
            port = int(client.base_url.rpartition(":")[2])
            print("| request | answers/s | median, ms | p95, ms | one client: median | p95 |")
            print("|---|---:|---:|---:|---:|---:|")
            for name, made in requests_of(ids, given.trials).items():
                measure(port, made, 1, 0.5)  # whatever is slow the first time
                alone = measure(port, made, 1, given.seconds / 2)
                took = measure(port, made, given.clients, given.seconds)
                p95 = percentile(took, 0.95)
                print(
                    f"| {name} | {len(took) / given.seconds:.0f} | {statistics.median(took):.1f} | {p95:.1f} "
                    f"| {statistics.median(alone):.1f} | {percentile(alone, 0.95):.1f} |",
                    flush=True,
                )
                bound = GET_BOUND_MS if name.startswith("GET") else SUBMIT_BOUND_MS
                if p95 > bound:
                    missed.append(f"{name}: p95 {p95:.1f} ms, and at most {bound:g} is asked for")
    for line in missed:
        print(line, file=sys.stderr)
    raise SystemExit(1 if missed else 0)


if __name__ == "__main__":
    main()
