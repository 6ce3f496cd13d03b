"""`fraternal train` and `fraternal evaluate`: one model on this machine, without a service. Loads torch."""

import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError
from rich.console import Console

from models.awd_lstm import AWDLSTM
from models.config import AWDLSTMConfig
from service.errors import CommandFailed
from service.problems import problems_in
from service.progress import ProgressDisplay, of_training
from trials.attempt import best_checkpoint
from trials.checkpoints import BestCheckpoint, read_best, write_best
from trials.corpora import INT32_MAX, SPLITS, Corpus, CorpusError, CorpusSpec, Split, load_corpus, resolved
from trials.ledger import Task
from trials.perplexity import perplexity
from trials.spec import TrialConfig
from trials.store import CorruptCheckpoint
from trials.training import Diverged, EpochResult, Training
from trials.training import evaluate as loss_of

TOLERANCE = 1e-5
"""How far, relatively, a loss may lie from the recorded one: what another machine's rounding explains."""


@dataclass(frozen=True)
class Evaluation:
    """How well a checkpoint predicts one split."""

    file: str
    split: Split
    tokens: int
    unknown: int
    """Tokens outside the checkpoint's vocabulary, read as <unk>."""
    loss: float
    """Nats per token."""
    recorded_valid_loss: float
    """What the training run wrote beside the weights."""
    text_is_the_same: bool
    """Whether the split is, byte for byte, that of the training run."""

    @property
    def perplexity(self) -> float:
        return perplexity(self.loss)

    def line(self) -> str:
        unknown = f", {self.unknown} of them outside the vocabulary" if self.unknown else ""
        return (
            f"{self.split}: perplexity {self.perplexity:.4f}, loss {self.loss:.6f} nats per token "
            f"({self.tokens} tokens{unknown})"
        )

    def to_json(self) -> dict[str, Any]:
        """Without infinity: JSON has none."""
        return {**asdict(self), "perplexity": self.perplexity if math.isfinite(self.perplexity) else None}


def evaluate_file(file: Path, split: str, other_corpus: dict[str, Any] | None, data_dir: Path) -> Evaluation:
    """Rebuild a model from its `best` file; evaluate it on its corpus or another. Raises CommandFailed."""
    if split not in SPLITS:
        raise CommandFailed(f"a split is one of {', '.join(SPLITS)}; found {split!r}")
    try:
        checkpoint = read_best(file)
        own_corpus, own_sha256 = (checkpoint.config[name] for name in ("corpus", "corpus_sha256"))
        recorded_valid_loss = checkpoint.metrics["valid_loss"]
    except CorruptCheckpoint as error:
        raise CommandFailed(str(error)) from error
    except KeyError as error:
        raise CommandFailed(f"{file} was not written by this program: it does not say its {error}") from error
    model = rebuild(checkpoint)
    corpus = _load(_with_every_word(_parse_corpus(other_corpus or own_corpus)), data_dir)
    try:
        ids, unknown = checkpoint.vocabulary.encode(corpus.vocabulary.decode(_ids(corpus, split)))
        loss = loss_of(model, ids)
    except ValueError as error:
        raise CommandFailed(f"{file} cannot read the {split} split: {error}") from error
    same = corpus.sha256[split] == own_sha256.get(split)
    return Evaluation(str(file), split, len(ids) - 1, unknown, loss, recorded_valid_loss, same)


def check_recorded_loss(result: Evaluation) -> str:
    """Words that the validation loss is the recorded one. Raises CommandFailed where it is not."""
    if math.isclose(result.loss, result.recorded_valid_loss, rel_tol=TOLERANCE):
        recorded = perplexity(result.recorded_valid_loss)
        return f"agrees with the validation perplexity that training recorded, {recorded:.4f}"
    reason = "" if result.text_is_the_same else "; the text has changed since training"
    raise CommandFailed(
        f"{result.file} gives a validation loss of {result.loss:.7f}, but training recorded "
        f"{result.recorded_valid_loss:.7f}: they differ by more than {TOLERANCE:g}{reason}"
    )


