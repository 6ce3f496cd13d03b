"""The evaluation network for who has not us: an ONNX graph, or a state_dict for models.plain; and whether
either computes what the model does.

T time steps, B batch, V vocabulary, I width of a layer's input, H of its output. onnx and onnxruntime are
imported where they are used: they are an extra.
"""

import copy
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from models.awd_lstm import AWDLSTM, State
from models.plain import PlainLM

if TYPE_CHECKING:
    import onnx

OPSET, IR_VERSION = 17, 8
"""Of the file: onnxruntime has them since 1.12 of 2022, and nothing newer is needed."""

MOST_BYTES = 2**31 - 2**20
"""Of an ONNX graph: one file of protobuf has less than 2 GiB."""

SHAPES = ((1, 1), (5, 3), (70, 2))
"""(T, B) of the windows that are compared, each twice: from a zero state, and from where that one ends."""

MOST_ROUNDING = 64
"""How many times as far as torch's own float32 a result may be from float64's. Another order of summation and
another approximation of tanh came to 2.5 times, in models of 1 to 3 layers, 5 to 1,150 wide; where states
amplify rounding, as with weights of eight times their size, to 12. A wrong gate is 10,000 times further away
in the shorter windows."""

Run = Callable[[Tensor, State], tuple[Tensor, State]]
"""From tokens (T, B) and a state to logits (T, B, V) and the next state."""


class NotTheSame(Exception):
    """What was made computes something else than the model does."""


class TooLarge(ValueError):
    """The file format has no room for a model of this size."""


@dataclass(frozen=True)
class Parity:
    """How far what was made is from the model, in float32, over all windows that were compared."""

    logits: float
    """The largest difference of two logits."""
    states: float
    """The largest difference of two numbers of a state."""


def to_plain(model: AWDLSTM) -> dict[str, Tensor]:
    """A state_dict of models.plain.PlainLM. Where embedding and decoder are tied, they are one tensor."""
    embedding = _own(model.embedding)
    lstms = {name: _own(tensor) for name, tensor in model.lstms.state_dict(prefix="lstms.").items()}
    decoder = embedding if model.decoder is None else _own(model.decoder)
    return {
        "embedding.weight": embedding,
        **lstms,
        "decoder.weight": decoder,
        "decoder.bias": _own(model.decoder_bias),
    }


def widths(model: AWDLSTM) -> list[int]:
    """Of the embedding, and of each layer's output."""
    return [model.config.embedding_size, *(outputs for _, outputs in model.config.layer_sizes)]


def run_plain(content: bytes, model: AWDLSTM) -> Run:
    """The state_dict in a file of torch's, strictly loaded as somebody else would load it."""
    plain = PlainLM(len(model.embedding), widths(model), model.config.tied)
    plain.load_state_dict(torch.load(io.BytesIO(content), weights_only=True))

    def run(tokens_TB: Tensor, state: State) -> tuple[Tensor, State]:
        logits_TBV, after = plain(tokens_TB, list(state))
        return logits_TBV, tuple(after)

    return run


def to_onnx(model: AWDLSTM, metadata: Mapping[str, str]) -> bytes:
    """One graph: `tokens` (T, B) and `h0`, `c0`, `h1`, … (1, B, H) of the layers before them give `logits`
    (T, B, V) and `next_h0`, `next_c0`, …; T and B are free.

    Raises TooLarge, and ImportError where onnx is not installed.
    """
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    size = 4 * sum(tensor.numel() for tensor in model.parameters()) + sum(map(len, metadata.values()))
    if size > MOST_BYTES:
        raise TooLarge(f"an ONNX file is smaller than 2 GiB, and this model has {size:,} bytes")

    def value(name: str, kind: int, *shape: int | str) -> "onnx.ValueInfoProto":
        return helper.make_tensor_value_info(name, kind, shape)

    def constant(name: str, tensor: Tensor) -> "onnx.TensorProto":
        return numpy_helper.from_array(_own(tensor).numpy(), name)

    nodes = [helper.make_node("Gather", ["embedding", "tokens"], ["embedded"])]
    constants = [constant("embedding", model.embedding), constant("direction", torch.tensor([1]))]
    taken, given = [value("tokens", TensorProto.INT64, "T", "B")], []
    hidden = "embedded"
    for n, layer in enumerate(model.lstms):
        weight_4HI, weight_4HH, *biases = (_own(weight) for weight in layer.parameters())
        constants += [
            constant(f"W{n}", _gates(weight_4HI).unsqueeze(0)),
            constant(f"R{n}", _gates(weight_4HH).unsqueeze(0)),
            constant(f"B{n}", torch.cat([_gates(bias) for bias in biases]).unsqueeze(0)),
        ]
        width = weight_4HH.shape[1]
        states = [f"h{n}", f"c{n}"]
        taken += [value(name, TensorProto.FLOAT, 1, "B", width) for name in states]
        given += [value(f"next_{name}", TensorProto.FLOAT, 1, "B", width) for name in states]
        inputs = [hidden, f"W{n}", f"R{n}", f"B{n}", "", *states]
        outputs = [f"directions{n}", *(f"next_{name}" for name in states)]
        hidden = f"hidden{n}"
        nodes += [
            helper.make_node("LSTM", inputs, outputs, hidden_size=width),
            helper.make_node("Squeeze", [outputs[0], "direction"], [hidden]),
        ]
    if model.decoder is not None:
        constants.append(constant("decoder", model.decoder))
    constants.append(constant("decoder_bias", model.decoder_bias))
    nodes += [
        helper.make_node(
            "Transpose", ["embedding" if model.decoder is None else "decoder"], ["decoder_t"], perm=[1, 0]
        ),
        helper.make_node("MatMul", [hidden, "decoder_t"], ["products"]),
        helper.make_node("Add", ["products", "decoder_bias"], ["logits"]),
    ]
    logits = value("logits", TensorProto.FLOAT, "T", "B", len(model.embedding))
    graph = helper.make_graph(nodes, "AWD-LSTM", taken, [logits, *given], constants)
    opset = [helper.make_opsetid("", OPSET)]
    made = helper.make_model(graph, opset_imports=opset, ir_version=IR_VERSION, producer_name="fraternal")
    helper.set_model_props(made, dict(metadata))
    onnx.checker.check_model(made, full_check=True)
    content: bytes = made.SerializeToString(deterministic=True)
    return content


