"""What a table measures of a best checkpoint. Loads torch."""

from dataclasses import dataclass
from pathlib import Path

from models.awd_lstm import AWDLSTM
from service.errors import CommandFailed
from service.local import finetune_file, read_checkpoint, rebuild, usable_device
from trials.corpora import Corpus
from trials.evaluation import evaluate, evaluate_mc


@dataclass(frozen=True)
class Losses:
    """Nats per token of one set of weights."""

    valid: float
    test: float


def load_model(file: Path, corpus: Corpus, device: str) -> AWDLSTM:
    """The checkpoint's model. Raises CommandFailed if it was trained on another text."""
    checkpoint = read_checkpoint(file)
    if checkpoint.config["corpus_sha256"] != dict(corpus.sha256):
        raise CommandFailed(
            f"{file} was trained on another text than the corpus holds now; put the text back, "
            "or begin again in another --out"
        )
    return rebuild(checkpoint).to(usable_device(device))


def losses(model: AWDLSTM, corpus: Corpus, masks: int, seed: int) -> Losses:
    """With the mean mask, or averaged over so many sampled ones."""
    if masks:
        return Losses(*(evaluate_mc(model, ids, masks, seed) for ids in (corpus.valid, corpus.test)))
    return Losses(evaluate(model, corpus.valid), evaluate(model, corpus.test))


def finetune(file: Path, out: Path, data_dir: Path, device: str) -> None:
    """Fine-tune the first file's model on its own corpus; write the second. Raises CommandFailed."""
    finetune_file(file, out, {}, seed=None, device=device, data_dir=data_dir)
