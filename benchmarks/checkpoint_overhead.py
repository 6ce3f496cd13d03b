"""What checkpoints in the middle of an epoch cost: the share of the time spent in pauses.

    .venv/bin/python benchmarks/checkpoint_overhead.py

The 24 M model (V = 10,000, E = 400, H = 1150, 3 layers), on text of random words, before and after averaging
begins; and a small one, E = 64. For every pause a state is made, packed, hashed, written and synced, as a
worker does.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch

from models.config import AWDLSTMConfig
from regularizers.config import Regularization
from trials.checkpoints import pack_state
from trials.spec import TrainingConfig
from trials.store import CheckpointStore
from trials.training import Training

V = 10_000
Averaging = Literal["none", "from-start"]
AVERAGINGS: tuple[Averaging, ...] = get_args(Averaging)


def measure(
    model: AWDLSTMConfig, averaging: Averaging, every_s: float, seconds: float
) -> tuple[int, float, int]:
    """(pauses, share of the time, bytes of one state)."""
    rng = np.random.default_rng(1)
    text, valid = (rng.integers(0, V, size, dtype=np.int32) for size in (20_000_000, 1000))
    config = TrainingConfig(epochs=1, batch_size=20, averaging=averaging)
    training = Training(model, config, Regularization("fraternal"), V, text, valid, 1)
    pauses, paused, began, size = 0, 0.0, time.monotonic(), 0
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        store = CheckpointStore(Path(folder).as_uri())
        for _ in training.run(every_s):
            at = time.monotonic()
            store.save_last("s", 0, pack_state(*training.state()))
            paused += time.monotonic() - at
            pauses += 1
            size = (Path(folder) / "s" / "t00000" / "last.tar").stat().st_size
            if time.monotonic() - began >= seconds:
                break
    return pauses, paused / (time.monotonic() - began), size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--every", type=float, default=60.0, help="seconds; the default of a sweep")
    parser.add_argument("--seconds", type=float, default=185.0, help="to train in each case")
    given = parser.parse_args()
    torch.set_num_threads(2)
    large, small = AWDLSTMConfig(), AWDLSTMConfig(embedding_size=64, hidden_size=64, layers=1)
    print(f"every {given.every:g} s, torch {torch.__version__}, {torch.get_num_threads()} threads\n")
    print("| model | averaging | state, MB | pauses | share of the time |\n|---|---|---|---|---|")
    for name, model in (("24 M", large), ("E = 64", small)):
        for averaging in AVERAGINGS:
            pauses, share, size = measure(model, averaging, given.every, given.seconds)
            print(f"| {name} | {averaging} | {size / 2**20:.0f} | {pauses} | {share:.2%} |", flush=True)


if __name__ == "__main__":
    main()
