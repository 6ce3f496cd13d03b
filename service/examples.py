"""Examples for the API's description: what a client may send as it is, and what it gets.

They are made of the models themselves, hence never out of date; a test sends and reads every one of them.
"""

import math
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from pydantic import BaseModel

from service.comparison import Side, compare
from service.errors import DatabaseAway, IllegalMove, InvalidRequest, Problem, ServiceError, SweepNotFound
from service.events import EventPage, TrialStart, TrialStarted
from service.forecast_schemas import (
    ArmForecast,
    BandView,
    CorpusView,
    DiskForecast,
    Forecast,
    MemoryForecast,
    ProbeView,
    SampledView,
    Validation,
)
from service.problems import ProblemDocument, document_of
from service.report_schemas import ArmReport, Comparison, ExpectedBest, Interval, Pairs, ReportView
from service.schemas import (
    Changes,
    ControllerLease,
    Environment,
    EpochView,
    Extension,
    Health,
    PointList,
    PointRequest,
    PointView,
    Readiness,
    RetryRequest,
    SweepDetail,
    SweepExport,
    SweepList,
    SweepView,
    TrialCounts,
    TrialDetail,
    TrialList,
    TrialView,
    View,
)
from service.webhook_schemas import NewWebhook, TestedWebhook, WebhookList, WebhookRequest, WebhookView
from trials.spec import SweepRequest, SweepSpec

Named = dict[str, dict[str, Any]]
"""OpenAPI's Example Objects by name."""

SWEEP_ID = "s3f09ab12cd"
WEBHOOK_ID = "w5c1de77a0b"
SUBMITTED = datetime(2026, 3, 2, 9, 30, tzinfo=UTC)
SMALL: dict[str, Any] = {
    "name": "FD against ELD",
    "labels": {"team": "lm"},
    "corpus": {"name": "sotu"},
    "model": {"embedding_size": 64, "hidden_size": 64, "layers": 1},
    "training": {"epochs": 3},
    "arms": {"fd": {"regularizer": "fraternal"}, "eld": {"regularizer": "expectation_linear"}},
    "space": {"kappa": {"type": "uniform", "low": 0.0, "high": 0.3}},
    "budget": {"trials": 6},
}
REQUESTS: dict[str, Named] = {
    "SweepRequest": {
        "preset": {"summary": "A preset as it is", "value": {"preset": "quickstart"}},
        "changed": {
            "summary": "A preset with changes",
            "value": {"preset": "quickstart", "budget": {"trials": 12}, "resources": "auto"},
        },
        "spelt out": {"summary": "Two arms, three paired draws", "value": SMALL},
        "searched": {
            "summary": "TPE and Hyperband, each arm by itself",
            "value": {
                **SMALL,
                "sampler": {"name": "tpe", "startup_trials": 5},
                "pruner": {"name": "hyperband"},
                "budget": {"trials": 40},
            },
        },
    },
    "Extension": {"more trials": {"summary": "Ten trials more", "value": {"trials": 10}}},
    "Changes": {
        "name and labels": {
            "summary": "Another name, one label more and one less",
            "value": {"name": "tuesday", "labels": {"who": "me", "team": None}},
        },
        "place": {"summary": "Sooner, and one trial at once", "value": {"priority": 5, "max_concurrent": 1}},
        "budget": {"summary": "Fewer trials", "value": {"budget": {"trials": 4}}},
    },
    "PointRequest": {
        "kappa": {"summary": "One value; the others are sampled", "value": {"params": {"kappa": 0.15}}}
    },
    "WebhookRequest": {
        "ends": {
            "summary": "Ends of sweeps",
            "value": {
                "url": "https://example.org/hooks/fraternal",
                "kinds": ["sweep_succeeded", "sweep_failed"],
            },
        },
    },
    "RetryRequest": {
        "default": {"summary": "All but those that diverged", "value": {}},
        "some": {"summary": "Of two classes", "value": {"classes": ["out_of_memory", "infrastructure"]}},
    },
    "cloneSweep": {
        "as it was": {"summary": "The same once more", "value": {}},
        "changed": {"summary": "Another seed", "value": {"name": "again", "sampler": {"seed": 2}}},
    },
}
"""By the model's name, or by the operation's where it takes no model."""
MODELS: dict[str, type[BaseModel]] = {
    "SweepRequest": SweepRequest,
    "Extension": Extension,
    "RetryRequest": RetryRequest,
    "Changes": Changes,
    "PointRequest": PointRequest,
    "WebhookRequest": WebhookRequest,
}


