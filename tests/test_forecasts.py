"""A service's forecasts: asked for over HTTP, measured once, given up with their client."""

import asyncio
import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

import service.forecasts
from service.cli import app
from service.errors import ClientGone, InvalidSpec, Stopping, TooManyForecasts
from service.fitting import Disk
from service.forecast_schemas import Forecast
from service.forecast_texts import in_words
from service.forecasts import Forecasts
from service.launcher import Capacity, ProbeFailed, TextUnusable
from service.settings import Settings
from service.sweeps import SweepController, build_controller
from tests.fakes import MemoryLauncher, probe_of
from tests.played_service import SPEC, played_service, wait_for
from tests.service_process import write_corpus
from tests.test_http import assert_problem
from trials.memory import amount
from trials.plan import plan
from trials.spec import SweepRequest
from trials.steps import Probe, ProbeOrder

ASKED: dict[str, Any] = {
    **SPEC,
    "model": {"embedding_size": 16, "hidden_size": 16, "layers": 1},
    "space": {"batch_size": {"type": "choice", "values": [10, 20]}},
    "budget": {"trials": 30},
}


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with played_service(tmp_path_factory.mktemp("data"), plays=False) as client:
        yield client


def validated(http: httpx.Client, asked: dict[str, Any] = ASKED, **query: Any) -> dict[str, Any]:
    response = http.post("/v1/sweeps", params={"validate_only": True, **query}, json=asked)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_a_check_answers_with_configurations_times_and_sizes(http: httpx.Client) -> None:
    found = validated(http)["forecast"]
    for name in ("wall_s", "device_hours", "epochs"):
        assert 0 < found[name]["p10"] <= found[name]["p50"] <= found[name]["p90"]
    assert found["epochs"]["p50"] == 30 * 3
    assert found["wall_s"]["p50"] * 2 >= found["device_hours"]["p50"] * 3600
    assert [(sample["number"], sample["arm"]) for sample in found["samples"][:3]] == [
        (0, "fd"),
        (1, "eld"),
        (2, "fd"),
    ]
    assert found["samples"][0]["params"] == found["samples"][1]["params"]
    assert {sample["exact"] for sample in found["samples"]} == {True}
    assert all(sample["epoch_s"]["p10"] < sample["epoch_s"]["p90"] for sample in found["samples"])
    assert [arm["trials"] for arm in found["arms"]] == [15, 15]
    assert found["corpus"]["vocabulary_size"] == 1_000
    memory, disk = found["memory"], found["disk"]
    assert memory["at_once"] == 2
    assert 2 * memory["per_trial_bytes"] < memory["all_trials_bytes"]
    assert 0 < disk["checkpoints_bytes"] < disk["free_bytes"]
    assert found["unknown"] == []


def test_what_was_planned_is_what_the_sweep_tries(tmp_path: Path) -> None:
    with played_service(tmp_path) as http:
        foreseen = validated(http)["forecast"]["samples"]
        sweep_id = http.post("/v1/sweeps", json=ASKED).json()["id"]
        wait_for(http, sweep_id, "succeeded")
        trials = http.get(f"/v1/sweeps/{sweep_id}/trials").json()["trials"]
    for sample, trial in zip(foreseen, trials, strict=False):
        for name in ("number", "arm", "draw", "seed", "params"):
            assert sample[name] == trial[name]


def test_the_same_is_measured_once_and_foreseen_alike(http: httpx.Client) -> None:
    asked = {**ASKED, "model": {"embedding_size": 17, "layers": 1}}
    first, second = validated(http, asked)["forecast"], validated(http, asked)["forecast"]
    assert (first["probe"]["from_memory"], second["probe"]["from_memory"]) == (False, True)
    assert first["probe"]["measured_at"] == second["probe"]["measured_at"]
    assert first["wall_s"] == second["wall_s"]


def test_without_a_forecast_nothing_is_measured(http: httpx.Client) -> None:
    assert validated(http, forecast=False)["forecast"] is None


