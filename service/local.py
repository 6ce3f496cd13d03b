"""`fraternal train`, `finetune` and `evaluate`: one model on this machine, without a service. Loads torch."""

import json
import math
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Self

import torch
from pydantic import BaseModel, Field, FiniteFloat
from rich.console import Console

from models.awd_lstm import AWDLSTM
from models.config import AWDLSTMConfig
from models.precision import UnsupportedPrecision, require_precision
from regularizers.config import Regularization
from service.errors import CommandFailed
from service.looks import Look, Looked, LookLog
from service.progress import ProgressDisplay, of_training
from service.texts import load, parse_corpus_spec, parse_strictly, read_split
from trials.attempt import best_checkpoint, is_out_of_memory, require_finite
from trials.checkpoints import BestCheckpoint, read_best, rebuilt, write_best
from trials.corpora import EOS, PUBLISHED, SPLITS, UNK, Corpus, CorpusSpec, PathCorpus, Split
from trials.evaluation import evaluate as loss_of
from trials.evaluation import evaluate_mc
from trials.generation import generate
from trials.memory import require_memory
from trials.perplexity import perplexity
from trials.spec import TrainingConfig, TrialConfig, merged
from trials.store import CorruptCheckpoint
from trials.tasks import Task
from trials.training import Diverged, Training

SECONDS_TO_INTERRUPT = 1.0
"""A Ctrl-C that Python has dropped is acted on after about so long."""

TOLERANCE = 1e-5
"""How far, relatively, a loss may lie from the recorded one: what another machine's rounding explains."""


class _Config(BaseModel):
    """What the commands need to know of a checkpoint's training run."""

    model: AWDLSTMConfig
    training: TrainingConfig
    regularization: Regularization
    corpus: CorpusSpec
    corpus_sha256: dict[str, str]
    seed: Annotated[int, Field(ge=0)]
    finetunings: Annotated[int, Field(ge=0)] = 0


class _Metrics(BaseModel):
    valid_loss: FiniteFloat


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
    mc_masks: int | None = None
    """Of MC-eval: how many samples of the masks the probabilities are a mean over; None drops nothing."""
    test_look: Looked | None = None
    """Of a test split alone: which look at it this is, by the log."""

    @property
    def perplexity(self) -> float:
        return perplexity(self.loss)

    def line(self) -> str:
        unknown = f", {self.unknown} of them outside the vocabulary" if self.unknown else ""
        mc = f", MC{self.mc_masks}" if self.mc_masks else ""
        return (
            f"{self.split}{mc}: perplexity {self.perplexity:.4f}, loss {self.loss:.6f} nats per token "
            f"({self.tokens} tokens{unknown})"
        )

    def to_json(self) -> dict[str, Any]:
        """Without infinity and NaN: JSON has none."""
        document = {**asdict(self), "perplexity": self.perplexity}
        for name in ("loss", "perplexity"):
            document[name] = document[name] if math.isfinite(document[name]) else None
        if (look := document.pop("test_look")) is not None:
            document["test_look"] = {name: look[name] for name in ("before", "checkpoints", "log")}
        return document


