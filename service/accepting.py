"""Which of several forms of an answer a client would rather have."""

import re
from collections.abc import Sequence

QUALITY = re.compile(r";\s*q=\s*(0(?:\.[0-9]{0,3})?|1(?:\.0{0,3})?)\s*(?:;|$)")


def preferred(accept: str, offered: Sequence[str]) -> str:
    """The media type that an Accept header wishes for most (RFC 9110, 12.5.1); of equals, one that it names,
    and then the first of those offered. Also where it wishes for none of them.
    """
    wishes = {}
    for wish in accept.lower().split(","):
        quality = QUALITY.search(wish)
        wishes[wish.partition(";")[0].strip()] = float(quality[1]) if quality else 1.0
    return max(offered, key=lambda offer: (*_quality(offer, wishes), -offered.index(offer)))


def _quality(offer: str, wishes: dict[str, float]) -> tuple[float, bool]:
    """How much it is wished for, and whether by its name."""
    if offer in wishes:
        return wishes[offer], True
    group = f"{offer.partition('/')[0]}/*"
    return wishes.get(group, wishes.get("*/*", 0.0)), False
