"""Certificates, keys, and the commands that make and use them."""

from __future__ import annotations

import hashlib
import io
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from rich.console import Console

from metavd.cli import main
from metavd.cli.federate import _watching
from metavd.cli.terminal import Reporter
from metavd.flower import security
from metavd.flower.config import FederationError
from metavd.flower.local import connection
from metavd.flower.registry import Member, Roster, load, rekeyed, save
from metavd.flower.warm import insisting


def handshake(folder: Path, authority: Path, name: str) -> str:
    """Let a server with the folder's certificate and a client that trusts the authority meet."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / security.SERVER, folder / security.SERVER_KEY)
    near, far = socket.socketpair()

    def serve() -> None:
        try:
            server.wrap_socket(far, server_side=True).close()
        except OSError:
            far.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with ssl.create_default_context(cafile=str(authority)).wrap_socket(near, server_hostname=name):
            return "met"
    except ssl.SSLCertVerificationError as error:
        return error.verify_message
    finally:
        near.close()
        thread.join()


def test_a_certificate_is_trusted_by_its_authority_for_its_names_alone(tmp_path):
    security.certificates(tmp_path / "one", ["fl.example.org", "10.0.0.7"])
    security.certificates(tmp_path / "two", ["fl.example.org"])
    one, two = tmp_path / "one", tmp_path / "two"
    assert handshake(one, one / security.CA, "fl.example.org") == "met"
    assert handshake(one, one / security.CA, "10.0.0.7") == "met"
    assert "Hostname mismatch" in handshake(one, one / security.CA, "evil.example.org")
    assert "unable to get local issuer certificate" in handshake(one, two / security.CA, "fl.example.org")


def test_a_second_call_renews_the_servers_certificate_and_keeps_the_authority(tmp_path):
    security.certificates(tmp_path, ["a"])
    before = (tmp_path / security.CA).read_bytes(), (tmp_path / security.SERVER).read_bytes()
    security.certificates(tmp_path, ["b"])
    assert (tmp_path / security.CA).read_bytes() == before[0]
    assert (tmp_path / security.SERVER).read_bytes() != before[1]
    assert handshake(tmp_path, tmp_path / security.CA, "b") == "met"


def test_an_authority_of_its_own_folder_never_gives_its_key_away(tmp_path, capsys):
    """The server's folder has what the server needs; a second call renews by the same authority."""
    there, server = tmp_path / "vault" / "ca", tmp_path / "server"
    for host in ("a", "b"):
        main(["federate", "certificates", str(server), "--ca-dir", str(there), "--host", host])
        assert handshake(server, there / security.CA, host) == "met"
    assert sorted(path.name for path in server.iterdir()) == [security.CA, security.SERVER, security.SERVER_KEY]
    assert (server / security.CA).read_bytes() == (there / security.CA).read_bytes()
    assert "keep it off the server" not in capsys.readouterr().out
    assert [folder.stat().st_mode & 0o777 for folder in (there, server)] == [0o700, 0o700]
    with pytest.raises(FederationError, match="where is the authority"):
        security.certificates(server, ["c"])
    main(["federate", "certificates", str(tmp_path / "one"), "--host", "a"])
    assert "keep it off the server (--ca-dir)" in capsys.readouterr().out


def test_private_files_are_private(tmp_path):
    security.certificates(tmp_path, ["a"])
    security.node_key(tmp_path / "node")
    for name in (security.CA_KEY, security.SERVER_KEY, "node"):
        assert (tmp_path / name).stat().st_mode & 0o077 == 0
    assert not any(b"PRIVATE" in (tmp_path / name).read_bytes() for name in (security.CA, security.SERVER, "node.pub"))
    usage = x509.load_pem_x509_certificate((tmp_path / security.SERVER).read_bytes()).extensions
    assert not usage.get_extension_for_class(x509.BasicConstraints).value.ca


def test_a_nodes_key_is_one_that_flower_takes(tmp_path):
    from flwr.cli.supernode.register import try_load_public_key

    public = security.node_key(tmp_path / "node")
    private = load_ssh_private_key((tmp_path / "node").read_bytes(), None)
    assert private.public_key() == load_ssh_public_key(public.read_bytes())
    assert security.fingerprint(public) == hashlib.sha256(try_load_public_key(public)).hexdigest()
    with pytest.raises(FederationError, match="is there already"):
        security.node_key(tmp_path / "node")