def evaluate_file(
    file: Path,
    split: str,
    other_corpus: dict[str, Any] | None,
    data_dir: Path,
    *,
    mc_masks: int | None = None,
    seed: int = 0,
    device: str = "cpu",
    asked_by: str = "evaluate --split test",
) -> Evaluation:
    """Rebuild a model from its `best` file; evaluate it on its corpus or another. Raises CommandFailed.

    A look at a test split is logged, as what `asked_by` asked for.
    """
    if split not in SPLITS:
        raise CommandFailed(f"a split is one of {', '.join(SPLITS)}; found {split!r}")
    checkpoint = read_checkpoint(file)
    model = rebuild(checkpoint).to(usable_device(device))
    source = own_corpus(file, checkpoint) if other_corpus is None else parse_corpus_spec(other_corpus)
    text = read_split(source, split, data_dir)
    trained_on = checkpoint.config["corpus_sha256"]
    same = text.sha256 == trained_on.get(split)
    whose = _whose_test_split(text.sha256, trained_on)
    if split != "test" and whose and not same:
        raise CommandFailed(
            f"what is given as the {split} split is the test split of {whose}, by its digest: name it "
            "test.txt, and --split test looks at it, and logs that"
        )
    limit = f"{split}_tokens"
    use = checkpoint.config["corpus"].get(limit) if same and limit not in (other_corpus or {}) else None
    looked = None
    try:
        ids, unknown = checkpoint.vocabulary.encode(text.tokens[:use])

        def compute() -> float:
            return evaluate_mc(model, ids, mc_masks, seed) if mc_masks else loss_of(model, ids)

        if split == "test":
            looked = LookLog(data_dir).test_loss(
                Look(
                    command=asked_by,
                    file=str(file),
                    sha256=checkpoint.file_sha256,
                    corpus=source.model_dump(mode="json", exclude_none=True),
                    split_sha256=text.sha256,
                    tokens=len(ids) - 1,
                    mc_masks=mc_masks,
                    seed=seed if mc_masks else None,
                ),
                compute,
            )
        loss = compute() if looked is None else looked.loss
    except ValueError as error:
        raise CommandFailed(f"{file} cannot read the {split} split: {error}") from error
    return Evaluation(
        file=str(file),
        split=split,
        tokens=len(ids) - 1,
        unknown=unknown,
        loss=loss,
        recorded_valid_loss=checkpoint.metrics["valid_loss"],
        text_is_the_same=same,
        mc_masks=mc_masks,
        test_look=looked,
    )


def _whose_test_split(sha256: str, trained_on: Mapping[str, str]) -> str | None:
    known = {each.sha256["test"]: name for name, each in PUBLISHED.items()}
    if "test" in trained_on:
        known[trained_on["test"]] = "the training run"
    return known.get(sha256)


def own_corpus(file: Path, checkpoint: BestCheckpoint) -> CorpusSpec:
    """What a checkpoint was trained on. Raises CommandFailed where that is a folder of another machine."""
    source = parse_corpus_spec(checkpoint.config["corpus"])
    if isinstance(source, PathCorpus) and not Path(source.path).is_dir():
        raise CommandFailed(
            f"{file} was trained on the text in {source.path}, which is no folder here: "
            "say where it is with --corpus FOLDER"
        )
    return source


@dataclass(frozen=True)
class GeneratedText:
    words: Iterator[str]
    """Those after the prompt, drawn as they are asked for."""
    unknown: dict[str, str | None]
    """Words of the prompt outside the vocabulary, read as <unk>, and how the vocabulary has them, if it does
    so in lower case."""

    def pieces(self, prompt: str) -> Iterator[str]:
        """The text, prompt first, in pieces to be printed as they come; a line for each sentence."""
        yield prompt
        begun = prompt[-1:] not in {"", "\n"}
        for word in self.words:
            yield "\n" if word == EOS else f" {word}" if begun else word
            begun = word != EOS
        if begun:
            yield "\n"


def generate_text(
    file: Path,
    prompt: str,
    words: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    unk: bool = True,
    seed: int = 0,
    device: str = "cpu",
) -> GeneratedText:
    """Go on from a prompt that stands at the start of a line; one that ends in a newline ends its line.

    Where the vocabulary has no end of a line, the prompt is the beginning of all.

    Raises CommandFailed.
    """
    checkpoint = read_checkpoint(file)
    vocabulary = checkpoint.vocabulary
    model = rebuild(checkpoint).to(usable_device(device))
    try:
        prompt.encode()
        if EOS in vocabulary.index:
            said = [EOS, *prompt.replace("\n", f" {EOS} ").split()]
        elif not (said := prompt.split()):
            raise CommandFailed(
                f"{file} is of a text without ends of lines to begin with: give --prompt WORDS"
            )
        ids, _ = vocabulary.encode(said)
        without = [] if unk else [vocabulary.index[UNK]] if UNK in vocabulary.index else []
    except ValueError as error:
        raise CommandFailed(f"the prompt cannot be read: {error}") from error
    generator = torch.Generator().manual_seed(seed)
    found = generate(
        model, ids.tolist(), words, generator, temperature=temperature, top_k=top_k, without=without
    )
    unknown = {
        word: word.lower() if word.lower() in vocabulary.index else None
        for word in said
        if word not in vocabulary.index
    }

    def drawn() -> Iterator[str]:
        try:
            for each in found:
                yield vocabulary.tokens[each]
        except ValueError as error:
            raise CommandFailed(f"{file}: {error}") from error

    return GeneratedText(drawn(), unknown)


