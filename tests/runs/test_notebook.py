"""In a notebook a run without a listener shows a bar; elsewhere it is silent."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from metavd import arrays, run
from metavd.engine.rounds import Silent
from metavd.runs.notebook import listener
from metavd.studies.compare import compare

SHORT: dict[str, Any] = {"method": "fedavg", "rounds": 3, "eval_every": 2, "local_epochs": 1, "width": 4}


class ZMQInteractiveShell:
    """What a notebook's kernel says it is."""


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The pictures of each bar, in an IPython that a notebook's kernel would have."""
    bars: list[list[str]] = []

    def display(picture: str, *, display_id: bool) -> Any:
        assert display_id
        bars.append([picture])
        return type("Handle", (), {"update": staticmethod(bars[-1].append)})

    python, drawing = ModuleType("IPython"), ModuleType("IPython.display")
    python.get_ipython = ZMQInteractiveShell  # type: ignore[attr-defined]
    drawing.display, drawing.HTML = display, str  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", python)
    monkeypatch.setitem(sys.modules, "IPython.display", drawing)
    return bars


def source() -> Any:
    return arrays([[float(i % 2), float(i)] for i in range(40)], ["<b>"[i % 2 :] for i in range(40)])


def test_a_bar_goes_from_the_first_round_to_the_last(shown: list[list[str]], tmp_path: Any) -> None:
    """It begins at 0, ends at all rounds with the figures, holds what was chosen, escaped; each run has its own."""
    result = run(**SHORT, source=source())
    assert shown[0][0].startswith('<progress value="0" max="3">')
    assert shown[0][-1].startswith('<progress value="3" max="3">')
    assert f"test {result['test']['accuracy']:.1%}" in shown[0][-1]
    compare(["fedavg"], seeds=2, out=tmp_path, source=source(), **{k: v for k, v in SHORT.items() if k != "method"})
    assert [bar[-1].partition("seed ")[2][0] for bar in shown] == ["0", "0", "1"]


def test_a_note_is_text(shown: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    """What a run says stands below the bar, escaped, or is printed before there is one."""
    bar = listener()
    bar.note("before")
    assert capsys.readouterr().out == "before\n"
    bar.start(type("E", (), {"method": "m", "data": "<i>", "seed": 0, "rounds": 9}), 4)
    bar.note("<script>")
    assert "&lt;script&gt;" in shown[0][-1]
    assert "&lt;i&gt;" in shown[0][-1]
    assert 'value="4" max="9"' in shown[0][-1]


def test_elsewhere_a_run_is_silent(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal's IPython, or none, gets no bar; nothing is printed."""
    assert isinstance(listener(), Silent)
    python = ModuleType("IPython")
    python.get_ipython = type("TerminalInteractiveShell", (), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", python)
    run(**SHORT, source=source())
    assert capfd.readouterr() == ("", "")


def test_a_plot_shows_itself() -> None:
    """A figure that no pyplot made is a PNG for a notebook."""
    assert run(**SHORT, source=source()).plot()._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]
