"""The laws of many sweeps that share machines, on the service's own code and a virtual clock."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState
from sqlalchemy import func, select

from benchmarks.simulated import Clients, Simulation, Training, sweep_spec
from service.settings import Settings
from service.tables import epochs, events

WORKERS, TRIALS = 20, 20


@pytest.fixture
def simulation(tmp_path: Path) -> Iterator[Simulation]:
    settings = Settings(data_dir=tmp_path, running_sweeps=5)
    once = Clients(pages=(1, 20.0), scripts=(1, 20.0), watchers=(1, 20.0), scrapes=(1, 20.0))
    made = Simulation(settings, WORKERS, seed=1, training=Training(epoch_s=10, lost=0.03), clients=once)
    yield made
    made.close()


def sweep(number: int, **changes: Any) -> dict[str, Any]:
    return sweep_spec(TRIALS, epochs=2, seed=number, **changes)


@pytest.mark.slow
def test_sweeps_that_share_machines_keep_to_their_budgets_shares_and_priorities(
    simulation: Simulation,
) -> None:
    others = [simulation.submit(sweep(number)) for number in range(4)]
    simulation.run_for(15)
    assert [simulation.drivers[sweep_id].share for sweep_id in others] == [5, 5, 5, 5]
    urgent = simulation.submit(sweep(4, priority=1))
    simulation.run_for(12)
    assert simulation.drivers[urgent].share == WORKERS
    begun_before = {key for key in simulation.begun if key[0] != urgent}
    simulation.run(lambda: len({number for of, number in simulation.begun if of == urgent}) == TRIALS)
    assert {key for key in simulation.begun if key[0] != urgent} == begun_before
    simulation.run(lambda: len(simulation.ended) == 5)
    assert simulation.ended[0] == urgent
    assert (simulation.most_at_work, simulation.most_promised) == (WORKERS, WORKERS)
    assert simulation.most_over_share == 0
    for sweep_id in [*others, urgent]:
        assert_exactly_the_budget(simulation, sweep_id)
    assert sum(count - 1 for count in simulation.begun.values()) > 0  # workers were lost


def assert_exactly_the_budget(simulation: Simulation, sweep_id: str) -> None:
    record = simulation.records.get_sweep(sweep_id)
    study = optuna.load_study(study_name=record.study, storage=simulation.app.state.controller.storage)
    rows = study.get_trials(deepcopy=False)
    assert record.state == "succeeded"
    assert len(rows) == TRIALS
    assert {row.state for row in rows} <= {TrialState.COMPLETE, TrialState.PRUNED}
    with simulation.records.engine.connect() as connection:
        mine = (events.c.sweep_id == sweep_id) & (events.c.kind == "trial_finished")
        told = Counter(
            detail["number"] for detail in connection.execute(select(events.c.detail).where(mine)).scalars()
        )
        curves = select(epochs.c.number, func.count(), func.min(epochs.c.epoch), func.max(epochs.c.epoch))
        curves = curves.where(epochs.c.sweep_id == sweep_id).group_by(epochs.c.number)
        found = connection.execute(curves).all()
    assert told == Counter(range(TRIALS))
    assert all((first, last) == (1, count) for _, count, first, last in found)
    assert len(found) == TRIALS
    seen = simulation.get(f"/v1/sweeps/{sweep_id}").json()
    assert (seen["trials"]["complete"] + seen["trials"]["pruned"], seen["epochs_done"]) == (
        TRIALS,
        sum(count for _, count, _, _ in found),
    )
