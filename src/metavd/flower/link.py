"""The SuperLink behind a door: who speaks is known before a byte of what they send is read.

Flower serves three interfaces at one port. The fleet's is for nodes; it authenticates them, but after it has read a
request whole. The other two start runs, register nodes and hand out a run's state, and have no authentication of their
own. So, before Flower sees a request:

    connections   are counted by address, and cut where no request comes
    bodies        have a length, which is bounded
    the fleet     is answered where the headers are signed by a registered key, within five seconds of this clock
    the others    are answered to this machine's root and the user of this process, as Linux tells whose socket it is

Who is refused is answered a second later and cut, so that connections bound the rate of refusals, too.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import resource
import struct
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import compat
from .warm import beside, value_of

BODY = 32 << 20
"""Bytes of a request: Flower sends arrays in pieces of 5 MB, and an app may have 10 MB."""
CONNECTIONS = 128
"""From one address, or one IPv6 network of 64 bits; a node has at most a dozen."""
_ALL = 8
"""Times as many from all addresses together."""
_PATIENCE = 30.0
"""Seconds after which a connection without a request is cut."""
_PAUSE = 1.0
"""Seconds until a refusal is sent."""
_FILES = 65_536
"""Open files, so that connections that never finish their handshake do not use up all of them."""
_OWNER = "metavd.owner"
"""Where a request's state has the user whose socket it came from."""
_LOG = logging.getLogger("flwr")

Scope = MutableMapping[str, Any]
Channel = Callable[..., Awaitable[Any]]
App = Callable[[Scope, Channel, Channel], Awaitable[None]]
Address = tuple[str, int | None] | None


# --- whose connection it is ------------------------------------------------------------------------------------------


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


def owner(client: Address, server: Address, tables: Path = Path("/proc/net")) -> int | None:
    """Return the user whose open socket is the client's end of a connection within this machine; None: unknown.

    Linux lists sockets with the user who opened them. One that was closed already is listed as root's, so only
    established connections with a live socket count.
    """
    near, far = _spellings(client), _spellings(server)
    for name in ("tcp", "tcp6"):
        try:
            lines = (tables / name).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            words = line.split()
            if words[1] in near and words[2] in far and words[3] == "01" and words[9] != "0":
                return int(words[7])
    return None


def _spellings(address: Address) -> set[str]:
    """Return how Linux may write an address: words of four bytes in the machine's order, then the port."""
    if address is None or address[1] is None:
        return set()
    host = ipaddress.ip_address(address[0])
    host = getattr(host, "ipv4_mapped", None) or host
    packed = [host.packed, bytes(10) + b"\xff\xff" + host.packed][: 2 if host.version == 4 else 1]
    words = ("".join(f"{word:08X}" for (word,) in struct.iter_unpack("=I", each)) for each in packed)
    return {f"{each}:{address[1]:04X}" for each in words}


def knows_owners() -> bool:
    """Return whether this system tells who opened a connection."""
    return Path("/proc/net/tcp").exists()


@dataclass
class Turnstile:
    """Counts connections by address; those of operators are not counted."""

    most: int = CONNECTIONS
    counts: Counter[str] = field(default_factory=Counter)

    def enter(self, client: Address, server: Address) -> dict[str, Any] | None:
        """Return what requests of a new connection carry with them; None: it is one too many."""
        host = client[0] if client else ""
        user = None
        if is_local(host):
            user = owner(client, server) if knows_owners() else os.getuid()
        if is_operator(user):
            return {_OWNER: user}
        group = _group(host)
        if self.counts[group] >= self.most or self.counts.total() >= _ALL * self.most:
            return None
        self.counts[group] += 1
        return {_OWNER: user}

    def leave(self, client: Address, carried: dict[str, Any]) -> None:
        """Forget a connection that has ended."""
        if not is_operator(carried[_OWNER]):
            self.counts[_group(client[0] if client else "")] -= 1


def is_operator(user: int | None) -> bool:
    """Return whether a user of this machine may start runs and register nodes: the service's own, and root."""
    return user is not None and user in {os.getuid(), 0}


def _group(host: str) -> str:
    """Return what one stranger may have many of.

    >>> _group("2001:db8::1:2"), _group("10.0.0.7")
    ('2001:db8::/64', '10.0.0.7')
    """
    return str(ipaddress.ip_network(f"{host}/64", strict=False)) if ":" in host and "." not in host else host


# --- what is let in --------------------------------------------------------------------------------------------------


class Door:
    """ASGI middleware that refuses a request by its headers alone, before its body is read."""

    def __init__(self, app: App, pause: float = _PAUSE) -> None:
        self.app = app
        self.pause = pause

    async def __call__(self, scope: Scope, receive: Channel, send: Channel) -> None:
        """Answer with a refusal, or pass the request on."""
        if scope["type"] != "lifespan":
            status, why = await self.judge(scope)
            if status:
                await self.refuse(send, status, why)
                return
        await self.app(scope, receive, send)

    async def judge(self, scope: Scope) -> tuple[int, str]:
        """Return the status and the sentence with which a request is refused; 0: it is not."""
        path, headers = str(scope.get("path")), dict(scope.get("headers", ()))
        length = headers.get(b"content-length", b"0")
        if b"transfer-encoding" in headers or not length.isdigit():
            return 411, "metavd takes requests whose Content-Length is given, and no others"
        if int(length) > (0 if path == compat.HEALTH else BODY):
            return 413, f"metavd takes {BODY} bytes in a request, and none at {compat.HEALTH}"
        if path.startswith(compat.FLEET):
            why = await asyncio.to_thread(compat.stranger, scope)
            return (compat.refused_status(path), f"metavd does not let this node in: {why}") if why else (0, "")
        if path != compat.HEALTH and not is_operator(scope.get("state", {}).get(_OWNER)):
            return 403, "metavd answers this path to its own machine's root and the service's own user alone"
        return 0, ""

    async def refuse(self, send: Channel, status: int, why: str) -> None:
        """Answer a little later, and end the connection with whatever it still had to say."""
        await asyncio.sleep(self.pause)
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": compat.refusal_body(why)})


def main(arguments: Sequence[str], connections: int = CONNECTIONS) -> None:
    """Run flower-superlink with these arguments, behind the door; what it writes is its user's alone."""
    os.umask(0o077)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
    if not knows_owners():
        _LOG.warning("this system does not tell who opens a connection: every user of this machine can start runs")
    database = value_of(arguments, "--database")
    authority = "" if "--insecure" in arguments else value_of(arguments, "--ssl-ca-certfile")
    beside(f"127.0.0.1:{value_of(arguments, '--port', compat.LINK_PORT)}", authority=authority, database=database)
    gate = Turnstile(connections)
    compat.run_superlink(list(arguments), Door, compat.watched_protocol(gate.enter, gate.leave, _PATIENCE))


if __name__ == "__main__":
    main(sys.argv[1:])
