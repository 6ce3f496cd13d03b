"""A checkpoint on a machine without the service; and looks at test splits, which are asked for and logged."""

import getpass
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from service.cli import app
from service.errors import CommandFailed
from service.local import evaluate_file, generate_text, read_checkpoint
from service.looks import LOG, Look, LookLog
from service.measure import load_model, look_at, losses
from tests.service_process import write_corpus
from trials.checkpoints import read_best, write_best
from trials.corpora import EOS, PUBLISHED, PathCorpus, load_corpus
from trials.evaluation import evaluate
from trials.files import write_whole
from trials.perplexity import perplexity
from trials.store import pack, unpack

SMALL = ["--epochs", "1", "--batch-size", "4", "--bptt", "15", "--seed", "3", "--device", "cpu"]
SIZES = ["--embedding-size", "12", "--hidden-size", "12", "--layers", "1"]
DATA = Path("fraternal-data")
PACKAGES = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The machine that trained: its text lies in `text`, what it trained is `best.tar`."""
    folder = tmp_path_factory.mktemp("elsewhere")
    write_corpus(folder / "text", tokens=1_500)
    corpus = {"path": str(folder / "text"), "train_tokens": 1_200, "valid_tokens": 500, "test_tokens": 300}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert run("train", "--corpus", json.dumps(corpus), *SIZES, *SMALL).exit_code == 0
    return folder


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def best(elsewhere: Path) -> str:
    Path("best.tar").write_bytes((elsewhere / "best.tar").read_bytes())
    return "best.tar"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def logged(data_dir: Path = DATA) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (data_dir / LOG).read_text().splitlines()]


# Without the service.


@pytest.fixture
def taken_home(elsewhere: Path, best: str) -> Path:
    """A machine that has the archive, of a later version of this program, and its text in another folder."""
    files = unpack(Path(best).read_bytes(), best)
    metrics = json.loads(files["metrics.json"]) | {"verification": {"device": "cpu", "loss": [1.0]}}
    config = json.loads(files["config.json"])
    config["corpus"]["path"] = "/srv/texts/of-the-server"
    later = {
        **files,
        "metrics.json": json.dumps(metrics).encode(),
        "config.json": json.dumps(config).encode(),
        "README.md": b"# A model",
        "LICENSE.txt": b"of the text",
        "provenance.json": b"{}",
    }
    write_whole(Path(best), pack(later))
    Path("here").symlink_to(elsewhere / "text")
    return Path(best)


def alone(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, with no setting of a service."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FRATERNAL_")}
    return subprocess.run(
        [sys.executable, "-m", "service.cli", *arguments],
        env={**environment, "PYTHONPATH": str(PACKAGES)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_archive_is_all_that_a_machine_needs_beside_the_text(taken_home: Path) -> None:
    checked = alone("evaluate", "best.tar", "--corpus", "here", "--check")
    assert checked.returncode == 0, checked.stderr
    assert "agrees with the validation perplexity" in checked.stdout
    tuned = alone("finetune", "best.tar", "--corpus", "here", "--set", "training.epochs=1")
    assert tuned.returncode == 0, tuned.stderr
    assert sorted(path.name for path in Path().iterdir()) == ["best.tar", "finetuned.tar", "here"]


def test_text_is_written_and_models_are_exported_where_there_is_no_text_at_all(taken_home: Path) -> None:
    Path("here").unlink()
    assert len(json.loads(run("generate", "best.tar", "--words", "7", "--json").stdout)["words"]) == 7
    for form, files in (("onnx", {"best.onnx"}), ("state-dict", {"best.pt", "best.json"})):
        assert run("export", "best.tar", "--format", form).exit_code == 0
        assert files < {path.name for path in Path().iterdir()}


@pytest.mark.parametrize("command", ["evaluate", "finetune"])
def test_a_text_that_lies_on_another_machine_is_asked_for_by_its_option(
    taken_home: Path, command: str
) -> None:
    result = run(command, "best.tar")
    assert result.exit_code == 1
    assert "/srv/texts/of-the-server, which is no folder here: say where it is with --corpus" in result.stderr
    assert not Path("finetuned.tar").exists()


def test_the_own_text_in_another_place_is_read_as_far_as_in_training_and_other_texts_whole(
    taken_home: Path,
) -> None:
    def tokens(*options: str) -> int:
        return int(json.loads(run("evaluate", "best.tar", *options, "--json").stdout)["tokens"])

    assert tokens("--corpus", "here") == 499
    assert tokens("--corpus", '{"path": "here", "valid_tokens": 100}') == 99
    assert tokens("--corpus", '{"path": "here", "valid_tokens": null}') > 1_000
    Path("other").mkdir()
    Path("other/valid.txt").write_text(Path("here/valid.txt").read_text() + "w00\n")
    assert tokens("--corpus", "other") > 1_000


def test_one_split_is_evaluated_where_the_others_are_not_there(best: str, elsewhere: Path) -> None:
    Path("one").mkdir()
    Path("one/valid.txt").write_bytes((elsewhere / "text" / "valid.txt").read_bytes())
    assert run("evaluate", best, "--corpus", "one", "--check").exit_code == 0
    result = run("evaluate", best, "--corpus", "one", "--split", "train")
    assert (result.exit_code, "has no file train.txt: add it" in result.stderr) == (1, True)


def test_what_was_fine_tuned_elsewhere_is_checked_against_the_text_where_it_is(taken_home: Path) -> None:
    assert run("finetune", "best.tar", "--corpus", "here", "--set", "training.epochs=1").exit_code == 0
    corpus = read_best(Path("finetuned.tar")).config["corpus"]
    assert (corpus["path"], corpus["train_tokens"]) == (str(Path("here").absolute()), 1_200)
    assert run("evaluate", "finetuned.tar", "--check").exit_code == 0


def test_nothing_is_fine_tuned_on_another_text(best: str) -> None:
    write_corpus(Path("other"), tokens=1_400)
    Path("other/valid.txt").write_text("w00 w01\n")
    result = run("finetune", best, "--corpus", "other")
    assert result.exit_code == 1
    assert f"and {Path('other').absolute()} holds another" in result.stderr
    assert "say where it is with --corpus" in result.stderr
    assert not Path("finetuned.tar").exists()


@pytest.mark.parametrize("command", ["evaluate", "finetune"])
@pytest.mark.parametrize(
    ("corpus", "said"), [("", "should have at least 1 character"), ("{}", "either a name")]
)
def test_a_corpus_that_says_nothing_is_not_taken_for_the_own_one(
    best: str, command: str, corpus: str, said: str
) -> None:
    """As a shell has it, of a variable that is not set."""
    result = run(command, best, "--corpus", corpus)
    assert (result.exit_code, said in result.stderr) == (1, True), result.output
    assert "perplexity" not in result.stdout
    assert not Path("finetuned.tar").exists()


def test_fine_tuning_uses_of_the_text_what_training_used(taken_home: Path) -> None:
    """Else losses over other words would be compared with the recorded one, and the better one kept."""
    for name, given in (("valid_tokens", 100), ("train_tokens", None), ("vocabulary_size", 1_000)):
        result = run("finetune", "best.tar", "--corpus", json.dumps({"path": "here", name: given}))
        assert (result.exit_code, f"leave out {name}" in result.stderr) == (1, True), result.output
        assert not Path("finetuned.tar").exists()
    same = json.dumps({"path": "here", "valid_tokens": 500})
    assert run("finetune", "best.tar", "--corpus", same, "--set", "training.epochs=1").exit_code == 0


# What is written.


def test_words_come_as_they_are_drawn(best: str) -> None:
    pieces = generate_text(Path(best), "w01", 10**9).pieces("w01")
    assert len(list(islice(pieces, 5))) == 5


def test_a_prompt_that_ends_in_a_newline_ends_its_line(best: str) -> None:
    one, ended = (
        json.loads(run("generate", best, "--prompt", prompt, "--temperature", "0", "--json").stdout)["words"]
        for prompt in (f"w01 {EOS}", "w01\n")
    )
    assert one == ended
    shown = run("generate", best, "--prompt", "w01\n", "--words", "2").stdout
    assert re.fullmatch(r"w01\n\S+ \S+\n", shown), shown


def test_an_empty_prompt_begins_a_line(best: str) -> None:
    shown = run("generate", best, "--words", "3", "--temperature", "0").stdout
    assert re.fullmatch(r"w\d\d w\d\d w\d\d\n", shown), shown


def test_a_seed_gives_the_same_text_in_every_process(best: str) -> None:
    asked = ["generate", best, "--words", "30", "--seed", "5", "--top-k", "1000000"]
    assert alone(*asked).stdout == run(*asked).stdout


def test_words_that_are_known_in_lower_case_are_named_with_that(best: str) -> None:
    files = unpack(Path(best).read_bytes(), best)
    words = files["vocabulary.txt"].decode().replace("w59\n", "<unk>\n")
    write_whole(Path(best), pack({**files, "vocabulary.txt": words.encode()}))
    result = run("generate", best, "--prompt", "W01 nowhere", "--words", "1", "--json")
    assert "read as <unk>: W01 (but it has 'w01'), nowhere\n" in result.stderr
    assert json.loads(result.stdout)["unknown"] == ["W01", "nowhere"]


@pytest.mark.parametrize(
    ("given", "code", "said"),
    [
        (["--seed", str(2**64)], 2, "less than or equal to"),
        (["--prompt", "w01 \udcff"], 1, "the prompt cannot be read"),
        (["--prompt", "w01 nowhere"], 1, "leave the word out"),
    ],
)
def test_what_cannot_be_drawn_is_said_without_a_traceback(
    best: str, given: list[str], code: int, said: str
) -> None:
    result = run("generate", best, *given)
    assert (result.exit_code, type(result.exception)) == (code, SystemExit)
    assert said in " ".join(result.stderr.split())


@pytest.fixture
def without_ends(tmp_path: Path) -> str:
    """A model of text in one line, of which splits were cut short: it knows no <eos>."""
    write_corpus(tmp_path / "lines", tokens=1_500)
    folder = tmp_path / "line"
    folder.mkdir()
    for split in ("train", "valid", "test"):
        words = (tmp_path / "lines" / f"{split}.txt").read_text().split()
        (folder / f"{split}.txt").write_text(" ".join([*words[:1_200], "rare" * (split != "train")]))
    cut = {"train_tokens": 1_000, "valid_tokens": 300, "test_tokens": 300}
    for option, values in (("whole.tar", {}), ("cut.tar", cut)):
        corpus = json.dumps({"path": str(folder), **values})
        assert run("train", "--corpus", corpus, *SIZES, *SMALL, "--out", option).exit_code == 0
    assert EOS not in read_best(Path("cut.tar")).vocabulary.index
    return "cut.tar"


def test_a_model_that_knows_no_ends_of_lines_begins_with_the_prompt(without_ends: str) -> None:
    greedy = ["generate", without_ends, "--temperature", "0", "--words", "5", "--json", "--prompt"]
    one, other = (run(*greedy, prompt) for prompt in ("w01 w02", "w01\nw02\n"))
    assert json.loads(one.stdout)["words"] == json.loads(other.stdout)["words"]
    assert json.loads(one.stdout)["unknown"] == []
    assert one.stderr == ""
    nothing = run("generate", without_ends)
    assert (nothing.exit_code, "begin with: give --prompt" in nothing.stderr) == (1, True), nothing.stderr


def test_predictions_that_are_no_numbers_are_said_and_not_drawn_from(best: str) -> None:
    checkpoint = read_best(Path(best))
    huge = {name: torch.full_like(tensor, 3e38) for name, tensor in checkpoint.tensors.items()}
    write_best(Path(best), replace(checkpoint, tensors=huge))
    for temperature in ("1", "0"):
        result = run("generate", best, "--temperature", temperature, "--words", "2")
        assert (result.exit_code, type(result.exception)) == (1, SystemExit), result.output
        assert "predictions are not finite numbers" in result.stderr
    document = json.loads(
        run("evaluate", best, "--json").stdout, parse_constant=lambda it: pytest.fail(f"{it} is no JSON")
    )
    assert (document["loss"], document["perplexity"]) == (None, None)


@pytest.mark.parametrize("encoding", ["ascii:surrogateescape", "latin-1"])
def test_a_terminal_that_has_no_sign_for_a_word_gets_its_number(best: str, encoding: str) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "PYTHONPATH": str(PACKAGES)}
    command = [sys.executable, "-m", "service.cli", "generate", best, "--prompt", "w01", "--words", "1"]
    files = unpack(Path(best).read_bytes(), best)
    write_whole(
        Path(best), pack({**files, "vocabulary.txt": files["vocabulary.txt"].replace(b"w01", "語".encode())})
    )
    done = subprocess.run(
        [*command[:-3], "語", *command[-2:]], capture_output=True, env=environment, check=False
    )
    assert (done.returncode, done.stdout[:7]) == (0, b"\\u8a9e ")


# Looks at test splits.


def test_nothing_looks_at_a_test_split_unasked(best: str, elsewhere: Path) -> None:
    (test := elsewhere / "text" / "test.txt").rename(elsewhere / "hidden.txt")
    try:
        assert run("evaluate", best).stdout.startswith("valid: perplexity")
        assert run("evaluate", best, "--mc", "2").stdout.startswith("valid, MC2: perplexity")
    finally:
        (elsewhere / "hidden.txt").rename(test)
    own = str(elsewhere / "text")
    for result in (
        run("train", "--corpus", own, *SIZES, *SMALL, "--out", "new.tar"),
        run("finetune", best, "--set", "training.epochs=1"),
    ):
        assert result.exit_code == 0, result.stderr
        assert ("valid: perplexity" in result.stdout, "test: " in result.stdout) == (True, False)
    assert not DATA.exists()


def test_a_look_that_is_asked_for_is_logged_with_all_that_it_was(best: str, elsewhere: Path) -> None:
    began = datetime.now(UTC)
    result = run("evaluate", best, "--split", "test", "--json")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    (line,) = logged()
    assert datetime.fromisoformat(line["time"]) - began < timedelta(minutes=1)
    assert line["time"].endswith("Z")
    text = (elsewhere / "text" / "test.txt").read_bytes()
    assert line == {
        "time": line["time"],
        "user": getpass.getuser(),
        "command": "evaluate --split test",
        "file": "best.tar",
        "sha256": hashlib.sha256(Path(best).read_bytes()).hexdigest(),
        "corpus": line["corpus"],
        "split_sha256": hashlib.sha256(text).hexdigest(),
        "tokens": 299,
        "mc_masks": None,
        "seed": None,
        "loss": document["loss"],
        "perplexity": document["perplexity"],
    }
    assert (line["corpus"]["path"], line["corpus"]["test_tokens"]) == (str(elsewhere / "text"), 300)
    assert line["perplexity"] == perplexity(line["loss"])
    assert document["test_look"] == {"before": 0, "checkpoints": 0, "log": str(DATA / LOG)}


def test_how_often_and_of_how_many_checkpoints_it_was_looked_at_is_said(best: str, elsewhere: Path) -> None:
    own, other = str(elsewhere / "text"), write_corpus(Path("other"), tokens=500)
    (other / "test.txt").write_text("w00 w01 w02\n")
    said = [
        run(*command).stdout
        for command in (
            ["evaluate", best, "--split", "test"],
            ["evaluate", best, "--split", "test", "--corpus", str(other)],
            ["evaluate", best, "--split", "test", "--mc", "2", "--seed", "4"],
            ["train", "--corpus", own, *SIZES, *SMALL, "--seed", "9", "--out", "new.tar", "--test"],
            ["finetune", best, "--set", "training.epochs=1", "--test"],
        )
    ]
    assert [re.findall("look .*(?=; logged)", text) for text in said] == [
        ["look 1 at this test split, 0 before it"],
        ["look 1 at this test split, 0 before it"],
        ["look 2 at this test split, 1 before it, of 1 checkpoint"],
        ["look 3 at this test split, 2 before it, of 1 checkpoint"],
        ["look 4 at this test split, 3 before it, of 2 checkpoints"],
    ]
    assert all("test: perplexity" in text or "test, MC2: perplexity" in text for text in said)
    assert [line["command"] for line in logged()] == [
        *["evaluate --split test"] * 3,
        "train --test",
        "finetune --test",
    ]
    assert [line["mc_masks"] for line in logged()] == [None, None, 2, None, None]
    assert logged()[2]["seed"] == 4
    assert len({line["sha256"] for line in logged()}) == 3


@pytest.mark.parametrize("split", ["valid", "train"])
def test_a_test_split_under_another_name_is_not_looked_at(best: str, elsewhere: Path, split: str) -> None:
    text = (elsewhere / "text" / "test.txt").read_bytes()
    Path("renamed").mkdir()
    (Path("renamed") / f"{split}.txt").write_bytes(text)
    result = run("evaluate", best, "--corpus", "renamed", "--split", split)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "test split of the training run" in result.stderr
    assert "--split test" in result.stderr
    assert not DATA.exists()
    (Path("renamed") / "test.txt").write_bytes(text)
    assert run("evaluate", best, "--corpus", "renamed", "--split", "test").exit_code == 0
    assert len(logged()) == 1


def test_a_published_test_split_under_another_name_is_not_looked_at(
    best: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a model of another text: the digest tells."""
    text = b"w01 w02\nw03 w04\n"
    digest = hashlib.sha256(text).hexdigest()
    published = replace(PUBLISHED["ptb"], sha256={**PUBLISHED["ptb"].sha256, "test": digest})
    Path("renamed").mkdir()
    Path("renamed/valid.txt").write_bytes(text)
    assert run("evaluate", best, "--corpus", "renamed").exit_code == 0
    monkeypatch.setitem(PUBLISHED, "ptb", published)
    result = run("evaluate", best, "--corpus", "renamed")
    assert (result.exit_code, "is the test split of ptb" in result.stderr) == (1, True), result.stderr


