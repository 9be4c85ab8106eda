"""Downloads, from a server on this machine: resumed, checked, and honest about failure."""

from __future__ import annotations

import hashlib
import http.server
import threading
from pathlib import Path

import pytest

from metavd.data.formats import BY_HAND, FORMATS, REMOTES, Remote, download, fetch
from metavd.data.formats.fetch import _check_space
from metavd.data.source import SourceError

CONTENT = bytes(range(256)) * 5000


class Server(http.server.BaseHTTPRequestHandler):
    """Serves CONTENT in ways that its class attributes choose, and writes down what it was asked."""

    ranges = True
    stop_after: int | None = None
    status = 200
    asked: list[str | None] = []  # noqa: RUF012

    def do_GET(self):
        start = 0
        asked = self.headers.get("Range")
        type(self).asked.append(asked)
        if type(self).status != 200:
            self.send_error(type(self).status)
            return
        if asked and self.ranges:
            start = int(asked.removeprefix("bytes=").rstrip("-"))
            if start >= len(CONTENT):
                self.send_error(416)
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(CONTENT) - 1}/{len(CONTENT)}")
        else:
            self.send_response(200)
        body = CONTENT[start:]
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body if self.stop_after is None else body[: self.stop_after])

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    handler = type("Handler", (Server,), {"asked": []})
    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=running.serve_forever, daemon=True)
    thread.start()
    handler.url = f"http://127.0.0.1:{running.server_address[1]}/file.bin"
    yield handler
    running.shutdown()
    running.server_close()


def remote(server, **changes):
    proof = {"size": len(CONTENT), "md5": hashlib.md5(CONTENT).hexdigest(),
             "sha256": hashlib.sha256(CONTENT).hexdigest()}  # fmt: skip
    return Remote("sub/file.bin", (server.url,), **{**proof, **changes})


def test_downloads_and_leaves_what_is_right(server, tmp_path):
    """The file arrives whole, progress is told, and a second call asks for nothing."""
    seen = []
    path = download(remote(server), tmp_path, progress=lambda *args: seen.append(args))
    assert path == tmp_path / "sub/file.bin"
    assert path.read_bytes() == CONTENT
    assert seen[-1] == ("sub/file.bin", len(CONTENT), len(CONTENT))
    download(remote(server), tmp_path)
    assert server.asked == [None]
    assert [p.name for p in path.parent.iterdir()] == ["file.bin"]


@pytest.mark.parametrize("ranges", [True, False])
def test_resumes(server, tmp_path, ranges):
    """What broke off is kept and goes on from there; a server without ranges starts over."""
    server.stop_after = 100_000
    with pytest.raises(SourceError, match=r"broke off after 100000 of 1280000 bytes.*100000 bytes are kept"):
        download(remote(server), tmp_path)
    assert (tmp_path / "sub/file.bin.part").stat().st_size == 100_000
    server.stop_after, server.ranges = None, ranges
    assert download(remote(server), tmp_path).read_bytes() == CONTENT
    assert server.asked == [None, "bytes=100000-"]


def test_part_that_is_complete_or_too_long(server, tmp_path):
    """A part as long as the file is only checked; a longer one is no part of it."""
    (tmp_path / "sub").mkdir()
    part = tmp_path / "sub/file.bin.part"
    part.write_bytes(CONTENT)
    download(remote(server), tmp_path)
    assert server.asked == []
    (tmp_path / "sub/file.bin").unlink()
    part.write_bytes(CONTENT + b"more")
    assert download(remote(server), tmp_path).read_bytes() == CONTENT
    (tmp_path / "sub/file.bin").unlink()
    part.write_bytes(CONTENT + b"more")  # without a known size the server must say so
    assert download(remote(server, size=None), tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": 5}, r"offers 1280000 bytes, but sub/file.bin has 5"),
        ({"sha256": "0" * 64}, r"has sha256 [0-9a-f]{64}, but it must be 0{64}; it was removed"),
        ({"sha256": None, "md5": "0" * 32}, r"has md5 [0-9a-f]{32}, but it must be 0{32}; it was removed"),
    ],
)
def test_wrong_content_is_not_kept(server, tmp_path, changes, message):
    """Size and checksums are compared; a wrong file is removed, so that the next try does not go on from it."""
    with pytest.raises(SourceError, match=message):
        download(remote(server, **changes), tmp_path)
    assert not (tmp_path / "sub/file.bin").exists()
    part = tmp_path / "sub/file.bin.part"
    assert not part.exists() or part.stat().st_size == 0


