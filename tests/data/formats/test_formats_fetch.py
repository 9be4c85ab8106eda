"""Downloads, from a server on this machine: whole or not at all, checked, and honest about failure."""

from __future__ import annotations

import hashlib
import http.server
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from metavd.data.formats import BY_HAND, FORMATS, REMOTES, Remote, download, fetch
from metavd.data.source import SourceError

CONTENT = bytes(range(256)) * 5000


class Server(http.server.BaseHTTPRequestHandler):
    """Serves CONTENT in ways that its class attributes choose, and counts how often it was asked."""

    stop_after: int | None = None
    status = 200
    length = True
    asked = 0

    def do_GET(self):
        type(self).asked += 1
        if type(self).status != 200:
            self.send_error(type(self).status)
            return
        self.send_response(200)
        if self.length:
            self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        self.wfile.write(CONTENT if self.stop_after is None else CONTENT[: self.stop_after])

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    handler = type("Handler", (Server,), {})
    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    handler.url = f"http://127.0.0.1:{running.server_address[1]}/file.bin"
    yield handler
    running.shutdown()
    running.server_close()


def remote(server, **changes):
    proof = {"size": len(CONTENT), "checksum": hashlib.sha256(CONTENT).hexdigest()}
    return Remote("sub/file.bin", (server.url,), **{**proof, **changes})


@pytest.mark.parametrize("size", [len(CONTENT), None])
def test_downloads_and_leaves_what_is_right(server, tmp_path, size):
    """The file arrives whole, progress is told, and a second call asks for nothing."""
    seen = []
    path = download(remote(server, size=size), tmp_path, progress=lambda *args: seen.append(args))
    assert path == tmp_path / "sub/file.bin"
    assert path.read_bytes() == CONTENT
    assert seen[-1] == ("sub/file.bin", len(CONTENT), len(CONTENT))
    download(remote(server), tmp_path)
    assert server.asked == 1
    assert [p.name for p in path.parent.iterdir()] == ["file.bin"]


def test_what_breaks_off_is_not_kept(server, tmp_path):
    """A part looks like a whole file to whoever comes next, so nothing is left of it."""
    server.stop_after = 100_000
    with pytest.raises(SourceError, match=r"broke off after 100000 of 1280000 bytes"):
        download(remote(server), tmp_path)
    assert not list((tmp_path / "sub").iterdir())
    server.stop_after = None
    assert download(remote(server), tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": 5}, r"offers 1280000 bytes, but sub/file.bin has 5"),
        ({"checksum": "0" * 64}, r"has sha256 [0-9a-f]{64}, but it must be 0{64}; it was removed"),
        ({"checksum": "0" * 32}, r"has md5 [0-9a-f]{32}, but it must be 0{32}; it was removed"),
    ],
)
def test_wrong_content_is_not_kept(server, tmp_path, changes, message):
    """Size and checksum are compared; nothing of a wrong file is left."""
    with pytest.raises(SourceError, match=message):
        download(remote(server, **changes), tmp_path)
    assert not list((tmp_path / "sub").iterdir())


def test_more_than_the_file_has_is_not_taken(server, tmp_path):
    """A server that says no length cannot fill the disk: the known size is the end."""
    server.length = False
    with pytest.raises(SourceError, match=r"sends more than the 5 bytes of sub/file.bin"):
        download(remote(server, size=5), tmp_path)
    assert not list((tmp_path / "sub").iterdir())


def test_file_that_is_there_but_wrong(server, tmp_path):
    """Somebody else's file is not overwritten."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/file.bin").write_bytes(b"mine")
    with pytest.raises(SourceError, match="has 4 bytes, but it must have 1280000; remove it"):
        download(remote(server), tmp_path)
    assert (tmp_path / "sub/file.bin").read_bytes() == b"mine"


def test_no_network_is_one_honest_sentence(tmp_path):
    """A name that does not resolve, a port that is closed: what to do without a network."""
    dead = Remote("a.bin", ("http://127.0.0.1:9/a.bin", "http://no.such.host.invalid/a.bin"), 5, "")
    with pytest.raises(SourceError, match=r"a.bin could not be fetched: 127.0.0.1:9 cannot be reached") as caught:
        download(dead, tmp_path, timeout=5)
    text = str(caught.value)
    assert "no.such.host.invalid cannot be reached" in text
    assert "download http://127.0.0.1:9/a.bin elsewhere" in text
    assert "\n" not in text


def test_second_place_is_tried(server, tmp_path):
    """The first place that delivers is enough."""
    good = remote(server)
    both = replace(good, urls=("http://127.0.0.1:9/x", *good.urls))
    assert download(both, tmp_path).read_bytes() == CONTENT


def test_server_that_refuses(server, tmp_path):
    """Its answer is passed on."""
    server.status = 404
    with pytest.raises(SourceError, match="answered 404 Not Found"):
        download(remote(server), tmp_path)


def test_full_disk_is_seen_before(tmp_path):
    """A file that does not fit is not begun; a folder that cannot be is told."""
    with pytest.raises(SourceError, match="bytes free, but"):
        download(Remote("a", ("http://127.0.0.1:9/",), 1 << 60, ""), tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(SourceError, match="cannot be written"):
        download(Remote("file/a", ("http://127.0.0.1:9/",), 5, ""), tmp_path)


def test_table_of_remotes():
    """Every entry has a checksum of the right length and lands where its loader looks; the rest is by hand."""
    for name, files in REMOTES.items():
        assert name.removesuffix("-python") in FORMATS
        for file in files:
            assert len(bytes.fromhex(file.checksum)) == (32 if file.size else 16)
            assert all(url.startswith("http") and url.endswith(Path(file.path).name) for url in file.urls)
    for name in ("celeba", "femnist"):
        with pytest.raises(SourceError, match="https://"):
            fetch(name, "anywhere")
        assert name in BY_HAND
    with pytest.raises(SourceError, match="did you mean mnist or emnist"):
        fetch("imagenet", "anywhere")