def _epoch(number: int, loss: float) -> EpochView:
    return EpochView(
        epoch=number,
        attempt=1,
        recorded_at=SUBMITTED + timedelta(seconds=20 + 3 * number),
        train_loss=loss + 0.11,
        valid_loss=loss,
        valid_perplexity=round(math.exp(loss), 3),
        raw_valid_loss=loss,
        averaged=False,
        optimised=loss + 0.14,
        penalty=0.21,
        ar=0.0,
        tar=0.0,
        gradient_norm=0.31,
        lr=30.0,
        pair_difference=0.42,
        prediction_variance=0.21,
        expectation_gap=0.13,
        tokens=60_000,
        tokens_per_s=21_400.0,
        seconds=2.8,
        is_best=True,
    )


_SPEC = SweepSpec.model_validate(SMALL)
_CURVE = [_epoch(1, 5.91), _epoch(2, 5.62), _epoch(3, 5.48)]
_TRIAL = TrialView(
    number=2,
    arm="fd",
    draw=1,
    seed=_SPEC.seed_of(2),
    attempt=1,
    state="COMPLETE",
    stopped=False,
    pinned=False,
    params={"kappa": 0.12},
    epochs_done=3,
    best_epoch=3,
    best_valid_loss=5.48,
    best_valid_perplexity=_CURVE[-1].valid_perplexity,
    valid_perplexity=_CURVE[-1].valid_perplexity,
    failure=None,
    checkpoint_sha256="9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    device="cpu",
    runtime="torch 2.13.0, 1 thread",
    started_at=SUBMITTED + timedelta(seconds=20),
    finished_at=SUBMITTED + timedelta(seconds=29),
)
_SWEEP = SweepView(
    id=SWEEP_ID,
    name=_SPEC.name,
    labels=_SPEC.labels,
    priority=_SPEC.priority,
    state="running",
    state_since=SUBMITTED + timedelta(seconds=2),
    desired_state="running",
    state_reason=None,
    legal=["pause", "stop", "cancel", "extend"],
    revision=1,
    created_at=SUBMITTED,
    started_at=SUBMITTED + timedelta(seconds=2),
    finished_at=None,
    trials=TrialCounts(budget=6, running=2, waiting=0, complete=3, pruned=0, failed=0),
    epochs_done=11,
    best=_TRIAL,
    ran_s=31.5,
    time_left_s=31.5,
    driver_generation=1,
    dashboard_url="/dashboard/studies/1",
)
_DETAIL = TrialDetail(**dict(_TRIAL), config=asdict(_SPEC.trial_config("fd", _TRIAL.params)), curve=_CURVE)
_ENVIRONMENT = Environment(
    version="0.1.0",
    corpus_sha256={"train": "2c26b46b68ff", "valid": "fcde2b2edba5", "test": "7f83b1657ff1"},
    devices=["cpu"],
    runtimes=["torch 2.13.0, 1 thread"],
    driver_generation=1,
)
_BETTER = _DETAIL.model_copy(
    update={
        "checkpoint_sha256": "5feceb66ffc86f38d952786c6d696c79c2dbc239dd4e91b46729d73a27fb57e9",
        "best_valid_loss": 5.44,
        "curve": [*_CURVE[:2], _epoch(3, 5.44)],
    }
)
_ONE = Side(SWEEP_ID, "succeeded", _SPEC, _ENVIRONMENT, [_DETAIL], _DETAIL)
_OTHER = replace(
    _ONE,
    sweep_id="s8c11d0e5f2",
    spec=_SPEC.model_copy(update={"name": "FD against ELD, again"}),
    trials=[_BETTER],
    trial=_BETTER,
)
_POINT = PointView(id=3, params={"kappa": 0.15}, draw=None, created_at=SUBMITTED)
_WEBHOOK = WebhookView(
    id=WEBHOOK_ID,
    url="https://example.org/hooks/fraternal",
    kinds=["sweep_succeeded", "sweep_failed"],
    sweep_id=None,
    state="active",
    pending=0,
    attempts=0,
    next_attempt_at=None,
    failure=None,
    dropped=0,
    created_at=SUBMITTED,
    delivered_at=None,
    failed_at=None,
    disabled_at=None,
)
_SENTENCE = (
    "3 draws have completed in both fd and eld: too few for any claim, whatever the outcome; six draws are "
    "the least."
)
_REPORT = ReportView(
    sweep_id=SWEEP_ID,
    name=_SPEC.name,
    state="succeeded",
    as_of=SUBMITTED + timedelta(minutes=2),
    conclusion=_SENTENCE,
    baseline=None,
    caption="Validation perplexity of each trial's best epoch. No baseline was named, so nothing is counted "
    "against one.",
    arms=[
        ArmReport(
            arm=arm,
            n=3,
            complete=3,
            pruned=0,
            failed=0,
            best=best,
            best_trial=number,
            top5=None,
            top10=None,
            beating=None,
            expected_best=[
                ExpectedBest(trials=3, perplexity=best, interval=Interval(low=best, high=best + 4.5))
            ],
        )
        for arm, best, number in (("fd", 239.8, 2), ("eld", 243.1, 3))
    ],
    comparisons=[
        Comparison(
            first="fd",
            second="eld",
            counts=None,
            pairs=Pairs(
                draws=3,
                first_wins=2,
                second_wins=1,
                ties=0,
                ratio=0.991,
                interval=None,
                p=0.5,
                ahead="first",
                could_differ=False,
                draws_for_power=None,
            ),
            test="none",
            p=None,
            verdict="too_few",
            further=None,
            sentence=_SENTENCE,
        )
    ],
    remarks=[],
)
_FORECAST = Forecast(
    wall_s=BandView(p10=31.0, p50=35.5, p90=41.0),
    device="cpu_threads",
    device_hours=BandView(p10=0.011, p50=0.013, p90=0.015),
    epochs=BandView(p10=18.0, p50=18.0, p90=18.0),
    samples=[
        SampledView(
            number=number,
            arm=arm,
            draw=0,
            seed=_SPEC.seed_of(0),
            params={"kappa": 0.12},
            exact=True,
            epoch_s=BandView(p10=0.9 * middle, p50=middle, p90=1.1 * middle),
            timed=True,
            memory_bytes=260_000_000,
        )
        for number, arm, middle in ((0, "fd", 2.8), (1, "eld", 2.1))
    ],
    arms=[
        ArmForecast(arm=arm, trials=3, epoch_s=BandView(p10=0.9 * middle, p50=middle, p90=1.1 * middle))
        for arm, middle in (("fd", 2.8), ("eld", 2.1))
    ],
    corpus=CorpusView(train_tokens=60_000, valid_tokens=10_000, vocabulary_size=10_000),
    memory=MemoryForecast(
        per_trial_bytes=260_000_000,
        at_once=2,
        all_trials_bytes=1_260_000_000,
        service_bytes=1_100_000_000,
        available_bytes=8_000_000_000,
    ),
    disk=DiskForecast(checkpoints_bytes=28_000_000, database_bytes=60_000, free_bytes=40_000_000_000),
    probe=ProbeView(
        measured_at=SUBMITTED,
        from_memory=False,
        took_s=17.2,
        start_s=4.1,
        device="cpu: AMD EPYC (AVX2)",
        processes=2,
        threads=1,
        configurations=2,
        share=0.99,
    ),
    unknown=[],
    assumptions=["No trial fails, and no other sweep or program takes part of the machine."],
)
_ANSWERS: tuple[View, ...] = (
    _REPORT,
    _SWEEP,
    SweepDetail(**dict(_SWEEP), spec=_SPEC),
    SweepList(sweeps=[_SWEEP]),
    _TRIAL,
    _DETAIL,
    TrialList(trials=[_TRIAL]),
    SweepExport(
        exported_at=SUBMITTED + timedelta(seconds=33),
        environment=_ENVIRONMENT,
        sweep=SweepDetail(**dict(_SWEEP), spec=_SPEC),
        trials=[_DETAIL],
    ),
    compare(_ONE, _OTHER, of_trials=False),
    Validation(spec=_SPEC, forecast=_FORECAST),
    _POINT,
    PointList(points=[_POINT]),
    EventPage(
        events=[
            TrialStarted(
                id=7,
                sweep_id=SWEEP_ID,
                at=SUBMITTED + timedelta(seconds=20),
                kind="trial_started",
                detail=TrialStart(number=2, arm="fd", attempt=1),
            )
        ],
        next_after=7,
        has_more=False,
    ),
    _WEBHOOK,
    NewWebhook(**dict(_WEBHOOK), secret="whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"),
    WebhookList(webhooks=[_WEBHOOK]),
    TestedWebhook(delivered=True, status=204, error=None, ms=38.2),
    Health(status="alive"),
    Readiness(
        status="ready",
        controller=ControllerLease(
            holder={"host": "trainer-1", "pid": 4711, "started": 1772443800.25},
            until=SUBMITTED + timedelta(seconds=15),
            is_this_service=True,
        ),
    ),
)
ANSWERS: dict[str, Any] = {type(answer).__name__: answer.model_dump(mode="json") for answer in _ANSWERS}
"""By the model's name."""

_ERRORS: tuple[ServiceError, ...] = (
    SweepNotFound(f"there is no sweep '{SWEEP_ID}'; GET /v1/sweeps lists them"),
    IllegalMove(
        f"sweep {SWEEP_ID} is succeeded: it cannot pause; legal now: extend, retry-failed, delete",
        ["extend", "retry-failed", "delete"],
    ),
    InvalidRequest(
        [
            Problem(
                "/budget/trials",
                "greater_than_equal",
                "Input should be greater than or equal to 1; got 0",
            )
        ]
    ),
    DatabaseAway("the database does not answer: OperationalError; ask again in 5 seconds"),
)
PROBLEMS: dict[int, ProblemDocument] = {error.status: document_of(error, "") for error in _ERRORS}
"""By status; others say no more than their status does."""
