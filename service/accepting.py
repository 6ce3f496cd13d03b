"""Which of several forms of an answer a client would rather have."""

from collections.abc import Sequence


def preferred(accept: str, offered: Sequence[str]) -> str:
    """The media type that an Accept header wishes for most; the first of those offered where it does not say.

    What is asked for by name goes before what a wildcard allows.
    """
    wishes = _wishes(accept)
    return max(offered, key=lambda offer: (_quality(offer, wishes), -offered.index(offer)))


def _wishes(accept: str) -> dict[str, float]:
    found = {}
    for wish in accept.lower().split(","):
        media_type, _, parameters = wish.partition(";")
        quality = parameters.replace(" ", "").partition("q=")[2] or "1"
        found[media_type.strip()] = float(quality) if quality.replace(".", "", 1).isdigit() else 1.0
    return found


def _quality(offer: str, wishes: dict[str, float]) -> tuple[bool, float]:
    """Whether it is named, and how much it is wished for."""
    if offer in wishes:
        return wishes[offer] > 0, wishes[offer]
    group = f"{offer.partition('/')[0]}/*"
    return False, wishes.get(group, wishes.get("*/*", 0.0))
