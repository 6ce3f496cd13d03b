"""What is answered by a few threads: many at once hold each other up.

SQLite gives the interpreter's lock back for every row, and each of twenty threads waits for nineteen then:
they answer half as many lists a second as three do. Who looks and who submits have threads of their own, so
that nobody who looks waits for the database's lock.
"""

from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

from anyio import CapacityLimiter, to_thread
from anyio.lowlevel import RunVar

Endpoint = Callable[..., Any]


def _in_turn(name: str, at_once: int) -> Callable[[Endpoint], Endpoint]:
    limiter: RunVar[CapacityLimiter] = RunVar(name)  # of an event loop

    def decorate(endpoint: Endpoint) -> Endpoint:
        async def take_turn(**values: Any) -> Any:
            if (limit := limiter.get(None)) is None:
                limiter.set(limit := CapacityLimiter(at_once))
            return await to_thread.run_sync(partial(endpoint, **values), limiter=limit)

        take_turn.__name__, take_turn.__doc__ = endpoint.__name__, endpoint.__doc__
        take_turn.__annotations__ = endpoint.__annotations__
        take_turn.__signature__ = signature(endpoint)  # type: ignore[attr-defined]
        return take_turn

    return decorate


looks = _in_turn("looks", 2)
"""For a route that reads our database, and nothing that may be slow."""
submits = _in_turn("submits", 2)
"""For a route that checks much and writes little."""
