"""`fraternal reproduce`: one table of the paper as one sweep of a service of its own, then what follows it.

Whatever is interrupted goes on when the command is given again: the sweep because the service keeps it, what
is measured afterwards because it is written down one by one.
"""

import hashlib
import json
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import lru_cache, partial
from importlib.metadata import PackageNotFoundError, version
from operator import attrgetter
from pathlib import Path
from typing import Any

from rich.console import Console

from service.client import ApiError, FraternalClient
from service.errors import INTERRUPTED, CommandFailed
from service.launcher import local_capacity
from service.looks import LookLog
from service.progress import duration, follow
from service.reproduction import (
    Curve,
    Measured,
    Reproduction,
    mean_curve,
    plan,
    stages,
    sweep_to_go_on_with,
    table_json,
    table_markdown,
)
from service.resources import placed
from service.running import Interrupted, Signals, print_addresses, running_service
from service.schemas import SweepDetail, TrialView
from service.settings import Settings
from service.texts import load, parse_strictly
from trials.corpora import PUBLISHED, Corpus, PathCorpus, is_url
from trials.files import write_whole
from trials.spec import SweepRequest, SweepSpec
from trials.store import CheckpointStore
from trials.tables import MASK_SAMPLES, SCALES, TABLES, Scale, Table, build_spec

NOT_TRAINED = ("name", "labels", "baseline", "resources", "retry")
"""Fields of a sweep that change no trial's numbers on the same kind of device."""


@dataclass(frozen=True)
class Trained:
    """A sweep that has succeeded, as the service had it."""

    sweep: SweepDetail
    trials: tuple[TrialView, ...]
    curves: tuple[Curve, ...]


def get_table(name: str) -> Table:
    if name not in TABLES:
        raise CommandFailed(f"unknown table {name!r}; known: {', '.join(TABLES)}")
    return TABLES[name]


def get_scale(name: str) -> Scale:
    if name not in SCALES:
        raise CommandFailed(f"unknown scale {name!r}; known: {', '.join(SCALES)}")
    return name


def validated(body: dict[str, Any]) -> SweepSpec:
    """The sweep that this JSON asks for, placed on this machine as the service will. Raises CommandFailed."""
    return placed(parse_strictly(SweepRequest, body), local_capacity())


def labels_of(table: Table, scale: Scale, spec: SweepSpec, corpus: Corpus) -> dict[str, str]:
    """What a sweep is found by again: what it reproduces, and a digest of all that decides its trials.

    Of the corpus that is its text, wherever it lies.
    """
    deciding = spec.model_dump(mode="json", exclude=set(NOT_TRAINED))
    deciding["corpus"] = {**_options(spec), "sha256": dict(corpus.sha256)}
    deciding["on_gpu"] = spec.resources.gpus > 0
    digest = hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()
    return {"reproduces": table.name, "scale": scale, "trials": digest[:16]}


def reproduce(table: Table, scale: Scale, body: dict[str, Any], out: Path, data_dir: Path | None) -> int:
    """Returns the exit code: 0, 1 if the sweep did not succeed, 130 after a signal. Raises CommandFailed."""
    console, started = Console(highlight=False), time.monotonic()
    kept = data_dir or out / "data"
    spec = validated(body)
    corpus = load(spec.corpus, kept)
    labels = labels_of(table, scale, spec, corpus)
    _require_room(out, labels)
    console.print(f"{table.name}, {scale}: {plan(table, spec)}", soft_wrap=True)
    try:
        with Signals() as signals, running_service(kept, signals, console) as client:
            trained = _train(client, {**body, "labels": labels}, table, signals, console)
    except Interrupted:
        console.print("interrupted; the same command goes on from here")
        return INTERRUPTED
    if trained.sweep.state != "succeeded":
        console.print(f"the sweep {trained.sweep.state}: {trained.sweep.state_reason or ''}")
        return 1
    try:
        measured = _measure(table, trained, corpus, out, kept, console)
    except KeyboardInterrupt:
        console.print(
            "interrupted; the same command goes on from here, with a fine-tuning from its beginning"
        )
        return INTERRUPTED
    result = Reproduction(
        table,
        scale,
        trained.sweep.id,
        trained.sweep.finished_at or trained.sweep.state_since,
        trained.sweep.spec.model_copy(update={"baseline": spec.baseline}),
        _name_of(trained.sweep.spec),
        trained.trials,
        measured,
        trained.curves,
        differing(table, trained.sweep.spec, corpus),
    )
    _write(result, manifest(trained, corpus, time.monotonic() - started), out)
    console.print(f"{out / 'table.md'}; {duration(time.monotonic() - started)} in all")
    return 0


