"""How often anybody may ask. Counted in memory, in the grammar of the `limits` library: 1000/second."""

import math
import time

from limits import RateLimitItem, parse, parse_many
from limits.storage import MemoryStorage
from limits.strategies import FixedWindowRateLimiter, MovingWindowRateLimiter, RateLimiter

from service.errors import TooManyRequests

FAILURES = parse("10/minute")
"""Secrets that an address may get wrong."""
UNLIMITED = "off"


class Rates:
    """Requests of each token, or of each address without one, and failed sign-ins of each address."""

    def __init__(self, limit: str) -> None:
        storage = MemoryStorage()
        self._requests, self._failures = FixedWindowRateLimiter(storage), MovingWindowRateLimiter(storage)
        self._limits = parse_rate_limit(limit)

    def count_request(self, who: str) -> None:
        """Raises TooManyRequests."""
        for limit in self._limits:
            if not self._requests.hit(limit, "requests", who):
                raise _too_many(f"the limit of requests is {limit}", self._requests, limit, "requests", who)

    def require_few_failures(self, address: str) -> None:
        """Raises TooManyRequests once too many sign-ins of an address have failed."""
        if not self._failures.test(FAILURES, "failures", address):
            words = f"too many sign-ins have failed from {address}: the limit is {FAILURES}"
            raise _too_many(words, self._failures, FAILURES, "failures", address)

    def count_failure(self, address: str) -> None:
        self._failures.hit(FAILURES, "failures", address)


def parse_rate_limit(limit: str) -> list[RateLimitItem]:
    """None where there is no limit. Raises ValueError."""
    if limit == UNLIMITED:
        return []
    try:
        limits = parse_many(limit)
    except ValueError as error:
        raise ValueError(_no_limit(limit)) from error
    if any(found.amount < 1 for found in limits):
        raise ValueError(_no_limit(limit))
    return limits


def _no_limit(limit: str) -> str:
    return (
        f"{limit!r} is no rate limit; one is 1000/second, several are 1000/second;20000/minute, "
        f"and {UNLIMITED} is none"
    )


def _too_many(words: str, limiter: RateLimiter, limit: RateLimitItem, *key: str) -> TooManyRequests:
    seconds = max(1, math.ceil(limiter.get_window_stats(limit, *key).reset_time - time.time()))
    return TooManyRequests(f"{words}; ask again in {seconds} s", seconds)