@pytest.mark.parametrize(
    ("changes", "pointer"),
    [
        ({"model": {"hidden_size": 10_000_000}}, "/model/hidden_size"),
        ({"budget": {"trials": 100_000}, "model": {}}, "/retention/bests_per_arm"),
    ],
)
def test_what_cannot_fit_is_refused_by_a_check_and_by_a_submission_alike(
    http: httpx.Client, changes: dict[str, Any], pointer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.sweeps.disk_of", lambda url: Disk(2**35))
    monkeypatch.setattr(
        "tests.played_service.PlayingLauncher.capacity",
        lambda self: Capacity(2, 0, memory_bytes=2**35),
    )
    asked = {**ASKED, **changes}
    for query in ({}, {"validate_only": True}, {"validate_only": True, "forecast": False}):
        told = assert_problem(http.post("/v1/sweeps", params=query, json=asked), 422)
        assert told["errors"][0]["pointer"] == pointer


# Without HTTP.


class Prober(MemoryLauncher):
    """Its probes come when they are let."""

    def __init__(self, **given: Any) -> None:
        super().__init__(cpus=2)
        self.given = given
        self.failure: ProbeFailed | None = None
        self.may_answer = asyncio.Event()
        self.cancelled = 0

    async def probe(self, order: ProbeOrder) -> Probe:
        self.probed.append(order)
        try:
            await self.may_answer.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.failure is not None:
            raise self.failure
        return probe_of(order, **self.given)


@pytest.fixture
def prober() -> Prober:
    return Prober()


@pytest.fixture
def controller(tmp_path: Path, prober: Prober) -> Iterator[SweepController]:
    made = build_controller(Settings(data_dir=tmp_path / "data"), prober)
    yield made
    made.records.engine.dispose()
    made.storage._backend.engine.dispose()  # type: ignore[attr-defined]  # of Optuna's cached storage


async def stays() -> bool:
    return False


def spec_of(**changes: Any) -> SweepRequest:
    return SweepRequest.model_validate({**ASKED, **changes})


def foreseen(controller: SweepController, **changes: Any) -> Forecast:
    return asyncio.run(Forecasts(controller).forecast(controller.checked(spec_of(**changes)), stays))


def test_a_probe_that_fails_leaves_what_is_known_and_a_sentence(
    controller: SweepController, prober: Prober
) -> None:
    prober.may_answer.set()
    prober.failure = ProbeFailed("the text is gone")
    found = foreseen(controller)
    assert (found.wall_s, found.device_hours, found.corpus, found.probe) == (None, None, None, None)
    assert found.memory.per_trial_bytes is None
    assert found.disk.checkpoints_bytes is None
    assert found.samples[0].epoch_s is None
    assert found.samples[0].params
    assert "the text is gone" in found.unknown[0]


def test_what_the_probe_left_out_is_told(controller: SweepController, prober: Prober) -> None:
    prober.may_answer.set()
    prober.given = {"timed": (), "not_timed": ("a configuration was not timed: too large",)}
    found = foreseen(controller)
    assert found.wall_s is None
    assert found.memory.per_trial_bytes is not None
    assert found.unknown[0].startswith("a configuration was not timed")


def test_a_text_that_cannot_be_read_is_refused(controller: SweepController, prober: Prober) -> None:
    prober.may_answer.set()
    prober.failure = TextUnusable("no UTF-8", "/path")
    with pytest.raises(InvalidSpec) as refused:
        foreseen(controller)
    (problem,) = refused.value.problems
    assert (problem.pointer, problem.code, problem.message) == ("/corpus/path", "corpus_unusable", "no UTF-8")


def test_a_text_too_short_for_some_trials_is_told_and_for_all_of_them_refused(
    controller: SweepController, prober: Prober
) -> None:
    prober.may_answer.set()
    prober.given = {"train_tokens": 39}
    found = foreseen(controller)
    failing = sum(trial.params["batch_size"] == 20 for trial in plan(controller.checked(spec_of())))
    assert found.unknown == [
        f"{failing} of the first 30 trials will fail: 39 training tokens are too few for their batch_size"
    ]
    assert found.epochs is not None
    assert found.epochs.p90 == (30 - failing) * 3
    prober.given = {"train_tokens": 19}
    with pytest.raises(InvalidSpec) as refused:
        foreseen(controller)
    assert [problem.code for problem in refused.value.problems] == ["text_too_short"]


def test_trials_that_may_take_more_memory_together_than_there_is_are_a_word_worth(
    controller: SweepController, prober: Prober
) -> None:
    prober.may_answer.set()
    words = {}
    for gib in (1, 4):
        prober._capacity = Capacity(2, 0, memory_bytes=gib * 2**30)
        words[gib] = [said for said in foreseen(controller).assumptions if "max_concurrent is safe" in said]
    assert (len(words[1]), words[4]) == (1, [])


def test_what_others_memory_left_out_is_measured_again(controller: SweepController, prober: Prober) -> None:
    prober.may_answer.set()
    prober.given = {"timed": (), "not_timed": ("too little is free now",), "is_of_the_moment": True}
    forecasts, spec = Forecasts(controller), controller.checked(spec_of())
    assert asyncio.run(forecasts.forecast(spec, stays)).wall_s is None
    prober.given = {}
    assert asyncio.run(forecasts.forecast(spec, stays)).wall_s is not None
    assert len(prober.probed) == 2


def test_probes_are_called_off_where_the_service_is_stopped(
    controller: SweepController, prober: Prober
) -> None:
    forecasts, spec = Forecasts(controller), controller.checked(spec_of())

    async def stop() -> None:
        asking = [asyncio.create_task(forecasts.forecast(spec, stays)) for _ in range(2)]
        while not prober.probed:
            await asyncio.sleep(0.01)
        forecasts.close()
        for each in asking:
            with pytest.raises(Stopping):
                await each

    asyncio.run(stop())
    assert (len(prober.probed), prober.cancelled) == (1, 1)


def test_a_vocabulary_once_known_refuses_submissions_too(
    controller: SweepController, prober: Prober, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, few = 2**30, {"trials": 2}
    monkeypatch.setattr(prober, "_capacity", Capacity(2, 0, memory_bytes=there))
    controller.checked(spec_of(budget=few))
    prober.may_answer.set()
    prober.given = {"vocabulary_size": 2_000_000}
    with pytest.raises(InvalidSpec) as refused:
        foreseen(controller, budget=few)
    assert [problem.code for problem in refused.value.problems] == ["too_little_memory"]
    with pytest.raises(InvalidSpec):
        controller.checked(spec_of(budget=few))
    controller.checked(spec_of(corpus={"name": "sotu", "train_tokens": 5_000}))  # another text


def test_a_trial_has_its_part_of_a_gpus_memory(controller: SweepController, prober: Prober) -> None:
    prober._capacity = Capacity(2, 1, gpu_bytes=2.0**28)
    prober.may_answer.set()
    prober.given = {"device": "cuda: a card"}
    with pytest.raises(InvalidSpec) as refused:
        foreseen(controller, resources={"gpus": 0.5})
    assert "for a share of 0.5" in refused.value.problems[0].message
    prober._capacity = Capacity(2, 1, gpu_bytes=2.0**34)
    found = foreseen(controller, resources={"gpus": 0.5}, corpus={"name": "sotu", "train_tokens": 9_000})
    assert (found.device, found.memory.at_once, found.memory.available_bytes) == ("gpus", 2, 2**34)
    assert prober.probed[-1].device == "cuda"


def test_another_text_is_measured_anew_and_so_is_an_old_one(
    controller: SweepController, prober: Prober, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prober.may_answer.set()
    text = write_corpus(tmp_path / "text", tokens=3_000)
    forecasts = Forecasts(controller)

    def ask() -> Forecast:
        spec = controller.checked(spec_of(corpus={"path": str(text)}))
        return asyncio.run(forecasts.forecast(spec, stays))

    ask()
    ask()
    assert len(prober.probed) == 1
    (text / "train.txt").write_text("other words than these " * 1_000)
    ask()
    assert len(prober.probed) == 2
    monkeypatch.setattr(service.forecasts, "KEPT", timedelta(0))
    ask()
    assert len(prober.probed) == 3


def test_one_probe_is_made_at_a_time_and_those_who_want_the_same_share_it(
    controller: SweepController, prober: Prober
) -> None:
    forecasts, spec = Forecasts(controller), controller.checked(spec_of())

    async def ask_three_times() -> list[Forecast]:
        asking = [asyncio.create_task(forecasts.forecast(spec, stays)) for _ in range(3)]
        while not prober.probed:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert len(prober.probed) == 1
        prober.may_answer.set()
        return await asyncio.gather(*asking)

    found = asyncio.run(ask_three_times())
    assert len(prober.probed) == 1
    assert [one.probe and one.probe.from_memory for one in found] == [False, True, True]


def test_more_than_a_few_who_wait_are_sent_away(controller: SweepController, prober: Prober) -> None:
    forecasts, spec = Forecasts(controller), controller.checked(spec_of())

    async def crowd() -> None:
        asking = [asyncio.create_task(forecasts.forecast(spec, stays)) for _ in range(6)]
        done, waiting = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
        assert [type(task.exception()) for task in done] == [TooManyForecasts]
        prober.may_answer.set()
        await asyncio.gather(*waiting)

    asyncio.run(crowd())
    assert TooManyForecasts.retry_after_s


def test_a_probe_is_called_off_with_whoever_asked(controller: SweepController, prober: Prober) -> None:
    spec = controller.checked(spec_of())

    async def leaves() -> bool:
        return bool(prober.probed)

    with pytest.raises(ClientGone):
        asyncio.run(Forecasts(controller).forecast(spec, leaves))
    assert prober.cancelled == 1


def test_a_client_that_closes_its_connection_has_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    async def slow(self: Any, order: ProbeOrder) -> Probe:
        events.append("began")
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            events.append("called off")
            raise
        return probe_of(order)

    monkeypatch.setattr("tests.played_service.PlayingLauncher.probe", slow)
    with played_service(tmp_path, plays=False) as http:
        with pytest.raises(httpx.ReadTimeout):
            http.post("/v1/sweeps", params={"validate_only": True}, json=ASKED, timeout=1.0)
        for _ in range(100):
            if events == ["began", "called off"]:
                break
            http.get("/healthz")
            asyncio.run(asyncio.sleep(0.05))
    assert events == ["began", "called off"]


# The command line.


def run(http: httpx.Client, *arguments: str) -> Any:
    path = Path("spec.json")
    path.write_text(json.dumps(ASKED))
    return CliRunner().invoke(app, ["submit", str(path), "--url", str(http.base_url), *arguments])


@pytest.fixture
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")


@pytest.mark.usefixtures("_here")
def test_a_dry_run_shows_the_forecast_and_prints_a_spec_that_can_be_submitted(http: httpx.Client) -> None:
    result = run(http, "--dry-run")
    assert result.exit_code == 0, result.output
    written = json.loads(result.stdout)
    assert http.post("/v1/sweeps", json=written).status_code == 201
    for words in ("First configurations", "batch_size 20", "wall time", "of a CPU thread", "disk", "memory"):
        assert words in result.stderr
    assert "No trial fails" in result.stderr
    assert "fd" in result.stderr


@pytest.mark.usefixtures("_here")
def test_a_dry_run_in_json_has_all_of_it(http: httpx.Client) -> None:
    told = json.loads(run(http, "--dry-run", "--json").stdout)
    assert told["spec"]["budget"]["trials"] == 30
    assert told["forecast"]["wall_s"]["p90"] > 0
    assert json.loads(run(http, "--dry-run", "--json", "--no-forecast").stdout)["forecast"] is None


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (7.4, "7 s"),
        (99, "99 s"),
        (161, "2 min 41 s"),
        (1199.6, "20 min"),
        (5_950, "99 min"),
        (7_260, "2 h 1 min"),
        (183_600, "2 days 3 h"),
    ],
)
def test_seconds_are_told_in_the_largest_units_that_fit(seconds: float, words: str) -> None:
    assert in_words(seconds) == words


def test_bytes_are_told_in_the_unit_that_fits() -> None:
    assert [amount(count) for count in (3 * 2**20, 2**30 - 2**25, 2**30, 2.5 * 2**40)] == [
        "3 MiB",
        "992 MiB",
        "1.0 GiB",
        "2,560.0 GiB",
    ]
