"""What the headers of a browser's request tell: which machine it means, and whether a page of another site sends it.

Any web page that a person opens can send requests to 127.0.0.1. The admin port of a broker and the console use these
rules against it, the same as in Go's `CrossOriginProtection`. Programs other than browsers send no such header.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
"""They change nothing."""


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


def names_this_machine(host_header: str) -> bool:
    """Whether a Host header is an address or `localhost`: no name that somebody else could point here."""
    try:
        host = urlsplit(f"//{host_header}").hostname or ""
        if host == "localhost" or host.endswith(".localhost"):
            return True
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def comes_from_elsewhere(method: str, headers: Mapping[str, str]) -> bool:
    """Whether a browser sends this for a page of another origin."""
    if method in SAFE_METHODS:
        return False
    site = headers.get("sec-fetch-site")
    if site is not None:
        return site not in ("same-origin", "none")
    origin = headers.get("origin")
    if origin is None:
        return False
    try:
        return urlsplit(origin).netloc.lower() != headers.get("host", "").lower()
    except ValueError:
        return True
