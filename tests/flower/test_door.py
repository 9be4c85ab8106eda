"""Strangers, users of the server's machine and their apps, before a SuperLink: a real one, and its parts."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import datetime
import json
import os
import re
import socket
import sqlite3
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.proto.fleet_pb2 import ActivateNodeRequest
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message
from flwr.superlink.routers.fleet import node_auth

from metavd.cli import main
from metavd.flower import apps, compat, security
from metavd.flower.compat import FLEET, HEALTH
from metavd.flower.config import FederationError, app_toml
from metavd.flower.link import BODY, Door, Turnstile, owner
from metavd.flower.local import HOST, LocalFederation, federation

MB = 1 << 20
ACTIVATE = f"{FLEET}activate-node"


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFederation]:
    with federation(tmp_path_factory.mktemp("door")) as found:
        found.link()
        found.register(["anna"])
        yield found


def connect(local: LocalFederation) -> ssl.SSLSocket:
    plain = socket.create_connection((HOST, local.port), timeout=60)
    return ssl.create_default_context(cafile=str(local.authority)).wrap_socket(plain, server_hostname=HOST)


def head(path: str, length: int | None, **headers: str) -> bytes:
    lines = {"Host": HOST, "Content-Type": "application/protobuf"} | headers
    lines |= {"Transfer-Encoding": "chunked"} if length is None else {"Content-Length": str(length)}
    return f"POST {path} HTTP/1.1\r\n{''.join(f'{a}: {b}{chr(13)}{chr(10)}' for a, b in lines.items())}\r\n".encode()


def post(local: LocalFederation, path: str, length: int | None, body: bytes = b"", **headers: str) -> str:
    """Send a request whose body is `length` bytes, as far as the server takes them, and return the answer."""
    with connect(local) as line:
        line.sendall(head(path, length, **headers) + body)
        try:
            for _ in range(((length or 0) - len(body)) // MB):
                line.sendall(bytes(MB))
        except OSError:
            pass
        try:
            found = b"".join(iter(lambda: line.recv(65_536), b""))
        except OSError:
            found = b""
        return found.decode(errors="replace")


def resident(local: LocalFederation) -> float:
    """Return the MB that the SuperLink holds."""
    lines = Path(f"/proc/{local.processes['superlink'].pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024


def signed(local: LocalFederation, name: str, ahead: float = 0.0) -> tuple[dict[str, str], bytes]:
    """Return the headers and the body with which a node asks to be let in, by a clock that is so many seconds ahead."""
    private: Any = load_ssh_private_key(local.key(name).read_bytes(), None)
    key = public_key_to_bytes(private.public_key())
    stamp = (datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=ahead)).isoformat()
    headers = {
        node_auth.FLEET_HTTP_PUBLIC_KEY_HEADER: base64.b64encode(key).decode(),
        node_auth.FLEET_HTTP_SIGNATURE_HEADER: base64.b64encode(sign_message(private, stamp.encode())).decode(),
        node_auth.TIMESTAMP_HEADER: stamp,
    }
    return headers, ActivateNodeRequest(public_key=key, heartbeat_interval=10).SerializeToString()


# --- strangers -------------------------------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.parametrize("size", [BODY, 60 * MB], ids=["at the bound", "above it"])
def test_what_strangers_post_is_not_held(local, size):
    """Five bodies at once without a key; before there was a door, five of 60 MB took 712 MB and kept them."""
    post(local, ACTIVATE, 1)  # the first request of all makes what the others share
    before = resident(local)
    threads = [threading.Thread(target=post, args=(local, ACTIVATE, size)) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert resident(local) - before < 32


@pytest.mark.processes
@pytest.mark.parametrize(
    ("path", "length", "status", "sentence"),
    [
        (ACTIVATE, BODY + 1, 413, "metavd takes 33554432 bytes"),
        (ACTIVATE, None, 411, "Content-Length"),
        (ACTIVATE, 0, 400, "it shows no key"),
        (f"{FLEET}push-object", 10, 401, "it shows no key"),
        ("/health", 10, 413, "none at /health"),
    ],
)
def test_a_stranger_is_refused_by_the_headers_alone(local, path, length, status, sentence):
    """Nothing of the body has been sent when the answer comes."""
    with connect(local) as line:
        line.sendall(head(path, length))
        said = line.recv(4096).decode() + line.recv(4096).decode()
    assert said.startswith(f"HTTP/1.1 {status} ")
    assert sentence in said


@pytest.mark.processes
def test_who_is_not_registered_or_has_another_clock_is_told_so(local):
    """A key that nobody registered, a signature of something else, a clock an hour ahead; then all as it should be."""
    headers, body = signed(local, "nobody")
    assert "its key is not registered" in post(local, ACTIVATE, len(body), body, **headers)
    headers, body = signed(local, "anna")
    later, _ = signed(local, "anna", ahead=1)
    mixed = headers | {node_auth.TIMESTAMP_HEADER: later[node_auth.TIMESTAMP_HEADER]}
    assert "its signature is wrong" in post(local, ACTIVATE, len(body), body, **mixed)
    # On a busy machine some seconds pass between the signature and its judgement.
    headers, body = signed(local, "anna", ahead=3600)
    said = post(local, ACTIVATE, len(body), body, **headers)
    ahead = re.search(r"its clock is (\d+) s ahead of the server's; set both by the same time server", said)
    assert ahead is not None, said
    assert 3540 <= int(ahead[1]) <= 3600
    headers, body = signed(local, "anna", ahead=-400)
    said = post(local, ACTIVATE, len(body), body, **headers)
    behind = re.search(r"its clock is (\d+) s behind the server's", said)
    assert behind is not None, said
    assert 400 <= int(behind[1]) <= 460
    headers, body = signed(local, "anna")
    assert post(local, ACTIVATE, len(body), body, Connection="close", **headers).startswith("HTTP/1.1 200 ")


@pytest.mark.processes
def test_half_open_connections_are_survived(local):
    """Three hundred that never begin their handshake; the next one is answered."""
    lines = [socket.create_connection((HOST, local.port)) for _ in range(300)]
    try:
        with connect(local) as line:
            line.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert line.recv(100).startswith(b"HTTP/1.1 200 ")
    finally:
        for each in lines:
            each.close()


def test_connections_are_counted_by_address_and_cut_when_nothing_is_asked():
    """The second line of an address is cut at once, the first after its patience; one with a request is answered."""
    import uvicorn

    async def house(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    async def ends(port: int, text: bytes = b"") -> tuple[float, bytes]:
        began = time.monotonic()
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(text)
        try:
            said = await asyncio.wait_for(reader.read(), 20)
        except ConnectionError:
            said = b""
        writer.close()
        return time.monotonic() - began, said

    async def scene() -> None:
        gate = Turnstile(1)
        where = ("10.0.0.7", 1)
        strangers = compat.watched_protocol(
            lambda *_: gate.enter(where, None), lambda _, carried: gate.leave(where, carried), 2
        )
        config = uvicorn.Config(house, host=HOST, port=0, http=strangers, log_level="error", lifespan="off")
        server = uvicorn.Server(config)
        running = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        first = asyncio.create_task(ends(port))
        while not gate.counts.total():  # the server has seen it
            await asyncio.sleep(0.01)
        assert (await ends(port, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"))[1] == b""
        assert 1.9 < (await first)[0] < 15
        assert (await ends(port, b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"))[1].startswith(
            b"HTTP/1.1 200 "
        )
        assert gate.counts.total() == 0
        server.should_exit = True
        await running

    asyncio.run(scene())


# --- users of the server's machine -----------------------------------------------------------------------------------

ASK = """
import ssl, sys, urllib.request, urllib.error
trusting = ssl._create_unverified_context()
try:
    urllib.request.urlopen(urllib.request.Request(sys.argv[1], b"", {"Content-Type": "application/protobuf"}),
                           context=trusting)
