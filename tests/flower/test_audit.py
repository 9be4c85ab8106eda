"""The audit log: what stands in it, and that nobody changes it unnoticed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from flwr.app import Message, MessageType

from metavd.cli import main
from metavd.flower.audit import FILE, Audit, BrokenAuditError, _sealed, note, verify
from metavd.flower.registry import FILE as REGISTRY

from .support.answers import claims
from .support.grid import FakeGrid, shares
from .test_lies import LIAR, Liar

Lines = list[bytes]


@pytest.fixture
def log(tmp_path: Path) -> Audit:
    """A log of six lines."""
    found = Audit(tmp_path / FILE)
    found.add("early", why="before the folder was there")
    found.open()
    for round in range(1, 6):
        found.add("round", round=round, lost={2: "gone", 10: "late"}, loss=float("nan"))
    return found


def forged(text: bytes, **about: object) -> bytes:
    """A line with other words and a hash that fits them, by somebody who can compute one."""
    values = json.loads(text) | about
    return _sealed({key: value for key, value in values.items() if key != "hash"}).encode()


TAMPERED: dict[str, tuple[Callable[[Lines], Lines], str]] = {
    "changed": (lambda x: [*x[:2], x[2].replace(b'"round": 2', b'"round": 9'), *x[3:]], "line 3 of"),
    "changed at the end": (lambda x: [*x[:5], x[5].replace(b"gone", b"here")], "line 6 of"),
    "changed and sealed again": (lambda x: [*x[:2], forged(x[2], round=9), *x[3:]], "line 4 of .* does not follow"),
    "a blank more": (lambda x: [*x[:2], x[2] + b" ", *x[3:]], "line 3 of"),
    "removed": (lambda x: [*x[:2], *x[3:]], "line 3 of"),
    "the first removed": (lambda x: x[1:], "line 1 of"),
    "removed and numbered again": (
        lambda x: [*x[:2], *(forged(each, line=i) for i, each in enumerate(x[3:], 3))], "line 3 of .* does not follow"
    ),
    "swapped": (lambda x: [x[0], x[2], x[1], *x[3:]], "line 2 of"),
    "one twice": (lambda x: [*x[:3], x[2], *x[3:]], "line 4 of"),
    "put in": (lambda x: [*x[:3], forged(x[3], round=7), *x[3:]], "line 5 of"),
    "emptied": (lambda x: [*x[:2], b"", *x[3:]], "line 3 of"),
    "nested deep": (lambda x: [*x[:2], b"[" * 100_000, *x[3:]], "line 3 of"),
    "no text": (lambda x: [*x[:2], b"\xff\xfe", *x[3:]], "line 3 of"),
    "cut within": (lambda x: [*x[:2], x[2][:40], *x[3:]], "line 3 of"),
}  # fmt: skip


@pytest.mark.parametrize("how", TAMPERED)
def test_a_tampered_log_names_its_first_broken_line(log, how):
    change, why = TAMPERED[how]
    assert verify(log.path, log.head)[:2] == (6, log.head)
    log.path.write_bytes(b"\n".join(change(log.path.read_bytes().splitlines())) + b"\n")
    with pytest.raises(BrokenAuditError, match=why):
        verify(log.path)


def test_what_lacks_at_the_end_is_seen_by_the_head(log):
    """A shorter chain is a chain; only who knows the head can tell. One that has grown does not end with it either."""
    lines = log.path.read_bytes().splitlines(keepends=True)
    log.path.write_bytes(b"".join(lines[:4]))
    assert verify(log.path).lines == 4
    with pytest.raises(BrokenAuditError, match=rf"but the head {log.head} is not in it"):
        verify(log.path, log.head)
    log.path.write_bytes(b"".join(lines))
    old = log.head
    log.add("more")
    with pytest.raises(BrokenAuditError, match="lines were added after it"):
        verify(log.path, old)


def test_a_torn_last_line_is_said_and_the_chain_goes_on(log):
    """As kill -9 leaves it: the lines before hold, the half is cut off, and the next line says so."""
    data = log.path.read_bytes()
    log.path.write_bytes(data + b'{"before": "ab')
    assert verify(log.path, log.head) == verify(log.path)
    assert verify(log.path).torn == 14
    again = Audit(log.path)
    again.open(remembered=log.head)
    again.add("start")
    assert verify(log.path, again.head)[::3] == (8, 0)
    assert [json.loads(line)["event"] for line in log.path.read_text().splitlines()[-2:]] == ["wrong", "start"]
    assert json.loads(log.path.read_text().splitlines()[-2])["torn"] == 14


@pytest.mark.parametrize("how", ["removed", "shortened", "changed"])
def test_a_run_that_goes_on_says_what_is_wrong_with_its_log(log, how):
    """The run does not stop for it, and what was broken stays broken for whoever verifies."""
    lines = log.path.read_bytes().splitlines(keepends=True)
    if how == "removed":
        log.path.unlink()
    else:
        log.path.write_bytes(b"".join(lines[:3]) if how == "shortened" else b"".join(lines[1:]))
    again = Audit(log.path)
    again.open(remembered=log.head)
    again.add("start")
    said = next(line for line in map(json.loads, log.path.read_text().splitlines()) if line["event"] == "wrong")
    assert log.head in said["missing"] if how != "changed" else "line 1 of" in said["broken"]
    if how == "changed":
        with pytest.raises(BrokenAuditError, match="line 1 of"):
            verify(log.path)


def test_a_run_writes_what_happened_and_goes_on_after_a_crash(federate, tmp_path, capsys):
    """Hello, whom it asked, who was refused and why, who is excluded, the model of every round, what operators did."""

    class Crash(BaseException): ...

    def crash(message: Message) -> None:
        if message.metadata.message_type == MessageType.TRAIN and message.metadata.group_id == "4":
            raise Crash

    out = tmp_path / "run"
    grid = Liar(4, claims("metrics", rows=-1))
    grid.before = crash
    settings = {"method": "fedavg", "clients": 4, "rounds": 5}
    with pytest.raises(Crash):
        federate(grid, **settings)
    main(["federate", "rows", str(out), "0", "5000"])
    result = federate(FakeGrid(shares(4)), **settings)
    found = [json.loads(line) for line in (out / FILE).read_text().splitlines()]
    events = [line["event"] for line in found]
    asked = ["ask", "answers", "round"]
    assert events == [
        "start", *["hello"] * 4, *asked * 2, "ask", "answers", "excluded", "round", "ask",
        "rows", "start", *asked * 2, "figures", "end",
    ]  # fmt: skip
    said = [line for line in found if line["event"] == "answers"]
    assert all("rows" in line["refused"][str(LIAR)] or "samples" in line["refused"][str(LIAR)] for line in said[:3])
    assert [sorted(line["accepted"]) for line in said] == [["0", "1", "2"]] * 5
    assert next(line for line in found if line["event"] == "excluded")["client"] == LIAR
    models = [line["model"] for line in found if line["event"] == "round"]
    assert len(set(models)) == 5
    assert models[-1] == result["model_sha256"] == found[-1]["model"]
    assert found[-1]["hash"] == result["audit"] == json.loads((out / "result.json").read_text())["audit"]
    main(["federate", "audit", str(out), "--head", result["audit"]])
    assert f"{len(found)} lines hold together, head {result['audit']}" in capsys.readouterr().out
    (out / FILE).write_text((out / FILE).read_text().replace('"event": "excluded"', '"event": "hello"'))
    with pytest.raises(SystemExit) as end:
        main(["federate", "audit", str(out)])
    assert end.value.code == 1
    assert "is not as it was written" in capsys.readouterr().err
    (out / FILE).unlink()
    with pytest.raises(SystemExit) as end:
        main(["federate", "audit", str(out)])
    assert end.value.code == 2
    assert (out / REGISTRY).exists()


def test_what_an_operator_did_has_a_name(log):
    note(log.path.parent, "rekey", client="north")
    assert {"event": "rekey", "client": "north"}.items() <= json.loads(log.path.read_text().splitlines()[-1]).items()
    assert verify(log.path).lines == 7
