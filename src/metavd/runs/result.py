"""What a run gives back: the content of result.json, its rounds, its clients, their models, a picture."""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..engine.rounds import Record, Silent
from ..extras import need
from .store import Store

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import nn

    from ..core.types import Model, ServerState
    from ..evaluate.metrics import ClientResult

Row = dict[str, Any]
_SHOWN = 30
"""Rows of a table that a notebook shows."""
_PARTS = (("test", "participating"), ("unseen", "never seen"))
_FIGURES = (
    "test", "unseen", "gap", "gap_interval", "sparsity", "diagnostics", "valid", "tempered", "valid_unseen", "domains",
    "sampled",
)  # fmt: skip
"""What an evaluation on the way leaves in its round's row; the last one is the result itself."""


class RowList(list[Row]):
    """A table, a mapping for each row; a notebook shows it as one, and `.frame()` is it as a pandas DataFrame."""

    def frame(self) -> Any:
        """Return the rows as a pandas DataFrame."""
        return need("pandas", "", "a frame").DataFrame(list(self))

    def _repr_html_(self) -> str:
        names = list(dict.fromkeys(name for row in self for name in row if not isinstance(row[name], dict | list)))
        shown = self[:_SHOWN]
        head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
        body = "".join(f"<tr>{''.join(f'<td>{_cell(row.get(name))}</td>' for name in names)}</tr>" for row in shown)
        more = f"<p>{len(self) - len(shown)} more rows</p>" if len(self) > len(shown) else ""
        return f"<table><tr>{head}</tr>{body}</table>{more}"


def _cell(value: Any) -> str:
    """Return a cell as HTML: a number in four digits, nothing where there is none."""
    return "" if value is None else html.escape(f"{value:.4g}" if isinstance(value, float) else str(value))


class Result(dict[str, Any]):
    """A run's result, a mapping as result.json: `result["test"]["accuracy"]`; and what else is known of the run."""

    def __init__(
        self,
        values: Mapping[str, Any],
        history: Callable[[], list[Row]],
        clients: Callable[[], list[Row]],
        personal: Callable[..., Any],
    ) -> None:
        super().__init__(values)
        self._history, self._clients, self._personal = history, clients, personal

    @property
    def history(self) -> RowList:
        """A row for each round: who took part, loss, traffic; and the figures where it was evaluated."""
        rows = self._history()
        last = {name: self[name] for name in _FIGURES if name in self}
        if not rows or self["tested_round"] != rows[-1]["round"]:
            return RowList(rows)
        return RowList([*rows[:-1], _unevaluated(rows[-1]) | last])

    @property
    def clients(self) -> RowList:
        """A row for each client: its name where it has one, whether it is unseen, its sizes and figures."""
        # A client's name stays a text, whatever it looks like.
        return RowList(
            {key: value if key == "name" else _value(value) for key, value in row.items()} for row in self._clients()
        )

    def clients_frame(self) -> Any:
        """Return the clients as a pandas DataFrame."""
        return self.clients.frame()

    def model(self, client: str | int | None = None) -> Any:
        """Return the model of one of the run's clients, by name or number; by default what a new client receives.

        It is a `metavd.Personal`: `.predict(x)` answers rows, `.save(folder)` keeps it.
        """
        return self._personal(client=client)

    def plot(self) -> Figure:
        """Return a matplotlib figure: loss by rounds, and accuracy where it was evaluated."""
        from matplotlib.figure import Figure  # noqa: PLC0415 (a second)

        class Picture(Figure):  # a notebook shows a figure that pyplot did not make only so
            def _repr_png_(self) -> bytes:
                file = io.BytesIO()
                self.savefig(file, format="png", dpi=110)
                return file.getvalue()

        figure = Picture(figsize=(8.0, 3.2), layout="constrained")
        left, right = figure.subplots(1, 2)
        rows = [row for row in self.history if row["loss"] is not None]
        left.plot([row["round"] for row in rows], [row["loss"] for row in rows])
        left.set(xlabel="round", ylabel="training loss")
        for part, name in _PARTS:
            points = [
                (row["round"], row[part]["accuracy"])
                for row in self.history
                if part in row and row[part]["accuracy"] is not None
            ]
            if points:
                right.plot(*zip(*points, strict=True), marker="o", label=name)
        right.set(xlabel="round", ylabel="accuracy")
        if right.lines:
            right.legend()
        figure.suptitle(f"{self['method']} on {self['data']}, seed {self['seed']}")
        return figure

    def __repr__(self) -> str:
        figures = ", ".join(f"{name} {accuracy}" for name, accuracy, _ in self._lines())
        warned = f", {len(self['warnings'])} warning" if self.get("warnings") else ""
        return f"<Result of {self['method']} on {self['data']}, {self['rounds']} rounds: {figures}{warned}>"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{name}</td><td>{accuracy}</td><td>{nll}</td></tr>" for name, accuracy, nll in self._lines()
        )
        title = html.escape(f"{self['method']} on {self['data']}, {self['rounds']} rounds, seed {self['seed']}")
        warned = "".join(f"<p><b>{html.escape(text)}</b></p>" for text in self.get("warnings", ()))
        head = "<tr><th>clients</th><th>accuracy</th><th>NLL</th></tr>"
        return f"<table><caption>{title}</caption>{head}{rows}</table>{warned}"

    def _lines(self) -> list[tuple[str, str, str]]:
        return [
            (name, f"{self[part]['accuracy']:.1%}", f"{self[part]['nll']:.3f}")
            for part, name in _PARTS
            if self[part]["accuracy"] is not None
        ]

    def __reduce__(self) -> tuple[type, tuple[dict[str, Any]]]:
        """Travel to other processes as the plain content: what else is known stays where the run was."""
        return dict, (dict(self),)


