"""An ONNX graph and a plain state_dict compute what the model does, or are not made."""

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner, Result

import models.portable
from models.awd_lstm import AWDLSTM
from models.config import AWDLSTMConfig
from models.plain import PlainLM
from models.portable import NotTheSame, TooLarge, require_parity, run_onnx, run_plain, to_onnx, to_plain
from service.cli import app
from tests.service_process import write_corpus
from trials.checkpoints import read_best, write_best

T, B, V = 5, 3, 11
DOCUMENT = Path(__file__).parent.parent / "docs" / "checkpoint.md"
SMALL = ["--epochs", "2", "--batch-size", "4", "--bptt", "15", "--seed", "3", "--device", "cpu"]
SHAPES = {
    f"{config.layers} layers, {config.embedding_size} and {config.hidden_size} wide, "
    + ("tied" if config.tied else "untied"): config
    for config in (
        AWDLSTMConfig(7, 4, 1, tied=True),
        AWDLSTMConfig(7, 4, 1, tied=False),
        AWDLSTMConfig(4, 6, 2, tied=True),
        AWDLSTMConfig(4, 6, 3, tied=True),
        AWDLSTMConfig(4, 6, 3, tied=False),
        AWDLSTMConfig(6, 6, 2, tied=False),
    )
}


def build(config: AWDLSTMConfig, scale: float = 3.0) -> AWDLSTM:
    """With weights and a decoder's bias as large as those of a trained model."""
    generator = torch.Generator().manual_seed(1)
    model = AWDLSTM(config, V, generator)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
        model.decoder_bias.normal_(generator=generator)
    return model


def saved(state_dict: dict[str, Tensor]) -> bytes:
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("form", ["onnx", "plain"])
def test_logits_and_states_are_those_of_the_model_also_when_carried_on(
    form: str, config: AWDLSTMConfig
) -> None:
    model = build(config)
    run = run_onnx(to_onnx(model, {})) if form == "onnx" else run_plain(saved(to_plain(model)), model)
    theirs = ours = model.zero_state(B)
    for length in (T, 1, 2 * T):
        tokens = torch.randint(V, (length, B))
        with torch.no_grad():
            result = model(tokens, ours, None)
            ours = result.state
            logits, theirs = run(tokens, theirs)
        torch.testing.assert_close(logits, model.decode(result.dropped_TBH), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-6)
    parity = require_parity(run, model)
    assert max(parity.logits, parity.states) < 1e-5


def swapped_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models.portable, "_gates", lambda stacked: stacked)


def one_bias_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    gates = models.portable._gates
    monkeypatch.setattr(models.portable, "_gates", lambda it: gates(it) * (1 if it.ndim > 1 else 0.5))


def weights_a_little_off(monkeypatch: pytest.MonkeyPatch) -> None:
    own = models.portable._own
    monkeypatch.setattr(
        models.portable, "_own", lambda it: own(it) * (1.001 if it.is_floating_point() else 1)
    )


