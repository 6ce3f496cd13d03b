"""What a table measures of a best checkpoint. Loads torch."""

from dataclasses import dataclass
from pathlib import Path

from models.awd_lstm import AWDLSTM
from service.errors import CommandFailed
from service.local import finetune_file, read_checkpoint, rebuild, usable_device
from service.looks import Look, Looked, LookLog
from trials.corpora import Corpus, CorpusSpec
from trials.evaluation import Ids, evaluate, evaluate_mc
from trials.store import sha256_of


@dataclass(frozen=True)
class Losses:
    """Nats per token of one set of weights."""

    valid: float
    test: float
    looked: Looked


def load_model(file: Path, corpus: Corpus, device: str) -> AWDLSTM:
    """The checkpoint's model. Raises CommandFailed if it was trained on another text."""
    checkpoint = read_checkpoint(file)
    if checkpoint.config["corpus_sha256"] != dict(corpus.sha256):
        raise CommandFailed(
            f"{file} was trained on another text than the corpus holds now; put the text back, "
            "or begin again in another --out"
        )
    return rebuild(checkpoint).to(usable_device(device))


def losses(model: AWDLSTM, corpus: Corpus, masks: int, seed: int, look: Look, log: LookLog) -> Losses:
    """With the mean mask, or averaged over so many sampled ones. The look at the test split is logged."""

    def loss(ids: Ids) -> float:
        return evaluate_mc(model, ids, masks, seed) if masks else evaluate(model, ids)

    valid = loss(corpus.valid)
    looked = log.test_loss(look, lambda: loss(corpus.test))
    return Losses(valid, looked.loss, looked)


def look_at(file: Path, corpus: Corpus, source: CorpusSpec, masks: int, seed: int, command: str) -> Look:
    """What `losses` is about to look at."""
    return Look(
        command=command,
        file=str(file),
        sha256=sha256_of(file),
        corpus=source.model_dump(mode="json", exclude_none=True),
        split_sha256=corpus.sha256["test"],
        tokens=len(corpus.test) - 1,
        mc_masks=masks or None,
        seed=seed if masks else None,
    )


def finetune(file: Path, out: Path, data_dir: Path, device: str) -> None:
    """Fine-tune the first file's model on its own corpus; write the second. Raises CommandFailed."""
    finetune_file(file, out, {}, seed=None, device=device, data_dir=data_dir)
