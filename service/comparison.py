"""Two sweeps, or two trials, side by side: pure functions of what the API answers about each."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from service.comparison_schemas import (
    ArmComparison,
    ArmResult,
    Compared,
    CurveComparison,
    Difference,
    EpochComparison,
    SideBySide,
    TrialPairs,
)
from service.lifecycle import State
from service.problems import to_pointer
from service.schemas import Environment, EpochView, TrialDetail, TrialView
from trials.spec import SweepSpec

REFERENCE = r"^[A-Za-z0-9_-]{1,64}(:[0-9]{1,9})?$"
"""A sweep, or `SWEEP:NUMBER`, a trial of it."""
Members = dict[Any, Any]
NOT_COMPARED = {"attempt", "recorded_at", "seconds", "tokens_per_s"}
"""Of an epoch: what two runs of the same training need not share."""


@dataclass(frozen=True)
class Side:
    sweep_id: str
    state: State
    spec: SweepSpec
    environment: Environment
    trials: Sequence[TrialView]
    trial: TrialDetail | None
    """That is compared; of a sweep, its best."""


def parse_reference(written: str) -> tuple[str, int | None]:
    """Of a form that REFERENCE allows."""
    sweep_id, _, number = written.partition(":")
    return sweep_id, int(number) if number else None


def compare(a: Side, b: Side, *, of_trials: bool) -> SideBySide:
    both = a.trial is not None and b.trial is not None
    return SideBySide(
        a=_compared(a),
        b=_compared(b),
        spec=list(differences(_spec(a), _spec(b))),
        config=list(differences(_config(a.trial), _config(b.trial))) if both else [],
        environment=list(differences(_environment(a, of_trials), _environment(b, of_trials))),
        arms=[] if of_trials else list(_arms(a, b)),
        pairs=None if of_trials else _pairs(a.trials, b.trials),
        curves=compare_curves(a.trial.curve, b.trial.curve) if a.trial and b.trial else None,
    )


def differences(a: Any, b: Any, pointer: str = "") -> Iterator[Difference]:
    """Between two JSON values, the deepest ones."""
    if isinstance(a, dict) and isinstance(b, dict):
        keys: Sequence[Any] = [*a, *(key for key in b if key not in a)]
        yield from _of_members(a, b, keys, pointer)
    elif isinstance(a, list) and isinstance(b, list):
        keys = range(max(len(a), len(b)))
        yield from _of_members(dict(enumerate(a)), dict(enumerate(b)), keys, pointer)
    elif a != b or isinstance(a, bool) != isinstance(b, bool):
        yield Difference(pointer=pointer, a=a, b=b)


def _of_members(a: Members, b: Members, keys: Sequence[Any], above: str) -> Iterator[Difference]:
    for key in keys:
        pointer = above + to_pointer([key])
        if key in a and key in b:
            yield from differences(a[key], b[key], pointer)
        else:
            absent = "b" if key in a else "a"
            yield Difference(pointer=pointer, a=a.get(key), b=b.get(key), absent=absent)


def compare_curves(a: Sequence[EpochView], b: Sequence[EpochView]) -> CurveComparison:
    ones, others = ({epoch.epoch: epoch for epoch in curve} for curve in (a, b))
    numbers = sorted(ones.keys() | others.keys())
    parts_at = next((n for n in numbers if _measured(ones.get(n)) != _measured(others.get(n))), None)
    return CurveComparison(
        identical=parts_at is None,
        parts_at=parts_at,
        epochs=[_of_epoch(number, ones.get(number), others.get(number)) for number in numbers],
    )


def _measured(epoch: EpochView | None) -> dict[str, Any] | None:
    return None if epoch is None else epoch.model_dump(exclude=NOT_COMPARED)


def _of_epoch(number: int, a: EpochView | None, b: EpochView | None) -> EpochComparison:
    one, other = (None if epoch is None else epoch.valid_perplexity for epoch in (a, b))
    return EpochComparison(epoch=number, a=one, b=other, difference=_difference(one, other))


def _difference(a: float | None, b: float | None) -> float | None:
    return b - a if a is not None and b is not None else None


def _compared(side: Side) -> Compared:
    trial = side.trial and side.trial.in_short
    return Compared(sweep_id=side.sweep_id, name=side.spec.name, state=side.state, trial=trial)


def _spec(side: Side) -> Any:
    return side.spec.model_dump(mode="json")


def _config(trial: TrialDetail | None) -> Any:
    return trial and {"arm": trial.arm, "seed": trial.seed, **trial.config}


def _environment(side: Side, of_trial: bool) -> Any:
    if not of_trial or side.trial is None:
        return side.environment.model_dump(mode="json")
    trial = side.trial
    own = {"device": trial.device, "runtime": trial.runtime, "attempt": trial.attempt}
    return {"corpus_sha256": side.environment.corpus_sha256, **own}


def _arms(a: Side, b: Side) -> Iterator[ArmComparison]:
    ones, others = ({arm: _result(side.trials, arm) for arm in side.spec.arms} for side in (a, b))
    for arm in [*ones, *(arm for arm in others if arm not in ones)]:
        one, other = ones.get(arm), others.get(arm)
        best = _difference(*(None if result is None else result.best for result in (one, other)))
        yield ArmComparison(arm=arm, a=one, b=other, difference=best)


def _result(trials: Sequence[TrialView], arm: str) -> ArmResult:
    """As the sweep's report has it, which takes longer: it has intervals, too."""
    ended = [trial for trial in trials if trial.arm == arm and trial.counts]
    states = [trial.state for trial in ended]
    best = sorted(trial.score for trial in ended if trial.score is not None)
    return ArmResult(
        n=len(ended),
        complete=states.count("COMPLETE"),
        pruned=states.count("PRUNED"),
        failed=states.count("FAIL"),
        best=best[0] if best else None,
        top5_mean=fmean(best[:5]) if len(best) >= 5 else None,
    )


def _pairs(a: Sequence[TrialView], b: Sequence[TrialView]) -> TrialPairs:
    pairs = list(zip(a, b, strict=False))  # by number, from 0, in either

    def same(name: str) -> int:
        return sum(getattr(x, name) is not None and getattr(x, name) == getattr(y, name) for x, y in pairs)

    return TrialPairs(
        count=len(pairs),
        same_params=sum((x.arm, x.seed, x.params) == (y.arm, y.seed, y.params) for x, y in pairs),
        same_loss=same("best_valid_loss"),
        same_checkpoint=same("checkpoint_sha256"),
    )
