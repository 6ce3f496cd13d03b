"""How many trials share a GPU best: `fraternal gpus --measure` finds out, and `auto` follows it. No torch.

Processes that share a GPU take turns on it, unless NVIDIA's MPS lets them compute side by side: what is won
is the time in which one trial leaves it idle, and that depends on card, host and the model's size.
"""

import logging
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from models.config import AWDLSTMConfig
from regularizers.config import Regularization
from trials.corpora import FILES, PathCorpus
from trials.files import write_whole
from trials.memory import bytes_on
from trials.spec import TrainingConfig, TrialConfig
from trials.steps import TYPICAL_VOCABULARY, ProbeOrder, operations, timed_as

if TYPE_CHECKING:
    from service.launcher import Launcher

log = logging.getLogger(__name__)

FILE = "packing.json"
"""Of a service's data directory."""
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16)
WORTH = 1.05
"""How much more the best number of trials has to do together than a smaller one, to be preferred to it."""
TOKENS = 200_000
"""Of the text that is made up for it."""


def _shape(embedding_size: int, hidden_size: int, layers: int, batch_size: int) -> TrialConfig:
    return timed_as(
        TrialConfig(
            AWDLSTMConfig(embedding_size, hidden_size, layers),
            TrainingConfig(epochs=1, batch_size=batch_size),
            Regularization("fraternal"),
        )
    )


SHAPES = {
    "small": _shape(64, 64, 1, 20),
    "medium": _shape(200, 200, 1, 20),
    "ptb": _shape(400, 1150, 3, 20),
    "ptb, batch 80": _shape(400, 1150, 3, 80),
}
"""From one that leaves a GPU idle most of the time to one that fills it."""


class Measured(BaseModel, frozen=True):
    """Of one shape of a model, on one card."""

    shape: str
    operations: Annotated[float, Field(gt=0)]
    """A time step's: what a GPU has to do at a time."""
    tokens_per_s: dict[int, Annotated[float, Field(gt=0)]]
    """Of all trials together, by how many there are."""

    @property
    def best(self) -> int:
        """The fewest trials that are about as fast together as any number of them."""
        most = max(self.tokens_per_s.values(), default=0.0)
        return min((n for n, rate in self.tokens_per_s.items() if rate * WORTH >= most), default=1)


class Packing(BaseModel, frozen=True):
    """What was measured of one kind of card."""

    gpu: str
    """Its name, with MIG's profile."""
    measured_at: datetime
    driver: str | None
    torch: str
    shapes: tuple[Measured, ...]

    def best_for(self, config: TrialConfig) -> int:
        """By the smallest shape that was measured and has no less to do: larger ones fill a GPU sooner."""
        wanted = step_operations(config)
        ranked = sorted(self.shapes, key=lambda one: one.operations)
        larger = [one for one in ranked if one.operations >= wanted] or ranked[-1:]
        return larger[0].best if larger else 1


_PACKINGS = TypeAdapter(tuple[Packing, ...])


def step_operations(config: TrialConfig) -> float:
    """Floating-point operations of one time step of all columns, about."""
    return operations(config, TYPICAL_VOCABULARY) / config.training.bptt


def read_packings(data_dir: Path) -> dict[str, Packing]:
    """By the card's name; none where none is kept, or by another version of this program."""
    try:
        found = _PACKINGS.validate_json((data_dir / FILE).read_bytes())
    except (OSError, ValidationError):
        return {}
    return {packing.gpu: packing for packing in found}


def write_packing(data_dir: Path, packing: Packing) -> None:
    """In place of what was measured of this kind of card before. Raises OSError."""
    kept = {**read_packings(data_dir), packing.gpu: packing}
    write_whole(data_dir / FILE, _PACKINGS.dump_json(tuple(kept.values()), indent=2))


def trials_together(
    configs: Sequence[TrialConfig], packings: Sequence[Packing], gpu_bytes: float, most: int
) -> int:
    """How many such trials are to share a GPU of any of these kinds: all of them have room there.

    The vocabulary is guessed: a trial that turns out too large for its part is given two.
    """
    if not configs or not packings:
        return 1
    best = min(packing.best_for(config) for packing in packings for config in configs)
    peak = max(bytes_on("cuda", config, 5 * TYPICAL_VOCABULARY) for config in configs)
    return max(1, min(best, most, int(gpu_bytes // peak)))


async def measure(
    launcher: "Launcher",
    device: str,
    memory_bytes: float,
    most: int,
    shapes: Mapping[str, TrialConfig] = SHAPES,
) -> AsyncIterator[Measured]:
    """One shape after another, with more and more trials at once for as long as that makes a difference.

    So many that cannot run are too many. Raises ProbeFailed where not even one can.
    """
    from service.launcher import ProbeFailed  # which loads this module

    with TemporaryDirectory(prefix="fraternal-packing-") as folder:
        words = [f"w{number * 7919 % TYPICAL_VOCABULARY}" for number in range(TOKENS)]
        for file in FILES.values():
            Path(folder, file).write_text(" ".join(words))
        for name, config in shapes.items():
            peak = bytes_on(device, config, TYPICAL_VOCABULARY)
            rates: dict[int, float] = {}
            for count in [n for n in COUNTS if n <= most and n * peak <= memory_bytes]:
                order = ProbeOrder(
                    corpus=PathCorpus(path=folder),
                    device=device,
                    threads=1,
                    processes=count,
                    gpu_share=share_of_each(count),
                    points=(config,),
                )
                try:
                    timed = next(iter((await launcher.probe(order)).timed), None)
                except ProbeFailed as error:
                    if not rates:
                        raise
                    log.warning("%s: %d at once could not be measured: %s", name, count, error)
                    break
                if timed is None:  # so many have no room, with their text's vocabulary
                    break
                tokens = config.training.batch_size * config.training.bptt
                rates[count] = count * tokens / fmean(timed.step_s)
                if _grows_no_more(list(rates.values())):
                    break
            yield Measured(shape=name, operations=step_operations(config), tokens_per_s=rates)


def _grows_no_more(rates: Sequence[float]) -> bool:
    """Neither of the last two numbers of trials has done more than the best before by what would count."""
    return len(rates) > 2 and max(rates[-2:]) < WORTH * max(rates[:-2])


def share_of_each(count: int) -> float:
    """Of a GPU that so many share, in Ray's ten-thousandths: never so much that the last one has no room."""
    return math.floor(10_000 / count) / 10_000


def packing_of(gpu: str, driver: str | None, torch: str, shapes: Sequence[Measured]) -> Packing:
    return Packing(gpu=gpu, measured_at=datetime.now(UTC), driver=driver, torch=torch, shapes=tuple(shapes))