def read_checkpoint(file: Path) -> BestCheckpoint:
    """Raises CommandFailed where it is no checkpoint of ours."""
    try:
        checkpoint = read_best(file)
    except CorruptCheckpoint as error:
        raise CommandFailed(str(error)) from error
    try:
        parse_strictly(_Config, checkpoint.config)
        parse_strictly(_Metrics, checkpoint.metrics)
    except CommandFailed as error:
        raise CommandFailed(
            f"{file} was not written by this program, or by a later version of it: {error}"
        ) from error
    return checkpoint


def check_recorded_loss(result: Evaluation) -> str:
    """Words that the validation loss is the recorded one. Raises CommandFailed where it is not."""
    if math.isclose(result.loss, result.recorded_valid_loss, rel_tol=TOLERANCE):
        recorded = perplexity(result.recorded_valid_loss)
        return f"agrees with the validation perplexity that training recorded, {recorded:.4f}"
    reason = "" if result.text_is_the_same else "; the text is not that of the training run"
    raise CommandFailed(
        f"{result.file} gives a validation loss of {result.loss:.7f}, but training recorded "
        f"{result.recorded_valid_loss:.7f}: they differ by more than {TOLERANCE:g}{reason}"
    )


def rebuild(checkpoint: BestCheckpoint) -> AWDLSTM:
    """The model that a checkpoint holds. Raises CommandFailed where its parts do not fit together."""
    try:
        return rebuilt(checkpoint)
    except CorruptCheckpoint as error:
        raise CommandFailed(str(error)) from error


def train_and_save(
    values: dict[str, Any],
    corpus_values: dict[str, Any],
    seed: int,
    device: str,
    out: Path,
    data_dir: Path,
    *,
    test: bool = False,
) -> None:
    """Train one configuration, save the weights whenever they are the best so far, evaluate what was saved.

    With `test` also by the test split. Raises CommandFailed.
    """
    sections: dict[str, Any] = {"model": {}, "training": {}, "regularization": {}}
    for name in values:
        if name not in sections:
            raise CommandFailed(
                f"/{name}: unknown; a training run has values of corpus, {', '.join(sections)}"
            )
    if test:
        LookLog(data_dir).require_writable()
    config = parse_strictly(TrialConfig, {**sections, **values})
    source = parse_corpus_spec(corpus_values)
    task = _task(config, source, seed, usable_device(device))
    try:
        require_precision(config.training.precision, torch.device(task.device))
    except UnsupportedPrecision as error:
        raise CommandFailed(str(error)) from error
    print(described(task))
    corpus = load(source, data_dir)
    try:
        _train(task, corpus, out)
    except (Diverged, MemoryError) as error:
        raise CommandFailed(str(error)) from error
    _print_evaluations(out, data_dir, device, "train --test" if test else None)


def finetune_and_save(
    file: Path,
    values: dict[str, Any],
    times: int,
    seed: int | None,
    device: str,
    out: Path,
    data_dir: Path,
    *,
    other_corpus: dict[str, Any] | None = None,
    test: bool = False,
) -> None:
    """Fine-tune a checkpoint, `times` in a row, and evaluate the outcome. Raises CommandFailed."""
    if test:
        LookLog(data_dir).require_writable()
    for number in range(1, times + 1):
        print(f"fine-tuning, {number} of {times}")
        finetune_file(file if number == 1 else out, out, values, seed, device, data_dir, other_corpus)
    _print_evaluations(out, data_dir, device, "finetune --test" if test else None)