def test_a_node_that_is_not_let_in_insists_for_a_while(monkeypatch):
    """A node that was killed is refused until its heartbeat has run out; one without a registered key for good."""
    import httpx

    clock = [0.0]
    monkeypatch.setattr("metavd.flower.warm.time.monotonic", lambda: clock[0])
    monkeypatch.setattr("metavd.flower.warm.time.sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))

    def refusing(until: float):
        def activate(_client, _request):
            if clock[0] < until:
                raise httpx.HTTPStatusError("no", request=None, response=None)
            return "in"

        return activate

    assert insisting(refusing(20))(None, None) == "in"
    with pytest.raises(httpx.HTTPStatusError):
        insisting(refusing(1e9))(None, None)
    assert clock[0] < 100


# --- who is who ------------------------------------------------------------------------------------------------------


def test_a_client_with_a_new_key_keeps_its_number(tmp_path):
    registry = Roster((Member(0, "key 1", "north", True, 0), Member(1, "key 2", "south", True, 0)))
    (tmp_path / "run").mkdir()
    save(tmp_path / "run" / "registry.json", registry)
    public = security.node_key(tmp_path / "new")
    main(["federate", "rekey", str(tmp_path / "run"), "north", str(public)])
    first, second = load(tmp_path / "run" / "registry.json").members
    assert (first.number, first.identity) == (0, f"key {security.fingerprint(public)}")
    assert second == registry.members[1]
    with pytest.raises(FederationError, match="there is no other client 'east'"):
        rekeyed(registry, "east", "key 3")


@pytest.mark.parametrize("text", ["{", '{"version": 9, "members": []}', '{"version": 1, "members": [{}]}'])
def test_a_damaged_registry_is_named(tmp_path, text):
    (tmp_path / "registry.json").write_text(text)
    with pytest.raises(FederationError, match=r"registry.json is damaged \(.*put back your copy"):
        load(tmp_path / "registry.json")


# --- commands --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["link"], "a server needs --certificates DIR"),
        (["link", "--certificates", "nowhere"], "is not there; make it with metavd federate certificates"),
        (["node", "--superlink", "x:1"], "this node has no data"),
        (["node", "--superlink", "x:1", "--data", "digits"], "a node needs --authority ca.crt and --key FILE"),
        (["demo", "--method", "fedbe"], "name rows of the server's own with server-data"),
        (["demo", "--set", "lost=1"], "set has lost=1, but it makes simulated clients fail"),
        (["app", ".", "--superlink", "x:1"], "--superlink needs --certificates DIR with the server's ca.crt"),
        (["rekey", ".", "a", "b"], "holds no federation's run"),
        (["run", "rounds=0"], "rounds is 0, but must lie between 1 and"),
        (["run", "rownds=3"], "there is no run config key 'rownds'; did you mean rounds"),
        (["run", ".", "rounds=3"], "pyproject.toml is no app of metavd"),
        (["run", "rounds=3", "fedavg"], "'fedavg' is no key=value of a run config; write for example rounds=10"),
        (["run", "rounds=3"], "config.toml cannot be read"),
    ],
)
def test_wrong_input_is_said_in_a_sentence(tmp_path, monkeypatch, capsys, words, sentence):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "home"))
    with pytest.raises(SystemExit) as end:
        main(["federate", *words])
    assert end.value.code == 2
    assert sentence in capsys.readouterr().err


def test_files_for_an_operator(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "home"))
    main(["federate", "certificates", "certs", "--host", "fl.example.org"])
    main(["federate", "key", "north"])
    main(["federate", "app", ".", "--superlink", "127.0.0.1:8000", "--certificates", "certs"])
    assert str(tmp_path / "certs" / "ca.crt") in (tmp_path / "home" / "config.toml").read_text()
    assert (tmp_path / "metavd-app" / "pyproject.toml").exists()
    with pytest.raises(SystemExit) as end:
        main(["federate", "run", "metavd-app", "rounds=3", "--superlink", "there"])
    assert end.value.code == 2
    assert "config.toml has here; name one of them with --superlink" in capsys.readouterr().err
    assert handshake(tmp_path / "certs", tmp_path / "certs" / security.CA, "127.0.0.1") == "met"


@pytest.mark.parametrize("terminal", [False, True])
def test_the_demo_looks_again_at_an_interrupt(tmp_path, monkeypatch, terminal):
    """Python drops an exception that meets it in a callback, so whoever waits asks as well."""
    reporter = Reporter()
    reporter.err = Console(file=io.StringIO(), force_terminal=terminal)
    monkeypatch.setattr(Reporter, "interrupted", False)
    with _watching(tmp_path, 3, reporter) as look:
        look()
        monkeypatch.setattr(Reporter, "interrupted", True)
        with pytest.raises(KeyboardInterrupt):
            look()


def test_following_a_run_looks_again_at_an_interrupt(tmp_path, monkeypatch, capsys):
    """As above; the command's own way to the run is the one that is asked."""
    (tmp_path / "config.toml").write_text(connection("127.0.0.1:8000", None))
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))

    def follow(*_: object, meanwhile: Callable[[], None], **__: object) -> None:
        meanwhile()
        Reporter.interrupted = True  # as if the exception that comes with it had been dropped
        meanwhile()
        raise AssertionError("nobody heeded it")

    monkeypatch.setattr("metavd.flower.follow.follow", follow)
    with pytest.raises(SystemExit) as end:
        main(["federate", "run", f"out={tmp_path / 'run'}"])
    assert (end.value.code, capsys.readouterr().err) == (1, "metavd: stopped\n")


@pytest.mark.processes
@pytest.mark.skipif(not Path("/proc").exists(), reason="processes are found in /proc")
def test_the_demo_stops_everything_when_it_is_interrupted(tmp_path):
    """Ctrl-C in the middle of the first start or round: status 1, and nothing that it started is left."""
    environment = {**os.environ, "METAVD_TEST": str(tmp_path)}
    command = [sys.executable, "-m", "metavd", "federate", "demo", "--nodes", "2", "--out", str(tmp_path / "out")]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert "SuperLink at 127.0.0.1" in process.stderr.readline()
    time.sleep(2)
    process.send_signal(signal.SIGINT)
    assert process.wait(180) == 1
    marked = f"METAVD_TEST={tmp_path}".encode()
    left = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if marked in path.read_bytes().split(b"\0"):
                left.append(path.parent.name)
        except OSError:
            continue
    assert left == []