def _require_room(out: Path, labels: dict[str, str]) -> None:
    """Raises CommandFailed where another result would be replaced."""
    with suppress(FileNotFoundError):
        there = json.loads((out / "manifest.json").read_text()).get("labels", {})
        if there != labels:
            what = f"{there.get('reproduces')}, {there.get('scale')}"
            raise CommandFailed(
                f"{out} holds another result: {what}, with other values or another text; name another --out"
            )


def differing(table: Table, spec: SweepSpec, corpus: Corpus) -> tuple[str, ...]:
    """In which parts a sweep is not the paper's own."""
    paper = validated(build_spec(table, "paper"))
    parts = ("model", "training", "regularization", "arms", "space", "pruner")
    differ = [part for part in parts if getattr(spec, part) != getattr(paper, part)]
    differ += ["number of draws"] if spec.budget != paper.budget else []
    published = PUBLISHED[_options(paper, "name")["name"]]
    same_text = dict(corpus.sha256) == dict(published.sha256)
    return (*differ, *(["corpus"] if not same_text or _options(spec) != _options(paper) else []))


def _options(spec: SweepSpec, *more: str) -> dict[str, Any]:
    """Of a corpus: what is used of its text, whatever names it."""
    return spec.corpus.model_dump(mode="json", exclude={"name", "path"} - set(more))


# Training.


def _train(
    client: FraternalClient, body: dict[str, Any], table: Table, signals: Signals, console: Console
) -> Trained:
    """Follow the sweep that an earlier run of the command left, or a new one, to its end."""
    found = sweep_to_go_on_with(client.list_sweeps(), body["labels"])
    sweep_id = found.id if found else client.create(body).id
    if found:
        console.print(f"going on with sweep {sweep_id}, {found.state}")
        began_with = client.get(sweep_id).spec
        _require_text_in_place(began_with)
        for line in kept_as_it_began(validated(body), began_with):
            console.print(line, soft_wrap=True)
        if found.state == "paused":
            with suppress(ApiError):  # nothing has failed, or what did would fail again
                client.ask(sweep_id, "retry-failed", {})
            client.ask(sweep_id, "resume")
    print_addresses(client, sweep_id, console)
    stands = follow(client, sweep_id, console, signals.pause, until_paused=True)
    if stands.state == "paused":
        raise CommandFailed(
            f"the sweep is paused: {stands.state_reason or 'somebody asked for it'}\n"
            "Mend the cause and give the command again: it goes on, and tries what failed once more."
        )
    sweep, trials = client.get(sweep_id), tuple(client.trials(sweep_id))
    return Trained(sweep, trials, _curves(client, sweep, trials) if table.curves else ())


def _require_text_in_place(spec: SweepSpec) -> None:
    """What is left to do reads the corpus where it lay when the sweep began. Raises CommandFailed."""
    if not isinstance(spec.corpus, PathCorpus) or is_url(spec.corpus.path):
        return
    if not Path(spec.corpus.path).is_dir():
        raise CommandFailed(
            f"this sweep began with the corpus at {spec.corpus.path}, which is no directory any more: put it "
            "back, or begin again in another --out"
        )


def kept_as_it_began(asked: SweepSpec, began_with: SweepSpec) -> list[str]:
    """What the command asks for, and a sweep that goes on does not take up."""
    return [
        f"{name} stays as the sweep began with it, {getattr(began_with, name)}; "
        "to change it, begin again in another --out"
        for name in ("resources", "retry")
        if getattr(asked, name) != getattr(began_with, name)
    ]


def _curves(client: FraternalClient, sweep: SweepDetail, trials: Sequence[TrialView]) -> tuple[Curve, ...]:
    """The mean over each arm's seeds; where factors are searched, the curve of its best trial."""
    curves = []
    for arm in sweep.spec.arms:
        complete = sorted(
            (one for one in trials if one.arm == arm and _complete(one)), key=attrgetter("rank")
        )
        shown = complete[:1] if sweep.spec.space else complete
        curves.append(mean_curve(arm, [client.trial(sweep.id, one.number).curve for one in shown]))
    return tuple(curves)


def _complete(trial: TrialView) -> bool:
    return trial.state == "COMPLETE" and trial.checkpoint_sha256 is not None


# Measuring.


class Notebook:
    """What has been measured of one sweep's trials: a file, written whole with each measurement."""

    def __init__(self, path: Path) -> None:
        self._path = path
        rows = json.loads(path.read_text())["measured"] if path.exists() else []
        self.measured = [Measured(**row) for row in rows]

    def has(self, number: int, finetunes: int, masks: int, sample: int) -> bool:
        asked = (number, finetunes, masks, sample)
        return any((one.number, one.finetunes, one.masks, one.sample) == asked for one in self.measured)

    def add(self, measured: Measured) -> None:
        self.measured.append(measured)
        rows = [asdict(one) for one in self.measured]
        write_whole(self._path, _json({"measured": rows}))


