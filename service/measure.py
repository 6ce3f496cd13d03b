"""What a table measures of a best checkpoint besides its validation loss. Loads torch."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from models.awd_lstm import AWDLSTM
from service.errors import CommandFailed
from service.local import finetune_file, read_checkpoint, rebuild, usable_device
from trials.corpora import Corpus
from trials.training import EVALUATION_WINDOW, evaluate, evaluate_mc


@dataclass(frozen=True)
class Losses:
    """Nats per token of one set of weights."""

    valid: float
    test: float


def load_model(file: Path, corpus: Corpus) -> AWDLSTM:
    """The checkpoint's model, on a GPU where there is one. Raises CommandFailed if it is of another text."""
    checkpoint = read_checkpoint(file)
    if checkpoint.config["corpus_sha256"] != dict(corpus.sha256):
        raise CommandFailed(
            f"{file} was trained on another text than the corpus holds now; put the text back, "
            "or begin again in another --out"
        )
    return rebuild(checkpoint).to(usable_device("auto"))


def losses(model: AWDLSTM, corpus: Corpus, masks: int, seed: int) -> Losses:
    """With the mean mask, or averaged over so many sampled ones."""
    if masks:
        return Losses(*(evaluate_mc(model, ids, masks, seed) for ids in (corpus.valid, corpus.test)))
    return Losses(evaluate(model, corpus.valid), evaluate(model, corpus.test))


def mean_square_output(model: AWDLSTM, ids: NDArray[np.int32], window: int = EVALUATION_WINDOW) -> float:
    """(1/d)·|h_t|², averaged over t: the y-axis of Figure ARactivation. The window does not change it."""
    tokens_T1 = torch.from_numpy(ids.astype(np.int64)).unsqueeze(1).to(model.decoder_bias.device)
    total, state = 0.0, model.zero_state(1)
    with torch.no_grad():
        for start in range(0, len(tokens_T1), window):
            result = model(tokens_T1[start : start + window], state, None)
            state = result.state
            total += result.raw_TBH.double().square().mean(dim=2).sum().item()
    return total / len(tokens_T1)


def finetune(file: Path, out: Path, data_dir: Path) -> None:
    """Fine-tune the first file's model on its own corpus; write the second. Raises CommandFailed."""
    finetune_file(file, out, {}, seed=None, device="auto", data_dir=data_dir)
