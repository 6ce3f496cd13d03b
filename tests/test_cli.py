"""The `fraternal` command: what it prints, what it returns, and what it leaves behind."""

import contextlib
import io
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from pydantic import TypeAdapter
from rich.console import Console
from typer.testing import CliRunner, Result

from service.cli import app, parse_corpus, with_overrides
from service.client import ApiError, CorruptDownload, FraternalClient, ServiceUnreachable
from service.launcher import marked_processes
from service.local import _Interrupts
from service.progress import ProgressDisplay, Snapshot, duration, follow, of_sweep, of_training
from tests.databases import environment_of
from tests.played_service import HELD, SPEC, played_service, submit, wait_for, wait_for_an_epoch
from tests.service_process import traces, write_corpus
from trials.attempt import run_attempt
from trials.checkpoints import read_best, write_best
from trials.corpora import EOS, UNK, PathCorpus, Vocabulary
from trials.presets import PRESETS
from trials.spec import TrialConfig
from trials.store import CheckpointStore
from trials.tasks import Task
from trials.training import EpochResult, Training

FRATERNAL = [sys.executable, "-m", "service.cli"]


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with played_service(tmp_path_factory.mktemp("data")) as client:
        yield client


@pytest.fixture(scope="module")
def url(http: httpx.Client) -> str:
    return str(http.base_url).rstrip("/")


@pytest.fixture(scope="module")
def ended(http: httpx.Client) -> str:
    sweep_id = submit(http, name="ended")
    wait_for(http, sweep_id, "succeeded")
    return sweep_id


@pytest.fixture
def client(url: str) -> Iterator[FraternalClient]:
    with FraternalClient(url) as client:
        yield client


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.getcwd(), prepend=os.pathsep)
    monkeypatch.chdir(tmp_path)


def run(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, list(arguments), input=stdin)


def spec_file(**changes: Any) -> str:
    Path("spec.json").write_text(json.dumps({**SPEC, **changes}))
    return "spec.json"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


# Asking a service.


def test_a_submitted_sweep_can_be_watched_to_its_end(url: str) -> None:
    result = run("submit", spec_file(), "--watch", "--url", url)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines()[-1].endswith("succeeded")


def test_a_spec_can_come_from_standard_input(url: str) -> None:
    result = run("submit", "-", "--json", "--url", url, stdin=json.dumps({**SPEC, "name": "piped"}))
    assert json.loads(result.stdout)["spec"]["name"] == "piped"


def test_watching_a_sweep_that_fails_ends_with_one(url: str) -> None:
    result = run("submit", spec_file(arms={"doomed": {"clip": 13}}), "--watch", "--url", url)
    assert result.exit_code == 1
    assert "failed" in result.stdout


def test_json_on_standard_output_is_not_mixed_with_words(url: str) -> None:
    result = run("submit", spec_file(), "--watch", "--json", "--url", url)
    assert json.loads(result.stdout)["state"] == "succeeded"


def test_an_overridden_value_of_a_preset_keeps_its_neighbours(url: str) -> None:
    changes = ["--set", "space.kappa.high=0.2", "--set", "budget.trials=3"]
    result = run("submit", "--preset", "quickstart", "--json", "--url", url, *changes)
    spec = json.loads(result.stdout)["spec"]
    assert spec["space"]["kappa"] == {"type": "uniform", "low": 0.0, "high": 0.2}
    assert set(spec["space"]) == set(PRESETS["quickstart"]["space"])
    assert spec["budget"]["trials"] == 3


def test_a_refused_spec_is_explained_in_the_services_words(url: str) -> None:
    result = run("submit", spec_file(model={"embed_p": -1}), "--url", url)
    assert result.exit_code == 1
    assert "/model/embed_p: Input should be greater than or equal to 0; got -1" in result.stderr
    assert result.stdout == ""


def test_sweeps_are_listed(url: str, ended: str) -> None:
    assert ended in run("ls", "--url", url).stdout
    assert ended in [sweep["id"] for sweep in json.loads(run("ls", "--json", "--url", url).stdout)]


def test_a_report_has_a_row_for_each_arm(url: str, ended: str) -> None:
    arms = json.loads(run("report", ended, "--json", "--url", url).stdout)["arms"]
    assert [(arm["arm"], arm["n"]) for arm in arms] == [("fd", 3), ("eld", 3)]
    assert "| fd | 3 | 3 |" in run("report", ended, "--markdown", "--url", url).stdout
    assert "top-5 mean" in " ".join(run("report", ended, "--url", url).stdout.split())
    assert run("report", ended, "--html", "--url", url).stdout.startswith("<!DOCTYPE html>")
    refused = run("report", ended, "--html", "--json", "--url", url)
    assert refused.exit_code == 1
    assert "give one of --markdown, --html and --json" in refused.stderr


def test_a_fetched_checkpoint_is_the_services_and_replaces_nothing_unasked(
    url: str, http: httpx.Client, ended: str
) -> None:
    fetched = run("fetch", ended, "--url", url)
    assert (fetched.exit_code, "of 1e-06 allowed, on cpu" in fetched.stdout) == (0, True)
    file = Path(f"best-{ended}.tar")
    assert file.read_bytes() == http.get(f"/v1/sweeps/{ended}/best/checkpoint").content
    refused = run("fetch", ended, "--url", url)
    assert (refused.exit_code, "--force" in refused.stderr) == (1, True)
    assert run("fetch", ended, "--force", "--url", url).exit_code == 0


def test_a_sweep_can_be_cancelled_once(url: str, http: httpx.Client) -> None:
    sweep_id = submit(http, name=HELD)
    wait_for_an_epoch(http, sweep_id)
    assert run("cancel", sweep_id, "--url", url).exit_code == 0
    wait_for(http, sweep_id, "cancelled")
    again = run("cancel", sweep_id, "--url", url)
    assert (again.exit_code, "cancelled" in again.stderr) == (1, True)


