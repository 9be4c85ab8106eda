"""In a notebook a run without a listener shows a bar; elsewhere it prints what it chose."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from metavd import arrays, run
from metavd.engine.rounds import Silent
from metavd.errors import SpecError
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


def test_elsewhere_choices_go_to_standard_error(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A terminal's IPython, or none, gets no bar: what was chosen, below the run's name; nothing where nothing was."""
    python = ModuleType("IPython")
    python.get_ipython = type("TerminalInteractiveShell", (), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", python)
    run(**SHORT, source=source())
    assert capfd.readouterr() == ("", "")
    net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    rest = {name: value for name, value in SHORT.items() if name != "width"}
    run(**rest, source=source(), module=net)
    assert capfd.readouterr() == ("", "fedavg on arrays, seed 0\n  your network: its output layer is 2\n")
    run(**rest, source=source(), module=net, listener=Silent())
    assert capfd.readouterr() == ("", "")


class Branching(torch.nn.Module):
    """Looks at values, which vmap does not allow."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = torch.nn.Linear(2, 4), torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.body(x)
        return self.head(hidden * 2 if hidden.sum() > 0 else hidden)  # type: ignore[no-any-return]


def test_a_network_that_looks_at_values_trains_in_turn(capfd: pytest.CaptureFixture[str]) -> None:
    """The choice of vmap gives way, and that is said; who asks for vmap is refused in a sentence."""
    rest = {name: value for name, value in SHORT.items() if name != "width"}
    rest |= {"batch": 8, "clients": 3, "unseen": 0, "cohort": 3}
    assert run(**rest, source=source(), module=Branching().requires_grad_(False))["backend"] == "loop"
    said = capfd.readouterr().err
    assert "so they train in turn (backend=loop)" in said
    assert "4 of its tensors have requires_grad=False, but all are trained" in said
    with pytest.raises(SpecError, match="backend is vmap, but your network cannot run for several clients at once"):
        run(**rest, source=source(), module=Branching(), backend="vmap")


def test_a_plot_shows_itself() -> None:
    """A figure that no pyplot made is a PNG for a notebook."""
    assert run(**SHORT, source=source()).plot()._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]