def _measure(
    table: Table, trained: Trained, corpus: Corpus, out: Path, data_dir: Path, console: Console
) -> tuple[Measured, ...]:
    from service.measure import finetune, load_model, look_at, losses

    notebook = Notebook(out / f"measured-{trained.sweep.id}.json")
    store = CheckpointStore(Settings.model_construct(data_dir=data_dir, store_url=None).resolved_store_url)
    device = "auto" if trained.sweep.spec.resources.gpus else "cpu"
    make = partial(finetune, data_dir=data_dir, device=device)
    load_once = lru_cache(maxsize=1)(load_model)  # several stages in a row are of one checkpoint
    log, looks = LookLog(data_dir), []
    for trial in filter(_complete, trained.trials):
        files = Checkpoints(store, trained.sweep.id, trial.number, out / "checkpoints", make)
        for finetunes, masks, sample in stages(table, trial.arm):
            if notebook.has(trial.number, finetunes, masks, sample):
                continue
            if not sample:
                under = f"{masks} sampled masks" if masks else "mean mask"
                console.print(f"trial {trial.number}, {trial.arm}: fine-tunings {finetunes}, {under}")
            file, seed = files.get(finetunes), trial.seed * MASK_SAMPLES + sample
            look = look_at(file, corpus, trained.sweep.spec.corpus, masks, seed, f"reproduce {table.name}")
            found = losses(load_once(file, corpus, device), corpus, masks, seed, look, log)
            looks.append(found.looked)
            notebook.add(Measured(trial.number, finetunes, masks, found.valid, found.test, sample))
    if looks:
        console.print(
            f"looks at the test split: {len(looks)}, and {looks[0].before} before; logged in {log.path}",
            soft_wrap=True,
        )
    return tuple(notebook.measured)


@dataclass(frozen=True)
class Checkpoints:
    """One trial's best checkpoint, and what fine-tuning made of it, as files of the output folder."""

    store: CheckpointStore
    sweep_id: str
    number: int
    folder: Path
    finetune: Callable[[Path, Path], None]
    """Fine-tunes the first file's model and writes the second."""

    def get(self, finetunes: int) -> Path:
        """The checkpoint after so many fine-tunings; what is not there yet is made."""
        path = self.folder / f"{self.sweep_id}-t{self.number:05d}-finetuned-{finetunes}.tar"
        if not path.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            if finetunes:
                part = path.with_suffix(".unfinished.tar")
                part.unlink(missing_ok=True)
                self.finetune(self.get(finetunes - 1), part)
                part.replace(path)
            else:
                with self.store.open_best(self.sweep_id, self.number) as best:
                    write_whole(path, best.read())
        return path


# Writing.


def manifest(trained: Trained, corpus: Corpus, seconds: float) -> dict[str, Any]:
    """What it takes to do this again."""
    return {
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in ("fraternal", "torch", "ray", "optuna")},
        },
        "corpus": {
            **trained.sweep.spec.corpus.model_dump(mode="json", exclude_none=True),
            "sha256": dict(corpus.sha256),
        },
        "sweep": trained.sweep.id,
        "labels": trained.sweep.labels,
        "seeds": {str(trial.number): trial.seed for trial in trained.trials},
        "devices": sorted({trial.device for trial in trained.trials if trial.device is not None}),
        "runtimes": sorted({trial.runtime for trial in trained.trials if trial.runtime is not None}),
        "spec": trained.sweep.spec.model_dump(mode="json"),
        "seconds": {"sweep": _seconds_of(trained.sweep), "last_command": round(seconds, 1)},
        "date": datetime.now(UTC).date().isoformat(),
    }


def _seconds_of(sweep: SweepDetail) -> float | None:
    """From the sweep's start to its end, pauses between two commands included."""
    if sweep.started_at is None or sweep.finished_at is None:
        return None
    return round((sweep.finished_at - sweep.started_at).total_seconds(), 1)


def _version(distribution: str) -> str | None:
    """None for what runs without being installed, as fraternal itself may from its source tree."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _write(result: Reproduction, described: dict[str, Any], out: Path) -> None:
    write_whole(out / "table.md", table_markdown(result).encode())
    write_whole(out / "table.json", _json(table_json(result)))
    write_whole(out / "manifest.json", _json(described))


def _json(document: dict[str, Any]) -> bytes:
    return (json.dumps(document, indent=2, allow_nan=False) + "\n").encode()


def _name_of(spec: SweepSpec) -> str:
    corpus = spec.corpus.model_dump(mode="json", exclude_none=True)
    name = corpus.pop("name", None) or Path(corpus.pop("path")).name
    parts = ", ".join(f"{option} {value}" for option, value in corpus.items())
    return f"corpus {name}" + (f" ({parts})" if parts else "")