def test_a_waiting_sweep_can_be_paused_resumed_and_deleted(url: str, http: httpx.Client) -> None:
    held = submit(http, name=HELD)
    wait_for_an_epoch(http, held)
    sweep_id = submit(http)
    try:
        for command, said in (
            ("pause", "is paused"),
            ("resume", "is queued"),
            ("stop", "it cannot stop; legal now: pause, cancel, extend, delete"),
        ):
            result = run(command, sweep_id, "--url", url)
            assert said in result.output
            assert result.exit_code == (1 if "cannot" in said else 0)
        kept = CliRunner().invoke(app, ["delete", sweep_id, "--url", url], input="n\n")
        assert (kept.exit_code, "its 0 trials and their checkpoints?" in kept.output) == (1, True)
        assert run("delete", sweep_id, "--yes", "--url", url).output == f"sweep {sweep_id} is deleting\n"
    finally:
        run("cancel", held, "--url", url)
        wait_for(http, held, "cancelled")


def test_an_ended_sweep_can_be_extended_retried_and_cloned(url: str, http: httpx.Client) -> None:
    sweep_id = submit(http, budget={"trials": 2}, arms={"wild": {"clip": 13}, "tame": {}})
    wait_for(http, sweep_id, "succeeded")
    assert "raises at least one limit" in run("extend", sweep_id, "--url", url).stderr
    assert run("extend", sweep_id, "--trials", "2", "--url", url).exit_code == 0
    assert wait_for(http, sweep_id, "succeeded")["trials"]["complete"] == 2
    refused = run("retry-failed", sweep_id, "--url", url)
    assert (refused.exit_code, "failures: ['diverged']" in refused.stderr) == (1, True)
    assert run("retry-failed", sweep_id, "--class", "diverged", "--url", url).exit_code == 0
    wait_for(http, sweep_id, "succeeded")
    cloned = run("clone", sweep_id, "--set", "budget.trials=1", "--set", "name=again", "--url", url)
    assert cloned.exit_code == 0
    clone = http.get(f"/v1/sweeps/{cloned.stdout.split()[1]}").json()
    assert (clone["spec"]["name"], clone["trials"]["budget"]) == ("again", 1)
    wait_for(http, clone["id"], "failed")


VERBS = ("watch", "report", "cancel", "fetch", "pause", "resume", "stop", "extend", "retry-failed", "clone")


@pytest.mark.parametrize(
    "command", [["ls"], ["delete", "s1", "--yes"], *([verb, "s1"] for verb in VERBS)], ids=" ".join
)
def test_without_a_service_a_command_says_how_to_start_one(command: list[str]) -> None:
    result = run(*command, "--url", f"http://127.0.0.1:{free_port()}")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "start one with `fraternal serve`" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_an_unknown_sweep_is_called_that(url: str) -> None:
    result = run("watch", "s404", "--url", url)
    assert (result.exit_code, "no sweep 's404'" in result.stderr) == (1, True)


@pytest.mark.parametrize("command", [["submit"], ["submit", "a.json", "--preset", "quickstart"], ["sumbit"]])
def test_wrong_usage_ends_with_two(command: list[str]) -> None:
    assert run(*command).exit_code == 2


@pytest.mark.parametrize("written", ["{", "[]", "3"])
def test_a_file_that_holds_no_spec_is_refused(written: str) -> None:
    Path("spec.json").write_text(written)
    result = run("submit", "spec.json")
    assert (result.exit_code, "spec.json" in result.stderr) == (1, True)


def test_a_missing_file_is_named() -> None:
    assert "none.json" in run("submit", "none.json").stderr


def test_overrides_reach_into_what_is_not_there_yet() -> None:
    spec = with_overrides(
        {"model": {"layers": 1}}, ["model.layers=2", "arms.fd.regularizer=fraternal", "name=a=b"]
    )
    assert spec == {"model": {"layers": 2}, "arms": {"fd": {"regularizer": "fraternal"}}, "name": "a=b"}


def test_a_corpus_can_be_named_shown_or_written_out() -> None:
    assert parse_corpus("ptb") == {"name": "ptb"}
    assert parse_corpus("texts/mine") == {"path": "texts/mine"}
    assert parse_corpus('{"name": "sotu", "train_tokens": 9}') == {"name": "sotu", "train_tokens": 9}


@pytest.mark.parametrize(
    "command",
    [
        "serve",
        "submit",
        "ls",
        "watch",
        "report",
        "fetch",
        "cancel",
        "evaluate",
        "train",
        "presets",
        "quickstart",
    ],
)
def test_every_command_explains_itself_with_an_example(command: str) -> None:
    assert f"fraternal {command}" in " ".join(run(command, "-h").stdout.split())