def finetune_file(
    file: Path,
    out: Path,
    values: dict[str, Any],
    seed: int | None,
    device: str,
    data_dir: Path,
    other_corpus: dict[str, Any] | None = None,
) -> None:
    """Go on from a checkpoint until it converges; what comes out is never worse than what it began with.

    As in the paper (§5.4), that is, in the released AWD-LSTM code: SGD that averages from the first step on,
    with AR and TAR at their defaults there, without fraternal dropout or a relative of it, until the
    non-monotone rule with n = 5 says that it has converged. `values` win over that, and over what the
    checkpoint was trained with. `other_corpus` is where its text lies here. Raises CommandFailed.
    """
    checkpoint = read_checkpoint(file)
    rebuild(checkpoint)  # what does not fit together is found before anything is written
    number = checkpoint.config.get("finetunings", 0) + 1
    start = replace(checkpoint, config={**checkpoint.config, "finetunings": number})
    corpus_spec = own_corpus(file, checkpoint) if other_corpus is None else _moved(checkpoint, other_corpus)
    task = _finetuning(start, values, corpus_spec, seed, usable_device(device))
    print(described(task))
    corpus = load(task.corpus, data_dir)
    if corpus.vocabulary != checkpoint.vocabulary or corpus.sha256 != checkpoint.config["corpus_sha256"]:
        raise CommandFailed(
            f"fine-tuning goes on with the text of the training run, and {_place(task.corpus)} holds "
            f"another, or has changed since {file} was written: restore it, or say where it is with "
            "--corpus FOLDER"
        )
    try:
        _train(task, corpus, out, start)
    except Diverged as error:  # that, too, is an end: what is best so far is there
        print(f"fine-tuning diverged: {error}")
    except MemoryError as error:
        raise CommandFailed(str(error)) from error


def described(task: Task) -> str:
    """Every value that a training run goes by, a line for each section."""
    sections = {
        "corpus": task.corpus.model_dump(mode="json", exclude_none=True),
        **asdict(task.config),
        "run": {"seed": task.seed, "device": task.device},
    }
    return "\n".join(
        f"{section}: " + ", ".join(f"{name}={json.dumps(value)}" for name, value in values.items())
        for section, values in sections.items()
    )


def _place(corpus: CorpusSpec) -> str:
    return corpus.path if isinstance(corpus, PathCorpus) else corpus.name


def _moved(checkpoint: BestCheckpoint, place: dict[str, Any]) -> CorpusSpec:
    """The checkpoint's corpus from another place: what is used of the text stays. Raises CommandFailed."""
    own = checkpoint.config["corpus"]
    where = {"name", "path"}
    options = {name: value for name, value in own.items() if name not in where}
    if others := [name for name in place if name not in where and place[name] != options.get(name)]:
        raise CommandFailed(
            f"fine-tuning uses of the text what training used of it: leave out {', '.join(others)}"
        )
    return parse_corpus_spec({**options, **place})


def _finetuning(
    checkpoint: BestCheckpoint, values: dict[str, Any], corpus: CorpusSpec, seed: int | None, device: str
) -> Task:
    own = {name: checkpoint.config[name] for name in ("model", "training", "regularization")}
    for name, given in values.items():
        if name not in own or not isinstance(given, dict):
            raise CommandFailed(
                f"fine-tuning takes values of {', '.join(own)}, like training.lr; found {name!r}"
            )
    by_the_paper = {
        "training": {"averaging": "from-start", "non_monotone_interval": 5, "lr_schedule": "constant"},
        "regularization": {"regularizer": "none", "kappa": None, "alpha": 2.0, "beta": 1.0},
    }
    parsed: TrialConfig = parse_strictly(TrialConfig, merged(merged(own, by_the_paper), values))
    trained = AWDLSTMConfig(**own["model"])
    if (parsed.model.layer_sizes, parsed.model.tied) != (trained.layer_sizes, trained.tied):
        raise CommandFailed("fine-tuning goes on with the checkpoint's weights: sizes, layers and tied stay")
    seed = (checkpoint.config["seed"] if seed is None else seed) + checkpoint.config["finetunings"]
    return _task(parsed, corpus, seed, device)