@pytest.mark.parametrize("broken", [swapped_gates, one_bias_lost, weights_a_little_off])
def test_a_graph_that_computes_something_else_is_found(
    broken: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(AWDLSTMConfig(6, 6, 2, tied=False))
    broken(monkeypatch)
    with pytest.raises(NotTheSame, match="no rounding"):
        require_parity(run_onnx(to_onnx(model, {})), model)


@pytest.mark.parametrize(
    "name", ["decoder.weight", "lstms.1.weight_hh_l0", "embedding.weight", "decoder.bias"]
)
def test_a_state_dict_with_a_wrong_tensor_is_found(name: str) -> None:
    model = build(AWDLSTMConfig(V, V, 2, tied=False))  # square, so that a transposed decoder fits
    tensors = to_plain(model)
    tensors[name] = tensors[name].t().contiguous() if name.startswith("decoder.w") else tensors[name].flip(0)
    with pytest.raises(NotTheSame):
        require_parity(run_plain(saved(tensors), model), model)


def test_states_that_are_given_back_under_each_others_names_are_found() -> None:
    model = build(AWDLSTMConfig(4, 6, 2))
    run = run_onnx(to_onnx(model, {}))

    def exchanged(tokens: Tensor, state: Any) -> Any:
        logits, after = run(tokens, tuple((h, c) for c, h in state))
        return logits, tuple((c, h) for h, c in after)

    with pytest.raises(NotTheSame):
        require_parity(exchanged, model)


@pytest.mark.parametrize("spoil", [lambda it: it.double(), lambda it: it[:, :1], lambda it: it * torch.nan])
def test_what_is_of_another_kind_is_found(spoil: Callable[[Tensor], Tensor]) -> None:
    model = build(AWDLSTMConfig(4, 6, 2))
    run = run_plain(saved(to_plain(model)), model)

    def spoilt(tokens: Tensor, state: Any) -> Any:
        logits, after = run(tokens, state)
        return spoil(logits), after

    with pytest.raises(NotTheSame):
        require_parity(spoilt, model)


def test_a_state_dict_is_nothing_but_tensors_and_tied_weights_are_in_it_once() -> None:
    model = build(AWDLSTMConfig(4, 6, 2, tied=True))
    content = saved(to_plain(model))
    tensors = torch.load(io.BytesIO(content), weights_only=True)
    assert {type(each) for each in tensors.values()} == {Tensor}
    assert tensors["embedding.weight"].data_ptr() == tensors["decoder.weight"].data_ptr()
    plain = PlainLM(V, [4, 6, 4], tied=True)
    plain.load_state_dict(tensors, strict=True)
    assert sum(each.numel() for each in plain.parameters()) == model.config.parameter_count(V)


def test_a_model_beyond_two_gibibytes_is_refused_before_it_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(AWDLSTMConfig(4, 6, 2))
    size = 4 * model.config.parameter_count(V)
    monkeypatch.setattr(models.portable, "MOST_BYTES", size)
    to_onnx(model, {})
    with pytest.raises(TooLarge, match=f"{size + 1:,} bytes"):
        to_onnx(model, {"vocabulary": "a"})


# The command.


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the text `ptb` and a trained `best.tar`, of averaged weights."""
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        train = write_corpus(Path("ptb"), tokens=1_500) / "train.txt"
        train.write_text("the " + train.read_text())  # the page's prompt
        valid = Path("ptb", "valid.txt")
        text = valid.read_text().replace(" ", "\r", 3)  # of which none ends a line
        valid.write_bytes(f"\ufeff{text}".encode())
        sizes = ["--embedding-size", "12", "--hidden-size", "16", "--layers", "2"]
        averaged = ["--set", "training.averaging=from-start"]
        assert (
            run("train", "--corpus", "./ptb", *sizes, *SMALL, *averaged, "--out", "best.tar").exit_code == 0
        )
    assert read_best(folder / "best.tar").metrics["averaged"]
    return folder


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def best(home: Path) -> Path:
    Path("best.tar").write_bytes((home / "best.tar").read_bytes())
    return Path("best.tar")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def words_of(result: Result) -> str:
    return " ".join(result.stderr.replace("│", " ").split())


def test_an_onnx_file_says_all_that_it_takes_to_use_it(best: Path) -> None:
    result = run("export", "best.tar", "--format", "onnx")
    assert result.exit_code == 0, result.stderr
    assert "logits differ by at most" in result.stdout
    checkpoint = read_best(best)
    session = onnxruntime.InferenceSession("best.onnx")
    told = session.get_modelmeta().custom_metadata_map
    assert tuple(told["vocabulary"].split()) == checkpoint.vocabulary.tokens
    assert json.loads(told["config"]) == checkpoint.config
    assert float(told["valid_loss"]) == checkpoint.metrics["valid_loss"]
    assert f"sha256 {told['checkpoint_sha256']}" not in result.stdout, "it is the archive's, not the graph's"
    assert [each.name for each in session.get_inputs()] == ["tokens", "h0", "c0", "h1", "c1"]
    assert [each.name for each in session.get_outputs()] == [
        "logits",
        *(f"next_{n}" for n in ("h0", "c0", "h1", "c1")),
    ]
    assert session.get_inputs()[0].shape == ["T", "B"]
    onnx.checker.check_model("best.onnx", full_check=True)


def test_equal_checkpoints_are_exported_to_equal_files(best: Path) -> None:
    for form, suffix in (("onnx", "onnx"), ("state-dict", "pt")):
        for out in (f"a.{suffix}", f"b.{suffix}"):
            assert run("export", "best.tar", "--format", form, "--out", out).exit_code == 0
        assert Path(f"a.{suffix}").read_bytes() == Path(f"b.{suffix}").read_bytes()


@pytest.mark.parametrize(
    ("form", "kept"), [("onnx", ["best.onnx"]), ("state-dict", ["best.json", "best.pt"])]
)
def test_what_would_compute_something_else_is_not_written_and_replaces_nothing(
    best: Path, form: str, kept: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in kept:
        Path(name).write_text("as before")
    weights_a_little_off(monkeypatch)
    result = run("export", "best.tar", "--format", form, "--force")
    assert (result.exit_code, "is not written, since" in result.stderr) == (1, True)
    assert sorted(path.name for path in Path().iterdir()) == sorted(["best.tar", *kept])
    assert {Path(name).read_text() for name in kept} == {"as before"}


@pytest.mark.parametrize("module", ["onnx", "onnxruntime"])
def test_without_the_extra_the_line_that_installs_it_is_said(
    best: Path, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    result = run("export", "best.tar", "--format", "onnx")
    assert (result.exit_code, "pip install 'fraternal[onnx]'" in result.stderr) == (1, True)
    assert not Path("best.onnx").exists()


@pytest.mark.parametrize(
    ("given", "code", "said"),
    [
        (["best.tar"], 2, "of a checkpoint, give --format onnx or state-dict"),
        (["best.tar", "--format", "csv"], 2, "of a checkpoint, give --format onnx or state-dict"),
        (["01ABC", "--format", "onnx"], 1, "`fraternal fetch SWEEP` gets a sweep's best one"),
        (["best.tar", "--format", "onnx", "--table", "trials"], 2, "leave out --table trials"),
        (["best.tar", "--format", "state-dict", "--out", "m.json"], 2, "name the state_dict otherwise"),
        (["best.tar", "--format", "onnx", "--out", "best.tar"], 1, "best.tar is the checkpoint itself"),
        (["taken", "--format", "onnx"], 1, "is no checkpoint archive"),
    ],
)
def test_a_sweep_and_a_file_are_not_mistaken_for_each_other(
    best: Path, given: list[str], code: int, said: str
) -> None:
    Path("taken").write_text("no archive")
    result = run("export", *given)
    assert (result.exit_code, said in words_of(result)) == (code, True), result.stderr


def test_a_file_beside_a_state_dict_is_not_replaced_unasked(best: Path) -> None:
    Path("best.json").write_text("mine")
    result = run("export", "best.tar", "--format", "state-dict")
    assert (result.exit_code, "best.json exists" in result.stderr) == (1, True)
    assert not Path("best.pt").exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["best.tar", "--format", "onnx", "--out", "best.tar"], "best.tar is the checkpoint itself"),
        (["best.tar", "--format", "onnx", "--out", "link.tar"], "link.tar is the checkpoint itself"),
        (["best.json", "--format", "state-dict"], "best.json is the checkpoint itself"),
        (["best.tar", "--format", "onnx", "--out", "pipe"], "pipe is no file that can be replaced"),
    ],
)
def test_a_checkpoint_is_not_replaced_by_what_is_made_of_it_nor_a_device_by_a_file(
    best: Path, given: list[str], said: str
) -> None:
    content = best.read_bytes()
    Path("best.json").write_bytes(content)
    Path("link.tar").symlink_to("best.tar")
    os.mkfifo("pipe")
    result = run("export", *given, "--force")
    assert (result.exit_code, said in result.stderr) == (1, True), result.stderr
    assert best.read_bytes() == Path("best.json").read_bytes() == content
    assert sorted(path.name for path in Path().iterdir()) == ["best.json", "best.tar", "link.tar", "pipe"]


def test_looking_whether_a_file_can_be_written_touches_no_other(best: Path) -> None:
    Path("best.onnx.probe").write_text("mine")
    assert run("export", "best.tar", "--format", "onnx").exit_code == 0
    assert Path("best.onnx.probe").read_text() == "mine"


def test_of_a_state_dict_and_its_vocabulary_both_are_replaced_or_none(best: Path) -> None:
    """By a disk on which the second of them has no room."""
    for name in ("best.json", "best.pt"):
        Path(name).write_text("as before")
    script = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (8_000,) * 2); "
        "from service.cli import app; app()"
    )
    assert len(best.read_bytes()) > 9_000
    command = [sys.executable, "-c", script, "export", "best.tar", "--format", "state-dict", "--force"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(DOCUMENT.parent.parent)},
    )
    assert (done.returncode, done.stderr) == (1, "fraternal: best.pt: File too large\n")
    assert {path.name for path in Path().iterdir()} == {"best.tar", "best.json", "best.pt"}
    assert Path("best.json").read_text() == Path("best.pt").read_text() == "as before"


def test_a_checkpoint_of_a_model_that_was_never_good_is_refused(best: Path) -> None:
    checkpoint = read_best(best)
    broken = {name: torch.full_like(tensor, np.nan) for name, tensor in checkpoint.tensors.items()}
    write_best(best, replace(checkpoint, tensors=broken))
    for form in ("onnx", "state-dict"):
        result = run("export", "best.tar", "--format", form)
        assert (result.exit_code, "not all finite" in result.stderr) == (1, True)


# The page about it.


def code(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", DOCUMENT.read_text(), flags=re.DOTALL)


def test_the_page_shows_the_module_as_it_is() -> None:
    source = Path(models.portable.__file__).with_name("plain.py").read_text()
    declared = source[source.index("State =") :]
    assert declared in code("python")[1]


def test_what_the_page_shows_works_as_pasted_where_there_is_nothing_of_ours(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its commands; then its Python, in which nothing of this program may be loaded."""
    monkeypatch.chdir(home)
    commands = [line.split()[1:] for line in code("bash")[0].splitlines()]
    for command in commands:
        result = run(*(word.strip('"') for word in command))
        assert result.exit_code == 0, result.output
    nothing_of_ours = (
        "import sys; assert not {'service', 'trials', 'models', 'regularizers'} & set(sys.modules)"
    )

    def printed(script: str) -> str:
        command = [sys.executable, "-I", "-c", f"{script}\n{nothing_of_ours}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    text, losses = map(printed, code("python"))
    greedy = run("generate", "best.tar", "--temperature", "0", "--words", "20", "--json")
    assert text.split() == json.loads(greedy.stdout)["words"]
    loss, recorded = map(float, losses.split())
    assert recorded == read_best(Path("best.tar")).metrics["valid_loss"]
    assert loss == pytest.approx(recorded, rel=1e-5)
