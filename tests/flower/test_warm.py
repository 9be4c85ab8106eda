"""A node goes on trying where Flower's own gives up for ever."""

from __future__ import annotations

import pytest

from metavd.flower.warm import patient

pytest.importorskip("flwr")
httpx = pytest.importorskip("httpx")


@pytest.mark.parametrize(
    ("said", "gives_up"),
    [
        ("[SSL: UNEXPECTED_EOF_WHILE_READING] EOF occurred in violation of protocol (_ssl.c:1006)", False),
        ("_ssl.c:989: The handshake operation timed out", False),
        ("[Errno 104] Connection reset by peer", False),
        ("[Errno 111] Connection refused", False),
        ("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: self-signed certificate (_ssl.c:1006)", True),
        ("[SSL: WRONG_VERSION_NUMBER] wrong version number (_ssl.c:1006)", True),
    ],
)
def test_a_cut_line_is_no_wrong_certificate(said: str, gives_up: bool) -> None:
    """A SuperLink that dies in the middle of a handshake comes back; one with another certificate is another one."""
    assert patient().should_giveup(httpx.ConnectError(said)) is gives_up


@pytest.mark.parametrize(("status", "gives_up"), [(404, True), (503, False)])
def test_refusals_are_flowers_own(status: int, gives_up: bool) -> None:
    """What a SuperLink answers is judged by Flower as before."""
    request = httpx.Request("POST", "https://127.0.0.1/")
    error = httpx.HTTPStatusError("no", request=request, response=httpx.Response(status, request=request))
    assert patient().should_giveup(error) is gives_up
