"""A step's gradients as a CUDA graph: recorded once for each length of a window, then replayed as a whole.

A GPU carries out a time step in less time than a program takes to ask for it. A graph is asked for once; but
it is always of the same addresses: what a step is given is copied to where the graph looks for it, and what
it makes, gradients too, is in the same place every time.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from models.awd_lstm import State
from models.masks import Masks
from trials.memory import MOST_GRAPHS

Losses = Callable[[Tensor, Tensor, State, Sequence[Masks | None]], tuple[Tensor, Tensor, State]]
"""Inputs and targets (T, B), a state and masks -> the total loss, figures (M,), and the state afterwards."""

Recorder = Callable[[Callable[[], None]], Callable[[], object]]
"""Takes what is to be done, and returns what does it again, with what is then at the same addresses."""


class Recorded:
    """Makes the gradients of a loss, each of which is then its parameter's `grad`.

    It knows nobody that knows it: graphs go with the last reference to it. Left to the garbage collector they
    might go while another one is recorded, and CUDA would end that.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], longest: int, recorder: Recorder) -> None:
        """`longest` is the length of the longest window that there will be."""
        self._parameters, self._longest, self._record = parameters, longest, recorder
        self._inputs: dict[tuple[int, torch.Size], Tensor] = {}
        """By their place among what is given, and their shape but for time: all windows share them."""
        self._gradients: list[Tensor] = []
        self._outputs: list[Tensor] = []
        self._replays: dict[int, Callable[[], object]] = {}
        """By the window's length, all else being as it always is."""

    def __call__(
        self,
        losses: Losses,
        inputs_TB: Tensor,
        targets_TB: Tensor,
        state: State,
        masks: Sequence[Masks | None],
    ) -> tuple[Tensor, State]:
        """The figures, and the state afterwards. `losses` is the same every time."""
        if not self._gradients:
            self._gradients = [torch.zeros_like(parameter) for parameter in self._parameters]
            for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
                parameter.grad = gradient
        length = len(inputs_TB)
        fixed = self._copied_in((inputs_TB, targets_TB, state, tuple(masks)), length)
        replay = self._replays.get(length)
        if replay is None:
            replay = partial(self._compute, losses, *fixed)
            if len(self._replays) < MOST_GRAPHS:  # further lengths are rare
                replay = self._replays[length] = self._record(replay)
        replay()
        figures, *states = (output.clone() for output in self._outputs)
        return figures, tuple(zip(states[::2], states[1::2], strict=True))

    def _copied_in(self, given: Any, length: int) -> Any:
        """The same, of tensors that stay where they are."""
        places = itertools.count()

        def copied(tensor: Tensor) -> Tensor:
            at, rows = (next(places), tensor.shape[1:]), len(tensor)
            if at not in self._inputs:
                self._inputs[at] = tensor.new_empty(self._longest if rows == length else rows, *at[1])
            return self._inputs[at][:rows].copy_(tensor)

        return _mapped(copied, given)

    def _compute(self, losses: Losses, *fixed: Any) -> None:
        total, figures, state = losses(*fixed)
        gradients = torch.autograd.grad(total, self._parameters)
        made = [figures, *itertools.chain(*state)]
        if not self._outputs:  # the recorder's first call is no recording
            self._outputs = [torch.empty_like(each) for each in made]
        for place, each in zip([*self._outputs, *self._gradients], [*made, *gradients], strict=True):
            place.copy_(each)


def cuda_recorder(device: torch.device) -> Recorder:
    """Its graphs share their memory: one runs at a time, and keeps nothing there.

    They have a stream to themselves, and go together: what cuBLAS works with is one for all graphs of a
    stream, and torch takes it from all of them as soon as one of them goes (pytorch, issue 193402).
    """
    pool = torch.cuda.graph_pool_handle()
    aside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's

    def record(compute: Callable[[], None]) -> Callable[[], object]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(device):  # streams are those of the current one
            ours = torch.cuda.current_stream()
            aside.wait_stream(ours)
            try:
                with torch.cuda.stream(aside):
                    compute()  # what libraries load and choose at a first time cannot be recorded
                    with torch.cuda.graph(graph, pool, aside, capture_error_mode="thread_local"):
                        compute()
            finally:  # out of memory, say: what was begun still reads what may then be given to others
                ours.wait_stream(aside)
        return graph.replay

    return record


def _mapped(act: Callable[[Tensor], Tensor], given: Any) -> Any:
    """The same of other tensors."""
    if isinstance(given, Tensor):
        return act(given)
    if isinstance(given, tuple):
        return tuple(_mapped(act, each) for each in given)
    if isinstance(given, Masks):
        fields = dataclasses.fields(given)
        return Masks(**{field.name: _mapped(act, getattr(given, field.name)) for field in fields})
    return given