def _unevaluated(row: Row) -> Row:
    """Leave the figures of an earlier evaluation out of a round's row: it may have tested other clients."""
    return {name: value for name, value in row.items() if name not in _FIGURES}


def _value(value: Any) -> Any:
    """Return what a cell of clients.csv stands for."""
    if value == "":
        return None
    for kind in (int, float):
        try:
            return kind(value) if isinstance(value, str) else value
        except ValueError:
            continue
    return value


def stored(store: Store, values: Mapping[str, Any], **given: Any) -> Result:
    """Return the result of a run in a folder, which is read when it is asked; `given` is what `run` was handed over."""

    def personal(client: str | int | None) -> Any:
        return _serve().personalize(store.folder, client=client, **given)

    return Result(values, store.read_rounds, store.read_clients, personal)


class Memory(Silent):
    """Listens to a run that writes no files, and remembers what they would hold."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.state: ServerState | None = None
        self.results: list[ClientResult] = []

    def round(self, record: Record) -> None:
        """Remember a round."""
        self.rows.append(record.line())

    def evaluation(self, round: int, summary: Mapping[str, Any]) -> None:
        """Remember an evaluation, in its round's row."""
        if self.rows and round == self.rows[-1]["round"]:
            self.rows[-1] = _unevaluated(self.rows[-1]) | dict(summary)

    def tested(self, state: ServerState, results: list[ClientResult]) -> None:
        """Remember the last state that was tested."""
        self.state, self.results = state, results

    def result(
        self, values: Mapping[str, Any], setup: Any, module: nn.Module | Model | None, lines: Callable[..., list[Row]]
    ) -> Result:
        """Return the result of the run."""

        def personal(client: str | int | None) -> Any:
            # The state holds all weights by now; see `serve.personal.open_run`.
            own = replace(setup, experiment=replace(setup.experiment, weights=""))
            trained = _serve().TrainedRun(None, own, self.state, dict(values), module)
            return _serve().personalize(trained, client=client)

        return Result(values, lambda: list(self.rows), lambda: lines(self.results, setup.pool.federation), personal)


def _serve() -> Any:
    """Return `serve.personal`, which stands above this package and is only asked for by a result."""
    return import_module("...serve.personal", __name__)