except urllib.error.HTTPError as error:
    print(error.code, error.read().decode())
else:
    print(200)
"""


OTHERS = "/usr/bin/python3"
"""The tests' own may lie in a folder that other users cannot enter."""


@pytest.mark.processes
@pytest.mark.skipif(os.getuid() != 0 or not Path(OTHERS).exists(), reason="only root can be somebody else")
@pytest.mark.parametrize("path", ["/v1/control/start-run", "/v1/control/register-node", "/v1/runtime/acquire-task"])
def test_another_user_of_the_machine_is_not_answered(local, path):
    """Who may read ca.crt and reach the port still starts no run, registers no key and takes no task."""
    url = f"https://{HOST}:{local.port}{path}"
    found = subprocess.run(
        [OTHERS, "-I", "-c", ASK, url], user=65_534, group=65_534, extra_groups=[], cwd="/", env={},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert found.stdout.startswith("403 "), found.stderr
    assert "root and the service's own user alone" in found.stdout
    own = subprocess.run([sys.executable, "-c", ASK, url], capture_output=True, text=True, check=True).stdout
    assert "alone" not in own


def test_owner_reads_whose_socket_it_is(tmp_path):
    """A live pair of sockets is ours; one that was closed is nobody's, although Linux then lists it as root's."""
    with socket.create_server((HOST, 0)) as server:
        client = socket.create_connection(server.getsockname())
        near, far = client.getsockname(), server.getsockname()
        held, _ = server.accept()
        assert owner(near, far) == os.getuid()
        assert owner(far, near) == os.getuid()
        assert owner((HOST, 1), far) is None
        assert owner(("::ffff:127.0.0.1", near[1]), (f"::ffff:{HOST}", far[1])) == os.getuid()
        client.close()
        assert owner(near, far) is None
        held.close()
    line = "0: 0100007F:0001 0100007F:0002 {} 0:0 0:0 0 {} 0 {} 2"
    for state, inode, expected in (("01", "7", 42), ("01", "0", None), ("06", "7", None)):
        (tmp_path / "tcp").write_text(f"head\n{line.format(state, 42, inode)}\n")
        assert owner((HOST, 1), (HOST, 2), tmp_path) == expected


@pytest.mark.processes
def test_what_the_service_writes_is_its_own(local):
    """Files 0600, folders 0700: the database with its logs, and what Flower keeps."""
    paths = [local.folder / "state.db", *local.folder.glob("state.db-*"), local.folder / security.SERVER_KEY]
    assert len(paths) > 2
    assert [path for path in paths if path.stat().st_mode & 0o077] == []


# --- apps ------------------------------------------------------------------------------------------------------------


def test_an_app_with_code_runs_only_if_it_is_registered(tmp_path, capsys):
    """The app of metavd, with any run config, needs no registering; another's hash does, and a changed app anew."""
    from flwr.cli.build import build_fab_from_disk

    file = apps.registered(str(tmp_path / "federation.db"))
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for folder in (ours, theirs):
        folder.mkdir()
        (folder / "pyproject.toml").write_text(app_toml())
    assert apps.is_ours(build_fab_from_disk(ours), file)
    (ours / "pyproject.toml").write_text(app_toml().replace("rounds = 20", "rounds = 7"))
    assert apps.is_ours(build_fab_from_disk(ours), file)
    (theirs / "evil.py").write_text("import os\n")
    for text in (app_toml(), app_toml().replace("metavd.flower.server:app", "evil:app")):
        (theirs / "pyproject.toml").write_text(text)
        with pytest.raises(FederationError, match="brings code of its own and is not registered here"):
            apps.is_ours(build_fab_from_disk(theirs), file)
    main(["federate", "allow", str(theirs), "--database", str(tmp_path / "federation.db")])
    assert compat.app_hash(theirs) in capsys.readouterr().out
    assert not apps.is_ours(build_fab_from_disk(theirs), file)
    (theirs / "evil.py").write_text("import sys\n")
    with pytest.raises(FederationError, match="is not registered here"):
        apps.is_ours(build_fab_from_disk(theirs), file)
    assert file == tmp_path / "apps.txt"
    assert file.stat().st_mode & 0o777 == 0o600


def test_nothing_of_a_run_stays_in_the_database(tmp_path):
    """What was deleted is gone from the file and from its write-ahead log, while others have both open."""
    path, log, secret = tmp_path / "state.db", tmp_path / "state.db-wal", b"weights of a site " * 4000
    tidier = apps.Tidier(str(path))
    tidier.look(True)
    assert not path.exists()  # nothing is made
    with contextlib.closing(sqlite3.connect(path)) as link:
        link.execute("PRAGMA journal_mode=WAL")
        link.execute("CREATE TABLE object (content BLOB)")

        def forgotten() -> None:
            link.execute("INSERT INTO object VALUES (?)", (secret,))
            link.commit()
            link.execute("DELETE FROM object")
            link.commit()
            assert secret[:100] in path.read_bytes() + log.read_bytes()

        def gone() -> bool:
            return secret[:18] not in path.read_bytes() + log.read_bytes()

        forgotten()
        tidier.look(True)
        assert gone()
        assert log.stat().st_size == 0
        tidier.look(False)
        forgotten()  # later than the end of the run
        tidier.look(False)
        assert gone()
        assert log.stat().st_size == 0
        link.execute("INSERT INTO object VALUES ('a heartbeat')")
        link.commit()
        before = log.stat().st_size
        tidier.look(False)
        assert log.stat().st_size == before > 0  # nothing was deleted
        tidier.look(True)
        assert log.stat().st_size == 0
        assert link.execute("SELECT * FROM object").fetchall() == [("a heartbeat",)]


def test_whoever_reads_only_puts_the_tidying_off(tmp_path, monkeypatch):
    """A reader that looks at an older state keeps the log from being cut; the next look without one cuts it."""
    monkeypatch.setattr(apps, "_WAIT", 0.05)
    path, log, secret = tmp_path / "state.db", tmp_path / "state.db-wal", b"weights of a site " * 4000
    tidier = apps.Tidier(str(path))
    with contextlib.closing(sqlite3.connect(path)) as link, contextlib.closing(sqlite3.connect(path)) as reader:
        link.execute("PRAGMA journal_mode=WAL")
        link.execute("CREATE TABLE object (content BLOB)")
        link.execute("INSERT INTO object VALUES (?)", (secret,))
        link.commit()
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM object").fetchone()
        link.execute("DELETE FROM object")
        link.commit()
        tidier.look(True)
        assert secret[:18] in log.read_bytes()
        reader.rollback()
        tidier.look(False)
        assert secret[:18] not in path.read_bytes() + log.read_bytes()
        assert log.stat().st_size == 0


# --- the door alone --------------------------------------------------------------------------------------------------


def knock(path: str, user: int | None = None, **headers: str) -> tuple[int, str]:
    """Return the status and the words that the door, or the house behind it (200), answers."""
    said: list[Any] = []

    async def house(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})

    async def send(message: Any) -> None:
        said.append(message.get("status") or json.loads(message["body"])["detail"])

    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "path": path, "headers": pairs, "state": {"metavd.owner": user}}
    asyncio.run(Door(house, pause=0)(scope, None, send))  # type: ignore[arg-type]
    return said[0], said[-1]


def test_only_operators_reach_what_is_not_the_fleets():
    """Whoever may reach the port can be a node, but neither start a run nor register a key nor read a run's state."""
    assert knock("/health")[0] == 200
    assert knock("/v1/fleet/pull-messages")[0] == 401
    for path in ("/v1/control/register-node", "/v1/control/start-run", "/v1/runtime/acquire-task", "/docs", "/"):
        assert [knock(path, user)[0] for user in (None, 4242, os.getuid(), 0)] == [403, 403, 200, 200]
    assert knock("/docs", 0, **{"content-length": "-1"})[0] == 411


def test_flower_still_has_the_paths_that_the_door_knows():
    """A new version of Flower with other paths must not open or close the door unnoticed."""
    from flwr.superlink.main import create_app

    paths = set(create_app().openapi()["paths"])
    outside = {path for path in paths if path.startswith((FLEET, HEALTH))}
    assert {ACTIVATE, "/v1/fleet/pull-messages", "/v1/fleet/push-object", HEALTH} <= outside
    assert not any("control" in path or "runtime" in path for path in outside)
