"""The SuperLink, with one door closed: from outside only the fleet's requests are answered.

Flower serves three interfaces at one port. The fleet's is for nodes, and knows who speaks. The other two start runs,
register nodes and hand out a run's state, and have no authentication of their own; whoever reaches the port could
register a node of his own. So requests to them are answered only if they come from this machine.
"""

from __future__ import annotations

import ipaddress
import sys
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from . import compat
from .warm import beside, value_of

OUTSIDE = ("/v1/fleet/", "/health")
"""Paths that are served to everybody."""

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Callable[..., Awaitable[Any]], Callable[..., Awaitable[Any]]], Awaitable[None]]


def is_local(host: str | None) -> bool:
    """Return whether a peer is this machine.

    >>> is_local("127.0.0.1"), is_local("::1"), is_local("::ffff:127.0.0.1"), is_local("10.0.0.7"), is_local(None)
    (True, True, True, False, False)
    """
    try:
        address = ipaddress.ip_address(host or "")
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


class Door:
    """ASGI middleware that lets the fleet's requests through, and all others from this machine alone."""

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(
        self, scope: Scope, receive: Callable[..., Awaitable[Any]], send: Callable[..., Awaitable[Any]]
    ) -> None:
        """Answer 403, or pass the request on."""
        peer = (scope.get("client") or (None,))[0]
        if scope["type"] == "lifespan" or is_local(peer) or str(scope.get("path")).startswith(OUTSIDE):
            await self.app(scope, receive, send)
            return
        body = b"metavd answers this path to its own machine alone"
        await send({"type": "http.response.start", "status": 403, "headers": [(b"content-type", b"text/plain")]})
        await send({"type": "http.response.body", "body": body})


def main(arguments: Sequence[str]) -> None:
    """Run flower-superlink with these arguments, behind the door."""
    authority = "" if "--insecure" in arguments else value_of(arguments, "--ssl-ca-certfile")
    beside(f"127.0.0.1:{value_of(arguments, '--port', '8000')}", authority=authority)
    compat.run_superlink(list(arguments), Door)


if __name__ == "__main__":
    main(sys.argv[1:])