@pytest.mark.parametrize(("given", "expected"), [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")])
def test_threads_do_not_spin_while_they_wait_unless_asked_to(given: dict[str, str], expected: str) -> None:
    code = (
        "import os, sys, service.cli; assert 'torch' not in sys.modules; print(os.environ['OMP_WAIT_POLICY'])"
    )
    clean = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    output = subprocess.check_output([sys.executable, "-c", code], env={**clean, **given}, text=True)
    assert output.strip() == expected


def test_help_loads_neither_torch_nor_the_service() -> None:
    script = (
        "import sys; from typer.testing import CliRunner; from service.cli import app;"
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0;"
        "print(sorted({'torch', 'ray', 'fastapi', 'optuna', 'httpx'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "[]\n"


# The client.


def test_the_client_has_every_answer_as_a_value(client: FraternalClient, ended: str) -> None:
    assert client.get(ended).state == "succeeded"
    assert [trial.number for trial in client.trials(ended)] == list(range(6))
    assert client.best(ended) == client.trials(ended)[5]
    assert len(client.trial(ended, 0).curve) == 3
    assert client.check_ready().status == "ready"


def test_the_client_raises_the_services_problem(client: FraternalClient) -> None:
    with pytest.raises(ApiError, match="no sweep 's404'") as caught:
        client.get("s404")
    assert (caught.value.status, caught.value.code) == (404, "sweep_not_found")


def test_a_service_that_is_no_fraternal_one_is_not_believed(tmp_path: Path) -> None:
    with (
        subprocess.Popen(
            [sys.executable, "-u", "-m", "http.server", "--bind", "127.0.0.1", "0"],
            stdout=subprocess.PIPE,
            text=True,
        ) as server,
        FraternalClient(f"http://127.0.0.1:{server.stdout.readline().split()[5]}") as client,  # type: ignore[union-attr]
    ):
        try:
            with pytest.raises(ApiError, match="not as a fraternal service does"):
                client.list_sweeps()
        finally:
            server.kill()


@pytest.mark.parametrize("damage", ["flipped", "cut"])
def test_a_damaged_download_leaves_nothing_behind(
    client: FraternalClient, ended: str, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    def chunks(self: httpx.Response) -> Iterator[bytes]:
        whole = b"".join(original(self))
        yield whole[:-1] if damage == "cut" else whole[:-1] + bytes([whole[-1] ^ 1])

    original = httpx.Response.iter_raw
    monkeypatch.setattr(httpx.Response, "iter_raw", chunks)
    kept = Path("best.tar")
    kept.write_text("an older checkpoint")
    with pytest.raises(CorruptDownload, match="damaged"):
        client.fetch(ended, kept)
    assert [(file.name, file.read_text()) for file in Path().iterdir()] == [
        ("best.tar", "an older checkpoint")
    ]


def test_a_watcher_waits_for_a_service_that_comes_back(client: FraternalClient, ended: str) -> None:
    answers = iter([client.get(ended).model_copy(update={"state": "running"}), None, None, client.get(ended)])

    class Restarted(FraternalClient):
        def get(self, sweep_id: str) -> Any:
            answer = next(answers)
            if answer is None:
                raise ServiceUnreachable("gone")
            return answer

    with Restarted(client.base_url) as restarted:
        assert follow(restarted, ended, console(), pause=lambda _: None).state == "succeeded"


def test_a_watcher_is_told_once_why_a_sweep_is_paused_and_watches_on(
    client: FraternalClient, ended: str
) -> None:
    whole = client.get(ended)
    paused = whole.model_copy(update={"state": "paused", "state_reason": "3 trials in a row failed alike"})
    answers = iter([paused, paused, whole])

    class Paused(FraternalClient):
        def get(self, sweep_id: str) -> Any:
            return next(answers)

    out = console()
    with Paused(client.base_url) as service:
        assert follow(service, ended, out, pause=lambda _: None).state == "succeeded"
        assert out.export_text().count("failed alike") == 1
        answers = iter([paused])
        assert follow(service, ended, out, pause=lambda _: None, until_paused=True).state == "paused"


# Progress.


def console(terminal: bool = False) -> Console:
    return Console(record=True, force_terminal=terminal, width=100, file=io.StringIO())


def snapshot(done: int, elapsed_s: float = 0.0) -> Snapshot:
    return Snapshot("sweep running", done, 6, "trials", ("1 running",), elapsed_s, None)


def test_on_a_pipe_a_line_is_printed_for_a_change_and_at_most_every_five_seconds() -> None:
    now = 0.0
    out = console()
    with ProgressDisplay(out, clock=lambda: now) as display:
        for now, done in [(0.0, 0), (1.0, 1), (5.0, 2), (11.0, 2), (12.0, 3), (13.0, 4)]:
            display.show(snapshot(done, elapsed_s=now))
    lines = out.export_text().splitlines()
    assert [line.split(" · ")[1] for line in lines] == [
        "0/6 trials",
        "2/6 trials",
        "3/6 trials",
        "4/6 trials",
    ]


def test_on_a_terminal_the_numbers_are_drawn_in_place() -> None:
    out = console(terminal=True)
    with ProgressDisplay(out) as display:
        for done in range(4):
            display.show(snapshot(done))
    assert "3/6 trials" in out.export_text(styles=True)


def test_a_sweeps_progress_names_what_is_asked_of_it(client: FraternalClient, ended: str) -> None:
    line = of_sweep(client.get(ended)).line()
    for words in (
        "6/6 trials",
        "6 complete",
        "0 pruned",
        "0 failed",
        "18 epochs",
        "best 85.63 (trial 5, eld)",
    ):
        assert words in line


def test_training_expects_the_epochs_to_come_to_take_as_long_as_those_before() -> None:
    class Epoch:
        def __init__(self, epoch: int, valid_perplexity: float) -> None:
            self.epoch, self.valid_perplexity, self.train_loss = epoch, valid_perplexity, 4.0

    progress = of_training([Epoch(1, 90.0), Epoch(2, 95.0)], total=6, elapsed_s=10.0)
    assert progress.time_left_s == 20.0
    assert "best 90.00 (epoch 1)" in progress.facts
    assert of_training([], total=6, elapsed_s=0.0).time_left_s is None


@pytest.mark.parametrize(("seconds", "written"), [(0, "0:00"), (65, "1:05"), (7265, "2:01:05")])
def test_durations_read_like_a_clock(seconds: float, written: str) -> None:
    assert duration(seconds) == written


# Serving.


@pytest.fixture
def served() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*FRATERNAL, "serve", "--port", "0", "--data-dir", "served"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment_of(Path("served"))},
    )
    yield process
    process.kill()
    process.communicate()


@pytest.mark.parametrize(("how", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0), (signal.SIGHUP, 0)])
def test_a_service_says_where_it_is_and_ends_in_order_when_told_to(
    served: subprocess.Popen[str], how: signal.Signals, code: int
) -> None:
    assert served.stdout is not None
    addresses = [served.stdout.readline().split()[-1] for _ in range(4)]
    for address in addresses:
        assert httpx.get(address, trust_env=False).status_code == 200
    served.send_signal(how)
    assert "drivers" in served.communicate(timeout=30)[0]
    assert served.returncode == code


def test_a_second_service_on_the_same_data_is_refused(served: subprocess.Popen[str]) -> None:
    assert served.stdout is not None
    served.stdout.readline()
    second = subprocess.run(
        [*FRATERNAL, "serve", "--port", "0", "--data-dir", "served"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment_of(Path("served"))},
    )
    assert second.returncode == 1
    assert f"in use by the service with process id {served.pid}" in second.stderr


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = run("serve", "--port", str(port), "--data-dir", "data")
    assert result.exit_code == 1
    assert f"cannot listen on 127.0.0.1 port {port}" in result.stderr


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--database-url", "postgresql://me:secret@db/x", "FRATERNAL_DATABASE_URL"),
        ("--database-url", "nonsense", "sqlite:///"),
        ("--host", "0.0.0.0", "not loopback"),
    ],
)
def test_settings_that_would_do_harm_are_refused(option: str, value: str, words: str) -> None:
    result = run("serve", "--data-dir", "data", option, value)
    assert result.exit_code == 1
    assert words in result.stderr
    assert "secret" not in result.stderr
    assert not Path("data").exists()