def rebuild(checkpoint: BestCheckpoint) -> AWDLSTM:
    """The model that a checkpoint holds. Raises CommandFailed where its parts do not fit together."""
    try:
        config = AWDLSTMConfig(**checkpoint.config["model"])
        model = AWDLSTM(config, len(checkpoint.vocabulary), torch.Generator())
        model.load_state_dict(checkpoint.tensors)
    except (KeyError, RuntimeError, ValidationError) as error:
        first = str(error).splitlines()[0]
        raise CommandFailed(
            f"the checkpoint's weights and its config.json do not fit together: {first}"
        ) from error
    return model


def train_and_save(
    values: dict[str, Any],
    corpus_values: dict[str, Any],
    seed: int,
    device: str | None,
    out: Path,
    data_dir: Path,
) -> None:
    """Train one configuration, save the weights whenever they are the best so far, evaluate what was saved.

    Raises CommandFailed.
    """
    config = _parse(TrialConfig, {"model": {}, "training": {}, "regularization": {}, **values})
    source = _parse_corpus(corpus_values)
    print(described(config, source))
    corpus = _load(source, data_dir)
    where = _usable_device(device)
    task = Task("", 0, 1, "", seed, config, source, where, 0)
    try:
        _train(task, corpus, out)
    except (Diverged, ValueError) as error:
        raise CommandFailed(str(error)) from error
    for split in ("valid", "test"):
        print(evaluate_file(out, split, None, data_dir).line())
    print(f"saved: {out}")


def described(config: TrialConfig, corpus: CorpusSpec) -> str:
    """Every value that a training run goes by, a line for each section."""
    sections = {"corpus": corpus.model_dump(mode="json", exclude_none=True), **asdict(config)}
    return "\n".join(
        f"{section}: " + ", ".join(f"{name}={json.dumps(value)}" for name, value in values.items())
        for section, values in sections.items()
    )


def _usable_device(asked: str | None) -> str:
    there = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    if asked not in (None, *there):
        raise CommandFailed(f"device {asked!r} cannot be used here; there is: {', '.join(there)}")
    return asked or there[-1]


def _train(task: Task, corpus: Corpus, out: Path) -> None:
    """Raises Diverged and KeyboardInterrupt, saying what was kept, and ValueError for too short a text."""
    config = task.config
    sizes = len(corpus.vocabulary), corpus.train, corpus.valid
    training = Training(config.model, config.training, config.regularization, *sizes, task.seed, task.device)
    started = time.monotonic()
    saved: EpochResult | None = None
    try:
        with ProgressDisplay(Console()) as display:
            display.show(of_training([], config.training.epochs, 0.0))
            for result in training.epochs():
                if result.is_best:
                    write_best(out, best_checkpoint(training, task, corpus))
                    saved = result
                display.show(
                    of_training(training.history, config.training.epochs, time.monotonic() - started)
                )
    except (KeyboardInterrupt, Diverged):
        print(
            f"{out} keeps the weights of epoch {saved.epoch}"
            if saved
            else "no epoch ended: nothing was saved"
        )
        raise


def _ids(corpus: Corpus, split: Split) -> NDArray[np.int32]:
    return {"train": corpus.train, "valid": corpus.valid, "test": corpus.test}[split]


def _load(source: CorpusSpec, data_dir: Path) -> Corpus:
    try:
        return load_corpus(source, data_dir)
    except CorpusError as error:
        raise CommandFailed(str(error)) from error


def _parse_corpus(values: dict[str, Any]) -> CorpusSpec:
    try:
        return resolved(_parse(CorpusSpec, values), Path.cwd())
    except CorpusError as error:
        raise CommandFailed(str(error)) from error


def _with_every_word(source: CorpusSpec) -> CorpusSpec:
    """The same text without a word lost to its own vocabulary: the checkpoint's decides what is unknown."""
    return source.model_copy(update={"vocabulary": "all", "vocabulary_size": INT32_MAX})


def _parse(kind: Any, values: dict[str, Any]) -> Any:
    adapter = TypeAdapter(kind)
    try:
        return adapter.validate_json(json.dumps(values), strict=True)  # as strict as the service
    except ValidationError as error:
        problems = problems_in(cast(Any, error.errors()), values, adapter.json_schema())
        raise CommandFailed("\n  ".join(f"{found.pointer}: {found.message}" for found in problems)) from error
