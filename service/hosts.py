"""Names of machines, as they stand in URLs and settings."""

import ipaddress
from urllib.parse import urlsplit


def hostname(netloc: str) -> str:
    """Of `host:port`, in lower case and without brackets; empty where that is not what it is."""
    try:
        parsed = urlsplit(f"//{netloc}")
        parsed.port  # noqa: B018  # raises ValueError where it is none
    except ValueError:
        return ""
    return "" if parsed.netloc != netloc or parsed.username is not None else (parsed.hostname or "")


def is_loopback(host: str) -> bool:
    """Whether a host, without brackets, is this machine, and cannot be another one."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