# Plots.


def test_a_sweep_is_plotted(ended: str, url: str) -> None:
    result = run("plot", ended, "--url", url)
    assert (result.exit_code, result.stdout) == (0, f"{ended}.svg\n")
    assert "mean hidden activation" in Path(f"{ended}.svg").read_text()
    refused = run("plot", ended, "--url", url)
    assert (refused.exit_code, "--force" in refused.stderr) == (1, True)


# Training and evaluating without a service.

SMALL = [
    *["--epochs", "2", "--batch-size", "4", "--bptt", "15", "--seed", "3"],
    *["--embedding-size", "16", "--hidden-size", "16", "--layers", "1"],
]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("text"), tokens=3_000)


@pytest.fixture(scope="module")
def trained(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("trained") / "best.tar"
    result = run("train", "--corpus", str(text), "--regularizer", "fraternal", "--out", str(file), *SMALL)
    assert result.exit_code == 0, result.stderr
    assert "valid: perplexity" in result.stdout
    return file


def test_a_trained_checkpoint_is_evaluated_from_the_file_alone(trained: Path) -> None:
    result = run("evaluate", str(trained), "--check")
    assert result.exit_code == 0, result.stderr
    assert "agrees" in result.stdout


def test_what_a_sweeps_trial_saves_is_what_train_saves_and_evaluate_accepts_it(trained: Path) -> None:
    saved = read_best(trained).config
    config = TypeAdapter(TrialConfig).validate_python(
        {section: saved[section] for section in ("model", "training", "regularization")}
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    corpus = PathCorpus.model_validate(saved["corpus"])
    store = CheckpointStore(Path("store").resolve().as_uri())
    list(run_attempt(Task("s1", 0, 1, "fd", saved["seed"], config, corpus, device, 0), store, Path("data")))
    with store.open_best("s1", 0) as file:
        Path("trial.tar").write_bytes(file.read())
    assert Path("trial.tar").read_bytes() == trained.read_bytes()
    result = run("evaluate", "trial.tar", "--check")
    assert (result.exit_code, "agrees" in result.stdout) == (0, True)


def test_a_checkpoint_whose_text_has_changed_does_not_agree(trained: Path, text: Path) -> None:
    other = Path("other")
    other.mkdir()
    for split in ("train", "valid", "test"):
        words = (text / f"{split}.txt").read_text().split()
        (other / f"{split}.txt").write_text(" ".join(reversed(words)))
    result = run("evaluate", str(trained), "--check", "--corpus", str(other))
    assert (result.exit_code, "the text is not that of the training run" in result.stderr) == (1, True)


def write_text(directory: str, train: str, other: str) -> str:
    Path(directory).mkdir()
    for split, words in (("train", train), ("valid", other), ("test", other)):
        (Path(directory) / f"{split}.txt").write_text(words + "\n")
    return directory


def test_what_is_a_word_is_decided_by_the_checkpoints_vocabulary(trained: Path) -> None:
    other = write_text("other", train="w00 w01", other="w05 w06 w07")
    result = run("evaluate", str(trained), "--corpus", other, "--json")
    assert result.exit_code == 0, result.stderr
    assert (json.loads(result.stdout)["tokens"], json.loads(result.stdout)["unknown"]) == (3, 0)


def test_a_word_that_the_checkpoint_does_not_know_is_refused_where_it_has_no_unknown_word(
    trained: Path,
) -> None:
    result = run("evaluate", str(trained), "--corpus", write_text("other", "w00", "w00 unheard-of w01"))
    assert (result.exit_code, "unheard-of" in result.stderr) == (1, True)


def test_words_that_the_checkpoint_does_not_know_are_counted_and_said_where_it_has_an_unknown_word(
    trained: Path,
) -> None:
    given = read_best(trained)
    words = tuple("<unk>" if word == "w59" else word for word in given.vocabulary.tokens)
    write_best(Path("unk.tar"), replace(given, vocabulary=Vocabulary(words)))
    other = write_text("other", "w00", "w00 unheard-of w59 <unk> w01")
    result = run("evaluate", "unk.tar", "--corpus", other, "--json")
    assert result.exit_code == 0, result.stderr
    assert (json.loads(result.stdout)["tokens"], json.loads(result.stdout)["unknown"]) == (5, 2)
    assert "2 of them outside the vocabulary" in run("evaluate", "unk.tar", "--corpus", other).stdout


def test_the_loss_of_a_split_is_printed_for_programs(trained: Path) -> None:
    document = json.loads(run("evaluate", str(trained), "--split", "valid", "--json").stdout)
    assert document["loss"] == pytest.approx(document["recorded_valid_loss"], rel=1e-5)
    assert document["tokens"] == 1_000 + 50 - 1


def test_a_damaged_checkpoint_is_refused_without_a_traceback(trained: Path) -> None:
    damaged = Path("damaged.tar")
    content = bytearray(trained.read_bytes())
    content[len(content) // 3] ^= 1
    damaged.write_bytes(content)
    result = run("evaluate", str(damaged))
    assert (result.exit_code, len(result.stderr.splitlines())) == (1, 1)


def test_an_existing_checkpoint_is_not_replaced_unasked(trained: Path, text: Path) -> None:
    before = trained.read_bytes()
    result = run("train", "--corpus", str(text), "--out", str(trained), *SMALL)
    assert (result.exit_code, "--force" in result.stderr) == (1, True)
    assert trained.read_bytes() == before


def test_equal_configurations_train_to_equal_files(trained: Path, text: Path) -> None:
    run(
        "train",
        "--corpus",
        str(text),
        "--out",
        "again.tar",
        *SMALL,
        "--set",
        "regularization.regularizer=fraternal",
    )
    assert Path("again.tar").read_bytes() == trained.read_bytes()


def test_training_from_a_preset_says_every_value_and_what_is_given_wins(text: Path) -> None:
    result = run(
        *["train", "--preset", "quickstart", "--arm", "eld", "--corpus", str(text), "--epochs", "1"],
        *["--batch-size", "4", "--set", "model.embed_p=0.25", "--out", "preset.tar"],
    )
    assert result.exit_code == 0, result.stderr
    said = result.stdout
    for value in (
        'regularizer="expectation_linear"',
        "embedding_size=64",
        "bptt=35",
        "epochs=1,",
        "embed_p=0.25",
        "clip=0.25",
        str(text),
    ):
        assert value in said


@pytest.mark.parametrize(
    ("preset", "given", "expected"),
    [
        ("ablation-ptb", ["--arm", "fd"], ("fraternal", 0.15, 0.0)),
        ("ablation-ptb", ["--arm", "fd", "--kappa", "0.3"], ("fraternal", 0.3, 0.0)),
        ("fraternal-ptb", [], ("fraternal", 0.1, 0.0)),
        ("awd-lstm-ptb", [], ("none", 0.0, 2.0)),
    ],
)
def test_one_arm_of_a_preset_is_trained(
    text: Path, preset: str, given: list[str], expected: tuple[str, float, float]
) -> None:
    small = ["--embedding-size", "8", "--hidden-size", "8", "--epochs", "1", "--batch-size", "2"]
    result = run("train", "--preset", preset, *given, "--corpus", str(text), *small)
    assert result.exit_code == 0, result.stderr
    regularization = read("best.tar", "config.json")["regularization"]
    assert tuple(regularization[name] for name in ("regularizer", "kappa", "alpha")) == expected


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--preset", "ablation-ptb"], "has several arms: give --arm baseline or pi or"),
        (["--preset", "ablation-ptb", "--arm", "fdd"], "has no arm 'fdd': give --arm baseline or"),
        (["--corpus", "sotu", "--arm", "fd"], "give --preset"),
    ],
)
def test_an_arm_that_is_not_clear_is_asked_for(given: list[str], words: str) -> None:
    result = run("train", *given)
    assert (result.exit_code, words in " ".join(result.stderr.replace("│", " ").split())) == (2, True)


@pytest.mark.parametrize(
    ("given", "code", "words"),
    [
        (["corpus", '{"nam": "sotu"}'], 1, "/corpus: a corpus has either a name"),
        (["corpus", "{bad"], 2, "corpus '{bad' is no JSON object"),
        (["corpus", '{"name": "sotu", "train_tokens": "50"}'], 1, "/corpus/train_tokens: Input should be"),
        (["train", "--corpus", "sotu", "--set", "corpus.train_tokens=1"], 1, "/corpus/train_tokens: Input"),
        (["train", "--corpus", "sotu", "--set", "foo=1"], 1, "/foo: unknown; a training run has values of"),
        (["evaluate", "best.tar", "--check", "--split", "test"], 2, "leave out --split test"),
        (["evaluate", "folder"], 1, "folder: Is a directory"),
    ],
)
def test_an_error_names_the_field_as_it_was_given(given: list[str], code: int, words: str) -> None:
    Path("folder").mkdir()
    result = run(*given)
    assert (result.exit_code, words in " ".join(result.stderr.replace("│", " ").split())) == (code, True)


def test_a_digest_is_never_cut_whatever_the_width(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = [split["sha256"] for split in json.loads(run("corpus", str(text), "--json").stdout)["splits"]]
    for columns in ("80", "40"):
        monkeypatch.setenv("COLUMNS", columns)
        shown = run("corpus", str(text)).stdout.replace("\n", "")
        assert all(digest in shown for digest in digests)


def test_every_epoch_of_a_training_is_a_line_of_its_log(text: Path) -> None:
    shown = run("train", "--corpus", str(text), *SMALL, "--epochs", "4").stdout
    assert re.findall(r"^training · (\d)/4", shown, re.MULTILINE) == ["0", "1", "2", "3", "4"]
    assert "run: seed=3, device=" in shown


def test_training_needs_a_text_from_somewhere() -> None:
    assert run("train", "--epochs", "1").exit_code == 2


def test_presets_are_listed_and_shown_with_their_sources() -> None:
    assert [row["name"] for row in json.loads(run("presets", "--json").stdout)] == list(PRESETS)
    rows = {row["field"]: row for row in json.loads(run("presets", "fraternal-ptb", "--json").stdout)}
    assert rows["model.hidden_p"]["value"] == 0.25
    assert "0.3" in rows["model.hidden_p"]["source"]
    assert "fraternal-wt2" in run("presets").stdout
    assert "known: ablation-ptb" in run("presets", "papers").stderr


@pytest.mark.parametrize("out", ["folder", "file/best.tar", "/proc/best.tar"])
def test_where_nothing_can_be_written_is_found_before_anything_is_trained(text: Path, out: str) -> None:
    Path("folder").mkdir()
    Path("file").touch()
    result = run("train", "--corpus", str(text), *SMALL, "--out", out, "--force")
    assert (result.exit_code, "epoch" in result.stdout) == (1, False)
    assert f"{out} is a folder; name" in result.stderr or f"{out} cannot be written" in result.stderr
    assert sorted(path.name for path in Path().iterdir()) == ["file", "folder"]


def test_a_kappa_of_zero_is_zero(text: Path) -> None:
    run(
        "train",
        "--corpus",
        str(text),
        "--out",
        "zero.tar",
        "--regularizer",
        "fraternal",
        "--kappa",
        "0",
        *SMALL,
    )
    with tarfile.open("zero.tar") as archive:
        config = archive.extractfile("config.json")
        assert config is not None
        assert json.load(config)["regularization"]["kappa"] == 0


ALTERED: dict[str, dict[str, Any]] = {
    "no model": {"model": None},
    "a model that is no object": {"model": "awd-lstm"},
    "an unknown field of the model": {"model": {"colour": "red"}},
    "a rate beyond 1": {"model": {"embed_p": 1.5}},
    "sizes of another model": {"model": {"hidden_size": 17, "embedding_size": 15}},
    "a seed in words": {"seed": "three"},
    "a list of digests": {"corpus_sha256": ["a"]},
    "a corpus of no kind": {"corpus": {"nam": "sotu"}},
    "fine-tunings in words": {"finetunings": "two"},
}


@pytest.mark.parametrize("command", [["evaluate"], ["finetune"], ["generate", "--words", "1"]])
@pytest.mark.parametrize("change", ALTERED.values(), ids=ALTERED)
def test_what_a_checkpoint_says_of_itself_is_checked_by_every_command(
    trained: Path, change: dict[str, Any], command: list[str]
) -> None:
    checkpoint = read_best(trained)
    ((name, value),) = change.items()
    if name == "model" and isinstance(value, dict):
        value = {**checkpoint.config["model"], **value}
    write_best(Path("altered.tar"), replace(checkpoint, config={**checkpoint.config, name: value}))
    assert_refused(command)


@pytest.mark.parametrize(
    "command", [["evaluate", "--check"], ["evaluate", "--json"], ["finetune"], ["generate"]]
)
def test_weights_and_metrics_that_are_no_numbers_are_refused(trained: Path, command: list[str]) -> None:
    checkpoint = read_best(trained)
    broken = {name: torch.full_like(tensor, math.nan) for name, tensor in checkpoint.tensors.items()}
    more = {**checkpoint.tensors, "more": torch.zeros(1)}
    for altered in (
        replace(checkpoint, tensors=broken),
        replace(checkpoint, tensors=more),
        replace(checkpoint, metrics={**checkpoint.metrics, "valid_loss": None}),
        replace(checkpoint, metrics=[]),
        replace(checkpoint, config=5),  # type: ignore[arg-type]
    ):
        write_best(Path("altered.tar"), altered)
        assert_refused(command)


def assert_refused(command: list[str]) -> None:
    """In words, and with nothing written."""
    result = run(command[0], "altered.tar", *command[1:])
    assert (result.exit_code, type(result.exception)) == (1, SystemExit), result.exception
    assert result.stderr.startswith("fraternal: ")
    assert not result.stderr.rstrip().endswith(":"), "something is said after the colon"
    assert not Path("finetuned.tar").exists()


def test_a_checkpoint_that_says_it_is_huge_is_refused_before_it_takes_memory(trained: Path) -> None:
    checkpoint = read_best(trained)
    for change in ({"layers": 100}, {"hidden_size": 10**9, "embedding_size": 10**9}, {"tied": False}):
        config = {**checkpoint.config, "model": {**checkpoint.config["model"], **change}}
        write_best(Path("huge.tar"), replace(checkpoint, config=config))
        result = run("evaluate", "huge.tar")
        assert (result.exit_code, "do not fit together" in result.stderr) == (1, True)


def test_running_out_of_memory_says_what_is_kept_and_what_to_lower(
    text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_epoch = Training._end_epoch

    def out_of_memory_later(self: Training, *args: Any) -> EpochResult:
        if len(self.history) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        return end_epoch(self, *args)

    monkeypatch.setattr(Training, "_end_epoch", out_of_memory_later)
    result = run("train", "--corpus", str(text), *SMALL, "--epochs", "3")
    assert (result.exit_code, "lower batch_size, bptt" in result.stderr) == (1, True)
    assert "best.tar keeps the weights of epoch" in result.stdout


def test_a_bug_is_not_mistaken_for_bad_input(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Training, *args: Any) -> EpochResult:
        raise ValueError("a bug")

    monkeypatch.setattr(Training, "_end_epoch", broken)
    result = run("train", "--corpus", str(text), *SMALL, "--epochs", "1")
    assert isinstance(result.exception, ValueError)


def test_what_is_kept_are_the_weights_of_the_best_epoch(text: Path) -> None:
    worsening = ["--set", "training.lr=300", "--set", "training.averaging=none", "--epochs", "6"]
    for seed in range(20):  # the first one whose last epoch is not the best
        chosen = ["--seed", str(seed), "--out", f"{seed}.tar"]
        result = run("train", "--corpus", str(text), *SMALL, *worsening, *chosen)
        best = re.findall(r"best .* \(epoch (\d)\)", result.stdout)[-1]
        if best != "6":
            break
    assert read(f"{seed}.tar", "metrics.json")["epoch"] == int(best) < 6


def read(file: Path | str, name: str) -> dict[str, Any]:
    """A JSON file of a checkpoint."""
    with tarfile.open(file) as archive:
        member = archive.extractfile(name)
        assert member is not None
        document: dict[str, Any] = json.load(member)
        return document


def valid_loss(file: Path | str) -> float:
    return float(json.loads(run("evaluate", str(file), "--split", "valid", "--json").stdout)["loss"])


def test_fine_tuning_leaves_the_original_and_ends_no_worse_with_its_result(trained: Path) -> None:
    before = trained.read_bytes()
    result = run("finetune", str(trained), "--out", "finetuned.tar", "--times", "2")
    assert result.exit_code == 0, result.stderr
    assert "fine-tuning, 2 of 2" in result.stdout
    assert "valid: perplexity" in result.stdout
    assert trained.read_bytes() == before
    assert valid_loss("finetuned.tar") < valid_loss(trained)
    assert read("finetuned.tar", "metrics.json")["averaged"]
    config = read("finetuned.tar", "config.json")
    assert (config["training"]["averaging"], config["training"]["non_monotone_interval"]) == ("from-start", 5)
    kept = {name: config["regularization"][name] for name in ("regularizer", "alpha", "beta")}
    assert kept == {"regularizer": "none", "alpha": 2.0, "beta": 1.0}, (
        "the released code's, as the paper says"
    )
    assert 'regularization: regularizer="none", kappa=0.0, alpha=2.0, beta=1.0' in result.stdout
    assert config["finetunings"] == 2
    assert run("evaluate", "finetuned.tar", "--check").exit_code == 0


def test_fine_tuning_has_a_constant_rate_and_no_penalty_whatever_it_begins_with(trained: Path) -> None:
    given = read_best(trained)
    plateau = {**given.config, "training": {**given.config["training"], "lr_schedule": "plateau"}}
    write_best(Path("plateau.tar"), replace(given, config=plateau))
    assert run("finetune", "plateau.tar", "--set", "training.epochs=1").exit_code == 0
    config = read("finetuned.tar", "config.json")
    assert config["training"]["averaging"] == "from-start", "it has become better"
    assert config["training"]["lr_schedule"] == "constant"
    assert given.config["regularization"]["kappa"] > 0
    assert config["regularization"]["kappa"] == 0


def test_fine_tuning_that_converges_before_its_last_epoch_ends_with_success_and_its_result(
    trained: Path,
) -> None:
    """Weight decay alone: the loss rises, and with n = 0 that is convergence."""
    rising = ["--set", "training.lr=1e-30", "--set", "training.weight_decay=1e28"]
    patient = ["--set", "training.non_monotone_interval=0", "--set", "training.epochs=50"]
    result = run("finetune", str(trained), *rising, *patient)
    assert result.exit_code == 0, result.stderr
    assert "valid: perplexity" in result.stdout
    assert max(map(int, re.findall(r"epoch (\d+)", result.stdout))) < 50


def test_each_fine_tuning_has_a_seed_of_its_own_be_the_one_before_it_in_vain(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[int] = []

    def recording(*arguments: Any) -> Training:
        seeds.append(arguments[6])
        return Training(*arguments)

    monkeypatch.setattr("service.local.Training", recording)
    vain = ["--set", "training.lr=1e-30", "--set", "training.weight_decay=1e28", "--set", "training.epochs=1"]
    assert run("finetune", str(trained), "--out", "first.tar", *vain).exit_code == 0
    assert run("finetune", "first.tar", "--out", "second.tar", *vain).exit_code == 0
    config = read("second.tar", "config.json")
    assert (config["seed"], config["finetunings"]) == (read(trained, "config.json")["seed"], 2)
    assert seeds == [config["seed"] + 1, config["seed"] + 2]


def test_what_is_given_wins_over_the_papers_way_of_fine_tuning(trained: Path) -> None:
    given = ["--set", "regularization.alpha=0", "--set", "training.epochs=1"]
    assert run("finetune", str(trained), *given).exit_code == 0
    config = read("finetuned.tar", "config.json")
    assert (config["regularization"]["alpha"], config["regularization"]["beta"]) == (0.0, 1.0)


def test_fine_tuning_that_diverges_keeps_what_it_began_with(trained: Path) -> None:
    result = run("finetune", str(trained), "--set", "training.lr=1e38")
    assert (result.exit_code, "fine-tuning diverged: the loss is" in result.stdout) == (0, True)
    assert valid_loss("finetuned.tar") == valid_loss(trained)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.layers=2", "sizes, layers and tied stay"),
        ("model.tied=false", "sizes, layers and tied stay"),
        ("training=3", "found 'training'"),
        ("epochs=9", "found 'epochs'"),
        ("trainng.epochs=9", "found 'trainng'"),
        ("training.epoch=9", "unknown field 'epoch'"),
        ("training.batch_size=50000", "too short for batch_size"),
    ],
)
def test_fine_tuning_that_cannot_be_done_is_refused_and_leaves_nothing(
    trained: Path, override: str, words: str
) -> None:
    result = run("finetune", str(trained), "--set", override)
    assert (result.exit_code, words in result.stderr) == (1, True)
    assert not Path("finetuned.tar").exists()


def test_fine_tuning_that_finds_nothing_better_keeps_what_it_began_with(trained: Path) -> None:
    ruinous = [
        "--set",
        "training.lr=1e-30",
        "--set",
        "training.weight_decay=1e28",
        "--set",
        "training.epochs=3",
    ]
    result = run("finetune", str(trained), *ruinous)
    assert result.exit_code == 0, result.stderr
    assert valid_loss("finetuned.tar") == valid_loss(trained)


def test_a_checkpoint_whose_text_has_changed_is_not_fine_tuned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = write_corpus(tmp_path / "own", tokens=3_000)
    assert run("train", "--corpus", str(corpus), "--out", "own.tar", *SMALL, "--epochs", "1").exit_code == 0
    (corpus / "train.txt").write_text("w01 w00 " * 900)
    result = run("finetune", "own.tar")
    assert (result.exit_code, "has changed since own.tar" in result.stderr) == (1, True)
    assert not Path("finetuned.tar").exists()


def test_a_checkpoint_writes_text_after_a_prompt(text: Path) -> None:
    capped = json.dumps({"path": str(text), "vocabulary_size": 20})
    assert run("train", "--corpus", capped, *SMALL, "--epochs", "1").exit_code == 0
    vocabulary = read_best(Path("best.tar")).vocabulary.tokens
    known = next(token for token in vocabulary if token not in {EOS, UNK})
    asked = ["generate", "best.tar", "--prompt", f"{known} nowhere", "--words", "40"]
    result = run(*asked, "--json")
    assert result.exit_code == 0, result.stderr
    assert "not in the vocabulary, so read as <unk>: nowhere" in result.stderr
    written = json.loads(result.stdout)
    assert (len(written["words"]), written["unknown"]) == (40, ["nowhere"])
    assert set(written["words"]) <= set(vocabulary)
    lines = run(*asked).stdout
    assert lines.split() == [known, "nowhere", *(word for word in written["words"] if word != EOS)]
    assert run(*asked, "--seed", "1").stdout != lines
    assert UNK not in run(*asked, "--no-unk", "--temperature", "9").stdout.split()
    assert run(*asked, "--temperature", "0").stdout == run(*asked, "--top-k", "1").stdout


@pytest.mark.parametrize(
    ("given", "code", "words"),
    [
        (["--prompt", "w01 nowhere"], 1, "neither 'nowhere' nor <unk>; leave the word out"),
        (["--temperature", "-1"], 2, "temperature"),
        (["--temperature", "nan"], 2, "--temperature"),
        (["--temperature", "inf"], 2, "a temperature is a number; found inf"),
        (["--words", "0"], 2, "words"),
        (["--top-k", "0"], 2, "top-k"),
        (["--device", "cuda:99"], 1, "cannot be used here"),
    ],
)
def test_text_that_cannot_be_written_is_refused(
    trained: Path, given: list[str], code: int, words: str
) -> None:
    result = run("generate", str(trained), *given)
    assert (result.exit_code, words in " ".join(result.stderr.replace("│", " ").split())) == (code, True)


def test_mc_evaluation_is_worse_with_one_sample_of_the_masks_than_with_many(trained: Path) -> None:
    one, many = (
        json.loads(run("evaluate", str(trained), "--mc", masks, "--json").stdout) for masks in ("1", "20")
    )
    assert (one["mc_masks"], many["mc_masks"]) == (1, 20)
    assert one["loss"] > many["loss"]
    assert "valid, MC2: perplexity" in run("evaluate", str(trained), "--mc", "2").stdout


def test_mc_evaluation_cannot_be_checked_against_the_recorded_loss(trained: Path) -> None:
    result = run("evaluate", str(trained), "--mc", "2", "--check")
    assert (result.exit_code, "--check compares" in result.stderr) == (2, True)


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "cpu:1", ""])
@pytest.mark.parametrize("command", ["train", "evaluate", "finetune"])
def test_a_device_that_is_not_there_is_refused_before_anything_runs(
    trained: Path, text: Path, command: str, device: str
) -> None:
    arguments = ["--corpus", str(text), *SMALL] if command == "train" else [str(trained)]
    result = run(command, *arguments, "--device", device)
    assert result.exit_code == 1
    assert f"device {device!r} cannot be used here; there is: cpu" in result.stderr
    assert not list(Path().glob("*.tar"))