def run_onnx(content: bytes) -> Run:
    """A graph of to_onnx in onnxruntime, on the CPU. Raises ImportError where that is not installed."""
    import onnxruntime

    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])

    def run(tokens_TB: Tensor, state: State) -> tuple[Tensor, State]:
        feed = {"tokens": tokens_TB.numpy()}
        for n, (h, c) in enumerate(state):
            feed |= {f"h{n}": h.numpy(), f"c{n}": c.numpy()}
        names = [f"next_{each}{n}" for n in range(len(state)) for each in "hc"]
        logits_TBV, *after = map(torch.from_numpy, session.run(["logits", *names], feed))
        return logits_TBV, tuple(zip(after[::2], after[1::2], strict=True))

    return run


@torch.no_grad()
def require_parity(run: Run, model: AWDLSTM) -> Parity:
    """Random words, the first and the last of the vocabulary among them, and the state carried on.

    The truth is the model in float64: what torch's float32 is away from it is rounding, and what was made may
    be away MOST_ROUNDING times as much. Raises NotTheSame.
    """
    truth, generator = copy.deepcopy(model).double(), torch.Generator().manual_seed(1)
    logits, states = [0.0], [0.0]
    for steps, batch in SHAPES:
        ours, theirs = model.zero_state(batch), model.zero_state(batch)
        exact = truth.zero_state(batch)
        for _ in range(2):
            tokens_TB = torch.randint(len(model.embedding), (steps, batch), generator=generator)
            tokens_TB[0, 0], tokens_TB[-1, -1] = 0, len(model.embedding) - 1
            exact_TBV, exact = _run(truth, tokens_TB, exact)
            ours_TBV, ours = _run(model, tokens_TB, ours)
            theirs_TBV, theirs = run(tokens_TB, theirs)
            logits.append(_compared("logits", theirs_TBV, ours_TBV, exact_TBV))
            for n, (found, expected, true) in enumerate(zip(theirs, ours, exact, strict=True)):
                for name, *each in zip("hc", found, expected, true, strict=True):
                    states.append(_compared(f"{name} of layer {n}", *each))
    return Parity(max(logits), max(states))


def _compared(what: str, theirs: Tensor, ours: Tensor, exact: Tensor) -> float:
    """The largest difference between theirs and ours."""
    if theirs.shape != ours.shape or theirs.dtype != torch.float32:
        raise NotTheSame(
            f"{what}: {tuple(theirs.shape)} of {theirs.dtype} in place of {tuple(ours.shape)} of float32"
        )
    spacing = torch.finfo(torch.float32).eps * max(1.0, exact.abs().max().item())
    rounding = max(_distance(ours, exact), spacing)
    found = _distance(theirs, exact)
    if not found <= MOST_ROUNDING * rounding:
        raise NotTheSame(
            f"{what} differ by up to {found:.3g} from those of the model in float64, and the model's own in "
            f"float32 by {rounding:.3g}: more than {MOST_ROUNDING} times that is no rounding"
        )
    return _distance(theirs, ours)


def _distance(one: Tensor, other: Tensor) -> float:
    return (one.double() - other.double()).abs().max().item()


def _run(model: AWDLSTM, tokens_TB: Tensor, state: State) -> tuple[Tensor, State]:
    result = model(tokens_TB, state, None)
    return model.decode(result.dropped_TBH), result.state


def _gates(stacked: Tensor) -> Tensor:
    """From torch's order of the gates, i, f, g, o, to ONNX's: i, o, f, c."""
    i, f, g, o = stacked.chunk(4)
    return torch.cat([i, o, f, g])


def _own(tensor: Tensor) -> Tensor:
    """On the CPU, and no part of a larger one: what is written to a file is what it shows."""
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