def _task(config: TrialConfig, corpus: CorpusSpec, seed: int, device: str) -> Task:
    """A trial of no sweep."""
    return Task("", 0, 1, "", seed, config, corpus, device, recorded_epochs=0)


def usable_device(asked: str) -> str:
    """`auto` takes a GPU where there is one. Raises CommandFailed for what is not there."""
    gpus = torch.cuda.device_count()
    there = ["cpu", *(["cuda"] if gpus else []), *(f"cuda:{number}" for number in range(gpus))]
    if asked == "auto":
        return there[min(1, gpus)]
    if asked not in there:
        raise CommandFailed(f"device {asked!r} cannot be used here; there is: {', '.join(there)}, or auto")
    return asked


def _train(task: Task, corpus: Corpus, out: Path, start: BestCheckpoint | None = None) -> None:
    """Train, from `start` where there is one, and keep in `out` whatever is the best so far.

    Whatever is raised while it trains, Diverged, KeyboardInterrupt or MemoryError, what was kept is said.
    Raises NotEnoughMemory before that, and CommandFailed for too short a text.
    """
    config, sizes = task.config, (len(corpus.vocabulary), corpus.train, corpus.valid)
    weights = start.tensors if start else None
    require_memory(config, len(corpus.vocabulary), task.device)
    try:
        training = Training(
            config.model, config.training, config.regularization, *sizes, task.seed, task.device, weights
        )
    except ValueError as error:
        raise CommandFailed(str(error)) from error
    if start is not None:
        write_best(out, start)
    began, best = time.monotonic(), start.metrics["valid_loss"] if start else math.inf
    kept = "the weights that it began with" if start else None
    try:
        # On a pipe every epoch is a line: there, they are a log.
        with _Interrupts() as interrupts, ProgressDisplay(Console(), pause_s=0) as display:
            display.show(of_training([], config.training.epochs, 0.0))
            for result in training.run(SECONDS_TO_INTERRUPT):
                interrupts.check()
                if result is None:
                    continue
                require_finite(result)
                if result.valid_loss < best:
                    with interrupts.held():  # what is said to be kept is what is there
                        write_best(out, _of_finetuning(best_checkpoint(training, task, corpus), start))
                        best, kept = result.valid_loss, f"the weights of epoch {result.epoch}"
                display.show(of_training(training.history, config.training.epochs, time.monotonic() - began))
    except BaseException as error:
        print(f"{out} keeps {kept}" if kept else "no epoch ended: nothing was saved")
        if isinstance(error, Exception) and is_out_of_memory(error):
            raise MemoryError(
                f"out of memory: lower batch_size, bptt or the sizes of the model ({error})"
            ) from error
        raise


class _Interrupts:
    """Ctrl-C interrupts at once, or, where it is held or Python drops it, at the next check.

    Python drops what a signal raises while an object is being destroyed: here the signal is remembered.
    """

    def __init__(self) -> None:
        self._noted = self._held = False

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = True
        if not self._held:
            raise KeyboardInterrupt

    def check(self) -> None:
        if self._noted:
            raise KeyboardInterrupt

    @contextmanager
    def held(self) -> Iterator[None]:
        """Finish the block first."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
        self.check()


def _of_finetuning(checkpoint: BestCheckpoint, start: BestCheckpoint | None) -> BestCheckpoint:
    """With the seed of the first training and the number of this fine-tuning: each has its own seed."""
    own = {name: start.config[name] for name in ("seed", "finetunings")} if start else {}
    return replace(checkpoint, config={**checkpoint.config, **own})


def _print_evaluations(out: Path, data_dir: Path, device: str, test_asked_by: str | None) -> None:
    """Of the test split only where somebody asked for it."""
    print(evaluate_file(out, "valid", None, data_dir, device=device).line())
    if test_asked_by:
        found = evaluate_file(out, "test", None, data_dir, device=device, asked_by=test_asked_by)
        assert found.test_look is not None
        print(f"{found.line()}\n{found.test_look.line()}")
    print(f"saved: {out}")