def test_the_words_of_a_corpus_are_counted() -> None:
    corpus = write_text("other", train="a a b <unk>", other="a c <unk> d d")
    facts = json.loads(run("corpus", corpus, "--json").stdout)
    assert facts["vocabulary_size"] == 4
    train, valid, _ = facts["splits"]
    assert (train["tokens"], train["types"], train["unk_tokens"], train["unknown_tokens"]) == (5, 4, 1, 0)
    assert (valid["tokens"], valid["types"], valid["unk_tokens"], valid["unknown_tokens"]) == (6, 3, 4, 3)
    assert valid["unk_share"] == pytest.approx(4 / 6)
    assert "66.67%" in run("corpus", corpus).stdout


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--kappa", "-1", "/regularization/kappa"),
        ("--regularizer", "dropout", "known: expectation_linear"),
        ("--set", "training.epoch=3", "unknown field 'epoch'"),
        ("--set", "training.epochs=true", "/training/epochs"),
        ("--batch-size", "50000", "too short for batch_size"),
        ("--corpus", "nowhere", "train.txt"),
    ],
)
def test_a_configuration_that_cannot_be_trained_is_refused(
    text: Path, option: str, value: str, words: str
) -> None:
    result = run("train", "--corpus", str(text), *SMALL, option, value)
    assert result.exit_code == 1
    assert words in result.stderr
    assert not Path("best.tar").exists()


