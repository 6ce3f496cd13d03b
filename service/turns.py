"""What is answered by a few threads: many at once hold each other up.

SQLite gives the interpreter's lock back for every row, and each of twenty threads waits for nineteen then:
they answer half as many lists a second as two do. Who looks, who submits and who is asked for a token have
threads of their own, so that nobody who looks waits for the database's lock, however many wait for that.
"""

from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any, TypeVar

from anyio import CapacityLimiter, to_thread
from anyio.lowlevel import RunVar

R = TypeVar("R")
LOOKS_AT_ONCE = 2
LOOKS_AT_ONCE_OVER_A_NETWORK = 16
"""A look is mostly waiting there."""


class Turns:
    """So many threads of each event loop, for one kind of work."""

    def __init__(self, name: str, at_once: int) -> None:
        self._at_once = at_once
        self._limiter: RunVar[CapacityLimiter] = RunVar(name)

    def allow(self, at_once: int) -> None:
        """From now on, in the running event loop."""
        self.of_this_loop().total_tokens = at_once

    async def take(self, function: Callable[..., R], *arguments: Any, **named: Any) -> R:
        return await to_thread.run_sync(partial(function, *arguments, **named), limiter=self.of_this_loop())

    def __call__(self, endpoint: Callable[..., Any]) -> Callable[..., Any]:
        """For a route; it is described as it was."""

        async def take_turn(**values: Any) -> Any:
            return await self.take(endpoint, **values)

        take_turn.__name__, take_turn.__doc__ = endpoint.__name__, endpoint.__doc__
        take_turn.__annotations__ = endpoint.__annotations__
        take_turn.__signature__ = signature(endpoint)  # type: ignore[attr-defined]
        return take_turn

    def of_this_loop(self) -> CapacityLimiter:
        """To be held by who needs no thread for its turn."""
        limiter = self._limiter.get(None)
        if limiter is None:
            self._limiter.set(limiter := CapacityLimiter(self._at_once))
        return limiter


looks = Turns("looks", LOOKS_AT_ONCE)
"""For what reads our database, and nothing that may be slow."""
submits = Turns("submits", 2)
"""For what checks much and writes little."""
compares = Turns("compares", 1)
"""For what reads every trial of two sweeps: seconds, where they are large and run."""
admits = Turns("admits", 1)
"""For who may ask: read anew once a second."""
exports = Turns("exports", 1)
"""For files that are made of a whole sweep: seconds of work, of which one at a time is enough."""