def test_where_training_itself_was_given_one_text_twice_that_is_its_validation_split() -> None:
    """Else what training showed after each epoch could not be shown again."""
    folder = write_corpus(Path("twice"), tokens=1_500)
    (folder / "test.txt").write_bytes((folder / "valid.txt").read_bytes())
    assert run("train", "--corpus", "twice", *SIZES, *SMALL).exit_code == 0
    assert run("evaluate", "best.tar", "--check").exit_code == 0


def test_what_is_logged_is_the_digest_of_what_was_looked_at(best: str) -> None:
    """A pipe is read once; and a training run may replace the file while it is evaluated."""
    content = Path(best).read_bytes()
    done = subprocess.run(
        [sys.executable, "-m", "service.cli", "evaluate", "/dev/stdin", "--split", "test"],
        input=content,
        env={**os.environ, "PYTHONPATH": str(PACKAGES)},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert [line["sha256"] for line in logged()] == [hashlib.sha256(content).hexdigest()]


def a_folder() -> None:
    (DATA / LOG).mkdir(parents=True)


def no_folder() -> None:
    DATA.touch()


def a_full_disk() -> None:
    DATA.mkdir()
    (DATA / LOG).symlink_to("/dev/full")


@pytest.mark.parametrize("make", [a_folder, no_folder, a_full_disk])
@pytest.mark.parametrize(
    "command",
    [
        ["evaluate", "best.tar", "--split", "test"],
        ["evaluate", "best.tar", "--split", "test", "--json"],
        ["finetune", "best.tar", "--set", "training.epochs=1", "--test"],
    ],
)
def test_what_cannot_be_logged_is_not_shown(best: str, make: Callable[[], None], command: list[str]) -> None:
    make()
    result = run(*command)
    assert (result.exit_code, "is shown only once it is written to" in result.stderr) == (1, True)
    assert not re.search(r"test: |\"loss\"|look \d", result.stdout)


@pytest.mark.parametrize("command", ["train", "finetune"])
def test_that_a_look_could_not_be_logged_is_found_before_anything_is_trained(
    best: str, elsewhere: Path, command: str
) -> None:
    a_folder()
    own = ["--corpus", str(elsewhere / "text"), *SIZES, *SMALL] if command == "train" else [best]
    result = run(command, *own, "--test", "--out", "new.tar")
    assert (result.exit_code, "is shown only once it is written to" in result.stderr) == (1, True)
    assert result.stdout == ""
    assert not Path("new.tar").exists()


LOOK = Look("evaluate --split test", "a.tar", "ab", {"name": "sotu"}, "cd", 10)

IN_ITS_OWN_PROCESS = """
import resource, sys
from pathlib import Path
from service.errors import CommandFailed
from service.looks import Look, LookLog
look = Look("evaluate --split test", "a.tar", sys.argv[1], {"name": "sotu"}, "cd", 10)
log = LookLog(Path("data"))
"""


def test_a_line_that_does_not_fit_leaves_nothing_of_itself() -> None:
    """The kernel takes a part of it, then none."""
    LookLog(Path("data")).test_loss(LOOK, lambda: 4.0)
    before = (Path("data") / LOG).read_bytes()
    script = f"""{IN_ITS_OWN_PROCESS}
resource.setrlimit(resource.RLIMIT_FSIZE, ({len(before) + 20},) * 2)
try:
    log.test_loss(look, lambda: 5.0)
except CommandFailed as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, "ab"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(PACKAGES)},
    )
    assert "cannot be written: File too large" in done.stdout, done.stderr
    assert (Path("data") / LOG).read_bytes() == before
    assert LookLog(Path("data")).test_loss(LOOK, lambda: 6.0).before == 1


def test_processes_that_look_at_once_lose_no_line_and_each_counts_all_before_it() -> None:
    script = f"{IN_ITS_OWN_PROCESS}\nfor _ in range(25): print(log.test_loss(look, lambda: 4.0).before)"
    command = [sys.executable, "-c", script]
    environment = {**os.environ, "PYTHONPATH": str(PACKAGES)}
    running = [
        subprocess.Popen([*command, digest], stdout=subprocess.PIPE, text=True, env=environment)
        for digest in ("ab", "cd", "ef")
    ]
    counted = [int(count) for process in running for count in process.communicate(timeout=60)[0].split()]
    assert sorted(counted) == list(range(75))
    assert len(logged(Path("data"))) == 75
    assert LookLog(Path("data")).test_loss(LOOK, lambda: 4.0).checkpoints == 3


def test_a_line_that_a_crash_has_cut_off_is_no_look_and_spoils_no_other() -> None:
    log = LookLog(Path("data"))
    log.test_loss(LOOK, lambda: 4.0)
    with log.path.open("ab") as file:
        file.write(b"[" * 100_000 + b'\n\xff\0\n7\n{"split_sha256": "cd", "sha2')
    assert log.test_loss(LOOK, lambda: 4.0).before == 1
    assert log.test_loss(LOOK, lambda: 4.0).before == 2
    assert len(log.path.read_bytes().splitlines()) == 7


def test_a_loss_that_json_has_no_number_for_is_logged_as_none() -> None:
    log = LookLog(Path("data"))
    assert log.test_loss(LOOK, lambda: 1e6).loss == 1e6
    assert log.test_loss(LOOK, lambda: float("nan")).before == 1
    assert [(line["loss"], line["perplexity"]) for line in logged(Path("data"))] == [
        (1e6, None),
        (None, None),
    ]


def test_every_way_to_a_test_loss_goes_through_the_log(
    best: str, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: LookLog, look: Look, compute: Callable[[], float]) -> None:
        raise CommandFailed("asked")

    monkeypatch.setattr(LookLog, "test_loss", refuse)
    file = Path(best)
    source = PathCorpus.model_validate(read_checkpoint(file).config["corpus"])
    corpus = load_corpus(source, DATA)
    model = load_model(file, corpus, "cpu")
    for masks in (0, 2):
        look = look_at(file, corpus, source, masks, 1, "reproduce seeds")
        with pytest.raises(CommandFailed, match="asked"):
            losses(model, corpus, masks, 1, look, LookLog(DATA))
        with pytest.raises(CommandFailed, match="asked"):
            evaluate_file(file, "test", None, DATA, mc_masks=masks or None)


def test_what_a_table_measures_is_logged_as_asked_for_by_the_table(best: str, elsewhere: Path) -> None:
    file = Path(best)
    source = PathCorpus.model_validate(read_checkpoint(file).config["corpus"])
    corpus = load_corpus(source, DATA)
    model = load_model(file, corpus, "cpu")
    found = losses(model, corpus, 0, 1, look_at(file, corpus, source, 0, 1, "reproduce seeds"), LookLog(DATA))
    assert found.test == evaluate(model, corpus.test)
    assert [(line["command"], line["loss"], line["tokens"]) for line in logged()] == [
        ("reproduce seeds", found.test, 299)
    ]
    assert run("evaluate", best, "--split", "test", "--json").stdout.count('"before": 1') == 1


def test_json_is_all_that_is_printed_for_programs(best: str) -> None:
    for options in (["--check"], ["--split", "test"]):
        result = run("evaluate", best, "--json", *options)
        assert json.loads(result.stdout)["file"] == "best.tar"
        assert result.stderr