def test_an_interrupt_that_python_drops_is_acted_on_all_the_same() -> None:
    """As it does where a signal comes while an object is being destroyed."""
    with _Interrupts() as interrupts:
        interrupts.check()
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()


def test_an_interrupt_waits_until_what_must_not_be_cut_is_done() -> None:
    done = []

    def hold() -> None:
        with _Interrupts() as interrupts, interrupts.held():
            signal.raise_signal(signal.SIGINT)
            done.append(1)

    with pytest.raises(KeyboardInterrupt):
        hold()
    assert done


def test_interrupted_training_keeps_the_best_so_far_and_says_so(text: Path) -> None:
    command = [*FRATERNAL, "train", "--corpus", str(text), *SMALL, "--epochs", "100000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while not Path("best.tar").exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "best.tar keeps the weights of epoch" in out
    assert "Traceback" not in error
    assert run("evaluate", "best.tar", "--check").exit_code == 0


# The quick start.

TINY = [
    *["--set", "budget.trials=3", "--set", "training.epochs=1", "--set", "corpus.train_tokens=3000"],
    *["--set", "corpus.valid_tokens=500", "--data-dir", "quick"],
]


def start_quickstart() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*FRATERNAL, "quickstart", *TINY],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,
    )


def left_behind() -> list[str]:
    """What runs with this test's data directory, and what drivers of it started or left."""
    sweeps = [log.stem for log in Path("quick/drivers").glob("*.log")]
    drivers = marked_processes("FRATERNAL_DATA_DIR", str(Path("quick").resolve()))
    listing = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    return [
        *map(str, drivers),
        *(line for line in listing.splitlines() if "--data-dir quick" in line),
        *(trace for sweep_id in sweeps for trace in traces(Path("quick"), sweep_id)),
    ]