def test_wrong_beginning_is_found_out(server, tmp_path):
    """A part of another file gives a wrong checksum, is removed, and the next try is right."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/file.bin.part").write_bytes(b"other" * 100)
    with pytest.raises(SourceError, match="it was removed"):
        download(remote(server), tmp_path)
    assert download(remote(server), tmp_path).read_bytes() == CONTENT


def test_file_that_is_there_but_wrong(server, tmp_path):
    """Somebody else's file is not overwritten."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/file.bin").write_bytes(b"mine")
    with pytest.raises(SourceError, match="has 4 bytes, but it must have 1280000; remove it"):
        download(remote(server), tmp_path)
    assert (tmp_path / "sub/file.bin").read_bytes() == b"mine"


def test_no_network_is_one_honest_sentence(tmp_path):
    """A name that does not resolve, a port that is closed: what to do without a network."""
    dead = Remote("a.bin", ("http://127.0.0.1:9/a.bin", "http://no.such.host.invalid/a.bin"), 5)
    with pytest.raises(SourceError, match=r"a.bin could not be fetched: 127.0.0.1:9 cannot be reached") as caught:
        download(dead, tmp_path, timeout=5)
    text = str(caught.value)
    assert "no.such.host.invalid cannot be reached" in text
    assert "download http://127.0.0.1:9/a.bin elsewhere" in text
    assert "\n" not in text


def test_second_place_is_tried(server, tmp_path):
    """The first place that delivers is enough."""
    good = remote(server)
    both = Remote(good.path, ("http://127.0.0.1:9/x", *good.urls), good.size, good.md5, good.sha256)
    assert download(both, tmp_path).read_bytes() == CONTENT


def test_server_that_refuses(server, tmp_path):
    """Its answer is passed on."""
    server.status = 404
    with pytest.raises(SourceError, match="answered 404 Not Found"):
        download(remote(server), tmp_path)


def test_second_process_waits(server, tmp_path):
    """Two downloads of one file would spoil it."""
    fcntl = pytest.importorskip("fcntl")
    (tmp_path / "sub").mkdir()
    with (tmp_path / "sub/file.bin.part").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(SourceError, match="being downloaded by another process"):
            download(remote(server), tmp_path)


def test_full_disk_is_seen_before(tmp_path):
    """A file that does not fit is not begun; a folder that cannot be is told."""
    with pytest.raises(SourceError, match="bytes free, but"):
        _check_space(Remote("a", (), 1 << 60), tmp_path / "a.part")
    (tmp_path / "file").write_text("x")
    with pytest.raises(SourceError, match="cannot be written"):
        download(Remote("file/a", ("http://127.0.0.1:9/",), 5), tmp_path)


def test_table_of_remotes():
    """Every entry has a checksum of the right length and lands where its loader looks; the rest is by hand."""
    for name, files in REMOTES.items():
        assert name.removesuffix("-python") in FORMATS
        for file in files:
            assert file.md5 is not None
            assert len(file.md5) == 32
            assert file.sha256 is None or len(file.sha256) == 64
            assert all(url.startswith("http") and url.endswith(Path(file.path).name) for url in file.urls)
    for name in ("celeba", "femnist"):
        with pytest.raises(SourceError, match="https://"):
            fetch(name, "anywhere")
        assert name in BY_HAND
    with pytest.raises(SourceError, match="known are cifar10"):
        fetch("imagenet", "anywhere")
