"""A step's gradients as a CUDA graph: recorded once for each length of a window, then replayed as a whole.

A GPU carries out a time step in less time than a program takes to ask for it. A graph is asked for once; but
it is always of the same addresses: what a step is given is copied to where the graph looks for it, and what
it makes, gradients too, is in the same place every time.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from models.awd_lstm import State
from models.masks import Masks

Losses = Callable[[Tensor, Tensor, State, Sequence[Masks | None]], tuple[Tensor, Tensor, State]]
"""Inputs and targets (T, B), a state and masks -> the total loss, figures (M,), and the state afterwards."""

Recorder = Callable[[Callable[[], None]], Callable[[], object]]
"""Takes what is to be done, and returns what does it again, with what is then at the same addresses."""


class Recorded:
    """Calls `losses` and makes the gradients, each of which is then its parameter's `grad`."""

    def __init__(
        self, losses: Losses, parameters: Sequence[nn.Parameter], recorder: Recorder | None = None
    ) -> None:
        self._losses, self._parameters = losses, parameters
        self._record = recorder or cuda_recorder()
        self._inputs: dict[tuple[int, torch.Size], Tensor] = {}
        """By their place among what is given, and their shape: windows of any length share what they can."""
        self._outputs: list[Tensor] = []
        self._replays: dict[int, Callable[[], object]] = {}
        """By the window's length, all else being as it always is."""

    def __call__(
        self, inputs_TB: Tensor, targets_TB: Tensor, state: State, masks: Sequence[Masks | None]
    ) -> tuple[Tensor, State]:
        """The figures, and the state afterwards."""
        given = (inputs_TB, targets_TB, state, tuple(masks))
        fixed = self._copied_in(given)
        if (length := len(inputs_TB)) not in self._replays:
            self._replays[length] = self._record(partial(self._compute, *fixed))
        self._replays[length]()
        figures, *states = (output.clone() for output in self._outputs[: 1 + 2 * len(state)])
        return figures, tuple(zip(states[::2], states[1::2], strict=True))

    def _copied_in(self, given: Any) -> Any:
        """The same, of tensors that stay where they are."""
        places = iter(range(len(list(_tensors(given)))))

        def copied(tensor: Tensor) -> Tensor:
            at = next(places), tensor.shape
            if at not in self._inputs:
                self._inputs[at] = torch.empty_like(tensor, memory_format=torch.contiguous_format)
            return self._inputs[at].copy_(tensor)

        return _mapped(copied, given)

    def _compute(self, *fixed: Any) -> None:
        total, figures, state = self._losses(*fixed)
        gradients = torch.autograd.grad(total, self._parameters)
        made = [figures, *_tensors(state), *gradients]
        if not self._outputs:  # the recorder's first call is no recording
            self._outputs = [torch.empty_like(each) for each in made]
            for parameter, gradient in zip(self._parameters, self._outputs[-len(gradients) :], strict=True):
                parameter.grad = gradient
        for output, each in zip(self._outputs, made, strict=True):
            output.copy_(each)


def cuda_recorder() -> Recorder:
    """Its graphs share their memory: one runs at a time, and keeps nothing there."""
    pool = torch.cuda.graph_pool_handle()

    def record(compute: Callable[[], None]) -> Callable[[], object]:
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch's
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            compute()  # what libraries load and choose at a first time cannot be recorded
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            compute()
        return graph.replay

    return record


def _tensors(given: Any) -> Iterator[Tensor]:
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, tuple):
        for each in given:
            yield from _tensors(each)
    elif isinstance(given, Masks):
        yield from _tensors(tuple(getattr(given, field.name) for field in dataclasses.fields(given)))


def _mapped(act: Callable[[Tensor], Tensor], given: Any) -> Any:
    """The same of other tensors, in the order of _tensors."""
    if isinstance(given, Tensor):
        return act(given)
    if isinstance(given, tuple):
        return tuple(_mapped(act, each) for each in given)
    if isinstance(given, Masks):
        fields = dataclasses.fields(given)
        return Masks(**{field.name: _mapped(act, getattr(given, field.name)) for field in fields})
    return given