@pytest.mark.slow
@pytest.mark.sqlite("the quick start's own service")
def test_the_quick_start_ends_with_a_checked_model_and_leaves_no_process() -> None:
    process = start_quickstart()
    out, _ = process.communicate(timeout=240)
    assert process.returncode == 0, out
    for words in ("dashboard", "3/3 trials", "top-5", "best checkpoint: trial", "agrees", "is stopped"):
        assert words in out
    assert left_behind() == []


@pytest.mark.slow
@pytest.mark.sqlite("the quick start's own service")
@pytest.mark.parametrize(
    ("how", "when"),
    [
        (signal.SIGINT, "starting a service"),
        (signal.SIGHUP, "dashboard"),
        (signal.SIGTERM, "[1-9] running"),
    ],
)
def test_a_quick_start_that_is_interrupted_leaves_no_process(how: signal.Signals, when: str) -> None:
    process = start_quickstart()
    assert process.stdout is not None
    for line in process.stdout:
        if re.search(when, line):
            break
    else:
        pytest.fail(f"the quick start ended without saying {when!r}")
    for _ in range(2):
        os.killpg(process.pid, how)
        time.sleep(0.05)
    out, _ = process.communicate(timeout=90)
    assert process.returncode == 130, out
    assert "cancelled" in out
    assert left_behind() == []
